"""The actuator's own series on /metrics."""

from collections import Counter as Count
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from actuator.core.gpu_occupancy import awake_gpus
from actuator.core.model import OperationKind, OperationState, State, StepKind
from actuator.core.refused import RefusedRecord
from actuator.core.world import World
from trimtab.domain.vocabulary import LifeCycle


class ActuatorMetrics:
    """Gauges are set from the state, counters and histograms from what changed in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.active = Gauge(
            "trimtab_actuator_active", "1 while this process holds the cluster's lease", registry=registry
        )
        self.store_away = Gauge("trimtab_actuator_fail_static", "1 while the store is away", registry=registry)
        self._replicas = Gauge(
            "trimtab_actuator_replicas",
            "Replicas by service and life cycle",
            ["service", "life_cycle"],
            registry=registry,
        )
        self._routable = Gauge(
            "trimtab_actuator_routable_replicas", "Replicas that count as capacity", ["service"], registry=registry
        )
        self._unfinished = Gauge(
            "trimtab_actuator_operations_unfinished", "Operations under way", ["kind"], registry=registry
        )
        self._operations = Counter(
            "trimtab_actuator_operations", "Operations that ended", ["kind", "state"], registry=registry
        )
        self._drain = Histogram(
            "trimtab_actuator_release_seconds",
            "From the hold to asleep or deleted",
            ["kind"],
            registry=registry,
            buckets=(0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300),
        )
        self._wake = Histogram(
            "trimtab_actuator_wake_seconds",
            "From the start of a wake step to routable",
            registry=registry,
            buckets=(0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300),
        )
        self.refused = Counter(
            "trimtab_actuator_refused", "Writes that were refused, by reason", ["reason"], registry=registry
        )
        self._refused_records = Gauge(
            "trimtab_actuator_refused_records",
            "Records that cannot be read; what they are about is held",
            ["kind", "reason"],
            registry=registry,
        )
        self._double = Gauge(
            "trimtab_actuator_gpus_with_two_awake",
            "GPUs with more than one awake replica; must be 0",
            registry=registry,
        )
        self._endpoint_revision = Gauge(
            "trimtab_actuator_endpoint_revision", "Revision of the endpoint set", registry=registry
        )
        self._gateways = Gauge("trimtab_actuator_gateways", "Gateways with a lease", registry=registry)

    def show(self, state: State, world: World, *, leased_gateways: int) -> None:
        """Sets every gauge."""
        cycles: Count[tuple[str, str]] = Count()
        routable: Count[str] = Count()
        for replica in state.replicas.values():
            cycles[replica.spec.service, replica.life_cycle.value] += 1
            routable[replica.spec.service] += int(replica.routable)
        self._replicas.clear()
        self._routable.clear()
        for service, count in routable.items():
            self._routable.labels(service).set(count)
            for life_cycle in LifeCycle:
                self._replicas.labels(service, life_cycle.value).set(cycles[service, life_cycle.value])
        kinds = Count(operation.kind.value for operation in state.operations.values() if not operation.finished)
        self._unfinished.clear()
        for kind, count in kinds.items():
            self._unfinished.labels(kind).set(count)
        users = awake_gpus(state.replicas.values(), world)
        self._double.set(sum(1 for names in users.values() if len(names) > 1))
        self._endpoint_revision.set(state.meta.endpoint_revision)
        self._gateways.set(leased_gateways)

    def show_refused(self, refused: Iterable[RefusedRecord]) -> None:
        """Shows how many records are refused."""
        self._refused_records.clear()
        for (kind, reason), count in Count((record.kind.value, record.reason) for record in refused).items():
            self._refused_records.labels(kind, reason).set(count)

    def count(self, old: State, new: State) -> None:
        """Counts operations and steps that ended between two states."""
        for operation_id, operation in new.operations.items():
            before = old.operations.get(operation_id)
            if operation == before:
                continue
            if operation.finished and (before is None or not before.finished):
                self._operations.labels(operation.kind.value, operation.state.value).inc()
            if operation.kind is OperationKind.PREWARM:
                # Its releases and wakes are not urgent, so they are not in these histograms.
                continue
            known = {step.replica: step for step in before.steps} if before is not None else {}
            for step in operation.steps:
                earlier = known.get(step.replica)
                ended = step.state is OperationState.SUCCEEDED and (earlier is None or not earlier.finished)
                if ended and step.kind in (StepKind.RELEASE, StepKind.DELETE):
                    self._drain.labels(step.kind.value).observe(max(0.0, step.end_s - step.start_s))
                elif ended and step.kind is StepKind.WAKE:
                    self._wake.observe(max(0.0, step.end_s - step.start_s))
