"""How a pool begins, and begins anew when its layout changes: where its replicas are and which of them are awake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policy_engine.core.pool.desired import awake_in_cluster
from policy_engine.core.pool.gpu_layout import (
    OverlayReplica,
    Resident,
    adopt_awake,
    first_awake,
    make_overlay,
    member_key,
    renamed,
)
from policy_engine.core.shared.draft import CountChange, Draft
from policy_engine.core.shared.vocabulary import DecisionKind, Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica


@dataclass(frozen=True, slots=True)
class LayoutInput:
    """What a pool's layout is made from.

    `overlay` is what the pool had, empty for one that the store does not know; `awake` is its desired awake set, or
    then the replicas that are awake in the cluster already. `residents` exist already and keep their names.
    """

    pool: Pool
    policies: tuple[ServicePolicy, ...]
    overlay: tuple[OverlayReplica, ...] = ()
    awake: tuple[str, ...] = ()
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True, slots=True)
class InitialLayout:
    """A layout and the awake set to start with."""

    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    draft: Draft


def birth_input(
    pool: Pool,
    policies: tuple[ServicePolicy, ...],
    desired: DesiredPool | None,
    replicas: Iterable[Replica],
    overlay: tuple[OverlayReplica, ...],
    residents: tuple[Resident, ...],
) -> LayoutInput:
    """The input for a pool whose resources ask for `overlay`: a pool that is `desired` already, or a new one.

    `replicas` are what the cluster's actuator lists; of a new pool those that are awake stay so.
    """
    known = desired.overlay if desired is not None else ()
    awake = desired.awake if desired is not None else awake_in_cluster(replicas, pool.name)
    return LayoutInput(pool, policies, known, renamed(known, overlay, awake), residents)


def lay_out(given: LayoutInput) -> InitialLayout:
    """The overlay of a pool and its awake set. Raises OverlayError.

    Replicas that are awake and still fit stay awake: a lost store or a new layout changes no count by itself. New
    members get what is free beside those; floors that are not met by that are left to the arbiter.
    """
    policies = {policy.name: policy for policy in given.policies}
    overlay = make_overlay(given.pool, policies, given.residents)
    first = first_awake(given.pool, policies, overlay)
    awake = first
    if given.awake:
        known = {item.member for item in given.overlay or overlay}
        kept = adopt_awake(overlay, given.awake)
        added = tuple(item.replica for item in overlay if item.replica in first and item.member not in known)
        awake = adopt_awake(overlay, (*kept, *added), prefer=kept)
    verb = "is laid out anew" if given.overlay else "is taken over" if given.awake else "is born"
    by_name = {item.replica: item for item in overlay}
    counts: list[CountChange] = []
    for entry in given.pool.spec.members:
        key = member_key(entry)
        count = sum(1 for name in awake if by_name[name].member == key)
        before = sum(1 for name in given.awake if name in by_name and by_name[name].member == key)
        counts.append(CountChange(key.service, key.role, before, count))
    words = ", ".join(f"{change.after} {change.service}" for change in counts)
    reason = f"{given.pool.name} {verb} with {words} awake of {len(overlay)} replicas"
    draft = Draft(DecisionKind.POOL_BIRTH, given.pool.name, Rule.INITIAL, reason, counts=tuple(counts))
    return InitialLayout(overlay, awake, draft)
