"""A fake actuator over a real socket, engines over the real store, and what collectors would have written."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from policy_engine.shell.serve import serve
from policy_engine.shell.settings import EngineSettings
from tests.support.serving import ANY_PORT, bound_port
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2_grpc
from trimtab.config.settings import ServiceSettings
from trimtab.rpc.clients import channel
from trimtab.rpc.errors import FailedPrecondition, NotFound, Unavailable
from trimtab.rpc.run import ServiceContext
from trimtab.rpc.server import RpcServer
from trimtab.store import keys
from trimtab.store.client import Store

ACTIVE = types_pb2.LIFE_CYCLE_ACTIVE
SLEEPING = types_pb2.LIFE_CYCLE_SLEEPING


class FakeActuator(actuator_pb2_grpc.ActuatorServiceServicer):
    """Does at once what it is told, unless `behaviour` says otherwise.

    `behaviour` of a transition: "succeed", "roll_back", "fail", "hang" (the operation stays under way).
    """

    def __init__(self, cluster: str = "local") -> None:
        self.cluster = cluster
        self.replicas: dict[str, actuator_pb2.Replica] = {}
        self.operations: dict[str, actuator_pb2.Operation] = {}
        self.states: list[actuator_pb2.PoolState] = []
        self.tokens: list[int] = []
        self.current: dict[str, actuator_pb2.PoolState] = {}
        self.highest_token = 0
        self.revision = 1000
        self.behaviour = "succeed"
        # Which record of the pools it cannot read; it takes no state for them then.
        self.cannot_read = ""
        # What a look says now, where the watch has told of another count: by replica.
        self.in_flight: dict[str, int] = {}
        self.mute = False
        self.changed = asyncio.Event()
        self.stopping = asyncio.Event()

    def put(self, replica: str, service: str, *, role: int = types_pb2.ROLE_COLOCATED, pool: str = "", **more: object):
        self.revision += 1
        life_cycle = more.pop("life_cycle", ACTIVE)
        self.replicas[replica] = actuator_pb2.Replica(
            replica=replica,
            service=service,
            role=role,
            cluster=self.cluster,
            pool=pool,
            life_cycle=life_cycle,
            routable=life_cycle == ACTIVE,
            ready=True,
            in_flight=0,
            revision=self.revision,
            **more,
        )
        self.kick()

    def kick(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _events(self, make: Callable[[], object]) -> AsyncIterator[object]:
        while not self.stopping.is_set():
            changed = self.changed
            if not self.mute:
                yield make()
            try:
                await asyncio.wait_for(changed.wait(), 0.3)
            except TimeoutError:
                continue

    async def WatchReplicas(self, request, context):
        def snapshot():
            found = actuator_pb2.ReplicaSnapshot(
                replicas=self.replicas.values(), revision=self.revision, cluster=self.cluster
            )
            return actuator_pb2.WatchReplicasResponse(snapshot=found)

        async for message in self._events(snapshot):
            yield message

    async def WatchOperations(self, request, context):
        def snapshot():
            found = actuator_pb2.OperationSnapshot(operations=self.operations.values())
            return actuator_pb2.WatchOperationsResponse(snapshot=found)

        async for message in self._events(snapshot):
            yield message

    async def ListReplicas(self, request, context):
        found = [actuator_pb2.Replica.FromString(one.SerializeToString()) for one in self.replicas.values()]
        for one in found:
            one.in_flight = self.in_flight.get(one.replica, one.in_flight)
        return actuator_pb2.ListReplicasResponse(replicas=found, revision=self.revision)

    async def GetOperation(self, request, context):
        if request.operation_id not in self.operations:
            raise NotFound("NO_SUCH_OPERATION", "no such operation")
        return actuator_pb2.GetOperationResponse(operation=self.operations[request.operation_id])

    async def CancelOperation(self, request, context):
        operation = self.operations[request.operation_id]
        operation.state = actuator_pb2.OPERATION_STATE_CANCELLED
        operation.detail = request.reason
        self.kick()
        return actuator_pb2.CancelOperationResponse(operation=operation)

    async def ApplyPoolState(self, request, context):
        state, token = request.state, request.fencing.token
        if token < self.highest_token:
            raise FailedPrecondition("FENCED_OFF", "a newer leader", {"highest_token": str(self.highest_token)})
        if self.cannot_read:
            raise Unavailable("RECORD_REFUSED", self.cannot_read)
        current = self.current.get(state.pool)
        if current is not None and state.state_revision < current.state_revision:
            raise FailedPrecondition("OUTDATED", "older", {"state_revision": str(current.state_revision)})
        gpus = [
            (item.node, index) for item in state.overlay if item.replica in state.awake for index in item.gpu_indices
        ]
        assert len(set(gpus)) == len(gpus) <= state.budget_gpus, "two awake replicas on one GPU"
        self.highest_token = token
        self.tokens.append(token)
        if current is not None and state.state_revision == current.state_revision:
            operation = self.operations.get(f"op-{state.state_revision}")
            return actuator_pb2.ApplyPoolStateResponse(state_revision=state.state_revision, operation=operation)
        self.states.append(state)
        self.current[state.pool] = state
        operation = self._carry_out(state)
        self.kick()
        return actuator_pb2.ApplyPoolStateResponse(state_revision=state.state_revision, operation=operation)

    def _carry_out(self, state: actuator_pb2.PoolState) -> actuator_pb2.Operation | None:
        awake = {name for name, item in self.replicas.items() if item.pool == state.pool and item.routable}
        first = not any(item.pool == state.pool for item in self.replicas.values())
        if awake == set(state.awake) and not first:
            return None
        ends = {
            "succeed": actuator_pb2.OPERATION_STATE_SUCCEEDED,
            "roll_back": actuator_pb2.OPERATION_STATE_ROLLED_BACK,
            "fail": actuator_pb2.OPERATION_STATE_FAILED,
            "hang": actuator_pb2.OPERATION_STATE_RUNNING,
        }
        operation = actuator_pb2.Operation(
            operation_id=f"op-{state.state_revision}",
            kind=actuator_pb2.OPERATION_KIND_OVERLAY if first else actuator_pb2.OPERATION_KIND_TRANSITION,
            state=ends["succeed" if first else self.behaviour],
            decision_id=state.decision_id,
            cluster=self.cluster,
            subject=state.pool,
            detail=f"it did {self.behaviour}",
        )
        self.operations[operation.operation_id] = operation
        if first or self.behaviour == "succeed":
            self.settle(state)
        return operation

    def settle(self, state: actuator_pb2.PoolState) -> None:
        for item in state.overlay:
            life_cycle = ACTIVE if item.replica in state.awake else SLEEPING
            self.put(
                item.replica,
                item.service,
                role=item.role,
                pool=state.pool,
                life_cycle=life_cycle,
                node=item.node,
                gpu_indices=item.gpu_indices,
            )

    def finish(self, operation_id: str) -> None:
        self.operations[operation_id].state = actuator_pb2.OPERATION_STATE_SUCCEEDED
        for state in self.current.values():
            self.settle(state)
        self.kick()

    @property
    def awake(self) -> set[str]:
        return {name for name, item in self.replicas.items() if item.routable}


@dataclass
class Windows:
    """Writes windows as a collector would."""

    store: Store
    load: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)

    async def write(
        self, service: str, replicas: list[str], *, role: int = types_pb2.ROLE_COLOCATED, age_s: float = 0.0, **signals
    ) -> None:
        now_s = time.time() - age_s
        partial = collector_pb2.RolePartial(
            collector="collector-0", service=service, role=role, reported_replicas=replicas
        )
        partial.window_start.FromMilliseconds(int((now_s - 5) * 1000))
        partial.window_end.FromMilliseconds(int(now_s * 1000))
        defaults = {"prefill_tps": 0.0, "decode_tps": 0.0, "running": 0.0, "waiting": 0.0, "request_rps": 0.0}
        if role == types_pb2.ROLE_UNSPECIFIED:
            defaults = {"held": 0.0, "arrival_rps": 0.0}
        ttft_s = signals.pop("ttft_s", None)
        if ttft_s is not None:
            partial.latencies.add(
                latency=collector_pb2.LATENCY_TTFT,
                upper_bounds_s=[ttft_s, ttft_s * 1.01, math.inf],
                increases=[0, 10, 0],
                sum_s=10 * ttft_s,
                count=10,
            )
        for name, value in {**defaults, **signals}.items():
            number = collector_pb2.Signal.Value(f"SIGNAL_{name.upper()}")
            partial.signals.add(signal=number, sum=value, reported=len(replicas))
        role_name = types_pb2.Role.Name(role)
        await self.store.redis.hset(
            keys.latest_partials(service, role_name), "collector-0", partial.SerializeToString()
        )

    async def demand(self, service: str, held: float) -> None:
        await self.write(service, ["gateway-0"], role=types_pb2.ROLE_UNSPECIFIED, held=held)


@dataclass
class RunningEngine:
    """One engine process's insides, in a task."""

    context: ServiceContext
    task: "asyncio.Task[None]"
    stub: "policy_pb2_grpc.PolicyServiceAsyncStub"

    async def stop(self) -> None:
        self.context.stopping.set()
        await asyncio.wait_for(self.task, 30)

    async def kill(self) -> None:
        """As SIGKILL would: no lease is released."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=30)


@pytest.fixture
async def fake_actuator() -> AsyncIterator[FakeActuator]:
    async with run_actuator(FakeActuator()) as actuator:
        yield actuator


@asynccontextmanager
async def run_actuator(actuator: FakeActuator) -> AsyncIterator[FakeActuator]:
    context = ServiceContext("actuator")
    server = RpcServer(ServiceSettings(listen=ANY_PORT, drain_grace_s=0), context)
    server.add(actuator_pb2_grpc.add_ActuatorServiceServicer_to_server, actuator, "trimtab.actuator.v1.ActuatorService")
    await server.start()
    actuator.address = f"127.0.0.1:{server.port}"
    yield actuator
    actuator.stopping.set()
    actuator.kick()
    context.stopping.set()
    await server.drain()


@pytest.fixture
def windows(store: Store) -> Windows:
    return Windows(store)


@pytest.fixture
async def start_engine(store_url: str) -> AsyncIterator[Callable[..., Awaitable[RunningEngine]]]:
    """`await start_engine(fake_actuator, **settings)`: an engine that serves; stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(actuator: FakeActuator | None, **more: object) -> RunningEngine:
            values: dict[str, object] = {
                "listen": ANY_PORT,
                "store_url": store_url,
                "actuators": {"local": actuator.address} if actuator is not None else {},
                "tick_interval_s": 0.05,
                "scaled_interval_s": 0.1,
                # What runs out by itself outlasts a machine that stands still; a test that waits for it says less.
                "lease_ttl_s": 3.0,
                "actuator_lost_after_s": 3.0,
                "drain_grace_s": 0,
                **more,
            }
            settings = EngineSettings.model_validate(values)
            context = ServiceContext("policy-engine")
            task = asyncio.create_task(serve(settings, context))

            async def end() -> None:
                context.stopping.set()
                await asyncio.wait({task}, timeout=60)

            stack.push_async_callback(end)
            dialled: grpc.aio.Channel = channel(f"127.0.0.1:{await bound_port(context, task)}")
            stack.push_async_callback(dialled.close)
            engine = RunningEngine(context, task, policy_pb2_grpc.PolicyServiceStub(dialled))
            give_up = time.monotonic() + 30
            while True:
                if task.done():
                    task.result()
                try:
                    from trimtab.api.policy.v1 import policy_pb2

                    await engine.stub.GetStatus(policy_pb2.GetStatusRequest(), timeout=1)
                    break
                except grpc.aio.AioRpcError:
                    assert time.monotonic() < give_up, "the engine does not serve"
                    await asyncio.sleep(0.02)
            return engine

        yield start
