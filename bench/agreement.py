"""Live servers against virtual time: ``python -m bench.agreement --json``.

One trace, with lengths and gaps of Azure's conversations, is sent to simulated servers that run as processes behind the
gateway, in real time, and is served once more on virtual time by the same profile and number of replicas. Both route to
the least loaded replica. P50 and P95 of TTFT, TPOT and E2E latency are compared, for colocated replicas and for prefill
and decode ones.

The machine's own noise is in the live figures: a busy machine makes clients send late and iterations end late. The
report has the load average and both delays.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench._demo import FLEET, compared_demo
from bench._live import LiveServer, live_fleet
from lab.virtual.fixed.colocated import colocated
from lab.virtual.fixed.disaggregated import disaggregated
from lab.virtual.fixed.records import Records
from lab.virtual.network import Place
from simulator.core.profile import Profile
from simulator.profiles import find_profile, packaged_profiles
from simulator.replay.client import ReplayOptions, replay
from simulator.replay.report import ReplayReport
from simulator.traces.generators import Curve
from simulator.traces.lengths import packaged
from simulator.traces.model import TraceRequest
from simulator.traces.streams import Stream, requests_of

PROFILE = "l40s-32b-tp2"
SERVICE = "chat"
REPLICAS = 4
RATES_RPS = {"colocated": 3.0, "disaggregated": 2.5}
STREAM_INTERVAL = 4
"""Tokens a chunk: what a chunk costs is CPU time, not the engine's."""
BAR = 0.10
QUANTILES = {"p50": 0.5, "p95": 0.95}
PORT_BASE = 23_000


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Of all requests of one run, in seconds."""

    ttft: Sequence[float]
    tpot: Sequence[float]
    e2e: Sequence[float]

    def quantiles(self, share: float) -> dict[str, float]:
        """One quantile of each."""
        return {name: float(np.quantile(values, share)) for name, values in dataclasses.asdict(self).items()}


def made_trace(rate_rps: float, seconds: float, seed: int) -> list[TraceRequest]:
    """The trace of one case."""
    laws = packaged("azure-conv")
    stream = Stream(
        service=SERVICE,
        request_rps=Curve(((0.0, rate_rps),)),
        prompt=laws.prompt_tokens,
        output=laws.output_tokens,
        gaps=laws.gaps_ms,
    )
    return list(requests_of([stream], duration_s=seconds, seed=seed))


def offline(case: str, profile: Profile, trace: Sequence[TraceRequest]) -> Latencies:
    """The trace on virtual time."""
    if case == "colocated":
        records = colocated(profile, REPLICAS).run(trace)
    else:
        half = [Place()] * (REPLICAS // 2)
        fleet = disaggregated(
            profile, profile, prefill_places=half, decode_places=half, prefill_sends_first_token=False
        )
        records = fleet.run(trace)
    return _of_records(records)


def _of_records(records: Records) -> Latencies:
    return Latencies(records.ttft_s.tolist(), records.tpot_s.tolist(), records.e2e_s.tolist())


def _of_report(report: ReplayReport) -> Latencies:
    done = [record for record in report.records if record.e2e_s is not None]
    return Latencies(
        [record.ttft_s for record in done if record.ttft_s is not None],
        [record.tpot_s for record in done if record.tpot_s is not None],
        [record.e2e_s for record in done if record.e2e_s is not None],
    )


def live_servers(case: str, profile: Profile) -> list[LiveServer]:
    """The servers of a case, named so that ties are broken as on virtual time."""
    width = profile.tensor_parallel
    roles = ["colocated"] * REPLICAS
    if case != "colocated":
        roles = ["prefill"] * (REPLICAS // 2) + ["decode"] * (REPLICAS - REPLICAS // 2)
    return [
        LiveServer(name=f"{role}-{number}", role=role, gpus=tuple(range(number * width, (number + 1) * width)))
        for number, role in enumerate(roles)
    ]


async def live(
    case: str, profile: Profile, trace: Sequence[TraceRequest], *, seconds: float, seed: int, folder: Path, port: int
) -> ReplayReport:
    """The trace in real time, after a few requests that open connections.

    Raises RuntimeError when one of those fails.
    """
    async with live_fleet(
        folder,
        profile,
        live_servers(case, profile),
        service=SERVICE,
        port_base=port,
        stream_interval=STREAM_INTERVAL,
    ) as url:
        first = [TraceRequest(0.01 * number, SERVICE, 16, 2) for number in range(2 * REPLICAS)]
        opened = await replay(first, ReplayOptions(url=url, seed=seed + 1))
        if opened.lost:
            raise RuntimeError(f"{len(opened.lost)} of the first {len(first)} requests failed: {opened.lost[0].detail}")
        return await replay(trace, ReplayOptions(url=url, seed=seed), duration_s=seconds)


def compared(
    case: str, profile: Profile, trace: Sequence[TraceRequest], *, seconds: float, seed: int, folder: Path, port: int
) -> dict[str, Any]:
    """One case as a document: the quantiles of both and their relative errors."""
    before = os.getloadavg()[0]
    report = asyncio.run(live(case, profile, trace, seconds=seconds, seed=seed, folder=folder, port=port))
    ours, theirs = offline(case, profile, trace), _of_report(report)
    late_s = [record.late_s for record in report.records]
    return {
        "case": case,
        "requests": len(trace),
        "lost": len(report.lost),
        "quantiles": {
            name: errors(theirs.quantiles(share), ours.quantiles(share)) for name, share in QUANTILES.items()
        },
        "sent_late_s": {name: float(np.quantile(late_s, share)) for name, share in QUANTILES.items()},
        "load_average": {"before": before, "after": os.getloadavg()[0]},
    }


def errors(real: dict[str, float], virtual: dict[str, float]) -> dict[str, dict[str, float]]:
    """Each latency with its relative error, positive where virtual time is slower."""
    return {
        latency: {"live_s": real[latency], "offline_s": virtual[latency], "error": virtual[latency] / real[latency] - 1}
        for latency in virtual
    }


def bars(cases: Sequence[dict[str, Any]]) -> list[dict[str, object]]:
    """One bar for each quantile, with an error for each case and latency."""
    made = []
    for name in QUANTILES:
        value = {
            f"{one['case']} {latency}": abs(found["error"])
            for one in cases
            for latency, found in one["quantiles"][name].items()
        }
        made.append(
            {"name": f"live_offline_{name}_error", "value": value, "bar": BAR, "ok": max(value.values()) <= BAR}
        )
    return made


def demo_bars(found: dict[str, Any]) -> list[dict[str, object]]:
    """One bar for each quantile over all requests, of whatever service."""
    made = []
    for share in QUANTILES:
        value = {latency: abs(one["error"]) for latency, one in found["services"][FLEET][share].items()}
        ok = max(value.values()) <= BAR
        made.append({"name": f"demo_policy_{share}_error", "value": value, "bar": BAR, "ok": ok})
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """How the demo is compared. Live runs that `live_folder` has already are not made again."""

    seconds: float
    runs: int
    live_folder: Path | None = None


def run(names: Sequence[str], *, seconds: float, seed: int, port: int, demo: DemoPlan | None = None) -> dict[str, Any]:
    """All cases, one after the other, as one document."""
    profile = find_profile(packaged_profiles(), PROFILE)
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        cases = [
            compared(
                name,
                profile,
                made_trace(RATES_RPS[name], seconds, seed),
                seconds=seconds,
                seed=seed,
                folder=Path(folder) / name,
                port=port,
            )
            for name in names
        ]
        pool = None
        if demo is not None:
            kept = demo.live_folder if demo.live_folder is not None else Path(folder) / "demo"
            pool = compared_demo(seconds=demo.seconds, seed=seed, runs=demo.runs, folder=kept, port=port)
    return {
        "bench": "agreement",
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "inputs": {
            "profile": PROFILE,
            "replicas": REPLICAS,
            "rates_rps": {name: RATES_RPS[name] for name in names},
            "seconds": seconds,
            "seed": seed,
            "tokens_per_chunk": STREAM_INTERVAL,
        },
        "results": cases,
        "demo": pool,
        "bars": (bars(cases) if cases else []) + (demo_bars(pool) if pool is not None else []),
    }


def _print_table(report: dict[str, Any]) -> None:
    for one in report["results"]:
        load, late_s = one["load_average"], one["sent_late_s"]
        print(
            f"{one['case']}: {one['requests']} requests, {one['lost']} lost; sent late by {late_s['p50']:.4f} s "
            f"(P50), {late_s['p95']:.4f} s (P95); load average {load['before']:.1f} to {load['after']:.1f}"
        )
        for name, latencies in one["quantiles"].items():
            for latency, found in latencies.items():
                print(
                    f"  {latency:4s} {name}: live {found['live_s']:.4f} s, offline {found['offline_s']:.4f} s, "
                    f"{found['error']:+.1%}"
                )


def _print_demo(found: dict[str, Any]) -> None:
    print(f"demo's pool with Trimtab deciding: {len(found['seeds'])} live runs of {found['seconds']:g} s")
    for seed, live, moved in zip(found["seeds"], found["live"], found["virtual"]["transitions"], strict=True):
        load = live["load_average"]
        print(
            f"  seed {seed}: {live['requests']} requests, sent late by at most {live['sent_late_max_s']:.3f} s; "
            f"{live['transitions']} transitions, virtual {moved:.1f}; "
            f"load average {load[0]:.1f} to {load[1]:.1f}"
        )
    for service, shares in found["services"].items():
        for share, latencies in shares.items():
            for latency, figures in latencies.items():
                print(
                    f"    {service:7s} {latency:4s} {share}: live {figures['live_s']:.3f} s, virtual "
                    f"{figures['virtual_s']:.3f} s, {figures['error']:+.1%} (chance: {figures['sampling']:.1%}; single "
                    f"virtual runs: {figures['least_s']:.3f} to {figures['most_s']:.3f} s)"
                )


def main() -> int:
    """Print what was compared; exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description="live latencies against those of virtual time")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of each live run of a case")
    parser.add_argument("--case", choices=[*sorted(RATES_RPS), "none"], help="only this one")
    parser.add_argument("--demo", action="store_true", help="compare the demo's pool, too: 40 minutes more")
    parser.add_argument("--demo-seconds", type=float, default=280.0, help="length of each live run of the demo's pool")
    parser.add_argument(
        "--demo-runs", type=int, default=6, help="live runs of the demo's pool, each with its own trace"
    )
    parser.add_argument("--live-folder", type=Path, help="keeps the demo's live runs; those in it are not made again")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help=f"of the live stack (default {PORT_BASE})")
    arguments = parser.parse_args()
    names = sorted(RATES_RPS) if arguments.case is None else [name for name in RATES_RPS if name == arguments.case]
    demo = None
    if arguments.demo:
        demo = DemoPlan(
            seconds=arguments.demo_seconds,
            runs=arguments.demo_runs,
            live_folder=arguments.live_folder,
        )
    report = run(names, seconds=arguments.seconds, seed=arguments.seed, port=arguments.port_base, demo=demo)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
        if report["demo"] is not None:
            _print_demo(report["demo"])
    return 0 if all(bar["ok"] for bar in report["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
