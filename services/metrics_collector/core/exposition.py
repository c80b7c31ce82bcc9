"""Reads the families of a dialect from a page in the Prometheus text format; skips everything else unparsed.

A page is cut at its ``# TYPE`` lines, and only the blocks of families that the dialect names are read. What stands
before the values, names and labels, is the same on every page of a server: a block's layout is worked out once and
remembered, so that a page costs little more than its values. A page without ``# TYPE`` lines is read line by line.

What is refused: a page that is too large, empty, not text, cut in the middle of a line, without any family of the
dialect, or with a family or a series twice (``PageError``: an error of that target alone). A value that is NaN,
infinite, negative or absurd is counted in ``rejected`` and takes its whole quantity with it: part of a sum is not
a smaller sum.

Limits: timestamps and exemplars are skipped; OpenMetrics pages of vLLM (``vllm_`` for ``vllm:``) are understood,
OpenMetrics in general is not.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from metrics_collector.core.dialect import Combine, Dialect, Family, Kind, Quantity
from metrics_collector.core.sample import Histogram, PageSample

MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_LINES_PER_FAMILY = 5_000
MAX_LINE_BYTES = 64 * 1024
# Larger blocks are worked out anew each time, so that hostile pages cannot fill the memory through the cache.
_MAX_CACHED_BLOCK_BYTES = 16 * 1024
_MAX_CACHED_LAYOUTS = 8192

_LABELS = re.compile(rb'\{\s*(?:[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"\s*(?:,\s*|(?=\})))*\}')
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPES = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_ESCAPE = re.compile(rb'\\[\\"n]')
_TYPE = b"\n# TYPE "
_COMMENT = b"#"
_SUFFIXES = ("_bucket", "_sum", "_count")


class PageError(Exception):
    """The page as a whole is refused; the message is one line for people."""


class _RejectedError(Exception):
    """A value of this quantity is refused, and with it the quantity."""


class _Layout(NamedTuple):
    """Which rows of a block hold what. A row is a line's number in the block.

    ``plain`` are the samples under the family's own name, with their labels. ``buckets`` has the rows of each of
    ``bounds``, which ascend; ``bounds`` is empty when one could not be read.
    """

    plain: tuple[tuple[int, Mapping[str, str]], ...]
    bounds: tuple[float, ...]
    buckets: tuple[tuple[int, ...], ...]
    sums: tuple[int, ...]
    counts: tuple[int, ...]


class _Block(NamedTuple):
    """The rows of one family: where what stands, and the values as text."""

    layout: _Layout
    values: Sequence[bytes]


class PageReader:
    """Reads pages of one dialect; one serves every target."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    @cached_property
    def _families(self) -> Mapping[bytes, str]:
        """Name on a ``# TYPE`` line, or of a sample → the family's name in the dialect."""
        found: dict[bytes, str] = {}
        for family in self.dialect.families:
            for name in family.names:
                found[name.encode()] = name
                # OpenMetrics leaves a counter's suffix to its samples.
                found.setdefault(name.removesuffix("_total").encode(), name)
                if family.kind is Kind.HISTOGRAM:
                    found.update({(name + suffix).encode(): name for suffix in _SUFFIXES})
        return found

    def read(self, page: bytes) -> PageSample:
        """The quantities of one page. Raises ``PageError``."""
        _check_page(page)
        if page.endswith(b"# EOF\n"):
            page = (b"\n" + page).replace(b"\nvllm_", b"\nvllm:")
        blocks = self._blocks(page)
        gauges: dict[Quantity, float] = {}
        counters: dict[Quantity, float] = {}
        histograms: dict[Quantity, Histogram] = {}
        kv_usage_max: float | None = None
        rejected: set[str] = set()
        for family in self.dialect.families:
            # The first name that has samples counts; of a renamed family the page may have both.
            for name in family.names:
                block = blocks.get(name)
                if block is None:
                    continue
                try:
                    if family.kind is Kind.HISTOGRAM:
                        histograms[family.quantity] = _histogram(block, family.largest)
                        break
                    values = _plain(block, family)
                except _RejectedError:
                    rejected.add(name)
                    break
                if values:
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

    def _blocks(self, page: bytes) -> dict[str, _Block]:
        """The families of the dialect that are on the page."""
        found: dict[str, _Block] = {}
        families = self._families
        for text in (b"\n" + page).split(_TYPE)[1:]:
            name = families.get(text[: text.find(b" ")])
            if name is None:
                continue
            if name in found:
                raise PageError(f"family {name} stands twice on the page")
            found[name] = _block(name, text.split(b"\n")[1:], cached=len(text) <= _MAX_CACHED_BLOCK_BYTES)
        return found or self._blocks_by_line(page)

    def _blocks_by_line(self, page: bytes) -> dict[str, _Block]:
        """The same for a page without ``# TYPE`` lines: each sample goes by its own name."""
        by_family: dict[str, list[bytes]] = {}
        for line in page.split(b"\n"):
            name = re.split(rb"[{ \t]", line, maxsplit=1)[0]
            family = self._families.get(name)
            if family is not None:
                by_family.setdefault(family, []).append(line)
        return {name: _block(name, lines, cached=False) for name, lines in by_family.items()}


