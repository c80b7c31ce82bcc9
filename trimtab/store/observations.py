"""One pure merge of what several collectors wrote about one role's window.

Collectors write sums, never averages, so that merging is adding; quantiles are taken last, from merged buckets. The
policy engine and the collector's API call the same function, and see the same numbers.

m of "n of m" is the number of replicas the caller expects (the routable ones of the actuators), or, without that, the
number the collectors counted. The quality of a value, the first that applies:

    no replica in the sum     STALE when one stands still, WARMING when one is too new, else MISSING; no value
    a counter fell            RESET: what was counted since is included, so the value may be too small
    n < m                     PARTIAL n of m
    a replica is new          WARMING
    else                      OK

NaN, infinities and negatives are refused: such a signal of such a partial counts as not reported.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from google.protobuf.timestamp_pb2 import Timestamp

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2

__all__ = ["age_s", "histogram_quantile", "merge", "signal", "window_end_s"]

RATIO_SIGNALS = frozenset({pb.SIGNAL_KV_USAGE_RATIO, pb.SIGNAL_PREFIX_HIT_RATIO})
"""Signals whose value is ``sum / weight``."""

FORGET_S = 60.0
"""A collector that has been silent for so much longer than the others is gone, and its replicas with it."""


def merge(partials: Sequence[pb.RolePartial], *, expected: Collection[str] | None = None) -> pb.RoleObservation:
    """The observation that ``partials`` (at least one, all of one service and role) amount to.

    The newest partial of each collector counts. One whose window ended before the newest window began is too old, and
    its replicas are missing (after ``FORGET_S``, forgotten). Where two collectors report the same replica, only the
    newer partial counts (at a tie the one with more replicas, then by name): sums cannot be taken apart, and counting
    twice is worse than "partial".
    Raises ``ValueError`` for no partial and for partials of different roles.
    """
    if not partials:
        raise ValueError("no partial to merge: a role that nobody observed has no observation")
    if len({(partial.service, partial.role) for partial in partials}) > 1:
        raise ValueError("partials of different services or roles cannot be merged")
    chosen, dropped = _choose(partials)
    reported = sorted({name for partial in chosen for name in partial.reported_replicas})
    counted = set(reported).union(*(set(partial.missing_replicas) for partial in chosen))
    counted.update(name for partial in dropped for name in (*partial.reported_replicas, *partial.missing_replicas))
    wanted = counted if expected is None else set(expected)
    coverage = _Coverage(expected=len(wanted), strangers=len(set(reported) - wanted))
    observation = pb.RoleObservation(
        service=chosen[0].service,
        role=chosen[0].role,
        replica_revisions=_oldest_revisions(chosen),
        reported_replicas=[name for name in reported if name in wanted],
        missing_replicas=sorted(wanted - set(reported)),
    )
    observation.window_start.FromMicroseconds(min(_microseconds(partial.window_start) for partial in chosen))
    observation.window_end.FromMicroseconds(max(_microseconds(partial.window_end) for partial in chosen))
    for name in sorted({item.signal for partial in chosen for item in partial.signals}):
        items = [item for partial in chosen for item in partial.signals if item.signal == name]
        observation.signals.append(_merge_signal(name, items, coverage))
    resets = max((item.reset for partial in chosen for item in partial.signals), default=0)
    for latency in sorted({item.latency for partial in chosen for item in partial.latencies}):
        histograms = [item for partial in chosen for item in partial.latencies if item.latency == latency]
        observation.latencies.append(_merge_latency(latency, histograms, coverage, len(reported), resets))
    return observation


def signal(observation: pb.RoleObservation, wanted: "pb.Signal.ValueType") -> types_pb2.Measurement:
    """One signal's measurement; MISSING when the observation does not hold it."""
    for item in observation.signals:
        if item.signal == wanted:
            return item.measurement
    return types_pb2.Measurement(quality=types_pb2.QUALITY_MISSING, detail="not observed")


def window_end_s(observation: pb.RoleObservation) -> float:
    """End of the window: Unix seconds on the store's clock."""
    return _microseconds(observation.window_end) / 1e6


def age_s(observation: pb.RoleObservation, now_s: float) -> float:
    """Seconds since the window ended; never negative."""
    return max(0.0, now_s - window_end_s(observation))


