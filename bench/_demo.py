"""The demo's pool live and on virtual time, for ``bench.agreement --demo``: the same traces, Pool and ServicePolicies.

With Trimtab deciding, a few milliseconds become another transition, and with it other latencies for half a minute: what
one run measures is one draw. So several traces are served, each live once and on virtual time `DRAWN` times, and
quantiles are taken of all requests of all runs together. How far such a live measurement would be off by chance alone,
were live and virtual behaviour the same, is estimated by drawing one virtual run for each trace, many times.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actuator.core.model import Operation, OperationKind, OperationState
from bench._pool_live import LiveRun, live_run
from lab.virtual.actuation import ActuatorPace
from lab.virtual.control import ShareController
from lab.virtual.pool_run import PoolRun, PoolSetup, WindowPace
from simulator.profiles import find_profile, packaged_profiles
from simulator.scenarios import scenario_folder
from simulator.traces.demo import FOOTPRINT_GPUS, DemoTrace, demo_trace
from simulator.traces.model import TraceRequest
from trimtab.cli.resources import read_resources
from trimtab.config.resources import Pool, Resource, ServicePolicy

GPU_MEMORY_GIB = 40.0
BEAT_S = 1.0
"""From window to window, which end at multiples of it on the clock, live and on virtual time."""
LATENCIES = ("ttft", "tpot", "e2e")
SHARES = {"p50": 0.5, "p95": 0.95}
FLEET = "fleet"
"""All services together."""
DRAWN = 16
"""Runs of one trace on virtual time. They begin at as many moments between two beats."""
PASSED_ON_S = 0.0045
"""From a request's planned arrival to its server, on average: client, gateway and two connections. Each is late by
another time, up to twice as much; one that misses the start of an iteration by that may come to another server."""
DRAWS = 500
SAMPLING_SHARE = 0.9
"""The share of draws within the sampling error that is reported."""
GRACE_S = 600.0
LIVE_PACE = ActuatorPace(acknowledge_s=0.01, answer_s=0.008, again_s=0.01)
"""What calls, looks and acknowledgements take between processes: the figures are in docs/virtual-time.md."""
LIVE_WINDOWS = WindowPace(scrape_s=0.2, report_s=0.1, turn_s=0.03)
"""When the live collector scrapes a small fleet, gateways report and the engine decides: see docs/virtual-time.md."""

Seconds = NDArray[np.float64]
Sample = Mapping[str, Mapping[str, Seconds]]
"""Service → latency → seconds, one for each answered request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualRun:
    """One trace on virtual time: its latencies, and how long its transitions took."""

    sample: Sample
    transition_s: Sequence[float]


def pool_trace(seconds: float, seed: int) -> tuple[DemoTrace, list[TraceRequest]]:
    """The demo's trace, and the part of it that its pool serves."""
    made = demo_trace(duration_s=seconds, seed=seed)
    return made, [one for one in made.requests if one.service in FOOTPRINT_GPUS]


def pool_resources() -> list[Resource]:
    """The demo's pool and the policies of its members."""
    resources = read_resources([scenario_folder("demo") / "resources"])
    return [one for one in resources if isinstance(one, Pool) or one.name in FOOTPRINT_GPUS]


def virtual_run(*, seconds: float, seed: int, number: int = 0) -> VirtualRun:
    """Run `number` of `DRAWN` of one trace on virtual time.

    Runs differ in where between two of the controller's beats the trace begins, and in how late each request is.
    """
    made, requests = pool_trace(seconds, seed)
    late_s = np.random.default_rng((seed, number)).uniform(0.0, 2 * PASSED_ON_S, len(requests))
    phase_s = number / DRAWN * BEAT_S
    pairs = sorted(
        zip((one.arrival_s + phase_s + late_s[at] for at, one in enumerate(requests)), late_s, requests, strict=True),
        key=lambda pair: pair[0],
    )
    run = PoolRun(_setup(made), ShareController())
    run.run(
        [dataclasses.replace(one, arrival_s=at_s) for at_s, _, one in pairs],
        duration_s=seconds + phase_s,
        grace_s=GRACE_S,
    )
    rows = run.result(policy="trimtab", trace="demo", seed=seed, duration_s=seconds).requests
    waited_s = np.array([late for _, late, _ in pairs])
    columns = {"ttft": rows.ttft_s + waited_s, "tpot": rows.tpot_s, "e2e": rows.e2e_s + waited_s}
    sample = {}
    for position, service in enumerate(rows.services):
        mine = (rows.service == position) & rows.complete
        own = {latency: values[mine] for latency, values in columns.items()}
        sample[service] = {latency: values[~np.isnan(values)] for latency, values in own.items()}
    took_s = [_took_s(one) for one in run.actuator.operations_ended if _counts(one)]
    return VirtualRun(sample=sample, transition_s=took_s)


def _counts(operation: Operation) -> bool:
    return operation.kind is OperationKind.TRANSITION and operation.state is OperationState.SUCCEEDED


def _took_s(operation: Operation) -> float:
    return max(step.end_s for step in operation.steps) - operation.create_s


