"""What decisions take of a role's window and of a service's front door, and how old it may be."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from trimtab.domain.measurement import Measurement, missing
from trimtab.domain.observation import RoleObservation
from trimtab.domain.signals import FRONT_DOOR_FIELDS, P95, ROLE_FIELDS, FrontDoor, Latency, RoleSignals, Signal
from trimtab.domain.vocabulary import Role

__all__ = ["FrontDoor", "RoleSignals", "fresh_front_door", "fresh_role", "front_door", "role_signals"]

V = TypeVar("V", RoleSignals, FrontDoor)

_ROLE_SIGNALS = {name: Signal(name) for name in ROLE_FIELDS if not name.endswith(P95)}
_ROLE_LATENCIES = {name: Latency(name.removesuffix(P95)) for name in ROLE_FIELDS if name.endswith(P95)}
_FRONT_DOOR_SIGNALS = {name: Signal(name) for name in FRONT_DOOR_FIELDS}


def role_signals(role: Role, observation: RoleObservation) -> RoleSignals:
    """The signals of one role's observation."""
    return RoleSignals(
        role=role,
        window_end_s=observation.end_s,
        **{name: observation.measurement(signal) for name, signal in _ROLE_SIGNALS.items()},
        **{name: observation.quantile(latency, 0.95) for name, latency in _ROLE_LATENCIES.items()},
    )


def front_door(observation: RoleObservation) -> FrontDoor:
    """The values of the observation of one service's front door."""
    return FrontDoor(
        window_end_s=observation.end_s,
        **{name: observation.measurement(signal) for name, signal in _FRONT_DOOR_SIGNALS.items()},
    )


def fresh_role(view: RoleSignals, *, now_s: float, staleness_s: float) -> RoleSignals:
    """`view`, with every signal missing once its window ended more than `staleness_s` ago."""
    age_s = _age_s(view.window_end_s, now_s)
    return view if age_s is None or age_s <= staleness_s else _aged(view, age_s)


def fresh_front_door(view: FrontDoor, *, now_s: float, staleness_s: float) -> FrontDoor:
    """The same for the front door: without fresh reports demand is missing."""
    age_s = _age_s(view.window_end_s, now_s)
    return view if age_s is None or age_s <= staleness_s else _aged(view, age_s)


def _age_s(window_end_s: float | None, now_s: float) -> float | None:
    return None if window_end_s is None else max(0.0, now_s - window_end_s)


def _aged(view: V, age_s: float) -> V:
    gone = missing(f"last window ended {age_s:.0f} s ago")
    changes = {item.name: gone for item in fields(view) if isinstance(getattr(view, item.name), Measurement)}
    return replace(view, **changes)  # type: ignore[arg-type]  # every changed field is a Measurement
