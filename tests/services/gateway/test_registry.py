"""A gateway that follows the endpoint registry: a real store, no actuator but what a test writes in its place."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ResponseError

from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.lease import StoreLease, fenced_write
from trimtab.store.registry import EndpointRegistry, service_bytes

ROUTABLE, DRAINING = pb.ENDPOINT_STATE_ROUTABLE, pb.ENDPOINT_STATE_DRAINING
OWNER = keys.actuator("local")
BODY = {"model": "chat", "prompt": "four", "max_tokens": 3}


class Writer:
    """What an actuator does to the registry."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.registry = EndpointRegistry(store, "local")
        self.lease = StoreLease(store, OWNER, "writer", 60.0)
        self.token = 1

    async def reign(self) -> None:
        """Takes the cluster's lease."""
        self.token = await self.lease.acquire_or_renew() or 0

    async def write(
        self, revision: int, *endpoints: tuple[str, str, "pb.EndpointState.ValueType"], also: str = "chat"
    ) -> None:
        """(replica, address, state) of the service chat; `also`: one without an endpoint."""
        found = [
            pb.Endpoint(replica=replica, address=address, state=state, role=types_pb2.ROLE_COLOCATED, model="chat")
            for replica, address, state in endpoints
        ]
        head = self.registry.new_head(revision=revision, leader_term=1, lease_s=3.0, now_s=time.time())
        services = service_bytes(
            [pb.ServiceEndpoints(service=also), pb.ServiceEndpoints(service="chat", endpoints=found)]
        )
        await fenced_write(self.store, OWNER, self.token, self.registry.commands(None, services, head))

    async def word(self) -> pb.AcknowledgeEndpointsRequest | None:
        _, words = await self.registry.look()
        found = words.get("gateway-0")
        return None if found is None else pb.AcknowledgeEndpointsRequest.FromString(found)

    async def confirmed(self, revision: int, **in_flight: int) -> None:
        """Waits until the gateway says that it routes by this revision and has this left on hidden replicas."""
        word = None
        async with asyncio.timeout(30):
            while (
                word is None
                or word.revision != revision
                or {item.replica: item.requests for item in word.in_flight} != in_flight
            ):
                word = await self.word()
                await asyncio.sleep(0.01)


@pytest.fixture
async def writer(own_store: EmbeddedStore) -> AsyncIterator[Writer]:
    store = await Store.connect(own_store.url)
    yield Writer(store)
    await store.close()


async def start(gateway: Any, own_store: EmbeddedStore, *, stream: bool = False, **settings: object) -> None:
    """Without `stream`, the store is all that it has in common with an actuator."""
    only = {} if stream else {"actuators": {}}
    await gateway.start(**{"registry": ["local"], "store_url": own_store.url, **only, **settings})


