"""Records in the store that the pre-scheduler cannot read: each holds its own service, and nothing else."""

import asyncio

import grpc
import pytest

from prescheduler.core.model import Outcome
from prescheduler.shell.record_kinds import ANSWER, CYCLE, GROUP, RESULT
from prescheduler.shell.records import Records, group_field
from tests.support.records import garbage, has_unknown_field, newer, put_old, truncated, with_unknown_field
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.rpc.errors import error_reason
from trimtab.store import keys
from trimtab.store.records import Refused

from .test_service import ROWS, prescheduler, until_true, wanted

RESULTS, GROUPS = keys.schedule_results(), keys.deployment_groups()
PLACED, HELD = scheduler_pb2.SCHEDULING_OUTCOME_PLACED, scheduler_pb2.SCHEDULING_OUTCOME_HELD
SPOILS = pytest.mark.parametrize("spoil", [newer, truncated, garbage])


async def placed_once(store, store_url, actuator):
    """What a pre-scheduler, which is gone by now, has left of two services."""
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted(), wanted("other"))
        result = await running.until(PLACED)
        await running.until(PLACED, "other")

        async def listed():
            return len(await store.redis.hkeys(GROUPS)) == 2

        await until_found(listed)
    return group_field("a", "chat", result.groups[0].group)


