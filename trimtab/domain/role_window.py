"""What one collector adds to the window of one role, or of one service's front door: sums, never averages.

So merging what several collectors wrote is adding (`trimtab.domain.role_merge`), and quantiles are taken last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.histogram import Histogram
from trimtab.domain.signals import LATENCIES, LATENCY_NUMBERS, SIGNAL_NUMBERS, SIGNALS, Latency, Signal
from trimtab.domain.time import microseconds_of, timestamp_of_microseconds
from trimtab.domain.vocabulary import Role


class SignalSums(NamedTuple):
    """The sum of a role's replicas for one signal.

    A tuple, not a dataclass: a collector makes thousands of them a second. `reported` replicas are in `sum`; `reset`
    and `warming` say how many of those were so, and `warming` also counts those too new for a rate. `stale` ones are
    left out. A ratio is `sum` over `weight`. `maximum` is the largest value of one replica, where that is reported.
    """

    signal: Signal
    sum: float
    reported: int
    maximum: float | None = None
    weight: float = 0.0
    stale: int = 0
    reset: int = 0
    warming: int = 0


class LatencySums(NamedTuple):
    """What a role's replicas add to one latency, in seconds; None where what was written is no histogram."""

    latency: Latency
    histogram: Histogram | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWindow:
    """One collector's window of one role. `role` is None for a service's front door, where gateways are the replicas.

    The window is (start, end] in microseconds since 1970 on the store's clock. `replica_revisions` are by cluster, the
    revisions of the actuators' replicas that it rests on.
    """

    collector: str
    service: str
    role: Role | None
    start_us: int
    end_us: int
    reported_replicas: Sequence[str] = ()
    missing_replicas: Sequence[str] = ()
    replica_revisions: Mapping[str, int] = field(default_factory=dict)
    signals: Sequence[SignalSums] = ()
    latencies: Sequence[LatencySums] = ()


_ROLES: dict[int, Role | None] = {types_pb2.ROLE_UNSPECIFIED: None, **Role.by_number()}


def role_number(role: Role | None) -> types_pb2.Role.ValueType:
    """The number on the wire of a role, and of the front door for None."""
    return types_pb2.ROLE_UNSPECIFIED if role is None else types_pb2.Role.ValueType(role.number)


# The windows of a round share their ends; a message copies what it is given.
_stamp = lru_cache(maxsize=64)(timestamp_of_microseconds)


def role_window_to_proto(window: RoleWindow) -> pb.RolePartial:
    """The message of a window."""
    return pb.RolePartial(
        collector=window.collector,
        service=window.service,
        role=role_number(window.role),
        window_start=_stamp(window.start_us),
        window_end=_stamp(window.end_us),
        replica_revisions=window.replica_revisions,
        reported_replicas=window.reported_replicas,
        missing_replicas=window.missing_replicas,
        signals=[
            pb.SignalPartial(
                signal=SIGNAL_NUMBERS[signal],
                sum=total,
                maximum=maximum,
                reported=reported,
                stale=stale,
                reset=reset,
                warming=warming,
                weight=weight,
            )
            for signal, total, reported, maximum, weight, stale, reset, warming in window.signals
        ],
        latencies=[
            _latency_to_proto(item.latency, item.histogram) for item in window.latencies if item.histogram is not None
        ],
    )


def role_window_from_proto(message: pb.RolePartial) -> RoleWindow:
    """The window in a message. Raises ValueError for a role that this release does not know.

    Signals and latencies that it does not know are left out.
    """
    if message.role not in _ROLES:
        raise ValueError(f"role {message.role} of service {message.service!r} is not known to this release")
    return RoleWindow(
        collector=message.collector,
        service=message.service,
        role=_ROLES[message.role],
        start_us=microseconds_of(message.window_start),
        end_us=microseconds_of(message.window_end),
        reported_replicas=tuple(message.reported_replicas),
        missing_replicas=tuple(message.missing_replicas),
        replica_revisions=dict(message.replica_revisions),
        signals=[
            SignalSums(
                SIGNALS[item.signal],
                item.sum,
                item.reported,
                item.maximum if item.HasField("maximum") else None,
                item.weight,
                item.stale,
                item.reset,
                item.warming,
            )
            for item in message.signals
            if item.signal in SIGNALS
        ],
        latencies=[
            LatencySums(LATENCIES[item.latency], _histogram_from_proto(item))
            for item in message.latencies
            if item.latency in LATENCIES
        ],
    )


def _latency_to_proto(latency: Latency, histogram: Histogram) -> pb.LatencyPartial:
    cumulative = histogram.cumulative
    return pb.LatencyPartial(
        latency=LATENCY_NUMBERS[latency],
        upper_bounds_s=histogram.upper_bounds,
        increases=list(map(sub, cumulative, (0.0, *cumulative[:-1]))),
        sum_s=histogram.total,
        count=histogram.count,
    )


def _histogram_from_proto(item: pb.LatencyPartial) -> Histogram | None:
    """None unless bounds ascend up to +Inf, with one increase each, and increases and sum are finite, not negative."""
    bounds, increases, total = tuple(item.upper_bounds_s), tuple(item.increases), item.sum_s
    if (
        len(bounds) != len(increases)
        or not bounds
        or bounds[-1] != math.inf
        or not 0 <= total < math.inf
        or not all(0 <= increase < math.inf for increase in increases)
        or not all(lower < upper for lower, upper in pairwise(bounds))
    ):
        return None
    return Histogram(upper_bounds=bounds, cumulative=list(accumulate(increases)), total=total)
