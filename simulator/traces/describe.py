"""A trace in figures: rates, burstiness and lengths, in one pass that holds counts and not requests."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

from simulator.traces.model import TraceError, TraceRequest


@dataclasses.dataclass(frozen=True, slots=True)
class LengthFigures:
    """Of one kind of length, in tokens. Percentiles are the smallest value with that share at or below it."""

    mean: float
    p50: int
    p95: int
    p99: int
    max: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """A trace's shape. Rates over full windows only; what needs a full window or two gaps is None without them."""

    requests: int
    duration_s: float
    """From the start to the last arrival."""
    window_s: float
    mean_rps: float
    peak_rps: float | None
    least_rps: float | None
    empty_windows: float | None
    """Share of the windows in which nothing arrives."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals."""
    prompt: LengthFigures
    output: LengthFigures
    requests_by_service: Mapping[str, int]

    @property
    def peak_to_mean(self) -> float | None:
        """Busiest window over the mean of all."""
        return None if self.peak_rps is None or self.mean_rps <= 0 else self.peak_rps / self.mean_rps

    @property
    def peak_to_least(self) -> float | None:
        """Busiest window over the quietest; infinite where one is empty."""
        if self.peak_rps is None or self.least_rps is None:
            return None
        return math.inf if self.least_rps == 0 else self.peak_rps / self.least_rps


def describe(requests: Iterable[TraceRequest], *, window_s: float = 10.0) -> TraceFigures:
    """The figures of a trace. Raises `TraceError` for one without requests, or one that goes back in time."""
    if not window_s > 0:
        raise ValueError(f"window_s must be above 0, not {window_s}")
    prompts: collections.Counter[int] = collections.Counter()
    outputs: collections.Counter[int] = collections.Counter()
    services: collections.Counter[str] = collections.Counter()
    windows: collections.Counter[int] = collections.Counter()
    last_s: float | None = None
    gaps = gap_sum = gap_squares = 0.0
    for request in requests:
        prompts[request.prompt_tokens] += 1
        outputs[request.output_tokens] += 1
        services[request.service] += 1
        windows[int(request.arrival_s // window_s)] += 1
        if last_s is not None:
            gap_s = request.arrival_s - last_s
            if gap_s < 0:
                raise TraceError(f"the trace goes back in time at {request.arrival_s:.3f} s")
            gaps += 1
            gap_sum += gap_s
            gap_squares += gap_s * gap_s
        last_s = request.arrival_s
    if last_s is None:
        raise TraceError("the trace has no requests")
    count = services.total()
    full = int(last_s // window_s)
    rates = [windows[index] / window_s for index in range(full)]
    return TraceFigures(
        requests=count,
        duration_s=last_s,
        window_s=window_s,
        mean_rps=count / last_s if last_s > 0 else float(count),
        peak_rps=max(rates, default=None),
        least_rps=min(rates, default=None),
        empty_windows=rates.count(0.0) / full if full else None,
        gap_cv=_cv(gaps, gap_sum, gap_squares),
        prompt=_lengths(prompts),
        output=_lengths(outputs),
        requests_by_service=dict(sorted(services.items())),
    )


def _cv(count: float, total: float, squares: float) -> float | None:
    if count < 2 or total <= 0:
        return None
    mean = total / count
    return math.sqrt(max(0.0, squares / count - mean * mean)) / mean


def _lengths(counts: Mapping[int, int]) -> LengthFigures:
    ordered = sorted(counts.items())
    total = sum(counts.values())

    def percentile(share: float) -> int:
        reached = 0
        for value, number in ordered:
            reached += number
            if reached >= share * total:
                return value
        return ordered[-1][0]

    mean = sum(value * number for value, number in ordered) / total
    return LengthFigures(mean, percentile(0.5), percentile(0.95), percentile(0.99), ordered[-1][0])
