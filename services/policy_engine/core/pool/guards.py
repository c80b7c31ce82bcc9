"""Local guards (TRE, section IV): limits that veto a donor (soft) or start a rescue (hard).

Latencies, KV usage, preemptions, the growth of the queue, and the health of the member's own replicas. They never rank
services, and Z ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.config.specs import GuardLimit, Guards
from trimtab.domain.measurement import NEVER_READ, Measurement, missing, ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.signals import RATIO, ROLE_FIELDS


@dataclass(frozen=True, slots=True)
class GuardState:
    """The first soft and the first hard limit that is passed, as text; empty where none is."""

    soft: str = ""
    hard: str = ""


@dataclass(frozen=True, slots=True)
class QueueMemory:
    """The queue of the last window, and how it grew up to then (requests per second; None before two windows)."""

    queued: float | None = None
    window_end_s: float | None = None
    growth_rps: float | None = None

    @property
    def growth(self) -> Measurement:
        """The growth as a signal; a queue that shrinks does not grow."""
        return NEVER_READ if self.growth_rps is None else ok(max(0.0, self.growth_rps))


def remember_queue(memory: QueueMemory, view: RoleSignals, front: FrontDoor, *, routable: int) -> QueueMemory:
    """The memory after this window; blank after one in which the queue could not be read."""
    if routable > 0 and not view.waiting.usable:
        return QueueMemory()
    end_s = view.window_end_s if routable > 0 else front.window_end_s
    if end_s is None:
        return QueueMemory()
    if end_s == memory.window_end_s:
        return memory
    queued = front.held.number(0.0) + (view.waiting.number(0.0) if routable > 0 else 0.0)
    if memory.queued is None or memory.window_end_s is None or end_s < memory.window_end_s:
        return QueueMemory(queued, end_s)
    return QueueMemory(queued, end_s, (queued - memory.queued) / (end_s - memory.window_end_s))


def lost_ratio(*, awake: int, lost: int) -> Measurement:
    """The share of a member's awake replicas that do not serve."""
    return ok(lost / awake) if awake > 0 else missing("none is awake")


_UNITS = {RATIO: "", "1/s": "/s"}
"""As they stand behind a number, where that is not with a space before it."""
_LIMITED: Mapping[str, tuple[str, str]] = {
    **{
        name: (ROLE_FIELDS[name].title, _UNITS.get(ROLE_FIELDS[name].unit, f" {ROLE_FIELDS[name].unit}"))
        for name in Guards.model_fields
        if name in ROLE_FIELDS
    },
    "queue_growth_rps": ("queue growth", "/s"),
    "lost_ratio": ("share of replicas lost", ""),
}
"""Fields of `Guards`, in order: name and unit of what they limit. It is the field of `RoleSignals` of that name, or one
of those that only the engine knows."""


def check_guards(
    guards: Guards | None,
    view: RoleSignals,
    *,
    queue_growth: Measurement = NEVER_READ,
    lost: Measurement = NEVER_READ,
) -> GuardState:
    """The limits that the window passes. A signal that cannot be used passes none; donors are checked for quality."""
    if guards is None:
        return GuardState()
    own = {"queue_growth_rps": queue_growth, "lost_ratio": lost}
    soft = hard = ""
    for field, (name, unit) in _LIMITED.items():
        limit: GuardLimit | None = getattr(guards, field)
        if limit is None:
            continue
        signal: Measurement = own[field] if field in own else getattr(view, field)
        if not signal.usable:
            continue
        value = signal.number(0.0)
        if limit.soft is not None and value > limit.soft and not soft:
            soft = f"{name} {value:.3g}{unit} is beyond its soft limit of {limit.soft:g}{unit}"
        if limit.hard is not None and value > limit.hard and not hard:
            hard = f"{name} {value:.3g}{unit} is beyond its hard limit of {limit.hard:g}{unit}"
    return GuardState(soft=soft or hard, hard=hard)
