"""The engine with a scaled service: absolute requests for the pre-scheduler, outcomes from its results."""

import asyncio

from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.config.resources import parse_document, service_policy_to_proto
from trimtab.store import keys
from trimtab.store.schedule_results import SCHEDULE_RESULT

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


def disaggregated(**proportional):
    return service_policy_to_proto(
        parse_document(
            {
                "apiVersion": "trimtab.dev/v1",
                "kind": "ServicePolicy",
                "metadata": {"name": "reason"},
                "spec": {
                    "model": "m",
                    "slo": {"ttftS": 2, "tpotS": 0.075},
                    "roles": [
                        {"role": "prefill", "minReplicas": 1, "maxReplicas": 4, "gpuTypes": ["A100"]},
                        {"role": "decode", "minReplicas": 2, "maxReplicas": 8, "gpusPerReplica": 2},
                    ],
                    "ratio": {"prefill": 1, "decode": 2},
                    "affinity": "s2",
                    "priority": 3,
                    "proportional": {"targetPerReplica": 100, "scaleOutCoolingS": 0, **proportional},
                },
            }
        )
    )


async def request_of(store, service="reason"):
    raw = await store.redis.hget(keys.scaling_requests(), service)
    return None if raw is None else scheduler_pb2.ScalingRequest.FromString(raw)


async def until(condition, timeout_s=20.0):
    give_up = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = await condition()
        if found:
            return found
        assert asyncio.get_running_loop().time() < give_up, "it did not come true"
        await asyncio.sleep(0.02)


async def counts_are(store, prefill, decode):
    async def look():
        request = await request_of(store)
        return request if request and [role.replicas for role in request.roles] == [prefill, decode] else None

    return await until(look)


async def decisions_of(engine, subject="reason"):
    """Decisions that changed a count, newest first."""
    response = await engine.stub.ListDecisions(policy_pb2.ListDecisionsRequest(subject=subject))
    return [item for item in response.decisions if item.kind == decision_pb2.DECISION_KIND_SCALE]


async def answer(store, request, outcome, **more):
    result = scheduler_pb2.ScalingResult(
        service=request.service, decision_id=request.decision_id, outcome=outcome, **more
    )
    await store.redis.hset(keys.schedule_results(), request.service, SCHEDULE_RESULT.encode(result))


async def test_floor_then_growth_then_outcome(fake_actuator, start_engine, windows, store):
    engine = await start_engine(fake_actuator)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=disaggregated()))
    request = await counts_are(store, 1, 2)
    assert request.affinity == types_pb2.TOPOLOGY_LEVEL_S2
    assert request.priority == 3
    assert [role.ratio_part for role in request.roles] == [1, 2]
    assert [role.gpus_per_replica for role in request.roles] == [1, 2]
    assert request.fencing.token > 0
    fake_actuator.put("reason-p-0", "reason", role=PREFILL)
    fake_actuator.put("reason-d-0", "reason", role=DECODE)
    fake_actuator.put("reason-d-1", "reason", role=DECODE)
    await windows.demand("reason", 0)
    await windows.write("reason", ["reason-p-0"], role=PREFILL, prefill_tps=900, running=1)
    await windows.write("reason", ["reason-d-0", "reason-d-1"], role=DECODE, decode_tps=500, running=30)
    grown = await counts_are(store, 3, 5)
    record = (await decisions_of(engine))[0]
    assert record.rule == decision_pb2.RULE_PROPORTIONAL_OUT
    assert record.decision_id == grown.decision_id
    assert record.outcome.state == decision_pb2.OUTCOME_STATE_PENDING
    assert grown.create_time == record.decide_time
    await answer(
        store,
        grown,
        scheduler_pb2.SCHEDULING_OUTCOME_DENIED,
        binding_constraint=scheduler_pb2.BINDING_CONSTRAINT_ACTUATOR_REFUSED,
        detail="the group is busy",
    )

    async def told():
        found = (await decisions_of(engine))[0]
        return found.outcome if "the group is busy" in found.outcome.detail else None

    assert (await until(told)).state == decision_pb2.OUTCOME_STATE_PENDING
    refreshed = await request_of(store)
    assert refreshed.expire_time.ToNanoseconds() > grown.expire_time.ToNanoseconds()
    assert refreshed.create_time == grown.create_time
    await answer(
        store,
        grown,
        scheduler_pb2.SCHEDULING_OUTCOME_DENIED,
        binding_constraint=scheduler_pb2.BINDING_CONSTRAINT_CAPACITY,
        detail="no domain has 2 free GPUs",
    )

    async def outcome_is(state):
        found = (await decisions_of(engine))[0]
        return found if found.outcome.state == state else None

    denied = await until(lambda: outcome_is(decision_pb2.OUTCOME_STATE_DENIED))
    assert "no domain has 2 free GPUs" in denied.outcome.detail
    for name, role in (("p-1", PREFILL), ("p-2", PREFILL), ("d-2", DECODE), ("d-3", DECODE), ("d-4", DECODE)):
        fake_actuator.put(f"reason-{name}", "reason", role=role)
    await answer(store, grown, scheduler_pb2.SCHEDULING_OUTCOME_PLACED)
    await until(lambda: outcome_is(decision_pb2.OUTCOME_STATE_SUCCEEDED))
    explained = await engine.stub.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id))
    assert explained.replay_matches
    assert any("500 tokens/s" in line for line in explained.lines)


