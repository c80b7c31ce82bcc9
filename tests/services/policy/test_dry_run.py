"""A dry run of a set of resources says what applying them would, and stores nothing: over a real socket and store."""

from types import SimpleNamespace

import grpc
import pytest

from tests.services.policy.test_service import apply_policy, apply_pool, policy, policy_document, pool, refusal
from trimtab.api.policy.v1 import policy_pb2
from trimtab.cli.resources import apply_resources
from trimtab.config.resources import parse_document, parse_pool
from trimtab.rpc.errors import field_violations

SCALED_AND_POOLED = "code is scaled by its ServicePolicy: a role is scaled or pooled, never both"
CHAT, CODE = policy_document("chat"), policy_document("code")


def resources(*documents):
    return [parse_document(document) for document in documents]


async def tried(engine, given, *, dry):
    """What became of each resource, or the violations of the one that was refused."""
    try:
        applied = await apply_resources(SimpleNamespace(policy=engine.stub), given, validate_only=dry)
    except grpc.aio.AioRpcError as error:
        return [(item.field, item.description) for item in field_violations(error)]
    return [(resource.name, changed) for resource, changed in applied]


async def stored(engine):
    policies = await engine.stub.ListServicePolicies(policy_pb2.ListServicePoliciesRequest())
    pools = await engine.stub.ListPools(policy_pb2.ListPoolsRequest())
    return [item.metadata.name for item in (*policies.service_policies, *pools.pools)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([*resources(CHAT, CODE), parse_pool(pool())], [("chat", True), ("code", True), ("shared", True)]),
        (
            [*resources(CHAT), parse_pool(pool())],
            [("pool.spec.members[1].service", "no ServicePolicy 'code'")],
        ),
        (
            [*resources(CHAT, policy_document("code", pooled=False)), parse_pool(pool())],
            [("pool.spec.members[1].service", SCALED_AND_POOLED)],
        ),
        (
            [
                *resources(CHAT, CODE),
                parse_pool(pool("one", members=("chat",))),
                parse_pool(pool("two", members=("code",))),
            ],
            [("pool.spec.gpus[0].gpu_indices", "GPU 0 of node-0 belongs to pool one")],
        ),
    ],
    ids=["a whole set", "a member that is in no file", "a member that is scaled", "pools of the same GPUs"],
)
async def test_a_dry_run_of_a_set_on_an_empty_store_says_what_applying_it_says(
    start_engine, fake_actuator, given, said
):
    engine = await start_engine(fake_actuator)
    assert await tried(engine, given, dry=True) == said
    assert await stored(engine) == []
    assert await tried(engine, given, dry=False) == said


async def test_what_is_assumed_stands_in_the_place_of_what_is_stored(start_engine, fake_actuator):
    engine = await start_engine(fake_actuator)
    for name in ("chat", "code"):
        await apply_policy(engine, policy(name))
    await apply_pool(engine, pool())
    raised = resources(policy_document("chat", low=3), policy_document("code", low=2))
    dry = await tried(engine, raised, dry=True)
    assert "only 1 fit into the pool's 4 GPUs" in dry[0][1]
    assert (await tried(engine, raised[1:], dry=True)) == [("code", True)], "alone it would fit"
    same = [*resources(CHAT), parse_pool(pool())]
    assert await tried(engine, same, dry=True) == [("chat", False), ("shared", False)]
    assert await tried(engine, raised, dry=False) == dry


async def test_assumed_resources_are_for_dry_runs_and_have_to_parse(start_engine, fake_actuator):
    engine = await start_engine(fake_actuator)
    error = await refusal(apply_pool(engine, pool(members=("chat",)), assumed_policies=[policy("chat")]))
    assert [item.field for item in field_violations(error)] == ["validate_only"]
    broken = policy("chat")
    broken.spec.model = ""
    error = await refusal(
        apply_pool(engine, pool(members=("chat",)), validate_only=True, assumed_policies=[policy("code"), broken])
    )
    assert [item.field for item in field_violations(error)] == ["assumed_policies[1].spec.model"]
    assert await stored(engine) == []
