"""What a core decided, before it has an id, a time and an outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policy_engine.core.shared.vocabulary import Candidate, Clamp, ClampKind, DecisionKind, Rule
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.signals import FRONT_DOOR_FIELDS, ROLE_FIELDS
from trimtab.domain.vocabulary import Role

HOLD_MEMORY_S = 60.0

# Clamps that get a record of their own when nothing changes. Tolerance and pending replicas bind in every quiet tick;
# records of them would displace those of other clamps.
TELLING_CLAMPS = frozenset(ClampKind) - {ClampKind.TOLERANCE, ClampKind.PENDING_REPLICAS}


@dataclass(frozen=True, slots=True)
class NamedSignal:
    """One input of a decision, such as `chat/decode decode_tps` in tokens/s."""

    name: str
    unit: str
    signal: Measurement


def named_signals(label: str, names: Iterable[str], view: RoleSignals, front: FrontDoor) -> list[NamedSignal]:
    """Measurements of a role or its front door as decision records show them, by the names of their fields."""
    found: list[NamedSignal] = []
    for name in names:
        of_role = name in ROLE_FIELDS
        shown = ROLE_FIELDS[name] if of_role else FRONT_DOOR_FIELDS[name]
        found.append(NamedSignal(f"{label} {shown.name}", shown.unit, getattr(view if of_role else front, name)))
    return found


@dataclass(frozen=True, slots=True)
class CountChange:
    """Replicas of one role before and after."""

    service: str
    role: Role
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """One replica of a pool that is released or woken."""

    replica: str
    service: str
    role: Role
    gpus: int


@dataclass(frozen=True, slots=True)
class Transition:
    """Releases and wakes that belong together: one operation, rolled back as one."""

    releases: tuple[ReplicaChange, ...]
    wakes: tuple[ReplicaChange, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A decision's substance; `core.decision` makes the record of it."""

    kind: DecisionKind
    subject: str
    rule: Rule
    reason: str
    inputs: tuple[NamedSignal, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    counts: tuple[CountChange, ...] = ()
    transition: Transition | None = None
    candidates: tuple[Candidate, ...] = ()


HoldNotes = tuple[tuple[ClampKind, float], ...]
"""Binding clamps that have been recorded already, with the time each was last seen."""


def note_clamps(notes: HoldNotes, clamps: tuple[Clamp, ...], now_s: float) -> tuple[HoldNotes, tuple[Clamp, ...]]:
    """The updated notes, and those of `TELLING_CLAMPS` that are new.

    A clamp that has not been seen for a minute is new again, so that one that flickers makes at most one record a
    minute.
    """
    known = {kind: seen_s for kind, seen_s in notes if 0 <= now_s - seen_s <= HOLD_MEMORY_S}
    telling = tuple(clamp for clamp in clamps if clamp.kind in TELLING_CLAMPS)
    new = tuple(clamp for clamp in telling if clamp.kind not in known)
    known.update({clamp.kind: now_s for clamp in telling})
    return tuple(sorted(known.items())), new


def note_events(
    notes: tuple[tuple[str, float], ...], events: tuple[str, ...], now_s: float
) -> tuple[tuple[tuple[str, float], ...], bool]:
    """The same for events, by name: the updated notes, and whether one of them is new."""
    known = {event: seen_s for event, seen_s in notes if 0 <= now_s - seen_s <= HOLD_MEMORY_S}
    new = any(event not in known for event in events)
    known.update(dict.fromkeys(events, now_s))
    return tuple(sorted(known.items())), new
