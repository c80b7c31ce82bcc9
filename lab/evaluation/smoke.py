"""The smallest suite: static fleets on two short generated traces. It tries the machinery, not policies.

Each of two services has a fleet of its own, `static-N` gives both N replicas, and what a policy would change never
changes: there are no transitions and no Z. `fitted` has the sizes that a search found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lab.baselines.tuning import Setting
from lab.evaluation.bars import Bar, at_least, at_most
from lab.evaluation.statistics import Slo
from lab.evaluation.study import Evaluation
from lab.evaluation.suite import Options, Suite, Tuning
from lab.evaluation.summaries import Case, RunSummary
from lab.evaluation.tuning import read_tuned
from lab.virtual.fixed.colocated import colocated
from lab.virtual.gpu_outputs import GPU_POWER, gpu_outputs
from lab.virtual.result import RequestColumns, RunResult, TimelinePoint
from simulator.core.profile import Profile
from simulator.core.requests import EngineGauges
from simulator.profiles import packaged_profiles
from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate
from simulator.traces.model import TraceRequest

PROFILE = "a100-8b-tp1"
DURATION_S = 120.0
TICK_S = 2.0
SIZES = {"static-1": 1, "static-2": 2, "static-4": 4}
FITTED = "fitted"
TUNED_FILE = Path(__file__).parent / "smoke_tuned.yaml"
SPACE = {"chat": (1.0, 2.0, 3.0, 4.0), "code": (1.0, 2.0, 3.0, 4.0)}
TRAINING_SEEDS = (101, 102)
ATTAINED = 0.95
SLOS = {"chat": Slo(ttft_s=1.0, tpot_s=0.05), "code": Slo(ttft_s=2.0, tpot_s=0.05)}
STEADY_RPS = {"chat": 8.0, "code": 1.0}
BURST = 3.0
"""In `burst` the rate is this many times the steady one for the middle third."""
LENGTHS = {
    "chat": (Lengths(mean_tokens=500, cv=0.8, max_tokens=4000), Lengths(mean_tokens=200, cv=0.6, max_tokens=1000)),
    "code": (Lengths(mean_tokens=2000, cv=0.8, max_tokens=8000), Lengths(mean_tokens=60, cv=0.6, max_tokens=400)),
}

NOTE = (
    "Nothing is scaled here, so this says nothing about a policy: it shows that the command works, and what the report "
    "of a larger suite looks like."
)


def suite(options: Options) -> Suite:
    """The suite, with traces of any length."""
    duration_s = DURATION_S if options.duration_s is None else options.duration_s
    found = read_tuned(TUNED_FILE)
    sizes = {name: dict.fromkeys(SLOS, float(size)) for name, size in SIZES.items()}
    sizes[FITTED] = found[FITTED].setting if FITTED in found else sizes["static-2"]
    return Suite(
        name="smoke",
        title="Static fleets",
        description="Two services with a fixed number of replicas each, on a steady load and on one with a burst.",
        policies={
            **{
                name: f"{size} {'replica' if size == 1 else 'replicas'} of each service" for name, size in SIZES.items()
            },
            FITTED: f"the fewest replicas that keep the SLO for {ATTAINED:.0%} of each trace, found on other seeds",
        },
        baseline="static-2",
        traces={"steady": "a constant rate", "burst": f"{BURST:g} times the rate in the middle third"},
        seeds=(1, 2, 3),
        slos=SLOS,
        run=functools.partial(run_named, duration_s, sizes),
        inputs={
            "duration_s": duration_s,
            "profile": PROFILE,
            "sizes": sizes,
            "steady_rps": STEADY_RPS,
            "burst": BURST,
            "lengths": {
                name: {"prompt": dataclasses.asdict(prompt), "output": dataclasses.asdict(output)}
                for name, (prompt, output) in LENGTHS.items()
            },
        },
        bars=bars,
        notes=lambda evaluation: [NOTE],
        tunings={
            FITTED: Tuning(
                space=SPACE,
                start=dict.fromkeys(SLOS, 2.0),
                traces=("steady", "burst"),
                seeds=TRAINING_SEEDS,
                run=functools.partial(run, duration_s),
                cost=cost,
                cost_name=f"GPU-hours, where each run keeps the SLO for {ATTAINED:.0%}",
                exhaustive=True,
            )
        },
        tuned_file=TUNED_FILE,
    )


def cost(runs: Sequence[RunSummary]) -> float:
    """GPU-hours of all runs; infinite when one of them does not attain enough."""
    attained = [run.total.slo_attainment for run in runs]
    if any(share is None or share < ATTAINED for share in attained):
        return math.inf
    return math.fsum(run.gpu_hours for run in runs)


def bars(evaluation: Evaluation) -> Sequence[Bar]:
    """The bars of fixed fleets: nothing is lost, and more replicas are no slower."""
    return (
        at_most("lost_requests", evaluation.lost_requests(), 0),
        at_least(
            "p95_reduction_of_twice_the_replicas",
            {
                trace: None if median is None else -median
                for trace in evaluation.traces
                for median in [evaluation.change("static-4", trace, "e2e_p95_s", against="static-2").median]
            },
            0.0,
            policies=("static-4", "static-2"),
        ),
    )


def run_named(duration_s: float, sizes: Mapping[str, Setting], case: Case) -> RunResult:
    """One policy on one trace."""
    return run(duration_s, sizes[case.policy], case)


def run(duration_s: float, sizes: Setting, case: Case) -> RunResult:
    """Fleets of these sizes, by service, on one trace."""
    profile = packaged_profiles()[PROFILE]
    trace = generate(_loads(case.trace, duration_s), duration_s=duration_s, seed=case.seed)
    services = tuple(sorted(SLOS))
    parts = [
        _served(
            profile, round(sizes[name]), [request for request in trace if request.service == name], index, duration_s
        )
        for index, name in enumerate(services)
    ]
    rows = np.concatenate([part.rows for part in parts])
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    end_s = max(part.end_s for part in parts)
    count = len(rows)
    return RunResult(
        policy=case.policy,
        trace=case.trace,
        seed=case.seed,
        requests=RequestColumns(
            services=services,
            service=rows[:, 0].astype(np.int64),
            arrival_s=rows[:, 1],
            first_token_s=rows[:, 2],
            finished_s=rows[:, 3],
            prompt_tokens=rows[:, 4].astype(np.int64),
            output_tokens=rows[:, 5].astype(np.int64),
            lost=np.zeros(count, dtype=np.bool_),
            reissued=np.zeros(count, dtype=np.int64),
        ),
        timeline=[
            TimelinePoint(at_s, name, "colocated", round(sizes[name]), round(sizes[name]), running, waiting)
            for name, part in zip(services, parts, strict=True)
            for at_s, running, waiting in part.ticks
        ],
        duration_s=duration_s,
        gpu_hours=sum(round(sizes[name]) for name in services) * profile.tensor_parallel * end_s / 3600,
        energy_kwh=math.fsum(part.energy_kwh for part in parts),
    )


def _loads(trace: str, duration_s: float) -> list[ServiceLoad]:
    loads = []
    for name, rps in STEADY_RPS.items():
        points: tuple[tuple[float, float], ...] = ((0.0, rps),)
        if trace == "burst":
            start_s, end_s = duration_s / 3, 2 * duration_s / 3
            points = ((start_s, rps), (start_s, BURST * rps), (end_s, BURST * rps), (end_s, rps))
        prompt, output = LENGTHS[name]
        loads.append(ServiceLoad(service=name, request_rps=Curve(points), prompt=prompt, output=output))
    return loads


@dataclasses.dataclass(frozen=True, slots=True)
class _Served:
    """What one service's fleet did: a row a request, as service, three times and two lengths."""

    rows: np.typing.NDArray[np.float64]
    ticks: tuple[tuple[float, int, int], ...]
    end_s: float
    energy_kwh: float


