"""Digests of decisions and outcomes of seeded runs on virtual time: ``python -m bench.witness [--json] [--write]``.

A change of structure leaves every digest as in ``witness.json``; a change of behaviour names the cases whose
digests it moves, and writes the file anew with ``--write``. Each case is a seeded run of the laboratory or of a pure
core: requests' times, the fleet's timeline, and every recorded decision, with the numbers in it.

A digest is over plain values in the order of their fields. Names of types and of fields do not enter, so that a rename
moves nothing. Numbers enter with nine significant digits: two machines may differ in the last bit of a logarithm.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bench._report import machine, put_out
from bench.place import build_fleet, build_requests
from lab.calibration.fixed import run_fixed, run_staged
from lab.evaluation import smoke
from lab.evaluation.statistics import Slo
from lab.evaluation.summaries import Case
from lab.suites import diurnal, diurnal_setup, tre_policies, tre_run
from lab.suites.loads import packaged_loads
from lab.virtual.control import ShareController
from lab.virtual.fixed.colocated import colocated
from lab.virtual.fixed.disaggregated import disaggregated
from lab.virtual.fixed.ratio_sweep import SERVICE_A, workload
from lab.virtual.fixed.records import Records
from lab.virtual.network import Place
from lab.virtual.pool_run import PoolRun
from lab.virtual.result import RunResult
from lab.virtual.scaled_control import ProportionalController
from lab.virtual.scaled_run import ScaledRun
from prescheduler.core.plan import plan_cycle
from simulator.profiles import packaged_profiles
from simulator.traces.probes import probe

FILE = Path(__file__).parent / "witness.json"
SEED = 4242
"""No choice was made on it."""
POOL_S = 120.0
DAY_S = 600.0
GRACE_S = 600.0
PROFILE = "a100-8b-tp1"
POLICIES_OF_ALL_TRACES = ("trimtab", "trimtab-plain")
TRACES = ("alternating", "simul-spike", "real-code", "real-conv", "sinusoidal", "decode", "prefill")
TRACE_OF_ALL_POLICIES = "alternating"
_SCALARS = (bool, str, bytes, int, float, enum.Enum, np.bool_, np.integer, np.floating)
QUICK = ("pool trimtab simul-spike", "scaled trimtab", "fleet disaggregated", "placement")
"""Cases that take a few seconds together."""


def values_of(given: object) -> Iterator[str]:
    """The leaves of nested data in order, each as text. Raises TypeError for what is no data."""
    if given is None or isinstance(given, _SCALARS):
        yield _text(given)
    elif dataclasses.is_dataclass(given):
        for field in dataclasses.fields(given):
            yield from values_of(getattr(given, field.name))
    elif isinstance(given, np.ndarray):
        yield from values_of(given.tolist())
    elif isinstance(given, Mapping):
        yield from values_of(tuple(given.items()))
    elif isinstance(given, frozenset | set):
        yield from sorted("/".join(values_of(item)) for item in given)
    elif isinstance(given, Iterable):
        yield "("
        for item in given:
            yield from values_of(item)
        yield ")"
    else:
        raise TypeError(f"{type(given).__name__} is no plain data")


def _text(given: object) -> str:
    if isinstance(given, enum.Enum):
        return str(given.value)
    if isinstance(given, float | np.floating):
        return f"{float(given):.9g}"
    return str(given)


def digest(given: object) -> str:
    """Sixteen hexadecimal digits: the digest of all values in `given`."""
    text = hashlib.sha256()
    for value in values_of(given):
        text.update(value.encode())
        text.update(b"\0")
    return text.hexdigest()[:16]


def _outcome(result: RunResult) -> str:
    return digest(result)


def _pool(policy: str, trace: str) -> dict[str, str]:
    """One contender of the TRE suite: what came of it, and what was decided."""
    contender, loads = tre_policies.CONTENDERS[policy], packaged_loads()
    name, scale = tre_run.rate_scale(trace, loads)
    requests = list(probe(name, seed=SEED, duration_s=POOL_S, rate_scale=scale))
    controller = contender.controller(requests, loads, contender.setting)
    run = PoolRun(tre_policies.setup_of(contender, contender.setting, loads), controller)
    run.run(requests, duration_s=POOL_S, grace_s=GRACE_S)
    found = {"outcome": _outcome(run.result(policy=policy, trace=trace, seed=SEED, duration_s=POOL_S))}
    if isinstance(controller, ShareController):
        found["decisions"] = digest(controller.decisions)
    return found


def _scaled(policy: str) -> dict[str, str]:
    """One contender of the diurnal suite on the first minutes of a day."""
    contender, trace = diurnal.CONTENDERS[policy], diurnal_setup.requests_of_day(SEED, DAY_S)
    controller = contender.make(diurnal.setting_of(policy), trace)
    run = ScaledRun(diurnal_setup.scaled_setup(diurnal_setup.service_policy(), contender.first_units()), controller)
    run.run(trace, duration_s=DAY_S, grace_s=GRACE_S)
    found = {"outcome": _outcome(run.result(policy=policy, trace="day", seed=SEED, duration_s=DAY_S))}
    if isinstance(controller, ProportionalController):
        found["decisions"] = digest(controller.decisions)
    return found


def _records(records: Records) -> dict[str, str]:
    columns = (records.arrival_s, records.ttft_s, records.finished_s, records.tpot_s, records.replica)
    return {"outcome": digest(columns)}


def _colocated() -> dict[str, str]:
    requests = workload(SERVICE_A, rate_rps=6.0, requests=800, seed=SEED)
    return _records(colocated(packaged_profiles()[PROFILE], 4).run(requests))


def _disaggregated() -> dict[str, str]:
    """Three prefill and two decode replicas, one of them behind another switch."""
    profile = packaged_profiles()["h100-8b-tp1"]
    near, far = Place(s1="s1-0"), Place(s1="s1-1")
    fleet = disaggregated(profile, profile, prefill_places=[near] * 3, decode_places=[near, far])
    return _records(fleet.run(workload(SERVICE_A, rate_rps=12.0, requests=800, seed=SEED)))


def _calibration() -> dict[str, str]:
    """Windows as calibration fits on them."""
    profile, slo = packaged_profiles()[PROFILE], Slo(ttft_s=2.0, tpot_s=0.075)
    requests = workload(SERVICE_A, rate_rps=3.0, requests=300, seed=SEED)
    staged = run_staged(
        requests, prefill=profile, decode=profile, slo=slo, prefill_replicas=2, decode_replicas=2, duration_s=100.0
    )
    return {
        "windows": digest(run_fixed(requests, profile=profile, slo=slo, replicas=2, duration_s=100.0)),
        "staged windows": digest([staged[role] for role in sorted(staged)]),
    }


def _smoke() -> dict[str, str]:
    case = Case(policy="static-2", trace="burst", seed=SEED)
    return {"outcome": _outcome(smoke.run(60.0, dict.fromkeys(smoke.SLOS, 2.0), case))}


def _placement() -> dict[str, str]:
    """One cycle of the pre-scheduler over a large fleet that holds nothing yet."""
    return {"plan": digest(plan_cycle(build_fleet(1_000), build_requests(200), now_s=0.0))}


def cases() -> dict[str, Callable[[], dict[str, str]]]:
    """Every case by name."""
    found: dict[str, Callable[[], dict[str, str]]] = {}
    for policy in tre_policies.CONTENDERS:
        for trace in TRACES if policy in POLICIES_OF_ALL_TRACES else (TRACE_OF_ALL_POLICIES,):
            found[f"pool {policy} {trace}"] = functools.partial(_pool, policy, trace)
    for policy in diurnal.CONTENDERS:
        found[f"scaled {policy}"] = functools.partial(_scaled, policy)
    found["fleet colocated"] = _colocated
    found["fleet disaggregated"] = _disaggregated
    found["calibration"] = _calibration
    found["smoke"] = _smoke
    found["placement"] = _placement
    return found


def moved(names: Sequence[str], known: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Digests of these cases now, and which of them differ from those that are known, as `case: part`."""
    every = cases()
    found = {name: every[name]() for name in names}
    differing = [
        f"{name}: {part}"
        for name in names
        for part, value in found[name].items()
        if known.get(name, {}).get(part) != value
    ]
    return found, differing


def known_digests() -> Mapping[str, Mapping[str, str]]:
    """What the committed file holds."""
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def main() -> int:
    """Print what moved; exit status 1 when something did."""
    parser = argparse.ArgumentParser(description="digests of seeded runs, compared with those in witness.json")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--write", action="store_true", help="write what was found as what is known from now on")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    arguments = parser.parse_args()
    found, differing = moved(QUICK if arguments.quick else tuple(cases()), known_digests())
    if arguments.write:
        FILE.write_text(json.dumps({**known_digests(), **found}, indent=1) + "\n")
    report = {
        "machine": machine(),
        "digests": found,
        "moved": differing,
        "bars": [{"name": "moved", "value": len(differing), "bar": 0, "ok": not differing}],
    }

    def show(_: Mapping[str, object]) -> None:
        print("\n".join(differing) or f"{len(found)} cases, none moved")

    return put_out(report, as_json=arguments.json, show=show)


if __name__ == "__main__":
    sys.exit(main())
