"""The layout of a page: worked out once, so that reading the next page of that layout costs its values only.

A page is cut at its ``# TYPE`` lines, and only the blocks of families that the dialect names are looked into. A layout
keeps the beginnings of all blocks, and of every line in the blocks that are needed what stands before its value. If a
page agrees in all of that, its lines mean the same, and its values are cut out; else it is worked out anew.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import eq, getitem, itemgetter
from typing import NamedTuple, cast

from metrics_collector.core.parser.plan import Series, plan_of
from metrics_collector.core.parser.row import Plan
from trimtab.domain.dialects.model import HISTOGRAM_SUFFIXES, Dialect, Kind, counter_spellings

MAX_LINES_PER_FAMILY = 5_000
MAX_LINE_BYTES = 64 * 1024

_SAMPLE = re.compile(
    rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)"
    rb'(?:[ \t]*(\{[ \t]*(?:[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"(?:[^"\\]|\\.)*+"[ \t]*(?:,[ \t]*|(?=\})))*\}))?'
    rb"[ \t]*"
)
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"')
_ESCAPES = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_ESCAPE = re.compile(rb'\\[\\"n]')
_NAME_END = re.compile(rb"[{ \t]")
_TYPE_NAME = re.compile(rb"[^ \t\r\n]*[ \t\r\n]?")
_NEEDED_SUFFIXES = ("_total", "_sum", "_count", "_bucket")
# ``operator.getitem`` for bytes and a slice of them; its own type knows numbers only.
_slice = cast("Callable[[bytes, slice], bytes]", getitem)
_NOTHING = slice(0, 0)
_ALL = slice(None)


class PageError(Exception):
    """The page as a whole is refused; the message is one line for people."""


class Vocabulary:
    """A dialect's names as pages may write them: with ``_`` for ``:``, a counter with or without ``_total``."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.samples: dict[bytes, str] = {}
        for family in dialect.families:
            suffixes = HISTOGRAM_SUFFIXES if family.kind is Kind.HISTOGRAM else ("",)
            for name in family.names:
                for sample in [name + suffix for suffix in suffixes] + counter_spellings(name, family.kind):
                    self.samples.update(dict.fromkeys(_spellings(sample), sample))
        self.types = frozenset(
            spelling.removesuffix(suffix.encode()) for spelling in self.samples for suffix in ("", *_NEEDED_SUFFIXES)
        )
        self.marks = frozenset(
            spelling.removesuffix(suffix)
            for mark in dialect.marks
            for spelling in _spellings(mark)
            for suffix in (b"", b"_total")
        )


def _spellings(name: str) -> tuple[bytes, ...]:
    return (name.encode(), name.replace(":", "_").encode())


class _Row(NamedTuple):
    """A line in a needed block. ``cut`` takes from it what must be equal on another page of the same layout."""

    head: bytes
    cut: slice
    sample: str | None = None
    labels: Mapping[str, str] | None = None
    bare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A page without its values. Rows are the lines of the needed blocks, one block after another."""

    dialect: str
    block_heads: tuple[bytes, ...]
    block_cuts: tuple[slice, ...]
    needed: tuple[int, ...]
    row_heads: list[bytes]
    row_cuts: tuple[slice, ...]
    bare_rows: tuple[int, ...]
    most_bytes: int
    pick: "Callable[[Sequence[bytes]], tuple[bytes, ...]]"
    value_cuts: tuple[slice, ...]
    plan: Plan

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return 1_000 + sum(map(len, self.row_heads)) + 200 * len(self.row_heads) + 120 * len(self.block_heads)

    def texts(self, blocks: Sequence[bytes]) -> list[bytes] | None:
        """The values on a page cut into ``blocks``, in the plan's order; None when its layout is another one."""
        if len(blocks) != len(self.block_heads) or not all(
            map(eq, map(_slice, blocks, self.block_cuts), self.block_heads)
        ):
            return None
        text = b"\n".join([blocks[number] for number in self.needed])
        if len(text) > self.most_bytes:
            return None
        rows = text.split(b"\n")
        # Equal lists have equal lengths; map stops at the shorter one, so the rows are counted too.
        if len(rows) != len(self.row_heads) or list(map(_slice, rows, self.row_cuts)) != self.row_heads:
            return None
        # ``name {…} 1`` begins like ``name 1``.
        for row in self.bare_rows:
            if rows[row][len(self.row_heads[row]) :].lstrip().startswith(b"{"):
                return None
        return self.values(rows)

    def values(self, rows: Sequence[bytes]) -> list[bytes]:
        """The values of rows that are known to be of this layout."""
        return list(map(_slice, self.pick(rows), self.value_cuts))


