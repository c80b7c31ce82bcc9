"""The running service: a real store, fake actuators on sockets, the pre-scheduler's own gRPC."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from prescheduler.shell.serve import serve
from prescheduler.shell.settings import PreSchedulerSettings
from tests.support.serving import ANY_PORT, bound_port
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from trimtab.config.settings import SettingsError, load_settings
from trimtab.rpc import clients
from trimtab.rpc.errors import error_reason, field_violations
from trimtab.rpc.run import ServiceContext
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.schedule_results import SCHEDULE_RESULT

P, D = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
ROWS = [("s2-0", "s1-0", f"n{index}", "H20", 8, 8) for index in range(2)]
SMALL = [("s2-0", "s1-0", "n0", "H20", 4, 4)]


def wanted(service: str = "chat", prefill: int = 1, decode: int = 2, **more: object) -> scheduler_pb2.ScalingRequest:
    message = scheduler_pb2.ScalingRequest(
        service=service,
        decision_id="d-1",
        affinity=types_pb2.TOPOLOGY_LEVEL_S2,
        fencing=types_pb2.Fencing(writer="policy-engine", token=3),
        roles=[
            scheduler_pb2.RoleRequest(role=P, replicas=prefill, gpus_per_replica=2, model="m", ratio_part=1),
            scheduler_pb2.RoleRequest(role=D, replicas=decode, gpus_per_replica=1, model="m", ratio_part=2),
        ],
    )
    message.create_time.GetCurrentTime()
    message.expire_time.FromSeconds(int(time.time()) + 3600)
    message.MergeFrom(scheduler_pb2.ScalingRequest(**more))
    return message


@dataclass
class Running:
    """One pre-scheduler in this process, and what a test asks it and the store."""

    stub: scheduler_pb2_grpc.PreSchedulerServiceStub
    store: Store
    context: ServiceContext
    settings: PreSchedulerSettings

    async def ask(self, *requests: scheduler_pb2.ScalingRequest) -> None:
        for item in requests:
            await self.store.redis.hset(keys.scaling_requests(), item.service, item.SerializeToString())

    async def result(self, service: str = "chat") -> scheduler_pb2.ScalingResult:
        data = await self.store.redis.hget(keys.schedule_results(), service)
        if data is None:
            return scheduler_pb2.ScalingResult()
        found = SCHEDULE_RESULT.decode(data, key=keys.schedule_results(), field=service)
        assert isinstance(found, scheduler_pb2.ScalingResult), str(found)
        return found

    async def until(self, outcome: int, service: str = "chat", timeout_s: float = 30.0) -> scheduler_pb2.ScalingResult:
        give_up = time.monotonic() + timeout_s
        while True:
            found = await self.result(service)
            if found.outcome == outcome:
                return found
            assert time.monotonic() < give_up, f"still {found}"
            await asyncio.sleep(0.02)

    async def says(self, words: str, service: str = "chat", timeout_s: float = 30.0) -> scheduler_pb2.ScalingResult:
        """The first result with these words in its detail."""
        give_up = time.monotonic() + timeout_s
        while True:
            found = await self.result(service)
            if words in found.detail:
                return found
            assert time.monotonic() < give_up, f"still {found}"
            await asyncio.sleep(0.02)

    async def watch(self) -> AsyncIterator[scheduler_pb2.WatchCyclesResponse]:
        """The cycles from now on: the watch is there when this returns."""
        messages = aiter(self.stub.WatchCycles(scheduler_pb2.WatchCyclesRequest(), timeout=60))
        while (await anext(messages)).WhichOneof("event") != "bookmark":
            pass
        return messages


@asynccontextmanager
async def prescheduler(store: Store, url: str, *actuators, **more) -> AsyncIterator[Running]:
    settings = PreSchedulerSettings(
        **{
            "listen": ANY_PORT,
            "store_url": url,
            "actuators": {item.cluster: item.address for item in actuators},
            "cycle_s": 0.2,
            "kick_poll_s": 0.05,
            "retry_placement_s": 0.1,
            "actuator_timeout_s": 1.0,
            "lease_ttl_s": 3.0,
            "drain_grace_s": 0.2,
        }
        | more
    )
    context = ServiceContext("prescheduler")
    task = asyncio.create_task(serve(settings, context))
    channel = clients.channel(f"127.0.0.1:{await bound_port(context, task)}")
    try:
        await asyncio.wait_for(channel.channel_ready(), 30)
        yield Running(scheduler_pb2_grpc.PreSchedulerServiceStub(channel), store, context, settings)
    finally:
        await channel.close()
        context.stopping.set()
        await asyncio.wait_for(task, 30)


async def test_request_is_placed_once_and_nothing_is_written_after(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted())
        result = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        length = await store.redis.xlen(keys.cycles())
        counter = actuator.inventory_revision
        await asyncio.sleep(0.7)
        assert len(actuator.writes) == 1
        assert sorted(item.role for item in actuator.replicas.values()) == [P, D, D]
        assert await running.result() == result
        assert (await store.redis.xlen(keys.cycles()), actuator.inventory_revision) == (length, counter)
    write = actuator.writes[0]
    assert (write.fencing.writer, write.fencing.token) == ("prescheduler", 1)
    assert [item.group for item in result.groups] == [write.groups[0].group]


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (actuator_pb2.STEP_KIND_DELETE, actuator_pb2.OPERATION_STATE_RUNNING),
        (actuator_pb2.STEP_KIND_CREATE, actuator_pb2.OPERATION_STATE_ROLLING_BACK),
    ],
)
async def test_scale_in_is_asked_for_once_while_the_operation_runs(
    store, store_url, start_actuator, kind, state
) -> None:
    """The victim looks active for a while after the write was accepted: it must not cost a second one."""
    actuator, _ = await start_actuator("a", ROWS)
    for name, role in (("p0", P), ("d0", D), ("d1", D), ("d2", D)):
        actuator.replicas[name] = actuator_pb2.Replica(
            replica=name,
            service="chat",
            role=role,
            node="n0",
            deployment_group="g",
            life_cycle=types_pb2.LIFE_CYCLE_ACTIVE,
        )
    actuator.operations.append(
        actuator_pb2.Operation(
            operation_id="o-1",
            steps=[actuator_pb2.OperationStep(kind=kind, replica="d2", state=state)],
        )
    )
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_UNCHANGED)
        assert actuator.writes == []
        await running.ask(wanted(prefill=1, decode=1))
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_REMOVED)
        await asyncio.sleep(0.5)
    cuts = [
        (group.group, cut.role, cut.count)
        for write in actuator.writes
        for group in write.groups
        for cut in group.remove
    ]
    assert cuts == [("g", D, 1)]


async def test_denial_names_its_constraint_and_ends_when_there_is_room(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", SMALL)
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted(decode=3))
        denied = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_DENIED)
        assert denied.binding_constraint == scheduler_pb2.BINDING_CONSTRAINT_CAPACITY
        assert denied.detail == "1 prefill of 2 GPUs and 3 decode of 1 GPU need 5 GPUs; 4 are free in all"
        assert actuator.replicas == {}
        actuator.rows.append(("s2-0", "s1-0", "n1", "H20", 1, 1))
        actuator.inventory_revision += 1
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        assert len(actuator.replicas) == 4


async def test_old_inventory_is_refused_and_the_next_cycle_places(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    actuator.race = True
    async with prescheduler(store, store_url, actuator) as running:
        watch = await running.watch()
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        outcomes = []
        async with asyncio.timeout(30):
            async for message in watch:
                outcomes += [(item.outcome, item.binding_constraint) for item in message.cycle.results]
                if (scheduler_pb2.SCHEDULING_OUTCOME_PLACED, 0) in outcomes:
                    break
    refused = (scheduler_pb2.SCHEDULING_OUTCOME_HELD, scheduler_pb2.BINDING_CONSTRAINT_ACTUATOR_REFUSED)
    assert outcomes == [refused, (scheduler_pb2.SCHEDULING_OUTCOME_PLACED, 0)]
    assert len(actuator.replicas) == 3


async def test_silent_cluster_is_named_and_what_it_holds_stays(store, store_url, start_actuator) -> None:
    big, server = await start_actuator("a", ROWS)
    small, _ = await start_actuator("b", [("s2-0", "s1-0", "n0", "H20", 8, 4)])
    async with prescheduler(store, store_url, big, small) as running:
        await running.ask(wanted(decode=4))
        placed = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        assert {group.cluster for group in placed.groups} == {"a"}
    await server.stop(0)
    # A new process knows from the store alone what the silent cluster holds.
    async with prescheduler(store, store_url, big, small) as running:
        await running.ask(wanted(decode=4), wanted("other", decode=2))
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED, "other")
        held = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_HELD)
        topology = await running.stub.GetTopology(scheduler_pb2.GetTopologyRequest(), timeout=30)
    assert held.binding_constraint == scheduler_pb2.BINDING_CONSTRAINT_CLUSTER_UNREACHABLE
    assert held.detail.startswith("cluster a did not answer (")
    assert {item.service for item in small.replicas.values()} == {"other"}
    assert [item.cluster for item in topology.unreachable_clusters] == ["a"]
    assert {item.cluster for item in topology.domains} == {"b"}


async def test_slow_cluster_delays_the_others_no_longer_than_its_timeout(store, store_url, start_actuator) -> None:
    slow, _ = await start_actuator("a", ROWS)
    quick, _ = await start_actuator("b", ROWS)
    slow.delay_s = 30.0
    async with prescheduler(store, store_url, slow, quick) as running:
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        assert len(quick.replicas) == 3


async def test_store_that_lost_its_tokens_catches_up_with_the_actuators(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    actuator.highest_token = 50
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
    assert [write.fencing.token for write in actuator.writes] == [51]


async def test_write_without_a_reply_is_not_repeated_elsewhere(store, store_url, start_actuator) -> None:
    """The service may live in the first cluster by now; no process places it in the second."""
    first, server = await start_actuator("a", ROWS)
    second, _ = await start_actuator("b", [("s2-0", "s1-0", "n0", "H20", 8, 8), ("s2-0", "s1-0", "n1", "H20", 8, 8)])
    first.hang_writes = True
    async with prescheduler(store, store_url, first, second) as running:
        watch = await running.watch()
        await running.ask(wanted())
        held: list[scheduler_pb2.ScalingResult] = []
        async with asyncio.timeout(30):
            while len(held) < 2:
                held += (await anext(watch)).cycle.results
        assert [item.outcome for item in held] == [scheduler_pb2.SCHEDULING_OUTCOME_HELD] * 2
        assert held[0].detail.startswith("cluster a did not answer the write: deadline exceeded")
        assert "a write may still take effect until" in held[1].detail
        await asyncio.sleep(0.5)
        assert (first.attempts, second.attempts) == (1, 0)
        await server.stop(0)
        await asyncio.sleep(0.5)
    async with prescheduler(store, store_url, first, second) as running:
        last = await running.says("holds replicas of chat")
        assert last.outcome == scheduler_pb2.SCHEDULING_OUTCOME_HELD
        await asyncio.sleep(0.5)
    assert second.writes == []


async def test_write_without_a_reply_is_made_again_after_it_expired(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    actuator.hang_writes = True
    async with prescheduler(store, store_url, actuator, placement_ttl_s=1.5) as running:
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_HELD)
        actuator.hang_writes = False
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
    assert (actuator.attempts, len(actuator.replicas)) == (2, 3)


async def test_actuator_of_another_cluster_is_left_out(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuators={"b": actuator.address}) as running:
        await running.ask(wanted())
        held = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_HELD)
        assert "its actuator says that it is of cluster 'a'" in held.detail
    assert actuator.writes == []


async def test_table_that_contradicts_itself_leaves_its_cluster_out(store, store_url, start_actuator) -> None:
    bad, _ = await start_actuator("a", [*ROWS, ROWS[0]])
    good, _ = await start_actuator("b", ROWS)
    async with prescheduler(store, store_url, bad, good) as running:
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        topology = await running.stub.GetTopology(scheduler_pb2.GetTopologyRequest(), timeout=30)
    assert [item.error for item in topology.unreachable_clusters] == ["cluster a: node 'n0' is listed twice"]
    assert (len(bad.replicas), len(good.replicas)) == (0, 3)


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ({"expire_time": {"seconds": 1000}}, scheduler_pb2.BINDING_CONSTRAINT_EXPIRED),
        ({"fencing": {"token": 2}}, scheduler_pb2.BINDING_CONSTRAINT_FENCED_OFF),
    ],
)
async def test_expired_and_fenced_off_requests_are_held(store, store_url, start_actuator, change, constraint) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted("fresh"), wanted(**change))
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED, "fresh")
        held = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_HELD)
        assert held.binding_constraint == constraint
        assert {item.service for item in actuator.replicas.values()} == {"fresh"}


async def test_request_that_does_not_parse_is_held_with_the_field(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        bad = wanted("bad")
        bad.roles[0].gpus_per_replica = 0
        await running.ask(wanted(), bad)
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        held = await running.until(scheduler_pb2.SCHEDULING_OUTCOME_HELD, "bad")
        assert "roles[0].gpus_per_replica: is 0" in held.detail


async def test_second_process_waits_and_takes_over(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with AsyncExitStack() as stack:
        first_run = AsyncExitStack()
        first = await first_run.enter_async_context(prescheduler(store, store_url, actuator))
        async with first_run:
            await _leader(first)
            second = await stack.enter_async_context(prescheduler(store, store_url, actuator))
            await first.ask(wanted())
            await first.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await second.stub.Schedule(scheduler_pb2.ScheduleRequest(requests=[wanted()]), timeout=30)
            assert error_reason(refused.value) == "NOT_LEADING"
            answer = await second.stub.GetTopology(scheduler_pb2.GetTopologyRequest(), timeout=30)
            assert [item.name for item in answer.domains][:2] == ["a", "s2-0"]
        await _leader(second)
        await second.ask(wanted(decode=3, prefill=1))
        await until_true(lambda: len(actuator.replicas) == 4)
    assert [write.fencing.token for write in actuator.writes] == [1, 2]


async def test_stalled_leader_writes_nothing_after_it_was_replaced(store, store_url, start_actuator) -> None:
    """Case 18: by its own clock it still leads, but a newer token was handed out and shown to the actuator."""
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator, lease_ttl_s=30) as running:
        await _leader(running)
        await store.redis.incr(keys.lease_token(keys.PRESCHEDULER))
        await running.ask(wanted())
        failed = "trimtab_prescheduler_failed_cycles_total"
        registry = running.context.registry
        await until_true(lambda: registry.get_sample_value(failed, {"cause": "lease"}))
        assert await store.redis.exists(keys.schedule_results(), keys.cycles()) == 0
    assert actuator.writes == []


async def until_true(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def _leader(running: Running) -> int:
    give_up = time.monotonic() + 30
    while True:
        value = running.context.registry.get_sample_value("trimtab_prescheduler_leading")
        if value:
            return int(value)
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def test_schedule_validates_without_doing(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        call = scheduler_pb2.ScheduleRequest(requests=[wanted()], validate_only=True)
        answer = await running.stub.Schedule(call, timeout=30)
        assert [item.outcome for item in answer.cycle.results] == [scheduler_pb2.SCHEDULING_OUTCOME_PLACED]
        assert actuator.writes == []
        assert await store.redis.exists(keys.schedule_results(), keys.cycles(), keys.deployment_groups()) == 0


async def test_schedule_with_a_known_request_id_answers_the_same(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await _leader(running)
        call = scheduler_pb2.ScheduleRequest(requests=[wanted()], request_id="once")
        first = await running.stub.Schedule(call, timeout=30)
        again = await running.stub.Schedule(call, timeout=30)
        assert first == again
        assert len(actuator.writes) == 1
        call.requests[0].roles[1].replicas = 5
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Schedule(call, timeout=30)
        assert error_reason(refused.value) == "REQUEST_ID_REUSED"


async def test_a_retry_that_overtakes_its_first_attempt_gets_the_same_answer(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await _leader(running)
        call = scheduler_pb2.ScheduleRequest(requests=[wanted()], request_id="once")
        answers = await asyncio.gather(*(running.stub.Schedule(call, timeout=30) for _ in range(3)))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].cycle.results[0].outcome == scheduler_pb2.SCHEDULING_OUTCOME_PLACED


async def test_a_watcher_sees_every_cycle_once(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        watch = await running.watch()
        await running.ask(wanted())
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        seen = []
        async for message in watch:
            if message.WhichOneof("event") == "bookmark":
                break
            seen.append(message.cycle.cycle_id)
    assert len(seen) == len(set(seen)) >= 1


async def test_bad_call_names_every_field(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        bad = scheduler_pb2.ScalingRequest(service="Not A Name", allow_partial=True)
        bad.create_time.nanos = -1
        bad.roles.add(role=P, replicas=1, gpus_per_replica=65, model="m")
        bad.roles.add(role=P, replicas=1, gpus_per_replica=1, ratio_part=1)
        bad.roles.add(replicas=20_000, gpus_per_replica=1, ratio_part=1, model="m")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Schedule(scheduler_pb2.ScheduleRequest(requests=[bad]), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as empty:
            await running.stub.Schedule(scheduler_pb2.ScheduleRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [item.field for item in field_violations(refused.value)] == [
        "requests[0].service",
        "requests[0].roles[0].gpus_per_replica",
        "requests[0].roles[0].ratio_part",
        "requests[0].roles[1].model",
        "requests[0].roles[2].role",
        "requests[0].roles[2].replicas",
        "requests[0].create_time",
        "requests[0].decision_id",
        "requests[0].fencing.writer",
        "requests[0].fencing.token",
        "requests[0].expire_time",
    ]
    assert [item.field for item in field_violations(empty.value)] == ["requests"]


async def test_groups_are_listed_page_by_page(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted("one"), wanted("two"), wanted("three"))
        for service in ("one", "two", "three"):
            await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED, service)
        everything = scheduler_pb2.ListDeploymentGroupsRequest()
        async with asyncio.timeout(30):
            while len((await running.stub.ListDeploymentGroups(everything, timeout=30)).groups) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        found, token = [], ""
        for _ in range(3):
            page = await running.stub.ListDeploymentGroups(
                scheduler_pb2.ListDeploymentGroupsRequest(page_size=1, page_token=token), timeout=30
            )
            found += page.groups
            token = page.next_page_token
        only = await running.stub.ListDeploymentGroups(
            scheduler_pb2.ListDeploymentGroupsRequest(service="two"), timeout=30
        )
    assert [item.service for item in found] == ["one", "three", "two"]
    assert token == ""
    assert [(len(role.replicas), role.role) for role in found[0].roles] == [(1, P), (2, D)]
    assert list(only.groups) == [found[2]]


async def test_result_of_a_request_that_is_gone_is_gone(store, store_url, start_actuator) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted(), wanted("other"))
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_PLACED, "other")
        await store.redis.hdel(keys.scaling_requests(), "chat")
        await running.until(scheduler_pb2.SCHEDULING_OUTCOME_UNSPECIFIED)
        await asyncio.sleep(0.3)
    # Without a request nothing is taken away.
    assert [item.life_cycle for item in actuator.replicas.values()] == [types_pb2.LIFE_CYCLE_STARTING] * 6


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--actuators", "a=nowhere"], "--actuators[a]: 'nowhere' is not host:port"),
        (["--cycle-s", "0"], "--cycle-s"),
        (["--actuators", ""], "--actuators"),
    ],
)
def test_bad_settings_are_named(flags, says) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(PreSchedulerSettings, flags, {})
    assert says in str(refused.value)


async def test_process_starts_before_its_store_and_stops_on_sigterm(
    own_store, free_ports, start_actuator, eventually
) -> None:
    actuator, _ = await start_actuator("a", ROWS)
    own_store.stop()
    rpc, metrics = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prescheduler",
        *("--listen", f"127.0.0.1:{rpc}", "--metrics-listen", f"127.0.0.1:{metrics}"),
        *("--store-url", own_store.url, "--actuators", f"a={actuator.address}", "--drain-grace-s", "0.2"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(own_store.start)
        async with clients.channel(f"127.0.0.1:{rpc}") as channel:
            stub = scheduler_pb2_grpc.PreSchedulerServiceStub(channel)
            topology = await stub.GetTopology(scheduler_pb2.GetTopologyRequest(), timeout=30, wait_for_ready=True)
        assert [item.name for item in topology.domains] == ["a", "s2-0", "s1-0", "n0", "n1"]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
