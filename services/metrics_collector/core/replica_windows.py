"""Each replica's values in a window, as columns over all requested replicas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics_collector.core.counting import FIRST_COUNTER, Bools, Floats, Ints
from metrics_collector.core.rings import AVERAGED, FLOWED, PEAK, HistogramRings, ServerRings
from metrics_collector.core.schema import COUNTERS, GAUGE_COLUMN, SCALARS, Schema
from metrics_collector.core.window import Ends, Window, ends, peaks, time_averages
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.signals import AVERAGES, RATES, Counter, Gauge, Signal

SIGNAL_COLUMN: Mapping[Signal, int] = {name: column for column, name in enumerate(Signal)}
"""The columns of ``ReplicaWindows.values``: every signal, in the order of the wire's numbers."""
_RATE_SIGNALS = [SIGNAL_COLUMN[name] for name in RATES]
# The index of each in a ring. Computed prompt tokens count when they flow, not when the page counts them.
_RATE_COLUMNS = [FLOWED if counter is Counter.PREFILL_TOKENS else COUNTERS.index(counter) for counter in RATES.values()]
_AVERAGE_SIGNALS = [SIGNAL_COLUMN[name] for name in AVERAGES]
_AWAKE = GAUGE_COLUMN[Gauge.AWAKE]


class HistogramIncreases(NamedTuple):
    """Cumulative buckets and sums of some replicas, all of ``schema``: columns as in the schema behind its scalars.

    ``positions`` (n,) ascend and index the replicas; ``increases`` (n, columns) are NaN where a latency has none.
    """

    schema: Schema
    positions: Ints
    increases: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWindows:
    """Columns, one entry per replica. Unknown values are NaN; where no page was read inside, all are.

    ``values`` (n, len(Signal)); ``increases`` (n, len(COUNTERS) + 1) are counts between a replica's two rows, the last
    of them the prompt tokens that flowed. Signals that no page has are absent, and so are all those of a sleeping one.
    ``read``: a page was read inside. ``warming``: seen for less than the window. ``reset``: a counter fell inside it.

    Of the newest page, whenever it was read: its time, its running and waiting, and for how long nothing has moved.
    """

    window: Window
    values: Floats
    kv_usage_max_ratio: Floats
    increases: Floats
    histograms: tuple[HistogramIncreases, ...]
    read: Bools
    asleep: Bools
    warming: Bools
    reset: Bools
    at_s: Floats
    running_now: Floats
    waiting_now: Floats
    still_s: Floats

    def qualities(self, stuck: Bools) -> NDArray[np.uint8]:
        """The quality (``types_pb2.Quality``) of each replica's values; those absent are MISSING whatever it is."""
        found = np.full(len(self.read), types_pb2.QUALITY_OK, dtype=np.uint8)
        found[self.warming] = types_pb2.QUALITY_WARMING
        found[self.reset] = types_pb2.QUALITY_RESET
        found[stuck] = types_pb2.QUALITY_STALE
        found[~self.read | self.asleep] = types_pb2.QUALITY_MISSING
        return found


def windows_of(
    servers: ServerRings, groups: Mapping[int, HistogramRings], places: Ints, window: Window
) -> ReplicaWindows:
    """The windows of the servers in ``places``; -1 for one that is not known."""
    known = places >= 0
    order = (servers.head[places, None] + 1 + np.arange(servers.at_s.shape[1])) % servers.at_s.shape[1]
    at_s = np.where(known[:, None], servers.at_s[places[:, None], order], np.nan)
    inside = (at_s > window.start_s) & (at_s <= window.end_s)
    read: Bools = np.logical_or.reduce(inside, axis=1)
    asleep = read & (servers.levels[places, _AWAKE] == 0)
    told = read & ~asleep
    rows = ends(at_s, ~np.isnan(at_s), window)
    increases, span_s = _increases(servers, places, order, at_s, rows, window)
    increases[~told] = np.nan
    values = np.full((len(places), len(Signal)), np.nan)
    values[:, _RATE_SIGNALS] = increases[:, _RATE_COLUMNS] / span_s[:, _RATE_COLUMNS]
    gauges = servers.gauges[places[:, None], order]
    gauges[~told] = np.nan
    values[:, _AVERAGE_SIGNALS] = time_averages(at_s, gauges[:, :, : len(AVERAGED)], window)
    hits = increases[:, COUNTERS.index(Counter.PREFIX_HITS)]
    queries = increases[:, COUNTERS.index(Counter.PREFIX_QUERIES)]
    asked = queries > 0
    values[asked, SIGNAL_COLUMN[Signal.PREFIX_HIT_RATIO]] = np.minimum(hits[asked] / queries[asked], 1.0)
    newest_s = np.where(known, servers.last_s[places], np.nan)
    return ReplicaWindows(
        window=window,
        values=values,
        kv_usage_max_ratio=peaks(at_s, gauges[:, :, PEAK], window),
        increases=increases,
        histograms=tuple(_histograms(servers, groups, places, told, order, at_s, rows, window)),
        read=read,
        asleep=asleep,
        warming=read & (window.end_s - servers.since_s[places] < window.length_s),
        reset=(inside & servers.reset[places[:, None], order]).any(axis=1),
        at_s=newest_s,
        running_now=np.where(known, servers.levels[places, GAUGE_COLUMN[Gauge.RUNNING]], np.nan),
        waiting_now=np.where(known, servers.levels[places, GAUGE_COLUMN[Gauge.WAITING]], np.nan),
        still_s=newest_s - servers.moved_s[places],
    )


