"""An actuator process whose stored records cannot be read: what it holds, says, and takes up again."""

import asyncio
import urllib.request
from typing import Any

import grpc
import pytest
import redis

from tests.services.actuator.test_refused_records import newer
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.store.v1 import actuator_pb2 as store_pb
from trimtab.rpc.errors import error_info, error_reason
from trimtab.store import keys


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as page:
        text: str = page.read().decode()
    return text


async def test_a_replica_cut_off_in_the_store_holds_its_pool_until_an_operator_removes_it(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    stack.processes.kill("actuator")
    client = redis.Redis.from_url(stack.store_url)
    key = keys.replicas("local")
    bad = client.hget(key, "chat-0")[:-9]
    client.hset(key, "chat-0", bad)
    stack.start_actuator(name="actuator-2")

    async def listed() -> pb.ListReplicasResponse:
        return await stack.stub.ListReplicas(pb.ListReplicasRequest(), timeout=3)

    response = await stack.until(listed, what="an actuator that serves")
    [record] = response.refused
    assert (record.kind, record.name, record.fault) == (pb.RECORD_KIND_REPLICA, "chat-0", pb.RECORD_FAULT_CORRUPT)
    assert f"HDEL '{key}' 'chat-0'" in record.remedy
    assert sorted(replica.replica for replica in response.replicas) == ["chat-1", "code-0", "code-1"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
    assert (caught.value.code(), error_reason(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "RECORD_REFUSED")
    info = error_info(caught.value)
    assert info is not None
    assert (info.metadata["kind"], info.metadata["name"]) == ("replica", "chat-0")
    nodes = await stack.stub.ListNodes(pb.ListNodesRequest(), timeout=3)
    assert list(nodes.nodes.free_gpu_masks) == [0b00, 0b11], "its GPU is known, and taken"
    shown = await asyncio.to_thread(_page, f"http://127.0.0.1:{stack._metrics_port}/metrics")
    assert 'trimtab_actuator_refused_records{kind="replica",reason="corrupt"} 1.0' in shown
    assert "a stored record is refused" in stack.processes.log("actuator-2")
    assert client.hget(key, "chat-0") == bad

    client.hdel(key, "chat-0")

    async def taken_up() -> bool:
        found = await stack.replicas()
        return "chat-0" in found and found["chat-0"].routable

    await stack.until(taken_up, what="the replica as it is found")
    done = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
    assert (await stack.ended(done.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
    client.close()


async def test_metadata_of_a_newer_release_hold_the_cluster_and_gateways_keep_what_they_have(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    stack.processes.kill("actuator")
    client = redis.Redis.from_url(stack.store_url)
    key = keys.revisions("local")
    good = client.hget(key, "meta")
    client.hset(key, "meta", newer(good, store_pb.ActuatorMetaRecord))
    endpoints = client.hgetall(keys.endpoints("local"))
    stack.start_actuator(name="actuator-2")

    async def says_so() -> bool:
        try:
            await stack.replicas()
        except grpc.aio.AioRpcError as error:
            return error_reason(error) == "RECORD_REFUSED"
        return False

    await stack.until(says_so, what="that the cluster is held")
    for call in (
        stack.operation("o-1"),
        stack.stub.ListNodes(pb.ListNodesRequest(), timeout=3),
        stack.apply(stack.pool_state(2, ["code-0", "code-1"])),
        stack.stub.WatchReplicas(pb.WatchReplicasRequest(), timeout=3).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="run the newer release again") as caught:
            await call
        assert error_reason(caught.value) == "RECORD_REFUSED"
    assert client.hgetall(keys.endpoints("local")) == endpoints
    client.hset(key, "meta", good)
    assert await stack.until(stack.replicas, what="an actuator that serves again")
    client.close()
