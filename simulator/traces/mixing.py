"""Cutting, scaling and mixing traces as they stream by: nothing is held, order is kept."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from simulator.traces.generators import Curve
from simulator.traces.model import TraceRequest
from simulator.traces.seeding import generator
from simulator.traces.streams import arrival_order


def compress_time(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """`factor` times the rate by gaps that many times shorter: bursts keep their form, the trace gets shorter.

    Raises ValueError for a factor beyond (0, 1,000,000].
    """
    if not 0 < factor <= 1e6:
        raise ValueError(f"factor must be above 0 and at most 1,000,000, not {factor}")
    return (dataclasses.replace(request, arrival_s=request.arrival_s / factor) for request in requests)


def scale_lengths(
    requests: Iterable[TraceRequest], *, prompt: float = 1.0, output: float = 1.0
) -> Iterator[TraceRequest]:
    """Lengths times a factor each, rounded, at least 1. Raises ValueError for factors beyond (0, 1,000]."""
    if not (0 < prompt <= 1000 and 0 < output <= 1000):
        raise ValueError(f"factors must be above 0 and at most 1,000, not {prompt} and {output}")
    return (
        dataclasses.replace(
            request,
            prompt_tokens=max(1, round(request.prompt_tokens * prompt)),
            output_tokens=max(1, round(request.output_tokens * output)),
        )
        for request in requests
    )


def mix(traces: Mapping[str, Iterable[TraceRequest]]) -> Iterator[TraceRequest]:
    """Several traces at once, each as one service under the name that it is given."""
    return heapq.merge(*(_renamed(traces[name], name) for name in sorted(traces)), key=arrival_order)


def _renamed(requests: Iterable[TraceRequest], service: str) -> Iterator[TraceRequest]:
    return (dataclasses.replace(request, service=service) for request in requests)


def zipf_weights(count: int, exponent: float) -> tuple[float, ...]:
    """Shares by rank, largest first, that add up to 1: rank r has weight r^-exponent.

    Raises ValueError for no ranks or an exponent beyond 0 to 10.
    """
    if count < 1 or not 0 <= exponent <= 10:
        raise ValueError(f"needs at least one rank and an exponent from 0 to 10, not {count} and {exponent}")
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def moving_popularity(
    names: Sequence[str], *, exponent: float, duration_s: float, hold_s: float, shift_s: float, seed: int
) -> dict[str, Curve]:
    """Shares of Zipf's law whose ranks move: every `hold_s` another name rises to the top within `shift_s`.

    The name that rises is drawn among the others; those it passes fall by one rank. At any time the shares add up to 1.
    For `shaping.deal`, or as rates when multiplied (`Curve.scaled`). Raises ValueError for repeated names and
    impossible times.
    """
    if len(set(names)) < len(names) or not names:
        raise ValueError("needs names that differ, at least one")
    if not 0 < shift_s <= hold_s:
        raise ValueError(f"a shift of {shift_s} s must take some time and fit into {hold_s} s")
    if not 0 < duration_s / hold_s <= 100_000:
        raise ValueError(f"{duration_s} s must hold from 1 to 100,000 shifts of {hold_s} s")
    weights = zipf_weights(len(names), exponent)
    source = generator(seed, "popularity")
    ranks = sorted(names)
    source.shuffle(ranks)
    points: dict[str, list[tuple[float, float]]] = {name: [(0.0, weights[ranks.index(name)])] for name in names}
    for turn in range(1, math.ceil(duration_s / hold_s)):
        if len(ranks) == 1:
            break
        before = {name: weights[rank] for rank, name in enumerate(ranks)}
        risen = ranks.pop(int(source.integers(1, len(ranks))))
        ranks.insert(0, risen)
        after = {name: weights[rank] for rank, name in enumerate(ranks)}
        for name in names:
            if before[name] != after[name]:
                points[name] += [(turn * hold_s, before[name]), (turn * hold_s + shift_s, after[name])]
    return {name: Curve(tuple(points[name])) for name in names}
