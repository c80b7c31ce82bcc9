"""`trimtab targets`: what is scraped, in which state, and what went wrong last."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.output import MISSING, ONE_LINE_COLUMNS, console, message_dicts, print_json, short_name, time_text

# A server that is new or asleep is as it should be.
_FINE = (
    collector_pb2.TARGET_STATE_UP,
    collector_pb2.TARGET_STATE_ASLEEP,
    collector_pb2.TARGET_STATE_PENDING,
)


async def fetch_targets(services: Services, service: str = "") -> list[collector_pb2.Target]:
    """Every target, page by page."""
    return await every_item(
        lambda token: services.collector.ListTargets(
            collector_pb2.ListTargetsRequest(service=service, page_size=PAGE_SIZE, page_token=token)
        ),
        lambda page: page.targets,
    )


def failing(targets: Iterable[collector_pb2.Target], starting: Collection[str] = ()) -> list[collector_pb2.Target]:
    """Those that need somebody's attention; a server that is `starting` does not answer yet, as it should be."""
    return [target for target in targets if target.state not in _FINE and not _not_up_yet(target, starting)]


def _not_up_yet(target: collector_pb2.Target, starting: Collection[str]) -> bool:
    return target.state == collector_pb2.TARGET_STATE_DOWN and target.replica in starting


def describe_target(target: collector_pb2.Target) -> str:
    """One line: which and why."""
    state = short_name(collector_pb2.TargetState.Name(target.state), "TARGET_STATE_")
    return f"{target.target_id} ({target.service or 'no service'}, {target.address}) is {state}: {target.last_error}"


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
        console.print(table_of(targets, width=console.width))


def table_of(targets: Iterable[collector_pb2.Target], *, width: int) -> Table:
    """A row each; where narrow, what tells whether it is well first, and below it where it is."""
    if width < ONE_LINE_COLUMNS:
        return _narrow(targets)
    table = Table(box=None, pad_edge=False)
    for title in ("target", "service", "role", "address", "source", "counted", "state", "last scrape"):
        table.add_column(title, no_wrap=True)
    table.add_column("last error", ratio=1)
    for target in targets:
        table.add_row(
            target.target_id,
            target.service,
            short_name(types_pb2.Role.Name(target.role), "ROLE_"),
            target.address,
            target.source,
            "yes" if target.counted else MISSING,
            _state(target),
            time_text(target.last_success_time),
            target.last_error,
        )
    return table


def _narrow(targets: Iterable[collector_pb2.Target]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("target", ratio=1, overflow="fold")
    for title in ("state", "counted", "last scrape"):
        table.add_column(title, no_wrap=True)
    for target in targets:
        role = short_name(types_pb2.Role.Name(target.role), "ROLE_")
        where = ", ".join(part for part in (target.service, role, target.address, target.source) if part)
        lines = [target.target_id, f"  {where}", *([f"  {target.last_error}"] if target.last_error else [])]
        counted = "yes" if target.counted else MISSING
        table.add_row(Text("\n".join(lines)), _state(target), counted, time_text(target.last_success_time))
    return table


def _state(target: collector_pb2.Target) -> Text:
    name = short_name(collector_pb2.TargetState.Name(target.state), "TARGET_STATE_")
    return Text(name, style="green" if target.state in _FINE else "red")
