"""The rows of trace files: the content of each format's line, without its place in the file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Sequence

MAX_TOKENS = 10_000_000
_AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_HEADER = ("Timestamp", "Request tokens", "Response tokens")
KNOWN_FORMATS = (
    f"known are headers with {', '.join(_AZURE_HEADER)} (Azure) or {', '.join(_BURSTGPT_HEADER)} (BurstGPT), "
    "and JSON lines of Mooncake or Trimtab"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row as read; `time_s` is on the file's own clock."""

    time_s: float
    service: str
    prompt_tokens: int
    output_tokens: int


class BadRow(ValueError):
    """What is wrong with one row, without its place."""


ParseRow = Callable[[str], Row | None]
"""A line's row, or None where the line is no request that was served."""


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """How a file's lines are read."""

    parse: ParseRow
    first_is_header: bool


def format_of(first: str, service: str) -> Format | None:
    """The format that a file's first line shows, or None. `service` is for formats that name none.

    Raises BadRow for a header of a known format that has a column twice, since either could be meant.
    """
    if first.startswith("{"):
        return Format(lambda text: _json_row(text, service), first_is_header=False)
    columns = [column.strip().strip('"') for column in first.split(",")]
    for header, parse in ((_AZURE_HEADER, _azure_row), (_BURSTGPT_HEADER, _burstgpt_row)):
        if all(column in columns for column in header):
            twice = next((column for column in columns if column and columns.count(column) > 1), None)
            if twice is not None:
                raise BadRow(f"the header has {twice!r} {columns.count(twice)} times; keep the one that is meant")
            positions = [columns.index(column) for column in header]
            return Format(_csv_parser(parse, positions, len(columns), service), first_is_header=True)
    return None


def _csv_parser(
    parse: Callable[[Sequence[str], str], Row | None], positions: Sequence[int], columns: int, service: str
) -> ParseRow:
    def of_line(text: str) -> Row | None:
        cells = text.split(",")
        if len(cells) != columns:
            raise BadRow(f"{len(cells)} columns where the header has {columns}")
        return parse([cells[position].strip().strip('"') for position in positions], service)

    return of_line


def _azure_row(cells: Sequence[str], service: str) -> Row:
    stamp, prompt, output = cells
    try:
        moment = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        raise BadRow(f"TIMESTAMP {stamp[:40]!r} is no date and time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return Row(
        moment.timestamp(),
        service,
        _tokens("ContextTokens", _number(prompt)),
        _tokens("GeneratedTokens", _number(output)),
    )


def _burstgpt_row(cells: Sequence[str], service: str) -> Row | None:
    stamp, prompt, output = cells
    # BurstGPT marks requests that failed with no response tokens; the server's work on them is unknown.
    if output in {"0", "0.0"}:
        return None
    try:
        time_s: object = float(stamp)
    except ValueError:
        time_s = stamp[:40]
    return Row(
        _seconds("Timestamp", time_s),
        service,
        _tokens("Request tokens", _number(prompt)),
        _tokens("Response tokens", _number(output)),
    )


def _number(cell: str) -> object:
    try:
        return int(cell)
    except ValueError:
        return cell


def _json_row(text: str, service: str) -> Row:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    if "arrival_s" in row:
        named = row.get("service")
        if not isinstance(named, str) or not named:
            raise BadRow(f"service must be a name, not {named!r}")
        return Row(
            _seconds("arrival_s", row["arrival_s"]),
            named,
            _tokens("prompt_tokens", row.get("prompt_tokens")),
            _tokens("output_tokens", row.get("output_tokens")),
        )
    if "timestamp" not in row:
        raise BadRow("has neither timestamp (Mooncake) nor arrival_s (Trimtab)")
    return Row(
        _seconds("timestamp", row["timestamp"]) / 1000.0,
        service,
        _tokens("input_length", row.get("input_length")),
        _tokens("output_length", row.get("output_length")),
    )


def _seconds(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise BadRow(f"{field} must be a finite number ≥ 0, not {value!r}")
    return float(value)


def _tokens(field: str, value: object) -> int:
    if value is None:
        raise BadRow(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise BadRow(f"{field} must be a whole number from 1 to {MAX_TOKENS}, not {value!r}")
    return value
