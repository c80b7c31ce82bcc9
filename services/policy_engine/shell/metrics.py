"""The engine's own series on /metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from policy_engine.shell.pools import PoolReport
from policy_engine.shell.scaled import ScaledReport
from trimtab.api.policy.v1 import decision_pb2
from trimtab.store.records import Refused

_REGION_NUMBER = {"CRITICAL": 1, "NOMINAL": 2, "SURPLUS": 3}


class EngineMetrics:
    """Gauges are those of the last cycle; a member without a Z, or a ρ, has no series of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leader = Gauge("trimtab_policy_leader", "1 while this process holds the leader's lease", registry=registry)
        self.cycle_s = Histogram(
            "trimtab_policy_turn_seconds",
            "Duration of one cycle",
            registry=registry,
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
        )
        self.decisions = Counter(
            "trimtab_policy_decisions", "Decision records written", ["kind", "rule"], registry=registry
        )
        self.failed_cycles = Counter(
            "trimtab_policy_failed_turns", "Cycles that ended early", ["reason"], registry=registry
        )
        self.z = Gauge("trimtab_policy_z", "Normalised Token Service Share", ["service", "role"], registry=registry)
        self.rho = Gauge(
            "trimtab_policy_rho",
            "Work of a pool's member over its routable capacity",
            ["service", "role"],
            registry=registry,
        )
        self.region = Gauge(
            "trimtab_policy_region", "1 critical, 2 nominal, 3 surplus", ["service", "role"], registry=registry
        )
        self.desired = Gauge(
            "trimtab_policy_desired_replicas", "Replicas asked for", ["service", "role"], registry=registry
        )
        self.holding = Gauge("trimtab_policy_holding", "1 while the subject holds", ["subject"], registry=registry)
        self.refused_records = Gauge(
            "trimtab_policy_refused_records",
            "1 for each stored record that cannot be read; its subject holds",
            ["kind", "subject", "reason"],
            registry=registry,
        )

    def count(self, record: decision_pb2.Decision) -> None:
        """A record was written."""
        kind = decision_pb2.DecisionKind.Name(record.kind).removeprefix("DECISION_KIND_").lower()
        rule = decision_pb2.Rule.Name(record.rule).removeprefix("RULE_").lower()
        self.decisions.labels(kind, rule).inc()

    def show(self, pools: Iterable[PoolReport], scaled: Iterable[ScaledReport], refused: Iterable[Refused]) -> None:
        """Set the gauges from the last reports."""
        for gauge in (self.z, self.rho, self.region, self.desired, self.holding, self.refused_records):
            gauge.clear()
        for record in refused:
            self.refused_records.labels(record.kind, record.field, record.reason.value).set(1)
        for pool in pools:
            self.holding.labels(pool.pool.name).set(1 if pool.holding else 0)
            for member in pool.result.reports if pool.result is not None else ():
                labels = (member.key.service, member.key.role.value)
                if member.share.z is not None:
                    self.z.labels(*labels).set(member.share.z)
                if member.load is not None and member.load.rho is not None:
                    self.rho.labels(*labels).set(member.load.rho)
                self.region.labels(*labels).set(_REGION_NUMBER[member.share.region.value])
                self.desired.labels(*labels).set(member.awake)
        for service in scaled:
            self.holding.labels(service.policy.name).set(1 if service.result.holding else 0)
            for role, count in service.result.state.desired or ():
                self.desired.labels(service.policy.name, role.value).set(count)
