"""What collectors observed of a role and of a front door, as the engine's typed signals."""

from __future__ import annotations

from collections.abc import Mapping

from policy_engine.core.signals import FrontDoor, RoleSignals
from trimtab.api.collector.v1 import collector_pb2
from trimtab.domain.measurement import NEVER_READ, Measurement, measurement_from_proto
from trimtab.domain.time import seconds_of
from trimtab.words import Role

ROLE_SIGNALS: Mapping[str, collector_pb2.Signal.ValueType] = {
    "prefill_tps": collector_pb2.SIGNAL_PREFILL_TPS,
    "decode_tps": collector_pb2.SIGNAL_DECODE_TPS,
    "request_rps": collector_pb2.SIGNAL_REQUEST_RPS,
    "running": collector_pb2.SIGNAL_RUNNING,
    "waiting": collector_pb2.SIGNAL_WAITING,
    "kv_usage_ratio": collector_pb2.SIGNAL_KV_USAGE_RATIO,
    "preemption_rps": collector_pb2.SIGNAL_PREEMPTION_RPS,
    "prefix_hit_ratio": collector_pb2.SIGNAL_PREFIX_HIT_RATIO,
}
"""Fields of `RoleSignals` → the collector's signals."""
ROLE_LATENCIES: Mapping[str, collector_pb2.Latency.ValueType] = {
    "ttft_p95_s": collector_pb2.LATENCY_TTFT,
    "tpot_p95_s": collector_pb2.LATENCY_TPOT,
    "tbt_p95_s": collector_pb2.LATENCY_TBT,
    "e2e_p95_s": collector_pb2.LATENCY_E2E,
}
"""Fields of `RoleSignals` → the latencies whose 95th percentiles they are."""


def _signals(observation: collector_pb2.RoleObservation) -> dict[int, Measurement]:
    return {item.signal: measurement_from_proto(item.measurement) for item in observation.signals}


def role_signals(role: Role, observation: collector_pb2.RoleObservation) -> RoleSignals:
    """One role's observation."""
    signals = _signals(observation)
    latencies = {item.latency: measurement_from_proto(item.p95_s) for item in observation.latencies}
    return RoleSignals(
        role=role,
        window_end_s=seconds_of(observation.window_end),
        **{field: signals.get(name, NEVER_READ) for field, name in ROLE_SIGNALS.items()},
        **{field: latencies.get(name, NEVER_READ) for field, name in ROLE_LATENCIES.items()},
    )


def front_door(observation: collector_pb2.RoleObservation) -> FrontDoor:
    """The front door's observation of one service."""
    signals = _signals(observation)
    return FrontDoor(
        window_end_s=seconds_of(observation.window_end),
        held=signals.get(collector_pb2.SIGNAL_HELD, NEVER_READ),
        arrival_rps=signals.get(collector_pb2.SIGNAL_ARRIVAL_RPS, NEVER_READ),
        arrival_prompt_tps=signals.get(collector_pb2.SIGNAL_ARRIVAL_PROMPT_TPS, NEVER_READ),
        arrival_output_tps=signals.get(collector_pb2.SIGNAL_ARRIVAL_OUTPUT_TPS, NEVER_READ),
    )
