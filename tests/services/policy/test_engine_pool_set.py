"""The engine with several pools, several transitions, scaled services beside them, and GPUs that cannot be read."""

import asyncio

import pytest

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.config.resources import parse_document as parse
from trimtab.config.resources import service_policy_to_proto
from trimtab.store import keys

from .test_engine_pools import apply, decisions_of, pool_of, pooled, settled, until

PENDING = decision_pb2.OUTCOME_STATE_PENDING
SUCCEEDED = decision_pb2.OUTCOME_STATE_SUCCEEDED


async def transitions(engine, count, pool="shared"):
    async def look():
        found = [item for item in await decisions_of(engine, pool) if item.transition.wakes]
        return found if len(found) >= count else None

    return await until(look)


async def hot(windows, service, *replicas):
    await windows.demand(service, 0)
    await windows.write(service, list(replicas), decode_tps=30, running=40, waiting=30)


async def quiet(windows, service, *replicas):
    await windows.demand(service, 0)
    await windows.write(service, list(replicas), decode_tps=0, running=0)


async def two_in_need(fake_actuator, start_engine, windows, *, lease_ttl_s=3.0, **rules):
    """Eight GPUs, four services: `chat` and `text` starve, `code` and `math` rest. The actuator does not finish."""
    engine = await start_engine(fake_actuator, lease_ttl_s=lease_ttl_s)
    names = ("chat", "code", "math", "text")
    pool = pool_of(("chat", 1), ("code", 3), ("math", 3), ("text", 1), gpus=8, rules=rules, residenceS=60)
    await apply(engine, *(pooled(name) for name in names), pool)
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    fake_actuator.behaviour = "hang"
    await quiet(windows, "code", *(f"code-node-0-{index}" for index in (1, 2, 3)))
    await quiet(windows, "math", *(f"math-node-0-{index}" for index in (4, 5, 6)))
    await hot(windows, "chat", "chat-node-0-0")
    await hot(windows, "text", "text-node-0-7")
    return engine


async def test_disjoint_transitions_are_under_way_together_and_end_alone(fake_actuator, start_engine, windows):
    engine = await two_in_need(fake_actuator, start_engine, windows, maxTransitions=2)
    found = await transitions(engine, 2)
    first, second = sorted(found, key=lambda item: item.decision_id)
    moved = [{item.service for item in (*one.transition.releases, *one.transition.wakes)} for one in (first, second)]
    assert moved[0].isdisjoint(moved[1])

    async def both_taken():
        return all(list(item.outcome.operation_ids) for item in await transitions(engine, 2))

    await until(both_taken)
    await asyncio.sleep(0.3)
    assert len(await transitions(engine, 2)) == 2, "no third one: two may be under way"
    status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    assert status.pools[0].operation_id == "op-2, op-3"
    fake_actuator.operations["op-3"].state = actuator_pb2.OPERATION_STATE_ROLLED_BACK
    fake_actuator.kick()
    await settled(engine, decision_pb2.OUTCOME_STATE_ROLLED_BACK)
    await until(lambda: asyncio.sleep(0, fake_actuator.current["shared"].state_revision >= 4))
    awake = set(fake_actuator.current["shared"].awake)
    assert awake >= {item.replica for item in second.transition.releases}, "given back"
    assert awake >= {item.replica for item in first.transition.wakes}, "the other transition is left alone"
    assert awake.isdisjoint(item.replica for item in first.transition.releases)
    states = {item.decision_id: item.outcome.state for item in await transitions(engine, 2)}
    assert (states[first.decision_id], states[second.decision_id]) == (PENDING, decision_pb2.OUTCOME_STATE_ROLLED_BACK)
    fake_actuator.finish("op-2")

    async def first_is_done():
        return first.decision_id in {item.decision_id for item in await settled(engine)}

    await until(first_is_done)
    explained = await engine.stub.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=second.decision_id))
    assert explained.replay_matches, "\n".join(explained.lines)


async def test_a_new_leader_goes_on_with_every_transition_under_way(fake_actuator, start_engine, windows):
    engine = await two_in_need(fake_actuator, start_engine, windows, lease_ttl_s=1.5, maxTransitions=2)

    async def both_taken():
        return all(list(item.outcome.operation_ids) for item in await transitions(engine, 2))

    await until(both_taken)
    ids = [item.decision_id for item in await transitions(engine, 2)]
    await engine.kill()
    other = await start_engine(fake_actuator)
    for name in ("op-2", "op-3"):
        fake_actuator.finish(name)

    async def both_done():
        states = {item.decision_id: item.outcome.state for item in await transitions(other, 2)}
        return [states[name] for name in ids] == [SUCCEEDED, SUCCEEDED]

    await until(both_done)
    assert await both_done()


async def test_a_small_pool_has_one_transition_under_way(fake_actuator, start_engine, windows):
    engine = await two_in_need(fake_actuator, start_engine, windows)
    await transitions(engine, 1)
    await asyncio.sleep(0.5)
    assert len(await transitions(engine, 1)) == 1
    assert len(fake_actuator.states) == 2


def on_node(pool, name, node):
    pool.metadata.name = name
    pool.spec.gpus[0].node = node
    return pool


