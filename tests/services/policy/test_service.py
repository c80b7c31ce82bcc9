"""PolicyService over a real socket: what is refused and where, versions, dry runs, pauses, watches."""

import asyncio
from pathlib import Path

import grpc
import pytest

from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.config.resources import parse_document, pool_to_proto, service_policy_to_proto
from trimtab.rpc.errors import error_reason, field_violations

POLICY = policy_pb2.RESOURCE_KIND_SERVICE_POLICY
POOL = policy_pb2.RESOURCE_KIND_POOL


def policy_document(name="chat", *, pooled=True, low=1, high=4, gpus=1):
    spec = {
        "model": "m",
        "slo": {"ttftS": 2, "tpotS": 0.075},
        "roles": [{"role": "colocated", "minReplicas": low, "maxReplicas": high, "gpusPerReplica": gpus}],
    }
    spec |= {"tokenServiceShare": {"thetaTps": 20}} if pooled else {"proportional": {"targetPerReplica": 100}}
    return {"apiVersion": "trimtab.dev/v1", "kind": "ServicePolicy", "metadata": {"name": name}, "spec": spec}


def policy(name="chat", **more):
    return service_policy_to_proto(parse_document(policy_document(name, **more)))


def pool(name="shared", *, members=("chat", "code"), node="node-0", gpus=4, awake=1, cluster="local", **member):
    return pool_to_proto(
        parse_document(
            {
                "apiVersion": "trimtab.dev/v1",
                "kind": "Pool",
                "metadata": {"name": name},
                "spec": {
                    "cluster": cluster,
                    "gpus": [{"node": node, "gpuIndices": list(range(gpus))}],
                    "members": [{"service": item, "initialAwake": awake, **member} for item in members],
                    "rescueIntervalS": 0.1,
                    "rebalanceIntervalS": 0.2,
                },
            }
        )
    )


async def apply_policy(engine, resource, **more):
    return await engine.stub.ApplyServicePolicy(policy_pb2.ApplyServicePolicyRequest(service_policy=resource, **more))


async def apply_pool(engine, resource, **more):
    return await engine.stub.ApplyPool(policy_pb2.ApplyPoolRequest(pool=resource, **more))


@pytest.fixture
async def engine(start_engine, fake_actuator):
    running = await start_engine(fake_actuator)
    for name in ("chat", "code"):
        await apply_policy(running, policy(name))
    return running


async def born(engine):
    """Until the pool's first decision has its outcome."""
    give_up = asyncio.get_running_loop().time() + 20
    while True:
        found = await engine.stub.ListDecisions(policy_pb2.ListDecisionsRequest(subject="shared"))
        if found.decisions and found.decisions[-1].outcome.state == decision_pb2.OUTCOME_STATE_SUCCEEDED:
            return
        assert asyncio.get_running_loop().time() < give_up
        await asyncio.sleep(0.02)


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_case_16_dead_bounds_are_refused_by_field(engine):
    resource = policy()
    resource.spec.roles[0].min_replicas, resource.spec.roles[0].max_replicas = 9, 8
    error = await refusal(apply_policy(engine, resource))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    violation = field_violations(error)[0]
    assert violation.field == "service_policy.spec.roles[0]"
    assert "minReplicas 9 is above maxReplicas 8" in violation.description


async def test_fields_are_named_as_the_proto_spells_them_and_the_servers_times_are_not_read(engine):
    resource = policy()
    resource.spec.roles[0].gpus_per_replica = 65
    resource.spec.token_service_share.theta_tps = 1e-320
    resource.spec.guards.ttft_p95_s.soft = -1
    resource.metadata.create_time.seconds = resource.metadata.update_time.nanos = -(2**31)
    resource.spec.model = "m\n"
    error = await refusal(apply_policy(engine, resource))
    assert {item.field for item in field_violations(error)} == {
        "service_policy.spec.model",
        "service_policy.spec.roles[0].gpus_per_replica",
        "service_policy.spec.token_service_share.theta_tps",
        "service_policy.spec.guards.ttft_p95_s.soft",
    }
    dry_run = policy_pb2.EvaluateRequest(kind=POLICY, name="chat", policy_overrides=[resource])
    fields = {item.field for item in field_violations(await refusal(engine.stub.Evaluate(dry_run)))}
    assert "policy_overrides[0].spec.token_service_share.theta_tps" in fields
    again = policy()
    again.metadata.create_time.seconds = -(2**62)
    assert not (await apply_policy(engine, again)).changed


