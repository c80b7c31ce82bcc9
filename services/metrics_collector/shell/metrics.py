"""Series about the collector itself and about the fleet on its own ``/metrics``."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from metrics_collector.core.status import TargetStatus
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.vocabulary import Role

FRONT_DOOR = "front-door"


class ScrapeMetrics:
    """Counters that scrapes and rounds add to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        scrapes = Counter(
            "trimtab_collector_scrapes", "Scrapes, by the state they left the target in", ["state"], registry=registry
        )
        self.scrapes: Mapping[pb.TargetState.ValueType, Counter] = {
            state: scrapes.labels(_short(pb.TargetState.Name(state), "TARGET_STATE_"))
            for state in pb.TargetState.values()
        }
        self.rejected = Counter(
            "trimtab_collector_rejected_families",
            "Families refused: a value was not finite, negative, absurd, or did not add up",
            registry=registry,
        )
        self.lateness = Histogram(
            "trimtab_collector_scrape_lateness_seconds",
            "How long after it was due a scrape began",
            registry=registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )
        self.rounds = Counter(
            "trimtab_collector_rounds", "Windows, by what became of them", ["outcome"], registry=registry
        )


class FleetMetrics(Collector):
    """Aggregate series, made from the newest observations when they are asked for.

    A value that is missing has no sample, so that a graph shows a gap and not a zero; its quality is there all the
    same, as a series of 1 under the quality's name.
    """

    def __init__(
        self,
        observations: Callable[[], Iterable[pb.RoleObservation]],
        statuses: Callable[[], Mapping[str, TargetStatus]],
        actuators: Callable[[], Mapping[str, bool]],
        files: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._observations = observations
        self._statuses = statuses
        self._actuators = actuators
        self._files = files

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Called by the registry."""
        role_labels = ["service", "role"]
        signals = GaugeMetricFamily("trimtab_signal", "A role's signal", labels=[*role_labels, "signal"])
        quality = GaugeMetricFamily(
            "trimtab_signal_quality", "1 for the quality that a signal has", labels=[*role_labels, "signal", "quality"]
        )
        latencies = GaugeMetricFamily(
            "trimtab_latency_seconds", "A role's latency quantile", labels=[*role_labels, "latency", "quantile"]
        )
        replicas = GaugeMetricFamily(
            "trimtab_role_replicas", "Counted replicas, by whether they reported", labels=[*role_labels, "reported"]
        )
        for observation in self._observations():
            role = [observation.service, _role_label(observation.role)]
            for item in observation.signals:
                name = _short(pb.Signal.Name(item.signal), "SIGNAL_")
                quality_name = _short(types_pb2.Quality.Name(item.measurement.quality), "QUALITY_")
                quality.add_metric([*role, name, quality_name], 1)
                if item.measurement.HasField("value"):
                    signals.add_metric([*role, name], item.measurement.value)
            for latency in observation.latencies:
                name = _short(pb.Latency.Name(latency.latency), "LATENCY_")
                for label, measurement in (("0.5", latency.p50_s), ("0.95", latency.p95_s), ("0.99", latency.p99_s)):
                    if measurement.HasField("value"):
                        latencies.add_metric([*role, name, label], measurement.value)
            replicas.add_metric([*role, "yes"], len(observation.reported_replicas))
            replicas.add_metric([*role, "no"], len(observation.missing_replicas))
        yield from (signals, quality, latencies, replicas)
        yield self._targets()
        connected = GaugeMetricFamily(
            "trimtab_collector_actuator_connected", "1 while the actuator's stream lives", labels=["cluster"]
        )
        for cluster, is_connected in sorted(self._actuators().items()):
            connected.add_metric([cluster], float(is_connected))
        yield connected
        readable = GaugeMetricFamily(
            "trimtab_collector_targets_file_readable", "1 unless the file's newest version was refused", labels=["file"]
        )
        for file, is_readable in sorted(self._files().items()):
            readable.add_metric([file], float(is_readable))
        yield readable

    def _targets(self) -> GaugeMetricFamily:
        counts = {state: 0 for state in pb.TargetState.values() if state != pb.TARGET_STATE_UNSPECIFIED}
        for status in self._statuses().values():
            counts[status.state] += 1
        targets = GaugeMetricFamily("trimtab_collector_targets", "Targets, by state", labels=["state"])
        for state, count in sorted(counts.items()):
            targets.add_metric([_short(pb.TargetState.Name(state), "TARGET_STATE_")], count)
        return targets


def _role_label(role: "types_pb2.Role.ValueType") -> str:
    return FRONT_DOOR if role == types_pb2.ROLE_UNSPECIFIED else Role.from_number(role).value


def _short(name: str, prefix: str) -> str:
    """``QUALITY_OK`` → ``ok``."""
    return name.removeprefix(prefix).lower()
