"""What one collector adds to one role's window: sums over its counted replicas, never averages.

A stuck replica has its page read and its values left out; a replica that sleeps is no capacity and is left out
altogether, unless an actuator counts it as routable: then the two disagree and it is missing. In ``SignalPartial``
``reported`` counts the replicas in ``sum``; ``reset`` and ``warming`` say how many of those were so, and ``warming``
also counts those too new for a rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metrics_collector.core.dialect import Quantity
from metrics_collector.core.series import Counter
from metrics_collector.core.targets import RoleKey as RoleKey
from metrics_collector.core.windows import RATES, ReplicaWindow, Window, merge_histograms
from trimtab.api.collector.v1 import collector_pb2 as pb

LATENCIES: Mapping[Quantity, "pb.Latency.ValueType"] = {
    Quantity.TTFT: pb.LATENCY_TTFT,
    Quantity.TBT: pb.LATENCY_TBT,
    Quantity.TPOT: pb.LATENCY_TPOT,
    Quantity.QUEUE: pb.LATENCY_QUEUE,
    Quantity.E2E: pb.LATENCY_E2E,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedReplica:
    """A replica that counts, and its window: None when no page of it was read inside."""

    replica: str
    window: ReplicaWindow | None
    stuck: bool = False
    routable_by_actuator: bool = False


def role_partial(
    key: RoleKey,
    replicas: Sequence[CountedReplica],
    window: Window,
    *,
    collector: str,
    replica_revisions: Mapping[str, int],
) -> pb.RolePartial:
    """The partial of one role. ``replica_revisions`` is by cluster, as the actuators' last words had it."""
    reported: list[CountedReplica] = []
    missing: list[str] = []
    for item in sorted(replicas, key=lambda item: item.replica):
        if item.window is None or (item.window.asleep and item.routable_by_actuator):
            missing.append(item.replica)
        elif not item.window.asleep:
            reported.append(item)
    partial = pb.RolePartial(
        collector=collector,
        service=key.service,
        role=key.role,
        reported_replicas=[item.replica for item in reported],
        missing_replicas=missing,
        replica_revisions=dict(sorted(replica_revisions.items())),
    )
    set_window(partial, window)
    stale = sum(item.stuck for item in reported)
    live = [item.window for item in reported if item.window is not None and not item.stuck]
    for signal, counter in RATES:
        _add_sum(partial, signal, live, stale, [replica.rates.get(counter) for replica in live])
    _add_sum(partial, pb.SIGNAL_RUNNING, live, stale, [replica.running for replica in live])
    _add_sum(partial, pb.SIGNAL_WAITING, live, stale, [replica.waiting for replica in live])
    _add_kv_usage(partial, live, stale)
    _add_hit_ratio(partial, live, stale)
    _add_latencies(partial, live)
    return partial


def set_window(partial: pb.RolePartial, window: Window) -> None:
    """Store-clock seconds → timestamps, to the microsecond."""
    for timestamp, seconds in ((partial.window_start, window.start_s), (partial.window_end, window.end_s)):
        timestamp.FromMicroseconds(round(seconds * 1e6))


def _add_sum(
    partial: pb.RolePartial,
    signal: "pb.Signal.ValueType",
    live: Sequence[ReplicaWindow],
    stale: int,
    values: Sequence[float | None],
) -> pb.SignalPartial:
    """Append the sum of ``values``, one per replica of ``live``; absent ones contribute to nothing."""
    present = [(replica, value) for replica, value in zip(live, values, strict=True) if value is not None]
    return partial.signals.add(
        signal=signal,
        sum=sum(value for _, value in present),
        maximum=max(value for _, value in present) if present else None,
        reported=len(present),
        stale=stale,
        reset=sum(replica.reset for replica, _ in present),
        warming=sum(replica.warming for replica in live),
    )


def _add_kv_usage(partial: pb.RolePartial, live: Sequence[ReplicaWindow], stale: int) -> None:
    added = _add_sum(partial, pb.SIGNAL_KV_USAGE_RATIO, live, stale, [replica.kv_usage_ratio for replica in live])
    added.weight = added.reported
    peaks = [replica.kv_usage_max_ratio for replica in live if replica.kv_usage_max_ratio is not None]
    if peaks:
        added.maximum = max(peaks)


def _add_hit_ratio(partial: pb.RolePartial, live: Sequence[ReplicaWindow], stale: int) -> None:
    """Hits over queries. Without a query in the window the weight is 0: there is no ratio, and none is made up."""
    pairs = [
        (replica.increases.get(Counter.PREFIX_HITS), replica.increases.get(Counter.PREFIX_QUERIES)) for replica in live
    ]
    added = _add_sum(
        partial,
        pb.SIGNAL_PREFIX_HIT_RATIO,
        live,
        stale,
        [hits if queries is not None else None for hits, queries in pairs],
    )
    added.ClearField("maximum")
    added.weight = sum(queries for hits, queries in pairs if hits is not None and queries is not None)


def _add_latencies(partial: pb.RolePartial, live: Sequence[ReplicaWindow]) -> None:
    for quantity, latency in LATENCIES.items():
        merged = merge_histograms([replica.histograms[quantity] for replica in live if quantity in replica.histograms])
        if merged is None:
            continue
        below = (0.0, *merged.cumulative[:-1])
        partial.latencies.add(
            latency=latency,
            upper_bounds_s=merged.bounds_s,
            # A count is never negative, whatever rounding did to a difference.
            increases=[max(0.0, upto - before) for upto, before in zip(merged.cumulative, below, strict=True)],
            sum_s=merged.sum_s,
            count=merged.count,
        )
