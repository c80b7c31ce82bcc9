"""Pages as rows, and a table with the roles above it, for the tests of windows."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from metrics_collector.core.counting import Floats
from metrics_collector.core.gpu_table import GpuAverages
from metrics_collector.core.liveness import LivenessReport, Verdicts, judge_all
from metrics_collector.core.replica_windows import SIGNAL_COLUMN, ReplicaWindows
from metrics_collector.core.roles import ExpectedReplicas, replica_values, role_windows
from metrics_collector.core.schema import COUNTER_COLUMN, COUNTERS, GAUGE_COLUMN, Reading, Schema, schema_of
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import Target
from metrics_collector.core.window import Window
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.role_window import role_window_to_proto
from trimtab.domain.signals import SIGNALS, Counter, Gauge, Latency

BOUNDS = (0.1, 1.0, math.inf)
PLAIN = schema_of(((Latency.TTFT, BOUNDS),))
BARE = schema_of()


def page(
    generated: float | None = None,
    *,
    ttft: Sequence[float] | None = None,
    ttft_s: float = 0.0,
    schema: Schema = PLAIN,
    **columns: float,
) -> Reading:
    """A page with the given columns and no others; ``ttft`` are cumulative counts on the schema's bounds."""
    values = [math.nan] * schema.width
    if generated is not None:
        columns["decode_tokens"] = generated
    for name, value in columns.items():
        where = GAUGE_COLUMN[Gauge(name)] if name in set(Gauge) else COUNTER_COLUMN[Counter(name)]
        values[where] = value
    if ttft is not None:
        place = schema.histograms[Latency.TTFT]
        values[place.first : place.last + 1] = ttft
        values[place.sum] = ttft_s
    return Reading(schema, values)


def increase(windows: ReplicaWindows, counter: Counter, position: int = 0) -> float | None:
    return number(windows.increases[position, COUNTERS.index(counter)])


def value(windows: ReplicaWindows, name: "pb.Signal.ValueType", position: int = 0) -> float | None:
    return number(windows.values[position, SIGNAL_COLUMN[SIGNALS[name]]])


def number(found: np.float64 | float) -> float | None:
    return None if math.isnan(found) else float(found)


class OneServer:
    """One target whose pages the test gives."""

    def __init__(self, *pages: tuple[float, Reading], keep_s: float = 30.0, rows: int = 64) -> None:
        self.table = SeriesTable(rows=rows, capacity=2)
        self.table.add("t", keep_s=keep_s)
        for at_s, reading in pages:
            self.table.put("t", reading, at_s=at_s)

    def window(self, start_s: float, end_s: float) -> ReplicaWindows:
        return self.table.close(["t"], Window(start_s=start_s, end_s=end_s))

    def total(self, counter: Counter) -> float | None:
        return self.table.total("t", counter)


def target(
    name: str,
    *,
    service: str = "chat",
    role: "types_pb2.Role.ValueType" = types_pb2.ROLE_DECODE,
    counted: bool = True,
    routable: bool = False,
    gpus: int = 1,
) -> Target:
    return Target(
        target_id=f"id-of-{name}",
        address="http://127.0.0.1:1",
        service=service,
        role=role,
        replica=name,
        cluster="local",
        gpus=gpus,
        source="file_sd",
        counted=counted,
        routable_by_actuator=routable,
    )


class Fleet:
    """Replicas of some roles, their pages, and what comes of them."""

    def __init__(self, *targets: Target, stuck_after_s: float = 10.0) -> None:
        self.table = SeriesTable(rows=16, capacity=1)
        self.stuck_after_s = stuck_after_s
        self.expected_replicas = ExpectedReplicas.of(targets)
        for item in targets:
            self.table.add(item.target_id, keep_s=5)

    def put(self, name: str, at_s: float, reading: Reading) -> None:
        self.table.put(f"id-of-{name}", reading, at_s=at_s)

    def verdicts(
        self, end_s: float, *, window_s: float = 5.0, witnesses: Mapping[str, LivenessReport] | None = None
    ) -> tuple[ReplicaWindows, Verdicts]:
        windows = self.table.close(self.expected_replicas.target_ids, Window(start_s=end_s - window_s, end_s=end_s))
        limits_s = self.expected_replicas.limits_s(lambda _key: self.stuck_after_s)
        return windows, judge_all(self.expected_replicas.target_ids, windows, witnesses or {}, limits_s=limits_s)

    def values(self, end_s: float, *, window_s: float = 5.0, gpus: Mapping[str, GpuAverages] | None = None) -> Floats:
        windows, verdicts = self.verdicts(end_s, window_s=window_s)
        return replica_values(self.expected_replicas, windows, verdicts, gpus)

    def partials(
        self,
        end_s: float,
        *,
        window_s: float = 5.0,
        collector: str = "c-0",
        witnesses: Mapping[str, LivenessReport] | None = None,
        gpus: Mapping[str, GpuAverages] | None = None,
        replica_revisions: Mapping[str, int] | None = None,
    ) -> list[pb.RolePartial]:
        windows, verdicts = self.verdicts(end_s, window_s=window_s, witnesses=witnesses)
        closed = role_windows(
            self.expected_replicas,
            windows,
            verdicts,
            replica_values(self.expected_replicas, windows, verdicts, gpus),
            collector=collector,
            replica_revisions=replica_revisions or {},
        )
        return [role_window_to_proto(window) for window in closed]