def histogram_quantile(
    quantile: float, upper_bounds: Sequence[float], cumulative: Sequence[float]
) -> tuple[float, bool] | None:
    """Prometheus's ``histogram_quantile``: linear inside the bucket that holds the rank, the lowest starting at 0.

    ``upper_bounds`` ascend and end with +Inf; ``cumulative`` never falls. Gives the value and whether the rank lies in
    the +Inf bucket, where the value is the largest finite bound and the truth may be any larger one. None without a
    count, or without a finite bound.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile:g}, must be from 0 to 1")
    if len(upper_bounds) < 2 or len(upper_bounds) != len(cumulative) or cumulative[-1] <= 0:
        return None
    last = len(upper_bounds) - 1
    rank = quantile * cumulative[-1]
    index = next((i for i in range(last) if cumulative[i] >= rank), last)
    if index == last:
        return upper_bounds[last - 1], True
    end = upper_bounds[index]
    if index == 0 and end <= 0:
        return end, False
    start = upper_bounds[index - 1] if index else 0.0
    below = cumulative[index - 1] if index else 0.0
    inside = cumulative[index] - below
    return (start + (end - start) * (rank - below) / inside if inside > 0 else end), False


@dataclass(frozen=True, kw_only=True)
class _Coverage:
    """m, and how many of the reporting replicas are not among the expected ones."""

    expected: int
    strangers: int

    def reported(self, contributors: int) -> int:
        """n: contributors that are expected. Which ones a sum holds is not known, so strangers count against it."""
        return min(max(0, contributors - self.strangers), self.expected)


def _choose(partials: Sequence[pb.RolePartial]) -> tuple[list[pb.RolePartial], list[pb.RolePartial]]:
    """(those that count, newest first; those that are too old)."""
    newest: dict[str, pb.RolePartial] = {}
    for partial in partials:
        known = newest.get(partial.collector)
        if known is None or _microseconds(partial.window_end) > _microseconds(known.window_end):
            newest[partial.collector] = partial
    ordered = sorted(
        newest.values(),
        key=lambda partial: (-_microseconds(partial.window_end), -len(partial.reported_replicas), partial.collector),
    )
    begin = _microseconds(ordered[0].window_start)
    chosen: list[pb.RolePartial] = []
    dropped: list[pb.RolePartial] = []
    covered: set[str] = set()
    for partial in ordered:
        end = _microseconds(partial.window_end)
        if chosen and end <= begin - FORGET_S * 1e6:
            continue
        if chosen and end <= begin:
            dropped.append(partial)
        elif not covered.intersection(partial.reported_replicas):
            chosen.append(partial)
            covered.update(partial.reported_replicas)
        else:
            dropped.append(partial)
    return chosen, dropped


def _oldest_revisions(partials: Iterable[pb.RolePartial]) -> dict[str, int]:
    """By cluster, the oldest replica revision that any of the partials rests on."""
    oldest: dict[str, int] = {}
    for partial in partials:
        for cluster, revision in partial.replica_revisions.items():
            oldest[cluster] = min(revision, oldest.get(cluster, revision))
    return dict(sorted(oldest.items()))


@dataclass
class _Tally:
    """How many replicas a value rests on, and in what state."""

    reported: int = 0
    stale: int = 0
    reset: int = 0
    warming: int = 0
    refused: int = 0
    notes: list[str] = field(default_factory=list)


def _merge_signal(
    name: "pb.Signal.ValueType", items: Sequence[pb.SignalPartial], coverage: _Coverage
) -> pb.SignalValue:
    tally = _Tally()
    total, weight = 0.0, 0.0
    maximum: float | None = None
    for item in items:
        tally.stale += item.stale
        tally.warming += item.warming
        numbers = (item.sum, item.weight, item.maximum if item.HasField("maximum") else 0.0)
        if not all(_sane(number) for number in numbers):
            tally.refused += item.reported
            continue
        tally.reported += item.reported
        tally.reset += item.reset
        total += item.sum
        weight += item.weight
        if item.HasField("maximum"):
            maximum = item.maximum if maximum is None else max(maximum, item.maximum)
    value: float | None = total
    if name in RATIO_SIGNALS:
        value = total / weight if weight > 0 else None
        if value is None and tally.reported:
            tally.notes.append("nothing to take a share of in the window")
    measurement = _measurement(value, tally, coverage)
    return pb.SignalValue(
        signal=name, measurement=measurement, maximum=maximum if measurement.HasField("value") else None
    )


def _merge_latency(
    latency: "pb.Latency.ValueType",
    items: Sequence[pb.LatencyPartial],
    coverage: _Coverage,
    contributors: int,
    resets: int,
) -> pb.LatencyValue:
    good = [item for item in items if _sane_histogram(item)]
    tally = _Tally(reported=contributors if good else 0, reset=resets, refused=len(items) - len(good))
    bounds, cumulative = _add_histograms(good)
    count = cumulative[-1] if cumulative and _sane(cumulative[-1]) else 0.0
    if count == 0:
        bounds, cumulative = [], []
    merged = pb.LatencyValue(latency=latency, count=count)
    if count <= 0:
        tally.notes.append("nothing finished in the window")
    elif len(bounds) < 2:
        tally.notes.append("the collectors' buckets have no finite bound in common")
    for quantile, target in ((0.5, merged.p50_s), (0.95, merged.p95_s), (0.99, merged.p99_s)):
        found = histogram_quantile(quantile, bounds, cumulative)
        target.CopyFrom(_measurement(None if found is None else found[0], tally, coverage))
        if found is not None and found[1]:
            target.detail = "; ".join(filter(None, (target.detail, "above the largest finite bucket")))
    mean = sum(item.sum_s for item in good) / count if count > 0 else None
    merged.mean_s.CopyFrom(_measurement(mean, tally, coverage))
    return merged


def _add_histograms(items: Sequence[pb.LatencyPartial]) -> tuple[list[float], list[float]]:
    """(upper bounds, cumulative counts) on the bounds that all have in common, where cumulative counts add exactly."""
    if not items:
        return [], []
    common = set(items[0].upper_bounds_s).intersection(*(item.upper_bounds_s for item in items[1:]))
    bounds = sorted(common)
    totals = dict.fromkeys(bounds, 0.0)
    for item in items:
        running = 0.0
        for bound, increase in zip(item.upper_bounds_s, item.increases, strict=True):
            running += increase
            if bound in totals:
                totals[bound] += running
    return bounds, [totals[bound] for bound in bounds]


def _measurement(value: float | None, tally: _Tally, coverage: _Coverage) -> types_pb2.Measurement:
    """The value with its quality, by the table in this module's docstring."""
    n, m = coverage.reported(tally.reported), coverage.expected
    details = list(tally.notes)
    if value is not None and not _sane(value):
        # Sums of huge but finite numbers.
        value = None
        details.append("out of range")
    if n < m:
        details += [
            f"{count} {word}"
            for count, word in ((tally.stale, "stale"), (tally.warming, "warming"), (tally.refused, "refused"))
            if count
        ]
    if n == 0 or value is None:
        value = None
        if tally.stale and not tally.reported:
            quality = types_pb2.QUALITY_STALE
        elif tally.warming and not tally.reported:
            quality = types_pb2.QUALITY_WARMING
        else:
            quality = types_pb2.QUALITY_MISSING
        if m == 0:
            details.insert(0, "no replica is expected")
    elif tally.reset:
        quality = types_pb2.QUALITY_RESET
    elif n < m:
        quality = types_pb2.QUALITY_PARTIAL
    elif tally.warming:
        quality = types_pb2.QUALITY_WARMING
    else:
        quality = types_pb2.QUALITY_OK
    return types_pb2.Measurement(value=value, quality=quality, reported=n, expected=m, detail="; ".join(details))


def _sane(number: float) -> bool:
    return math.isfinite(number) and number >= 0


def _sane_histogram(item: pb.LatencyPartial) -> bool:
    """Ascending bounds up to +Inf, one finite increase each, finite sum."""
    bounds = list(item.upper_bounds_s)
    return (
        len(bounds) == len(item.increases) > 0
        and bounds[-1] == math.inf
        and all(lower < upper for lower, upper in pairwise(bounds))
        and all(_sane(increase) for increase in item.increases)
        and _sane(item.sum_s)
    )


def _microseconds(timestamp: Timestamp) -> int:
    return timestamp.ToMicroseconds()
