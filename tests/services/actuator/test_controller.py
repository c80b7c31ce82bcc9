"""The one writer of the state: what a caller that goes, or a store that does not answer, leaves behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from actuator.core.model import Goal, Operation, OperationKind, OperationState, State, Step, StepKind
from actuator.core.world import World
from actuator.shell.controller import Controller, ControllerParts
from actuator.shell.metrics import ActuatorMetrics
from actuator.shell.publisher import Publisher
from actuator.shell.records import Loaded
from actuator.shell.routing import StreamRouting
from tests.services.actuator.controller_helpers import counted, eventually
from tests.unit.actuator.actuator_rig import LIMITS, spec
from trimtab.rpc.errors import Unavailable
from trimtab.store.errors import StoreUnavailable


class SlowRecords:
    """A store that takes a write and answers when told to, if at all."""

    def __init__(self) -> None:
        self.kept = State()
        self.answering = asyncio.Event()
        self.answering.set()
        self.silent = False
        self.loads = 0
        self.counters: list[int] = []
        self.tokens: list[int] = []

    async def load(self) -> Loaded:
        self.loads += 1
        return Loaded(state=self.kept, last_token=self.tokens[-1] if self.tokens else None)

    async def save(self, old: State, new: State, token: int, _also: object = ()) -> None:
        self.kept = new
        self.tokens.append(token)
        self.counters.append(new.meta.operation_counter)
        if new.meta.operation_counter == old.meta.operation_counter:
            # Not a caller's write: what the controller's own beat stores in between is answered at once.
            return
        await self.answering.wait()
        if self.silent:
            self.silent = False
            raise StoreUnavailable("no answer")


class OwnLease:
    """A lease that nobody contends for."""

    held, ttl_s = True, 3.0

    def __init__(self) -> None:
        self.token = 1

    def renew_token(self) -> None:
        self.token += 1


@pytest.fixture
async def running() -> Any:
    async with controlled(interval_s=0.01, now_s=lambda: 100.0) as found:
        yield found


@asynccontextmanager
async def controlled(*, interval_s: float, now_s: Callable[[], float]) -> AsyncIterator[Any]:
    records, stopping = SlowRecords(), asyncio.Event()
    world = World(listed={})
    parts: Any = ControllerParts(
        lease=OwnLease(),
        records=records,
        observer=SimpleNamespace(complete=True, world=lambda _busy: world),
        publisher=Publisher(cluster="local", probe=lambda _name: None),
        routing=StreamRouting(cluster="local", lease_s=3.0),
        metrics=ActuatorMetrics(CollectorRegistry()),
        limits=LIMITS,
        now_s=now_s,
    )
    controller = Controller(parts, interval_s=interval_s)
    task = asyncio.create_task(controller.run(stopping))
    await eventually(lambda: controller.serving)
    yield controller, records
    records.answering.set()
    stopping.set()
    controller.kick()
    await asyncio.wait_for(task, 30)


async def test_memory_and_store_agree_though_the_caller_went_while_it_was_stored(running: Any) -> None:
    controller, records = running
    records.answering.clear()
    caller = asyncio.create_task(controller.change(counted))
    await eventually(lambda: records.kept.meta.operation_counter == 1)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    records.answering.set()
    assert await asyncio.wait_for(controller.change(counted), 30) == 2
    assert records.kept.meta.operation_counter == controller.state.meta.operation_counter == 2


async def test_a_write_that_was_not_answered_is_read_again_before_the_next(running: Any) -> None:
    controller, records = running
    loads = records.loads
    records.silent = True
    with pytest.raises(Unavailable):
        await controller.change(counted)
    assert max(records.counters) == 1, "it was written all the same"
    await eventually(lambda: records.loads > loads and records.kept.meta == controller.state.meta)
    assert await controller.change(counted) == 1


async def test_a_write_that_was_not_answered_and_lands_late_is_refused(running: Any) -> None:
    controller, records = running
    records.silent = True
    with pytest.raises(Unavailable):
        await controller.change(counted)
    await eventually(lambda: records.kept.meta == controller.state.meta)
    assert await controller.change(counted) == 1
    after = records.tokens[records.counters.index(1) + 1 :]
    assert set(after) == {2}, "whatever is written after it has a higher token"


async def test_a_step_whose_time_has_come_does_not_wait_for_the_next_beat() -> None:
    """The beat is longer than the test waits; the clock moves when the test says so."""
    clock_s = 100.0
    async with controlled(interval_s=30.0, now_s=lambda: clock_s) as (controller, _records):
        step = Step(
            kind=StepKind.CREATE,
            goal=Goal.AWAKE,
            replica="a-0",
            service="a",
            placed=spec("a-0", 0),
            state=OperationState.RUNNING,
            not_before_s=100.3,
        )

        def waiting(state: State, _world: World, now_s: float) -> tuple[State, None]:
            operation = Operation(
                operation_id="o-1",
                kind=OperationKind.CREATE,
                subject="a",
                create_s=now_s,
                update_s=now_s,
                deadline_s=now_s + 60.0,
                steps=(step,),
            )
            return replace(state, operations={"o-1": operation}), None

        await controller.change(waiting)
        await asyncio.sleep(0.4)
        assert "a-0" not in controller.state.replicas, "its time has not come by the clock"
        clock_s = 100.3
        await eventually(lambda: "a-0" in controller.state.replicas)
