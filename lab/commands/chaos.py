"""`trimtab chaos`: faults every few seconds against a live local stack under load, and what was lost."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import aiohttp
import grpc
import typer

from lab.chaos.access import Access
from lab.chaos.fault_proxy import FaultProxy, serve_fault_proxy
from lab.chaos.load import SERVICES
from lab.chaos.report import ChaosReport
from lab.chaos.run import ChaosOptions, run_chaos
from lab.chaos.slow_link import SlowLink
from lab.commands.demo_resources import expected_replicas
from lab.commands.fresh import fresh_folder
from simulator.replay.report import ReplayProgress
from simulator.scenarios import scenario_folder
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.local import CLUSTER, LocalStack, wait_until
from trimtab.cli.output import console
from trimtab.cli.resources import apply_resources, read_resources
from trimtab.cli.signals import stop_on_signals
from trimtab.cli.up import (
    DEFAULT_STATE_FOLDER,
    PortBaseOption,
    RunningStack,
    Stopped,
    apply_when_up,
    require_stack,
    running,
)
from trimtab.cli_errors import CommandError
from trimtab.config.resources import Resource, ServicePolicy
from trimtab.rpc.clients import channel
from trimtab.store.client import Store
from trimtab.store.registry import EndpointRegistry

BRING_UP_SCALE = 0.02
BRING_UP_TIMEOUT_S = 120.0
STREAM_INTERVAL = 4
APPLY_PATIENCE_S = 60.0
_PROGRESS_S = 10.0


def chaos_command(
    context: typer.Context,
    duration_s: Annotated[
        float, typer.Option("--duration", min=20, max=7200, help="Seconds of load and faults.")
    ] = 600.0,
    seed: Annotated[int, typer.Option("--seed", help="Of load and faults.")] = 1,
    port_base: PortBaseOption = None,
    state_folder: Annotated[Path, typer.Option("--state-dir", help="Logs and chaos.json.")] = DEFAULT_STATE_FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as one JSON document, nothing else.")] = False,
) -> None:
    """Kill, hang and break everything under load, and count what Trimtab lost; exit 1 when a bar is missed."""
    require_stack("chaos")
    base = endpoints_of(context).port_base if port_base is None else port_base
    console.quiet = as_json
    folder = state_folder / "chaos"
    path = folder / "chaos.json"
    addresses = LocalAddresses(port_base=base)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}
    with fresh_folder(folder, addresses, command="chaos"):
        try:
            report = asyncio.run(_chaos(ChaosOptions(duration_s=duration_s, seed=seed), addresses, folder))
        except Stopped:
            console.print("stopped", highlight=False)
            raise typer.Exit(130) from None
        document = report.to_json(machine=machine)
        path.write_text(json.dumps(document, indent=2) + "\n")
    for line in report.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for bar in report.bars:
        console.print(f"  {bar.name}: {bar.value:g} (asked for: {bar.bar:g}, {'met' if bar.ok else 'NOT met'})")
    console.print(f"counts: {path}; logs: {folder / 'logs'}", highlight=False, soft_wrap=True)
    if as_json:
        console.quiet = False
        print(json.dumps(document, indent=2))
    missed = [bar.name for bar in report.bars if not bar.ok]
    if missed:
        raise CommandError(f"missed: {', '.join(missed)}; see {path}")


async def _chaos(options: ChaosOptions, addresses: LocalAddresses, folder: Path) -> ChaosReport:
    stop = stop_on_signals()
    actuator = channel(addresses.address("actuator"))
    store = Store(addresses.store_url)
    fault_proxy = FaultProxy(actuator_pb2_grpc.ActuatorServiceStub(actuator), EndpointRegistry(store, CLUSTER))
    server, gateway_actuator = await serve_fault_proxy(fault_proxy)
    line = SlowLink("127.0.0.1", addresses.port("store"), delay_s=lambda: fault_proxy.delay_s)
    await line.start()
    stack = LocalStack(
        addresses=addresses,
        state_folder=folder,
        scenario="chaos",
        bring_up_scale=BRING_UP_SCALE,
        stream_interval=STREAM_INTERVAL,
        gateway_actuator=gateway_actuator,
        gateway_store=f"redis://{line.address}/0",
    )
    resources = read_resources([scenario_folder("chaos") / "resources"])
    console.print(f"starting; logs in {stack.log_folder}", highlight=False)
    try:
        async with running(stack, stop=stop, locked=True) as up, aiohttp.ClientSession() as http:
            await apply_when_up(up.services, resources)
            await _bring_up(up, resources, stop)
            console.print(f"{options.duration_s:g} s of load and faults, seed {options.seed}", highlight=False)
            report = await run_chaos(
                _access(up, http),
                fault_proxy,
                options,
                set_floors=lambda floors: _set_floors(up, resources, floors),
                restarts=lambda: {name: count for name, count in up.supervisor.restarts.items() if count},
                on_progress=_Progress().say,
                stopping=stop,
            )
    finally:
        await fault_proxy.close()
        await line.close()
        await store.close()
        await server.stop(0.5)
        await actuator.close()
    if stop.is_set():
        raise Stopped
    return report


def _access(up: RunningStack, http: aiohttp.ClientSession) -> Access:
    return Access(
        stubs=up.services,
        processes=up.supervisor,
        http=http,
        fleet_url=up.stack.addresses.url("fleet"),
        gateway_url=up.stack.addresses.url("gateway"),
        gateway_log=up.supervisor.log_path("gateway"),
    )


async def _bring_up(up: RunningStack, resources: list[Resource], stop: asyncio.Event) -> None:
    """Every server there, each asleep or serving, and as many routable as the pool starts with."""
    expected = {service: count for (service, _), count in expected_replicas(resources).items()}

    async def missing() -> str:
        if stop.is_set():
            raise Stopped
        try:
            reply = await up.services.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(), timeout=2.0)
            busy = await up.services.actuator.ListOperations(
                actuator_pb2.ListOperationsRequest(unfinished_only=True), timeout=2.0
            )
        except grpc.aio.AioRpcError as error:
            return error.details() or str(error.code())
        routable = dict.fromkeys(SERVICES, 0)
        for replica in reply.replicas:
            routable[replica.service] += replica.routable
        short = [f"{routable[name]} of {count} {name}" for name, count in expected.items() if routable[name] < count]
        return ", ".join(short) or ("the pool is being laid out" if busy.operations else "")

    await wait_until(missing, timeout_s=BRING_UP_TIMEOUT_S)


async def _set_floors(up: RunningStack, resources: list[Resource], floors: Mapping[str, int]) -> None:
    """Apply the policies with these floors, those that fall first, again while the engine is away."""
    changed = [_with_floor(one, floors[one.name]) for one in resources if isinstance(one, ServicePolicy)]
    ordered = sorted(changed, key=lambda policy: policy.spec.roles[0].min_replicas)
    give_up_s = time.monotonic() + APPLY_PATIENCE_S
    while True:
        try:
            await apply_resources(up.services, ordered)
        except grpc.aio.AioRpcError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.3)
        else:
            return


def _with_floor(policy: ServicePolicy, floor: int) -> ServicePolicy:
    roles = tuple(role.model_copy(update={"min_replicas": floor}) for role in policy.spec.roles)
    return policy.model_copy(update={"spec": policy.spec.model_copy(update={"roles": roles})})


class _Progress:
    """A line every ten seconds."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def say(self, progress: ReplayProgress) -> None:
        """Print the progress of the load, when it is time."""
        if progress.elapsed_s - self._said_s >= _PROGRESS_S:
            self._said_s = progress.elapsed_s
            console.print(
                f"{progress.elapsed_s:.0f} s: sent {progress.sent}, finished {progress.finished}, lost {progress.lost}",
                highlight=False,
            )
