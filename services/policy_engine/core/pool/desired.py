"""A pool's desired state, made from its resources, its layout and its awake set, and what a cluster shows of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from policy_engine.core.pool.gpu_layout import OverlayReplica, Resident, member_key
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.pool import DesiredPool, Floor, settings_in
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import LifeCycle

_AWAKE = frozenset({LifeCycle.ACTIVE, LifeCycle.REACTIVATING})


def desired_pool(
    pool: Pool,
    policies: Sequence[ServicePolicy],
    overlay: Sequence[OverlayReplica],
    awake: Sequence[str],
    decision_id: str,
    *,
    state_revision: int = 0,
) -> DesiredPool:
    """The state to publish.

    A floor that the awake set does not reach (a wake that failed) is given as what there is: the actuator must be able
    to take the state, and the arbiter repairs the floor.
    """
    by_name = {policy.name: policy for policy in policies}
    members = {item.replica: item.member for item in overlay}
    floors: list[Floor] = []
    for member in pool.spec.members:
        policy = by_name.get(member.service)
        role = policy.spec.role(member.role) if policy is not None else None
        if role is None:
            continue
        count = sum(1 for name in awake if members[name] == member_key(member))
        floors.append(Floor(service=member.service, role=member.role, min_replicas=min(role.min_replicas, count)))
    return DesiredPool(
        pool=pool.name,
        state_revision=state_revision,
        overlay=tuple(overlay),
        awake=tuple(sorted(awake)),
        floors=tuple(floors),
        budget_gpus=pool.spec.budget_gpus,
        decision_id=decision_id,
        **_settings(pool),
    )


def _settings(pool: Pool) -> dict[str, Any]:
    """The settings of the pool's spec for the actuator; a residence time without use is 0."""
    settings = settings_in(pool.spec)
    return settings if pool.spec.prewarm else {**settings, "residence_s": 0.0}


def succeeding(
    desired: DesiredPool,
    pool: Pool,
    policies: Sequence[ServicePolicy],
    awake: Sequence[str],
    decision_id: str,
) -> DesiredPool:
    """The next revision of a state: the same layout with another awake set, by another decision."""
    revision = desired.state_revision + 1
    return desired_pool(pool, policies, desired.overlay, awake, decision_id, state_revision=revision)


def same_wish(one: DesiredPool, other: DesiredPool) -> bool:
    """Whether two states ask for the same, whatever their revision and origin."""
    return _substance(one) == _substance(other)


def _substance(desired: DesiredPool) -> DesiredPool:
    return replace(desired, state_revision=0, decision_id="", replica_revision=0, expires_s=None)


def rebound(desired: DesiredPool, pool: Pool, policies: Sequence[ServicePolicy]) -> DesiredPool | None:
    """The next revision of a state whose pool's bounds have changed; None when they are as they were."""
    wish = succeeding(desired, pool, policies, desired.awake, desired.decision_id)
    return None if same_wish(desired, wish) else wish


def awake_in_cluster(replicas: Iterable[Replica], pool: str) -> tuple[str, ...]:
    """The pool's replicas that are awake by what the actuator lists, by name."""
    return tuple(sorted(item.replica for item in replicas if item.pool == pool and item.life_cycle in _AWAKE))


def residents(replicas: Iterable[Replica], pool: Pool, known: Sequence[OverlayReplica]) -> tuple[Resident, ...]:
    """Replicas that lend the pool's overlay their names, one per member and GPU set, by name.

    Where the actuator lists one of the member on exactly those GPUs, free or in this pool, it is that one (of several
    the one that the pool has already). Where it lists none, the overlay that is `known` keeps its name.
    """
    members = {member_key(member) for member in pool.spec.members}
    found = {(item.member, item.node, item.gpu_indices): item.replica for item in known}
    kept = set(found.values())
    listed: dict[tuple[MemberKey, str, tuple[int, ...]], str] = {}
    for item in sorted(replicas, key=lambda replica: replica.replica):
        if item.deployment_group or item.pool not in ("", pool.name) or not item.gpu_indices:
            continue
        key = MemberKey(item.service, item.role)
        if key not in members:
            continue
        place = (key, item.node, tuple(sorted(item.gpu_indices)))
        if place not in listed or item.replica in kept:
            listed[place] = item.replica
    names = found | listed
    return tuple(Resident(names[place], *place) for place in sorted(names))