def _check_page(page: bytes) -> None:
    if len(page) > MAX_PAGE_BYTES:
        raise PageError(f"the page has more than {MAX_PAGE_BYTES} bytes")
    if not page or page.isspace():
        raise PageError("the page is empty")
    if page[:64].lstrip().startswith((b"<", b"{", b"[")) or b"\0" in page:
        raise PageError("the page is not in the Prometheus text format")
    if not page.endswith(b"\n"):
        raise PageError("the page is cut: its last line has no end")


def _block(name: str, lines: Sequence[bytes], *, cached: bool) -> _Block:
    """The block of family ``name``. Raises ``PageError`` for malformed labels and for a series twice."""
    if len(lines) > MAX_LINES_PER_FAMILY:
        raise PageError(f"family {name} has more than {MAX_LINES_PER_FAMILY} lines")
    heads: list[bytes] = []
    values: list[bytes] = []
    for line in lines:
        # A value holds no brace, so the last one ends the labels, unless there is an exemplar.
        head, brace, value = line.rpartition(b"} ")
        if not brace:
            head, _, value = line.partition(b" ")
        heads.append(head)
        values.append(value)
    layout = (_layout if cached else _layout.__wrapped__)(name, tuple(heads))
    if layout is None:
        rows = [_exact_row(name, line) for line in lines]
        values = [value for _, value in rows]
        layout = _layout.__wrapped__(name, tuple(head for head, _ in rows))
        if layout is None:
            raise PageError(f"a sample of {name} is malformed")
    return _Block(layout, values)


@lru_cache(maxsize=_MAX_CACHED_LAYOUTS)
def _layout(name: str, heads: tuple[bytes, ...]) -> _Layout | None:
    """The layout of a block whose rows begin with ``heads``: ``name{labels`` without the closing brace, or ``name``.

    None when a head is no such thing: then the lines must be cut up exactly. Raises ``PageError`` for a series twice.
    """
    plain: list[tuple[int, Mapping[str, str]]] = []
    buckets: dict[float, list[int]] = {}
    sums: list[int] = []
    counts: list[int] = []
    seen: set[bytes] = set()
    bounds_known = True
    for row, head in enumerate(heads):
        if head.startswith(_COMMENT) or not head:
            continue
        if len(head) > MAX_LINE_BYTES:
            raise PageError(f"a line of {name} has more than {MAX_LINE_BYTES} bytes")
        sample, brace, rest = head.partition(b"{")
        if b"\t" in sample or (brace and _LABELS.fullmatch(brace + rest + b"}") is None):
            return None
        suffix = sample.decode("utf-8", "replace").rstrip()
        suffix = suffix.removeprefix(name) if suffix.startswith(name) else "other"
        if suffix not in ("", *_SUFFIXES):
            continue
        if head in seen:
            raise PageError(f"a series of {name} stands twice on the page")
        seen.add(head)
        labels = _labels(rest)
        if suffix == "":
            plain.append((row, labels))
        elif suffix == "_bucket":
            bound = _bound(labels.get("le", ""))
            bounds_known = bounds_known and bound is not None
            if bound is not None:
                buckets.setdefault(bound, []).append(row)
        else:
            (sums if suffix == "_sum" else counts).append(row)
    bounds = tuple(sorted(buckets)) if bounds_known else ()
    return _Layout(tuple(plain), bounds, tuple(tuple(buckets[bound]) for bound in bounds), tuple(sums), tuple(counts))


