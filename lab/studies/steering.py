"""Scaling a service by one signal alone, as HeteroScale compares its candidates (section 4.2.2, figure 6).

Signals that are linear in the load drive its Algorithm 2 (proportional control), latencies its Algorithm 3 (steps of a
fixed size at three thresholds). Both scale the two roles at once, in the service's ratio. All are calibrated alike: on
the value that the signal has at `TARGET_LOAD` of what a unit serves within its limits, and thresholds on its values at
the same distance in load, so that no signal has better settings than another.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from lab.studies.observing import LATENCIES, THROUGHPUTS, Signal

TARGET_LOAD = 0.7
OUT_LOAD, SEVERE_LOAD, IN_LOAD = 0.77, 0.91, 0.6
"""Load per unit, over what it serves, at which to scale out, to do so at once by more, and to scale in."""
TOLERANCE_OUT, TOLERANCE_IN = OUT_LOAD / TARGET_LOAD - 1, 1 - IN_LOAD / TARGET_LOAD
SEVERE_STEP, MODERATE_STEP, IN_STEP = 1.2, 1.1, 0.95
"""Algorithm 3's factors."""
_EPSILON = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Steering:
    """The rule of one signal: a target for linear ones, three thresholds for latencies."""

    signal: Signal
    target: float
    severe: float = math.inf
    moderate: float = math.inf
    relaxed: float = 0.0

    def units(self, value: float | None, units: int) -> int:
        """Units to order, at least one, when `units` serve and the signal has this value; no value changes nothing."""
        if value is None:
            return units
        if self.signal in LATENCIES:
            return self._stepped(value, units)
        # A sum of tokens is compared by unit, a share as it is.
        per_unit = value / units if self.signal in THROUGHPUTS else value
        ratio = per_unit / self.target
        if ratio > 1 + TOLERANCE_OUT or ratio < 1 - TOLERANCE_IN:
            return max(1, math.ceil(units * ratio - _EPSILON))
        return units

    def _stepped(self, value: float, units: int) -> int:
        if value >= self.severe:
            return math.ceil(units * SEVERE_STEP - _EPSILON)
        if value >= self.moderate:
            return math.ceil(units * MODERATE_STEP - _EPSILON)
        if value <= self.relaxed:
            return max(1, math.floor(units * IN_STEP + _EPSILON))
        return units


def calibrated(signal: Signal, at: Callable[[float], float], *, units: int) -> Steering:
    """`at` gives the signal's value on `units` units at a load, as a share of what they serve."""
    if signal in THROUGHPUTS:
        return Steering(signal, at(TARGET_LOAD) / units)
    if signal in LATENCIES:
        return Steering(signal, at(TARGET_LOAD), at(SEVERE_LOAD), at(OUT_LOAD), at(IN_LOAD))
    return Steering(signal, at(TARGET_LOAD))


@dataclasses.dataclass(slots=True)
class Cooling:
    """Time that must pass between two actions of one direction."""

    out_s: float
    in_s: float
    last_s: float = -math.inf

    def allows(self, change: int, now_s: float) -> bool:
        """Whether a change may happen now; if so it counts as done."""
        if change == 0 or now_s - self.last_s < (self.out_s if change > 0 else self.in_s) - _EPSILON:
            return False
        self.last_s = now_s
        return True


def reversals(changes: Sequence[int]) -> int:
    """How often scaling out follows scaling in, or the other way round."""
    return sum((before > 0) != (after > 0) for before, after in itertools.pairwise(changes))