def _setup(made: DemoTrace) -> PoolSetup:
    resources = pool_resources()
    policies = tuple(one for one in resources if isinstance(one, ServicePolicy))
    names = {role.profile for policy in policies for role in policy.spec.roles}
    packaged = packaged_profiles()
    return PoolSetup(
        pool=next(one for one in resources if isinstance(one, Pool)),
        policies=policies,
        profiles={name: find_profile(packaged, name) for name in sorted(names)},
        gpu_memory_gib=GPU_MEMORY_GIB,
        pace=LIVE_PACE,
        window_pace=LIVE_WINDOWS,
    ).with_awake(made.static_replicas())


def sample_of(run: LiveRun) -> Sample:
    """The latencies of a live run."""
    return {
        service: {
            latency: np.array(
                [
                    one[f"{latency}_s"]
                    for one in run.requests
                    if one["service"] == service and one["e2e_s"] is not None and one[f"{latency}_s"] is not None
                ],
                dtype=np.float64,
            )
            for latency in LATENCIES
        }
        for service in sorted({one["service"] for one in run.requests})
    }


def together(samples: Sequence[Sample]) -> Sample:
    """The requests of several runs as one sample, with all services as a further one."""
    services = sorted({service for sample in samples for service in sample})
    pooled = {
        service: {latency: np.concatenate([one[service][latency] for one in samples]) for latency in LATENCIES}
        for service in services
    }
    fleet = {latency: np.concatenate([pooled[service][latency] for service in services]) for latency in LATENCIES}
    return pooled | {FLEET: fleet}


def compare(live: Sequence[Sample], virtual: Sequence[Sequence[Sample]], *, seed: int = 0) -> dict[str, Any]:
    """Service → p50 or p95 → latency → both figures, their relative error, the sampling error, what single runs give.

    `live` has a run for each trace, `virtual` has for each trace its runs from different moments on. The error is
    positive where virtual time is slower. `sampling`: `SAMPLING_SHARE` of live measurements of a world that is exactly
    the virtual one would be no further off. `least_s` and `most_s`: of single virtual runs.
    """
    real, model = together(live), together([one for runs in virtual for one in runs])
    chance = np.random.default_rng(seed)
    singles = [together([one]) for runs in virtual for one in runs]
    draws = [together([runs[int(chance.integers(len(runs)))] for runs in virtual]) for _ in range(DRAWS)]
    return {
        service: {
            share: {
                latency: _against(
                    float(np.quantile(real[service][latency], at)),
                    float(np.quantile(model[service][latency], at)),
                    [float(np.quantile(draw[service][latency], at)) for draw in draws],
                    [float(np.quantile(single[service][latency], at)) for single in singles],
                )
                for latency in LATENCIES
            }
            for share, at in SHARES.items()
        }
        for service in model
    }


def _against(live_s: float, virtual_s: float, drawn_s: Sequence[float], single_s: Sequence[float]) -> dict[str, float]:
    off = [abs(virtual_s / one_s - 1) for one_s in drawn_s]
    return {
        "live_s": live_s,
        "virtual_s": virtual_s,
        "error": virtual_s / live_s - 1,
        "sampling": float(np.quantile(off, SAMPLING_SHARE)),
        "least_s": min(single_s),
        "most_s": max(single_s),
    }


def compared_demo(*, seconds: float, seed: int, runs: int, folder: Path, port: int) -> dict[str, Any]:
    """`runs` traces, each live and on virtual time, as one document.

    Live runs are written to `folder`; one of the same trace that is there already is not made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [seed + number for number in range(runs)]
    live = [
        _live(seconds=seconds, seed=one, phase_s=(number + 0.5) / runs * BEAT_S, folder=folder, port=port)
        for number, one in enumerate(seeds)
    ]
    virtual = [[virtual_run(seconds=seconds, seed=one, number=number) for number in range(DRAWN)] for one in seeds]
    return {
        "seconds": seconds,
        "seeds": seeds,
        "live": [_told(run) for run in live],
        "virtual": {
            "runs": DRAWN,
            "transitions": [float(np.mean([len(run.transition_s) for run in one])) for one in virtual],
            "transition_s": _mean([took_s for one in virtual for run in one for took_s in run.transition_s]),
        },
        "services": compare(
            [sample_of(run) for run in live], [[run.sample for run in one] for one in virtual], seed=seed
        ),
    }


def _live(*, seconds: float, seed: int, phase_s: float, folder: Path, port: int) -> LiveRun:
    kept = folder / f"{seconds:g}s-{seed}.json"
    if not kept.exists():
        made, requests = pool_trace(seconds, seed)
        with tempfile.TemporaryDirectory(prefix="agreement-") as state:
            live = live_run(made, requests, pool_resources(), phase_s=phase_s, folder=Path(state), port=port)
            asyncio.run(live).write(kept)
    return LiveRun.read(kept)


def _told(run: LiveRun) -> dict[str, Any]:
    return {
        "requests": len(run.requests),
        "began_s": run.began_s,
        "sent_late_max_s": run.sent_late_max_s,
        "transitions": len(run.transition_s),
        "transition_s": _mean(run.transition_s),
        "load_average": run.load_average,
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
