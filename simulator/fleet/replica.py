"""One replica of the fleet: waits for memory, starts up, serves, crashes, is started again, is deleted.

While it starts, its port is bound but not listened on, so clients are refused as by a real server that loads weights.
A replica whose GPUs have no room for it stays `starting` and tries again, like a container in a crash loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import socket
import time
from typing import Protocol

import structlog
from aiohttp import web

from simulator.core.memory import OutOfMemory
from simulator.core.profile import Profile
from simulator.core.sleep import SleepState
from simulator.fleet.model import ReplicaSpec
from simulator.server.app import make_app
from simulator.server.faults import Fault
from simulator.server.server import ServerSettings, ServerStats, SimulatedServer

log = structlog.get_logger(__name__)

_MEMORY_RETRY_S = 0.2
_RESTART_DELAY_S = 1.0
_MAX_RESTART_DELAY_S = 30.0
_CLOSE_TIMEOUT_S = 0.5
_STABLE_AFTER_S = 60.0


class ReplicaState(enum.StrEnum):
    """The admin API's view of a replica."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


@dataclasses.dataclass(frozen=True, slots=True)
class Scales:
    """How the fleet's times differ from the measured ones; at 1 and 1 they do not."""

    time: float = 1.0
    """Simulated seconds in one second of the wall clock, for everything."""
    bring_up: float = 1.0
    """Part of the measured start-up and first-sleep times; 0.1 makes them ten times shorter."""


class Host(Protocol):
    """What a replica needs of its fleet."""

    def claim(self, replica: Replica, gib_per_gpu: float) -> OutOfMemory | None:
        """Set the replica's memory on each of its GPUs."""

    def release(self, replica: Replica) -> None:
        """Give the replica's memory back."""

    def changed(self, replica: Replica) -> None:
        """Something the admin API shows has changed."""

    def retire(self, replica: Replica, stats: ServerStats) -> None:
        """A server of this replica has ended; keep its counters."""

    def peer(self, engine_id: str) -> SimulatedServer | None:
        """The running server of another replica."""


class Replica:
    """A replica and its task; also the surroundings of its server."""

    def __init__(
        self,
        spec: ReplicaSpec,
        profile: Profile,
        host: Host,
        sock: socket.socket,
        *,
        scales: Scales,
        stream_interval: int,
    ) -> None:
        self.spec = spec
        self.profile = profile
        self.state = ReplicaState.STARTING
        self.message = ""
        self.restarts = 0
        self.revision = 0
        self.start_time_s = time.time()
        self.port: int = sock.getsockname()[1]
        self.server: SimulatedServer | None = None
        self._host = host
        self._listen_host: str = sock.getsockname()[0]
        self._sock: socket.socket | None = sock
        self._scales = scales
        self._stream_interval = stream_interval
        self._crashed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to start up."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"replica {self.spec.replica}")

    async def stop(self) -> None:
        """End the replica: requests in flight end with `abort`, then the port is closed."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._sock is not None:
            self._sock.close()

    @property
    def sleep_state(self) -> SleepState:
        """The sleep state; awake while it starts."""
        return self.server.sleep_state if self.server is not None else SleepState()

    @property
    def host_memory_gib(self) -> float:
        """Weights that a level-1 sleep keeps in host memory."""
        state = self.sleep_state
        kept = state.level == 1 and bool(state.missing)
        return self.profile.memory.weights_gib * self.profile.tensor_parallel if kept else 0.0

    @property
    def awake(self) -> bool:
        """Whether it runs with all its memory."""
        return self.state is ReplicaState.RUNNING and not self.sleep_state.missing

    def claim_memory(self, state: SleepState) -> OutOfMemory | None:
        """Set the HBM that a sleep state needs."""
        if self.server is None:
            return None
        refused = self._host.claim(self, self.server.awake_memory_gib(state))
        self._host.changed(self)
        return refused

    def release_remote_kv(self, engine_id: str, request_id: str) -> None:
        """Notify the prefill server that its KV was fetched; when it is gone, so is the KV."""
        peer = self._host.peer(engine_id)
        if peer is not None:
            peer.release_kv(request_id)

    def has_remote_kv(self, engine_id: str, request_id: str) -> bool:
        """Whether the prefill server still holds this KV."""
        peer = self._host.peer(engine_id)
        return peer is not None and peer.holds_kv(request_id)

    async def _run(self) -> None:
        delay_s = _RESTART_DELAY_S
        while True:
            await self._start_up()
            running_since_s = time.monotonic()
            await self._serve()
            if time.monotonic() - running_since_s > _STABLE_AFTER_S:
                delay_s = _RESTART_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RESTART_DELAY_S)
            self.restarts += 1
            self.start_time_s = time.time()
            self._set_state(ReplicaState.STARTING, "restarting after a crash")

    async def _start_up(self) -> None:
        while True:
            refused = self._host.claim(self, self.profile.memory.awake_gib)
            if refused is None:
                break
            if self.message != str(refused):
                self._set_state(ReplicaState.STARTING, str(refused))
            await asyncio.sleep(_MEMORY_RETRY_S)
        self._set_state(ReplicaState.STARTING, "loading weights")
        start_up_s = self.profile.lifecycle.start_up_s * self._scales.bring_up / self._scales.time
        await asyncio.sleep(start_up_s)

    async def _serve(self) -> None:
        """Listen until the server crashes or the replica is stopped."""
        settings = ServerSettings(
            name=self.spec.replica,
            model_name=self.spec.model,
            profile=self.profile,
            stream_interval=self._stream_interval,
            time_scale=self._scales.time,
            bring_up_scale=self._scales.bring_up,
        )
        server = SimulatedServer(settings, self, process_start_s=self.start_time_s)
        self._crashed.clear()
        server.on_crash = self._crashed.set
        runner = web.AppRunner(
            make_app(server), handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S
        )
        await runner.setup()
        sock = self._sock if self._sock is not None else bind(self._listen_host, self.port)
        self._sock = None
        self.server = server
        try:
            await web.SockSite(runner, sock, backlog=1024).start()
            self._set_state(ReplicaState.RUNNING, "")
            await self._crashed.wait()
            _break_connections(runner)
            self._set_state(ReplicaState.EXITED, "crashed")
        finally:
            self.server = None
            server.driver.abort_all()
            await asyncio.shield(runner.cleanup())
            server.close()
            sock.close()
            self._host.retire(self, server.stats)
            self._host.release(self)

    def _set_state(self, state: ReplicaState, message: str) -> None:
        self.state = state
        self.message = message
        log.info("replica", replica=self.spec.replica, state=state.value, detail=message)
        self._host.changed(self)

    def set_fault(self, fault: Fault) -> bool:
        """Put a fault in place; False when no server runs."""
        if self.server is None:
            return False
        self.server.set_fault(fault)
        return True


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; raises OSError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _break_connections(runner: web.AppRunner) -> None:
    """Reset every connection, as the death of a process does."""
    if runner.server is None:
        return
    for connection in list(runner.server.connections):
        if connection.transport is not None:
            connection.transport.abort()
