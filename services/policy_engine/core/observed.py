"""What collectors observed of a role and of a front door, as the engine's typed signals."""

from __future__ import annotations

import math

from policy_engine.core.signals import NEVER_READ, FrontDoor, RoleSignals, Signal, missing
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.words import Quality, Role


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
