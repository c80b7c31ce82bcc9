"""Sums of iteration times in closed form, for batches that only decode.

In a run of iterations with `m` decoding sequences the KV they read grows by `m` tokens an iteration; nothing else
changes. The iteration model is linear in the KV tokens over ranges (its floors and maxima have their knees between
them), so the time of n iterations is a sum of arithmetic series. The ranges are found by probing `iteration_s`, so
that they follow whatever form the model has; a model that is not piecewise linear in KV tokens is refused.
"""

from __future__ import annotations

import dataclasses
import math

from simulator.core.timing import BatchWork, IterationModel

_TOLERANCE = 1e-12
_MAX_PIECES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """`iteration_s = start_s + slope_s · (kv − from_kv)` up to the next piece's `from_kv`."""

    from_kv: int
    to_kv: int
    start_s: float
    slope_s: float

    def at(self, kv_tokens: int) -> float:
        return self.start_s + self.slope_s * (kv_tokens - self.from_kv)


class DecodeCurve:
    """Iteration time by KV tokens for one number of decoding sequences."""

    __slots__ = ("_pieces", "_seqs")

    def __init__(self, timing: IterationModel, decode_seqs: int, max_kv_tokens: int) -> None:
        self._seqs = decode_seqs
        # Powers of two make every difference of bounds exact, and so the slope.
        top = 1 << max(1, (max_kv_tokens + decode_seqs).bit_length())
        self._pieces = _split(timing, decode_seqs, 0, top)

    def total_s(self, kv_tokens: int, steps: int) -> float:
        """Seconds of `steps` iterations, the first of which reads `kv_tokens`."""
        pieces = self._pieces
        if len(pieces) == 1:
            only = pieces[0]
            first_s = only.start_s + only.slope_s * kv_tokens
            return steps * first_s + only.slope_s * (self._seqs * (steps * (steps - 1) // 2))
        total_s = 0.0
        for piece in pieces:
            if steps <= 0:
                break
            if kv_tokens >= piece.to_kv:
                continue
            inside = min(steps, -((kv_tokens - piece.to_kv) // self._seqs))
            total_s += inside * piece.at(kv_tokens) + piece.slope_s * (self._seqs * (inside * (inside - 1) // 2))
            steps -= inside
            kv_tokens += inside * self._seqs
        return total_s

    def steps_until(self, kv_tokens: int, seconds: float, at_most: int) -> int:
        """The fewest iterations, at least 1, that take `seconds` or more; `at_most` when all of those take less."""
        if at_most <= 1 or seconds <= 0:
            return 1
        first_s = self.total_s(kv_tokens, 1)
        last_s = self.total_s(kv_tokens + (at_most - 1) * self._seqs, 1)
        if len(self._pieces) > 1:
            return self._bisect(kv_tokens, seconds, at_most)
        # n · first + a · n · (n − 1) = seconds with a = half the growth an iteration.
        half_s = (last_s - first_s) / (2 * (at_most - 1))
        linear_s = first_s - half_s
        guess = 2 * seconds / (linear_s + math.sqrt(linear_s * linear_s + 4 * half_s * seconds))
        steps = min(at_most, max(1, math.ceil(guess)))
        while steps > 1 and self.total_s(kv_tokens, steps - 1) >= seconds:
            steps -= 1
        while steps < at_most and self.total_s(kv_tokens, steps) < seconds:
            steps += 1
        return steps

    def _bisect(self, kv_tokens: int, seconds: float, at_most: int) -> int:
        low, high = 1, at_most
        while low < high:
            middle = (low + high) // 2
            if self.total_s(kv_tokens, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low


def _split(timing: IterationModel, seqs: int, low: int, high: int) -> list[_Piece]:
    """Pieces of [low, high), halved until each is linear."""

    def at(kv_tokens: int) -> float:
        return timing.iteration_s(BatchWork(0, seqs, kv_tokens, 0.0))

    start_s, end_s, width = at(low), at(high), high - low
    slope_s = (end_s - start_s) / width
    probes = {low + width * part // 4 for part in (1, 2, 3)} - {low}
    tolerance_s = _TOLERANCE * max(start_s, end_s)
    if all(abs(start_s + slope_s * (probe - low) - at(probe)) <= tolerance_s for probe in probes):
        return [_Piece(low, high, start_s, slope_s)]
    middle = (low + high) // 2
    pieces = _merged(_split(timing, seqs, low, middle) + _split(timing, seqs, middle, high))
    if len(pieces) > _MAX_PIECES:
        raise ValueError(f"the iteration time of {seqs} sequences is not piecewise linear in the KV tokens")
    return pieces


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        # The slope of the wider of two pieces of one line is the better known one.
        wider = last if last.to_kv - last.from_kv >= piece.to_kv - piece.from_kv else piece
        start_s = piece.start_s - wider.slope_s * (piece.from_kv - last.from_kv)
        end_s = piece.start_s + wider.slope_s * (piece.to_kv - piece.from_kv)
        same = abs(start_s - last.start_s) <= _TOLERANCE * last.start_s and (
            abs(end_s - piece.at(piece.to_kv)) <= _TOLERANCE * end_s
        )
        if same:
            merged[-1] = _Piece(last.from_kv, piece.to_kv, last.start_s, wider.slope_s)
        else:
            merged.append(piece)
    return merged


class DecodeCurves:
    """The curves of one iteration model, made on first use; engines with the same model can share them."""

    def __init__(self, timing: IterationModel, max_kv_tokens: int) -> None:
        self.timing = timing
        self._max_kv_tokens = max_kv_tokens
        self._by_seqs: dict[int, DecodeCurve] = {}

    def of(self, decode_seqs: int) -> DecodeCurve:
        """The curve of a batch of `decode_seqs` decoding sequences."""
        curve = self._by_seqs.get(decode_seqs)
        if curve is None:
            curve = self._by_seqs[decode_seqs] = DecodeCurve(self.timing, decode_seqs, self._max_kv_tokens)
        return curve
