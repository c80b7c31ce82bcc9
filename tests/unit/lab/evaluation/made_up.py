"""Runs written by hand, and a suite whose results are drawn from its cases alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lab.evaluation.statistics import Slo
from lab.evaluation.suite import Suite, Tuning
from lab.evaluation.summaries import Case, RunSummary
from lab.virtual.result import RequestColumns, RunResult, TimelinePoint

NAN = float("nan")
SLOS = {"chat": Slo(ttft_s=1.0, tpot_s=0.1), "code": Slo(ttft_s=2.0, tpot_s=0.2)}
CASE = Case("p", "t", 1)


def columns(rows: Sequence[tuple[str, float, float, float, int, bool]]) -> RequestColumns:
    """Rows of service, arrival, first token, end, output tokens, lost."""
    services = tuple(sorted({row[0] for row in rows})) or ("chat",)
    count = len(rows)
    return RequestColumns(
        services=services,
        service=np.array([services.index(row[0]) for row in rows], dtype=np.int64),
        arrival_s=np.array([row[1] for row in rows], dtype=np.float64),
        first_token_s=np.array([row[2] for row in rows], dtype=np.float64),
        finished_s=np.array([row[3] for row in rows], dtype=np.float64),
        prompt_tokens=np.full(count, 100, dtype=np.int64),
        output_tokens=np.array([row[4] for row in rows], dtype=np.int64),
        lost=np.array([row[5] for row in rows], dtype=np.bool_),
        reissued=np.zeros(count, dtype=np.int64),
    )


def result(requests: RequestColumns, *, case: Case = CASE, **other: object) -> RunResult:
    """A run of ten seconds."""
    return RunResult(
        **{  # type: ignore[arg-type]
            "policy": case.policy,
            "trace": case.trace,
            "seed": case.seed,
            "requests": requests,
            "duration_s": 10.0,
            "gpu_hours": 0.5,
            **other,
        }
    )


def drawn(breaking: Mapping[Case, str], case: Case) -> RunResult:
    """A result that depends on nothing but its case; `slow` takes twice as long. Cases named in `breaking` fail."""
    if case in breaking:
        raise RuntimeError(f"{breaking[case]}\nfell on {case.policy}")
    dice = np.random.default_rng([case.seed, len(case.trace)])
    arrivals = np.sort(dice.uniform(0, 100, 200))
    e2e_s = dice.lognormal(0, 0.5, 200) * (2 if case.policy == "slow" else 1)
    rows = [
        ("chat" if index % 2 else "code", at_s, at_s + took_s / 4, at_s + took_s, 11, False)
        for index, (at_s, took_s) in enumerate(zip(arrivals, e2e_s, strict=True))
    ]
    return result(
        columns(rows),
        case=case,
        duration_s=100.0,
        gpu_hours=1.0 if case.policy == "slow" else 2.0,
        timeline=[
            TimelinePoint(float(at_s), service, "colocated", 2, 1, 3.0, 1.0, 0.5 if case.policy == "fast" else None)
            for at_s in range(0, 100, 10)
            for service in ("chat", "code")
        ],
        counts={"looks": 10.0},
    )


def suite(*, breaking: Mapping[Case, str] | None = None, **other: object) -> Suite:
    """Two policies, two traces, three seeds."""
    return Suite(
        **{  # type: ignore[arg-type]
            "name": "made-up",
            "title": "Made up",
            "description": "Nothing is simulated.",
            "policies": {"slow": "takes twice as long", "fast": "does not"},
            "baseline": "slow",
            "traces": {"one": "the first", "other": "the second"},
            "seeds": (1, 2, 3),
            "slos": SLOS,
            "run": functools.partial(drawn, dict(breaking or {})),
            "inputs": {"size": 200},
            **other,
        }
    )


SPACE = {"low": (1.0, 2.0, 3.0, 4.0), "high": (2.0, 3.0, 4.0, 5.0)}


def slower_the_further(crash_at: tuple[float, float] | None, setting: Mapping[str, float], case: Case) -> RunResult:
    """E2E grows with the distance from low 2 and high 4, and a little with the seed; low must be below high."""
    low, high = setting["low"], setting["high"]
    if low >= high:
        raise ValueError("low must be below high")
    if (low, high) == crash_at:
        raise RuntimeError("out of order")
    took_s = 1 + abs(low - 2) + abs(high - 4) + case.seed / 100
    return result(columns([("chat", 0.0, took_s / 2, took_s, 3, False)]), case=case)


def mean_e2e(runs: Sequence[RunSummary]) -> float:
    """What a setting costs."""
    return math.fsum(run.total.e2e.mean_s for run in runs) / len(runs)


def tunable(crash_at: tuple[float, float] | None = None, **changes: object) -> Suite:
    """The suite with one policy to tune, best at low 2 and high 4."""
    tuning = Tuning(
        **{  # type: ignore[arg-type]
            "space": SPACE,
            "start": {"low": 1.0, "high": 5.0},
            "traces": ("one", "other"),
            "seeds": (11, 12),
            "run": functools.partial(slower_the_further, crash_at),
            "cost": mean_e2e,
            "cost_name": "mean E2E, s",
            **changes,
        }
    )
    return suite(tunings={"fast": tuning})