class Learnt(NamedTuple):
    """A page's layout and its rows. ``key`` is the same for layouts that are; None when it is good for one page."""

    layout: Layout
    rows: list[bytes]
    key: bytes | None


def learn(vocabularies: Sequence[Vocabulary], blocks: Sequence[bytes], known: Mapping[bytes, Layout]) -> Learnt:
    """The layout of a page: one of ``known`` by their keys, or a new one. Raises ``PageError``.

    A page goes by the first vocabulary that has a mark on it. A page on which none of the needed families has a
    ``# TYPE`` line is read line by line; then the layout is good for this page only.
    """
    heads = tuple(_type_head(block) for block in blocks[1:])
    names = [head.rstrip() for head in heads]
    vocabulary = _vocabulary(vocabularies, set(names))
    needed: list[int] = []
    rows: list[bytes] = []
    if vocabulary is not None:
        for number, name in enumerate(names, 1):
            if name in vocabulary.types:
                needed.append(number)
        _check_families([names[number - 1] for number in needed])
        block_rows = [blocks[number].split(b"\n") for number in needed]
        for number, lines in zip(needed, block_rows, strict=True):
            _check_lines(names[number - 1], len(lines))
            rows += lines
        firsts = _first_rows(block_rows)
    else:
        vocabulary, rows = _by_line(vocabularies, blocks)
        firsts = set()
    parsed = [
        _Row(b"", _NOTHING) if number in firsts else _parse(row, vocabulary.samples) for number, row in enumerate(rows)
    ]
    key = _key(vocabulary.dialect, heads, parsed) if needed else None
    layout = None if key is None else known.get(key)
    if layout is None:
        layout = _layout(vocabulary.dialect, parsed, block_heads=(b"", *heads), needed=tuple(needed))
    return Learnt(layout, rows, key)


def _key(dialect: Dialect, block_heads: Sequence[bytes], rows: Sequence[_Row]) -> bytes:
    parts = [dialect.name.encode(), *block_heads, b"\n", *(row.head for row in rows)]
    # With their lengths, so that no two lists of parts run together into one text.
    text = b"".join([b"%d:%b" % (len(part), part) for part in parts])
    return hashlib.blake2b(text, digest_size=16).digest()


def _type_head(block: bytes) -> bytes:
    """The family's name at the beginning of a block, with the character after it."""
    match = _TYPE_NAME.match(block)
    return match.group() if match is not None else b""


def _vocabulary(vocabularies: Sequence[Vocabulary], names: set[bytes]) -> Vocabulary | None:
    return next((vocabulary for vocabulary in vocabularies if not vocabulary.marks.isdisjoint(names)), None)


def _first_rows(block_rows: Sequence[Sequence[bytes]]) -> set[int]:
    """The rows of ``# TYPE`` lines."""
    firsts: set[int] = set()
    row = 0
    for lines in block_rows:
        firsts.add(row)
        row += len(lines)
    return firsts


