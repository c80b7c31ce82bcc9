"""NVIDIA Dynamo's load-based planner: thresholds on KV usage and on the prefill queue, one worker an interval.

Sources: Dynamo documentation, "Load-based Planner" (docs/architecture/load_planner.md), and the planner's defaults
(components/src/dynamo/planner/defaults.py): metrics pulled every 10 s, adjusted every 180 s (30 s in the first
releases), decode up above 0.9 and down below 0.5 of KV, prefill up above 5 and down below 0.2 requests waiting a
worker, at least one worker. A new decode worker keeps the count from falling for three intervals. Prefill is not
scaled up if the queue, as it moves, falls below the threshold within three intervals.
While workers start or stop, no decision is made.
"""

from __future__ import annotations

import dataclasses

from lab.baselines.history import EMPTY, History
from lab.baselines.interface import RoleView, Signal, mean_of
from trimtab.domain.vocabulary import Role

GRACE_INTERVALS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class LoadState:
    """What was pulled since the last adjustment, and intervals until decode may shrink again."""

    pulled: History = EMPTY
    grace: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamoLoad:
    """One worker more or less by the interval's mean. Colocated roles scale as aggregated workers do: by KV usage."""

    kv_up: float = 0.9
    kv_down: float = 0.5
    queue_up: float = 5.0
    queue_down: float = 0.2
    period_s: float = 180.0

    def __post_init__(self) -> None:
        if not (0 <= self.kv_down < self.kv_up and 0 <= self.queue_down < self.queue_up):
            raise ValueError("each lower threshold must be at least 0 and below the upper one")

    def initial(self) -> LoadState:
        """Nothing pulled."""
        return LoadState()

    def observe(self, view: RoleView, now_s: float, state: LoadState) -> LoadState:
        """Pull the role's load, unless workers are on their way."""
        if view.starting or view.desired != len(view.replicas):
            return state
        signal = Signal.WAITING if view.key.role is Role.PREFILL else Signal.KV_USAGE
        load = mean_of(view.ready, signal)
        if load is None:
            return state
        return dataclasses.replace(state, pulled=state.pulled.added(now_s, load, keep_s=self.period_s))

    def decide(self, view: RoleView, now_s: float, state: LoadState) -> tuple[int, LoadState]:
        """One more, one less, or as many; what was pulled is used up."""
        values = state.pulled.since(now_s, self.period_s)
        after = LoadState(EMPTY, max(0, state.grace - 1))
        if not values or view.starting or view.desired != len(view.replicas):
            return view.desired, after
        mean = sum(values) / len(values)
        if view.key.role is Role.PREFILL:
            falling = values[-1] + GRACE_INTERVALS * (values[-1] - values[0]) < self.queue_up
            if mean > self.queue_up and not falling:
                return view.desired + 1, after
            return max(1, view.desired - (mean < self.queue_down)), after
        if mean > self.kv_up:
            return view.desired + 1, LoadState(EMPTY, GRACE_INTERVALS)
        if mean < self.kv_down and not state.grace:
            return max(1, view.desired - 1), after
        return view.desired, after
