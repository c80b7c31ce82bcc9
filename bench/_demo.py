"""The demo's pool live and on virtual time, for ``bench.agreement --demo``: the same trace, Pool and ServicePolicies.

With Trimtab deciding, a small difference in time becomes another transition, so that it matters at which moment between
two of the controller's beats the trace begins. On virtual time it is begun at several; those near the live moment are
compared, by their medians, and the others say how much depends on it.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulator.baselines.interface import started
from simulator.baselines.static import Static
from simulator.profiles import find_profile, packaged_profiles
from simulator.scenarios import scenario_folder
from simulator.traces.demo import FOOTPRINT_GPUS, DemoTrace, demo_trace
from simulator.virtual.actuation import ActuatorPace
from simulator.virtual.control import Controller, ShareController
from simulator.virtual.counts import CountController
from simulator.virtual.pool_run import PoolSetup, run_pool
from simulator.virtual.result import RunResult
from trimtab.cli.resources import read_resources
from trimtab.config.resources import Pool, ServicePolicy

GPU_MEMORY_GIB = 40.0
PASSES = ("policy", "static")
BEAT_S = 1.0
"""From window to window, which end at multiples of it on the clock, live and on virtual time."""
PHASES = 16
"""Beginnings of the trace between two beats; without a policy there is nothing to differ."""
NEAR = 1 / 8
"""Of a beat: so far from the live beginning counts as near it. What is read and decided takes as long, live."""
LIVE_PACE = ActuatorPace(acknowledge_s=0.04, answer_s=0.04)
"""What calls, looks and acknowledgements take between processes: the figures are in docs/virtual-time.md."""
Quantiles = dict[str, dict[str, dict[str, float]]]
"""Service → p50 or p95 → latency → seconds."""


def live_demo(*, seconds: float, seed: int, folder: Path, port: int) -> dict[str, Any]:
    """``trimtab demo`` in a process of its own; its summary."""
    command = [sys.executable, "-m", "trimtab.cli.main", "demo", "--json", "--duration", f"{seconds:g}"]
    command += ["--seed", str(seed), "--port-base", str(port), "--state-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=4 * seconds + 600)
    if done.returncode != 0:
        raise RuntimeError(f"the demo ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def quantiles_of_summary(summary: Mapping[str, Any], name: str) -> Quantiles:
    """What the demo's summary says of the pool's services in one pass."""
    return {
        service["service"]: {
            share: {latency: service[latency][f"{share}_s"] for latency in ("ttft", "tpot", "e2e")}
            for share in ("p50", "p95")
        }
        for service in summary["results"][name]["summary"]["services"]
        if service["service"] in FOOTPRINT_GPUS
    }


def virtual_demo(name: str, *, seconds: float, seed: int, phase_s: float = 0.0) -> RunResult:
    """One pass on virtual time: Trimtab's controller, or the split as it stands.

    `phase_s`: how much later the trace begins against the controller's beats, which live is chance.
    """
    made = demo_trace(duration_s=seconds, seed=seed)
    controller: Controller = ShareController() if name == "policy" else CountController(started(Static()), period_s=5.0)
    return run_pool(
        _setup(made),
        [
            dataclasses.replace(one, arrival_s=one.arrival_s + phase_s)
            for one in made.requests
            if one.service in FOOTPRINT_GPUS
        ],
        controller,
        policy=name,
        trace="demo",
        seed=seed,
        duration_s=seconds + phase_s,
    )


def _setup(made: DemoTrace) -> PoolSetup:
    resources = read_resources([scenario_folder("demo") / "resources"])
    pool = next(one for one in resources if isinstance(one, Pool))
    policies = tuple(one for one in resources if isinstance(one, ServicePolicy) and one.name in FOOTPRINT_GPUS)
    names = {role.profile for policy in policies for role in policy.spec.roles}
    packaged = packaged_profiles()
    return PoolSetup(
        pool=pool,
        policies=policies,
        profiles={name: find_profile(packaged, name) for name in sorted(names)},
        gpu_memory_gib=GPU_MEMORY_GIB,
        pace=LIVE_PACE,
    ).with_awake(made.static_replicas())


def quantiles_of_run(result: RunResult) -> Quantiles:
    """The same of a run on virtual time."""
    rows = result.requests
    found: Quantiles = {}
    for position, service in enumerate(rows.services):
        mine = (rows.service == position) & rows.complete
        columns = {"ttft": rows.ttft_s[mine], "tpot": rows.tpot_s[mine], "e2e": rows.e2e_s[mine]}
        found[service] = {
            share: {latency: float(np.nanquantile(values, at)) for latency, values in columns.items()}
            for share, at in (("p50", 0.5), ("p95", 0.95))
        }
    return found


def compared_demo(*, seconds: float, seed: int, folder: Path, port: int) -> dict[str, Any]:
    """Both passes live, and on virtual time: by pass, service and quantile the figures and their relative errors.

    `virtual_s` is the median of the runs that begin near the live moment, `least_s` and `most_s` are of all runs.
    """
    before = os.getloadavg()[0]
    summary = live_demo(seconds=seconds, seed=seed, folder=folder, port=port)
    after = os.getloadavg()[0]
    found: dict[str, Any] = {"load_average": {"before": before, "after": after}}
    for name in PASSES:
        live = quantiles_of_summary(summary, name)
        phases = [number * BEAT_S / PHASES for number in range(PHASES)] if name == "policy" else [0.0]
        runs = [virtual_demo(name, seconds=seconds, seed=seed, phase_s=phase_s) for phase_s in phases]
        began_s = summary["results"][name]["summary"]["started_unix_s"] % BEAT_S
        near = near_phases(phases, began_s)
        found[name] = {
            "began_s": began_s,
            "compared_s": [phases[position] for position in near],
            "sent_late_max_s": summary["results"][name]["summary"]["max_late_s"],
            "transitions": {
                "live": summary["results"][name]["transitions"],
                "virtual": [run.transitions for run in runs],
            },
            "services": _errors(live, [quantiles_of_run(run) for run in runs], near),
        }
    return found


def near_phases(phases: Sequence[float], began_s: float) -> list[int]:
    """Positions of those near the live beginning, round the beat; all of them where there is one alone."""
    if len(phases) == 1:
        return [0]
    away_s = [abs((phase_s - began_s + BEAT_S / 2) % BEAT_S - BEAT_S / 2) for phase_s in phases]
    return [position for position, far_s in enumerate(away_s) if far_s <= NEAR * BEAT_S]


def _errors(live: Quantiles, runs: Sequence[Quantiles], near: Sequence[int]) -> dict[str, Any]:
    return {
        service: {
            share: {
                latency: _against(seconds, [run[service][share][latency] for run in runs], near)
                for latency, seconds in latencies.items()
            }
            for share, latencies in shares.items()
        }
        for service, shares in live.items()
    }


def _against(live_s: float, virtual_s: Sequence[float], near: Sequence[int]) -> dict[str, float]:
    middle_s = float(np.median([virtual_s[position] for position in near]))
    return {
        "live_s": live_s,
        "virtual_s": middle_s,
        "least_s": min(virtual_s),
        "most_s": max(virtual_s),
        "error": middle_s / live_s - 1,
    }
