"""What one round costs once pages are read: ``python -m bench.windows --json``.

Of each target one row of a vLLM page is put into the table; then the round is closed: rows, windows, verdicts, role
sums as messages, and a sample per replica as bytes. All is the code that the collector runs, without sockets and store;
in CPU seconds, so that a busy machine gives the same figures.
"""

import math
import random
import sys
import time
from collections.abc import Sequence

from bench._report import machine, main_of
from metrics_collector.core.schema import COUNTERS, GAUGE_COLUMN, SCALARS, Reading, Schema, schema_of
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import Target
from metrics_collector.core.window import Window
from metrics_collector.core.window_close import close_slice, slices_of
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.role_window import role_window_to_proto
from trimtab.domain.signals import Gauge, Latency

TARGETS = (1_000, 10_000)
TARGETS_PER_ROLE = 20
WARM_UP_ROUNDS = 8
ROUNDS = 8
WINDOW_S = 5.0
BOUNDS = 20
SEED = 3
BAR_US = 25.0
GROWTH_BAR = 1.1


def schema() -> Schema:
    """Five latencies of as many buckets as vLLM has."""
    bounds_s = (*(0.001 * 1.7**number for number in range(BOUNDS - 1)), math.inf)
    return schema_of(tuple((latency, bounds_s) for latency in Latency))


def page(shape: Schema, round_number: int, dice: random.Random) -> Reading:
    """A page on which every counter and bucket has moved since the round before."""
    row = [round_number * 100 + dice.random() for _ in range(SCALARS)]
    row[: len(GAUGE_COLUMN)] = [dice.randint(0, 8), 0, 0.5, 0.6, 1, 1_700_000_000]
    row[GAUGE_COLUMN[Gauge.WAITING]] = dice.randint(0, 3)
    for _, bounds_s in shape.bounds_s:
        row += [float(round_number * bucket) for bucket in range(1, len(bounds_s) + 1)]
        row.append(round_number * 3.5)
    return Reading(shape, row)


def fleet(targets: int) -> list[Target]:
    """Decode replicas of services of equal size."""
    return [
        Target(
            target_id=f"replica-{number:05d}",
            address=f"http://127.0.0.1:{number}",
            service=f"service-{number // TARGETS_PER_ROLE:04d}",
            role=types_pb2.ROLE_DECODE,
            replica=f"replica-{number:05d}",
            cluster="local",
            gpus=1,
            source="file_sd",
            counted=True,
        )
        for number in range(targets)
    ]


def cost_us(count: int) -> dict[str, float]:
    """CPU microseconds per target and round, by step, of the quickest round: a busy machine only makes them slower.

    Raises RuntimeError for an incomplete round.
    """
    shape, dice, targets = schema(), random.Random(SEED), fleet(count)
    table = SeriesTable()
    for target in targets:
        table.add(target.target_id, keep_s=WINDOW_S)
    slices = slices_of(targets, collector="bench", stuck_after_s=lambda _key: 10.0)
    puts: list[float] = []
    closes: list[float] = []
    for number in range(1, WARM_UP_ROUNDS + ROUNDS + 1):
        pages = [page(shape, number, dice) for _ in range(min(count, 200))]
        began = time.process_time()
        for index, target in enumerate(targets):
            table.put(target.target_id, pages[index % len(pages)], at_s=number + index / (2 * count))
        put = time.process_time()
        window = Window(start_s=number + 1 - WINDOW_S, end_s=number + 1.0)
        samples = 0
        for part in slices:
            found = close_slice(
                table,
                part,
                window,
                states=[pb.TARGET_STATE_UNSPECIFIED] * len(part.expected_replicas.targets),
                witnesses={},
                gpus=None,
                collector="bench",
                replica_revisions={"local": number},
            )
            samples += len(found.samples)
            for one in found.role_windows:
                role_window_to_proto(one)
        closed = time.process_time()
        if samples != count:
            raise RuntimeError(f"{samples} samples of {count} replicas: the round is not whole")
        if number > WARM_UP_ROUNDS:
            puts.append((put - began) / count * 1e6)
            closes.append((closed - put) / count * 1e6)
    put_us, close_us = min(puts), min(closes)
    return {"put_us": put_us, "close_us": close_us, "round_us": put_us + close_us}


def run(counts: Sequence[int] = TARGETS) -> dict[str, object]:
    """All figures as one document."""
    rows = {count: cost_us(count) for count in counts}
    first, last = counts[0], counts[-1]
    growth = 1 + math.log(rows[last]["round_us"] / rows[first]["round_us"]) / math.log(last / first)
    worst = max(row["round_us"] for row in rows.values())
    return {
        "bench": "windows",
        "machine": machine(),
        "inputs": {
            "targets": list(counts),
            "targets_per_role": TARGETS_PER_ROLE,
            "columns": schema().width,
            "counters": len(COUNTERS),
            "rounds": ROUNDS,
            "seed": SEED,
        },
        "results": {"per_target_and_round": [{"targets": count, **row} for count, row in rows.items()]},
        "bars": [
            {"name": "windows_round_us", "value": worst, "bar": BAR_US, "ok": worst <= BAR_US},
            {"name": "windows_growth_exponent", "value": growth, "bar": GROWTH_BAR, "ok": growth <= GROWTH_BAR},
        ],
    }


def main() -> int:
    """Print the figures; exit status 1 when a bar is missed."""
    return main_of(run, "CPU time of a round per target, once pages are read")


if __name__ == "__main__":
    sys.exit(main())
