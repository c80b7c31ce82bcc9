"""Reads the families of a dialect from a page in the Prometheus text format; skips everything else unparsed.

A page is cut at its ``# TYPE`` lines, which costs one pass in C, and only the blocks of families that the dialect
names are read. Label sets are tokenised once and remembered, since a server repeats them on every page. A page
without such lines is read line by line instead.

What it refuses: a page that is too large, empty, not text, cut in the middle of a line, without any family of the
dialect, or with a family or a series twice (``PageError``: an error of that target alone). A value that is NaN,
infinite, negative or absurd is counted in ``rejected`` and takes its whole quantity with it: part of a sum is not
a smaller sum.

Limits: timestamps and exemplars are skipped; OpenMetrics pages of vLLM (``vllm_`` for ``vllm:``) are understood,
OpenMetrics in general is not.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from metrics_collector.core.dialect import Combine, Dialect, Family, Kind, Quantity
from metrics_collector.core.sample import Histogram, PageSample

MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_LINE_BYTES = 64 * 1024
MAX_SERIES_PER_FAMILY = 20_000

_LABELS = re.compile(rb'\{\s*(?:[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"\s*(?:,\s*|(?=\})))*\}')
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|infinity|nan)", re.IGNORECASE)
_ESCAPES = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_ESCAPE = re.compile(rb'\\[\\"n]')
_TYPE = b"\n# TYPE "


class PageError(Exception):
    """The page as a whole is refused; the message is one line for people."""


@dataclass(frozen=True, slots=True)
class _Series:
    """One sample line: the labels as they stood on the page, and the value as text."""

    labels: bytes
    value: bytes


class _RejectedError(Exception):
    """A value of this family is refused, and with it the family."""


class PageReader:
    """Reads pages of one dialect. Immutable; one serves every target."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    @cached_property
    def _blocks(self) -> Mapping[bytes, str]:
        """Name on a ``# TYPE`` line → the family's name in the dialect."""
        found: dict[bytes, str] = {}
        for family in self.dialect.families:
            for name in family.names:
                found[name.encode()] = name
                # OpenMetrics leaves a counter's suffix to its samples.
                found.setdefault(name.removesuffix("_total").encode(), name)
        return found

    @cached_property
    def _samples(self) -> Mapping[bytes, tuple[str, str]]:
        """Sample name → (the family's name, the suffix)."""
        found: dict[bytes, tuple[str, str]] = {}
        for family in self.dialect.families:
            for name in family.names:
                for suffix in ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",):
                    found[(name + suffix).encode()] = (name, suffix)
        return found

    def read(self, page: bytes) -> PageSample:
        """The quantities of one page. Raises ``PageError``."""
        _check_page(page)
        if b"\nvllm_" in page or page.startswith(b"vllm_"):
            page = (b"\n" + page).replace(b"\nvllm_", b"\nvllm:")
        families = self._split(page)
        gauges: dict[Quantity, float] = {}
        counters: dict[Quantity, float] = {}
        histograms: dict[Quantity, Histogram] = {}
        kv_usage_max: float | None = None
        rejected: set[str] = set()
        for family in self.dialect.families:
            for name in family.names:
                series = families.get(name)
                if series is None:
                    continue
                try:
                    if family.kind is Kind.HISTOGRAM:
                        histograms[family.quantity] = _histogram(family, series)
                        break
                    values = _values(family, series.get("", ()))
                except _RejectedError:
                    rejected.add(name)
                    break
                if not values:
                    continue
                into = gauges if family.kind is Kind.GAUGE else counters
                into[family.quantity] = _combine(family.combine, values)
                if family.quantity is Quantity.KV_USAGE:
                    kv_usage_max = max(values)
                break
        if not rejected and not any(quantity in gauges or quantity in counters for quantity in self.dialect.required):
            raise PageError(f"no {self.dialect.name} series on the page (is the server run with its statistics off?)")
        return PageSample(
            gauges=gauges,
            counters=counters,
            histograms=histograms,
            kv_usage_max_ratio=kv_usage_max,
            rejected=len(rejected),
        )

    def _split(self, page: bytes) -> dict[str, dict[str, list[_Series]]]:
        """Family name → suffix → series, for the families of the dialect."""
        found: dict[str, dict[str, list[_Series]]] = {}
        blocks = self._blocks
        for block in (b"\n" + page).split(_TYPE)[1:]:
            header, _, body = block.partition(b"\n")
            name = blocks.get(header[: header.find(b" ")])
            if name is None:
                continue
            if name in found:
                raise PageError(f"family {name} stands twice on the page")
            found[name] = self._series(body.split(b"\n"), only=name)
        if found:
            return found
        by_line: dict[str, dict[str, list[_Series]]] = {}
        for (name, suffix), series in self._lines(page.split(b"\n")):
            by_line.setdefault(name, {}).setdefault(suffix, []).append(series)
        for name, suffixes in by_line.items():
            _refuse_duplicates(name, suffixes)
        return by_line

    def _series(self, lines: list[bytes], *, only: str) -> dict[str, list[_Series]]:
        if len(lines) > MAX_SERIES_PER_FAMILY:
            raise PageError(f"family {only} has more than {MAX_SERIES_PER_FAMILY} lines")
        found: dict[str, list[_Series]] = {}
        for (name, suffix), series in self._lines(lines):
            if name == only:
                found.setdefault(suffix, []).append(series)
        _refuse_duplicates(only, found)
        return found

    def _lines(self, lines: Iterable[bytes]) -> Iterable[tuple[tuple[str, str], _Series]]:
        known = self._samples
        for line in lines:
            if not line or line[0] == 35:  # "#"
                continue
            if len(line) > MAX_LINE_BYTES:
                raise PageError(f"a line of {len(line)} bytes")
            brace = line.find(b"{")
            if brace < 0:
                name, _, rest = line.partition(b" ")
                key = known.get(name)
                if key is not None:
                    yield key, _Series(b"", rest)
                continue
            key = known.get(line[:brace].rstrip())
            if key is None:
                continue
            # The value never holds a brace, so the last one ends the labels, unless an exemplar follows.
            end = line.rfind(b"}") + 1
            labels = line[brace:end]
            if not _well_formed(labels):
                match = _LABELS.match(line, brace)
                if match is None:
                    raise PageError(f"labels of {key[0]} are malformed")
                end = match.end()
                labels = match.group()
            yield key, _Series(labels, line[end:])


