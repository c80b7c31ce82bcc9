"""llm-d's Workload Variant Autoscaler, its saturation analyzer for a model with one variant.

Source: llm-d-workload-variant-autoscaler at b08b1c7, docs/saturation-analyzer.md and docs/saturation-scaling-config.md:
a replica is saturated at KV usage ≥ 0.80 or queue ≥ 5; replicas that are not have spare capacity up to those; one more
replica when the spare on average is below 0.1 of KV or 3 requests; one less when those would still be spare after
the load of one replica is spread over the rest, and at least two are not saturated. Peaks of the last minute count.
The last answer is kept until it is carried out, and while replicas start none is added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lab.baselines.history import EMPTY, History
from lab.baselines.interface import RoleView


@dataclasses.dataclass(frozen=True, slots=True)
class Peaks:
    """KV usage and queue of each replica over the last minute, by name."""

    kv_usage: Mapping[str, History] = dataclasses.field(default_factory=dict)
    waiting: Mapping[str, History] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wva:
    """Saturation scaling by one replica at a time."""

    kv_threshold: float = 0.80
    queue_threshold: float = 5.0
    kv_spare: float = 0.1
    queue_spare: float = 3.0
    peak_s: float = 60.0
    period_s: float = 60.0

    def __post_init__(self) -> None:
        if not (0 < self.kv_spare < self.kv_threshold <= 1 and 0 < self.queue_spare < self.queue_threshold):
            raise ValueError(
                "spare triggers must be above 0 and below their thresholds, and the KV threshold at most 1"
            )

    def initial(self) -> Peaks:
        """Nothing seen."""
        return Peaks()

    def observe(self, view: RoleView, now_s: float, state: Peaks) -> Peaks:
        """Take in what each replica reports; replicas that are gone are forgotten."""
        kv_usage, waiting = {}, {}
        for replica in view.ready:
            if replica.kv_usage_ratio is None or replica.waiting is None:
                continue
            name = replica.name
            kv_usage[name] = state.kv_usage.get(name, EMPTY).added(now_s, replica.kv_usage_ratio, keep_s=self.peak_s)
            waiting[name] = state.waiting.get(name, EMPTY).added(now_s, replica.waiting, keep_s=self.peak_s)
        return Peaks(kv_usage, waiting)

    def decide(self, view: RoleView, now_s: float, state: Peaks) -> tuple[int, Peaks]:
        """One more, one less, or what there is."""
        if view.desired != len(view.replicas):
            return view.desired, state
        names = sorted(state.kv_usage)
        if not names:
            return view.desired, state
        loads = [
            (max(state.kv_usage[name].since(now_s, self.peak_s)), max(state.waiting[name].since(now_s, self.peak_s)))
            for name in names
        ]
        calm = [(kv, queue) for kv, queue in loads if kv < self.kv_threshold and queue < self.queue_threshold]
        if self._short(calm, len(calm)):
            return (view.desired if view.starting else len(names) + 1), state
        # With a replica that does not report, what is left after a removal is not known.
        complete = len(names) == len(view.ready)
        if complete and len(calm) >= 2 and not self._short(calm, len(calm) - 1):
            return view.desired - 1, state
        return view.desired, state

    def _short(self, calm: list[tuple[float, float]], replicas: int) -> bool:
        """Whether too little is spare when the load of the unsaturated replicas is spread over so many."""
        if replicas < 1:
            return True
        kv = self.kv_threshold - sum(kv for kv, _ in calm) / replicas
        queue = self.queue_threshold - sum(queue for _, queue in calm) / replicas
        # A rounding error may not scale.
        return kv < self.kv_spare - 1e-9 or queue < self.queue_spare - 1e-9
