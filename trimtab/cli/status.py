"""`trimtab status` and the live view: services with Z and TPS, replicas by state, the pool's GPUs, decisions."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from trimtab.api.policy.v1 import policy_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item, explain, open_services
from trimtab.cli.endpoints import Endpoints, endpoints_of
from trimtab.cli.output import console, print_json
from trimtab.cli.records import table_of
from trimtab.cli.targets import fetch_targets
from trimtab.cli_errors import CommandError
from trimtab.rpc.errors import describe
from trimtab.views.decisions import pre_warmings
from trimtab.views.memory_waits import waiting_for_memory
from trimtab.views.status import (
    LAST_DECISIONS,
    NO_LEADER,
    Answers,
    Figure,
    PoolView,
    RoleRow,
    ServiceRow,
    StatusView,
    status_document,
    status_view,
)
from trimtab.views.targets import failing
from trimtab.views.text import MISSING, UNSURE

REFRESH_S = 0.5
SVG_WIDTH = 160
# Narrower terminals get only the columns that show whether a service is healthy.
WIDE_COLUMNS = 130
# And only wider ones the reason why a value is less than ok.
WORDS_COLUMNS = 160
_REGION_STYLES = {"critical": "bold red", "nominal": "green", "surplus": "cyan"}
# A colour per service, the same in the GPU map and in the table.
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


async def fetch_answers(services: Services) -> Answers:
    """Reads status and the newest decisions; never raises for a service that does not answer."""
    try:
        status = await services.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=2.0)
        listing = await services.policy.ListDecisions(
            policy_pb2.ListDecisionsRequest(page_size=LAST_DECISIONS), timeout=2.0
        )
    except grpc.aio.AioRpcError as error:
        return Answers(status=None, decisions=(), error=f"policy engine: {explain(error)}")
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
    return Answers(
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
    """The actuator's replicas, none when it does not answer; and whether the fleet is fixed, run by another program."""
    try:
        reply = await services.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(page_size=1000), timeout=2.0)
    except grpc.aio.AioRpcError:
        return [], False
    return reply.replicas, reply.fixed


async def fetch_pre_warmings(services: Services, subject: str = "") -> Sequence[actuator_pb2.Operation]:
    """Those among the actuator's newest operations; none when it does not answer."""
    try:
        reply = await services.actuator.ListOperations(
            actuator_pb2.ListOperationsRequest(page_size=PAGE_SIZE), timeout=2.0
        )
    except grpc.aio.AioRpcError:
        return []
    return pre_warmings(reply.operations, subject)


async def _all_pools(services: Services) -> Sequence[policy_pb2.Pool] | None:
    """The pools as they are stored; None when the policy engine does not answer."""
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
    answers: Answers, *, progress: Progress | None = None, events: Sequence[str] = (), width: int | None = None
) -> RenderableType:
    """The whole view, for a terminal of `width` columns (default: this one)."""
    width = console.width if width is None else width
    parts: list[RenderableType] = []
    if progress is not None:
        parts.append(_progress(progress))
    if answers.status is None:
        parts.append(Panel(Text(answers.error, style="red"), title="no status", border_style="red"))
    else:
        parts.extend(_panels(status_view(answers, answers.status), width))
    if events:
        parts.append(Panel(Text("\n".join(events)), title="processes", title_align="left", border_style="yellow"))
    return Group(*parts)


def _panels(view: StatusView, width: int) -> Iterator[RenderableType]:
    colours = service_colours(item.service for item in view.services)
    if not view.leader:
        yield Text(NO_LEADER, style="bold red")
    notices = (Text(line, style="yellow") for line in view.notices)
    yield Panel(Group(*_services(view.services, colours, width), *notices), title="services", title_align="left")
    if view.pools:
        yield Panel(Group(*_pools(view.pools, colours)), title="pools", title_align="left")
    if view.unreachable:
        yield Text(f"unreachable clusters: {view.unreachable}", style="bold red")
    yield Panel(table_of(view.decisions, width=width), title="decisions", title_align="left")
    if view.problems:
        text = Text("\n".join(view.problems))
        yield Panel(text, title="targets", title_align="left", border_style="red")


def service_colours(services: Iterable[str]) -> dict[str, str]:
    """A colour for each service, stable while the set of services is."""
    return {name: _SERVICE_COLOURS[position % len(_SERVICE_COLOURS)] for position, name in enumerate(sorted(services))}


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


def _services(services: Sequence[ServiceRow], colours: Mapping[str, str], width: int) -> list[RenderableType]:
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
    for service in services:
        for position, role in enumerate(service.roles):
            first = position == 0
            name = Text(service.service, style=colours[service.service]) if first else Text()
            z = _z_text(service) if first else Text()
            held = [service.held] if first else []
            shown = (role.decode_tps, role.waiting, role.ttft_p95, role.tpot_p95)
            beside = (role.prefill_tps, role.running, *held) if wide else ()
            marked = marked or (brief and any(figure.unsure for figure in (*shown, *beside)))
            table.add_row(name, role.role, z, *_cells(role, held, wide=wide, brief=brief))
    return (
        [table, Text(f"{UNSURE} of a part of its replicas, warming up, counted anew or stale", style="dim")]
        if marked
        else [table]
    )


def _cells(role: RoleRow, held: Sequence[Figure], *, wide: bool, brief: bool) -> list[str]:
    def text(figure: Figure) -> str:
        return figure.brief if brief else figure.text

    latencies = (text(role.ttft_p95), text(role.tpot_p95))
    if not wide:
        return [text(role.decode_tps), text(role.waiting), *latencies, role.routable]
    rates = (text(role.decode_tps), text(role.prefill_tps))
    first = text(held[0]) if held else ""
    return [*rates, text(role.running), text(role.waiting), first, *latencies, role.routable, role.replicas]


def _z_text(service: ServiceRow) -> Text:
    if service.z is None:
        return Text(MISSING)
    return Text(f"{service.z:.2f}", style=_REGION_STYLES.get(service.region, ""))


def _pools(pools: Sequence[PoolView], colours: Mapping[str, str]) -> Iterator[RenderableType]:
    for pool in pools:
        line = Text()
        line.append(f"{pool.pool}  ", style="bold")
        line.append(pool.given)
        if pool.operation_id:
            line.append(f"  transition {pool.operation_id}", style="yellow")
        if pool.holding:
            line.append(f"  {pool.holding}", style="yellow")
        yield line
        for warming in pool.warming:
            yield Text(warming, style="yellow")
        for node, gpus in pool.nodes:
            cells = Text(f"  {node}  ")
            for gpu in gpus:
                style = f"reverse {colours.get(gpu.service, 'white')}" if gpu.service else "dim"
                cells.append(f" {gpu.index}:{gpu.service or 'idle'} ", style=style)
                cells.append(" ")
            yield cells


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
            live.update(render(await fetch_answers(services), progress=progress(), events=events()))
            try:
                await asyncio.wait_for(until.wait(), REFRESH_S)
            except TimeoutError:
                continue


def status_command(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the view as a answers, too.")] = None,
) -> None:
    """Services with Z and TPS, replicas by state, the pools' GPUs, the last decisions."""
    endpoints = endpoints_of(context)
    if watch:
        asyncio.run(_watch(endpoints))
        return
    answers = call(endpoints, fetch_answers)
    if answers.status is None:
        raise CommandError(answers.error)
    if as_json:
        print_json(status_document(answers, answers.status))
    else:
        console.print(render(answers))
    if svg is not None:
        _write_svg(render(answers, width=SVG_WIDTH), svg)


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