def _check_page(page: bytes) -> None:
    if len(page) > MAX_PAGE_BYTES:
        raise PageError(f"the page has more than {MAX_PAGE_BYTES} bytes")
    if not page.strip():
        raise PageError("the page is empty")
    start = page[:64].lstrip()
    if start.startswith((b"<", b"{", b"[")):
        raise PageError("the page is not in the Prometheus text format")
    if b"\0" in page:
        raise PageError("the page is not text")
    if not page.endswith(b"\n"):
        raise PageError("the page is cut: its last line has no end")


def _refuse_duplicates(name: str, suffixes: Mapping[str, list[_Series]]) -> None:
    for series in suffixes.values():
        if len({item.labels for item in series}) != len(series):
            raise PageError(f"a series of {name} stands twice on the page")


@lru_cache(maxsize=65_536)
def _well_formed(labels: bytes) -> bool:
    return _LABELS.fullmatch(labels) is not None


@lru_cache(maxsize=65_536)
def _parse_labels(labels: bytes) -> Mapping[str, str]:
    return {
        name.decode(): _ESCAPE.sub(lambda match: _ESCAPES[match.group()], value).decode("utf-8", "replace")
        for name, value in _LABEL.findall(labels)
    }


@lru_cache(maxsize=65_536)
def _bound_s(labels: bytes) -> float | None:
    text = _parse_labels(labels).get("le", "").encode()
    if _NUMBER.fullmatch(text) is None:
        return None
    bound = float(text)
    return None if math.isnan(bound) else bound


def _number(text: bytes, largest: float) -> float:
    """A finite number from 0 to ``largest``. A timestamp behind it is skipped."""
    parts = text.split(None, 1)
    if not parts or _NUMBER.fullmatch(parts[0]) is None:
        raise _RejectedError
    value = float(parts[0])
    if not 0.0 <= value <= largest:
        raise _RejectedError
    return value


def _values(family: Family, series: Iterable[_Series]) -> list[float]:
    if family.where is None and family.unless is None:
        return [_number(item.value, family.largest) for item in series]
    return [_number(item.value, family.largest) for item in series if family.selects(_parse_labels(item.labels))]


def _combine(rule: Combine, values: list[float]) -> float:
    if rule is Combine.MEAN:
        return math.fsum(values) / len(values)
    if rule is Combine.LEAST:
        return min(values)
    return math.fsum(values)


def _histogram(family: Family, suffixes: Mapping[str, list[_Series]]) -> Histogram:
    """The histogram summed over its series. Raises ``_RejectedError`` when a part is missing or does not add up."""
    buckets: dict[float, list[float]] = {}
    for item in suffixes.get("_bucket", ()):
        bound = _bound_s(item.labels)
        if bound is None:
            raise _RejectedError
        buckets.setdefault(bound, []).append(_number(item.value, family.largest))
    counts = _values(family, suffixes.get("_count", ()))
    sums = _values(family, suffixes.get("_sum", ()))
    series = len(counts)
    if not counts or len(sums) != series or any(len(values) != series for values in buckets.values()):
        raise _RejectedError
    bounds = tuple(sorted(buckets))
    cumulative = tuple(math.fsum(buckets[bound]) for bound in bounds)
    falls = any(later < earlier for earlier, later in pairwise(cumulative))
    if not bounds or bounds[-1] != math.inf or falls or cumulative[-1] != math.fsum(counts):
        raise _RejectedError
    return Histogram(bounds_s=bounds, cumulative=cumulative, sum_s=math.fsum(sums))
