"""Where new replicas of a scaled service go: the pre-scheduler places, a cluster's actuator carries out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.vocabulary import Role, TopologyLevel


class SubgroupClass(IntEnum):
    """RDMA Subgroup classes (HeteroScale 3.4): the higher, the scarcer the hardware mix under one switch."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """One new replica: all its GPUs are on one node."""

    replica: str
    role: Role
    node: str
    gpu_indices: tuple[int, ...]
    gpu_type: str
    model: str
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleIn:
    """Take `count` replicas of a role out of a group; the actuator picks the victims."""

    role: Role
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """Everything that one cycle does to one Deployment Group: applied as a whole or not at all.

    `level` and `subgroup_class` describe the domain. They are None where the sender left them out: an actuator does not
    need them.
    """

    group: str
    service: str
    cluster: str
    domain: str = ""
    level: TopologyLevel | None = None
    subgroup_class: SubgroupClass | None = None
    decision_id: str
    add: tuple[ReplicaPlacement, ...] = ()
    remove: tuple[ScaleIn, ...] = ()


def placement_to_proto(group: GroupPlacement) -> scheduler_pb2.GroupPlacement:
    """The message of one group's placement."""
    return scheduler_pb2.GroupPlacement(
        group=group.group,
        service=group.service,
        cluster=group.cluster,
        domain=group.domain,
        domain_level=types_pb2.TopologyLevel.ValueType(group.level.number if group.level is not None else 0),
        subgroup_class=scheduler_pb2.SubgroupClass.ValueType(int(group.subgroup_class or 0)),
        add=[
            scheduler_pb2.ReplicaPlacement(
                replica=item.replica,
                role=types_pb2.Role.ValueType(item.role.number),
                node=item.node,
                gpu_indices=item.gpu_indices,
                model=item.model,
                profile=item.profile,
                gpu_type=item.gpu_type,
            )
            for item in group.add
        ],
        remove=[
            scheduler_pb2.ScaleIn(role=types_pb2.Role.ValueType(item.role.number), count=item.count)
            for item in group.remove
        ],
        decision_id=group.decision_id,
    )


def placement_from_proto(message: scheduler_pb2.GroupPlacement) -> GroupPlacement:
    """The placement in a message. Raises ValueError for a role, level or class that this release does not know."""
    return GroupPlacement(
        group=message.group,
        service=message.service,
        cluster=message.cluster,
        decision_id=message.decision_id,
        domain=message.domain,
        level=TopologyLevel.from_number(message.domain_level) if message.domain_level else None,
        subgroup_class=SubgroupClass(message.subgroup_class) if message.subgroup_class else None,
        add=tuple(
            ReplicaPlacement(
                replica=item.replica,
                role=Role.from_number(item.role),
                node=item.node,
                gpu_indices=tuple(item.gpu_indices),
                gpu_type=item.gpu_type,
                model=item.model,
                profile=item.profile,
            )
            for item in message.add
        ),
        remove=tuple(ScaleIn(role=Role.from_number(item.role), count=item.count) for item in message.remove),
    )