async def test_each_of_several_pools_decides_for_itself(fake_actuator, start_engine, windows):
    """One pool's transition hangs; the other's rescue does not wait for it."""
    engine = await start_engine(fake_actuator)
    await apply(engine, *(pooled(name) for name in ("chat", "code", "math", "text")))
    await apply(engine, on_node(pool_of(("chat", 1), ("code", 3)), "east", "node-0"))
    await apply(engine, on_node(pool_of(("text", 1), ("math", 3)), "west", "node-1"))
    for name in ("east", "west"):
        await until(lambda name=name: asyncio.sleep(0, name in fake_actuator.current))
    fake_actuator.behaviour = "hang"
    await quiet(windows, "code", *(f"code-node-0-{index}" for index in (1, 2, 3)))
    await quiet(windows, "math", *(f"math-node-1-{index}" for index in (1, 2, 3)))
    await hot(windows, "chat", "chat-node-0-0")
    (stuck,) = await transitions(engine, 1, "east")
    fake_actuator.behaviour = "succeed"
    await hot(windows, "text", "text-node-1-0")
    (moved, *_) = await transitions(engine, 1, "west")
    assert {item.service for item in moved.transition.wakes} == {"text"}
    assert stuck.outcome.state == PENDING
    assert [item.pool for item in (await engine.stub.GetStatus(policy_pb2.GetStatusRequest())).pools] == [
        "east",
        "west",
    ]


async def test_a_service_that_scales_lives_beside_a_pool(fake_actuator, start_engine, windows, store):
    """The pool's members hot-switch, `batch` grows by new replicas; neither is counted or moved by the other's rule."""
    scaled = {
        "apiVersion": "trimtab.dev/v1",
        "kind": "ServicePolicy",
        "metadata": {"name": "batch"},
        "spec": {
            "model": "m",
            "slo": {"ttftS": 2, "tpotS": 0.075},
            "roles": [{"role": "colocated", "minReplicas": 1, "maxReplicas": 9}],
            "proportional": {"targetPerReplica": 100, "scaleOutCoolingS": 0},
        },
    }
    fake_actuator.put("batch-0", "batch")
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), service_policy_to_proto(parse(scaled)))
    await apply(engine, pool_of(("chat", 1), ("code", 3)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    await windows.demand("batch", 0)
    await windows.write("batch", ["batch-0"], decode_tps=280, running=20)
    await quiet(windows, "code", *(f"code-node-0-{index}" for index in (1, 2, 3)))
    await hot(windows, "chat", "chat-node-0-0")
    await transitions(engine, 1)

    async def asked():
        raw = await store.redis.hget(keys.scaling_requests(), "batch")
        request = scheduler_pb2.ScalingRequest.FromString(raw) if raw else None
        return request if request is not None and request.roles[0].replicas == 3 else None

    await until(asked)
    state = fake_actuator.current["shared"]
    assert {item.service for item in state.overlay} == {"chat", "code"}
    status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    modes = {item.service: item.mode for item in status.services}
    assert modes == {
        "batch": policy_pb2.SERVICE_MODE_SCALED,
        "chat": policy_pb2.SERVICE_MODE_POOLED,
        "code": policy_pb2.SERVICE_MODE_POOLED,
    }


@pytest.mark.parametrize("how", ["unknown", "not listed"])
async def test_a_pool_whose_gpus_cannot_be_read_fails_closed(how, fake_actuator, start_engine, windows):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 1), ("code", 3)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    listed = dict(fake_actuator.replicas)
    if how == "unknown":
        for name, item in listed.items():
            fake_actuator.put(name, item.service, pool="shared", life_cycle=types_pb2.LIFE_CYCLE_UNKNOWN)
    else:
        fake_actuator.replicas.clear()
        fake_actuator.kick()

    async def holds():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        return "BudgetUnknown: none of the 8 replicas on the 4 GPUs of node-0" in status.pools[0].holding

    await until(holds)
    await windows.demand("chat", 5)
    await asyncio.sleep(0.4)
    assert len(fake_actuator.states) == 1
    (record,) = [item for item in await decisions_of(engine) if item.kind == decision_pb2.DECISION_KIND_HOLD]
    assert [item.kind for item in record.clamps] == [decision_pb2.CLAMP_KIND_BUDGET_UNKNOWN]
    explained = await engine.stub.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id))
    assert explained.replay_matches
    fake_actuator.replicas.update(listed)
    fake_actuator.kick()
    await quiet(windows, "code", *(f"code-node-0-{index}" for index in (1, 2, 3)))
    await hot(windows, "chat", "chat-node-0-0")
    await transitions(engine, 1)


async def test_a_burst_that_gateways_report_moves_capacity_before_it_is_felt(fake_actuator, start_engine, windows):
    engine = await start_engine(fake_actuator)
    known = pooled("chat")
    known.spec.token_service_share.capacity_prefill_tps = 8000
    known.spec.token_service_share.capacity_decode_tps = 2000
    await apply(engine, known, pooled("code"), pool_of(("chat", 1), ("code", 3), rebalanceIntervalS=3600))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    await quiet(windows, "code", *(f"code-node-0-{index}" for index in (1, 2, 3)))
    arriving = {"arrival_rps": 10.0, "arrival_prompt_tps": 8000.0, "arrival_output_tps": 2000.0}
    await windows.write("chat", ["gateway-0"], role=types_pb2.ROLE_UNSPECIFIED, held=0.0, **arriving)
    await windows.write("chat", ["chat-node-0-0"], decode_tps=400, running=8)
    (first, *_) = await transitions(engine, 1)
    assert first.rule == decision_pb2.RULE_RESCUE_LOAD
    assert "ρ = 2.00" in first.reason
    sample = engine.context.registry.get_sample_value

    async def shown():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        chat = next(item for item in status.services if item.service == "chat")
        return chat.z > 1 and chat.rho == sample("trimtab_policy_rho", {"service": "chat", "role": "colocated"})

    await until(shown)
    code = (await engine.stub.GetStatus(policy_pb2.GetStatusRequest())).services[1]
    assert not code.HasField("rho"), "its capacities are not known"