async def test_case_19_a_second_owner_is_refused_with_the_owners_name(engine, start_engine, fake_actuator):
    await apply_pool(engine, pool())
    scaled = await refusal(apply_policy(engine, policy("chat", pooled=False)))
    assert "member of pool shared" in field_violations(scaled)[0].description
    again = await refusal(apply_pool(engine, pool("other", node="node-1")))
    assert "member of pool shared" in field_violations(again)[0].description
    await engine.stop()
    later = await start_engine(fake_actuator)
    after = await refusal(apply_pool(later, pool("other", node="node-1")))
    assert "member of pool shared" in field_violations(after)[0].description


@pytest.mark.parametrize(
    ("resource", "field", "words"),
    [
        (pool(members=("chat", "nobody")), "pool.spec.members[1].service", "no ServicePolicy 'nobody'"),
        (pool(cluster="far"), "pool.spec.cluster", "no actuator is configured for 'far'"),
        (pool(awake=3), "pool.spec.members[1].initial_awake", "only 1 fit"),
        (pool(awake=5), "pool.spec.members[0].initial_awake", "above maxReplicas 4"),
        (
            pool(overlay=[{"node": "node-0", "gpuIndices": [0, 1]}]),
            "pool.spec.members[0].overlay[0]",
            "has 2 GPUs; a replica of chat has 1",
        ),
    ],
)
async def test_what_a_pool_is_refused_for(engine, resource, field, words):
    error = await refusal(apply_pool(engine, resource))
    found = {item.field: item.description for item in field_violations(error)}
    assert words in found[field]


async def test_a_gpu_belongs_to_one_pool(engine):
    await apply_pool(engine, pool("one", members=("chat",)))
    error = await refusal(apply_pool(engine, pool("two", members=("code",))))
    assert "belongs to pool one" in field_violations(error)[0].description


async def test_a_raised_floor_is_not_held_against_how_the_pool_began(engine):
    await apply_pool(engine, pool(awake=2))
    await apply_policy(engine, policy("chat", low=3))
    assert not (await apply_pool(engine, pool(awake=2))).changed, "the same file may be applied again"
    error = await refusal(apply_policy(engine, policy("code", low=2)))
    assert "only 1 fit into the pool's 4 GPUs" in field_violations(error)[0].description


async def test_what_a_pools_servers_run_is_not_changed_under_them(engine):
    await apply_pool(engine, pool())
    other = policy("chat", gpus=2)
    other.spec.model = "another"
    error = await refusal(apply_policy(engine, other))
    found = {item.field: item.description for item in field_violations(error)}
    assert "made with model m" in found["service_policy.spec.model"]
    assert "made with 1 GPUs each" in found["service_policy.spec.roles[0].gpus_per_replica"]
    await engine.stub.DeletePool(policy_pb2.DeletePoolRequest(name="shared"))
    assert (await apply_policy(engine, other)).changed


async def test_etags_and_repeats(engine):
    first = (await apply_policy(engine, policy("new"))).service_policy
    assert first.metadata.etag
    changed = policy("new", high=6)
    changed.metadata.etag = first.metadata.etag
    second = await apply_policy(engine, changed)
    assert second.changed
    assert second.service_policy.metadata.create_time == first.metadata.create_time
    repeated = await apply_policy(engine, changed)
    assert not repeated.changed, "a retry of what was done is no conflict"
    stale = policy("new", high=7)
    stale.metadata.etag = first.metadata.etag
    error = await refusal(apply_policy(engine, stale))
    assert error.code() == grpc.StatusCode.ABORTED
    assert error_reason(error) == "ETAG_MISMATCH"


async def test_validate_only_writes_nothing(engine):
    answer = await apply_policy(engine, policy("trial"), validate_only=True)
    assert answer.changed
    error = await refusal(engine.stub.GetServicePolicy(policy_pb2.GetServicePolicyRequest(name="trial")))
    assert error.code() == grpc.StatusCode.NOT_FOUND