def _labels(text: bytes) -> dict[str, str]:
    return {
        label.decode(): _ESCAPE.sub(lambda match: _ESCAPES[match.group()], value).decode("utf-8", "replace")
        for label, value in _LABEL.findall(text)
    }


def _bound(text: str) -> float | None:
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) or "_" in text else bound


def _exact_row(name: str, line: bytes) -> tuple[bytes, bytes]:
    """(head, value) of any line of the format. Raises ``PageError``."""
    line = line.strip()
    if not line or line.startswith(_COMMENT):
        return b"", b""
    brace = line.find(b"{")
    if brace < 0:
        head, _, value = line.replace(b"\t", b" ").partition(b" ")
        return head, value
    match = _LABELS.match(line, brace)
    if match is None:
        raise PageError(f"labels of {name} are malformed")
    return line[:brace].rstrip() + match.group()[:-1], line[match.end() :]


def _plain(block: _Block, family: Family) -> list[float]:
    """The values of the series that the family selects, in the page's order."""
    values = block.values
    if family.where is None and family.unless is None:
        return _numbers([values[row] for row, _ in block.layout.plain], family.largest)
    return _numbers([values[row] for row, labels in block.layout.plain if family.selects(labels)], family.largest)


def _numbers(texts: Sequence[bytes], largest: float) -> list[float]:
    """Finite numbers from 0 to ``largest``; what follows a number, a timestamp or an exemplar, is skipped."""
    try:
        values = list(map(float, texts))
    except ValueError:
        values = [_first_number(text) for text in texts]
    # The total is NaN when a value is. Python's numbers may have underscores, the format's may not.
    absurd = values and (math.isnan(sum(values)) or min(values) < 0.0 or max(values) > largest)
    if absurd or b"_" in b"".join(texts):
        raise _RejectedError
    return values


def _first_number(text: bytes) -> float:
    parts = text.split(None, 1)
    try:
        return float(parts[0])
    except (ValueError, IndexError):
        raise _RejectedError from None


def _combine(rule: Combine, values: Sequence[float]) -> float:
    if rule is Combine.LEAST:
        return min(values)
    total = values[0] if len(values) == 1 else math.fsum(values)
    return total / len(values) if rule is Combine.MEAN else total


def _histogram(block: _Block, largest: float) -> Histogram:
    """The histogram summed over its series. Raises ``_RejectedError`` when a part is missing or does not add up."""
    layout, values = block
    series = len(layout.counts)
    if not series or len(layout.sums) != series or not layout.bounds or layout.bounds[-1] != math.inf:
        raise _RejectedError
    numbers = _numbers([values[row] for rows in layout.buckets for row in rows], largest)
    if series == 1 and len(numbers) == len(layout.bounds):
        cumulative = numbers
    elif len(numbers) == series * len(layout.bounds) and all(len(rows) == series for rows in layout.buckets):
        cumulative = [math.fsum(numbers[start : start + series]) for start in range(0, len(numbers), series)]
    else:
        raise _RejectedError
    count = math.fsum(_numbers([values[row] for row in layout.counts], largest))
    if cumulative != sorted(cumulative) or cumulative[-1] != count:
        raise _RejectedError
    return Histogram(
        bounds_s=layout.bounds,
        cumulative=tuple(cumulative),
        sum_s=math.fsum(_numbers([values[row] for row in layout.sums], largest)),
    )
