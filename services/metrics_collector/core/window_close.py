"""One round's work, in slices: a window of some roles' targets becomes role windows, samples and verdicts.

A slice holds whole services and is small enough that scrapes are not kept waiting for it; what does not change from
round to round is made once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from metrics_collector.core.counting import Bools, Floats
from metrics_collector.core.gpu_table import GpuAverages
from metrics_collector.core.liveness import LivenessReport, Verdicts, judge_all
from metrics_collector.core.roles import ExpectedReplicas, replica_values, role_windows
from metrics_collector.core.samples import EncodedSample, Identity, Rows, encode, identity
from metrics_collector.core.schema import Schema
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import RoleKey, Target
from metrics_collector.core.window import Window
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.role_window import RoleWindow

SLICE_TARGETS = 1000


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Some services' targets. ``limits_s`` (n,) are their longest iterations."""

    expected_replicas: ExpectedReplicas
    identities: tuple[Identity, ...]
    limits_s: Floats


@dataclass(frozen=True, kw_only=True)
class ClosedSlice:
    """What a window of a slice brings. ``still`` (n,): targets whose counters do not move, or that sleep."""

    expected_replicas: ExpectedReplicas
    role_windows: list[RoleWindow]
    samples: list[EncodedSample]
    schemas: frozenset[Schema]
    verdicts: Verdicts
    still: Bools


def slices_of(targets: Iterable[Target], *, collector: str, stuck_after_s: Callable[[RoleKey], float]) -> list[Slice]:
    """The placed targets cut into slices of about ``SLICE_TARGETS``, no service across two of them."""
    placed = sorted((target for target in targets if target.placed), key=lambda target: target.service)
    found: list[Slice] = []
    waiting: list[Target] = []

    def cut() -> None:
        if waiting:
            expected_replicas = ExpectedReplicas.of(waiting)
            identities = tuple(
                identity(target.key, target.replica, collector=collector) for target in expected_replicas.targets
            )
            found.append(
                Slice(
                    expected_replicas=expected_replicas,
                    identities=identities,
                    limits_s=expected_replicas.limits_s(stuck_after_s),
                )
            )
            waiting.clear()

    for _, own in groupby(placed, key=lambda target: target.service):
        service = list(own)
        if len(waiting) + len(service) > SLICE_TARGETS:
            cut()
        waiting.extend(service)
    cut()
    return found


def close_slice(
    table: SeriesTable,
    part: Slice,
    window: Window,
    *,
    states: Sequence["pb.TargetState.ValueType"],
    witnesses: Mapping[str, LivenessReport],
    gpus: Mapping[str, GpuAverages] | None,
    collector: str,
    replica_revisions: Mapping[str, int],
) -> ClosedSlice:
    """Close ``window`` over a slice. ``states`` has a state for every target whose scrapes fail, else unspecified, in
    the expected_replicas's order; ``witnesses`` and ``gpus`` are by target."""
    expected_replicas = part.expected_replicas
    windows = table.close(expected_replicas.target_ids, window)
    verdicts = judge_all(expected_replicas.target_ids, windows, witnesses, limits_s=part.limits_s)
    values = replica_values(expected_replicas, windows, verdicts, gpus)
    found = role_windows(
        expected_replicas, windows, verdicts, values, collector=collector, replica_revisions=replica_revisions
    )
    failing = np.array(states, dtype=np.uint8)
    shown = np.where(failing != pb.TARGET_STATE_UNSPECIFIED, failing, verdicts.states)
    qualities = windows.qualities(verdicts.stuck)
    samples: list[EncodedSample] = []
    schemas: set[Schema] = set()
    for rows in table.levels(expected_replicas.target_ids):
        own = rows.positions
        schemas.add(rows.schema)
        samples += encode(
            Rows(
                schema=rows.schema,
                identities=[part.identities[position] for position in own.tolist()],
                at_s=rows.at_s,
                states=shown[own].astype(np.uint8),
                qualities=qualities[own],
                signals=values[own],
                levels=rows.levels,
            )
        )
    return ClosedSlice(
        expected_replicas=expected_replicas,
        role_windows=found,
        samples=samples,
        schemas=frozenset(schemas),
        verdicts=verdicts,
        still=windows.asleep | (windows.read & (windows.still_s > window.length_s / 2)),
    )
