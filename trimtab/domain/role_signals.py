"""What decisions take of a role's window and of a service's front door, and how old it may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from trimtab.domain.measurement import NEVER_READ, Measurement, missing
from trimtab.domain.observation import RoleObservation
from trimtab.domain.signals import Latency, Signal
from trimtab.domain.vocabulary import Role

V = TypeVar("V", "RoleSignals", "FrontDoor")

_P95 = "_p95_s"


@dataclass(frozen=True, slots=True)
class RoleSignals:
    """One role's newest window. Rates are sums over the role's routable replicas; latencies in seconds.

    A field is the signal of its name, or the 95th percentile of the latency of its name.
    """

    role: Role
    window_end_s: float | None = None
    prefill_tps: Measurement = NEVER_READ
    decode_tps: Measurement = NEVER_READ
    request_rps: Measurement = NEVER_READ
    running: Measurement = NEVER_READ
    waiting: Measurement = NEVER_READ
    kv_usage_ratio: Measurement = NEVER_READ
    ttft_p95_s: Measurement = NEVER_READ
    tpot_p95_s: Measurement = NEVER_READ
    tbt_p95_s: Measurement = NEVER_READ
    e2e_p95_s: Measurement = NEVER_READ
    preemption_rps: Measurement = NEVER_READ
    prefix_hit_ratio: Measurement = NEVER_READ


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What the gateways of a service report: what they hold, and what arrives (per second). A field is a signal."""

    window_end_s: float | None = None
    held: Measurement = NEVER_READ
    arrival_rps: Measurement = NEVER_READ
    arrival_prompt_tps: Measurement = NEVER_READ
    arrival_output_tps: Measurement = NEVER_READ


def _named(view: type[RoleSignals | FrontDoor]) -> list[str]:
    return [item.name for item in fields(view) if item.name not in ("role", "window_end_s")]


_ROLE_SIGNALS: Mapping[str, Signal] = {name: Signal(name) for name in _named(RoleSignals) if not name.endswith(_P95)}
_ROLE_LATENCIES: Mapping[str, Latency] = {
    name: Latency(name.removesuffix(_P95)) for name in _named(RoleSignals) if name.endswith(_P95)
}
_FRONT_DOOR_SIGNALS: Mapping[str, Signal] = {name: Signal(name) for name in _named(FrontDoor)}


def role_signals(role: Role, observation: RoleObservation) -> RoleSignals:
    """What one role's observation says."""
    return RoleSignals(
        role=role,
        window_end_s=observation.end_s,
        **{name: observation.measurement(signal) for name, signal in _ROLE_SIGNALS.items()},
        **{name: observation.quantile(latency, 0.95) for name, latency in _ROLE_LATENCIES.items()},
    )


def front_door(observation: RoleObservation) -> FrontDoor:
    """What the observation of one service's front door says."""
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