def _increases(
    servers: ServerRings, places: Ints, order: Ints, at_s: Floats, rows: Ends, window: Window
) -> tuple[Floats, Floats]:
    """(increases, seconds between the two rows), (n, counters + 1) each; NaN where a counter has no two rows."""
    each = np.arange(len(places))
    last, first = order[each, rows.last], order[each, rows.first]
    newest = servers.counted[places, last]
    increases = newest - servers.counted[places, first]
    increases[~rows.valid] = np.nan
    span_s = np.repeat((at_s[each, rows.last] - at_s[each, rows.first])[:, None], increases.shape[1], axis=1)
    span_s[~rows.valid] = np.nan
    # A counter that one of the two rows lacks has rows of its own.
    seen = ~np.isnan(servers.levels[places, FIRST_COUNTER:SCALARS])
    lacking = np.isnan(increases[:, :FLOWED]) & seen & rows.valid[:, None]
    if lacking.any():
        some = np.flatnonzero(lacking.any(axis=1))
        _increases_by_column(servers, places[some], order[some], at_s[some], window, (some, increases, span_s))
    return increases, span_s


def _increases_by_column(
    servers: ServerRings,
    places: Ints,
    order: Ints,
    at_s: Floats,
    window: Window,
    into: tuple[Ints, Floats, Floats],
) -> None:
    """Each counter between the rows that have it, written into (positions, increases, seconds)."""
    positions, increases, span_s = into
    counted = servers.counted[places[:, None], order]
    each = np.arange(len(places))
    for column in range(counted.shape[2]):
        own = counted[:, :, column]
        rows = ends(at_s, ~np.isnan(own), window)
        increases[positions, column] = np.where(rows.valid, own[each, rows.last] - own[each, rows.first], np.nan)
        span_s[positions, column] = np.where(rows.valid, at_s[each, rows.last] - at_s[each, rows.first], np.nan)


def _histograms(
    servers: ServerRings,
    groups: Mapping[int, HistogramRings],
    places: Ints,
    told: Bools,
    order: Ints,
    at_s: Floats,
    rows: Ends,
    window: Window,
) -> list[HistogramIncreases]:
    found: list[HistogramIncreases] = []
    numbers = np.where(told & rows.valid, servers.group[places], -1)
    for number in np.unique(numbers[numbers >= 0]).tolist():
        group = groups[number]
        positions = np.flatnonzero(numbers == number)
        at_group = servers.histogram[places[positions]]
        own_order = order[positions]
        each = np.arange(len(positions))
        last, first = own_order[each, rows.last[positions]], own_order[each, rows.first[positions]]
        increases = group.counted[at_group, last] - group.counted[at_group, first]
        seen = ~np.isnan(group.levels[at_group])
        lacking = (np.isnan(increases) & seen).any(axis=1)
        if lacking.any():
            some = np.flatnonzero(lacking)
            counted = group.counted[at_group[some][:, None], own_order[some]]
            increases[some] = _by_latency(group.schema, counted, at_s[positions[some]], window)
        found.append(HistogramIncreases(group.schema, positions, increases))
    # Numbers follow the order in which schemas were first seen; results do not depend on it.
    return sorted(found, key=lambda item: item.schema.fingerprint)


def _by_latency(schema: Schema, counted: Floats, at_s: Floats, window: Window) -> Floats:
    """Increases where latencies have rows of their own: ``counted`` is (n, rows, columns) in the order of time."""
    increases = np.full((len(counted), counted.shape[2]), np.nan)
    each = np.arange(len(counted))
    for columns in schema.histograms.values():
        own = slice(columns.first - SCALARS, columns.sum + 1 - SCALARS)
        rows = ends(at_s, ~np.isnan(counted[:, :, columns.last - SCALARS]), window)
        increase = counted[each, rows.last, own] - counted[each, rows.first, own]
        increases[:, own] = np.where(rows.valid[:, None], increase, np.nan)
    return increases
