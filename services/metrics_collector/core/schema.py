"""The columns of one reading: the form that pages of every engine and release are turned into.

A reading is one row of numbers: the gauges, the counters, then for each latency its cumulative bucket counts and its
sum. The first two parts are the same for every engine; the buckets differ by release, so a ``Schema`` says which
latencies a server reports and on which bounds. Servers of one release share one schema, so that thousands of rows
are worked on at once.

A number that is absent, because the page lacks it or because it was refused, is NaN in a row, and nowhere else: it
never leaves the collector. Nothing that a server writes becomes NaN in any other way.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from trimtab.domain.signals import Counter, Gauge, Latency

GAUGES: tuple[Gauge, ...] = tuple(Gauge)
COUNTERS: tuple[Counter, ...] = tuple(Counter)
GAUGE_COLUMN: Mapping[Gauge, int] = MappingProxyType({gauge: column for column, gauge in enumerate(GAUGES)})
COUNTER_COLUMN: Mapping[Counter, int] = MappingProxyType(
    {counter: len(GAUGES) + column for column, counter in enumerate(COUNTERS)}
)
SCALARS = len(GAUGES) + len(COUNTERS)
"""How many columns every schema begins with."""


class HistogramColumns(NamedTuple):
    """Where one latency stands in a row: cumulative counts in [first, last], the last of them +Inf's; then the sum."""

    first: int
    last: int
    sum: int


@dataclass(frozen=True)
class Schema:
    """Which latencies a row holds, and on which bounds: ascending, in seconds, the last one +Inf.

    Made by ``schema_of`` alone, so that equal schemas are one object while it remembers them.
    """

    bounds_s: tuple[tuple[Latency, tuple[float, ...]], ...]

    @cached_property
    def histograms(self) -> Mapping[Latency, HistogramColumns]:
        """The columns of each latency."""
        found: dict[Latency, HistogramColumns] = {}
        first = SCALARS
        for latency, bounds_s in self.bounds_s:
            last = first + len(bounds_s) - 1
            found[latency] = HistogramColumns(first, last, last + 1)
            first = last + 2
        return MappingProxyType(found)

    @cached_property
    def width(self) -> int:
        """Columns of a row."""
        return SCALARS + sum(len(bounds_s) + 1 for _, bounds_s in self.bounds_s)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that identify the schema in the store: the same in every process, another when a column moves."""
        names = (*(gauge.value for gauge in GAUGES), *(counter.value for counter in COUNTERS))
        text = repr((names, tuple((latency.value, bounds_s) for latency, bounds_s in self.bounds_s)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=1024)
def schema_of(bounds_s: tuple[tuple[Latency, tuple[float, ...]], ...] = ()) -> Schema:
    """The schema with these latencies, which must stand in the order of ``Latency``."""
    return Schema(bounds_s)


class Reading(NamedTuple):
    """One page: a row of ``schema.width`` numbers, finite and not negative, or NaN where absent.

    ``rejected`` counts the families that were refused: not finite, negative, absurd, or not adding up.
    """

    schema: Schema
    values: Sequence[float]
    rejected: int = 0
