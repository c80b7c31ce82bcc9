"""The actuator as a process beside a simulated fleet, both on real sockets."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.rpc.clients import channel
from trimtab.rpc.errors import error_reason

_REPOSITORY = Path(__file__).parents[2]
TOPOLOGY = """\
nodes:
  - {node: node-0, gpu_type: A100-40GB, gpus: 2}
  - {node: node-1, gpu_type: A100-40GB, gpus: 2, s1: s1-1}
"""


class Processes:
    """Child processes of one test; all of them end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *flags: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'services'}"},
            )

    def kill(self, name: str) -> None:
        """SIGKILL."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


class Fleet:
    """The simulated fleet's admin API, as a test asks it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, *, method: str = "GET", body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.loads(response.read())

    def answers(self) -> bool:
        try:
            self.ask("/healthz")
        except OSError:
            return False
        return True

    def awake(self) -> dict[str, list[str]]:
        """Awake replicas by GPU, as the hardware would show it."""
        return {f"{gpu['node']}/{gpu['index']}": gpu["awake_replicas"] for gpu in self.ask("/gpus")["gpus"]}

    def fault(self, replica: str, fault: str) -> None:
        self.ask(f"/replicas/{replica}/fault", method="POST", body={"fault": fault})


class Stack:
    """Store, fleet and actuator of one test, and a client of the actuator."""

    def __init__(self, processes: Processes, store_url: str, ports: Sequence[int]) -> None:
        self.processes = processes
        self.store_url = store_url
        self._fleet_port, self._grpc_port, self._metrics_port = ports[:3]
        self._server_base = ports[3]
        self.fleet = Fleet(f"http://127.0.0.1:{self._fleet_port}")
        self._channel: grpc.aio.Channel | None = None

    def start_fleet(self, *flags: str) -> None:
        topology = self.processes.folder / "topology.yaml"
        topology.write_text(TOPOLOGY, encoding="utf-8")
        self.processes.start(
            "fleet",
            "simulator.fleet",
            *("--port", str(self._fleet_port), "--server-port-base", str(self._server_base)),
            *("--topology", str(topology), "--state-file", str(self.processes.folder / "fleet.json")),
            *("--bring-up-scale", "0.02", "--time-scale", "5", *flags),
        )

    def start_actuator(self, *flags: str, name: str = "actuator") -> None:
        self.processes.start(
            name,
            "actuator",
            *("--listen", f"127.0.0.1:{self._grpc_port}", "--metrics-listen", f"127.0.0.1:{self._metrics_port}"),
            *("--store-url", self.store_url, "--fleet-url", self.fleet.url),
            *("--observe-interval-s", "0.3", "--urgent-interval-s", "0.1", *flags),
        )

    @property
    def stub(self) -> "actuator_pb2_grpc.ActuatorServiceAsyncStub":
        if self._channel is None:
            self._channel = channel(f"127.0.0.1:{self._grpc_port}")
        return actuator_pb2_grpc.ActuatorServiceStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def until(self, check: Callable[[], Any], *, timeout_s: float = 40.0, what: str = "it") -> Any:
        """Awaits ``check()`` until it gives something true; what it raises counts as not yet."""
        last: object = None
        async with asyncio.timeout(timeout_s + 5):
            end_s = asyncio.get_running_loop().time() + timeout_s
            while asyncio.get_running_loop().time() < end_s:
                try:
                    last = await check()
                    if last:
                        return last
                except (grpc.aio.AioRpcError, OSError) as error:
                    last = error
                await asyncio.sleep(0.05)
        logs = "\n".join(f"--- {name}\n{self.processes.log(name)[-3000:]}" for name in ("actuator",))
        raise AssertionError(f"{what} did not come within {timeout_s} s; last: {last}\n{logs}")

    async def replicas(self) -> dict[str, pb.Replica]:
        response = await self.stub.ListReplicas(pb.ListReplicasRequest(), timeout=3)
        return {replica.replica: replica for replica in response.replicas}

    async def stands_by(self) -> bool:
        """Whether it says that another actuator speaks for the cluster, or that it is starting."""
        try:
            await self.replicas()
        except grpc.aio.AioRpcError as error:
            return error_reason(error) == "STANDING_BY"
        return False

    async def life_cycles(self) -> dict[str, str]:
        found = await self.replicas()
        prefix = len("LIFE_CYCLE_")
        return {name: types_pb2.LifeCycle.Name(r.life_cycle)[prefix:].lower() for name, r in found.items()}

    async def operation(self, operation_id: str) -> pb.Operation:
        response = await self.stub.GetOperation(pb.GetOperationRequest(operation_id=operation_id), timeout=3)
        return response.operation

    async def ended(self, operation_id: str, timeout_s: float = 40.0) -> pb.Operation:
        """The operation once it has ended."""

        async def check() -> pb.Operation | None:
            operation = await self.operation(operation_id)
            over = operation.state in (
                pb.OPERATION_STATE_SUCCEEDED,
                pb.OPERATION_STATE_ROLLED_BACK,
                pb.OPERATION_STATE_FAILED,
                pb.OPERATION_STATE_CANCELLED,
            )
            return operation if over else None

        operation = await self.until(check, timeout_s=timeout_s, what=f"the end of {operation_id}")
        assert isinstance(operation, pb.Operation)
        return operation

    def pool_state(self, revision: int, awake: Sequence[str], **fields: Any) -> pb.PoolState:
        """Two models of one GPU each, on both GPUs of node-0."""
        overlay = [
            pb.OverlayReplica(
                replica=f"{service}-{gpu}",
                service=service,
                role=types_pb2.ROLE_COLOCATED,
                model=model,
                profile=profile,
                node="node-0",
                gpu_indices=[gpu],
            )
            for service, model, profile in (
                ("chat", "dsllama-8b", "a100-8b-tp1"),
                ("code", "dsqwen-7b", "a100-7b-tp1"),
            )
            for gpu in (0, 1)
        ]
        values: dict[str, Any] = {"budget_gpus": 2, "drain_timeout_s": 3.0, "sleep_level": 1, "decision_id": "d-1-1"}
        return pb.PoolState(pool="main", state_revision=revision, overlay=overlay, awake=awake, **(values | fields))

    async def apply(self, state: pb.PoolState, token: int = 1) -> pb.ApplyPoolStateResponse:
        return await self.stub.ApplyPoolState(
            pb.ApplyPoolStateRequest(state=state, fencing=types_pb2.Fencing(writer="policy-engine", token=token)),
            timeout=5,
        )

    async def bring_up(self) -> None:
        """A pool with chat-0 and code-1 awake."""

        async def applied() -> pb.ApplyPoolStateResponse:
            return await self.apply(self.pool_state(1, ["chat-0", "code-1"]))

        response = await self.until(applied, what="an accepted pool state")
        operation = await self.ended(response.operation.operation_id)
        assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Child processes that end with the test."""
    started = Processes(tmp_path)
    yield started
    started.stop()


@pytest.fixture
async def stack(processes: Processes, store_url: str, free_ports: Callable[[int], list[int]]) -> AsyncIterator[Stack]:
    """Nothing is started yet but the store."""
    # The fleet's servers take the numbers from the fourth on, which nobody else may get.
    made = Stack(processes, store_url, free_ports(12))
    yield made
    await made.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable]:
    """``await serve(handler)`` → its address."""
    runners = []

    async def start(handler: Callable) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()
