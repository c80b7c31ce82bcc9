"""Keeps a decision whose replicas never come to life from placing new ones in every cycle.

A replica that cannot be created is taken away again by its actuator, and the next cycle finds it missing. So the
n-th placement for one decision waits twice as long as the one before it. A new decision starts afresh, and so does
one that was left alone for a while: a node that dies later is replaced at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prescheduler.core.model import Plan

MAX_WAIT_S = 300.0
FORGET_AFTER_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How often a decision has placed replicas lately, and when it may again if those of the last time are gone."""

    decision_id: str
    placements: int
    last_s: float
    next_s: float
    replicas: frozenset[str]


def wait_until(backoffs: Mapping[str, Backoff], service: str, decision_id: str, now_s: float) -> Backoff | None:
    """The pace of a decision whose next time has not come; None when it may place.

    It binds only when replicas of the last time are gone: a decision that is placed bit by bit need not wait.
    """
    pace = backoffs.get(service)
    if pace is None or pace.decision_id != decision_id or now_s >= pace.next_s:
        return None
    return pace


def note_placements(
    backoffs: Mapping[str, Backoff], plan: Plan, *, now_s: float, first_wait_s: float
) -> dict[str, Backoff]:
    """The backoffs after a cycle whose accepted results are ``plan``; services without a result are forgotten."""
    noted: dict[str, Backoff] = {}
    for result in plan.results:
        before = backoffs.get(result.service)
        current = before is not None and before.decision_id == result.decision_id
        added = frozenset(item.replica for group in result.groups for item in group.add)
        if added:
            earlier = before.placements if before and current and now_s - before.last_s < FORGET_AFTER_S else 0
            noted[result.service] = Backoff(
                decision_id=result.decision_id,
                placements=earlier + 1,
                last_s=now_s,
                replicas=added,
                next_s=now_s + min(MAX_WAIT_S, first_wait_s * 2.0 ** min(earlier, 32)),
            )
        elif before is not None and current:
            noted[result.service] = before
    return noted
