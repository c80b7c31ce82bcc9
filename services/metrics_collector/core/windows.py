"""One replica's window: rates from counters, time averages from gauges, bucket increases from histograms.

A rate is what was counted between two points divided by the time between them. The first point is the newest one at
or before the window's start, so that scrapes need not fall on its edges; after failed scrapes it lies further back, and
the rate is the average since then.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from metrics_collector.core.dialect import Quantity
from metrics_collector.core.sample import Histogram
from metrics_collector.core.series import Counter, Point, Series
from trimtab.api.collector.v1 import collector_pb2 as pb

RATES: tuple[tuple["pb.Signal.ValueType", Counter], ...] = (
    (pb.SIGNAL_PREFILL_TPS, Counter.PREFILL_TOKENS),
    (pb.SIGNAL_PREFILL_CACHED_TPS, Counter.PREFILL_CACHED_TOKENS),
    (pb.SIGNAL_DECODE_TPS, Counter.DECODE_TOKENS),
    (pb.SIGNAL_REQUEST_RPS, Counter.FINISHED),
    (pb.SIGNAL_PREEMPTION_RPS, Counter.PREEMPTIONS),
)
"""Signals that are a counter's increase per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Half-open: (start_s, end_s], on the store's clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


def next_round(last: int, now_s: float, *, interval_s: float) -> int:
    """The round to close next, where round n ends at n intervals; ``last`` was closed last, 0 for none.

    Normally the one after it. A round that took longer than an interval skips to the one that has just ended, and a
    clock that was set back is followed, not waited for.
    """
    ended = int(now_s // interval_s)
    return min(max(last + 1, ended), ended + 1) if last else ended + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWindow:
    """What one replica did in a window. What could not be told is absent.

    ``increases`` are counts over ``covered_s`` of the same counter; ``rates`` their quotients per second. ``warming``
    says that the replica has been seen for less than the window, ``reset`` that a counter fell inside it.
    """

    rates: Mapping[Counter, float] = field(default_factory=dict)
    increases: Mapping[Counter, float] = field(default_factory=dict)
    running: float | None = None
    waiting: float | None = None
    kv_usage_ratio: float | None = None
    kv_usage_max_ratio: float | None = None
    histograms: Mapping[Quantity, Histogram] = field(default_factory=dict)
    reset: bool = False
    warming: bool = False
    asleep: bool = False

    def values(self) -> "tuple[tuple[pb.Signal.ValueType, float | None], ...]":
        """Each signal of one replica and its value; None where it could not be told."""
        if self.asleep:
            return ()
        hits, queries = self.increases.get(Counter.PREFIX_HITS), self.increases.get(Counter.PREFIX_QUERIES)
        return (
            *((signal, self.rates.get(counter)) for signal, counter in RATES),
            (pb.SIGNAL_RUNNING, self.running),
            (pb.SIGNAL_WAITING, self.waiting),
            (pb.SIGNAL_KV_USAGE_RATIO, self.kv_usage_ratio),
            (pb.SIGNAL_PREFIX_HIT_RATIO, hits / queries if hits is not None and queries else None),
        )


def replica_window(series: Series, window: Window) -> ReplicaWindow | None:
    """The replica's window; None when no page was read inside it."""
    points = [point for point in series.points if point.at_s <= window.end_s]
    inside = [point for point in points if point.at_s > window.start_s]
    if not inside:
        return None
    if inside[-1].sample.awake is False:
        return ReplicaWindow(asleep=True)
    rates: dict[Counter, float] = {}
    increases: dict[Counter, float] = {}
    for counter in Counter:
        ends = _ends([point for point in points if counter in point.totals], window)
        if ends is not None:
            first, last = ends
            increases[counter] = last.totals[counter] - first.totals[counter]
            rates[counter] = increases[counter] / (last.at_s - first.at_s)
    peaks = [point.sample.kv_usage_max_ratio for point in inside if point.sample.kv_usage_max_ratio is not None]
    return ReplicaWindow(
        rates=rates,
        increases=increases,
        running=_time_average(inside, Quantity.RUNNING),
        waiting=_time_average(inside, Quantity.WAITING),
        kv_usage_ratio=_time_average(inside, Quantity.KV_USAGE),
        kv_usage_max_ratio=max(peaks) if peaks else None,
        histograms=_histograms(points, window),
        reset=any(point.reset for point in inside),
        warming=window.end_s - series.since_s < window.length_s,
    )


def _ends(points: Sequence[Point], window: Window) -> tuple[Point, Point] | None:
    """(first, last) point of an increase; None when there are not two, or none inside the window."""
    if len(points) < 2 or points[-1].at_s <= window.start_s:
        return None
    first = points[0]
    for point in points:
        if point.at_s <= window.start_s:
            first = point
    return (first, points[-1]) if first.at_s < points[-1].at_s else None


def _time_average(points: Sequence[Point], quantity: Quantity) -> float | None:
    """The gauge's average over time, by trapezoids between its readings; a single reading stands for itself."""
    readings = [(point.at_s, point.sample.gauges[quantity]) for point in points if quantity in point.sample.gauges]
    if not readings:
        return None
    first_s, first_value = readings[0]
    span_s = readings[-1][0] - first_s
    if span_s <= 0:
        return first_value
    area = 0.0
    for (before_s, before), (now_s, now) in pairwise(readings):
        area += (now_s - before_s) * (before + now) / 2
    return area / span_s


def _histograms(points: Sequence[Point], window: Window) -> dict[Quantity, Histogram]:
    found: dict[Quantity, Histogram] = {}
    for quantity in sorted({quantity for point in points for quantity in point.histograms}):
        ends = _ends([point for point in points if quantity in point.histograms], window)
        if ends is not None:
            found[quantity] = _increase(ends[0].histograms[quantity], ends[1].histograms[quantity])
    return found


def _increase(first: Histogram, last: Histogram) -> Histogram:
    """What came since ``first``. With other bounds the series began anew in between, so ``last`` is the increase."""
    if first.bounds_s != last.bounds_s:
        return last
    return Histogram(
        bounds_s=last.bounds_s,
        cumulative=tuple(now - then for now, then in zip(last.cumulative, first.cumulative, strict=True)),
        sum_s=max(0.0, last.sum_s - first.sum_s),
    )


def merge_histograms(histograms: Sequence[Histogram]) -> Histogram | None:
    """The sum of several histograms, on the bounds that all of them have; None for none.

    On common bounds cumulative counts add exactly, so a fleet half-way through an upgrade loses resolution, not counts.
    """
    if not histograms:
        return None
    common = set(histograms[0].bounds_s)
    for bounds_s in {histogram.bounds_s for histogram in histograms}:
        common &= set(bounds_s)
    rows = [
        histogram.cumulative
        if len(histogram.bounds_s) == len(common)
        else [count for bound, count in zip(histogram.bounds_s, histogram.cumulative, strict=True) if bound in common]
        for histogram in histograms
    ]
    return Histogram(
        bounds_s=tuple(sorted(common)),
        cumulative=tuple(map(math.fsum, zip(*rows, strict=True))),
        sum_s=math.fsum(histogram.sum_s for histogram in histograms),
    )
