"""Storage of many servers' recent rows: arrays that grow together, one place for each server.

``ServerRings`` holds what every engine reports: gauges and counters. ``HistogramRings`` holds the latencies of the
servers of one schema. Both use the same ring positions, so that a row of one belongs to the same row of the other.
"""

import numpy as np
from numpy.typing import NDArray

from metrics_collector.core.schema import COUNTERS, GAUGE_COLUMN, SCALARS, Schema
from trimtab.domain.signals import AVERAGES, Gauge

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

AVERAGED: tuple[Gauge, ...] = tuple(AVERAGES.values())
"""Gauges that are averaged over time; in a ring they come first, then the KV usage's maximum."""
KEPT_GAUGES: tuple[int, ...] = tuple(GAUGE_COLUMN[gauge] for gauge in (*AVERAGED, Gauge.KV_USAGE_MAX_RATIO))
PEAK = len(AVERAGED)
"""Where the KV usage's maximum stands in a ring."""
FLOWED = len(COUNTERS)
"""Where the prompt tokens that have flowed stand in a ring, behind the counters."""
_EVIDENCE = 6


class _Arrays:
    """Arrays whose first axis is a server's place. Empty places hold NaN, False or 0."""

    def __init__(self) -> None:
        self._free: list[int] = []

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def empty(self) -> bool:
        """Whether every place is."""
        return len(self._free) == self.capacity

    def take(self) -> int:
        """An empty place."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give(self, place: int) -> None:
        """Empty ``place``."""
        for array in self._arrays().values():
            array[place] = _empty(array)
        self._free.append(place)

    def _grow(self) -> None:
        for name, array in self._arrays().items():
            grown = np.full((2 * len(array), *array.shape[1:]), _empty(array), dtype=array.dtype)
            grown[: len(array)] = array
            setattr(self, name, grown)
        self._free = list(range(2 * self.capacity - 1, self.capacity - 1, -1))
        self.capacity *= 2

    def _arrays(self) -> dict[str, NDArray[np.generic]]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


class ServerRings(_Arrays):
    """Places of all servers. ``rows`` is the length of a ring; ``head`` the place of its newest row."""

    def __init__(self, capacity: int, rows: int) -> None:
        super().__init__()
        self.at_s: Floats = np.full((capacity, rows), np.nan)
        self.gauges: Floats = np.full((capacity, rows, len(KEPT_GAUGES)), np.nan)
        self.counted: Floats = np.full((capacity, rows, len(COUNTERS) + 1), np.nan)
        self.reset: Bools = np.zeros((capacity, rows), dtype=bool)
        self.head: Ints = np.zeros(capacity, dtype=np.int64)
        self.spacing_s: Floats = np.full(capacity, np.nan)
        self.levels: Floats = np.full((capacity, SCALARS), np.nan)
        """The last known reading of each counter, and the newest page's gauges."""
        self.totals: Floats = np.full((capacity, len(COUNTERS)), np.nan)
        self.last_s: Floats = np.full(capacity, np.nan)
        self.since_s: Floats = np.full(capacity, np.nan)
        """Since when it has been awake, or asleep, without a break."""
        self.moved_s: Floats = np.full(capacity, np.nan)
        """When the engine was last seen to do anything."""
        self.prefilled_s: Floats = np.full(capacity, np.nan)
        self.flow_left: Floats = np.full(capacity, np.nan)
        self.flow_rate: Floats = np.full(capacity, np.nan)
        self.flow_total: Floats = np.full(capacity, np.nan)
        self.evidence: Floats = np.full((capacity, _EVIDENCE), np.nan)
        self.group: Ints = np.zeros(capacity, dtype=np.int64)
        """Number of its schema; -1 before its first page."""
        self.histogram: Ints = np.zeros(capacity, dtype=np.int64)
        """Its place in the rings of its schema."""
        self._allocate(capacity)

    def open(self, *, spacing_s: float) -> int:
        """A place for one more server, whose rows lie at least ``spacing_s`` apart."""
        place = self.take()
        self.spacing_s[place] = spacing_s
        self.group[place] = -1
        for array in (self.totals, self.flow_left, self.flow_rate, self.flow_total, self.evidence):
            array[place] = 0.0
        return place


class HistogramRings(_Arrays):
    """Places of the servers of one schema: cumulative buckets and sums, on the series' own scale in ``counted``."""

    def __init__(self, schema: Schema, capacity: int, rows: int) -> None:
        super().__init__()
        self.schema = schema
        width = schema.width - SCALARS
        self.counted: Floats = np.full((capacity, rows, width), np.nan)
        self.levels: Floats = np.full((capacity, width), np.nan)
        self.totals: Floats = np.full((capacity, width), np.nan)
        self._allocate(capacity)

    def open(self) -> int:
        """A place for one more server."""
        place = self.take()
        self.totals[place] = 0.0
        return place


def _empty(array: NDArray[np.generic]) -> float | bool | int:
    if array.dtype == np.float64:
        return float("nan")
    return False if array.dtype == np.bool_ else 0
