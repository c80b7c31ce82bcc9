"""The replicas that a scaled service should have: the policy engine requests them, the pre-scheduler places them."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.time import seconds_of, timestamp_of
from trimtab.domain.vocabulary import Role, TopologyLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """How many replicas of a role a service should have, and what one of them needs.

    `gpu_types` are in order of preference, and empty for any type. `ratio_part` is this role's part of the ratio's
    smallest unit.
    """

    role: Role
    replicas: int
    gpus_per_replica: int
    gpu_types: tuple[str, ...] = ()
    model: str = ""
    profile: str = ""
    ratio_part: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRequest:
    """What a scaled service should have. Absolute: counts, not differences. Times are Unix seconds."""

    service: str
    decision_id: str
    roles: tuple[RoleRequest, ...]
    affinity: TopologyLevel = TopologyLevel.CLUSTER
    priority: int = 0
    allow_partial: bool = False
    created_s: float | None = None
    expires_s: float | None = None
    writer: str = ""
    token: int = 0
    replica_revisions: tuple[tuple[str, int], ...] = ()
    """(cluster, replica revision) that the decision rests on, in order of clusters."""

    @property
    def clusters(self) -> frozenset[str]:
        """Clusters whose replicas the decision rests on."""
        return frozenset(cluster for cluster, _ in self.replica_revisions)

    @property
    def bound_level(self) -> TopologyLevel:
        """The widest level a group may span: of a disaggregated MoE service never more than an S2."""
        return TopologyLevel.S2 if self.is_moe and self.affinity is TopologyLevel.CLUSTER else self.affinity

    @property
    def is_moe(self) -> bool:
        """Whether prefill is split into attention and FFN, which share an S1."""
        return {Role.PREFILL_ATTENTION, Role.PREFILL_FFN} <= {item.role for item in self.roles}


def request_to_proto(request: ScalingRequest) -> scheduler_pb2.ScalingRequest:
    """The message of a request. No fencing is set for a request without a token."""
    message = scheduler_pb2.ScalingRequest(
        service=request.service,
        roles=[
            scheduler_pb2.RoleRequest(
                role=types_pb2.Role.ValueType(item.role.number),
                replicas=item.replicas,
                gpus_per_replica=item.gpus_per_replica,
                gpu_types=item.gpu_types,
                model=item.model,
                profile=item.profile,
                ratio_part=item.ratio_part,
            )
            for item in request.roles
        ],
        priority=request.priority,
        affinity=types_pb2.TopologyLevel.ValueType(request.affinity.number),
        allow_partial=request.allow_partial,
        decision_id=request.decision_id,
        replica_revisions=dict(request.replica_revisions),
    )
    if request.token:
        message.fencing.CopyFrom(types_pb2.Fencing(writer=request.writer, token=request.token))
    for seconds, stamp in ((request.created_s, message.create_time), (request.expires_s, message.expire_time)):
        if seconds is not None:
            stamp.CopyFrom(timestamp_of(seconds))
    return message


def request_from_proto(message: scheduler_pb2.ScalingRequest) -> ScalingRequest:
    """The request in a message. Raises ValueError for a role or a level that this release does not know."""
    return ScalingRequest(
        service=message.service,
        decision_id=message.decision_id,
        roles=tuple(
            RoleRequest(
                role=Role.from_number(item.role),
                replicas=item.replicas,
                gpus_per_replica=item.gpus_per_replica,
                gpu_types=tuple(item.gpu_types),
                model=item.model,
                profile=item.profile,
                ratio_part=max(1, item.ratio_part),
            )
            for item in message.roles
        ),
        affinity=TopologyLevel.from_number(message.affinity) if message.affinity else TopologyLevel.CLUSTER,
        priority=message.priority,
        allow_partial=message.allow_partial,
        created_s=seconds_of(message.create_time) if message.HasField("create_time") else None,
        expires_s=seconds_of(message.expire_time) if message.HasField("expire_time") else None,
        writer=message.fencing.writer,
        token=message.fencing.token,
        replica_revisions=tuple(sorted(message.replica_revisions.items())),
    )
