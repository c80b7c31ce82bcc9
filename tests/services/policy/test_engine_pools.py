"""The engine with a pool, over real sockets and the real store, against a fake actuator."""

import asyncio

import pytest

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.config.resources import parse_document as parse
from trimtab.config.resources import pool_to_proto, service_policy_to_proto
from trimtab.store import keys
from trimtab.store.documents import Documents


def pooled(name: str, *, gpus: int = 1, low: int = 1, high: int = 4, theta: float = 20.0) -> policy_pb2.ServicePolicy:
    return service_policy_to_proto(
        parse(
            {
                "apiVersion": "trimtab.dev/v1",
                "kind": "ServicePolicy",
                "metadata": {"name": name},
                "spec": {
                    "model": f"m-{name}",
                    "slo": {"ttftS": 2, "tpotS": 0.075},
                    "roles": [{"role": "colocated", "minReplicas": low, "maxReplicas": high, "gpusPerReplica": gpus}],
                    "tokenServiceShare": {"thetaTps": theta},
                },
            }
        )
    )


def pool_of(*members: tuple[str, int], gpus: int = 4, **spec: object) -> policy_pb2.Pool:
    return pool_to_proto(
        parse(
            {
                "apiVersion": "trimtab.dev/v1",
                "kind": "Pool",
                "metadata": {"name": "shared"},
                "spec": {
                    "cluster": "local",
                    "gpus": [{"node": "node-0", "gpuIndices": list(range(gpus))}],
                    "members": [{"service": name, "initialAwake": count} for name, count in members],
                    "rescueIntervalS": 0.1,
                    "rebalanceIntervalS": 0.2,
                    "residenceS": 1,
                    **spec,
                },
            }
        )
    )


async def apply(engine, *resources):
    for resource in resources:
        if isinstance(resource, policy_pb2.ServicePolicy):
            await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=resource))
        else:
            await engine.stub.ApplyPool(policy_pb2.ApplyPoolRequest(pool=resource))


async def decisions_of(engine, subject="shared"):
    response = await engine.stub.ListDecisions(policy_pb2.ListDecisionsRequest(subject=subject))
    return list(response.decisions)


async def until(condition, timeout_s=20.0):
    give_up = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = await condition()
        if found:
            return found
        assert asyncio.get_running_loop().time() < give_up, "it did not come true"
        await asyncio.sleep(0.02)


async def settled(engine, state=decision_pb2.OUTCOME_STATE_SUCCEEDED, kind=decision_pb2.DECISION_KIND_TRANSITION):
    async def look():
        return [item for item in await decisions_of(engine) if item.kind == kind and item.outcome.state == state]

    return await until(look)


async def test_a_pool_is_born_and_a_starving_member_is_rescued(fake_actuator, start_engine, windows):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 8))
    assert fake_actuator.awake == {"chat-node-0-0", "chat-node-0-1", "code-node-0-2", "code-node-0-3"}
    await windows.demand("chat", 0)
    await windows.demand("code", 0)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=300, running=40, waiting=30)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=10, running=0.1)
    found = await settled(engine)
    record = found[0]
    assert record.rule == decision_pb2.RULE_RESCUE_CRITICAL
    assert len(record.transition.releases) == len(record.transition.wakes) == 1
    assert record.transition.releases[0].service == "code"
    assert record.outcome.operation_ids
    explained = await engine.stub.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id))
    assert explained.replay_matches, "\n".join(explained.lines)
    assert sum(name.startswith("chat") for name in fake_actuator.awake) == 3
    status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    assert status.leader
    assert status.pools[0].awake_gpus == 4
    assert {item.service: item.region for item in status.services}["chat"] == policy_pb2.REGION_CRITICAL
    sample = engine.context.registry.get_sample_value
    assert sample("trimtab_policy_leader") == 1
    assert sample("trimtab_policy_z", {"service": "chat", "role": "colocated"}) < 0.8
    assert sample("trimtab_policy_decisions_total", {"kind": "transition", "rule": "rescue_critical"}) >= 1


