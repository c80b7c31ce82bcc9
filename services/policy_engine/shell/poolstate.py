"""A pool's desired state as the actuator takes it, and what the cluster shows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policy_engine.core.overlay import OverlayReplica, Resident, member_key
from policy_engine.core.vocabulary import MemberKey
from policy_engine.shell.convert import overlay_to_proto
from policy_engine.shell.links import ActuatorLink
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.config.resources import Pool, ServicePolicy

_AWAKE = frozenset({types_pb2.LIFE_CYCLE_ACTIVE, types_pb2.LIFE_CYCLE_REACTIVATING})


def desired_state(
    pool: Pool,
    policies: Sequence[ServicePolicy],
    overlay: Sequence[OverlayReplica],
    awake: Sequence[str],
    decision_id: str,
) -> actuator_pb2.PoolState:
    """The state to publish, without its revision.

    A floor that the awake set does not reach (a wake that failed) is told as what there is: the actuator must be able
    to take the state, and the arbiter repairs the floor.
    """
    by_name: Mapping[str, ServicePolicy] = {policy.name: policy for policy in policies}
    members: dict[str, MemberKey] = {item.replica: item.member for item in overlay}
    state = actuator_pb2.PoolState(
        pool=pool.name,
        overlay=overlay_to_proto(overlay),
        awake=sorted(awake),
        budget_gpus=pool.spec.budget_gpus,
        decision_id=decision_id,
        drain_timeout_s=pool.spec.drain_timeout_s,
        sleep_level=pool.spec.sleep_level,
        prewarm=pool.spec.prewarm,
        residence_s=pool.spec.residence_s if pool.spec.prewarm else 0.0,
    )
    for member in pool.spec.members:
        policy = by_name.get(member.service)
        role = policy.spec.role(member.role) if policy is not None else None
        if role is None:
            continue
        count = sum(1 for name in awake if members[name] == member_key(member))
        state.floors.add(
            service=member.service,
            role=types_pb2.Role.ValueType(member.role.number),
            min_replicas=min(role.min_replicas, count),
        )
    return state


def same_wish(one: actuator_pb2.PoolState, other: actuator_pb2.PoolState) -> bool:
    """Whether two states ask for the same, whatever their revision and origin."""
    return _substance(one) == _substance(other)


def _substance(state: actuator_pb2.PoolState) -> bytes:
    copy = actuator_pb2.PoolState()
    copy.CopyFrom(state)
    for name in ("state_revision", "decision_id", "replica_revision", "expire_time"):
        copy.ClearField(name)
    return copy.SerializeToString(deterministic=True)


def awake_in_cluster(link: ActuatorLink, pool: str) -> tuple[str, ...]:
    """The pool's replicas that are awake by the actuator's word."""
    return tuple(
        sorted(item.replica for item in link.replicas.values() if item.pool == pool and item.life_cycle in _AWAKE)
    )


def residents(link: ActuatorLink | None, pool: Pool, known: Sequence[OverlayReplica]) -> tuple[Resident, ...]:
    """Replicas that lend the pool's overlay their names, one per member and GPU set, by name.

    Where the actuator lists one of the member on exactly those GPUs, free or in this pool, it is that one (of several
    the one that the pool has already). Where it lists none, the overlay that is `known` keeps its name.
    """
    members = {(key.service, key.role.number): key for key in map(member_key, pool.spec.members)}
    found = {(item.member, item.node, item.gpu_indices): item.replica for item in known}
    kept = set(found.values())
    listed: dict[tuple[MemberKey, str, tuple[int, ...]], str] = {}
    for item in sorted(link.replicas.values() if link is not None else (), key=lambda replica: replica.replica):
        if item.deployment_group or item.pool not in ("", pool.name) or not item.gpu_indices:
            continue
        key = members.get((item.service, item.role))
        if key is None:
            continue
        place = (key, item.node, tuple(sorted(item.gpu_indices)))
        if place not in listed or item.replica in kept:
            listed[place] = item.replica
    names = found | listed
    return tuple(Resident(names[place], *place) for place in sorted(names))
