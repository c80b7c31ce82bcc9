"""Records in the store that the engine cannot read: each holds its own subject, and nothing else."""

import asyncio

import grpc
import pytest

from policy_engine.core.pool.decide import PoolState
from policy_engine.core.scaled.decide import ScaledState
from policy_engine.shell.engine_state import load_engine_state
from policy_engine.shell.replay import REPLAY_INPUT
from policy_engine.shell.state_records import DESIRED_POOL, POOL_STATE, SCALED_STATE
from tests.services.policy.test_engine_pools import apply, decisions_of, pool_of, pooled, until
from tests.services.policy.test_engine_scaled import counts_are, disaggregated, request_of
from tests.support.records import (
    garbage,
    has_unknown_field,
    newer,
    put_old,
    truncated,
    with_unknown_field,
)
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.config.resources import Pool, parse_document, pool_to_proto
from trimtab.store import keys
from trimtab.store.records import Refused

POOLS, SCALED, DESIRED = keys.engine_state("pools"), keys.engine_state("scaled"), keys.desired_pools()
REQUESTS = keys.scaling_requests()
SPOILS = pytest.mark.parametrize("spoil", [newer, truncated, garbage])


async def pool_status(engine, name="shared") -> policy_pb2.PoolStatus:
    response = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    return next((item for item in response.pools if item.pool == name), policy_pb2.PoolStatus())


async def service_status(engine, name) -> policy_pb2.ServiceStatus:
    response = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    return next((item for item in response.services if item.service == name), policy_pb2.ServiceStatus())


def second_pool() -> policy_pb2.Pool:
    found = parse_document(
        {
            "apiVersion": "trimtab.dev/v1",
            "kind": "Pool",
            "metadata": {"name": "other"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "node-1", "gpuIndices": [0, 1]}],
                "members": [{"service": "code", "initialAwake": 2}],
            },
        }
    )
    assert isinstance(found, Pool)
    return pool_to_proto(found)


async def stored(store, key, name):
    """A record, once the engine has written one."""
    return await until(lambda: store.redis.hget(key, name))


async def pools_with_states(fake_actuator, start_engine, windows, store):
    """Two pools that an engine, which is gone by now, has left with states and desired states."""
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), gpus=2), second_pool())
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 4))
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=300, running=4)
    for name in ("shared", "other"):
        await stored(store, POOLS, name)

    async def all_done():
        return all(item.outcome.state == decision_pb2.OUTCOME_STATE_SUCCEEDED for item in await decisions_of(engine))

    await until(all_done)
    await engine.stop()


@SPOILS
@pytest.mark.parametrize(("key", "kind"), [(POOLS, POOL_STATE), (DESIRED, DESIRED_POOL)], ids=["state", "desired"])
async def test_a_pool_whose_record_cannot_be_read_is_held_until_it_can(
    key, kind, spoil, fake_actuator, start_engine, windows, store
):
    await pools_with_states(fake_actuator, start_engine, windows, store)
    good = await store.redis.hget(key, "shared")
    bad = spoil(kind, good)
    await store.redis.hset(key, "shared", bad)
    sent = len(fake_actuator.states)
    engine = await start_engine(fake_actuator)

    async def both_looked_at():
        response = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        return response.leader and len(response.pools) == 2

    await until(both_looked_at)
    held = await pool_status(engine)
    assert f"{key}, field shared: " in held.holding
    assert f"HDEL '{key}' 'shared'" in held.holding
    assert (await service_status(engine, "chat")).holding == held.holding
    assert (await pool_status(engine, "other")).awake_gpus == 2
    assert "HDEL" not in (await pool_status(engine, "other")).holding
    sample = engine.context.registry.get_sample_value
    reason = "newer" if spoil is newer else "corrupt"
    labels = {"kind": kind.name, "subject": "shared", "reason": reason}
    assert sample("trimtab_policy_refused_records", labels) == 1
    assert sample("trimtab_policy_holding", {"subject": "shared"}) == 1
    # A starving member of the held pool: nothing is decided, and the bytes stay.
    decided = len(await decisions_of(engine))
    await windows.demand("chat", 50)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=1, running=40, waiting=30)
    seen = sample("trimtab_policy_turn_seconds_count")
    await until(lambda: asyncio.sleep(0, sample("trimtab_policy_turn_seconds_count") > seen + 5))
    assert len(await decisions_of(engine)) == decided
    assert len(fake_actuator.states) == sent
    assert await store.redis.hget(key, "shared") == bad
    answer = await engine.stub.Evaluate(policy_pb2.EvaluateRequest(kind=policy_pb2.RESOURCE_KIND_POOL, name="shared"))
    assert not answer.HasField("decision")
    assert answer.reason == held.holding
    # Restored, it goes on: the running engine sees it.
    await store.redis.hset(key, "shared", good)

    async def goes_on():
        return "HDEL" not in (await pool_status(engine)).holding

    await until(goes_on)
    await until(lambda: asyncio.sleep(0, sample("trimtab_policy_refused_records", labels) is None))