def gauge(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(name, {"cluster": "local"})


async def ask(gateway: Any) -> int:
    status, _ = await gateway.complete(**BODY)
    return int(status)


async def test_with_no_actuator_there_it_routes_by_the_last_set_and_says_that_it_is_stale(
    gateway: Any, own_store: EmbeddedStore, writer: Writer, wait_until: Any
) -> None:
    a, b = await gateway.server("a"), await gateway.server("b")
    await writer.write(7, ("a", a.address, ROUTABLE), ("b", b.address, DRAINING))
    await start(gateway, own_store)
    assert [await ask(gateway) for _ in range(3)] == [200] * 3
    assert (len(a.bodies), len(b.bodies)) == (3, 0)
    await writer.confirmed(7)
    assert gauge(gateway.context.registry, "trimtab_gateway_endpoints_stale") == 1.0
    await writer.reign()
    await wait_until(lambda: gauge(gateway.context.registry, "trimtab_gateway_endpoints_stale") == 0.0)
    await writer.lease.release()
    await wait_until(lambda: gauge(gateway.context.registry, "trimtab_gateway_endpoints_stale") == 1.0)
    assert await ask(gateway) == 200


async def test_what_is_hidden_is_confirmed_with_what_is_left_there_and_again_when_nothing_is(
    gateway: Any, own_store: EmbeddedStore, writer: Writer, wait_until: Any
) -> None:
    a, b = await gateway.server("a"), await gateway.server("b")
    await writer.write(7, ("a", a.address, ROUTABLE))
    # The interval is long: what comes in time comes by news.
    await start(gateway, own_store, acknowledge_s=10.0)
    a.gate_after = 1
    stream = asyncio.create_task(gateway.stream(**BODY))
    await wait_until(lambda: a.active == 1)
    await writer.write(8, ("a", a.address, DRAINING), ("b", b.address, ROUTABLE))
    await asyncio.wait_for(writer.confirmed(8, a=1), 30)
    assert [await ask(gateway) for _ in range(3)] == [200] * 3
    assert (len(a.bodies), len(b.bodies)) == (1, 3)
    a.gate.set()
    await stream
    await asyncio.wait_for(writer.confirmed(8), 30)


async def test_a_store_that_dies_and_comes_back_empty_or_old_takes_no_set_away(
    gateway: Any, own_store: EmbeddedStore, writer: Writer, wait_until: Any
) -> None:
    a, b = await gateway.server("a"), await gateway.server("b")
    await writer.reign()
    await writer.write(7, ("a", a.address, ROUTABLE))
    await start(gateway, own_store)
    await writer.confirmed(7)
    await writer.write(8, ("b", b.address, ROUTABLE))
    await writer.confirmed(8)
    own_store.kill()
    stale = "trimtab_gateway_endpoints_stale"
    await wait_until(lambda: gauge(gateway.context.registry, stale) == 1.0)
    assert await ask(gateway) == 200
    shutil.rmtree(own_store.data_dir)
    own_store.start()
    # It says what it routes by to a store that knows nothing.
    await writer.confirmed(8)
    assert gauge(gateway.context.registry, "trimtab_gateway_registry_up") == 0.0
    assert await ask(gateway) == 200
    # An old set, and an actuator that has not written yet.
    await writer.write(7, ("a", a.address, ROUTABLE))
    await writer.reign()
    await wait_until(lambda: gauge(gateway.context.registry, "trimtab_gateway_registry_up") == 1.0)
    assert [await ask(gateway) for _ in range(3)] == [200] * 3
    assert (await writer.word()).revision == 8
    assert (len(a.bodies), len(b.bodies)) == (0, 5)
    await writer.write(9, ("a", a.address, ROUTABLE))
    await writer.confirmed(9)
    assert await ask(gateway) == 200
    assert (len(a.bodies), gauge(gateway.context.registry, stale)) == (1, 0.0)


async def until_acknowledged(gateway: Any, revision: int) -> None:
    """By the stream's way."""
    await asyncio.wait_for(gateway.actuator.wait_acknowledged(revision), 30)


async def test_a_store_that_comes_late_or_in_another_layout_is_no_reason_to_end(
    gateway: Any, own_store: EmbeddedStore, writer: Writer, wait_until: Any
) -> None:
    a = await gateway.server("a")
    await writer.store.redis.set(keys.SCHEMA, "999")
    own_store.stop()
    await start(gateway, own_store, max_hold_s=30.0)
    asked = asyncio.create_task(ask(gateway))
    await asyncio.sleep(0.2)
    own_store.start()
    await writer.write(7, ("a", a.address, ROUTABLE))
    await asyncio.sleep(0.3)
    assert not asked.done()
    assert await writer.word() is None, "nothing is written to a store of another schema"
    await writer.store.redis.delete(keys.SCHEMA)
    assert await asked == 200


async def test_a_service_that_comes_without_an_endpoint_is_known_though_the_revision_stays(
    gateway: Any, own_store: EmbeddedStore, writer: Writer
) -> None:
    a = await gateway.server("a")
    await writer.write(7, ("a", a.address, ROUTABLE))
    await start(gateway, own_store, max_hold_s=0.2)
    await writer.confirmed(7)
    assert (await gateway.complete(model="new", prompt="x"))[0] == 404
    await writer.write(7, ("a", a.address, ROUTABLE), also="new")
    statuses: list[int] = []
    while len(statuses) < 400 and 503 not in statuses:
        statuses.append((await gateway.complete(model="new", prompt="x"))[0])
    assert set(statuses) <= {404, 503}
    assert statuses[-1] == 503, "held, for want of a replica"


async def test_two_ways_to_one_cluster_are_one_and_the_newest_set_counts(
    gateway: Any, own_store: EmbeddedStore, writer: Writer
) -> None:
    a, b = await gateway.server("a"), await gateway.server("b")
    await start(gateway, own_store, stream=True)
    await writer.write(7, ("a", a.address, ROUTABLE))
    await writer.confirmed(7)
    await until_acknowledged(gateway, 7)
    # The store is away, and the actuator gives back what it had hidden.
    own_store.suspend()
    gateway.actuator.publish(8, {"chat": [("b", b.address, ROUTABLE)]})
    await gateway.actuator.wait_acknowledged(8)
    assert await ask(gateway) == 200
    assert (len(a.bodies), len(b.bodies)) == (0, 1)
    own_store.resume()
    await writer.confirmed(8)
    # The stream is late, with what the store has overtaken.
    await writer.write(9, ("a", a.address, ROUTABLE))
    await writer.confirmed(9)
    gateway.actuator.publish(8, {"chat": [("b", b.address, ROUTABLE)]})
    await asyncio.sleep(0.2)
    assert await ask(gateway) == 200
    assert (len(a.bodies), len(b.bodies)) == (1, 1)
    said = [word.sequence for word in gateway.actuator.acknowledged]
    assert said == sorted(set(said))
    assert (await writer.word()).sequence not in said


async def test_a_suspended_gateway_asks_the_registry_before_it_routes_on(
    gateway: Any, own_store: EmbeddedStore, writer: Writer, free_ports: Any
) -> None:
    a, b = await gateway.server("a"), await gateway.server("b")
    await writer.write(1, ("a", a.address, ROUTABLE))
    port, metrics_port = free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", f"--listen=127.0.0.1:{port}", "--actuators=", "--registry=local"),
        *(f"--metrics-listen=127.0.0.1:{metrics_port}", f"--store-url={own_store.url}"),
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def ask_process() -> int:
        async with gateway.http.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY) as answer:
            return int(answer.status)

    try:
        await writer.confirmed(1)
        assert await ask_process() == 200
        os.kill(process.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(ask_process()) for _ in range(8)]
        # Longer than the lease of 3 s less two renewals: the actuator may have put a to sleep without it.
        await asyncio.sleep(2.2)
        await writer.write(2, ("b", b.address, ROUTABLE))
        os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.gather(*waiting) == [200] * 8
        assert (len(a.bodies), len(b.bodies)) == (1, 8)
    finally:
        process.kill()
        await process.wait()


