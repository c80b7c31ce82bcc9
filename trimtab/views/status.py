"""The state of the fleet at a glance: services by role, pools with their GPUs, what holds, what was decided last."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.views.decisions import DecisionRow, is_finished, newest_rows, pre_warming_row
from trimtab.views.memory_waits import WaitingForMemory
from trimtab.views.targets import describe_target
from trimtab.views.text import UNSURE, measurement_text, message_dict, message_dicts, short_name

LAST_DECISIONS = 8
LAST_FAILING_TARGETS = 5
NO_LEADER = "this policy engine does not lead: another one does, or the store does not answer and nothing is decided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The services' answers; a part that could not be read is None, and `error` has the reason."""

    status: policy_pb2.GetStatusResponse | None
    decisions: Sequence[decision_pb2.Decision]
    failing_targets: Sequence[collector_pb2.Target] = ()
    waiting: Sequence[WaitingForMemory] = ()
    warmed: Sequence[actuator_pb2.Operation] = ()
    """Pre-warmings, newest first."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with the reason when its quality is less than ok, and the same with a mark in place of the reason."""

    text: str
    brief: str

    @property
    def unsure(self) -> bool:
        """Whether the brief form carries the mark."""
        return self.brief.endswith(UNSURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRow:
    """One role of a service. Rates are tokens a second; `routable` is of those desired, `replicas` counts by state."""

    role: str
    decode_tps: Figure
    prefill_tps: Figure
    running: Figure
    waiting: Figure
    ttft_p95: Figure
    tpot_p95: Figure
    routable: str
    replicas: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRow:
    """One service. `z` is None where it has none; `region` is `critical`, `nominal`, `surplus` or empty."""

    service: str
    z: float | None
    region: str
    held: Figure
    roles: tuple[RoleRow, ...]


@dataclass(frozen=True, slots=True)
class GpuCell:
    """One GPU of a pool and the service that is awake on it; empty for none."""

    index: int
    service: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool. `holding` is the reason why nothing is decided, `warming` has a line for each pre-warming under way."""

    pool: str
    given: str
    operation_id: str
    holding: str
    warming: tuple[str, ...]
    nodes: tuple[tuple[str, tuple[GpuCell, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """The whole status. `notices` are waits with reasons; `problems` are of targets and of silent services."""

    leader: bool
    services: tuple[ServiceRow, ...]
    notices: tuple[str, ...]
    pools: tuple[PoolView, ...]
    unreachable: str
    decisions: tuple[DecisionRow, ...]
    problems: tuple[str, ...]


def status_view(answers: Answers, status: policy_pb2.GetStatusResponse) -> StatusView:
    """The view of what was answered; `status` is the answer of the policy engine."""
    lost = [item for item in status.clusters if not item.reachable]
    return StatusView(
        leader=status.leader,
        services=tuple(_service(item) for item in status.services),
        notices=(*_holding(status), *map(str, answers.waiting)),
        pools=tuple(_pool(item, answers.warmed) for item in status.pools),
        unreachable="; ".join(f"{item.cluster}: {item.detail or 'no answer'}" for item in lost),
        decisions=newest_rows(answers.decisions, answers.warmed, limit=LAST_DECISIONS),
        problems=_problems(answers),
    )


def status_document(answers: Answers, status: policy_pb2.GetStatusResponse) -> dict[str, Any]:
    """What was answered, as one JSON document."""
    return message_dict(status) | {
        "decisions": message_dicts(answers.decisions),
        "failing_targets": message_dicts(answers.failing_targets),
        "waiting_for_memory": [dataclasses.asdict(item) for item in answers.waiting],
        "pre_warmings": message_dicts(answers.warmed),
        "error": answers.error,
    }


def _service(item: policy_pb2.ServiceStatus) -> ServiceRow:
    return ServiceRow(
        service=item.service,
        z=item.z if item.HasField("z") else None,
        region=short_name(policy_pb2.Region.Name(item.region), "REGION_") if item.region else "",
        held=_figure(item.held, digits=0),
        roles=tuple(_role(role) for role in item.roles),
    )


def _role(role: policy_pb2.RoleStatus) -> RoleRow:
    counts = sorted(role.replicas.items())
    return RoleRow(
        role=short_name(types_pb2.Role.Name(role.role), "ROLE_"),
        decode_tps=_figure(role.decode_tps, digits=0),
        prefill_tps=_figure(role.prefill_tps, digits=0),
        running=_figure(role.running),
        waiting=_figure(role.waiting),
        ttft_p95=_figure(role.ttft_p95_s, digits=2, unit=" s"),
        tpot_p95=_figure(role.tpot_p95_s, digits=3, unit=" s"),
        routable=f"{role.routable}/{role.desired}",
        replicas=", ".join(f"{count} {short_name(name, 'LIFE_CYCLE_')}" for name, count in counts if count),
    )


def _figure(found: types_pb2.Measurement, *, digits: int = 1, unit: str = "") -> Figure:
    return Figure(
        measurement_text(found, digits=digits, unit=unit),
        measurement_text(found, digits=digits, unit=unit, brief=True),
    )


def _holding(status: policy_pb2.GetStatusResponse) -> list[str]:
    """Why scaled services hold, a line each; a pooled one holds with its pool, whose own line has the reason."""
    return [
        f"{item.service}: {'paused' if item.paused else item.holding}"
        for item in status.services
        if item.paused or (item.holding and item.mode != policy_pb2.SERVICE_MODE_POOLED)
    ]


def _pool(item: policy_pb2.PoolStatus, warmed: Sequence[actuator_pb2.Operation]) -> PoolView:
    waiting = "paused" if item.paused else item.holding
    if item.operation_id and item.operation_id in waiting:
        waiting = ""
    by_node: dict[str, list[GpuCell]] = {}
    for gpu in item.gpus:
        by_node.setdefault(gpu.node, []).append(GpuCell(gpu.index, gpu.service))
    rows = [pre_warming_row(one) for one in warmed if one.subject == item.pool and not is_finished(one)]
    return PoolView(
        pool=item.pool,
        given=f"{item.awake_gpus} of {item.budget_gpus} GPUs given",
        operation_id=item.operation_id,
        holding=waiting,
        warming=tuple(f"pre-warming {row.identity} since {row.time}: {row.reason}" for row in rows),
        nodes=tuple((node, tuple(by_node[node])) for node in sorted(by_node)),
    )


def _problems(answers: Answers) -> tuple[str, ...]:
    lines = [describe_target(target) for target in answers.failing_targets[:LAST_FAILING_TARGETS]]
    more = len(answers.failing_targets) - len(lines)
    if more > 0:
        lines.append(f"and {more} more: trimtab targets")
    return (*lines, *([answers.error] if answers.error else []))