async def test_revisions_and_rollback(engine):
    await apply_policy(engine, policy(high=6))
    listed = await engine.stub.ListRevisions(policy_pb2.ListRevisionsRequest(kind=POLICY, name="chat"))
    highs = [item.service_policy.spec.roles[0].max_replicas for item in listed.revisions]
    assert highs == [6, 4]
    oldest = listed.revisions[1].service_policy.metadata.revision
    await engine.stub.Rollback(policy_pb2.RollbackRequest(kind=POLICY, name="chat", revision=oldest))
    now = await engine.stub.GetServicePolicy(policy_pb2.GetServicePolicyRequest(name="chat"))
    assert now.service_policy.spec.roles[0].max_replicas == 4
    assert now.service_policy.metadata.revision > oldest
    error = await refusal(engine.stub.Rollback(policy_pb2.RollbackRequest(kind=POLICY, name="chat", revision=9999)))
    assert error_reason(error) == "NO_SUCH_REVISION"


async def test_lists_page_by_name(engine):
    await apply_policy(engine, policy("bot"))
    names, token = [], ""
    while True:
        page = await engine.stub.ListServicePolicies(
            policy_pb2.ListServicePoliciesRequest(page_size=2, page_token=token)
        )
        names += [item.metadata.name for item in page.service_policies]
        token = page.next_page_token
        if not token:
            break
    assert names == ["bot", "chat", "code"]


async def test_a_policy_in_use_is_not_deleted(engine):
    await apply_pool(engine, pool())
    error = await refusal(engine.stub.DeleteServicePolicy(policy_pb2.DeleteServicePolicyRequest(name="chat")))
    assert error_reason(error) == "IN_USE"
    await engine.stub.DeletePool(policy_pb2.DeletePoolRequest(name="shared"))
    await engine.stub.DeleteServicePolicy(policy_pb2.DeleteServicePolicyRequest(name="chat"))


async def test_evaluate_is_dry_and_takes_overrides(engine, fake_actuator, eventually, windows):
    await apply_pool(engine, pool(awake=2))
    await eventually(lambda: len(fake_actuator.awake) == 4)
    await windows.demand("chat", 0)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=400, running=20)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=0, running=0)
    await born(engine)
    calm = await engine.stub.Evaluate(policy_pb2.EvaluateRequest(kind=POOL, name="shared"))
    assert not calm.HasField("decision")
    assert calm.reason
    override = policy_pb2.ServicePolicy()
    override.metadata.name = "chat"
    override.spec.token_service_share.theta_tps = 100
    request = policy_pb2.EvaluateRequest(kind=POOL, name="shared", policy_overrides=[override])
    request.override_mask.paths.append("spec.token_service_share.theta_tps")
    hungry = await engine.stub.Evaluate(request)
    assert hungry.decision.rule == decision_pb2.RULE_RESCUE_CRITICAL
    assert hungry.decision.transition.releases[0].service == "code"
    assert len(fake_actuator.awake) == 4
    assert len(fake_actuator.states) == 1
    request.override_mask.paths[:] = ["spec.no_such_field"]
    error = await refusal(engine.stub.Evaluate(request))
    assert field_violations(error)[0].field == "override_mask.paths[0]"


async def test_a_paused_pool_keeps_its_state_and_says_so(engine, fake_actuator, eventually, windows):
    await apply_pool(engine, pool(awake=2))
    await eventually(lambda: len(fake_actuator.awake) == 4)
    await engine.stub.Pause(policy_pb2.PauseRequest(kind=POOL, name="shared", reason="maintenance"))
    await windows.demand("chat", 5)
    await windows.write("chat", ["chat-node-0-0", "chat-node-0-1"], decode_tps=10, running=20, waiting=50)
    await windows.write("code", ["code-node-0-2", "code-node-0-3"], decode_tps=0, running=0)
    await asyncio.sleep(0.5)
    status = await engine.stub.GetStatus(policy_pb2.GetStatusRequest())
    assert status.pools[0].paused
    assert "paused" in status.pools[0].holding
    assert len(fake_actuator.states) == 1
    await engine.stub.Resume(policy_pb2.ResumeRequest(kind=POOL, name="shared"))
    await eventually(lambda: len(fake_actuator.states) > 1)


