"""Command line of the simulated fleet: parses flags, runs the event loop, ends cleanly on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import socket
from pathlib import Path
from typing import Annotated

import structlog
import typer
import uvloop
from aiohttp import web

from simulator.fleet.admin import make_admin_app
from simulator.fleet.fleet import Fleet, FleetSettings, write_whole
from simulator.fleet.model import DEFAULT_INVENTORY, ConflictError, FleetConfigError, load_inventory
from simulator.fleet.replica import Scales, bind
from simulator.profiles import ProfileError, load_profiles
from simulator.scenarios import Scenario, load_scenario
from trimtab import cli_errors

log = structlog.get_logger(__name__)


def run(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the admin API; 0 picks one.")] = 8090,
    server_port_base: Annotated[int, typer.Option(min=1, max=65535, help="First port for servers.")] = 8100,
    listen_host: Annotated[str, typer.Option(help="Address that everything binds.")] = "127.0.0.1",
    advertise_host: Annotated[str, typer.Option(help="Host in the replicas' addresses.")] = "",
    topology: Annotated[
        Path | None,
        typer.Option("--topology", "--nodes", help="Topology file; default: the scenario's, or 4 nodes of its own."),
    ] = None,
    scenario: Annotated[str, typer.Option(help="Bundled scenario: its nodes, and its resources at /scenario.")] = "",
    profiles: Annotated[Path | None, typer.Option(help="Folder of profiles beside the packaged ones.")] = None,
    state_file: Annotated[Path | None, typer.Option(help="Keeps the replicas over a restart.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the admin URL once it answers.")] = None,
    stream_interval: Annotated[int, typer.Option(min=1, max=1000, help="Tokens in one streamed chunk.")] = 1,
    time_scale: Annotated[float, typer.Option(min=0.01, max=10_000.0, help="Run this much faster.")] = 1.0,
    bring_up_scale: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the measured start-up and first-sleep times.")
    ] = 1.0,
) -> None:
    """Run many simulated vLLM servers behind an admin API. All scales are 1 by default: times are as measured."""
    settings = FleetSettings(
        listen_host=listen_host,
        advertise_host=advertise_host or _reachable(listen_host),
        server_port_base=server_port_base,
        scales=Scales(time=time_scale, bring_up=bring_up_scale),
        stream_interval=stream_interval,
        state_file=state_file,
    )
    try:
        chosen = load_scenario(scenario) if scenario else None
        nodes = chosen.topology if topology is None and chosen is not None else topology
        inventory = load_inventory(nodes) if nodes is not None else DEFAULT_INVENTORY
        known = load_profiles(profiles)
        uvloop.run(_serve(Fleet(inventory, known, settings), port, ready_file, chosen))
    except (FleetConfigError, ConflictError, ProfileError, OSError) as error:
        typer.echo(f"fleet: {error}", err=True)
        raise typer.Exit(1) from error


def _reachable(listen_host: str) -> str:
    """A host that clients can use: a wildcard address is none."""
    return socket.gethostname() if listen_host in ("0.0.0.0", "::") else listen_host


async def _serve(fleet: Fleet, port: int, ready_file: Path | None, scenario: Scenario | None) -> None:
    host = fleet.settings.listen_host
    try:
        sock = bind(host, port)
    except OSError as error:
        raise FleetConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    runner = web.AppRunner(make_admin_app(fleet, scenario), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        restored = fleet.restore()
        await web.SockSite(runner, sock).start()
        url = f"http://{fleet.settings.advertise_host}:{sock.getsockname()[1]}"
        scaled = {k: v for k, v in dataclasses.asdict(fleet.settings.scales).items() if v != 1.0}
        if scaled:
            log.warning("times are not as measured", **{f"{name}_scale": factor for name, factor in scaled.items()})
        log.info("ready", admin=url, nodes=len(fleet.nodes), restored=restored)
        if ready_file is not None:
            await asyncio.to_thread(write_whole, ready_file, f"{url}\n")
        await stop.wait()
        log.info("stopping")
    finally:
        await fleet.stop()
        await runner.cleanup()
        sock.close()
        if ready_file is not None:
            await asyncio.to_thread(ready_file.unlink, missing_ok=True)


def main() -> None:
    """Entry point; every flag has an environment variable, `TRIMTAB_FLEET_PORT` for `--port`."""
    app = typer.Typer(add_completion=False, context_settings={"auto_envvar_prefix": "TRIMTAB_FLEET"})
    app.command()(run)
    cli_errors.run(app, "simulator.fleet")
