"""Metrics of the pre-scheduler, at its own ``/metrics``."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prescheduler.core.model import Constraint, Outcome, Plan
from trimtab.store.records import Refused


class Metrics:
    """Cycles, what they placed and took away, and why requests were denied."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.cycle_duration = Histogram(
            "trimtab_prescheduler_cycle_seconds",
            "Duration of a cycle, from asking the actuators to writing the results",
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self.plan_duration = Histogram(
            "trimtab_prescheduler_plan_seconds",
            "Duration of the placement itself",
            registry=registry,
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
        )
        self.failed_cycles = Counter(
            "trimtab_prescheduler_failed_cycles", "Cycles that ended early, by cause", ["cause"], registry=registry
        )
        self.placed = Counter("trimtab_prescheduler_placed_replicas", "Replicas placed", registry=registry)
        self.removed = Counter("trimtab_prescheduler_removed_replicas", "Replicas taken away", registry=registry)
        self.denied = Counter(
            "trimtab_prescheduler_denied_requests",
            "Requests denied, held or placed in part, by constraint; once per cycle",
            ["constraint"],
            registry=registry,
        )
        self.requests = Gauge(
            "trimtab_prescheduler_requests", "Requests of the last cycle, by outcome", ["outcome"], registry=registry
        )
        self.silent_clusters = Gauge(
            "trimtab_prescheduler_silent_clusters", "Clusters left out of the last cycle", registry=registry
        )
        self.refused_records = Gauge(
            "trimtab_prescheduler_refused_records",
            "1 for each stored record that cannot be read; its service is held",
            ["kind", "subject", "reason"],
            registry=registry,
        )
        self.leading = Gauge("trimtab_prescheduler_leading", "1 while this process leads", registry=registry)

    def show_refused(self, refused: Iterable[Refused]) -> None:
        """Set the gauge of refused records."""
        self.refused_records.clear()
        for record in refused:
            self.refused_records.labels(record.kind, record.field, record.reason.value).set(1)

    def count(self, plan: Plan) -> None:
        """Count one cycle that was carried out."""
        outcomes = dict.fromkeys(Outcome, 0)
        for result in plan.results:
            outcomes[result.outcome] += 1
            if result.constraint is not Constraint.NONE:
                self.denied.labels(result.constraint.label).inc()
            for group in result.groups:
                self.placed.inc(len(group.add))
                self.removed.inc(sum(cut.count for cut in group.remove))
        for outcome, count in outcomes.items():
            self.requests.labels(outcome.name.lower()).set(count)
