"""From a page's numbers to a reading: series combined, further columns computed, implausible values left out.

``Plan`` maps a page's numbers to columns. Numbers are in this order: for each series of the
latencies its buckets and its sum, in the schema's order of columns; then the counts of the histograms; then the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import add, le

from metrics_collector.core.schema import (
    COUNTER_COLUMN,
    COUNTERS,
    GAUGE_COLUMN,
    GAUGES,
    SCALARS,
    HistogramColumns,
    Reading,
    Schema,
)
from trimtab.domain.dialects.model import Combine, Quantity, Source
from trimtab.domain.signals import Counter, Gauge

Groups = tuple[tuple[int, ...], ...]
"""Positions of numbers: of each group, whose members are copies of one another, the largest counts."""

COLUMN: dict[Quantity, int] = {quantity: column for column, quantity in enumerate((*GAUGES, *COUNTERS, *Source))}
"""A reading's columns, and beyond them what computed columns come from."""
BLANK = [math.nan] * len(COLUMN)

_PREFILL = COUNTER_COLUMN[Counter.PREFILL_TOKENS]
_CACHED = COUNTER_COLUMN[Counter.PREFILL_CACHED_TOKENS]
_PROMPT = COUNTER_COLUMN[Counter.PROMPT_TOKENS]
_RATIOS = (GAUGE_COLUMN[Gauge.KV_USAGE_RATIO], GAUGE_COLUMN[Gauge.KV_USAGE_MAX_RATIO])
_CACHED_PROMPT, _HITS, _EXTERNAL = (COLUMN[source] for source in Source)


class _Numbers(dict[bytes, float]):
    """Numbers by their text. Most of a page's are small whole ones that stood on the page before: to look one up takes
    a quarter of the time that it takes to read it."""

    def __missing__(self, text: bytes) -> float:
        number = float(text)
        if len(text) <= _MAX_KEPT_LENGTH and text.endswith(b".0"):
            if len(self) >= _MAX_KEPT_NUMBERS:
                self.clear()
            self[text] = number
        return number


_MAX_KEPT_NUMBERS = 65_536
_MAX_KEPT_LENGTH = 10
_number = _Numbers().__getitem__


class Prefill(Enum):
    """Where the prompt tokens that were computed come from; the best that a page has."""

    COUNTED = "counted"
    LESS_CACHED = "prompt less cached"
    LESS_HITS = "prompt less hits"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One latency: its family, its columns in a row, the groups of its counts, and seconds in its unit."""

    name: str
    columns: HistogramColumns
    counts: Groups
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What becomes of a page's numbers.

    ``stripes`` is how many series every latency has when they only add: then the histograms' numbers are that many
    runs of equal length. Else ``cells`` has the groups of each column after the scalars. ``sources`` are the numbers
    of each family that is read, ``refused`` the families that no number could save.
    """

    schema: Schema
    limits: tuple[float, ...]
    stripes: int
    cells: tuple[Groups, ...]
    histograms: tuple[Histogram, ...]
    singles: tuple[tuple[int, int], ...]
    folds: tuple[tuple[int, Combine, Groups, float], ...]
    prefill: Prefill
    external: bool
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    refused: frozenset[str]

    def reading(self, texts: Sequence[bytes]) -> Reading:
        """The reading of these values, as the page has them."""
        try:
            numbers = list(map(_number, texts))
        except ValueError:
            numbers = [_first_number(text) for text in texts]
        # Python's numbers may have underscores, the format's may not.
        if b"_" in b"".join(texts):
            numbers = [_first_number(text) for text in texts]
        # No number of any kind is larger than NaN or smaller.
        if all(map(le, numbers, self.limits)) and (not numbers or min(numbers) >= 0.0):
            row, broken = self._row(numbers, whole=True)
            return Reading(self.schema, row, len(self.refused | broken) if broken or self.refused else 0)
        numbers = [
            number if 0.0 <= number <= limit else math.nan for number, limit in zip(numbers, self.limits, strict=True)
        ]
        row, broken = self._row(numbers, whole=False)
        absurd = {name for name, places in self.sources if any(math.isnan(numbers[place]) for place in places)}
        return Reading(self.schema, row, len(self.refused | broken | absurd))

    def _row(self, numbers: list[float], *, whole: bool) -> tuple[list[float], set[str]]:
        """(the row, the families whose histograms do not add up). ``whole``: no number is NaN."""
        raw = BLANK[:]
        for column, place in self.singles:
            raw[column] = numbers[place]
        for column, rule, groups, scale in self.folds:
            raw[column] = _combined(rule, groups, numbers, whole=whole) * scale
        self._compute(raw)
        del raw[SCALARS:]
        raw += self._cells(numbers)
        broken: set[str] = set()
        for histogram in self.histograms:
            first, last, total = histogram.columns
            cumulative = raw[first : last + 1]
            counts = histogram.counts
            count = numbers[counts[0][0]] if len(counts) == 1 else _combined(Combine.ADD, counts, numbers, whole=whole)
            good = cumulative[-1] == count and cumulative == sorted(cumulative)
            if histogram.scale != 1.0:
                raw[total] *= histogram.scale
            if not good or (not whole and math.isnan(sum(cumulative) + raw[total])):
                broken.add(histogram.name)
                raw[first : total + 1] = [math.nan] * (total + 1 - first)
        return raw, broken

    def _cells(self, numbers: list[float]) -> list[float]:
        """The columns of the latencies, summed over series."""
        if self.cells:
            return [_combined(Combine.ADD, groups, numbers, whole=False) for groups in self.cells]
        width = self.schema.width - SCALARS
        cells = numbers[:width]
        for stripe in range(1, self.stripes):
            cells = list(map(add, cells, numbers[stripe * width : (stripe + 1) * width]))
        return cells

    def _compute(self, raw: list[float]) -> None:
        """Fills the columns that are computed from others. NaN stays NaN: ``max`` would lose it."""
        for column in _RATIOS:
            if raw[column] > 1.0:
                raw[column] = 1.0
        if self.prefill is Prefill.COUNTED:
            return
        prompt = raw[_PROMPT]
        external = raw[_EXTERNAL] if self.external else 0.0
        if self.prefill is Prefill.LESS_CACHED:
            computed, cached = prompt - raw[_CACHED_PROMPT], raw[_CACHED_PROMPT] - external
        elif self.prefill is Prefill.LESS_HITS:
            computed, cached = prompt - raw[_HITS] - external, raw[_HITS]
        else:
            computed, cached = prompt, math.nan
        raw[_PREFILL] = 0.0 if computed < 0.0 else computed
        raw[_CACHED] = 0.0 if cached < 0.0 else cached


def _first_number(text: bytes) -> float:
    """A value with a timestamp or an exemplar behind it; NaN when it is none."""
    parts = text.split(None, 1)
    try:
        return math.nan if b"_" in parts[0] else float(parts[0])
    except (ValueError, IndexError):
        return math.nan


def _combined(rule: Combine, groups: Groups, numbers: Sequence[float], *, whole: bool) -> float:
    """One number of many. NaN when one of them is: part of a sum is not a smaller sum."""
    if not whole and any(math.isnan(numbers[place]) for group in groups for place in group):
        return math.nan
    values = [numbers[group[0]] if len(group) == 1 else max(numbers[place] for place in group) for group in groups]
    if rule is Combine.LEAST:
        return min(values)
    if rule is Combine.MAXIMUM:
        return max(values)
    total = values[0] if len(values) == 1 else math.fsum(values)
    return total / len(values) if rule is Combine.MEAN else total
