"""Which series of a page make up which column: a dialect's rules applied to the labels of a layout."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from metrics_collector.core.parser.row import COLUMN, Groups, Histogram, Plan, Prefill
from metrics_collector.core.schema import HistogramColumns, schema_of
from trimtab.domain.dialects.model import Combine, Dialect, Family, Kind, Quantity, Source, counter_spellings
from trimtab.domain.signals import Counter, Latency


class Series(NamedTuple):
    """A sample on the page: its row, and its labels."""

    row: int
    labels: Mapping[str, str]


class _Buckets(NamedTuple):
    """One series of a histogram: the rows of its buckets by ascending bound, of its sum and of its count."""

    key: tuple[tuple[str, str], ...]
    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    sum_row: int
    count_row: int


class _Latency(NamedTuple):
    latency: Latency
    scale: float
    name: str
    copies: tuple[str, ...]
    series: tuple[_Buckets, ...]


class _Scalar(NamedTuple):
    family: Family
    name: str
    groups: Groups


def plan_of(dialect: Dialect, series: Mapping[str, Sequence[Series]]) -> tuple[Plan, tuple[int, ...]]:
    """(the plan, the rows of its numbers in their order) for the samples of a page by their names."""
    latencies: list[_Latency] = []
    scalars: list[_Scalar] = []
    refused: set[str] = set()
    for family in dialect.families:
        if family.kind is Kind.HISTOGRAM:
            found = _histogram(family, series, refused)
            if found is not None:
                latencies.append(found)
        else:
            scalar = _scalar(family, series)
            if scalar is not None:
                scalars.append(scalar)
    present = {scalar.family.quantity for scalar in scalars}
    if not refused and not (present & dialect.required):
        return _assemble(dialect, (), (), frozenset())
    latencies.sort(key=lambda item: list(Latency).index(item.latency))
    return _assemble(dialect, latencies, scalars, frozenset(refused))


def _scalar(family: Family, series: Mapping[str, Sequence[Series]]) -> _Scalar | None:
    """The rows of the first of the family's names that has series which the family selects."""
    others = [spelling for name in family.names for spelling in counter_spellings(name, family.kind)]
    for name in (*family.names, *others):
        selected = [item for item in series.get(name, ()) if family.selects(item.labels)]
        if selected:
            return _Scalar(family, name, _groups([(_key(item.labels, family.copies), item.row) for item in selected]))
    return None


def _groups(keyed: Sequence[tuple[tuple[tuple[str, str], ...], int]]) -> Groups:
    """Rows of equal keys together, in the page's order."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for key, row in keyed:
        groups.setdefault(key, []).append(row)
    return tuple(map(tuple, groups.values()))


def _key(labels: Mapping[str, str], without: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((label, value) for label, value in labels.items() if label not in without))


def _histogram(family: Family, series: Mapping[str, Sequence[Series]], refused: set[str]) -> _Latency | None:
    """The series of the family's first name on the page; its name is ``refused`` when a part of one is missing."""
    for name in family.names:
        parts = [
            [item for item in series.get(name + suffix, ()) if family.selects(item.labels)]
            for suffix in ("_bucket", "_sum", "_count")
        ]
        if not any(parts):
            continue
        found = _buckets(*parts)
        if found is None:
            refused.add(name)
            return None
        return _Latency(Latency(family.quantity), family.scale, name, family.copies, found)
    return None


def _buckets(
    buckets: Sequence[Series], sums: Sequence[Series], counts: Sequence[Series]
) -> tuple[_Buckets, ...] | None:
    """The histogram's series; None unless each has the same bounds up to +Inf, a sum and a count."""
    sum_rows = {_key(item.labels, ()): item.row for item in sums}
    count_rows = {_key(item.labels, ()): item.row for item in counts}
    by_key: dict[tuple[tuple[str, str], ...], dict[float, int]] = {}
    for item in buckets:
        bound = _bound(item.labels.get("le", ""))
        rows = by_key.setdefault(_key(item.labels, ("le",)), {})
        if bound is None or bound in rows:
            return None
        rows[bound] = item.row
    if not by_key or not by_key.keys() == sum_rows.keys() == count_rows.keys():
        return None
    found: list[_Buckets] = []
    for key, rows in by_key.items():
        bounds = tuple(sorted(rows))
        found.append(_Buckets(key, bounds, tuple(rows[bound] for bound in bounds), sum_rows[key], count_rows[key]))
    if found[0].bounds[-1] != math.inf or any(item.bounds != found[0].bounds for item in found):
        return None
    return tuple(found)


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) or "_" in text else bound