@pytest.mark.parametrize(("busy", "released"), [("code-node-0-2", "code-node-0-3"), ("code-node-0-3", "code-node-0-2")])
async def test_the_replica_with_the_fewest_requests_is_released_by_counts_of_now(
    busy, released, fake_actuator, start_engine, windows
):
    """The watch says that both have none, as when they woke; the actuator's newest look says otherwise."""
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 8))
    fake_actuator.in_flight = {busy: 7}
    await windows.demand("chat", 0)
    await windows.demand("code", 0)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=300, running=40, waiting=30)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=10, running=0.1)
    record = (await settled(engine))[0]
    assert [change.replica for change in record.transition.releases] == [released]
    explained = await engine.stub.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id))
    assert explained.replay_matches, "\n".join(explained.lines)


async def test_a_rescue_takes_the_gpu_on_which_a_cold_replica_is_pre_warmed(fake_actuator, start_engine, windows):
    """Whom the pre-warming put to sleep is released for good, and what boots there keeps nobody from waking."""
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pooled("bulk", low=0))
    await apply(engine, pool_of(("chat", 1), ("code", 3), ("bulk", 0), prewarm=True))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    assert (fake_actuator.states[0].prewarm, fake_actuator.states[0].residence_s) == (True, 1.0)
    steps = [
        actuator_pb2.OperationStep(kind=actuator_pb2.STEP_KIND_RELEASE, replica="code-node-0-1"),
        actuator_pb2.OperationStep(kind=actuator_pb2.STEP_KIND_CREATE, replica="bulk-node-0-1"),
    ]
    fake_actuator.operations["op-warm"] = actuator_pb2.Operation(
        operation_id="op-warm",
        kind=actuator_pb2.OPERATION_KIND_PREWARM,
        state=actuator_pb2.OPERATION_STATE_RUNNING,
        subject="shared",
        cluster="local",
        steps=steps,
    )
    fake_actuator.kick()
    for name, life_cycle in (
        ("code-node-0-1", types_pb2.LIFE_CYCLE_SLEEPING),
        ("bulk-node-0-1", types_pb2.LIFE_CYCLE_STARTING),
    ):
        fake_actuator.replicas[name].life_cycle = life_cycle
        fake_actuator.replicas[name].routable = False
    fake_actuator.kick()

    async def seen():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        bulk = next(item for item in status.services if item.service == "bulk")
        return bulk.roles[0].replicas["LIFE_CYCLE_STARTING"] == 1

    await until(seen)
    for name in ("chat", "code", "bulk"):
        await windows.demand(name, 0)
    await windows.write("chat", ["chat-node-0-0"], decode_tps=300, running=40, waiting=30)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=10, running=0.1)
    record = (await settled(engine))[0]
    assert [change.replica for change in record.transition.releases] == ["code-node-0-1"]
    assert [change.replica for change in record.transition.wakes] == ["chat-node-0-1"]


async def test_a_pool_that_does_not_ask_for_pre_warming_tells_the_actuator_nothing_of_it(fake_actuator, start_engine):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pool_of(("chat", 1)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    told = {field.name for field, _ in fake_actuator.states[0].ListFields()}
    assert not {"prewarm", "residence_s"} & told
    await apply(engine, pool_of(("chat", 1), prewarm=True))
    await until(lambda: asyncio.sleep(0, fake_actuator.states[-1].prewarm))
    assert fake_actuator.states[-1].decision_id == fake_actuator.states[0].decision_id, "no new decision"
    assert fake_actuator.states[-1].awake == fake_actuator.states[0].awake


@pytest.mark.parametrize("behaviour", ["roll_back", "fail"])
async def test_case_14_a_failed_transition_is_settled_and_not_retried_at_once(
    behaviour, fake_actuator, start_engine, windows
):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 8))
    before = set(fake_actuator.awake)
    fake_actuator.behaviour = behaviour
    await windows.demand("chat", 0)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=300, running=40, waiting=30)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=10, running=0.1)
    wanted = {
        "roll_back": decision_pb2.OUTCOME_STATE_ROLLED_BACK,
        "fail": decision_pb2.OUTCOME_STATE_FAILED,
    }[behaviour]

    async def all_replicas_tried():
        transitions = [
            item for item in await decisions_of(engine) if item.kind == decision_pb2.DECISION_KIND_TRANSITION
        ]
        return len(transitions) >= 2 and all(item.outcome.state == wanted for item in transitions) and transitions

    transitions = await until(all_replicas_tried)
    touched = [item.transition.wakes[0].replica for item in transitions]
    assert len(set(touched)) == len(touched), "a replica was tried again at once"
    await until(lambda: asyncio.sleep(0, set(fake_actuator.current["shared"].awake) == before))
    assert fake_actuator.awake == before


