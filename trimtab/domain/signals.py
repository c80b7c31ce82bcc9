"""Measured values: gauges and counters of a server's page, latencies, and the signals of a role derived from them.

Signals and latencies are closed, append-only sets with numbers on the wire. This is the one declaration of each: its
name, its unit, its source, and whether decisions use it. What collectors sum, what is merged, stored and explained, and
what guards may limit follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Self

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.measurement import NEVER_READ, Measurement
from trimtab.domain.vocabulary import Role

RATIO = "ratio"
"""The unit of a share from 0 to 1: such a signal is a sum over a weight, others are sums over replicas."""


class Gauge(StrEnum):
    """Values at the moment of the page. Units are in the names; ratios go from 0 to 1."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE_RATIO = "kv_usage_ratio"
    """Mean over the server's engines."""
    KV_USAGE_MAX_RATIO = "kv_usage_max_ratio"
    AWAKE = "awake"
    """1 when every engine is awake, 0 when one sleeps; absent where the release does not report it."""
    START_TIME_S = "start_time_s"
    """Start of the server's process, on its own clock."""


class Counter(StrEnum):
    """Counts that only grow while a server runs, summed over its engines."""

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
    """A value of a role over a window: its name and its unit.

    In the order of the wire's numbers; the members of `trimtab.collector.v1.Signal` have the same names. A signal that
    decisions take is a field of `RoleSignals` too.
    """

    PREFILL_TPS = "prefill_tps", "tokens/s"
    """Prompt tokens computed per second, without those served from the prefix cache."""
    PREFILL_CACHED_TPS = "prefill_cached_tps", "tokens/s"
    """Prompt tokens per second served from the prefix cache."""
    DECODE_TPS = "decode_tps", "tokens/s"
    REQUEST_RPS = "request_rps", "1/s"
    """Finished requests per second."""
    RUNNING = "running", "requests"
    WAITING = "waiting", "requests"
    KV_USAGE_RATIO = "kv_usage_ratio", RATIO
    """Mean over replicas; its maximum is the largest of one replica."""
    PREEMPTION_RPS = "preemption_rps", "1/s"
    PREFIX_HIT_RATIO = "prefix_hit_ratio", RATIO
    """Prefix-cache hits over queries."""
    ARRIVAL_RPS = "arrival_rps", "1/s"
    """At the front door, as are the next three."""
    HELD = "held", "requests"
    """Requests held for want of a routable replica."""
    ARRIVAL_PROMPT_TPS = "arrival_prompt_tps", "tokens/s"
    ARRIVAL_OUTPUT_TPS = "arrival_output_tps", "tokens/s"
    """Output tokens requested per second."""
    GPU_UTILISATION_RATIO = "gpu_utilisation_ratio", RATIO
    """From the GPU exporter, as are the next three: share of time in which a kernel ran."""
    SM_ACTIVITY_RATIO = "sm_activity_ratio", RATIO
    """Share of streaming multiprocessors with work."""
    GPU_POWER_W = "gpu_power_w", "W"
    """Sum over the role's GPUs."""
    GPU_MEMORY_RATIO = "gpu_memory_ratio", RATIO
    ASLEEP_LOAD = "asleep_load", "requests"
    """Requests that wait at sleeping servers: demand, not capacity."""

    unit: str

    def __new__(cls, name: str, unit: str = "") -> Self:
        """A member by its value alone has the unit that it was declared with."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.unit = unit
        return member

    @property
    def is_ratio(self) -> bool:
        """Whether it is a sum over a weight, not a sum over replicas."""
        return self.unit == RATIO


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
RATIO_SIGNALS = frozenset(signal for signal in Signal if signal.is_ratio)
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


class Shown(NamedTuple):
    """What a field of `RoleSignals` or `FrontDoor` is called in a decision record, and in sentences; its unit."""

    name: str
    title: str
    unit: str


def _called(name: str, title: str = "") -> dict[str, str]:
    return {"name": name, "title": title}


@dataclass(frozen=True, slots=True)
class RoleSignals:
    """One role's newest window. Rates are sums over the role's routable replicas; latencies in seconds.

    A field is the signal of its name, or the 95th percentile of the latency of its name.
    """

    role: Role
    window_end_s: float | None = None
    prefill_tps: Measurement = NEVER_READ
    decode_tps: Measurement = NEVER_READ
    request_rps: Measurement = NEVER_READ
    running: Measurement = NEVER_READ
    waiting: Measurement = NEVER_READ
    kv_usage_ratio: Measurement = field(default=NEVER_READ, metadata=_called("kv_usage", "KV usage"))
    ttft_p95_s: Measurement = field(default=NEVER_READ, metadata=_called("ttft_p95", "TTFT p95"))
    tpot_p95_s: Measurement = field(default=NEVER_READ, metadata=_called("tpot_p95", "TPOT p95"))
    tbt_p95_s: Measurement = field(default=NEVER_READ, metadata=_called("tbt_p95", "TBT p95"))
    e2e_p95_s: Measurement = field(default=NEVER_READ, metadata=_called("e2e_p95", "E2E p95"))
    preemption_rps: Measurement = field(default=NEVER_READ, metadata=_called("preemptions"))
    prefix_hit_ratio: Measurement = NEVER_READ


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What the gateways of a service report: what they hold, and what arrives (per second). A field is a signal."""

    window_end_s: float | None = None
    held: Measurement = NEVER_READ
    arrival_rps: Measurement = NEVER_READ
    arrival_prompt_tps: Measurement = NEVER_READ
    arrival_output_tps: Measurement = NEVER_READ


P95 = "_p95_s"
"""How the fields of 95th percentiles end."""


def _shown_fields(view: type[RoleSignals | FrontDoor]) -> dict[str, Shown]:
    found: dict[str, Shown] = {}
    for item in fields(view):
        if item.name not in ("role", "window_end_s"):
            unit = "s" if item.name.endswith(P95) else Signal(item.name).unit
            name = item.metadata.get("name") or item.name
            found[item.name] = Shown(name, item.metadata.get("title") or name.replace("_", " "), unit)
    return found


ROLE_FIELDS: Mapping[str, Shown] = MappingProxyType(_shown_fields(RoleSignals))
FRONT_DOOR_FIELDS: Mapping[str, Shown] = MappingProxyType(_shown_fields(FrontDoor))
"""The measurements of `RoleSignals` and of `FrontDoor`, by field."""