def _assemble(
    dialect: Dialect, latencies: Sequence[_Latency], scalars: Sequence[_Scalar], refused: frozenset[str]
) -> tuple[Plan, tuple[int, ...]]:
    limits = {family.quantity: family.largest for family in dialect.families}
    rows: list[int] = []
    most: list[float] = []
    place_of: dict[int, int] = {}

    def place(row: int, quantity: Quantity) -> int:
        """The position of a row's number; a row that two columns use has two, for each its limit."""
        rows.append(row)
        most.append(limits[quantity])
        place_of[row] = len(rows) - 1
        return len(rows) - 1

    schema = schema_of(tuple((item.latency, _bounds_s(item)) for item in latencies))
    stripes, cells = _cells(latencies, place)
    histograms: list[Histogram] = []
    sources: list[tuple[str, tuple[int, ...]]] = []
    for item in latencies:
        counts = [(_key(dict(one.key), item.copies), place(one.count_row, item.latency)) for one in item.series]
        columns: HistogramColumns = schema.histograms[item.latency]
        histograms.append(Histogram(name=item.name, columns=columns, counts=_groups(counts), scale=item.scale))
        used = [row for one in item.series for row in (*one.buckets, one.sum_row, one.count_row)]
        sources.append((item.name, tuple(place_of[row] for row in used)))
    singles: list[tuple[int, int]] = []
    folds: list[tuple[int, Combine, Groups, float]] = []
    for scalar in scalars:
        family = scalar.family
        groups = tuple(tuple(place(row, family.quantity) for row in group) for group in scalar.groups)
        column = COLUMN[family.quantity]
        if len(groups) == 1 and len(groups[0]) == 1 and family.scale == 1.0:
            singles.append((column, groups[0][0]))
        else:
            folds.append((column, family.combine, groups, family.scale))
        sources.append((scalar.name, tuple(number for group in groups for number in group)))
    present = {scalar.family.quantity for scalar in scalars}
    plan = Plan(
        schema=schema,
        limits=tuple(most),
        stripes=stripes,
        cells=cells,
        histograms=tuple(histograms),
        singles=tuple(singles),
        folds=tuple(folds),
        prefill=_prefill(present),
        external=Source.EXTERNAL_HIT_TOKENS in present,
        sources=tuple(sources),
        refused=refused,
    )
    return plan, tuple(rows)


def _bounds_s(item: _Latency) -> tuple[float, ...]:
    return tuple(bound * item.scale for bound in item.series[0].bounds)


def _cells(latencies: Sequence[_Latency], place: Callable[[int, Quantity], int]) -> tuple[int, tuple[Groups, ...]]:
    """Places the buckets and sums: (stripes, groups of each column), of which one says how they combine."""
    counts = {len(item.series) for item in latencies}
    alone = all(
        len({_key(dict(one.key), item.copies) for one in item.series}) == len(item.series) for item in latencies
    )
    if len(counts) <= 1 and alone:
        for stripe in range(max(counts, default=0)):
            for item in latencies:
                for row in (*item.series[stripe].buckets, item.series[stripe].sum_row):
                    place(row, item.latency)
        return max(counts, default=0), ()
    cells: list[Groups] = []
    for item in latencies:
        keys = [_key(dict(one.key), item.copies) for one in item.series]
        cells += [
            _groups([(key, place(row, item.latency)) for key, row in zip(keys, column, strict=True)])
            for column in zip(*((*one.buckets, one.sum_row) for one in item.series), strict=True)
        ]
    return 0, tuple(cells)


def _prefill(present: set[Quantity]) -> Prefill:
    if Counter.PREFILL_TOKENS in present:
        return Prefill.COUNTED
    if Source.CACHED_PROMPT_TOKENS in present:
        return Prefill.LESS_CACHED
    return Prefill.LESS_HITS if Source.PREFIX_HIT_TOKENS in present else Prefill.PROMPT