def _check_families(names: Sequence[bytes]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise PageError(f"family {_text(name)} stands twice on the page")


def _check_lines(name: bytes, lines: int) -> None:
    if lines > MAX_LINES_PER_FAMILY:
        raise PageError(f"family {_text(name)} has more than {MAX_LINES_PER_FAMILY} lines")


def _by_line(vocabularies: Sequence[Vocabulary], blocks: Sequence[bytes]) -> tuple[Vocabulary, list[bytes]]:
    """The vocabulary of a page without the needed ``# TYPE`` lines, and the lines of its samples."""
    lines = [line for block in blocks for line in block.split(b"\n")]
    named = [(_NAME_END.split(line.lstrip(b" \t"), maxsplit=1)[0], line) for line in lines]
    vocabulary = _vocabulary(vocabularies, {name for name, _ in named})
    if vocabulary is None:
        known = ", ".join(vocabulary.dialect.name for vocabulary in vocabularies)
        raise PageError(f"no series of {known} on the page (is the server run with its statistics off?)")
    rows = [line for name, line in named if name in vocabulary.samples]
    _check_lines(b"of the engine", len(rows) // 8)
    return vocabulary, rows


def _parse(line: bytes, samples: Mapping[bytes, str]) -> _Row:
    text = line.lstrip()
    if not text:
        return _Row(line, _ALL)
    if text.startswith(b"#"):
        end = line.index(b"#") + 1
        return _Row(line[:end], _cut(end))
    if len(line) > MAX_LINE_BYTES:
        raise PageError(f"a line of {_text(text)} has more than {MAX_LINE_BYTES} bytes")
    match = _SAMPLE.match(line)
    if match is None:
        raise PageError(f"a line is malformed: {_text(text)}")
    name, labels = match.groups()
    end = match.end()
    sample = samples.get(name)
    if sample is None:
        # It stays another sample for as long as its name and what ends it are the same.
        end = match.end(1) + 1
        return _Row(line[:end], _cut(end))
    if labels is None and (end == match.end(1) or line[end : end + 1] == b"{"):
        raise PageError(f"a sample of {sample} is malformed: {_text(text)}")
    return _Row(line[:end], _cut(end), sample, _labels(labels or b""), labels is None)


def _labels(text: bytes) -> dict[str, str]:
    return {
        label.decode(): _ESCAPE.sub(lambda match: _ESCAPES[match.group()], value).decode("utf-8", "replace")
        for label, value in _LABEL.findall(text)
    }


def _text(raw: bytes) -> str:
    """For messages: short, and on one line."""
    text = raw[:60].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@lru_cache(maxsize=4096)
def _cut(end: int) -> slice:
    """One object for all rows of one length."""
    return slice(0, end)


@lru_cache(maxsize=4096)
def _value_cut(start: int) -> slice:
    return slice(start, None)


def _layout(
    dialect: Dialect, rows: Sequence[_Row], *, block_heads: tuple[bytes, ...], needed: tuple[int, ...]
) -> Layout:
    series: dict[str, list[Series]] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for number, row in enumerate(rows):
        if row.sample is None or row.labels is None:
            continue
        key = (row.sample, frozenset(row.labels.items()))
        if key in seen:
            raise PageError(f"a series of {row.sample} stands twice on the page")
        seen.add(key)
        series.setdefault(row.sample, []).append(Series(number, row.labels))
    plan, places = plan_of(dialect, series)
    if not plan.sources and not plan.refused:
        raise PageError(f"no {dialect.name} series on the page (is the server run with its statistics off?)")
    heads = [row.head for row in rows]
    # Nothing that is behind the heads may make a line too long.
    most_bytes = sum(map(len, heads)) + len(heads) + MAX_LINE_BYTES - max(map(len, heads), default=0)
    # One more, so that ``itemgetter`` always gives a tuple; the cuts end before it.
    picked = (*places, 0, 0) if rows else ()
    return Layout(
        dialect=dialect.name,
        block_heads=block_heads,
        block_cuts=tuple(_cut(len(head)) for head in block_heads),
        needed=needed,
        row_heads=heads,
        row_cuts=tuple(row.cut for row in rows),
        bare_rows=tuple(number for number, row in enumerate(rows) if row.bare),
        most_bytes=most_bytes,
        pick=itemgetter(*picked),
        value_cuts=tuple(_value_cut(len(heads[place])) for place in places),
        plan=plan,
    )