async def test_one_transition_at_a_time(fake_actuator, start_engine, windows):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 1), ("code", 3)))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 8))
    fake_actuator.behaviour = "hang"
    await windows.demand("chat", 0)
    await windows.write("chat", ["chat-node-0-0"], decode_tps=30, running=40, waiting=30)
    await windows.write("code", ["code-node-0-1", "code-node-0-2", "code-node-0-3"], decode_tps=10, running=0.1)
    await settled(engine, decision_pb2.OUTCOME_STATE_PENDING)
    await asyncio.sleep(0.6)
    assert len(fake_actuator.states) == 2
    status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    assert status.pools[0].operation_id == "op-2"
    fake_actuator.finish("op-2")
    await settled(engine)


async def test_a_restart_changes_nothing_and_republishes_the_same_state(fake_actuator, start_engine, windows):
    first = await start_engine(fake_actuator)
    await apply(first, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 8))
    await settled(first, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    told = len(fake_actuator.tokens)
    await first.stop()
    second = await start_engine(fake_actuator)
    await until(lambda: asyncio.sleep(0, len(fake_actuator.tokens) > told))
    await asyncio.sleep(0.3)
    assert len(fake_actuator.states) == 1
    assert fake_actuator.tokens[-1] > fake_actuator.tokens[0]
    assert len(await decisions_of(second)) == 1


async def test_a_follower_takes_over_a_killed_leader_and_the_old_token_is_refused(fake_actuator, start_engine, windows):
    first = await start_engine(fake_actuator, lease_ttl_s=1.5)
    second = await start_engine(fake_actuator, lease_ttl_s=1.5)
    await apply(first, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.replicas) == 8))
    statuses = [await item.stub.GetStatus(policy_pb2.GetStatusRequest()) for item in (first, second)]
    assert sorted(status.leader for status in statuses) == [False, True]
    leader, follower = (first, second) if statuses[0].leader else (second, first)
    old = fake_actuator.tokens[-1]
    await leader.kill()

    async def leads():
        return (await follower.stub.GetStatus(policy_pb2.GetStatusRequest())).leader

    await until(leads)
    await until(lambda: asyncio.sleep(0, fake_actuator.tokens[-1] > old))
    assert len(fake_actuator.states) == 1
    assert (await decisions_of(follower))[0].fencing.token == old


async def test_the_stores_restart_changes_nothing(own_store, fake_actuator, start_engine, eventually):
    """SIGKILL of the store, and its return with what it had: no new state, and no lower token."""
    engine = await start_engine(fake_actuator, store_url=own_store.url, lease_ttl_s=1.5)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    own_store.kill()

    async def leads(wanted):
        return (await engine.stub.GetStatus(policy_pb2.GetStatusRequest())).leader is wanted

    # A lease that the store cannot renew runs out.
    await until(lambda: leads(False))
    own_store.start()
    await until(lambda: leads(True))
    await asyncio.sleep(0.3)
    assert len(fake_actuator.states) == 1
    assert fake_actuator.tokens == sorted(fake_actuator.tokens)
    assert len(await decisions_of(engine)) == 1


async def test_an_actuator_that_is_ahead_is_followed(fake_actuator, start_engine, store):
    """The store lost a pool's desired state; the actuator has revision 7: who is awake stays awake."""
    for name in ("chat-node-0-1", "code-node-0-3"):
        fake_actuator.put(name, name.split("-")[0], pool="shared")
    from trimtab.api.actuator.v1 import actuator_pb2

    fake_actuator.current["shared"] = actuator_pb2.PoolState(
        pool="shared", state_revision=7, awake=["chat-node-0-1", "code-node-0-3"]
    )
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, fake_actuator.current["shared"].state_revision > 7))
    assert sorted(fake_actuator.current["shared"].awake) == ["chat-node-0-1", "code-node-0-3"]


