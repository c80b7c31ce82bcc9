"""Kubernetes' Horizontal Pod Autoscaler, as its documentation describes it.

Source: Kubernetes documentation, "Horizontal Pod Autoscaling" (autoscaling/v2): sections "Algorithm details",
"Configurable scaling behavior" and "Stabilization window"; defaults of the controller manager and of the API: sync
period 15 s, tolerance 0.1, scale-down stabilisation 300 s, scale-up none, at most the larger of 100 % and 4 pods more
in 15 s, down to the minimum in 15 s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lab.baselines.history import EMPTY, History
from lab.baselines.interface import RoleView, Signal


def replicas_for(
    values: Sequence[float | None], *, starting: int, target: float, current: int, tolerance: float = 0.1
) -> int | None:
    """Replicas for one metric of the pods that are ready (None: it is missing), before any limit.

    None where no pod has the metric. Missing metrics count as the target where the rest would scale in, as 0 where it
    would scale out; pods that start count as 0 where it would scale out. If that turns the direction round, or leads
    into the tolerance, nothing changes. Raises ValueError for a target that is not above 0.
    """
    if target <= 0:
        raise ValueError(f"target must be above 0, not {target}")
    known = [value for value in values if value is not None]
    if not known:
        return None
    missing = len(values) - len(known)
    ratio = sum(known) / len(known) / target
    growing = ratio > 1
    if not missing and not (growing and starting):
        return current if _close(ratio, tolerance) else math.ceil(ratio * len(known))
    count = len(known) + missing + (starting if growing else 0)
    corrected = (sum(known) + (0.0 if growing else missing * target)) / count / target
    if _close(corrected, tolerance) or (corrected > 1) != growing:
        return current
    replicas = math.ceil(corrected * count)
    turned = replicas < current if growing else replicas > current
    return current if turned else replicas


def _close(ratio: float, tolerance: float) -> bool:
    # Ratios such as 1.1 have no exact form; a rounding error may not scale.
    return abs(ratio - 1.0) <= tolerance + 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class HpaState:
    """Recommendations for the windows, and changes for the rate limits."""

    recommendations: History = EMPTY
    changes: History = EMPTY


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HpaMetric:
    """A metric and its target average value a pod."""

    signal: Signal
    target: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hpa:
    """An HPA with one or more metrics of which the one with the highest count wins."""

    metrics: tuple[HpaMetric, ...] = (HpaMetric(signal=Signal.GPU_UTILIZATION, target=0.7),)
    tolerance: float = 0.1
    period_s: float = 15.0
    down_window_s: float = 300.0
    up_window_s: float = 0.0
    up_percent: float = 100.0
    up_pods: int = 4
    limit_period_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.metrics or any(metric.target <= 0 for metric in self.metrics):
            raise ValueError("an HPA needs at least one metric, and targets above 0")

    def initial(self) -> HpaState:
        """Nothing recommended."""
        return HpaState()

    def observe(self, view: RoleView, now_s: float, state: HpaState) -> HpaState:
        """An HPA looks only when it decides."""
        del view, now_s
        return state

    def decide(self, view: RoleView, now_s: float, state: HpaState) -> tuple[int, HpaState]:
        """Replicas after tolerance, windows and limits."""
        current = view.desired
        # Scaled to zero by hand: the controller is off until an operator scales up.
        if current == 0 and view.min_replicas != 0:
            return 0, state
        keep_s = max(self.down_window_s, self.up_window_s)
        history = state.recommendations
        if not history.values:
            history = history.added(now_s, current, keep_s=keep_s)
        wanted = view.clamp(self._wanted(view, current))
        history = history.added(now_s, wanted, keep_s=keep_s)
        stable = self._stabilised(wanted, history, now_s, current)
        limited = self._limited(stable, state.changes, now_s, current)
        changes = state.changes
        if limited != current:
            changes = changes.added(now_s, limited - current, keep_s=self.limit_period_s)
        return limited, HpaState(history, changes)

    def _wanted(self, view: RoleView, current: int) -> int:
        wanted = []
        for metric in self.metrics:
            found = replicas_for(
                [replica.value(metric.signal) for replica in view.ready],
                starting=view.starting,
                target=metric.target,
                current=current,
                tolerance=self.tolerance,
            )
            if found is not None:
                wanted.append(found)
        if not wanted:
            return current
        # With a metric that cannot be had, the others may only scale out.
        if len(wanted) < len(self.metrics):
            return max(current, *wanted)
        return max(wanted)

    def _stabilised(self, wanted: int, history: History, now_s: float, current: int) -> int:
        # Half-open, as in the controller: a window of 0 s holds the latest recommendation alone.
        up = min([wanted, *(value for at_s, value in history.values if now_s - at_s < self.up_window_s)])
        down = max([wanted, *(value for at_s, value in history.values if now_s - at_s < self.down_window_s)])
        return int(min(max(current, up), down))

    def _limited(self, wanted: int, changes: History, now_s: float, current: int) -> int:
        if wanted <= current:
            return wanted
        # A change exactly one period ago is over: half-open, so that a sync each 15 s may double each time.
        recent = [delta for at_s, delta in changes.values if now_s - at_s < self.limit_period_s and delta > 0]
        base = current - int(sum(recent))
        limit = max(math.ceil(base * (1 + self.up_percent / 100)), base + self.up_pods)
        return max(current, min(wanted, limit))
