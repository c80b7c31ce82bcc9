"""How fast fleets are simulated, and how that grows with replicas: ``python -m bench.simulate --json``.

Eight H100 replicas serve the whole Azure conversation trace; fleets of 8 to 1,000 serve a trace of constant load per
replica, with bursts and lengths as ServeGen's large language model service has them. Without the recorded material
(``--material``, else TRIMTAB_TEST_MATERIAL) traces of the same rates and mean lengths are generated, and the report
notes it. Timed are routing, engines and records, and for the fleets the making of the trace piece by piece, in CPU
seconds. For comparison the stepping engine, which does every iteration, serves the same first minutes.
"""

import argparse
import csv
import functools
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench._report import machine, put_out
from lab.virtual.fixed.colocated import colocated
from lab.virtual.fixed.records import Records
from simulator.core.engine import Engine
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest
from simulator.profiles import packaged_profiles
from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate
from simulator.traces.model import TraceRequest
from simulator.traces.readers import read_trace

PROFILE = "h100-8b-tp1"
SEED = 11
REPEATS = 4
SMALL_FLEET = 8
FLEETS = {8: 2500.0, 64: 625.0, 250: 160.0, 1000: 40.0}
"""Replicas: seconds of the trace; the load per replica is the same."""
REQUESTS_PER_REPLICA_S = 2.0
BURST_CV = 1.24
STEPPING_S = 300.0
SPEED_BAR = 2000.0
GROWTH_BAR = 1.1
_CONVERSATION = Path("data/traces/AzureLLMInferenceTrace_conv.csv")
_SERVEGEN = Path("data/traces/servegen")

Lookup = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


def conversation(material: Path | None) -> tuple[list[TraceRequest], str]:
    """The Azure conversation trace, or one of its rate, length and mean lengths; and which of the two it is."""
    path = None if material is None else material / _CONVERSATION
    if path is not None and path.is_file():
        return list(read_trace(path)), path.name
    load = ServiceLoad(
        service="trace",
        request_rps=Curve(((0.0, 5.53),)),
        prompt=Lengths(mean_tokens=1155, cv=0.96, max_tokens=14_000),
        output=Lengths(mean_tokens=211, cv=0.77, max_tokens=1000),
    )
    return generate([load], duration_s=3502.0, seed=SEED), "generated: 5.53 requests/s, 1,155 in, 211 out"


