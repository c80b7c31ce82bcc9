"""Trace files, read row by row: memory stays that of one line, and an error names file, line and field.

| format | rows | time |
|---|---|---|
| Azure (CSV) | `TIMESTAMP,ContextTokens,GeneratedTokens` | date and time of day |
| BurstGPT (CSV) | `Timestamp`, `Request tokens`, `Response tokens` (others are ignored) | seconds |
| Mooncake (JSON lines) | `timestamp`, `input_length`, `output_length` (other keys are ignored) | milliseconds |
| Trimtab (JSON lines) | `arrival_s`, `service`, `prompt_tokens`, `output_tokens` | seconds |

Format and compression are recognised by content, not by name. Arrivals are seconds after the first row and must not go
back. Only Trimtab's own rows name a service: other requests get `service`. ServeGen publishes clients rather than
requests: `servegen_files` reads those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from simulator.traces.formats import KNOWN_FORMATS, BadRow, ParseRow, format_of
from simulator.traces.model import TraceError, TraceRequest

_GZIP_MAGIC = b"\x1f\x8b"
_UNNAMED = "trace"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """What a file may cost; beyond it, reading ends with an error."""

    max_rows: int = 5_000_000
    max_bytes: int = 4 * 1024**3
    """Uncompressed."""
    max_line_bytes: int = 4 * 1024**2


def read_trace(path: Path, *, service: str = _UNNAMED, limits: TraceLimits | None = None) -> Iterator[TraceRequest]:
    """The requests of a file, in order. Raises `TraceError`, at the latest when the bad row is reached."""
    limits = limits or TraceLimits()
    with _opened(path) as stream:
        lines = _lines(path, stream, limits)
        try:
            number, first = next(lines)
        except StopIteration:
            raise TraceError(f"{path}: the file is empty") from None
        try:
            chosen = format_of(first, service)
        except BadRow as error:
            raise TraceError(f"{path}: line {number}: {error}") from None
        if chosen is None:
            raise TraceError(
                f"{path}: line {number}: neither a JSON object nor a header that is known: {first[:60]!r}; "
                f"{KNOWN_FORMATS}"
            )
        rest = lines if chosen.first_is_header else itertools.chain([(number, first)], lines)
        yield from _requests(path, chosen.parse, rest, limits)


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


def _requests(
    path: Path, parse: ParseRow, lines: Iterator[tuple[int, str]], limits: TraceLimits
) -> Iterator[TraceRequest]:
    start_s: float | None = None
    last_s = -math.inf
    for count, (number, text) in enumerate(lines, start=1):
        if count > limits.max_rows:
            raise TraceError(f"{path}: line {number}: more than {limits.max_rows} rows; take a slice of the file")
        try:
            row = parse(text)
        except BadRow as error:
            raise TraceError(f"{path}: line {number}: {error}") from None
        if row is None:
            continue
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
