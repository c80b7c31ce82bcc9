"""What collectors observed of a role and of a front door, as the engine's typed signals."""

from __future__ import annotations

import math
from collections.abc import Mapping

from policy_engine.core.signals import NEVER_READ, FrontDoor, RoleSignals, Signal, missing
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.words import Quality, Role

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
        **{field: signals.get(name, NEVER_READ) for field, name in ROLE_SIGNALS.items()},
        **{field: latencies.get(name, NEVER_READ) for field, name in ROLE_LATENCIES.items()},
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
