"""KV-Auto: replicas by KV cache usage, each model on its own, in the style of Llumnix.

Sources: "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024), §4.4.3, and Llumnix at 24220fb
(docs/Arguments.md, llumnix/config/default.py): checked every 10 s; load averaged over instances; nothing is done until
every instance has reported; one that was just launched counts as empty; scale-in takes one instance, and only if
the average without it stays low. TRE (§VI-A) compares with "each model is scaled independently when its local KV-cache
utilization crosses a fixed threshold"; it states no threshold.
"""

from __future__ import annotations

import dataclasses

from lab.baselines.interface import Replica, RoleView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvAuto:
    """Up by one above `high`, down by one below `low`, by the mean KV usage of a role's replicas.

    `queue_aware` adds the blocks that waiting prompts will take, as Llumnix's KV ratio does: a full cache reads as 1
    however many wait, and a queue in front of batch slots not at all.
    """

    high: float = 0.7
    low: float = 0.3
    queue_aware: bool = False
    period_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low must be at least 0 and below high, not {self.low} and {self.high}")

    def initial(self) -> None:
        """Nothing to remember."""
        return

    def observe(self, view: RoleView, now_s: float, state: None) -> None:
        """Nothing to remember."""
        del view, now_s, state

    def decide(self, view: RoleView, now_s: float, state: None) -> tuple[int, None]:
        """One more, one less, or as many."""
        del now_s, state
        if not view.ready:
            return max(view.desired, 1), None
        loads = [self._load(replica) for replica in view.ready]
        total = 0.0
        for load in loads:
            if load is None:
                return view.desired, None
            total += load
        count = len(view.replicas)
        if total / count > self.high:
            return max(view.desired, count) + 1, None
        # A replica that starts is no reason to take one away: its load is still to come.
        if not view.starting and count > 1 and total / (count - 1) < self.low:
            return min(view.desired, count) - 1, None
        return view.desired, None

    def _load(self, replica: Replica) -> float | None:
        if replica.kv_usage_ratio is None or not self.queue_aware:
            return replica.kv_usage_ratio
        if replica.kv_blocks is None or replica.waiting_kv_blocks is None or replica.kv_blocks <= 0:
            return None
        return replica.kv_usage_ratio + replica.waiting_kv_blocks / replica.kv_blocks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlumnixFreeness:
    """Llumnix's own signal: free KV blocks, less those that waiting prompts take, by request.

    That many more steps each request can run. Fewer than `grow_below` on average: replicas are added until the average
    with empty ones is above; more than `shrink_above`, also without one replica: one less. Defaults are Llumnix's.
    """

    grow_below: float = 10.0
    shrink_above: float = 60.0
    period_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.grow_below < self.shrink_above:
            raise ValueError(f"grow_below must be below shrink_above: {self.grow_below} and {self.shrink_above}")

    def initial(self) -> None:
        """Nothing to remember."""
        return

    def observe(self, view: RoleView, now_s: float, state: None) -> None:
        """Nothing to remember."""
        del view, now_s, state

    def decide(self, view: RoleView, now_s: float, state: None) -> tuple[int, None]:
        """As many as are needed, one less, or as many."""
        del now_s, state
        if not view.ready:
            return max(view.desired, 1), None
        free = requests = blocks = 0.0
        for replica in view.ready:
            figures = (replica.kv_usage_ratio, replica.kv_blocks, replica.waiting_kv_blocks, replica.running)
            if replica.waiting is None or any(figure is None for figure in figures):
                return view.desired, None
            usage, total, waiting_blocks, running = (float(figure or 0.0) for figure in figures)
            free += total * (1.0 - usage) - waiting_blocks
            requests += running + replica.waiting
            blocks += total
        per_replica = blocks / len(view.ready)
        free += per_replica * view.starting
        count = len(view.replicas)
        if requests <= 0:
            return (min(view.desired, count) - 1 if count > 1 and not view.starting else view.desired), None
        # A rounding error may not scale.
        grow_below = self.grow_below - 1e-9
        if free / requests < grow_below:
            added = 0
            while (free + added * per_replica) / requests < grow_below and count + added < view.max_replicas:
                added += 1
            return max(view.desired, count + added), None
        if not view.starting and count > 1 and (free - per_replica) / requests > self.shrink_above:
            return min(view.desired, count) - 1, None
        return view.desired, None
