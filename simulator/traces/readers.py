"""Trace files, read row by row: memory stays that of one line, and an error names file, line and field.

| format | rows | time |
|---|---|---|
| Azure (CSV) | `TIMESTAMP,ContextTokens,GeneratedTokens` | date and time of day |
| Mooncake (JSON lines) | `timestamp`, `input_length`, `output_length` (other keys are ignored) | milliseconds |
| Trimtab (JSON lines) | `arrival_s`, `service`, `prompt_tokens`, `output_tokens` | seconds |

Format and compression are told by content, not by name. Arrivals are seconds after the first row and must not go
back. Azure and Mooncake traces name no service: their requests get `service`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from simulator.traces.model import TraceError, TraceRequest

MAX_TOKENS = 10_000_000
_GZIP_MAGIC = b"\x1f\x8b"
_AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_UNNAMED = "trace"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """What a file may cost; beyond it, reading ends with an error."""

    max_rows: int = 5_000_000
    max_bytes: int = 4 * 1024**3
    """Uncompressed."""
    max_line_bytes: int = 4 * 1024**2


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """One row as read; `time_s` is on the file's own clock."""

    time_s: float
    service: str
    prompt_tokens: int
    output_tokens: int


class _BadRow(ValueError):
    """What is wrong with one row, without its place."""


_ParseRow = Callable[[str], _Row]


def read_trace(path: Path, *, service: str = _UNNAMED, limits: TraceLimits | None = None) -> Iterator[TraceRequest]:
    """The requests of a file, in order. Raises `TraceError`, at the latest when the bad row is reached."""
    limits = limits or TraceLimits()
    with _opened(path) as stream:
        lines = _lines(path, stream, limits)
        try:
            number, first = next(lines)
        except StopIteration:
            raise TraceError(f"{path}: the file is empty") from None
        parse, rest = _format_of(path, number, first, service, lines)
        yield from _requests(path, parse, rest, limits)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write Trimtab's format, gzip when the name ends in `.gz`; returns the number of rows."""
    count = 0
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        for request in requests:
            file.write(json.dumps(dataclasses.asdict(request), separators=(",", ":")) + "\n")
            count += 1
    return count


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GZIP_MAGIC))
            file.seek(0)
            if magic != _GZIP_MAGIC:
                yield file
                return
            with gzip.open(file) as unpacked:
                yield io.BufferedReader(unpacked)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _lines(path: Path, stream: BinaryIO, limits: TraceLimits) -> Iterator[tuple[int, str]]:
    """Non-empty lines with their numbers."""
    total = 0
    number = 0
    while True:
        try:
            raw = stream.readline(limits.max_line_bytes + 1)
        except (EOFError, zlib.error, OSError) as error:
            # Unpacking is ahead of reading: the lines of the last piece are lost with what came after them.
            raise TraceError(f"{path}: line {number + 1} or later: the gzip stream is broken: {error}") from None
        if not raw:
            return
        number += 1
        total += len(raw)
        if len(raw) > limits.max_line_bytes:
            raise TraceError(f"{path}: line {number} is longer than {limits.max_line_bytes} bytes")
        if total > limits.max_bytes:
            raise TraceError(f"{path}: line {number}: more than {limits.max_bytes} bytes; take a slice of the file")
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise TraceError(f"{path}: line {number} is not UTF-8 text") from None
        if text:
            yield number, text


def _format_of(
    path: Path, number: int, first: str, service: str, lines: Iterator[tuple[int, str]]
) -> tuple[_ParseRow, Iterator[tuple[int, str]]]:
    if first.startswith("{"):
        return (lambda text: _json_row(text, service)), _chain((number, first), lines)
    columns = [column.strip().strip('"') for column in first.split(",")]
    if all(column in columns for column in _AZURE_HEADER):
        positions = [columns.index(column) for column in _AZURE_HEADER]
        return (lambda text: _azure_row(text, positions, len(columns), service)), lines
    raise TraceError(
        f"{path}: line {number}: neither a JSON object nor a header with {', '.join(_AZURE_HEADER)}: {first[:60]!r}"
    )


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _requests(
    path: Path, parse: _ParseRow, lines: Iterator[tuple[int, str]], limits: TraceLimits
) -> Iterator[TraceRequest]:
    start_s: float | None = None
    last_s = -math.inf
    for count, (number, text) in enumerate(lines, start=1):
        if count > limits.max_rows:
            raise TraceError(f"{path}: line {number}: more than {limits.max_rows} rows; take a slice of the file")
        try:
            row = parse(text)
        except _BadRow as error:
            raise TraceError(f"{path}: line {number}: {error}") from None
        if row.time_s < last_s:
            raise TraceError(
                f"{path}: line {number}: arrives {last_s - row.time_s:.3f} s before the row above; sort it"
            )
        last_s = row.time_s
        if start_s is None:
            start_s = row.time_s
        yield TraceRequest(row.time_s - start_s, row.service, row.prompt_tokens, row.output_tokens)
    if start_s is None:
        raise TraceError(f"{path}: the file has a header and no rows")


def _azure_row(text: str, positions: list[int], columns: int, service: str) -> _Row:
    cells = text.split(",")
    if len(cells) != columns:
        raise _BadRow(f"{len(cells)} columns where the header has {columns}")
    stamp, prompt, output = (cells[position].strip().strip('"') for position in positions)
    try:
        moment = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        raise _BadRow(f"TIMESTAMP {stamp[:40]!r} is no date and time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return _Row(
        moment.timestamp(),
        service,
        _tokens("ContextTokens", _number(prompt)),
        _tokens("GeneratedTokens", _number(output)),
    )


def _number(cell: str) -> object:
    try:
        return int(cell)
    except ValueError:
        return cell


def _json_row(text: str, service: str) -> _Row:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadRow(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _BadRow("not a JSON object")
    if "arrival_s" in row:
        named = row.get("service")
        if not isinstance(named, str) or not named:
            raise _BadRow(f"service must be a name, not {named!r}")
        return _Row(
            _seconds("arrival_s", row["arrival_s"]),
            named,
            _tokens("prompt_tokens", row.get("prompt_tokens")),
            _tokens("output_tokens", row.get("output_tokens")),
        )
    if "timestamp" not in row:
        raise _BadRow("has neither timestamp (Mooncake) nor arrival_s (Trimtab)")
    return _Row(
        _seconds("timestamp", row["timestamp"]) / 1000.0,
        service,
        _tokens("input_length", row.get("input_length")),
        _tokens("output_length", row.get("output_length")),
    )


def _seconds(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise _BadRow(f"{field} must be a finite number ≥ 0, not {value!r}")
    return float(value)


def _tokens(field: str, value: object) -> int:
    if value is None:
        raise _BadRow(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise _BadRow(f"{field} must be a whole number from 1 to {MAX_TOKENS}, not {value!r}")
    return value