async def test_a_request_is_refreshed_before_it_expires(fake_actuator, start_engine, store):
    engine = await start_engine(fake_actuator, publish_expiry_s=2)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=disaggregated()))
    first = await counts_are(store, 1, 2)

    async def refreshed():
        return (await request_of(store)).expire_time.ToMilliseconds() > first.expire_time.ToMilliseconds() + 300

    await until(refreshed)
    assert (await request_of(store)).decision_id == first.decision_id
    assert len(await decisions_of(engine)) == 1


async def test_existing_replicas_are_taken_over_when_the_store_was_lost(fake_actuator, start_engine, store):
    """Case 17 on a live engine: seven decode replicas run, the store is empty."""
    for index in range(4):
        fake_actuator.put(f"reason-p-{index}", "reason", role=PREFILL)
    for index in range(7):
        fake_actuator.put(f"reason-d-{index}", "reason", role=DECODE)
    engine = await start_engine(fake_actuator)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=disaggregated()))
    await counts_are(store, 4, 7)
    await asyncio.sleep(0.3)
    await counts_are(store, 4, 7)
    assert (await decisions_of(engine))[0].rule == decision_pb2.RULE_INITIAL


async def test_an_unreachable_actuator_holds_its_services(start_engine, fake_actuator, windows, store):
    engine = await start_engine(fake_actuator, actuator_lost_after_s=1.0)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=disaggregated()))
    await counts_are(store, 1, 2)
    for name, role in (("p-0", PREFILL), ("d-0", DECODE), ("d-1", DECODE)):
        fake_actuator.put(f"reason-{name}", "reason", role=role)

    async def seen():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        return [role.routable for role in status.services[0].roles] == [1, 2]

    await until(seen)
    fake_actuator.mute = True
    fake_actuator.kick()

    async def holds():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        return not status.clusters[0].reachable and "does not answer" in status.services[0].holding

    await until(holds)
    await windows.write("reason", ["reason-d-0", "reason-d-1"], role=DECODE, decode_tps=5000, running=30)
    await asyncio.sleep(0.4)
    await counts_are(store, 1, 2)
    await windows.write("reason", ["reason-d-0", "reason-d-1"], role=DECODE, decode_tps=500, running=30)
    await windows.write("reason", ["reason-p-0"], role=PREFILL, running=1)
    fake_actuator.mute = False
    fake_actuator.kick()
    assert await counts_are(store, 3, 5), "it acts on the signals again once the actuator answers"


async def test_from_zero_on_a_held_request(fake_actuator, start_engine, windows, store):
    """Case 20: no replica exports anything; the gateway holds one request."""
    resource = disaggregated()
    for role in resource.spec.roles:
        role.min_replicas = 0
    engine = await start_engine(fake_actuator)
    await windows.demand("reason", 0)
    await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=resource))
    await counts_are(store, 0, 0)
    await windows.demand("reason", 1)
    await counts_are(store, 1, 1)
    assert (await decisions_of(engine))[0].rule == decision_pb2.RULE_FROM_ZERO
