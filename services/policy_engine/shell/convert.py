"""Between protobuf and the core's types; pure, and nothing else knows both sides."""

from __future__ import annotations

import math
from collections.abc import Iterable

from policy_engine.core.arena import ReplicaFacts
from policy_engine.core.overlay import OverlayReplica
from policy_engine.core.signals import NEVER_READ, FrontDoor, RoleSignals, Signal, missing
from policy_engine.core.vocabulary import MemberKey
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.words import LifeCycle, Quality, Role


def role_name(role: Role) -> str:
    """The protobuf name, such as ROLE_DECODE."""
    return types_pb2.Role.Name(types_pb2.Role.ValueType(role.number))


def signal_of(measurement: types_pb2.Measurement) -> Signal:
    """A measurement from the wire; one without a value, or with a value that is none, is missing."""
    try:
        quality = Quality.from_number(measurement.quality)
    except ValueError:
        return missing("a quality that this version does not know")
    value = measurement.value if measurement.HasField("value") else None
    if value is not None and not (math.isfinite(value) and value >= 0):
        return missing("not a finite number")
    if value is None and quality in (Quality.OK, Quality.PARTIAL, Quality.RESET):
        quality = Quality.MISSING
    if quality == Quality.MISSING:
        value = None
    return Signal(value, quality, measurement.reported, measurement.expected, measurement.detail)


def _signals(observation: collector_pb2.RoleObservation) -> dict[int, Signal]:
    return {item.signal: signal_of(item.measurement) for item in observation.signals}


def role_signals(role: Role, observation: collector_pb2.RoleObservation) -> RoleSignals:
    """One role's observation."""
    signals = _signals(observation)
    latencies = {item.latency: signal_of(item.p95_s) for item in observation.latencies}
    return RoleSignals(
        role=role,
        window_end_s=observation.window_end.ToMicroseconds() / 1e6,
        prefill_tps=signals.get(collector_pb2.SIGNAL_PREFILL_TPS, NEVER_READ),
        decode_tps=signals.get(collector_pb2.SIGNAL_DECODE_TPS, NEVER_READ),
        request_rps=signals.get(collector_pb2.SIGNAL_REQUEST_RPS, NEVER_READ),
        running=signals.get(collector_pb2.SIGNAL_RUNNING, NEVER_READ),
        waiting=signals.get(collector_pb2.SIGNAL_WAITING, NEVER_READ),
        kv_usage_ratio=signals.get(collector_pb2.SIGNAL_KV_USAGE_RATIO, NEVER_READ),
        ttft_p95_s=latencies.get(collector_pb2.LATENCY_TTFT, NEVER_READ),
        tpot_p95_s=latencies.get(collector_pb2.LATENCY_TPOT, NEVER_READ),
        tbt_p95_s=latencies.get(collector_pb2.LATENCY_TBT, NEVER_READ),
    )


def front_door(observation: collector_pb2.RoleObservation) -> FrontDoor:
    """The front door's observation of one service."""
    signals = _signals(observation)
    return FrontDoor(
        window_end_s=observation.window_end.ToMicroseconds() / 1e6,
        held=signals.get(collector_pb2.SIGNAL_HELD, NEVER_READ),
        arrival_rps=signals.get(collector_pb2.SIGNAL_ARRIVAL_RPS, NEVER_READ),
        arrival_prompt_tps=signals.get(collector_pb2.SIGNAL_ARRIVAL_PROMPT_TPS, NEVER_READ),
        arrival_output_tps=signals.get(collector_pb2.SIGNAL_ARRIVAL_OUTPUT_TPS, NEVER_READ),
    )


def life_cycle(replica: actuator_pb2.Replica) -> LifeCycle:
    """A replica's life cycle; one that this version does not know is unknown."""
    try:
        return LifeCycle.from_number(replica.life_cycle)
    except ValueError:
        return LifeCycle.UNKNOWN


def replica_facts(replicas: Iterable[actuator_pb2.Replica]) -> tuple[ReplicaFacts, ...]:
    """Replicas as the arbiter takes them, by name."""
    return tuple(
        ReplicaFacts(
            replica=item.replica,
            life_cycle=life_cycle(item),
            routable=item.routable,
            in_flight=item.in_flight if item.HasField("in_flight") else None,
        )
        for item in sorted(replicas, key=lambda replica: replica.replica)
    )


def overlay_to_proto(overlay: Iterable[OverlayReplica]) -> list[actuator_pb2.OverlayReplica]:
    """An overlay on the wire."""
    return [
        actuator_pb2.OverlayReplica(
            replica=item.replica,
            service=item.member.service,
            role=types_pb2.Role.ValueType(item.member.role.number),
            model=item.model,
            profile=item.profile,
            node=item.node,
            gpu_indices=item.gpu_indices,
        )
        for item in overlay
    ]


def overlay_from_proto(overlay: Iterable[actuator_pb2.OverlayReplica]) -> tuple[OverlayReplica, ...]:
    """The other way; order is kept."""
    return tuple(
        OverlayReplica(
            replica=item.replica,
            member=MemberKey(item.service, Role.from_number(item.role)),
            model=item.model,
            profile=item.profile,
            node=item.node,
            gpu_indices=tuple(item.gpu_indices),
        )
        for item in overlay
    )