async def test_a_changed_pool_keeps_awake_whoever_still_fits(fake_actuator, start_engine):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    await apply(engine, pool_of(("chat", 2), ("code", 1), gpus=3))

    async def laid_out_anew():
        births = [item for item in await decisions_of(engine) if item.kind == decision_pb2.DECISION_KIND_POOL_BIRTH]
        return len(births) == 2

    await until(laid_out_anew)
    await until(lambda: asyncio.sleep(0, len(fake_actuator.current["shared"].overlay) == 6))
    assert sorted(fake_actuator.current["shared"].awake) == ["chat-node-0-0", "chat-node-0-1", "code-node-0-2"]


async def test_case_18_a_stolen_lease_ends_the_old_leaders_writes(fake_actuator, start_engine, windows, store):
    """Another owner holds the lease and a newer token: the engine stops leading, and nothing of it is written."""
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    await store.redis.hset(keys.lease(keys.POLICY_ENGINE), mapping={"owner": "thief", "token": 99})
    await store.redis.set(keys.lease_token(keys.POLICY_ENGINE), 99)
    await store.redis.persist(keys.lease(keys.POLICY_ENGINE))
    await windows.demand("chat", 9)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=30, running=40, waiting=30)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=10, running=0.1)

    async def follows():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        return not status.leader and status.fencing.token == 99

    await until(follows)
    await asyncio.sleep(0.3)
    assert len(fake_actuator.states) == 1
    assert len(await decisions_of(engine)) == 1


async def test_a_token_that_the_store_has_lost_is_overtaken(fake_actuator, start_engine):
    """The actuator has seen token 50 and the store counts from 0 again: the engine takes 51, it is not shut out."""
    fake_actuator.highest_token = 50
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await until(lambda: asyncio.sleep(0, bool(fake_actuator.tokens)))
    assert fake_actuator.tokens[0] == 51
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)


async def test_a_stored_pool_that_does_not_parse_is_not_forgotten(fake_actuator, start_engine, store):
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    broken = pool_of(("chat", 2), ("code", 2))
    broken.spec.rescue_interval_s = -1
    await Documents(store, keys.POLICY_ENGINE, "pools", policy_pb2.Pool).put("shared", broken)
    await asyncio.sleep(0.4)
    assert await store.redis.hexists(keys.desired_pools(), "shared")
    await apply(engine, pool_of(("chat", 2), ("code", 2)))
    await asyncio.sleep(0.3)
    assert len(await decisions_of(engine)) == 1
    assert len(fake_actuator.states) == 1


async def test_a_rebalance_gives_way_to_a_hard_guard(fake_actuator, start_engine, windows):
    engine = await start_engine(fake_actuator)
    guarded = pooled("chat")
    guarded.spec.guards.ttft_p95_s.hard = 2
    await apply(engine, guarded, pooled("code"), pooled("bulk"))
    await apply(engine, pool_of(("chat", 1), ("code", 1), ("bulk", 2)))
    await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    fake_actuator.behaviour = "hang"
    for name in ("chat", "code", "bulk"):
        await windows.demand(name, 0)
    await windows.write("chat", ["chat-node-0-0"], decode_tps=300, running=10)
    await windows.write("bulk", ["bulk-node-0-2", "bulk-node-0-3"], decode_tps=0, running=0)
    await windows.write("code", ["code-node-0-1"], decode_tps=180, running=10)
    (rebalance,) = await settled(engine, decision_pb2.OUTCOME_STATE_PENDING)
    assert rebalance.rule == decision_pb2.RULE_REBALANCE
    await until(lambda: asyncio.sleep(0, "op-2" in fake_actuator.operations))
    fake_actuator.behaviour = "succeed"
    await windows.write("chat", ["chat-node-0-0"], decode_tps=300, running=10, ttft_s=4.0)

    async def rescued():
        return [item for item in await decisions_of(engine) if item.rule == decision_pb2.RULE_RESCUE_HARD_GUARD]

    rescue = (await until(rescued))[0]
    assert rescue.transition.wakes[0].service == "chat"
    (cancelled,) = await settled(engine, decision_pb2.OUTCOME_STATE_ROLLED_BACK)
    assert cancelled.decision_id == rebalance.decision_id
    assert "pre-empted: chat: TTFT" in cancelled.outcome.detail


