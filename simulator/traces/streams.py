"""Seeded streams of requests: a rate over time, a law of gaps and two laws of lengths, merged without holding them.

Arrivals are a renewal process in the rate's own time: gaps of mean 1 are summed, and each sum is taken to the moment at
which that many requests were due. Exponential gaps give the Poisson process of that rate, others the same rate with
other burstiness. Every stream draws from a generator of its own, so that a change to one leaves the others alone.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from simulator.traces.generators import Curve
from simulator.traces.lengths import Floats, GapLaw, LengthLaw
from simulator.traces.model import TraceRequest
from simulator.traces.seeding import generator

MAX_DURATION_S = 30 * 86_400.0
_CHUNK = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class GammaGaps:
    """Gaps with this coefficient of variation: 1 is a Poisson process, more is bursty, 0 is a clock."""

    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.cv <= 100:
            raise ValueError(f"cv must be from 0 to 100, not {self.cv}")

    def sample_gaps(self, source: np.random.Generator, count: int) -> Floats:
        """`count` gaps with mean 1."""
        if self.cv == 0:
            return np.ones(count)
        shape = 1.0 / self.cv**2
        return source.gamma(shape, 1.0 / shape, count)


POISSON = GammaGaps(1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Requests of one kind for one service. Name and service together seed it, so they must be unique."""

    service: str
    name: str = "requests"
    request_rps: Curve
    prompt: LengthLaw
    output: LengthLaw
    gaps: GapLaw = POISSON


class _Due:
    """How many requests are due by when, for a piecewise linear rate over `[0, duration_s)`, and the inverse."""

    def __init__(self, curve: Curve, duration_s: float) -> None:
        points = [(0.0, curve.at(0.0))]
        points += [(time_s, rate) for time_s, rate in curve.points if 0 < time_s < duration_s]
        last_s = curve.points[-1][0]
        # The value before a jump at the very end counts; after it there is nothing.
        end = next((rate for time_s, rate in curve.points if time_s == duration_s), None)
        points.append((duration_s, curve.at(min(duration_s, last_s)) if end is None else end))
        self._time_s = np.array([time_s for time_s, _ in points])
        self._rate = np.array([rate for _, rate in points])
        widths = np.diff(self._time_s)
        self._due = np.concatenate(([0.0], np.cumsum(widths * (self._rate[:-1] + self._rate[1:]) / 2)))
        self._slope = np.divide(np.diff(self._rate), widths, out=np.zeros_like(widths), where=widths > 0)

    @property
    def total(self) -> float:
        """Requests due over the whole duration."""
        return float(self._due[-1])

    def when(self, due: Floats) -> Floats:
        """The times at which so many are due; all below `total`."""
        segment = np.clip(np.searchsorted(self._due, due, side="right") - 1, 0, len(self._slope) - 1)
        left = due - self._due[segment]
        rate, slope = self._rate[segment], self._slope[segment]
        # The root of rate·x + slope·x²/2 = left that stays exact where the slope is small.
        root = rate + np.sqrt(np.maximum(rate * rate + 2 * slope * left, 0.0))
        offset = np.divide(2 * left, root, out=np.zeros_like(left), where=root > 0)
        times: Floats = self._time_s[segment] + offset
        return times


def _requests(stream: Stream, duration_s: float, source: np.random.Generator) -> Iterator[TraceRequest]:
    due = _Due(stream.request_rps, duration_s)
    reached = last_s = 0.0
    while True:
        sums = reached + np.cumsum(stream.gaps.sample_gaps(source, _CHUNK))
        prompts = stream.prompt.sample(source, _CHUNK).tolist()
        outputs = stream.output.sample(source, _CHUNK).tolist()
        reached = float(sums[-1])
        inside = sums[sums < due.total]
        for time_s, prompt, output in zip(due.when(inside).tolist(), prompts, outputs, strict=False):
            # Rounding may put the inverse a hair before the one above, or onto the end.
            last_s = max(last_s, time_s)
            if last_s < duration_s:
                yield TraceRequest(last_s, stream.service, prompt, output)
        if reached >= due.total:
            return


def arrival_order(request: TraceRequest) -> tuple[float, str]:
    """What requests of a trace are sorted by."""
    return request.arrival_s, request.service


def requests_of(streams: Sequence[Stream], *, duration_s: float, seed: int) -> Iterator[TraceRequest]:
    """Requests of all streams over `[0, duration_s)`, by arrival; memory does not grow with the duration.

    Raises ValueError for an impossible duration or two streams of one name.
    """
    if not 0 < duration_s <= MAX_DURATION_S:
        raise ValueError(f"duration_s must be above 0 and at most {MAX_DURATION_S:g}, not {duration_s}")
    names = [(stream.service, stream.name) for stream in streams]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two streams of {twice[0]} are named {twice[1]}; they would draw the same numbers")
    ordered = sorted(streams, key=lambda stream: (stream.service, stream.name))
    return heapq.merge(
        *(_requests(s, duration_s, generator(seed, "stream", s.service, s.name)) for s in ordered), key=arrival_order
    )
