"""`trimtab evaluate tre`: policies for three models on eight GPUs, compared on the seven traces of TRE's evaluation.

Every contender runs on the identical runtime (`lab.virtual`), on seeds that no tuning and no calibration saw.
`trimtab evaluate tre-loads` runs the contenders that matter at two other loads of each trace.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from lab.baselines.tuning import Setting
from lab.evaluation.bars import Bar
from lab.evaluation.study import Evaluation, geometric_mean
from lab.evaluation.suite import Options, Suite, Tuning
from lab.evaluation.summaries import Case, RunSummary
from lab.suites.loads import MAIN, TARGETS, packaged_loads
from lab.suites.tre_bars import P95, medians_of, tre_bars
from lab.suites.tre_notes import notes
from lab.suites.tre_policies import CONTENDERS, TUNED_FILE, Contender
from lab.suites.tre_run import LOAD_MARK, run_contender, run_named
from lab.suites.tre_setup import (
    DURATION_S,
    FIRST_SLEEPS_DONE,
    GPU_MEMORY_GIB,
    GPU_TYPE,
    HELD_OUT_SEEDS,
    PROFILE_NAMES,
    SLOS,
    STATIC_SPLIT,
    TRAINING_SEEDS,
)
from lab.virtual.result import RunResult
from simulator.traces.probes import POOL_GPUS, PROBES

ABOUT_TRACES = {
    "sinusoidal": "three periods, the models a third of one apart",
    "decode": "one small model and then the other gets requests of 600 output tokens on top",
    "prefill": "each model in turn gets prompts of 4,000 tokens on top",
    "alternating": "the hot model changes every 90 s, the total stays",
    "simul-spike": "every two minutes all models spike at once, each time another one most",
    "real-conv": "lengths and gaps of Azure's conversation trace, popularity shifts every two minutes",
    "real-code": "lengths and on-off gaps of Azure's code trace, popularity shifts every two minutes",
}
OTHER_LOADS = tuple(name for name in TARGETS if name != MAIN)
BESIDE = ("static", "kv-auto", "kv-auto-5s", "kv-auto-1s", "oracle", "trimtab-plain", "trimtab")
"""Policies that are run at other loads."""
FINALISTS = 3
"""How many of the settings that are best on the first training seed are run on all of them."""


def suite(options: Options) -> Suite:
    """The suite at the main loads."""
    return _suite(
        options,
        name="tre",
        title="Three models on eight GPUs",
        description=(
            "Seven traces of three models that share eight A100-40GB, at loads at which a static split keeps the SLO "
            "for about 0.8 of all requests. Only who decides differs."
        ),
        policies=tuple(CONTENDERS),
        traces=ABOUT_TRACES,
        bars=True,
    )


def suite_of_loads(options: Options) -> Suite:
    """The same at lighter and heavier loads."""
    return _suite(
        options,
        name="tre-loads",
        title="Three models on eight GPUs, at other loads",
        description="The traces of suite tre at loads at which a static split keeps the SLO for 0.92 and for 0.6.",
        policies=BESIDE,
        traces={
            f"{trace}{LOAD_MARK}{load}": f"{about}; a static split attains {TARGETS[load]:g}"
            for trace, about in ABOUT_TRACES.items()
            for load in OTHER_LOADS
        },
        bars=False,
    )


def _suite(
    options: Options,
    *,
    name: str,
    title: str,
    description: str,
    policies: Sequence[str],
    traces: Mapping[str, str],
    bars: bool,
) -> Suite:
    duration_s = DURATION_S if options.duration_s is None else options.duration_s
    return Suite(
        name=name,
        title=title,
        description=description,
        policies={policy: CONTENDERS[policy].described for policy in policies},
        baseline="kv-auto",
        traces=traces,
        seeds=HELD_OUT_SEEDS,
        slos=SLOS,
        run=functools.partial(run_case, duration_s),
        inputs=_inputs(duration_s, policies),
        bars=_bars if bars else None,
        notes=notes,
        plotted=("trimtab", "kv-auto-1s", "static"),
        tunings={
            policy: _tuning(CONTENDERS[policy], duration_s) for policy in policies if bars and CONTENDERS[policy].space
        },
        tuned_file=TUNED_FILE if bars else None,
    )


def run_case(duration_s: float, case: Case) -> RunResult:
    """One case of the suite."""
    return run_named(case.policy, trace=case.trace, seed=case.seed, duration_s=duration_s)


def _run_setting(duration_s: float, setting: Setting, case: Case) -> RunResult:
    return run_contender(CONTENDERS[case.policy], setting, trace=case.trace, seed=case.seed, duration_s=duration_s)


def _tuning(contender: Contender, duration_s: float) -> Tuning:
    return Tuning(
        space=contender.space,
        start=contender.start,
        traces=tuple(PROBES),
        seeds=TRAINING_SEEDS,
        run=functools.partial(_run_setting, duration_s),
        cost=geomean_p95,
        cost_name="geometric mean of P95 E2E, s",
        max_trials=contender.max_trials,
        finalists=FINALISTS,
    )


def geomean_p95(runs: Sequence[RunSummary]) -> float:
    """What tuning makes small; infinite when a run has no P95, or did not answer everything."""
    values = [run.value(P95) if run.total.complete == run.total.requests else None for run in runs]
    mean = geometric_mean(values)
    return float("inf") if mean is None else mean


def _bars(evaluation: Evaluation) -> Sequence[Bar]:
    return tre_bars(medians_of(evaluation), evaluation.traces)


def _inputs(duration_s: float, policies: Sequence[str]) -> dict[str, object]:
    loads = packaged_loads()
    return {
        "duration_s": duration_s,
        "gpus": POOL_GPUS,
        "gpu_type": GPU_TYPE,
        "gpu_memory_gib": GPU_MEMORY_GIB,
        "first_sleeps_done": FIRST_SLEEPS_DONE,
        "profiles": PROFILE_NAMES,
        "static_split": STATIC_SPLIT,
        "training_seeds": TRAINING_SEEDS,
        "loads": loads.to_document(),
        "settings": {policy: dict(CONTENDERS[policy].setting) for policy in policies},
        "pools": {policy: CONTENDERS[policy].pool_document() for policy in policies},
    }
