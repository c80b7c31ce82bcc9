"""`trimtab status` and the live view: services with Z and TPS, replicas by state, the pool's GPUs, decisions."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item, explain, open_services
from trimtab.cli.endpoints import Endpoints, endpoints_of
from trimtab.cli.output import (
    MISSING,
    UNSURE,
    console,
    measurement_text,
    message_dict,
    message_dicts,
    print_json,
    short_name,
)
from trimtab.cli.records import is_finished, pre_warming_row, pre_warmings, table_of
from trimtab.cli.starting import WaitingForMemory, waiting_for_memory
from trimtab.cli.targets import describe_target, failing, fetch_targets
from trimtab.cli_errors import CommandError
from trimtab.rpc.errors import describe

REFRESH_S = 0.5
SVG_WIDTH = 160
# Narrower terminals get the columns that tell whether a service is well.
WIDE_COLUMNS = 130
# And only wider ones the reason why a value is less than ok.
WORDS_COLUMNS = 160
LAST_DECISIONS = 8
LAST_FAILING_TARGETS = 5
_REGION_STYLES = {
    policy_pb2.REGION_CRITICAL: "bold red",
    policy_pb2.REGION_NOMINAL: "green",
    policy_pb2.REGION_SURPLUS: "cyan",
}
_NO_LEADER = "this policy engine does not lead: another one does, or the store does not answer and nothing is decided"
# A colour per service, so that the GPU map and the table speak of the same thing.
_SERVICE_COLOURS = ("blue", "magenta", "yellow", "cyan", "green", "red")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a replay is."""

    label: str
    elapsed_s: float
    total_s: float
    sent: int
    finished: int
    lost: int


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What one refresh of the view shows; a part that could not be read is None and `error` says why."""

    status: policy_pb2.GetStatusResponse | None
    decisions: Sequence[decision_pb2.Decision]
    failing_targets: Sequence[collector_pb2.Target] = ()
    waiting: Sequence[WaitingForMemory] = ()
    warmed: Sequence[actuator_pb2.Operation] = ()
    """Pre-warmings, newest first."""
    error: str = ""


async def fetch_picture(services: Services) -> Picture:
    """Reads status and the newest decisions; never raises for a service that does not answer."""
    try:
        status = await services.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=2.0)
        listing = await services.policy.ListDecisions(
            policy_pb2.ListDecisionsRequest(page_size=LAST_DECISIONS), timeout=2.0
        )
    except grpc.aio.AioRpcError as error:
        return Picture(status=None, decisions=(), error=f"policy engine: {explain(error)}")
    complaint = ""
    ill: Sequence[collector_pb2.Target] = ()
    try:
        ill = failing(await fetch_targets(services))
    except grpc.aio.AioRpcError as error:
        complaint = f"collector: {describe(error)}"
    any_starting = _any_starting(status)
    replicas, fixed = await _replicas(services) if ill or any_starting else ([], False)
    if ill:
        starting = (item.replica for item in replicas if item.life_cycle == types_pb2.LIFE_CYCLE_STARTING)
        ill = failing(ill, frozenset(starting))
    return Picture(
        status=status,
        decisions=listing.decisions,
        failing_targets=ill,
        waiting=waiting_for_memory(replicas, await _all_pools(services) if any_starting else None, fixed=fixed),
        warmed=await fetch_pre_warmings(services) if status.pools else (),
        error=complaint,
    )


def _any_starting(status: policy_pb2.GetStatusResponse) -> bool:
    name = types_pb2.LifeCycle.Name(types_pb2.LIFE_CYCLE_STARTING)
    return any(role.replicas.get(name, 0) for service in status.services for role in service.roles)


async def _replicas(services: Services) -> tuple[Sequence[actuator_pb2.Replica], bool]:
    """What the actuator lists, nothing when it does not say; and whether somebody else runs the servers."""
    try:
        reply = await services.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(page_size=1000), timeout=2.0)
    except grpc.aio.AioRpcError:
        return [], False
    return reply.replicas, reply.fixed


async def fetch_pre_warmings(services: Services, subject: str = "") -> Sequence[actuator_pb2.Operation]:
    """Those among the actuator's newest operations; none when it does not say."""
    try:
        reply = await services.actuator.ListOperations(
            actuator_pb2.ListOperationsRequest(page_size=PAGE_SIZE), timeout=2.0
        )
    except grpc.aio.AioRpcError:
        return []
    return pre_warmings(reply.operations, subject)


async def _all_pools(services: Services) -> Sequence[policy_pb2.Pool] | None:
    """The pools as they are stored; None when the policy engine does not say."""
    try:
        return await every_item(
            lambda token: services.policy.ListPools(
                policy_pb2.ListPoolsRequest(page_size=PAGE_SIZE, page_token=token), timeout=2.0
            ),
            lambda page: page.pools,
        )
    except grpc.aio.AioRpcError:
        return None


