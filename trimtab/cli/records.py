"""Decisions and pre-warmings as a table of the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from trimtab.cli.output import ONE_LINE_COLUMNS
from trimtab.views.decisions import DecisionRow

_STYLES = {
    "succeeded": "green",
    "pending": "yellow",
    "running": "yellow",
    "rolling-back": "yellow",
    "failed": "red",
    "rolled-back": "red",
    "denied": "red",
}


def table_of(rows: Iterable[DecisionRow], *, width: int) -> Table:
    """When, what, why and what came of it. Where narrow, the reason stands below."""
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("time", no_wrap=True)
    if width < ONE_LINE_COLUMNS:
        table.add_column("decision, subject, rule, outcome and reason", ratio=1)
        for row in rows:
            head = f"{row.identity}  {row.subject}  {row.rule}  "
            table.add_row(row.time, Text.assemble(head, _outcome(row), f"\n{row.reason}"))
        return table
    for title in ("decision", "subject", "rule"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", ratio=1)
    table.add_column("outcome", no_wrap=True)
    for row in rows:
        table.add_row(row.time, row.identity, row.subject, row.rule, Text(row.reason), _outcome(row))
    return table


def _outcome(row: DecisionRow) -> Text:
    return Text(row.outcome, style=_STYLES.get(row.outcome, "dim"))
