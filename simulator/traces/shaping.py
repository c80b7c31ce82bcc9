"""Fitting a trace to a fleet: slice, scale, clip, deal to services, sum up. All functions are pure."""

from __future__ import annotations

import bisect
import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence

from simulator.traces.generators import Curve
from simulator.traces.model import MeanDemand, TraceError, TraceRequest

_COPY_JITTER_S = 1.0


def take_slice(requests: Iterable[TraceRequest], *, start_s: float, duration_s: float) -> list[TraceRequest]:
    """Requests of `[start_s, start_s + duration_s)`, with arrivals from 0. Reads no further than it must.

    Raises ValueError for an impossible slice.
    """
    if start_s < 0 or duration_s <= 0:
        raise ValueError(f"a slice needs start ≥ 0 and duration > 0, not {start_s} and {duration_s}")
    end_s = start_s + duration_s
    taken = []
    for request in requests:
        if request.arrival_s >= end_s:
            break
        if request.arrival_s >= start_s:
            taken.append(dataclasses.replace(request, arrival_s=request.arrival_s - start_s))
    return taken


def busiest_start_s(requests: Sequence[TraceRequest], *, duration_s: float, step_s: float = 10.0) -> float:
    """Start of the slice with the most tokens, on a grid of `step_s`; the first of equals.

    Raises ValueError for an empty trace.
    """
    if not requests:
        raise ValueError("an empty trace has no busiest slice")
    arrivals = [request.arrival_s for request in requests]
    totals = [0]
    for request in requests:
        totals.append(totals[-1] + request.prompt_tokens + request.output_tokens)
    last_s = max(0.0, arrivals[-1] - duration_s)
    best_s, best = 0.0, -1
    for step in range(math.floor(last_s / step_s) + 1):
        start_s = step * step_s
        first = bisect.bisect_left(arrivals, start_s)
        end = bisect.bisect_left(arrivals, start_s + duration_s)
        if totals[end] - totals[first] > best:
            best_s, best = start_s, totals[end] - totals[first]
    return best_s


def scale_rate(requests: Sequence[TraceRequest], factor: float, *, seed: int) -> list[TraceRequest]:
    """`factor` times as many requests with the same rate curve.

    Below 1 requests are dropped at random; above 1 each is repeated, with copies up to a second later, so that bursts
    grow with the rate and no two arrive at one instant. Raises ValueError for a factor beyond (0, 10,000].
    """
    if not 0 < factor <= 10_000:
        raise ValueError(f"factor must be above 0 and at most 10,000, not {factor}")
    source = random.Random(f"{seed}/scale")
    whole = math.floor(factor)
    scaled = []
    for request in requests:
        copies = whole + (source.random() < factor - whole)
        for copy in range(copies):
            delay_s = 0.0 if copy == 0 else source.random() * _COPY_JITTER_S
            scaled.append(dataclasses.replace(request, arrival_s=request.arrival_s + delay_s))
    return sorted(scaled, key=lambda request: (request.arrival_s, request.service))


def thin(requests: Sequence[TraceRequest], level: Sequence[Curve], *, seed: int) -> list[TraceRequest]:
    """Drop requests at random so that the rate follows the sum of `level`, which at its highest keeps them all.

    Without any curve nothing is dropped. Raises ValueError for a level of 0 throughout.
    """
    if not level:
        return list(requests)
    # Piecewise linear curves have their maximum, and so has their sum, at one of their points.
    top = max(sum(curve.at(time_s) for curve in level) for one in level for time_s, _ in one.points)
    if top <= 0:
        raise ValueError("the level is zero throughout")
    source = random.Random(f"{seed}/thin")
    return [r for r in requests if source.random() * top < sum(curve.at(r.arrival_s) for curve in level)]


def clip_lengths(
    requests: Sequence[TraceRequest], *, max_prompt_tokens: int, max_output_tokens: int
) -> tuple[list[TraceRequest], int]:
    """Requests no longer than the limits, and how many had to be shortened."""
    clipped = [
        dataclasses.replace(
            request,
            prompt_tokens=min(request.prompt_tokens, max_prompt_tokens),
            output_tokens=min(request.output_tokens, max_output_tokens),
        )
        for request in requests
    ]
    return clipped, sum(before != after for before, after in zip(requests, clipped, strict=True))


def deal(requests: Sequence[TraceRequest], shares: Mapping[str, Curve], *, seed: int) -> list[TraceRequest]:
    """Give each request to a service, at random by the services' shares at its arrival (any non-negative weights).

    Raises ValueError where no service has a share.
    """
    if not shares:
        raise ValueError("there is no service to deal to")
    names = sorted(shares)
    source = random.Random(f"{seed}/deal")
    dealt = []
    for request in requests:
        weights = [shares[name].at(request.arrival_s) for name in names]
        total = sum(weights)
        if total <= 0:
            raise ValueError(f"no service has a share at {request.arrival_s:.3f} s")
        mark = source.random() * total
        chosen = names[-1]
        for name, weight in zip(names, weights, strict=True):
            mark -= weight
            if mark < 0:
                chosen = name
                break
        dealt.append(dataclasses.replace(request, service=chosen))
    return dealt


def mean_demand(requests: Sequence[TraceRequest], *, duration_s: float) -> dict[str, MeanDemand]:
    """Averages per service over `duration_s`, by name: what a static split is made by.

    Raises ValueError unless the duration is positive.
    """
    if duration_s <= 0:
        raise ValueError(f"duration_s must be positive, not {duration_s}")
    sums: dict[str, list[int]] = {}
    for request in requests:
        row = sums.setdefault(request.service, [0, 0, 0])
        row[0] += 1
        row[1] += request.prompt_tokens
        row[2] += request.output_tokens
    return {
        service: MeanDemand(row[0] / duration_s, row[1] / duration_s, row[2] / duration_s)
        for service, row in sorted(sums.items())
    }


def peak_output_tps(requests: Sequence[TraceRequest], *, window_s: float = 5.0) -> float:
    """Largest number of requested output tokens per second, over windows of `window_s`."""
    windows: dict[int, int] = {}
    for request in requests:
        index = int(request.arrival_s // window_s)
        windows[index] = windows.get(index, 0) + request.output_tokens
    return max(windows.values(), default=0) / window_s


def static_split(
    demand_gpus: Mapping[str, float],
    footprint_gpus: Mapping[str, int],
    *,
    budget_gpus: int,
    floor_replicas: int = 1,
) -> dict[str, int]:
    """Replicas per service in proportion to `demand_gpus`, within the budget.

    Every service gets its floor; after that each replica goes to the service that would have the least GPUs per demand
    with half of it (Sainte-Laguë's rule), among those whose next replica still fits. Raises `TraceError` when the
    floors alone do not fit.
    """
    names = sorted(footprint_gpus)
    replicas = dict.fromkeys(names, floor_replicas)
    left_gpus = budget_gpus - sum(floor_replicas * footprint_gpus[name] for name in names)
    if left_gpus < 0:
        raise TraceError(f"{budget_gpus} GPUs cannot hold {floor_replicas} replicas of each of {', '.join(names)}")
    while True:
        fitting = [name for name in names if footprint_gpus[name] <= left_gpus and demand_gpus.get(name, 0.0) > 0]
        if not fitting:
            return replicas
        chosen = min(
            fitting, key=lambda name: ((replicas[name] + 0.5) * footprint_gpus[name] / demand_gpus[name], name)
        )
        replicas[chosen] += 1
        left_gpus -= footprint_gpus[chosen]