async def test_the_end_of_an_operation_is_taken_up_at_once(fake_actuator, start_engine):
    """Cycles come every 30 s here, and the outcome does not wait for one."""
    patient = await start_engine(fake_actuator)
    await apply(patient, pooled("chat"), pooled("code"), pool_of(("chat", 2), ("code", 2)))
    await settled(patient, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    fake_actuator.behaviour = "hang"
    await apply(patient, pool_of(("chat", 2), ("code", 1), gpus=3))
    await until(lambda: asyncio.sleep(0, len(fake_actuator.states) == 2))
    await patient.stop()
    old = fake_actuator.tokens[-1]
    slow = await start_engine(fake_actuator, tick_interval_s=30)
    await until(lambda: asyncio.sleep(0, fake_actuator.tokens[-1] > old))
    fake_actuator.finish("op-2")

    async def told():
        return (await decisions_of(slow))[0].outcome.state == decision_pb2.OUTCOME_STATE_SUCCEEDED

    await until(told)
    assert (await decisions_of(slow))[0].outcome.operation_ids == ["op-2"]


async def test_new_windows_are_decided_on_at_once(store, fake_actuator, start_engine, windows):
    """Cycles come every 30 s here: whoever is short of capacity waits for its window alone."""
    first = await start_engine(fake_actuator)
    await apply(first, pooled("chat"), pooled("code"), pool_of(("chat", 1), ("code", 1), gpus=3))
    await settled(first, kind=decision_pb2.DECISION_KIND_POOL_BIRTH)
    await first.stop()
    old = fake_actuator.tokens[-1]
    slow = await start_engine(fake_actuator, tick_interval_s=30)
    await until(lambda: asyncio.sleep(0, fake_actuator.tokens[-1] > old))

    async def listens():
        return (await store.redis.pubsub_numsub(keys.windows_written()))[0][1]

    await until(listens)
    await asyncio.sleep(0.3)  # The rescue loop is due again.
    for name in ("chat", "code"):
        await windows.demand(name, 0)
    await windows.write("chat", ["chat-node-0-0"], decode_tps=50, running=10)
    await windows.write("code", ["code-node-0-1"], decode_tps=0, running=0)
    assert len(fake_actuator.states) == 1
    await store.redis.publish(keys.windows_written(), "0.000")

    async def woken():
        return [item for item in await decisions_of(slow) if item.kind == decision_pb2.DECISION_KIND_TRANSITION]

    (decision,) = await until(woken)
    assert decision.transition.wakes[0].service == "chat"


async def test_an_actuator_of_another_cluster_is_refused(fake_actuator, start_engine):
    fake_actuator.cluster = "elsewhere"
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat"), pool_of(("chat", 2)))

    async def said():
        status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
        return not status.clusters[0].reachable and "elsewhere" in status.clusters[0].detail

    await until(said)
    await asyncio.sleep(0.3)
    assert not fake_actuator.states


async def test_servers_that_exist_are_taken_up_under_their_own_names_and_replayed_so(fake_actuator, start_engine):
    fake_actuator.put("server-a", "chat", node="node-0", gpu_indices=[0])
    fake_actuator.put("server-b", "code", node="node-0", gpu_indices=[1], pool="other")
    for name, role in (("server-c", types_pb2.ROLE_UNSPECIFIED), ("server-d", 99)):
        fake_actuator.put(name, "code", node="node-0", gpu_indices=[0], role=role)
    engine = await start_engine(fake_actuator)
    await apply(engine, pooled("chat", low=0), pooled("code", low=0), pool_of(("chat", 1), ("code", 1), gpus=2))
    birth = (await settled(engine, kind=decision_pb2.DECISION_KIND_POOL_BIRTH))[0]
    names = [item.replica for item in fake_actuator.states[0].overlay]
    assert sorted(names) == ["chat-node-0-1", "code-node-0-0", "code-node-0-1", "server-a"]
    assert sorted(fake_actuator.states[0].awake) == ["code-node-0-1", "server-a"]
    explained = await engine.stub.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=birth.decision_id))
    assert explained.replay_matches
    await asyncio.sleep(0.3)
    assert len(fake_actuator.states) == 1, "what was laid out once is not laid out anew"
