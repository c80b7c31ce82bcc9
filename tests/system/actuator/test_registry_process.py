"""Real processes with only the store in common: actuator and gateway, one of them dead, or the store's data gone."""

import asyncio
import contextlib
import json
import shutil
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.system.actuator.test_process import SWAPPED, group, place
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.registry import EndpointRegistry

GATEWAY = "gateway-t"


class GatewayProcess:
    """A gateway that follows the registry alone."""

    def __init__(self, stack: Any, port: int, metrics_port: int) -> None:
        self._stack, self._port, self._metrics_port = stack, port, metrics_port

    def start(self) -> None:
        self._stack.processes.start(
            "gateway",
            "gateway",
            *("--listen", f"127.0.0.1:{self._port}", "--metrics-listen", f"127.0.0.1:{self._metrics_port}"),
            *("--actuators=", "--registry=local", "--store-url", self._stack.store_url, "--name", GATEWAY),
        )

    async def ask(self, service: str, tokens: int = 3) -> str:
        """The finish reason of one request; raises OSError."""
        body = json.dumps({"model": service, "prompt": "four words of prompt", "max_tokens": tokens}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        )

        def post() -> str:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(json.loads(answer.read())["choices"][0]["finish_reason"])

        return await asyncio.to_thread(post)

    async def metric(self, name: str) -> float:
        def read() -> float:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=5) as answer:
                page = answer.read().decode()
            return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

        return await asyncio.to_thread(read)


@pytest.fixture
def gateway(stack: Any, free_ports: Callable[[int], list[int]]) -> GatewayProcess:
    """Not started."""
    return GatewayProcess(stack, *free_ports(2))


def misrouted(stack: Any) -> int:
    services = stack.fleet.ask("/stats")["services"].values()
    return sum(stats["requests_received_while_asleep"] for stats in services)


async def test_a_gateway_that_starts_while_no_actuator_is_there_serves_and_is_known_to_the_next_one(
    stack: Any, gateway: GatewayProcess
) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    stack.processes.kill("actuator")
    gateway.start()
    reason = await stack.until(lambda: gateway.ask("chat"), what="an answer through the registry")
    assert reason == "length"

    async def stale() -> bool:
        return await gateway.metric("trimtab_gateway_endpoints_stale") == 1.0

    await stack.until(stale, what="a gateway that says that its set is stale")
    long_answers = [asyncio.create_task(gateway.ask("chat", tokens=200)) for _ in range(4)]
    stack.start_actuator(name="actuator-2")
    response = await stack.until(lambda: stack.apply(stack.pool_state(2, ["code-0", "code-1"])), what="a new reign")
    operation = await stack.ended(response.operation.operation_id)
    assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation
    assert await stack.life_cycles() == SWAPPED
    assert await asyncio.gather(*long_answers) == ["length"] * 4
    assert await gateway.ask("code") == "length"
    assert misrouted(stack) == 0
    async with store_of(stack) as registry:
        head, (_, words) = await registry.head(), await registry.look()
        word = pb.AcknowledgeEndpointsRequest.FromString(words[GATEWAY])
        assert head is not None
        assert word.revision == head.revision
    assert await gateway.metric("trimtab_gateway_endpoints_stale") == 0.0


@contextlib.asynccontextmanager
async def store_of(stack: Any) -> Any:
    """The registry, as another process sees it."""
    store = await Store.connect(stack.store_url, wait_s=5)
    yield EndpointRegistry(store, "local")
    await store.close()


class ScriptedGateway:
    """Renews its lease in the store, and confirms only as far as it is let."""

    def __init__(self, registry: EndpointRegistry) -> None:
        self._registry = registry
        self._sequence = 0
        self.confirms = True
        self.revision = 0
        self.states: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            found = await self._registry.read() if self.confirms else None
            if found is not None:
                self.revision = found.revision
                self.states = {e.replica: e.state for service in found.services for e in service.endpoints}
            self._sequence += 1
            word = pb.AcknowledgeEndpointsRequest(
                gateway="gateway-stuck", revision=self.revision, sequence=self._sequence
            )
            await self._registry.speak(word, is_news=self.confirms)
            await asyncio.sleep(0.1)


async def test_a_gateway_that_does_not_confirm_in_the_store_blocks_the_sleep_and_not_the_fleet(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator("--acknowledge-timeout-s", "3")
    await stack.bring_up()
    async with store_of(stack) as registry:
        stuck = ScriptedGateway(registry)
        speaking = asyncio.create_task(stuck.run())

        async def routes() -> bool:
            return stuck.states.get("chat-0") == pb.ENDPOINT_STATE_ROUTABLE

        await stack.until(routes, what="the gateway's first set")
        stuck.confirms = False
        await asyncio.sleep(0.3)
        response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
        operation_id = response.operation.operation_id

        async def waits() -> bool:
            return "waiting for gateway gateway-stuck" in (await stack.operation(operation_id)).steps[0].phase

        await stack.until(waits, what="the wait for the gateway")
        placed = await place(stack, group("g", ("node-1", 0)))
        operation = await stack.ended(operation_id)
        assert operation.state == pb.OPERATION_STATE_ROLLED_BACK
        assert "gateway gateway-stuck did not confirm for 3 s that it is hidden" in operation.detail
        made = await stack.ended(placed.results[0].operation_id)
        assert made.state == pb.OPERATION_STATE_SUCCEEDED
        routable = {name for name, replica in (await stack.replicas()).items() if replica.routable}
        assert routable == {"chat-0", "code-1", "g-node-1-0"}, "nobody is left hidden, nobody slept"
        stuck.confirms = True
        response = await stack.apply(stack.pool_state(3, ["code-0", "code-1"], decision_id="d-1-2"))
        assert (await stack.ended(response.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
        speaking.cancel()


@pytest.mark.parametrize("data", ["kept", "lost"])
async def test_a_store_that_restarts_under_a_gateway_takes_nothing_away_and_is_followed_again(
    stack: Any, gateway: GatewayProcess, own_store: EmbeddedStore, data: str
) -> None:
    stack.store_url = own_store.url
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    gateway.start()
    assert await stack.until(lambda: gateway.ask("chat"), what="an answer through the registry") == "length"
    before = await gateway.metric("trimtab_gateway_endpoints_revision")
    own_store.kill()
    assert [await gateway.ask("chat") for _ in range(3)] == ["length"] * 3
    if data == "lost":
        shutil.rmtree(own_store.data_dir)
    own_store.start()
    assert await gateway.ask("chat") == "length"
    async with store_of(stack) as registry:

        async def followed() -> bool:
            head, (_, words) = await registry.head(), await registry.look()
            word = pb.AcknowledgeEndpointsRequest.FromString(words.get(GATEWAY, b""))
            return head is not None and word.revision == head.revision >= before

        await stack.until(followed, what="a registry that was written again")
    response = await stack.until(lambda: stack.apply(stack.pool_state(2, ["code-0", "code-1"])), what="a state")
    operation = await stack.ended(response.operation.operation_id)
    assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation
    assert await stack.life_cycles() == SWAPPED
    assert await gateway.ask("code") == "length"
    assert await gateway.metric("trimtab_gateway_endpoints_revision") > before
    assert misrouted(stack) == 0
