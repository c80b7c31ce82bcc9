"""A replica as its actuator shows it to other services."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.time import optional_timestamp, seconds_of
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A reason why a replica is not visible. Only its owner lifts it."""

    owner: HoldOwner
    reason: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica. Times are Unix seconds, 0 where there is none.

    `pool` is empty for scaled replicas, `deployment_group` for pooled ones; both are empty for a server that was given
    as a target. `routable`: ready and free of holds, the only replicas that count as capacity. `in_flight` are the
    requests in the server at the last look, None when it could not be read. `revision` is the actuator's at the last
    change.
    """

    replica: str
    service: str
    role: Role
    life_cycle: LifeCycle
    routable: bool
    in_flight: int | None = None
    node: str = ""
    gpu_indices: tuple[int, ...] = ()
    pool: str = ""
    deployment_group: str = ""
    cluster: str = ""
    model: str = ""
    address: str = ""
    gpu_type: str = ""
    holds: tuple[Hold, ...] = ()
    ready: bool = False
    life_cycle_since_s: float = 0.0
    start_s: float = 0.0
    revision: int = 0
    detail: str = ""
    slept_once: bool = False


_ROLES = Role.by_number()
_LIFE_CYCLES = LifeCycle.by_number()
_OWNERS = HoldOwner.by_number()


def replica_to_proto(replica: Replica) -> actuator_pb2.Replica:
    """The message of a replica."""
    return actuator_pb2.Replica(
        replica=replica.replica,
        service=replica.service,
        role=types_pb2.Role.ValueType(replica.role.number),
        cluster=replica.cluster,
        model=replica.model,
        address=replica.address,
        node=replica.node,
        gpu_indices=replica.gpu_indices,
        gpu_type=replica.gpu_type,
        life_cycle=types_pb2.LifeCycle.ValueType(replica.life_cycle.number),
        holds=[
            actuator_pb2.Hold(
                owner=types_pb2.HoldOwner.ValueType(hold.owner.number),
                reason=hold.reason,
                since=optional_timestamp(hold.since_s or None),
            )
            for hold in replica.holds
        ],
        routable=replica.routable,
        pool=replica.pool,
        deployment_group=replica.deployment_group,
        ready=replica.ready,
        life_cycle_since=optional_timestamp(replica.life_cycle_since_s or None),
        start_time=optional_timestamp(replica.start_s or None),
        revision=replica.revision,
        detail=replica.detail,
        slept_once=replica.slept_once,
        in_flight=replica.in_flight,
    )


def replica_from_proto(message: actuator_pb2.Replica) -> Replica:
    """The replica in a message. Raises ValueError for a role that this release does not know.

    A life cycle that it does not know counts as unknown; a hold of an owner that it does not know is left out, and the
    replica is not routable by its own field.
    """
    role = _ROLES.get(message.role)
    if role is None:
        raise ValueError(f"replica {message.replica}: {message.role} is no role of this release")
    return Replica(
        replica=message.replica,
        service=message.service,
        role=role,
        cluster=message.cluster,
        model=message.model,
        address=message.address,
        node=message.node,
        gpu_indices=tuple(message.gpu_indices),
        gpu_type=message.gpu_type,
        life_cycle=_LIFE_CYCLES.get(message.life_cycle, LifeCycle.UNKNOWN),
        holds=tuple(
            Hold(owner=_OWNERS[hold.owner], reason=hold.reason, since_s=seconds_of(hold.since))
            for hold in message.holds
            if hold.owner in _OWNERS
        ),
        routable=message.routable,
        pool=message.pool,
        deployment_group=message.deployment_group,
        ready=message.ready,
        life_cycle_since_s=seconds_of(message.life_cycle_since),
        start_s=seconds_of(message.start_time),
        revision=message.revision,
        detail=message.detail,
        slept_once=message.slept_once,
        in_flight=message.in_flight if message.HasField("in_flight") else None,
    )
