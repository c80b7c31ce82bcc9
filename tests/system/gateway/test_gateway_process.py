"""The gateway as a process: its settings, its stop, and what it does after it was suspended."""

import asyncio
import dataclasses
import os
import signal
import sys

import aiohttp
import pytest

from gateway.core.routing import Router, RoutingLimits, Stage
from gateway.shell.dispatch import Dispatcher, NoReplica
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.domain.endpoint import Endpoint
from trimtab.domain.vocabulary import Role

ROUTABLE = actuator_pb2.ENDPOINT_STATE_ROUTABLE


async def run(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *flags, stderr=asyncio.subprocess.PIPE)


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["--actuators", "127.0.0.1:7004"], 2, "is not key=value"),
        (["--actuators", "local=nowhere"], 2, "is not host:port"),
        (["--name", "Not A Name"], 2, "lower-case"),
        (["--listen", "0.0.0.0:8080"], 2, "reachable"),
        (["--max-hold", "3"], 2, "did you mean --max-hold-s"),
    ],
)
async def test_bad_settings_are_one_line_and_a_status(flags, status, text):
    process = await run(*flags)
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    assert await process.wait() == status
    assert text in said
    assert said.count("\n") == 1


async def test_suspended_gateway_asks_before_it_routes_on(gateway, free_ports, wait_until):
    a, b = await gateway.server("a"), await gateway.server("b")
    await gateway.actuator.start()
    await gateway.collector.start()
    gateway.actuator.lease_s = 0.4
    gateway.actuator.publish(1, {"chat": [("a", a.address, ROUTABLE)]})
    port, metrics_port = free_ports(2)
    process = await run(
        f"--listen=127.0.0.1:{port}",
        f"--metrics-listen=127.0.0.1:{metrics_port}",
        f"--actuators=local=127.0.0.1:{gateway.actuator.port}",
        f"--collector=127.0.0.1:{gateway.collector.port}",
    )
    try:
        await gateway.actuator.wait_acknowledged(1)
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "chat", "prompt": "four", "max_tokens": 3}

        async def ask() -> int:
            async with gateway.http.post(url, json=body) as answer:
                return answer.status

        await wait_until(lambda: process.returncode is None)
        assert await ask() == 200
        os.kill(process.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0.6)
        # The lease is over, so the actuator may hide a without this gateway and put it to sleep.
        gateway.actuator.publish(2, {"chat": [("b", b.address, ROUTABLE)]})
        os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.gather(*waiting) == [200] * 8
        assert (len(a.bodies), len(b.bodies)) == (1, 8)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Nobody:
    def move(self, ticket: object) -> None:
        raise AssertionError("nothing is evicted here")


def endpoint() -> Endpoint:
    return Endpoint(cluster="local", replica="a", service="chat", model="m", address="http://a", role=Role.COLOCATED)


async def test_stalled_dispatcher_holds_until_it_is_trusted_again():
    clock = Clock()
    dispatcher = Dispatcher(Router(RoutingLimits(max_hold_s=60)), clock=clock)
    dispatcher.apply("local", 1, [], [endpoint()])
    asked: list[str] = []
    dispatcher.on_report(asked.append)
    clock.now_s += 1.9
    assert (await dispatcher.acquire("chat", Stage.FRONT, Nobody())).target.replica == "a"
    clock.now_s += 0.1
    held = asyncio.create_task(dispatcher.acquire("chat", Stage.FRONT, Nobody()))
    await asyncio.sleep(0)
    assert (asked, dispatcher.stalls, dispatcher.router.held("chat")) == (["local"], 1, 1)
    dispatcher.trust("local")
    assert (await held).target.replica == "a"


async def test_set_that_was_waiting_to_be_read_during_a_stall_is_not_trusted():
    """Two sets lie in the socket: the first one still shows a replica that the second one hides."""
    clock = Clock()
    dispatcher = Dispatcher(Router(RoutingLimits(max_hold_s=1)), clock=clock)
    other = dataclasses.replace(endpoint(), replica="b", address="http://b")
    dispatcher.apply("local", 1, [], [endpoint(), other])
    clock.now_s += 10
    held = asyncio.create_task(dispatcher.acquire("chat", Stage.FRONT, Nobody()))
    await asyncio.sleep(0)
    dispatcher.apply("local", 1, [], [endpoint(), other])
    await asyncio.sleep(0)
    assert not held.done()
    dispatcher.apply("local", 2, [], [other])
    dispatcher.trust("local")
    assert (await held).target.replica == "b"
    dispatcher.router.distrust()
    late = asyncio.create_task(dispatcher.acquire("chat", Stage.FRONT, Nobody()))
    await asyncio.sleep(0)
    clock.now_s += 1
    dispatcher.pump()
    with pytest.raises(NoReplica):
        await late
