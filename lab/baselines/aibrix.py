"""AIBrix's pod autoscalers: APA, and KPA as taken from Knative.

Sources: AIBrix documentation, "Metric-based Autoscaling", and its controller at e3e10f9 (pkg/controller/podautoscaler):
rates up and down 2, tolerances 0.1, panic threshold 2, scale-up cooldown none, scale-down cooldown 300 s kept as the
largest recommendation of that window; stable window 180 s, panic window 60 s. Knative Serving documentation, "About
autoscaling" and "Configuring the Knative Pod Autoscaler": stable window 60 s, panic window a tenth of it, panic when
the panic window needs twice the replicas that are ready, no scale-in while in panic, out of panic after a stable
window without cause.

APA's value is a mean a replica. KPA divides a total by a replica's target, as Knative does. (At the commit above
AIBrix feeds KPA the mean a replica, which gives too few replicas; a baseline should not lose by that.)
"""

from __future__ import annotations

import dataclasses
import math

from lab.baselines.history import EMPTY, History
from lab.baselines.interface import RoleView, Signal, mean_of


def apa_replicas(
    current: int, *, value: float, target: float, tolerance: float = 0.1, up_rate: float = 2.0, down_rate: float = 2.0
) -> int:
    """Replicas by APA's rule for a mean value a replica."""
    ratio = value / target
    if ratio > 1 + tolerance:
        return min(math.ceil(current * ratio), math.ceil(up_rate * current))
    if ratio < 1 - tolerance:
        return max(math.ceil(current * ratio), math.floor(current / down_rate))
    return current


@dataclasses.dataclass(frozen=True, slots=True)
class WindowState:
    """Values of the metric, recommendations, and since when KPA panics."""

    values: History = EMPTY
    recommendations: History = EMPTY
    panic_since_s: float | None = None
    panic_most: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Apa:
    """AIBrix Pod Autoscaler on a signal's mean a replica over a window."""

    signal: Signal = Signal.KV_USAGE
    target: float = 0.5
    tolerance: float = 0.1
    up_rate: float = 2.0
    down_rate: float = 2.0
    window_s: float = 180.0
    down_cooldown_s: float = 300.0
    period_s: float = 10.0

    def __post_init__(self) -> None:
        _check(self.target, self.up_rate, self.down_rate)

    def initial(self) -> WindowState:
        """Nothing seen."""
        return WindowState()

    def observe(self, view: RoleView, now_s: float, state: WindowState) -> WindowState:
        """Take in the mean of the replicas that are ready."""
        value = mean_of(view.ready, self.signal)
        if value is None:
            return state
        return dataclasses.replace(state, values=state.values.added(now_s, value, keep_s=self.window_s))

    def decide(self, view: RoleView, now_s: float, state: WindowState) -> tuple[int, WindowState]:
        """Replicas by the window's mean; the largest answer of the cooldown where that is fewer than now."""
        value = state.values.mean(now_s, self.window_s)
        if value is None:
            return view.desired, state
        wanted = view.clamp(
            apa_replicas(
                view.desired,
                value=value,
                target=self.target,
                tolerance=self.tolerance,
                up_rate=self.up_rate,
                down_rate=self.down_rate,
            )
        )
        return _cooled(wanted, view.desired, now_s, self.down_cooldown_s, state)


def _check(target: float, up_rate: float, down_rate: float) -> None:
    if target <= 0 or up_rate < 1 or down_rate < 1:
        raise ValueError(f"target must be above 0 and rates at least 1: {target}, {up_rate}, {down_rate}")


def _cooled(wanted: int, current: int, now_s: float, cooldown_s: float, state: WindowState) -> tuple[int, WindowState]:
    recommendations = state.recommendations.added(now_s, wanted, keep_s=cooldown_s)
    state = dataclasses.replace(state, recommendations=recommendations)
    if wanted >= current:
        return wanted, state
    return min(current, int(max(recommendations.since(now_s, cooldown_s)))), state


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kpa:
    """Knative's autoscaler on the total of a signal, with a stable and a panic window."""

    signal: Signal = Signal.RUNNING
    target: float = 10.0
    """A replica's."""
    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    tolerance: float = 0.1
    up_rate: float = 2.0
    down_rate: float = 2.0
    down_cooldown_s: float = 0.0
    """Knative's scale-down-delay is 0; AIBrix's cooldown is 300 s."""
    period_s: float = 2.0

    def __post_init__(self) -> None:
        _check(self.target, self.up_rate, self.down_rate)
        if not 0 < self.panic_window_s <= self.stable_window_s or self.panic_threshold <= 1:
            raise ValueError("0 < panic window ≤ stable window and panic threshold > 1 must hold")

    def initial(self) -> WindowState:
        """Nothing seen, no panic."""
        return WindowState()

    def observe(self, view: RoleView, now_s: float, state: WindowState) -> WindowState:
        """Take in the total over the replicas that are ready; waiting requests count where running ones do."""
        mean = mean_of(view.ready, self.signal)
        if mean is None:
            return state
        total = mean * len(view.ready)
        if self.signal is Signal.RUNNING:
            waiting = mean_of(view.ready, Signal.WAITING)
            # Knative's concurrency is that of requests in flight, in queues too.
            total += 0.0 if waiting is None else waiting * len(view.ready)
        return dataclasses.replace(state, values=state.values.added(now_s, total, keep_s=self.stable_window_s))

    def decide(self, view: RoleView, now_s: float, state: WindowState) -> tuple[int, WindowState]:
        """Replicas of the stable window, or of the panic window while in panic."""
        stable = state.values.mean(now_s, self.stable_window_s)
        panic = state.values.mean(now_s, self.panic_window_s)
        if stable is None or panic is None:
            return view.desired, state
        ready = len(view.ready)
        most = max(1, math.ceil(self.up_rate * ready))
        least = math.floor(ready / self.down_rate)
        stable_wanted = self._wanted(stable, ready)
        panic_wanted = self._wanted(panic, ready)
        state = self._panicking(panic_wanted / max(1, ready) >= self.panic_threshold, now_s, ready, state)
        wanted = min(max(stable_wanted, least), most)
        if state.panic_since_s is not None:
            wanted = max(wanted, min(max(panic_wanted, least), most), state.panic_most)
            state = dataclasses.replace(state, panic_most=wanted)
        return _cooled(view.clamp(wanted), view.desired, now_s, self.down_cooldown_s, state)

    def _wanted(self, total: float, ready: int) -> int:
        per_replica = total / max(1, ready)
        if ready and self.target * (1 - self.tolerance) <= per_replica <= self.target * (1 + self.tolerance):
            return ready
        return math.ceil(total / self.target)

    def _panicking(self, over: bool, now_s: float, ready: int, state: WindowState) -> WindowState:
        if over:
            most = ready if state.panic_since_s is None else state.panic_most
            return dataclasses.replace(state, panic_since_s=now_s, panic_most=most)
        if state.panic_since_s is not None and now_s - state.panic_since_s > self.stable_window_s:
            return dataclasses.replace(state, panic_since_s=None, panic_most=0)
        return state


AIBRIX_KPA = Kpa(stable_window_s=180.0, panic_window_s=60.0, down_cooldown_s=300.0, period_s=10.0)
"""KPA with AIBrix's windows and cooldown."""
