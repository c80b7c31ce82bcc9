"""The fleet's own Prometheus metrics, collected from its state on request."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.fleet.fleet import Fleet
from simulator.fleet.replica import ReplicaState


class FleetMetrics(Collector):
    """Families `trimtab_fleet_*`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The page in the plain text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """One reading of the fleet."""
        fleet = self._fleet
        replicas = GaugeMetricFamily("trimtab_fleet_replicas", "Replicas by state.", labels=["state"])
        states = Counter(r.state for r in fleet.replicas.values())
        for state in ReplicaState:
            replicas.add_metric([state.value], float(states[state]))
        yield replicas
        used = GaugeMetricFamily("trimtab_fleet_gpu_used_gib", "HBM in use.", labels=["node", "gpu"])
        for gpu in sorted(fleet.memory.capacity_gib):
            used.add_metric([gpu.node, str(gpu.index)], fleet.memory.used_gib(gpu))
        yield used
        lag = GaugeMetricFamily(
            "trimtab_fleet_step_lag_seconds",
            "How late a server's latest iteration ended, the largest over all servers.",
        )
        lags = [r.server.driver.lag_s for r in fleet.replicas.values() if r.server is not None]
        lag.add_metric([], max(lags, default=0.0))
        yield lag
        scales = GaugeMetricFamily("trimtab_fleet_scale", "Times shortened by this factor.", labels=["scale"])
        for name, factor in dataclasses.asdict(fleet.settings.scales).items():
            scales.add_metric([name], factor)
        yield scales
        awake = CounterMetricFamily(
            "trimtab_fleet_gpu_awake_seconds", "GPU-seconds with an awake replica's memory.", labels=["service"]
        )
        for service, seconds in fleet.gpu_seconds_awake().items():
            awake.add_metric([service], seconds)
        yield awake
        requests = CounterMetricFamily(
            "trimtab_fleet_requests", "Requests over all servers that ever lived.", labels=["service", "event"]
        )
        tokens = CounterMetricFamily(
            "trimtab_fleet_tokens", "Tokens over all servers that ever lived.", labels=["service", "kind"]
        )
        for service, stats in fleet.stats_by_service().items():
            requests.add_metric([service, "received"], stats.requests_received)
            requests.add_metric([service, "received_while_asleep"], stats.requests_received_while_asleep)
            requests.add_metric([service, "finished"], stats.requests_finished)
            requests.add_metric([service, "failed"], stats.requests_failed)
            requests.add_metric([service, "aborted"], stats.aborted)
            tokens.add_metric([service, "prompt"], stats.prompt_tokens)
            tokens.add_metric([service, "generation"], stats.generation_tokens)
        yield requests
        yield tokens
