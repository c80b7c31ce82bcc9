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
from trimtab.words import LifeCycle


class EdgeKind(StrEnum):
    """Whether the world moved the replica or we did."""

    PASSIVE = "passive"
    ACTIVE = "active"


@dataclass(frozen=True)
class Edge:
    """One allowed transition."""

    kind: EdgeKind
    cause: str


_S, _A, _D, _Z, _R, _T, _F, _U = (
    LifeCycle.STARTING,
    LifeCycle.ACTIVE,
    LifeCycle.DRAINING,
    LifeCycle.SLEEPING,
    LifeCycle.REACTIVATING,
    LifeCycle.TERMINATING,
    LifeCycle.FAILED,
    LifeCycle.UNKNOWN,
)


def _active(cause: str) -> Edge:
    return Edge(EdgeKind.ACTIVE, cause)


def _passive(cause: str) -> Edge:
    return Edge(EdgeKind.PASSIVE, cause)


TRANSITIONS: Mapping[tuple[LifeCycle, LifeCycle], Edge] = {
    (_S, _A): _active("ready and a canary token came"),
    (_S, _Z): _active("put to sleep before it was ever shown"),
    (_S, _T): _active("deleted before it was shown"),
    (_S, _F): _passive("died while starting, or took too long"),
    (_S, _U): _passive("does not answer"),
    (_A, _D): _active("hidden for a release or a scale-in"),
    (_A, _Z): _passive("found asleep"),
    (_A, _S): _passive("restarted"),
    (_A, _F): _passive("died"),
    (_A, _U): _passive("does not answer"),
    (_D, _Z): _active("drained, then slept"),
    (_D, _A): _active("restored: the hold was lifted"),
    (_D, _T): _active("drained, then deleted"),
    (_D, _S): _passive("restarted"),
    (_D, _F): _passive("died"),
    (_D, _U): _passive("does not answer"),
    (_Z, _R): _active("woken: its GPUs are free"),
    (_Z, _T): _active("deleted asleep"),
    (_Z, _S): _passive("restarted, or found awake"),
    (_Z, _F): _passive("died"),
    (_Z, _U): _passive("does not answer"),
    (_R, _A): _active("awake, ready and a canary token came"),
    (_R, _Z): _active("the wake was taken back"),
    (_R, _T): _active("deleted while waking"),
    (_R, _S): _passive("restarted"),
    (_R, _F): _passive("died, or took too long to wake"),
    (_R, _U): _passive("does not answer"),
    (_F, _S): _passive("answers again, awake"),
    (_F, _Z): _passive("answers again, asleep"),
    (_F, _U): _passive("runs again, does not answer"),
    (_F, _T): _active("deleted after a failure"),
    (_U, _S): _passive("answers again, awake"),
    (_U, _Z): _passive("answers again, asleep"),
    (_U, _F): _passive("died"),
    (_U, _T): _active("deleted while silent"),
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
    if target is _A and replica.told_to_sleep:
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
        ready=target in (_A, _D),
        evicting=replica.evicting and target is _D,
        told_to_sleep=None if target is _Z else replica.told_to_sleep,
    )


def timeout_s(life_cycle: LifeCycle, limits: Limits) -> float | None:
    """How long a replica may stay in a transient state; None for a state that lasts."""
    bounds: Mapping[LifeCycle, float] = {
        _S: limits.starting_s,
        _R: limits.reactivating_s,
        _T: limits.terminating_s,
    }
    return bounds.get(life_cycle)
