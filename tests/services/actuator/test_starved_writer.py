"""An actuator that stood still for longer than its lease: what it goes on with, and what its callers are told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from actuator.core.model import State
from actuator.core.world import Listed, ProbeResult, RunState, World
from actuator.shell.controller import Controller, ControllerParts
from actuator.shell.metrics import ActuatorMetrics
from actuator.shell.publisher import Publisher
from actuator.shell.records import Records
from actuator.shell.routing import StreamRouting
from tests.services.actuator.controller_helpers import counted, eventually
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import LIMITS, spec
from trimtab.rpc.errors import Unavailable
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import FencedOff
from trimtab.store.lease import StoreLease

NAME = keys.actuator("local")
NOW_S = 100.0
TTL_S = 3.0


class Clock:
    """A monotonic clock that moves when the test says so: the process stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Starved(Records):
    """Records whose process stands still once, between taking its token and sending a write.

    The controller's beat, which may come first, has nothing to write.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, "local")
        self.stands_still: Any = None
        self.fenced_off = 0

    async def save(self, old: State, new: State, token: int, also: Any = ()) -> None:
        if new != old and self.stands_still is not None:
            happens, self.stands_still = self.stands_still, None
            await happens()
        try:
            await super().save(old, new, token, also)
        except FencedOff:
            self.fenced_off += 1
            raise


class Cluster:
    """One actuator's controller on a real store, one server, and another actuator's lease."""

    def __init__(self, store: Store) -> None:
        self.clock = Clock()
        self.store = store
        # The process stands still for so long before it takes the next answer to its lease up.
        self.late_s = 0.0
        # Held while another actuator takes over: a renewal of this one comes before it or after it.
        self.asks_the_store = asyncio.Lock()
        answers_late: Any = SimpleNamespace(redis=SimpleNamespace(register_script=self._register_script))
        self.lease = StoreLease(answers_late, NAME, "me", TTL_S, monotonic=self.clock)
        self.other = StoreLease(store, NAME, "other", TTL_S)
        self.records = Starved(store)
        self.world = World(listed={})
        parts: Any = ControllerParts(
            lease=self.lease,
            records=self.records,
            observer=SimpleNamespace(complete=True, world=lambda _busy: self.world),
            publisher=Publisher(cluster="local", probe=lambda _name: None),
            routing=StreamRouting(cluster="local", lease_s=TTL_S),
            metrics=ActuatorMetrics(CollectorRegistry()),
            limits=LIMITS,
            now_s=lambda: NOW_S,
        )
        self.controller = Controller(parts, interval_s=0.01)

    def _register_script(self, script: str) -> Any:
        run = self.store.redis.register_script(script)

        async def answered(**call: Any) -> Any:
            async with self.asks_the_store:
                reply = await run(**call)
            self.clock.now_s += self.late_s
            self.late_s = 0.0
            return reply

        return answered

    async def lease_runs_out(self) -> None:
        """In the store, and by the clock."""
        self.clock.now_s += TTL_S + 1.0
        await self.store.redis.delete(keys.lease(NAME))

    async def takes_its_lease_again(self) -> None:
        await self.lease_runs_out()
        assert await self.lease.acquire_or_renew() == 2

    async def another_takes_over(self) -> None:
        async with self.asks_the_store:
            await self.lease_runs_out()
            assert await self.other.acquire_or_renew() == 2

    def a_server_appears(self) -> None:
        """So that the next step has something to write."""
        listed = Listed(**parts(spec("a-0", 0)), address="http://a-0", run_state=RunState.RUNNING)
        probe = ProbeResult(as_of_s=NOW_S, healthy=True, sleeping=False)
        self.world = World(listed={"a-0": listed}, listed_as_of_s=NOW_S, probes={"a-0": probe})


@asynccontextmanager
async def at_work(cluster: Cluster, *, renews: bool = False) -> AsyncIterator[None]:
    stopping = asyncio.Event()
    await cluster.lease.acquire_or_renew()
    tasks = [asyncio.create_task(cluster.controller.run(stopping))]
    if renews:
        tasks.append(asyncio.create_task(cluster.controller.keep_lease(stopping)))
    await eventually(lambda: cluster.controller.serving)
    try:
        yield
    finally:
        stopping.set()
        cluster.controller.kick()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)


async def test_a_step_under_the_token_before_is_done_again_under_the_next(store: Store) -> None:
    cluster = Cluster(store)
    async with at_work(cluster):
        revision = cluster.controller.state.meta.endpoint_revision
        cluster.records.stands_still = cluster.takes_its_lease_again
        cluster.a_server_appears()
        await eventually(lambda: "a-0" in cluster.controller.state.replicas)
        assert cluster.records.fenced_off == 1
        assert cluster.controller.state.meta.endpoint_revision == revision + 1, "its memory went on"
        assert (await cluster.records.load()).last_token == 2


async def test_a_caller_is_not_told_of_the_actuators_own_token(store: Store) -> None:
    """Its answer to FENCED_OFF would be to give its own lease up."""
    cluster = Cluster(store)
    async with at_work(cluster):
        cluster.records.stands_still = cluster.takes_its_lease_again
        with pytest.raises(Unavailable, match="nothing was written"):
            await cluster.controller.change(counted)
        assert cluster.controller.serving
        await eventually(lambda: cluster.controller.serving and cluster.records.stands_still is None)
        assert await changed(cluster) == 1, "the one before was not written"


async def changed(cluster: Cluster) -> int:
    """What a caller gets that tries until it is heard."""
    for _ in range(1000):
        try:
            return await cluster.controller.change(counted)
        except Unavailable:
            await asyncio.sleep(0.005)
    raise AssertionError("never heard")


async def test_who_lost_the_lease_to_another_comes_back_when_it_is_free(store: Store) -> None:
    cluster = Cluster(store)
    async with at_work(cluster, renews=True):
        cluster.records.stands_still = cluster.another_takes_over
        with pytest.raises(Unavailable):
            await cluster.controller.change(counted)
        assert not cluster.controller.serving
        await cluster.other.release()
        assert await changed(cluster) == 1
        assert (await cluster.records.load()).last_token == 3


async def test_an_answer_that_comes_after_the_lease_is_over_takes_no_stream_away(store: Store) -> None:
    cluster = Cluster(store)
    async with at_work(cluster, renews=True):
        revision = cluster.controller.state.meta.endpoint_revision
        cluster.late_s = TTL_S + 1.0
        served = True
        while cluster.late_s > 0.0 or not cluster.lease.held:
            served = served and cluster.controller.serving
            await asyncio.sleep(0.005)
        assert served
        assert await changed(cluster) == 1
        assert cluster.controller.state.meta.endpoint_revision == revision, "its memory went on"