def render(
    picture: Picture, *, progress: Progress | None = None, events: Sequence[str] = (), width: int | None = None
) -> RenderableType:
    """The whole view, for a terminal of `width` columns (default: this one)."""
    width = console.width if width is None else width
    parts: list[RenderableType] = []
    if progress is not None:
        parts.append(_progress(progress))
    if picture.status is None:
        parts.append(Panel(Text(picture.error, style="red"), title="no status", border_style="red"))
    else:
        colours = service_colours(picture.status)
        if not picture.status.leader:
            parts.append(Text(_NO_LEADER, style="bold red"))
        waiting = (Text(str(item), style="yellow") for item in picture.waiting)
        services = Group(*_services(picture.status, colours, width), *_holding(picture.status), *waiting)
        parts.append(Panel(services, title="services", title_align="left"))
        if picture.status.pools:
            parts.append(Panel(_pools(picture, picture.status, colours), title="pools", title_align="left"))
        unreachable = [cluster for cluster in picture.status.clusters if not cluster.reachable]
        if unreachable:
            text = "; ".join(f"{cluster.cluster}: {cluster.detail or 'no answer'}" for cluster in unreachable)
            parts.append(Text(f"unreachable clusters: {text}", style="bold red"))
        table = table_of(picture.decisions, picture.warmed, limit=LAST_DECISIONS, width=width)
        parts.append(Panel(table, title="decisions", title_align="left"))
        if picture.failing_targets or picture.error:
            parts.append(Panel(_failing(picture), title="targets", title_align="left", border_style="red"))
    if events:
        parts.append(Panel(Text("\n".join(events)), title="processes", title_align="left", border_style="yellow"))
    return Group(*parts)


def service_colours(status: policy_pb2.GetStatusResponse) -> dict[str, str]:
    """A colour for each service, stable while the set of services is."""
    names = sorted(service.service for service in status.services)
    return {name: _SERVICE_COLOURS[position % len(_SERVICE_COLOURS)] for position, name in enumerate(names)}


def _progress(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        Text(progress.label, style="bold"),
        ProgressBar(total=progress.total_s, completed=min(progress.elapsed_s, progress.total_s), width=40),
        f"{progress.elapsed_s:.0f} of {progress.total_s:.0f} s",
        f"sent {progress.sent}  finished {progress.finished}",
        Text(f"lost {progress.lost}", style="bold red" if progress.lost else "green"),
    )
    return grid


def _holding(status: policy_pb2.GetStatusResponse) -> list[Text]:
    """Why scaled services hold, a line each; a pooled one holds with its pool, which says so itself."""
    return [
        Text(f"{service.service}: {'paused' if service.paused else service.holding}", style="yellow")
        for service in status.services
        if service.paused or (service.holding and service.mode != policy_pb2.SERVICE_MODE_POOLED)
    ]


def _services(status: policy_pb2.GetStatusResponse, colours: dict[str, str], width: int) -> list[RenderableType]:
    """The table, and what its marks mean where it has any."""
    wide, brief = width >= WIDE_COLUMNS, width < WORDS_COLUMNS
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("service", overflow="fold")
    table.add_column("role", no_wrap=True)
    # In two lines, so that the numbers below and not their titles take the width.
    rates, latencies = ("decode\ntok/s", "prefill\ntok/s"), ("TTFT\np95", "TPOT\np95")
    numbers = ("Z", *rates, "running", "waiting", "held", *latencies, "routable")
    for title in numbers if wide else ("Z", rates[0], "waiting", *latencies, "routable"):
        table.add_column(title, justify="right", no_wrap=True)
    if wide:
        table.add_column("replicas", ratio=1)
    marked = False
    for service in status.services:
        for position, role in enumerate(service.roles):
            first = position == 0
            name = Text(service.service, style=colours[service.service]) if first else Text()
            cells = _cells(service, role, first, wide=wide, brief=brief)
            marked = marked or any(isinstance(cell, str) and cell.endswith(UNSURE) for cell in cells)
            table.add_row(name, short_name(types_pb2.Role.Name(role.role), "ROLE_"), *cells)
    return (
        [table, Text(f"{UNSURE} of a part of its replicas, warming up, counted anew or stale", style="dim")]
        if marked
        else [table]
    )


