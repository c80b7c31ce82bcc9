"""The local mode: which processes make up one stack, how each is started, and how it shows that it is ready."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc

from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.supervisor import ChildSpec
from trimtab.cli_errors import CommandError
from trimtab.rpc import healthcheck

CLUSTER = "local"
LOCK_NAME = "lock"
# The first start of a service on a busy machine; a stack that is not up by then fails and names what it waits for.
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LocalStack:
    """What one `trimtab up` runs.

    With `targets` (a Prometheus file_sd document) the fleet is those servers; else a simulated one, of the nodes of
    `topology` or else of the fleet's own `scenario` of that name.
    """

    addresses: LocalAddresses
    state_folder: Path
    scenario: str | None = None
    topology: Path | None = None
    targets: Path | None = None
    # Start-up and first sleep of the simulated servers are this much of what was measured; the rest is not scaled.
    bring_up_scale: float = 1.0
    stream_interval: int = 1
    log_level: str = "info"
    # Where the gateway reaches the actuator (host:port) and the store (URL), when a proxy is between them.
    gateway_actuator: str | None = None
    gateway_store: str | None = None

    @property
    def log_folder(self) -> Path:
        """Where the processes' output goes."""
        return self.state_folder / "logs"

    def store(self) -> ChildSpec:
        """The embedded Valkey; it starts first and stops last."""
        port = self.addresses.port("store")
        folder = str(self.state_folder / "store")
        return ChildSpec(
            name="store",
            argv=_module("trimtab.store.embedded", port=port, data_dir=folder),
            is_ready=lambda: _accepts(port),
        )

    def fleet(self) -> ChildSpec:
        """The simulated vLLM servers and their admin API."""
        return ChildSpec(
            name="fleet",
            argv=_module(
                "simulator.fleet",
                port=self.addresses.port("fleet"),
                server_port_base=self.addresses.port("servers"),
                scenario=self.scenario,
                topology=self.topology,
                state_file=self.state_folder / "fleet.json",
                stream_interval=self.stream_interval,
                bring_up_scale=self.bring_up_scale,
            ),
            is_ready=lambda: _answers(self.addresses.url("fleet") + "/healthz"),
        )

    def services(self) -> list[ChildSpec]:
        """The four services and the gateway, in the order in which they are listed everywhere."""
        actuators = f"{CLUSTER}={self.addresses.address('actuator')}"
        backend: dict[str, object] = (
            {"backend": "local", "fleet_url": self.addresses.url("fleet")}
            if self.targets is None
            else {"backend": "static", "targets_file": self.targets}
        )
        return [
            self._service("collector", "metrics_collector", actuators=actuators, targets_files=self.targets),
            self._service("policy", "policy_engine", actuators=actuators),
            self._service("prescheduler", "prescheduler", actuators=actuators),
            self._service("actuator", "actuator", cluster=CLUSTER, **backend),
            ChildSpec(
                name="gateway",
                argv=_module(
                    "gateway",
                    listen=self.addresses.address("gateway"),
                    metrics_listen=self.addresses.address("gateway-metrics"),
                    actuators=actuators if self.gateway_actuator is None else f"{CLUSTER}={self.gateway_actuator}",
                    registry=CLUSTER,
                    store_url=self.gateway_store or self.addresses.store_url,
                    collector=self.addresses.address("collector"),
                    name="gateway-0",
                ),
                is_ready=lambda: _answers(self.addresses.url("gateway") + "/healthz"),
            ),
        ]

    def _service(self, name: str, package: str, **flags: object) -> ChildSpec:
        address = self.addresses.address(name)
        return ChildSpec(
            name=name,
            argv=_module(
                package,
                listen=address,
                metrics_listen=self.addresses.address(f"{name}-metrics"),
                store_url=self.addresses.store_url,
                log_level=self.log_level,
                **flags,
            ),
            is_ready=lambda: _is_serving(address),
        )


def make_state_folders(folder: Path) -> None:
    """The folders that a stack's processes write to. Raises CommandError."""
    try:
        for part in (folder, folder / "logs", folder / "store"):
            part.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(folder, error) from None


def lock_folder(folder: Path) -> int:
    """Makes a folder and locks it; returns the lock's file descriptor. Raises CommandError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise not_writable(folder, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise CommandError(f"another stack runs in {folder}: stop it, or give --state-dir and --port-base") from None
    return lock


def not_writable(folder: Path, error: OSError) -> CommandError:
    """The error for a folder that cannot be written to."""
    return CommandError(
        f"cannot write to {error.filename or folder}: {error.strerror}; give another folder with --state-dir"
    )


def check_ports(addresses: LocalAddresses) -> None:
    """Raises CommandError naming the first port that something else listens on."""
    for name, port in addresses.single_ports().items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise CommandError(
                    f"port {port} ({name}) cannot be used: {error.strerror}; "
                    "stop what listens there or move the stack with --port-base"
                ) from None


def _module(module: str, **flags: object) -> Sequence[str]:
    """`python -m module --flag value …`; a flag whose value is None is left out."""
    argv = [sys.executable, "-m", module]
    for name, value in flags.items():
        if value is not None:
            argv += ["--" + name.replace("_", "-"), str(value)]
    return argv


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _answers(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as reply,
        ):
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _is_serving(address: str) -> bool:
    try:
        return await asyncio.to_thread(healthcheck.check, address, timeout_s=2.0) == "SERVING"
    except grpc.RpcError:
        return False


async def wait_until(condition: Callable[[], Awaitable[str]], *, timeout_s: float, poll_s: float = 0.25) -> None:
    """Wait until `condition` returns an empty string; until then it returns what is missing. Raises CommandError."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        missing = await condition()
        if not missing:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise CommandError(f"not ready after {timeout_s:.0f} s: {missing}")
        await asyncio.sleep(poll_s)
