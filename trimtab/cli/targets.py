"""`trimtab targets`: what is scraped, in which state, and what went wrong last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from trimtab.api.collector.v1 import collector_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.output import ONE_LINE_COLUMNS, console, print_json
from trimtab.views.targets import TargetRow, target_row
from trimtab.views.text import MISSING, message_dicts


async def fetch_targets(services: Services, service: str = "") -> list[collector_pb2.Target]:
    """Every target, page by page."""
    return await every_item(
        lambda token: services.collector.ListTargets(
            collector_pb2.ListTargetsRequest(service=service, page_size=PAGE_SIZE, page_token=token)
        ),
        lambda page: page.targets,
    )


def targets_command(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="[SERVICE]")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """The scrape targets, with the state of each and what went wrong last."""
    targets = call(endpoints_of(context), lambda services: fetch_targets(services, service))
    if as_json:
        print_json(message_dicts(targets))
    else:
        console.print(table_of(map(target_row, targets), width=console.width))


def table_of(rows: Iterable[TargetRow], *, width: int) -> Table:
    """One row for each target; on narrow terminals its health first, and its place below."""
    if width < ONE_LINE_COLUMNS:
        return _narrow(rows)
    table = Table(box=None, pad_edge=False)
    for title in ("target", "service", "role", "address", "source", "counted", "state", "last scrape"):
        table.add_column(title, no_wrap=True)
    table.add_column("last error", ratio=1)
    for row in rows:
        where = (row.target_id, row.service, row.role, row.address, row.source)
        table.add_row(*where, _counted(row), _state(row), row.last_success, row.last_error)
    return table


def _narrow(rows: Iterable[TargetRow]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("target", ratio=1, overflow="fold")
    for title in ("state", "counted", "last scrape"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        where = ", ".join(part for part in (row.service, row.role, row.address, row.source) if part)
        lines = [row.target_id, f"  {where}", *([f"  {row.last_error}"] if row.last_error else [])]
        table.add_row(Text("\n".join(lines)), _state(row), _counted(row), row.last_success)
    return table


def _counted(row: TargetRow) -> str:
    return "yes" if row.counted else MISSING


def _state(row: TargetRow) -> Text:
    return Text(row.state, style="green" if row.fine else "red")
