"""The life cycle of a replica: a table of the allowed transitions, each with its kind and cause.

A *passive* transition reflects an event outside: a server died, restarted, was put to sleep by another client. An
*active* one is made by an operation. A transition that is not in the table is a defect and raises
``ForbiddenTransition``.

Transient states have a time-out (``timeout_s``). At its end the replica's operation fails the step, or, without one,
the replica becomes FAILED.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from actuator.core.model import Limits, Replica
from trimtab.domain.vocabulary import LifeCycle


class EdgeKind(StrEnum):
    """Whether the world moved the replica or we did."""

    PASSIVE = "passive"
    ACTIVE = "active"


@dataclass(frozen=True)
class Edge:
    """One allowed transition."""

    kind: EdgeKind
    cause: str


def _active(cause: str) -> Edge:
    return Edge(EdgeKind.ACTIVE, cause)


def _passive(cause: str) -> Edge:
    return Edge(EdgeKind.PASSIVE, cause)


TRANSITIONS: Mapping[tuple[LifeCycle, LifeCycle], Edge] = {
    (LifeCycle.STARTING, LifeCycle.ACTIVE): _active("ready and a canary token came"),
    (LifeCycle.STARTING, LifeCycle.SLEEPING): _active("put to sleep before it was ever shown"),
    (LifeCycle.STARTING, LifeCycle.TERMINATING): _active("deleted before it was shown"),
    (LifeCycle.STARTING, LifeCycle.FAILED): _passive("died while starting, or took too long"),
    (LifeCycle.STARTING, LifeCycle.UNKNOWN): _passive("does not answer"),
    (LifeCycle.ACTIVE, LifeCycle.DRAINING): _active("hidden for a release or a scale-in"),
    (LifeCycle.ACTIVE, LifeCycle.SLEEPING): _passive("found asleep"),
    (LifeCycle.ACTIVE, LifeCycle.STARTING): _passive("restarted"),
    (LifeCycle.ACTIVE, LifeCycle.FAILED): _passive("died"),
    (LifeCycle.ACTIVE, LifeCycle.UNKNOWN): _passive("does not answer"),
    (LifeCycle.DRAINING, LifeCycle.SLEEPING): _active("drained, then slept"),
    (LifeCycle.DRAINING, LifeCycle.ACTIVE): _active("restored: the hold was lifted"),
    (LifeCycle.DRAINING, LifeCycle.TERMINATING): _active("drained, then deleted"),
    (LifeCycle.DRAINING, LifeCycle.STARTING): _passive("restarted"),
    (LifeCycle.DRAINING, LifeCycle.FAILED): _passive("died"),
    (LifeCycle.DRAINING, LifeCycle.UNKNOWN): _passive("does not answer"),
    (LifeCycle.SLEEPING, LifeCycle.REACTIVATING): _active("woken: its GPUs are free"),
    (LifeCycle.SLEEPING, LifeCycle.TERMINATING): _active("deleted asleep"),
    (LifeCycle.SLEEPING, LifeCycle.STARTING): _passive("restarted, or found awake"),
    (LifeCycle.SLEEPING, LifeCycle.FAILED): _passive("died"),
    (LifeCycle.SLEEPING, LifeCycle.UNKNOWN): _passive("does not answer"),
    (LifeCycle.REACTIVATING, LifeCycle.ACTIVE): _active("awake, ready and a canary token came"),
    (LifeCycle.REACTIVATING, LifeCycle.SLEEPING): _active("the wake was taken back"),
    (LifeCycle.REACTIVATING, LifeCycle.TERMINATING): _active("deleted while waking"),
    (LifeCycle.REACTIVATING, LifeCycle.STARTING): _passive("restarted"),
    (LifeCycle.REACTIVATING, LifeCycle.FAILED): _passive("died, or took too long to wake"),
    (LifeCycle.REACTIVATING, LifeCycle.UNKNOWN): _passive("does not answer"),
    (LifeCycle.FAILED, LifeCycle.STARTING): _passive("answers again, awake"),
    (LifeCycle.FAILED, LifeCycle.SLEEPING): _passive("answers again, asleep"),
    (LifeCycle.FAILED, LifeCycle.UNKNOWN): _passive("runs again, does not answer"),
    (LifeCycle.FAILED, LifeCycle.TERMINATING): _active("deleted after a failure"),
    (LifeCycle.UNKNOWN, LifeCycle.STARTING): _passive("answers again, awake"),
    (LifeCycle.UNKNOWN, LifeCycle.SLEEPING): _passive("answers again, asleep"),
    (LifeCycle.UNKNOWN, LifeCycle.FAILED): _passive("died"),
    (LifeCycle.UNKNOWN, LifeCycle.TERMINATING): _active("deleted while silent"),
}

# A deleted replica leaves TERMINATING by leaving the records; nothing else leads out of it.


class ForbiddenTransition(Exception):
    """The table has no such transition: a defect of the caller."""


def edge(source: LifeCycle, target: LifeCycle) -> Edge | None:
    """The table's entry; None when the transition is not allowed."""
    return TRANSITIONS.get((source, target))


def move(replica: Replica, target: LifeCycle, *, now_s: float, detail: str = "") -> Replica:
    """The replica in its new state. Raises ``ForbiddenTransition``; staying where it is changes nothing.

    Nothing leads from ``told_to_sleep`` to ACTIVE: the server would fall asleep under the requests that it is shown to.
    """
    if replica.life_cycle is target:
        return replica
    if target is LifeCycle.ACTIVE and replica.told_to_sleep:
        raise ForbiddenTransition(f"{replica.name}: told to sleep, and not known to have done with it")
    allowed = edge(replica.life_cycle, target)
    if allowed is None:
        raise ForbiddenTransition(f"{replica.name}: {replica.life_cycle} → {target} is not in the table")
    return replace(
        replica,
        life_cycle=target,
        since_s=now_s,
        cause=allowed.cause,
        detail=detail,
        # Only an active or draining replica has proved that it serves; every other state has to prove it again.
        ready=target in (LifeCycle.ACTIVE, LifeCycle.DRAINING),
        evicting=replica.evicting and target is LifeCycle.DRAINING,
        told_to_sleep=None if target is LifeCycle.SLEEPING else replica.told_to_sleep,
    )


def timeout_s(life_cycle: LifeCycle, limits: Limits) -> float | None:
    """How long a replica may stay in a transient state; None for a state that lasts."""
    bounds: Mapping[LifeCycle, float] = {
        LifeCycle.STARTING: limits.starting_s,
        LifeCycle.REACTIVATING: limits.reactivating_s,
        LifeCycle.TERMINATING: limits.terminating_s,
    }
    return bounds.get(life_cycle)
