"""The gateway's own Prometheus series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class GatewayMetrics:
    """One set per process; labels are services and closed sets of outcomes, never replicas of the past."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "trimtab_gateway_requests",
            "Requests by how they ended: ok, client_error, client_gone, no_replica, failed",
            ["service", "outcome"],
            registry=registry,
        )
        self.reissues = Counter(
            "trimtab_gateway_reissues",
            "Requests sent a second time, by cause: evicted, unreachable, error, aborted, cut_off",
            ["service", "cause"],
            registry=registry,
        )
        self.held = Gauge(
            "trimtab_gateway_held_requests", "Held for want of a routable replica", ["service"], registry=registry
        )
        self.in_flight = Gauge("trimtab_gateway_in_flight_requests", "On any replica", registry=registry)
        self.revision = Gauge(
            "trimtab_gateway_endpoints_revision", "Revision routed by", ["cluster"], registry=registry
        )
        self.actuator_up = Gauge(
            "trimtab_gateway_actuator_up", "1 while its endpoint stream is alive", ["actuator"], registry=registry
        )
        self.registry_up = Gauge(
            "trimtab_gateway_registry_up", "1 while the store holds a set to follow", ["cluster"], registry=registry
        )
        self.stale = Gauge(
            "trimtab_gateway_endpoints_stale",
            "1 while no living actuator stands behind the set that is routed by",
            ["cluster"],
            registry=registry,
        )
        self.acknowledge_failures = Counter(
            "trimtab_gateway_acknowledge_failures",
            "Acknowledgements that failed, by the actuator's address or registry/<cluster>",
            ["actuator"],
            registry=registry,
        )
        self.demand_failures = Counter(
            "trimtab_gateway_demand_report_failures", "Demand reports that failed", registry=registry
        )
