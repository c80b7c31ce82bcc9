"""Transitions after their decision: published until the actuator has them, under way, and settled when they fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from policy_engine.core.pool.decide import PoolState, UnderWay, bar, settle
from policy_engine.core.pool.desired import awake_in_cluster, succeeding
from policy_engine.core.pool.gpu_layout import adopt_awake
from policy_engine.core.pool.pool_candidates import SERVING
from policy_engine.core.shared.draft import ReplicaChange, Transition
from policy_engine.core.shared.vocabulary import MemberKey, Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.operation import OperationState
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica

REFUSED_PAUSE_S = 10.0


# Publishing


@dataclass(frozen=True, slots=True)
class Refusal:
    """A desired state that an actuator does not take, and when to ask again."""

    state_revision: int
    until_s: float
    detail: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What an actuator has taken: the state's revision, sent under a fencing token.

    `generation` grows when the actuator comes back, which may have lost the state meanwhile.
    """

    state_revision: int
    generation: int
    token: int


def must_publish(
    mark: Acknowledged, acknowledged: Acknowledged | None, refusal: Refusal | None, *, now_s: float
) -> bool:
    """Whether a state is to be sent: it was not acknowledged so, and not refused a moment ago."""
    waits = refusal is not None and refusal.state_revision == mark.state_revision and now_s < refusal.until_s
    return acknowledged != mark and not waits


def refused(desired: DesiredPool, detail: str, *, now_s: float) -> Refusal:
    """The refusal of a state, which is sent again after a pause."""
    return Refusal(desired.state_revision, now_s + REFUSED_PAUSE_S, detail)


def caught_up(
    desired: DesiredPool,
    pool: Pool,
    policies: tuple[ServicePolicy, ...],
    replicas: Iterable[Replica],
    *,
    their_revision: int,
) -> DesiredPool:
    """The state to go on from where the actuator has a newer one than the store, which lost its last second.

    It asks for what is awake in the cluster, or for what was asked before where nothing is.
    """
    awake = adopt_awake(desired.overlay, awake_in_cluster(replicas, pool.name)) or desired.awake
    newest = replace(desired, state_revision=max(their_revision, desired.state_revision))
    return succeeding(newest, pool, policies, awake, desired.decision_id)


# Under way


def under_way(transition: Transition, rule: Rule, *, decision_id: str, operation_id: str) -> UnderWay:
    """A transition that the actuator works on. One without an operation yet moves unknown replicas: it bars others."""
    moved = moved_replicas(transition) if operation_id else ()
    return UnderWay(
        operation=operation_id or f"of {decision_id}",
        rule=rule,
        receivers=_members(transition.wakes),
        donors=_members(transition.releases),
        replicas=moved,
    )


def moved_replicas(transition: Transition) -> tuple[str, ...]:
    """Replicas that a transition releases or wakes, by name."""
    return tuple(sorted(change.replica for change in (*transition.releases, *transition.wakes)))


def _members(changes: Iterable[ReplicaChange]) -> tuple[MemberKey, ...]:
    return tuple(sorted({MemberKey(change.service, change.role) for change in changes}))


# Ended without success


def awake_after(state: OperationState, *, released: Iterable[str], replicas: Iterable[Replica]) -> frozenset[str]:
    """Which replicas are awake after a transition whose operation ended in `state` without success.

    One that was rolled back has given back those that it `released`. After one that failed, those of `replicas` whose
    life cycle is an awake one, as the actuator lists them then.
    """
    if state is not OperationState.FAILED:
        return frozenset(released)
    return frozenset(item.replica for item in replicas if item.life_cycle in SERVING)


@dataclass(frozen=True, slots=True)
class Settled:
    """The pool's state and its desired state after a transition that came to nothing."""

    state: PoolState
    desired: DesiredPool


def settled(
    state: PoolState,
    desired: DesiredPool,
    pool: Pool,
    policies: tuple[ServicePolicy, ...],
    transition: Transition,
    awake_now: frozenset[str],
    *,
    decision_id: str,
    preempted: bool,
    now_s: float,
) -> Settled:
    """What is desired after a transition that failed or was rolled back, and which replicas are left alone for a while.

    A transition that gave way (`preempted`) has not shown that anything is wrong with its replicas.
    """
    if not preempted:
        state = bar(state, moved_replicas(transition), now_s)
    awake = settle(desired.overlay, desired.awake, transition, awake_now)
    return Settled(state, succeeding(desired, pool, policies, awake, decision_id))