def _cells(
    service: policy_pb2.ServiceStatus, role: policy_pb2.RoleStatus, first: bool, *, wide: bool, brief: bool
) -> list[RenderableType]:
    z = _z_text(service) if first else Text()
    decode = measurement_text(role.decode_tps, digits=0, brief=brief)
    waiting = measurement_text(role.waiting, brief=brief)
    latencies = (
        measurement_text(role.ttft_p95_s, digits=2, unit=" s", brief=brief),
        measurement_text(role.tpot_p95_s, digits=3, unit=" s", brief=brief),
    )
    routable = f"{role.routable}/{role.desired}"
    if not wide:
        return [z, decode, waiting, *latencies, routable]
    held = measurement_text(service.held, digits=0, brief=brief) if first else ""
    prefill = measurement_text(role.prefill_tps, digits=0, brief=brief)
    running = measurement_text(role.running, brief=brief)
    return [z, decode, prefill, running, waiting, held, *latencies, routable, _replicas_text(role)]


def _z_text(service: policy_pb2.ServiceStatus) -> Text:
    if not service.HasField("z"):
        return Text(MISSING)
    return Text(f"{service.z:.2f}", style=_REGION_STYLES.get(service.region, ""))


def _replicas_text(role: policy_pb2.RoleStatus) -> str:
    return ", ".join(
        f"{count} {short_name(name, 'LIFE_CYCLE_')}" for name, count in sorted(role.replicas.items()) if count
    )


def _pools(picture: Picture, status: policy_pb2.GetStatusResponse, colours: dict[str, str]) -> RenderableType:
    rows: list[RenderableType] = []
    for pool in status.pools:
        line = Text()
        line.append(f"{pool.pool}  ", style="bold")
        line.append(f"{pool.awake_gpus} of {pool.budget_gpus} GPUs given")
        if pool.operation_id:
            line.append(f"  transition {pool.operation_id}", style="yellow")
        waiting = "paused" if pool.paused else pool.holding
        if waiting and (not pool.operation_id or pool.operation_id not in waiting):
            line.append(f"  {waiting}", style="yellow")
        rows.append(line)
        for operation in picture.warmed:
            if operation.subject == pool.pool and not is_finished(operation):
                row = pre_warming_row(operation)
                rows.append(Text(f"pre-warming {row.identity} since {row.time}: {row.reason}", style="yellow"))
        by_node: dict[str, Text] = {}
        for gpu in pool.gpus:
            cells = by_node.setdefault(gpu.node, Text(f"  {gpu.node}  "))
            style = f"reverse {colours.get(gpu.service, 'white')}" if gpu.service else "dim"
            cells.append(f" {gpu.index}:{gpu.service or 'idle'} ", style=style)
            cells.append(" ")
        rows.extend(by_node[node] for node in sorted(by_node))
    return Group(*rows)


def _failing(picture: Picture) -> Text:
    lines = [describe_target(target) for target in picture.failing_targets[:LAST_FAILING_TARGETS]]
    more = len(picture.failing_targets) - len(lines)
    if more > 0:
        lines.append(f"and {more} more: trimtab targets")
    return Text("\n".join([*lines, *([picture.error] if picture.error else [])]))


async def run_live(
    services: Services,
    *,
    until: asyncio.Event,
    progress: Callable[[], Progress | None] = lambda: None,
    events: Callable[[], Sequence[str]] = lambda: (),
) -> None:
    """Redraws until the event is set."""
    with Live(console=console, refresh_per_second=4, screen=False, transient=False) as live:
        while not until.is_set():
            live.update(render(await fetch_picture(services), progress=progress(), events=events()))
            try:
                await asyncio.wait_for(until.wait(), REFRESH_S)
            except TimeoutError:
                continue


def status_command(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the view as a picture, too.")] = None,
) -> None:
    """Services with Z and TPS, replicas by state, the pools' GPUs, the last decisions."""
    endpoints = endpoints_of(context)
    if watch:
        asyncio.run(_watch(endpoints))
        return
    picture = call(endpoints, fetch_picture)
    if picture.status is None:
        raise CommandError(picture.error)
    if as_json:
        print_json(
            message_dict(picture.status)
            | {
                "decisions": message_dicts(picture.decisions),
                "failing_targets": message_dicts(picture.failing_targets),
                "waiting_for_memory": [dataclasses.asdict(item) for item in picture.waiting],
                "pre_warmings": message_dicts(picture.warmed),
                "error": picture.error,
            }
        )
    else:
        console.print(render(picture))
    if svg is not None:
        _write_svg(render(picture, width=SVG_WIDTH), svg)


def _write_svg(view: RenderableType, path: Path) -> None:
    recorder = Console(record=True, width=SVG_WIDTH, file=io.StringIO())
    recorder.print(view)
    try:
        recorder.save_svg(str(path), title="trimtab status")
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


async def _watch(endpoints: Endpoints) -> None:
    async with open_services(endpoints) as services:
        await run_live(services, until=asyncio.Event())