async def until_found(condition, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while True:
            found = await condition()
            if found:
                return found
            await asyncio.sleep(0.02)


def sample_of(running, kind, subject, reason):
    labels = {"kind": kind.name, "subject": subject, "reason": reason}
    return running.context.registry.get_sample_value("trimtab_prescheduler_refused_records", labels)


async def held_result(store, service="chat"):
    """The service's newest result in a cycle, once that says that it is held for a record."""

    async def look():
        for _, fields in reversed(await store.redis.xrange(keys.cycles())):
            cycle = CYCLE.decode(fields[b"m"], key=keys.cycles())
            for result in cycle.results:
                if result.service == service and result.outcome == HELD and "HDEL" in result.detail:
                    return result
        return None

    return await until_found(look)


@SPOILS
@pytest.mark.parametrize("kind", [RESULT, GROUP], ids=["result", "group"])
async def test_a_service_whose_record_cannot_be_read_is_held_until_it_can(
    kind, spoil, store, store_url, start_actuator
):
    actuator, _ = await start_actuator("a", ROWS)
    group = await placed_once(store, store_url, actuator)
    key, name = (RESULTS, "chat") if kind is RESULT else (GROUPS, group)
    good = await store.redis.hget(key, name)
    bad = spoil(kind, good)
    await store.redis.hset(key, name, bad)
    writes = len(actuator.writes)
    async with prescheduler(store, store_url, actuator) as running:
        # Both services want more: one gets it.
        await running.ask(wanted(decode=4, decision_id="d-2"), wanted("other", decode=4, decision_id="d-2"))
        held = await held_result(store)
        assert f"{key}, field {name}: " in held.detail
        assert f"HDEL '{key}' '{name}'" in held.detail
        assert held.decision_id == "d-2"

        async def grown():
            result = await running.result("other")
            return result.decision_id == "d-2" and result.outcome == PLACED

        await until_found(grown)
        assert {item.service for write in actuator.writes[writes:] for item in write.groups} == {"other"}
        reason = "newer" if spoil is newer else "corrupt"
        assert sample_of(running, kind, name, reason) == 1
        assert await store.redis.hget(key, name) == bad
        cycles = await store.redis.xlen(keys.cycles())
        finished = "trimtab_prescheduler_cycle_seconds_count"
        seen = running.context.registry.get_sample_value(finished)
        await until_true(lambda: running.context.registry.get_sample_value(finished) > seen + 3)
        assert await store.redis.xlen(keys.cycles()) == cycles, "a service that stays held is no news"
        await store.redis.hset(key, name, good)

        async def goes_on():
            result = await running.result()
            return result.decision_id == "d-2" and result.outcome == PLACED

        await until_found(goes_on)
        assert sample_of(running, kind, name, reason) is None


async def test_a_group_that_cannot_be_read_still_says_where_its_service_is(store):
    await put_old(store, "prescheduler")
    await store.redis.hset(GROUPS, "far/batch/batch-0", b"?")
    records = Records(store, kept_cycles=10)
    await records.load()
    assert records.services_by_cluster() == {"far": frozenset({"batch"}), "local": frozenset({"reason"})}
    assert set(records.held()) == {"batch"}


async def test_a_refused_result_goes_with_its_request(store, store_url, start_actuator):
    actuator, _ = await start_actuator("a", ROWS)
    await placed_once(store, store_url, actuator)
    await store.redis.hset(RESULTS, "chat", b"?")
    async with prescheduler(store, store_url, actuator):
        await held_result(store)
        assert await store.redis.hget(RESULTS, "chat") == b"?"
        await store.redis.hdel(keys.scaling_requests(), "chat")

        async def gone():
            return not await store.redis.hexists(RESULTS, "chat")

        await until_found(gone)


async def test_unknown_fields_survive_the_running_service(store, store_url, start_actuator):
    actuator, _ = await start_actuator("a", ROWS)
    group = await placed_once(store, store_url, actuator)
    for kind, key, name, path in ((RESULT, RESULTS, "chat", "result"), (GROUP, GROUPS, group, "group")):
        raw = await store.redis.hget(key, name)
        await store.redis.hset(key, name, with_unknown_field(kind, raw, path))
    before = {name: await store.redis.hget(key, name) for key, name in ((RESULTS, "chat"), (GROUPS, group))}
    async with prescheduler(store, store_url, actuator) as running:
        await running.ask(wanted(decode=4, decision_id="d-2"))

        async def rewritten():
            now = {name: await store.redis.hget(key, name) for key, name in ((RESULTS, "chat"), (GROUPS, group))}
            return now if all(now[name] != raw for name, raw in before.items()) else None

        now = await until_found(rewritten)
    assert has_unknown_field(RESULT.undamaged(now["chat"]))
    assert has_unknown_field(GROUP.undamaged(now[group]))


async def test_what_a_release_before_schema_numbers_wrote_is_read(store):
    await put_old(store, "prescheduler")
    records = Records(store, kept_cycles=10)
    await records.load()
    assert records.refused() == []
    reason = records.results["reason"]
    assert (reason.outcome, reason.groups[0].add[0].replica) == (Outcome.PARTIAL, "reason-p-0")
    assert records.results["batch"].outcome == Outcome.UNCHANGED
    assert records.services_by_cluster() == {"far": frozenset({"batch"}), "local": frozenset({"reason"})}
    ((_, cycle),) = await records.cycles.read_last(5)
    assert not isinstance(cycle, Refused)
    assert (cycle.cycle_id, len(cycle.results), cycle.duration_s) == ("c-18bcfe56800-4", 2, 0.0625)
    digest, answer = await records.read_answer("once")
    assert (digest, answer.cycle) == (b"0123456789abcdef", cycle)


async def test_a_cycle_that_cannot_be_read_hides_no_other_from_watchers(store, store_url, start_actuator):
    actuator, _ = await start_actuator("a", ROWS)
    good = CYCLE.encode(scheduler_pb2.Cycle(cycle_id="c-good"))
    async with prescheduler(store, store_url, actuator) as running:
        watch = await running.watch()
        await store.redis.xadd(keys.cycles(), {"m": newer(CYCLE, good)})
        await store.redis.xadd(keys.cycles(), {"m": good})
        async for message in watch:
            if message.cycle.cycle_id == "c-good":
                break
        assert message.cycle.cycle_id == "c-good"


@SPOILS
async def test_an_answer_that_cannot_be_read_refuses_that_call_alone(spoil, store, store_url, start_actuator):
    actuator, _ = await start_actuator("a", ROWS)
    async with prescheduler(store, store_url, actuator) as running:
        await until_true(lambda: running.context.registry.get_sample_value("trimtab_prescheduler_leading"))
        call = scheduler_pb2.ScheduleRequest(requests=[wanted()], request_id="once")
        first = await running.stub.Schedule(call, timeout=30)
        key = keys.schedule_answer("once")
        good = await store.redis.hget(key, "answer")
        await store.redis.hset(key, "answer", spoil(ANSWER, good))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Schedule(call, timeout=30)
        assert error_reason(refused.value) == "RECORD_REFUSED"
        assert f"DEL '{key}'" in refused.value.details()
        await store.redis.hset(key, "answer", good)
        assert await running.stub.Schedule(call, timeout=30) == first
        assert len(actuator.writes) == 1