async def test_decisions_are_watched_and_listed_by_page(engine, fake_actuator):
    seen = []
    watch = engine.stub.WatchDecisions(policy_pb2.WatchDecisionsRequest(replay_last=10))
    await apply_pool(engine, pool())

    async def read():
        async for message in watch:
            if message.WhichOneof("event") == "decision":
                seen.append((message.decision.decision_id, message.decision.outcome.state))
            if seen and seen[-1][1] == decision_pb2.OUTCOME_STATE_SUCCEEDED:
                return

    await asyncio.wait_for(read(), 20)
    assert seen[0][1] == decision_pb2.OUTCOME_STATE_PENDING
    assert len({name for name, _ in seen}) == 1
    page = await engine.stub.ListDecisions(policy_pb2.ListDecisionsRequest(page_size=1))
    assert [item.decision_id for item in page.decisions] == [seen[0][0]]
    assert not page.next_page_token


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("GetPool", policy_pb2.GetPoolRequest(name="UPPER"), "name"),
        ("ListRevisions", policy_pb2.ListRevisionsRequest(name="chat"), "kind"),
        ("Pause", policy_pb2.PauseRequest(kind=POOL, name="shared", reason="x" * 300), "reason"),
        ("ListDecisions", policy_pb2.ListDecisionsRequest(page_size=501), "page_size"),
        ("ExplainDecision", policy_pb2.ExplainDecisionRequest(), "decision_id"),
    ],
)
async def test_requests_that_do_not_parse(engine, method, request_message, field):
    error = await refusal(getattr(engine.stub, method)(request_message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [item.field for item in field_violations(error)] == [field]


async def test_a_follower_reads_and_does_not_write(engine, start_engine, fake_actuator):
    follower = await start_engine(fake_actuator)
    listed = await follower.stub.ListServicePolicies(policy_pb2.ListServicePoliciesRequest())
    assert len(listed.service_policies) == 2
    error = await refusal(apply_policy(follower, policy("new")))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error_reason(error) == "NOT_LEADER"


async def test_bootstrap_applies_what_is_absent_and_leaves_the_rest(
    start_engine, fake_actuator, tmp_path: Path, eventually
):
    import yaml

    documents = [
        {
            "apiVersion": "trimtab.dev/v1",
            "kind": "Pool",
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "node-0", "gpuIndices": [0, 1]}],
                "members": [{"service": "chat", "initialAwake": 1}],
            },
        },
        policy_document("chat"),
    ]
    (tmp_path / "resources.yaml").write_text(yaml.safe_dump_all(documents))
    first = await start_engine(fake_actuator, bootstrap_dir=tmp_path)
    await eventually(lambda: len(fake_actuator.awake) == 1)
    await apply_policy(first, policy(high=9))
    await first.stop()
    second = await start_engine(fake_actuator, bootstrap_dir=tmp_path)
    await asyncio.sleep(0.5)
    kept = await second.stub.GetServicePolicy(policy_pb2.GetServicePolicyRequest(name="chat"))
    assert kept.service_policy.spec.roles[0].max_replicas == 9


@pytest.mark.parametrize(
    ("overrides", "mask", "field", "words"),
    [
        ([policy(), policy()], [], "policy_overrides", "twice"),
        ([], ["spec"], "policy_overrides", "required with override_mask"),
        ([policy()], ["spec.slo", "spec.nope"], "override_mask.paths[1]", "does not have"),
        ([policy(low=3, high=8)], [], "policy_overrides[0].spec", "would not hold it"),
        ([policy("nobody")], ["spec.priority"], "policy_overrides[0].metadata.name", "no ServicePolicy 'nobody'"),
        ([policy(pooled=False)], [], "policy_overrides[0].spec.proportional", "never both"),
    ],
)
async def test_what_could_not_be_applied_is_not_evaluated(engine, overrides, mask, field, words):
    await apply_pool(engine, pool(gpus=2))
    request = policy_pb2.EvaluateRequest(kind=POOL, name="shared", policy_overrides=overrides)
    request.override_mask.paths.extend(mask)
    error = await refusal(engine.stub.Evaluate(request))
    assert words in {item.field: item.description for item in field_violations(error)}[field]


async def test_a_rollback_names_its_revision(engine):
    missing = await refusal(engine.stub.Rollback(policy_pb2.RollbackRequest(kind=POLICY, name="chat")))
    assert [item.field for item in field_violations(missing)] == ["revision"]
    unknown = await refusal(engine.stub.Rollback(policy_pb2.RollbackRequest(kind=POLICY, name="chat", revision=99)))
    assert (unknown.code(), error_reason(unknown)) == (grpc.StatusCode.NOT_FOUND, "NO_SUCH_REVISION")


async def test_a_request_id_is_bounded(engine):
    error = await refusal(apply_policy(engine, policy(), request_id="r" * 129))
    assert [item.field for item in field_violations(error)] == ["request_id"]
