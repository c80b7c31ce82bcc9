"""The series of all targets of a collector, as numpy rows.

``put`` collects readings; ``advance`` works what was collected at once; ``close`` gives a window over any of the
targets. One series is one unbroken stretch of being awake (or asleep): a clock that went backwards, a gap of more than
``MAX_GAP_S`` and a wake from sleep start the stretch anew, since frozen gauges do not show load. Counters go on
over all of these, on the series' own scale, which never falls.

A ring keeps a bounded number of rows. Where the oldest row is still needed to cover ``keep_s``, a row that came sooner
after the one before it than fits gives its place to the next one; so any scrape interval fits, the newest row is always
there, and scrapes that are merely uneven lose none.

Targets are identified by their id, and nothing depends on the order in which they came.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from metrics_collector.core import counting, prefill
from metrics_collector.core.counting import COUNTER_COLUMNS, FIRST_COUNTER, Bools, Counted, Floats, Ints
from metrics_collector.core.replica_windows import ReplicaWindows, windows_of
from metrics_collector.core.rings import FLOWED, KEPT_GAUGES, PEAK, HistogramRings, ServerRings
from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, SCALARS, Reading, Schema
from metrics_collector.core.window import Window
from trimtab.domain.signals import Counter, Gauge, Latency

# After so long without a page, an average over the gap is no estimate of now.
MAX_GAP_S = 60.0
_AWAKE = GAUGE_COLUMN[Gauge.AWAKE]
_PREFILL = COUNTER_COLUMN[Counter.PREFILL_TOKENS] - FIRST_COUNTER
# The oldest row may go when the next one is so many windows old: a window may close a little after its end.
_COVERED_WINDOWS = 1.25
# Readings are processed at the latest when so many have been collected: few enough that scrapes do not wait for it.
_MOST_COLLECTED = 512
# Columns that a working engine with requests moves in every iteration. Prompt counters move at a prompt's first token
# only, the KV usage with every chunk of it. Waiting requests are left out: arrivals alone do not show that the engine
# works. The computed prompt tokens are left out here, because as a difference they may be below their maximum.
_ACTIVE_COLUMNS = np.array(
    [GAUGE_COLUMN[Gauge.RUNNING], GAUGE_COLUMN[Gauge.KV_USAGE_RATIO], GAUGE_COLUMN[Gauge.KV_USAGE_MAX_RATIO]]
    + [COUNTER_COLUMN[counter] for counter in Counter if counter is not Counter.PREFILL_TOKENS]
)


class LevelRows(NamedTuple):
    """The newest rows of some targets, all of ``schema``, as they stood on their pages; NaN where nothing is known.

    ``positions`` (n,) ascend and say which targets; ``levels`` (n, schema.width): the newest gauges, and of each
    counter the last reading; ``at_s`` (n,) when.
    """

    schema: Schema
    positions: Ints
    levels: Floats
    at_s: Floats


class _Collected(NamedTuple):
    place: int
    reading: Reading
    at_s: float


class SeriesTable:
    """``rows`` is the length of a ring: at least 4, and a few more than scrapes fit in a window."""

    def __init__(self, *, rows: int = 12, capacity: int = 64) -> None:
        if rows < 4:
            raise ValueError(f"rows is {rows}, must be at least 4: a window needs a row before it")
        self._rows = rows
        self._servers = ServerRings(capacity, rows)
        self._places: dict[str, int] = {}
        self._groups: dict[int, HistogramRings] = {}
        self._group_of: dict[Schema, int] = {}
        self._schemas_seen = 0
        self._collected: list[_Collected] = []

    def __contains__(self, target_id: str) -> bool:
        return target_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, target_id: str, *, keep_s: float) -> None:
        """A target begins; ``keep_s`` is the length of its window. For a known one ``keep_s`` is set anew."""
        spacing_s = keep_s / (self._rows - 2)
        if target_id in self._places:
            self._servers.spacing_s[self._places[target_id]] = spacing_s
        else:
            self._places[target_id] = self._servers.open(spacing_s=spacing_s)

    def remove(self, target_id: str) -> None:
        """A target leaves, with all that is known of it; a target that is not there is none's loss."""
        place = self._places.pop(target_id, None)
        if place is None:
            return
        # Its place may be another's soon: nothing of it may be left in what was collected.
        self.advance()
        self._leave_group(place)
        self._servers.give(place)

    def put(self, target_id: str, reading: Reading, *, at_s: float) -> None:
        """Collect one page of a known target, read at ``at_s`` on the store's clock."""
        self._collected.append(_Collected(self._places[target_id], reading, at_s))
        if len(self._collected) >= _MOST_COLLECTED:
            self.advance()

    def seed(self, target_id: str, schema: Schema, levels: Sequence[float] | Floats, *, at_s: float) -> None:
        """Begin a known target where another collector stopped, so that its next page brings what came since.

        ``levels`` is a row of that collector's ``LevelRows``. A target that has rows of its own keeps them.
        Raises ``ValueError`` where ``levels`` does not fit ``schema``.
        """
        row = np.asarray(levels, dtype=np.float64)
        if row.shape != (schema.width,):
            raise ValueError(f"the row has {row.size} numbers, its schema has {schema.width}")
        self.advance()
        place = self._places[target_id]
        if np.isnan(self._servers.last_s[place]):
            row = np.where(np.isfinite(row) & (row >= 0), row, np.nan)
            self._take_in(np.array([place]), schema, row[None, :], np.array([at_s]))

    def advance(self) -> None:
        """Work all collected readings; those of one target in the order in which they were put."""
        waiting, self._collected = self._collected, []
        while waiting:
            batches: dict[int, list[_Collected]] = {}
            later: list[_Collected] = []
            taken: set[int] = set()
            for item in waiting:
                if item.place in taken:
                    later.append(item)
                    continue
                taken.add(item.place)
                batches.setdefault(id(item.reading.schema), []).append(item)
            for batch in batches.values():
                places, readings, at_s = zip(*batch, strict=True)
                self._take_in(
                    np.array(places),
                    readings[0].schema,
                    np.array([reading.values for reading in readings], dtype=np.float64),
                    np.array(at_s, dtype=np.float64),
                )
            waiting = later

    def close(self, target_ids: Sequence[str], window: Window) -> ReplicaWindows:
        """What each of ``target_ids`` did in ``window``, in their order. Unknown ids have nothing."""
        self.advance()
        return windows_of(self._servers, self._groups, self._find(target_ids), window)

    def levels(self, target_ids: Sequence[str]) -> list[LevelRows]:
        """The newest rows of ``target_ids``, by schema; targets without a page are in none."""
        self.advance()
        servers = self._servers
        places = self._find(target_ids)
        numbers = np.where(places >= 0, servers.group[places], -1)
        found: list[LevelRows] = []
        for number in np.unique(numbers[numbers >= 0]).tolist():
            group = self._groups[number]
            positions = np.flatnonzero(numbers == number)
            own = places[positions]
            rows = np.concatenate((servers.levels[own], group.levels[servers.histogram[own]]), axis=1)
            found.append(LevelRows(group.schema, positions, rows, servers.last_s[own]))
        return found

    def total(self, target_id: str, counter: Counter) -> float | None:
        """What ``counter`` has counted since the series began; None where it was never seen."""
        self.advance()
        place = self._places[target_id]
        seen = not np.isnan(self._servers.levels[place, COUNTER_COLUMN[counter]])
        return float(self._servers.totals[place, COUNTER_COLUMN[counter] - FIRST_COUNTER]) if seen else None

    def _find(self, target_ids: Sequence[str]) -> Ints:
        """The place of each target, -1 for one that is not known."""
        return np.fromiter((self._places.get(name, -1) for name in target_ids), dtype=np.int64, count=len(target_ids))

    def _take_in(self, places: Ints, schema: Schema, now: Floats, at_s: Floats) -> None:
        """One page each of different targets, all of one schema. ``now`` is (n, schema.width)."""
        servers = self._servers
        group = self._enter_group(places, schema)
        at_group = servers.histogram[places]
        levels = servers.levels[places]
        last_s = servers.last_s[places]
        first = np.isnan(last_s)
        gap_s = at_s - last_s
        slept = levels[:, _AWAKE] == 0
        fresh = first | (gap_s <= 0) | (gap_s > MAX_GAP_S) | (slept != (now[:, _AWAKE] == 0))
        anew = counting.restarted(levels, now) & ~first
        scalars = counting.count_scalars(levels[:, COUNTER_COLUMNS], now[:, COUNTER_COLUMNS], anew)
        histograms = counting.count_histograms(group.levels[at_group], now[:, SCALARS:], anew, schema)
        moved = first | anew | self._moved(levels, now, group.levels[at_group])

        servers.totals[places] += scalars.increases
        group.totals[at_group] += histograms.increases
        group.levels[at_group] = histograms.levels
        kept = now[:, :SCALARS].copy()
        kept[:, COUNTER_COLUMNS] = scalars.levels
        start = GAUGE_COLUMN[Gauge.START_TIME_S]
        kept[:, start] = np.where(np.isnan(kept[:, start]), levels[:, start], kept[:, start])
        servers.levels[places] = kept
        servers.last_s[places] = at_s
        servers.since_s[places] = np.where(fresh, at_s, servers.since_s[places])
        servers.moved_s[places] = np.where(fresh | moved, at_s, servers.moved_s[places])
        self._spread(places, fresh, scalars, histograms, at_s=at_s, gap_s=gap_s, schema=schema)
        reset = (anew | scalars.fell | histograms.fell) & ~first
        self._write(places, group, now, at_s, fresh=fresh, reset=reset)

    @staticmethod
    def _moved(levels: Floats, now: Floats, histogram_levels: Floats) -> Bools:
        scalars = now[:, _ACTIVE_COLUMNS]
        changed = (scalars != levels[:, _ACTIVE_COLUMNS]) & ~np.isnan(scalars)
        prefill_column = COUNTER_COLUMN[Counter.PREFILL_TOKENS]
        grown = now[:, prefill_column] > levels[:, prefill_column]
        buckets = now[:, SCALARS:]
        return np.asarray(
            changed.any(axis=1) | grown | ((buckets != histogram_levels) & ~np.isnan(buckets)).any(axis=1)
        )

    def _spread(
        self,
        places: Ints,
        fresh: Bools,
        scalars: Counted,
        histograms: Counted,
        *,
        at_s: Floats,
        gap_s: Floats,
        schema: Schema,
    ) -> None:
        servers = self._servers
        gap_s = np.where(fresh, 0.0, gap_s)
        evidence = _evidence(scalars, histograms, schema)
        known = prefill.remember(servers.evidence[places], evidence, gap_s)
        increase = np.where(fresh, 0.0, scalars.increases[:, _PREFILL])
        still_s = at_s - np.where(fresh, at_s, servers.prefilled_s[places])
        flow = prefill.Flow(
            np.where(fresh, 0.0, servers.flow_left[places]), servers.flow_rate[places], servers.flow_total[places]
        )
        work_s = prefill.work_time_s(known, evidence, gap_s=gap_s, still_s=still_s)
        flow = prefill.flow_on(flow, increase, gap_s=gap_s, work_s=work_s)
        servers.evidence[places] = known
        servers.prefilled_s[places] = np.where(fresh | (increase > 0), at_s, servers.prefilled_s[places])
        servers.flow_left[places], servers.flow_rate[places], servers.flow_total[places] = flow

    def _write(
        self, places: Ints, group: HistogramRings, now: Floats, at_s: Floats, *, fresh: Bools, reset: Bools
    ) -> None:
        servers = self._servers
        if fresh.any():
            servers.at_s[places[fresh]] = np.nan
        head = servers.head[places]
        before_s = servers.at_s[places, head - 1]
        spacing_s = servers.spacing_s[places]
        needed_s = _COVERED_WINDOWS * spacing_s * (self._rows - 2)
        oldest_s = servers.at_s[places, (head + 1) % self._rows]
        left_s = servers.at_s[places, (head + 2) % self._rows]
        full = ~np.isnan(oldest_s) & ~(at_s - left_s >= needed_s)
        # The head gives way where it stands closer to the row before it than fits.
        crowded = full & (servers.at_s[places, head] - before_s < spacing_s)
        head = np.where(crowded, head, (head + 1) % self._rows)
        gauges = now[:, KEPT_GAUGES]
        if crowded.any():
            reset = reset | (crowded & servers.reset[places, head])
            gauges[:, PEAK] = np.where(
                crowded, np.fmax(gauges[:, PEAK], servers.gauges[places, head, PEAK]), gauges[:, PEAK]
            )
        servers.head[places] = head
        servers.at_s[places, head] = at_s
        servers.gauges[places, head] = gauges
        servers.reset[places, head] = reset
        counted = np.empty((len(places), FLOWED + 1))
        counted[:, :FLOWED] = np.where(np.isnan(now[:, COUNTER_COLUMNS]), np.nan, servers.totals[places])
        counted[:, FLOWED] = np.where(np.isnan(counted[:, _PREFILL]), np.nan, servers.flow_total[places])
        servers.counted[places, head] = counted
        at_group = servers.histogram[places]
        group.counted[at_group, head] = np.where(np.isnan(now[:, SCALARS:]), np.nan, group.totals[at_group])

    def _enter_group(self, places: Ints, schema: Schema) -> HistogramRings:
        """The rings of ``schema``, with a place for each of ``places``; one that comes from another begins anew."""
        number = self._group_of.get(schema)
        if number is None:
            number = self._group_of[schema] = self._schemas_seen
            self._schemas_seen += 1
            self._groups[number] = HistogramRings(schema, 8, self._rows)
        group = self._groups[number]
        for place in places[self._servers.group[places] != number].tolist():
            self._leave_group(place)
            self._servers.group[place] = number
            self._servers.histogram[place] = group.open()
        return group

    def _leave_group(self, place: int) -> None:
        number = int(self._servers.group[place])
        if number < 0:
            return
        group = self._groups[number]
        group.give(int(self._servers.histogram[place]))
        self._servers.group[place] = -1
        if group.empty:
            # A server that names other buckets on every page must not fill the memory.
            del self._groups[number], self._group_of[group.schema]


def _evidence(scalars: Counted, histograms: Counted, schema: Schema) -> prefill.Evidence:
    """The increases since the last scrape from which the time that prompts take is estimated."""
    none = np.zeros(len(scalars.increases))
    sums: dict[Latency, tuple[Floats, Floats]] = {}
    for latency in (Latency.TTFT, Latency.QUEUE):
        columns = schema.histograms.get(latency)
        sums[latency] = (none, none)
        if columns is not None:
            increases = histograms.increases
            sums[latency] = (increases[:, columns.sum - SCALARS], increases[:, columns.last - SCALARS])
    return prefill.Evidence(
        scalars.increases[:, COUNTER_COLUMN[Counter.PREFILL_SECONDS] - FIRST_COUNTER],
        scalars.increases[:, COUNTER_COLUMN[Counter.PREFILL_REQUESTS] - FIRST_COUNTER],
        *sums[Latency.TTFT],
        *sums[Latency.QUEUE],
    )
