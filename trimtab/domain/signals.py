"""What is measured: gauges and counters of a server's page, latencies, and the signals of a role that come of them.

Signals and latencies are closed, append-only sets with numbers on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from trimtab.api.collector.v1 import collector_pb2 as pb


class Gauge(StrEnum):
    """What stands at the moment of the page. Units are in the names; ratios go from 0 to 1."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE_RATIO = "kv_usage_ratio"
    """Mean over the server's engines."""
    KV_USAGE_MAX_RATIO = "kv_usage_max_ratio"
    AWAKE = "awake"
    """1 when every engine is awake, 0 when one sleeps; absent where the release does not say."""
    START_TIME_S = "start_time_s"
    """Start of the server's process, on its own clock."""


class Counter(StrEnum):
    """What only grows while a server lives, summed over its engines."""

    PREFILL_TOKENS = "prefill_tokens"
    """Prompt tokens that were computed."""
    PREFILL_CACHED_TOKENS = "prefill_cached_tokens"
    """Prompt tokens served from the prefix cache."""
    PROMPT_TOKENS = "prompt_tokens"
    """All prompt tokens, however they came."""
    DECODE_TOKENS = "decode_tokens"
    FINISHED = "finished"
    """Requests that ended well: those aborted and failed are left out."""
    PREEMPTIONS = "preemptions"
    PREFIX_QUERIES = "prefix_queries"
    PREFIX_HITS = "prefix_hits"
    PREFILL_SECONDS = "prefill_seconds"
    """Time that finished requests spent in prefill."""
    PREFILL_REQUESTS = "prefill_requests"
    """Requests in ``PREFILL_SECONDS``."""


class Signal(StrEnum):
    """A value of a role over a window, in the order of the wire's numbers. Units are in the names."""

    PREFILL_TPS = "prefill_tps"
    """Prompt tokens computed per second, without those served from the prefix cache."""
    PREFILL_CACHED_TPS = "prefill_cached_tps"
    """Prompt tokens per second served from the prefix cache."""
    DECODE_TPS = "decode_tps"
    REQUEST_RPS = "request_rps"
    """Finished requests per second."""
    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE_RATIO = "kv_usage_ratio"
    """Mean over replicas; its maximum is the largest of one replica."""
    PREEMPTION_RPS = "preemption_rps"
    PREFIX_HIT_RATIO = "prefix_hit_ratio"
    """Prefix-cache hits over queries."""
    ARRIVAL_RPS = "arrival_rps"
    """At the front door, as are the next three."""
    HELD = "held"
    """Requests held for want of a routable replica."""
    ARRIVAL_PROMPT_TPS = "arrival_prompt_tps"
    ARRIVAL_OUTPUT_TPS = "arrival_output_tps"
    """Output tokens asked for per second."""
    GPU_UTILISATION_RATIO = "gpu_utilisation_ratio"
    """From the GPU exporter, as are the next three: share of time in which a kernel ran."""
    SM_ACTIVITY_RATIO = "sm_activity_ratio"
    """Share of streaming multiprocessors with work."""
    GPU_POWER_W = "gpu_power_w"
    """Sum over the role's GPUs."""
    GPU_MEMORY_RATIO = "gpu_memory_ratio"
    ASLEEP_LOAD = "asleep_load"
    """Requests that wait at sleeping servers: demand, not capacity."""


class Latency(StrEnum):
    """A latency whose histogram is kept, in seconds."""

    TTFT = "ttft"
    TBT = "tbt"
    """Between two tokens of one stream."""
    TPOT = "tpot"
    """Mean time per output token of a finished request."""
    QUEUE = "queue"
    E2E = "e2e"


RATES: Mapping[Signal, Counter] = MappingProxyType(
    {
        Signal.PREFILL_TPS: Counter.PREFILL_TOKENS,
        Signal.PREFILL_CACHED_TPS: Counter.PREFILL_CACHED_TOKENS,
        Signal.DECODE_TPS: Counter.DECODE_TOKENS,
        Signal.REQUEST_RPS: Counter.FINISHED,
        Signal.PREEMPTION_RPS: Counter.PREEMPTIONS,
    }
)
"""Signals that are a counter's increase per second."""
AVERAGES: Mapping[Signal, Gauge] = MappingProxyType(
    {
        Signal.RUNNING: Gauge.RUNNING,
        Signal.WAITING: Gauge.WAITING,
        Signal.KV_USAGE_RATIO: Gauge.KV_USAGE_RATIO,
    }
)
"""Signals that are a gauge's average over the window."""
PAGE_SIGNALS: tuple[Signal, ...] = (*RATES, *AVERAGES, Signal.PREFIX_HIT_RATIO)
"""Signals that come of servers' pages alone."""
RATIO_SIGNALS = frozenset(
    {
        Signal.KV_USAGE_RATIO,
        Signal.PREFIX_HIT_RATIO,
        Signal.GPU_UTILISATION_RATIO,
        Signal.SM_ACTIVITY_RATIO,
        Signal.GPU_MEMORY_RATIO,
    }
)
"""Signals whose value is a sum over a weight."""

SIGNAL_NUMBERS: Mapping[Signal, pb.Signal.ValueType] = MappingProxyType(
    {signal: pb.Signal.Value(f"SIGNAL_{signal.name}") for signal in Signal}
)
SIGNALS: Mapping[int, Signal] = MappingProxyType({number: signal for signal, number in SIGNAL_NUMBERS.items()})
"""By number."""
LATENCY_NUMBERS: Mapping[Latency, pb.Latency.ValueType] = MappingProxyType(
    {latency: pb.Latency.Value(f"LATENCY_{latency.name}") for latency in Latency}
)
LATENCIES: Mapping[int, Latency] = MappingProxyType({number: latency for latency, number in LATENCY_NUMBERS.items()})
"""By number."""