async def test_a_new_leader_sends_a_held_pools_last_desired_state(fake_actuator, start_engine, windows, store):
    await pools_with_states(fake_actuator, start_engine, windows, store)
    await store.redis.hset(POOLS, "shared", b"?")
    desired = await store.redis.hget(DESIRED, "shared")
    before = fake_actuator.highest_token
    await start_engine(fake_actuator)
    await until(
        lambda: asyncio.sleep(
            0, fake_actuator.highest_token > before and fake_actuator.tokens.count(fake_actuator.highest_token) >= 2
        )
    )
    assert fake_actuator.highest_token > before
    assert await store.redis.hget(DESIRED, "shared") == desired


async def test_a_held_pool_does_not_settle_what_its_actuator_refuses(fake_actuator, start_engine, windows, store):
    """The actuator has a newer state than the store: an engine that can read the pool's records goes on from it."""
    await pools_with_states(fake_actuator, start_engine, windows, store)
    await store.redis.hset(POOLS, "shared", b"?")
    desired = await store.redis.hget(DESIRED, "shared")
    fake_actuator.current["shared"].state_revision += 5
    engine = await start_engine(fake_actuator)
    sample = engine.context.registry.get_sample_value
    await until(lambda: asyncio.sleep(0, (sample("trimtab_policy_turn_seconds_count") or 0) > 10))
    assert await store.redis.hget(POOLS, "shared") == b"?"
    assert await store.redis.hget(DESIRED, "shared") == desired


async def test_a_deleted_pool_takes_its_refused_record_along(fake_actuator, start_engine, windows, store):
    await pools_with_states(fake_actuator, start_engine, windows, store)
    await store.redis.hset(POOLS, "shared", b"?")
    engine = await start_engine(fake_actuator)

    async def held():
        return "HDEL" in (await pool_status(engine)).holding

    await until(held)
    await engine.stub.DeletePool(policy_pb2.DeletePoolRequest(name="shared"))

    async def gone():
        return not await store.redis.hexists(POOLS, "shared")

    await until(gone)
    assert not await store.redis.hexists(POOLS, "shared")


@pytest.mark.parametrize(
    ("key", "spoil"),
    [(SCALED, newer), (SCALED, truncated), (SCALED, garbage), (REQUESTS, truncated), (REQUESTS, garbage)],
)
async def test_a_scaled_service_whose_record_cannot_be_read_is_held_until_it_can(
    key, spoil, fake_actuator, start_engine, windows, store
):
    engine = await start_engine(fake_actuator)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=disaggregated()))
    request = await counts_are(store, 1, 2)
    good = await stored(store, key, "reason")
    await engine.stop()
    bad = spoil(SCALED_STATE, good)
    await store.redis.hset(key, "reason", bad)
    engine = await start_engine(fake_actuator)

    async def held():
        found = (await service_status(engine, "reason")).holding
        return found if "HDEL" in found else ""

    assert f"{key}, field reason: " in await until(held)
    status = await service_status(engine, "reason")
    assert [role.desired for role in status.roles] == [1, 2]
    sample = engine.context.registry.get_sample_value
    assert sample("trimtab_policy_holding", {"subject": "reason"}) == 1
    for name in ("reason-p-0", "reason-d-0"):
        fake_actuator.put(name, "reason", role=2 if "-p-" in name else 3)
    await windows.write("reason", ["reason-p-0"], role=2, prefill_tps=900, running=9)
    await windows.write("reason", ["reason-d-0"], role=3, decode_tps=900, running=90)
    seen = sample("trimtab_policy_turn_seconds_count")
    await until(lambda: asyncio.sleep(0, sample("trimtab_policy_turn_seconds_count") > seen + 10))
    assert await store.redis.hget(key, "reason") == bad
    if key == SCALED:
        refreshed = await request_of(store)
        assert refreshed.expire_time.ToNanoseconds() > request.expire_time.ToNanoseconds()
        assert refreshed.fencing.token > request.fencing.token
        assert refreshed.create_time == request.create_time
        assert [role.replicas for role in refreshed.roles] == [1, 2]
    await store.redis.hset(key, "reason", good)

    async def grown():
        found = await request_of(store)
        return found is not None and found.roles[1].replicas > 2

    await until(grown)


async def test_unknown_fields_of_a_state_survive_the_running_engine(fake_actuator, start_engine, windows, store):
    await pools_with_states(fake_actuator, start_engine, windows, store)
    raw = await store.redis.hget(POOLS, "shared")
    await store.redis.hset(POOLS, "shared", with_unknown_field(POOL_STATE, raw, "state", "members"))
    await start_engine(fake_actuator)
    written = set()

    async def rewritten():
        found = await store.redis.hget(POOLS, "shared")
        written.add(found)
        await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=300, running=4)
        return len(written) > 3

    await until(rewritten)
    for found in written:
        assert has_unknown_field(POOL_STATE.undamaged(found))


