"""One run in figures: what its clients saw, service by service and over all, and what it cost.

Shares are of all requests of the trace. A request that was lost, or that the run's end cut off, is within no target and
is never counted as a latency: a policy that drops its slow requests gets no better latencies for it without paying in
attainment. Their number is given beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lab.evaluation.histogram import Histogram
from lab.evaluation.statistics import Distribution, Slo
from lab.virtual.result import Floats, RequestColumns, RunResult, TimelinePoint

ALL = "all"
"""What the sum over all services is called."""
LATENCIES = ("e2e", "ttft", "tpot")
_TIMELINE_POINTS = 600


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Case:
    """One run of a suite."""

    policy: str
    trace: str
    seed: int

    def __str__(self) -> str:
        return f"{self.policy} on {self.trace}, seed {self.seed}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Requests of one service, or of all, over one run or several."""

    service: str
    duration_s: float
    """Of the trace; of several runs the sum."""
    requests: int
    complete: int
    lost: int
    unfinished: int
    """Cut off by the run's end."""
    reissued: int
    """Requests that were continued on another replica at least once."""
    good: int
    """Complete and within both targets."""
    ttft_good: int
    tpot_good: int
    output_tokens: int
    """Of complete answers."""
    e2e: Distribution
    ttft: Distribution
    tpot: Distribution
    histograms: Mapping[str, Histogram]
    """By name of the latency (`LATENCIES`)."""

    @property
    def slo_attainment(self) -> float | None:
        """Share of requests complete and within both targets; None without requests."""
        return self.good / self.requests if self.requests else None

    def to_json(self) -> dict[str, object]:
        """Plain data, without the histograms."""
        counts = ("requests", "complete", "lost", "unfinished", "reissued")
        return {
            **{name: getattr(self, name) for name in counts},
            **{name: FIGURE_METRICS[name](self) for name in FIGURE_METRICS if name not in counts},
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What is kept of a `RunResult`; its size is bounded."""

    case: Case
    total: Figures
    services: tuple[Figures, ...]
    """By name; those that the run names."""
    gpu_hours: float
    energy_kwh: float | None
    wakes: int
    releases: int
    transitions: int
    counts: Mapping[str, float]
    timeline: tuple[TimelinePoint, ...] = ()
    """Thinned out; empty where it is not drawn."""

    def figures(self, service: str = ALL) -> Figures | None:
        """One service's figures, or those of all; None for a service that the run does not name."""
        return next((one for one in (self.total, *self.services) if one.service == service), None)

    def value(self, metric: str, service: str = ALL) -> float | None:
        """A figure by its name: of `FIGURE_METRICS`, of `RUN_METRICS`, or `counts.NAME`. None: missing.

        Raises KeyError for a name that is none.
        """
        if metric in FIGURE_METRICS:
            figures = self.figures(service)
            return None if figures is None else FIGURE_METRICS[metric](figures)
        if metric.startswith("counts."):
            return self.counts.get(metric.removeprefix("counts."))
        if metric in RUN_METRICS:
            return RUN_METRICS[metric](self)
        raise KeyError(f"no metric {metric!r}; there are {', '.join([*FIGURE_METRICS, *RUN_METRICS])} and counts.NAME")

    def to_json(self) -> dict[str, object]:
        """Plain data, without timeline and histograms."""
        return {
            "seed": self.case.seed,
            **{name: metric(self) for name, metric in RUN_METRICS.items()},
            "counts": dict(sorted(self.counts.items())),
            ALL: self.total.to_json(),
            "services": {one.service: one.to_json() for one in self.services},
        }


def _share(count: int, figures: Figures) -> float | None:
    return count / figures.requests if figures.requests else None


def _latency(name: str, field: str) -> Callable[[Figures], float | None]:
    def get(figures: Figures) -> float | None:
        value: float | None = getattr(getattr(figures, name), field)
        return value

    return get


FIGURE_METRICS: Mapping[str, Callable[[Figures], float | None]] = {
    "requests": lambda figures: figures.requests,
    "complete": lambda figures: figures.complete,
    "lost": lambda figures: figures.lost,
    "unfinished": lambda figures: figures.unfinished,
    "reissued": lambda figures: figures.reissued,
    "slo_attainment": lambda figures: figures.slo_attainment,
    "ttft_attainment": lambda figures: _share(figures.ttft_good, figures),
    "tpot_attainment": lambda figures: _share(figures.tpot_good, figures),
    "goodput_rps": lambda figures: figures.good / figures.duration_s,
    "output_tps": lambda figures: figures.output_tokens / figures.duration_s,
    **{
        f"{name}_{field}": _latency(name, field)
        for name in LATENCIES
        for field in ("mean_s", "p50_s", "p95_s", "p99_s")
    },
}
"""What each service has: shares as fractions, `goodput_rps` requests within both targets per second of the trace,
`output_tps` tokens of complete answers per second, latencies in seconds over complete answers."""

RUN_METRICS: Mapping[str, Callable[[RunSummary], float | None]] = {
    "gpu_hours": lambda run: run.gpu_hours,
    "energy_kwh": lambda run: run.energy_kwh,
    "transitions": lambda run: run.transitions,
    "wakes": lambda run: run.wakes,
    "releases": lambda run: run.releases,
}
"""What only a whole run has."""


def summarise_run(case: Case, result: RunResult, slos: Mapping[str, Slo], *, keep_timeline: bool = False) -> RunSummary:
    """The figures of a run. Raises ValueError for a result that contradicts itself or is not this case's."""
    _check(case, result, slos)
    names = result.requests.services
    everything = np.ones(len(result.requests), dtype=np.bool_)
    ttft_slo_s, tpot_slo_s = (
        np.array([getattr(slos[name], field) for name in names], dtype=np.float64)[result.requests.service]
        for field in ("ttft_s", "tpot_s")
    )
    columns = _Columns.of(result.requests, ttft_slo_s, tpot_slo_s)
    return RunSummary(
        case=case,
        total=columns.figures(ALL, everything, result.duration_s),
        services=tuple(
            columns.figures(name, result.requests.service == index, result.duration_s)
            for index, name in sorted(enumerate(names), key=lambda item: item[1])
        ),
        gpu_hours=float(result.gpu_hours),
        energy_kwh=None if result.energy_kwh is None else float(result.energy_kwh),
        wakes=result.wakes,
        releases=result.releases,
        transitions=result.transitions,
        counts={name: float(value) for name, value in sorted(result.counts.items())},
        timeline=thinned(result.timeline) if keep_timeline else (),
    )


def pooled(parts: Sequence[Figures]) -> Figures:
    """Runs of one service taken as one: counts and durations added up, quantiles of all latencies together.

    Quantiles come from the histograms, so they are within 0.5 %. Raises ValueError without a part.
    """
    if not parts:
        raise ValueError("nothing to pool")
    histograms = {name: Histogram.merged(part.histograms[name] for part in parts) for name in LATENCIES}
    counted = [field.name for field in dataclasses.fields(Figures) if field.type == "int"]
    counts: dict[str, int] = {name: sum(getattr(part, name) for part in parts) for name in counted}
    return Figures(
        service=parts[0].service,
        duration_s=math.fsum(part.duration_s for part in parts),
        **counts,
        e2e=_from_histogram(histograms["e2e"]),
        ttft=_from_histogram(histograms["ttft"]),
        tpot=_from_histogram(histograms["tpot"]),
        histograms=histograms,
    )


def thinned(points: Sequence[TimelinePoint], limit: int = _TIMELINE_POINTS) -> tuple[TimelinePoint, ...]:
    """Every n-th tick, so that no role of a service keeps more than `limit`."""
    by_role: dict[tuple[str, str], list[TimelinePoint]] = {}
    for point in points:
        by_role.setdefault((point.service, point.role), []).append(point)
    return tuple(
        point for key in sorted(by_role) for point in by_role[key][:: max(1, math.ceil(len(by_role[key]) / limit))]
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Columns:
    """A run's requests with what was found out about each."""

    requests: RequestColumns
    complete: NDArray[np.bool_]
    ttft_good: NDArray[np.bool_]
    tpot_good: NDArray[np.bool_]
    latencies: Mapping[str, Floats]

    @classmethod
    def of(cls, requests: RequestColumns, ttft_slo_s: Floats, tpot_slo_s: Floats) -> _Columns:
        complete, ttft_s, tpot_s = requests.complete, requests.ttft_s, requests.tpot_s
        return cls(
            requests=requests,
            complete=complete,
            ttft_good=complete & (ttft_s <= ttft_slo_s),
            # An answer of one token has none after the first to be slow.
            tpot_good=complete & (np.isnan(tpot_s) | (tpot_s <= tpot_slo_s)),
            latencies={"e2e": requests.e2e_s, "ttft": ttft_s, "tpot": tpot_s},
        )

    def figures(self, service: str, rows: NDArray[np.bool_], duration_s: float) -> Figures:
        complete = rows & self.complete
        latencies = {name: column[complete & ~np.isnan(column)] for name, column in self.latencies.items()}
        lost = rows & self.requests.lost
        return Figures(
            service=service,
            duration_s=duration_s,
            requests=int(rows.sum()),
            complete=int(complete.sum()),
            lost=int(lost.sum()),
            unfinished=int((rows & ~self.complete & ~self.requests.lost).sum()),
            reissued=int((rows & (self.requests.reissued > 0)).sum()),
            good=int((rows & self.ttft_good & self.tpot_good).sum()),
            ttft_good=int((rows & self.ttft_good).sum()),
            tpot_good=int((rows & self.tpot_good).sum()),
            output_tokens=int(self.requests.output_tokens[complete].sum()),
            e2e=_exact(latencies["e2e"]),
            ttft=_exact(latencies["ttft"]),
            tpot=_exact(latencies["tpot"]),
            histograms={name: Histogram.of(values) for name, values in latencies.items()},
        )


def _exact(seconds: Floats) -> Distribution:
    if not len(seconds):
        return Distribution.of([])
    p50, p95, p99 = (float(value) for value in np.quantile(seconds, [0.5, 0.95, 0.99]))
    return Distribution(len(seconds), math.fsum(seconds.tolist()) / len(seconds), p50, p95, p99)


def _from_histogram(histogram: Histogram) -> Distribution:
    quantiles = (histogram.quantile_s(q) for q in (0.5, 0.95, 0.99))
    return Distribution(histogram.count, histogram.mean_s, *quantiles)


def _check(case: Case, result: RunResult, slos: Mapping[str, Slo]) -> None:
    requests = result.requests
    missing = sorted(set(requests.services) - set(slos))
    columns = ("service", "first_token_s", "finished_s", "prompt_tokens", "output_tokens", "lost", "reissued")
    finite = (result.gpu_hours, result.duration_s, *result.counts.values())
    problems = {
        f"the result is of {result.policy} on {result.trace}, seed {result.seed}": (
            (result.policy, result.trace, result.seed) != (case.policy, case.trace, case.seed)
        ),
        f"no SLO is known for {', '.join(missing)}": bool(missing),
        "columns differ in length": any(len(getattr(requests, name)) != len(requests) for name in columns),
        "an arrival is not finite": not np.isfinite(requests.arrival_s).all(),
        "duration_s is not above 0": not result.duration_s > 0,
        "gpu_hours, duration_s or a count is not finite": not all(map(math.isfinite, finite)),
        "energy_kwh is not finite": result.energy_kwh is not None and not math.isfinite(result.energy_kwh),
    }
    for problem, there in problems.items():
        if there:
            raise ValueError(problem)
    if (requests.complete & requests.lost).any():
        raise ValueError("a request is both complete and lost")
    if (requests.complete & np.isnan(requests.first_token_s)).any():
        raise ValueError("a complete request has no first token")