def _served(profile: Profile, size: int, trace: list[TraceRequest], service: int, duration_s: float) -> _Served:
    fleet = colocated(profile, size)
    seen: list[tuple[float, tuple[EngineGauges, ...]]] = []

    def look(now_s: float) -> None:
        seen.append((now_s, tuple(fleet.clock.at(index, now_s).observe(now_s) for index in range(size))))
        if now_s + TICK_S <= duration_s:
            fleet.clock.call_at(now_s + TICK_S, look)

    fleet.clock.call_at(0.0, look)
    records = fleet.run(trace)
    end_s = max(duration_s, float(records.finished_s.max(initial=0.0)))
    if end_s > seen[-1][0]:
        look(end_s)
    return _Served(
        rows=np.column_stack(
            [
                np.full(len(records), float(service)),
                records.arrival_s,
                records.arrival_s + records.ttft_s,
                records.finished_s,
                records.prompt_tokens,
                records.output_tokens,
            ]
        ),
        ticks=tuple(
            (now_s, sum(one.running for one in gauges), sum(one.waiting for one in gauges)) for now_s, gauges in seen
        ),
        end_s=end_s,
        energy_kwh=_energy_kwh(profile, seen),
    )


def _energy_kwh(profile: Profile, seen: Sequence[tuple[float, tuple[EngineGauges, ...]]]) -> float:
    """Of all GPUs over all windows between two looks."""
    timing, power = profile.iteration_model(), GPU_POWER[profile.gpu_type]
    joules = 0.0
    for (start_s, before), (end_s, after) in itertools.pairwise(seen):
        for one, other in zip(before, after, strict=True):
            window_s = end_s - start_s
            outputs = gpu_outputs(
                one, other, window_s=window_s, timing=timing, power=power, gpus=profile.tensor_parallel
            )
            joules += outputs.power_w * window_s
    return joules / 3.6e6