async def test_what_a_release_before_schema_numbers_wrote_is_taken_up(store):
    await put_old(store, "policy_engine")
    memory = await load_engine_state(store)
    assert memory.refused() == []
    assert set(memory.pools) == {"shared", "fresh"}
    assert memory.pools["fresh"] == PoolState()
    assert memory.pools["shared"].round == ("chat", "pd")
    assert memory.scaled["batch"] == ScaledState()
    assert memory.scaled["reason"].queued == 7.5
    assert memory.desired["shared"].state_revision == 12
    assert memory.requests["reason"].decision_id == "d-018bcfe56800-3"


async def test_decisions_of_such_a_release_are_shown_and_not_replayed(store, start_engine):
    await put_old(store, "policy_engine")
    engine = await start_engine(None)

    async def loaded():
        return (await engine.stub.ListDecisions(policy_pb2.ListDecisionsRequest())).decisions

    found = await until(loaded)
    assert [item.decision_id for item in found] == [f"d-018bcfe56800-{number}" for number in (3, 2, 1, 0)]
    for record in found:
        request = policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id)
        explained = await engine.stub.ExplainDecision(request)
        assert explained.decision == record
        assert record.replay_input.startswith("{")
        assert not explained.replay_matches
        assert "of schema 0 (JSON)" in explained.lines[-1]
        assert explained.lines[-1] == f"replay: {explained.not_replayed}"
        assert f"reason: {record.reason}" in explained.lines


async def test_an_input_is_stored_once_and_given_by_explain(fake_actuator, start_engine, windows, store):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pool_of(("chat", 2), gpus=2))
    (record,) = await until(lambda: decisions_of(engine))
    raw = await store.redis.hget(keys.decision_inputs(), record.decision_id)
    assert not isinstance(REPLAY_INPUT.decode(raw, key="k"), Refused)
    assert not record.replay
    assert b"node-0" in raw
    index = await store.redis.hget(keys.decision_index(), record.decision_id)
    streamed = [fields[b"m"] for _, fields in await store.redis.xrange(keys.decisions())]
    for kept in (index, *streamed):
        assert not decision_pb2.Decision.FromString(kept).replay
    request = policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id)
    explained = await engine.stub.ExplainDecision(request)
    assert explained.replay_matches
    assert explained.decision.replay == raw
    await store.redis.hset(keys.decision_inputs(), record.decision_id, newer(REPLAY_INPUT, raw))
    explained = await engine.stub.ExplainDecision(request)
    assert not explained.replay_matches
    assert "has schema 2, this release reads" in explained.lines[-1]
    await store.redis.hdel(keys.decision_inputs(), record.decision_id)
    assert "its input is not kept" in (await engine.stub.ExplainDecision(request)).lines[-1]


async def test_a_result_that_cannot_be_read_is_left_out_and_named(fake_actuator, start_engine, store):
    engine = await start_engine(fake_actuator)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=disaggregated()))
    await counts_are(store, 1, 2)
    await store.redis.hset(keys.schedule_results(), "reason", b"?")
    sample = engine.context.registry.get_sample_value
    labels = {"kind": "scheduling result", "subject": "reason", "reason": "corrupt"}
    await until(lambda: asyncio.sleep(0, sample("trimtab_policy_refused_records", labels) == 1))
    assert await store.redis.hget(keys.schedule_results(), "reason") == b"?"
    with pytest.raises(grpc.aio.AioRpcError):
        await engine.stub.GetPool(policy_pb2.GetPoolRequest(name="none"))
    result = scheduler_pb2.ScalingResult(service="reason")
    await store.redis.hset(keys.schedule_results(), "reason", result.SerializeToString())
    await until(lambda: asyncio.sleep(0, sample("trimtab_policy_refused_records", labels) is None))


async def test_a_pool_that_its_actuator_holds_says_why_and_its_decision_stays_open(
    fake_actuator, start_engine, windows, monkeypatch
):
    """Nothing came of it, and nothing was taken back: it is carried out once the actuator can read the record."""
    monkeypatch.setattr("policy_engine.core.pool.transition_outcome.REFUSED_PAUSE_S", 0.2)
    fake_actuator.cannot_read = "shared is held: k, field a-0: is no replica; remove it with HDEL 'k' 'a-0'"
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), gpus=2))

    async def said():
        return "HDEL 'k' 'a-0'" in (await pool_status(engine)).holding

    await until(said)
    sample = engine.context.registry.get_sample_value
    seen = sample("trimtab_policy_turn_seconds_count")
    await until(lambda: asyncio.sleep(0, sample("trimtab_policy_turn_seconds_count") > seen + 5))
    [decision] = await decisions_of(engine)
    assert decision.outcome.state == decision_pb2.OUTCOME_STATE_PENDING

    fake_actuator.cannot_read = ""

    async def carried_out():
        [found] = await decisions_of(engine)
        return found.outcome.state == decision_pb2.OUTCOME_STATE_SUCCEEDED

    await until(carried_out)
    assert "HDEL" not in (await pool_status(engine)).holding