async def test_a_gateway_needs_no_more_of_the_store_than_the_documentation_says(
    gateway: Any, own_store: EmbeddedStore, writer: Writer
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "store.md").read_text(encoding="utf-8")
    command = page.split("```\nACL SETUSER gateway")[1].split("```")[0]
    rules = command.replace("CLUSTER", "local").replace("PASSWORD", "secret").split()
    await writer.store.redis.execute_command("ACL", "SETUSER", "gateway", *rules)
    a, b = await gateway.server("a"), await gateway.server("b")
    await writer.write(7, ("a", a.address, ROUTABLE))
    url = own_store.url.replace("redis://", "redis://gateway:secret@")
    await start(gateway, own_store, store_url=url, acknowledge_s=10.0)
    await writer.confirmed(7)
    await writer.write(8, ("b", b.address, ROUTABLE))
    # By news, long before the next look.
    await asyncio.wait_for(writer.confirmed(8), 30)
    assert await ask(gateway) == 200
    own = await Store.connect(url)
    with pytest.raises(ResponseError, match="permissions"):
        await own.redis.hset(keys.endpoints("local"), "chat", b"")
    with pytest.raises(ResponseError, match="permissions"):
        await own.redis.hgetall(keys.replicas("local"))
    await own.close()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--actuators=", "--registry="], "actuators or registry has to name a cluster"),
        (["--registry=Not A Name"], "lower-case"),
        (["--registry=local", "--store-url=http://h"], "starts with redis://"),
    ],
)
async def test_settings_that_lead_nowhere_are_one_line(flags: list[str], text: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *flags, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    assert await process.wait() == 2
    assert text in said
    assert said.count("\n") == 1, json.dumps(said)