class FleetTrace:
    """Bursty arrivals (gamma gaps) at a constant rate per replica, with ServeGen's lengths or lognormal ones.

    Made piece by piece while it is served, as a file would be read: a fleet's trace need not fit into memory.
    """

    def __init__(self, material: Path | None) -> None:
        folder = None if material is None else material / _SERVEGEN
        self._lengths: tuple[Lookup, Lookup] | None = None
        self.source = "generated with lognormal lengths"
        if folder is not None and folder.is_dir():
            self._lengths = (
                _lookup(folder / "language_m-large_input_tokens_hist.csv"),
                _lookup(folder / "language_m-large_output_tokens_hist.csv"),
            )
            self.source = "generated with the lengths of servegen/language_m-large"

    def requests(self, replicas: int, duration_s: float) -> Iterator[TraceRequest]:
        """The trace of one fleet."""
        dice = np.random.default_rng([SEED, replicas])
        rate_rps = REQUESTS_PER_REPLICA_S * replicas
        shape = 1.0 / BURST_CV**2
        left, at_s = round(rate_rps * duration_s), 0.0
        while left > 0:
            count = min(left, 1000)
            left -= count
            arrivals_s = at_s + np.cumsum(dice.gamma(shape, 1.0 / (shape * rate_rps), count))
            at_s = float(arrivals_s[-1])
            if self._lengths is None:
                prompts = np.clip(dice.lognormal(6.4, 0.9, count), 1, 30_000).astype(int)
                outputs = np.clip(dice.lognormal(4.3, 1.2, count), 1, 2_000).astype(int)
            else:
                prompts, outputs = (low[np.searchsorted(upto, dice.random(count))] for low, upto in self._lengths)
            for one in zip(arrivals_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
                yield TraceRequest(one[0], "fleet", one[1], one[2])


def _lookup(path: Path) -> Lookup:
    """Token counts, and the share of requests with no more than each."""
    with path.open(encoding="utf-8") as file:
        rows = [(int(row["lo"]), float(row["prob"])) for row in csv.DictReader(file)]
    upto = np.cumsum([weight for _, weight in rows])
    return np.clip([low for low, _ in rows], 1, 16_000), upto / upto[-1]


def timed(profile: Profile, requests: Callable[[], Iterable[TraceRequest]], replicas: int) -> tuple[float, Records]:
    """CPU seconds of the fastest of a few runs, and what was served: other work on the machine only ever adds to it."""
    seconds: list[float] = []
    records = Records()
    for _ in range(REPEATS):
        # What was there before does not belong to the run: the collector of garbage need not look at it again.
        gc.collect()
        gc.freeze()
        fleet = colocated(profile, replicas)
        started_s = time.process_time()
        records = fleet.run(requests())
        seconds.append(time.process_time() - started_s)
    return min(seconds), records


def stepping_speed(profile: Profile, requests: Sequence[TraceRequest]) -> float:
    """Simulated seconds per CPU second of engines that do every iteration, dealt the same requests in turn."""
    limits, timing = profile.engine_limits(), profile.iteration_model()
    started_s = time.process_time()
    for first in range(SMALL_FLEET):
        engine, now_s = Engine(limits, timing), 0.0
        mine = list(requests[first::SMALL_FLEET])[::-1]
        while mine or engine.unfinished:
            if not engine.unfinished:
                now_s = max(now_s, mine[-1].arrival_s)
            while mine and mine[-1].arrival_s <= now_s:
                request = mine.pop()
                name = str(len(mine))
                engine.submit(EngineRequest(name, request.prompt_tokens, request.output_tokens), request.arrival_s)
            now_s = engine.begin_step(now_s) or now_s
            engine.end_step()
    return STEPPING_S / (time.process_time() - started_s)


def run(material: Path | None) -> dict[str, object]:
    """All figures as one document."""
    profile = packaged_profiles()[PROFILE]
    trace, trace_source = conversation(material)
    cpu_s, records = timed(profile, lambda: trace, SMALL_FLEET)
    simulated_s = trace[-1].arrival_s
    speed_8 = simulated_s / cpu_s
    rows: list[dict[str, float]] = []
    points: list[tuple[float, float]] = []
    fleet = FleetTrace(material)
    for replicas, duration_s in FLEETS.items():
        fleet_cpu_s, served = timed(profile, functools.partial(fleet.requests, replicas, duration_s), replicas)
        points.append((math.log(replicas), math.log(fleet_cpu_s / duration_s)))
        rows.append(
            {
                "replicas": replicas,
                "requests": len(served),
                "simulated_s": duration_s,
                "cpu_s": fleet_cpu_s,
                "speed": duration_s / fleet_cpu_s,
                "cpu_us_per_request": 1e6 * fleet_cpu_s / len(served),
            }
        )
    growth = float(np.polyfit([x for x, _ in points], [y for _, y in points], 1)[0])
    stepping = stepping_speed(profile, [r for r in trace if r.arrival_s < STEPPING_S])
    return {
        "bench": "simulate",
        "machine": machine(),
        "inputs": {
            "profile": PROFILE,
            "trace": trace_source,
            "fleet_trace": fleet.source,
            "requests_per_replica_s": REQUESTS_PER_REPLICA_S,
            "repeats": REPEATS,
            "seed": SEED,
        },
        "results": {
            "conversation": {
                "replicas": SMALL_FLEET,
                "requests": len(records),
                "output_tokens": int(records.output_tokens.sum()),
                "simulated_s": simulated_s,
                "cpu_s": cpu_s,
                "cpu_us_per_request": 1e6 * cpu_s / len(records),
                "ttft_p50_s": float(np.median(records.ttft_s)),
                "tpot_p50_s": float(np.median(records.tpot_s)),
            },
            "fleets": rows,
            "stepping_speed_8": stepping,
            "jumping_over_stepping": speed_8 / stepping,
        },
        "bars": [
            {"name": "speed_8", "value": speed_8, "bar": SPEED_BAR, "ok": speed_8 >= SPEED_BAR},
            {"name": "growth_exponent", "value": growth, "bar": GROWTH_BAR, "ok": growth <= GROWTH_BAR},
        ],
    }


def parsed(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """`json`, and `material`: the folder with data/traces, or None where none is named.

    Ends the program for one that is named and missing, in place of using another trace.
    """
    parser = argparse.ArgumentParser(description="simulated seconds per CPU second, and growth with replicas")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = environ.get("TRIMTAB_TEST_MATERIAL")
    default = Path(given) if given else None
    parser.add_argument(
        "--material", type=Path, default=default, help="folder with data/traces; else they are generated"
    )
    arguments = parser.parse_args(argv)
    if arguments.material is not None and not arguments.material.is_dir():
        parser.error(f"{arguments.material}: no such folder; leave --material out for generated traces")
    return arguments


def main() -> int:
    """Print the figures; exit status 1 when a bar is missed."""
    arguments = parsed(sys.argv[1:], os.environ)
    return put_out(run(arguments.material), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
