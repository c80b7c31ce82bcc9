"""From the recommended units to those that may be set now: window, coolings, step and bounds, each with its clamp."""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.scaled.recommend import Recommendation
from policy_engine.core.scaled.units import UnitBounds
from policy_engine.core.shared.vocabulary import Clamp, ClampKind, Rule
from trimtab.config.specs import Proportional

MAX_RING = 4096

Ring = tuple[tuple[float, int], ...]
"""Recommendations as (time in seconds, units), oldest first."""


@dataclass(frozen=True, slots=True)
class History:
    """What scale-in has to be measured against. Survives restarts; times are on the store's clock."""

    recommendations: Ring = ()
    last_fit_s: float | None = None
    last_out_s: float | None = None
    last_in_s: float | None = None


def remember(
    history: History, *, now_s: float, units: int, base_units: int, window_s: float, max_gap_s: float
) -> History:
    """Add a recommendation to the ring.

    After a gap (a first start, a restart, signals that were unfit for longer than `max_gap_s`) the present count
    goes in first: the load during the gap is unknown, so no scale-in passes before a whole window was observed.
    """
    ring = tuple(entry for entry in history.recommendations if now_s - entry[0] <= window_s)
    if history.last_fit_s is None or now_s - history.last_fit_s > max_gap_s or now_s < history.last_fit_s:
        ring = (*ring, (now_s, base_units))
    ring = (*ring, (now_s, units))[-MAX_RING:]
    return History(recommendations=ring, last_fit_s=now_s, last_out_s=history.last_out_s, last_in_s=history.last_in_s)


def _cooling_left_s(last_s: float | None, cooling_s: float, now_s: float) -> float:
    return 0.0 if last_s is None else max(0.0, cooling_s - (now_s - last_s))


def stabilise(
    recommendation: Recommendation, *, proportional: Proportional, history: History, base_units: int, now_s: float
) -> tuple[int, tuple[Clamp, ...]]:
    """Units after the window's maximum, the coolings and the step limit. `history` holds this tick's entry already."""
    units = recommendation.units
    if units == base_units or recommendation.rule == Rule.FROM_ZERO or base_units == 0:
        return units, ()
    clamps: list[Clamp] = []

    def clamp(kind: ClampKind, after: int, detail: str) -> int:
        clamps.append(Clamp(kind, float(units), float(after), detail))
        return after

    if units > base_units:
        left_s = _cooling_left_s(history.last_out_s, proportional.scale_out_cooling_s, now_s)
        if left_s > 0:
            return clamp(ClampKind.SCALE_OUT_COOLING, base_units, f"{left_s:.1f} s of cooling left"), tuple(clamps)
    else:
        if not recommendation.fit_for_in:
            return clamp(ClampKind.SIGNAL_QUALITY, base_units, "the signal is not fit for scale-in"), tuple(clamps)
        highest = max((asked for _, asked in history.recommendations), default=base_units)
        if highest > units:
            detail = f"the highest recommendation of {proportional.stabilization_window_s:g} s counts"
            units = clamp(ClampKind.STABILIZATION, min(highest, base_units), detail)
        if units < base_units:
            left_s = _cooling_left_s(history.last_in_s, proportional.scale_in_cooling_s, now_s)
            if left_s > 0:
                return clamp(ClampKind.SCALE_IN_COOLING, base_units, f"{left_s:.1f} s of cooling left"), tuple(clamps)
    step = proportional.max_step_units
    if step and abs(units - base_units) > step:
        limited = base_units + step if units > base_units else base_units - step
        units = clamp(ClampKind.MAX_STEP, limited, f"at most {step} units a decision")
    return units, tuple(clamps)


def bound(units: int, bounds: UnitBounds) -> tuple[int, tuple[Clamp, ...]]:
    """Units within the bounds of every role."""
    if units < bounds.minimum:
        return bounds.minimum, (Clamp(ClampKind.MIN_REPLICAS, float(units), float(bounds.minimum)),)
    if units > bounds.maximum:
        return bounds.maximum, (Clamp(ClampKind.MAX_REPLICAS, float(units), float(bounds.maximum)),)
    return units, ()
