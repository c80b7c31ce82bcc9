"""The gateway before simulated servers, under churn: releases like an actuator's, with nothing lost or misrouted."""

import asyncio

import pytest
from aiohttp import web

from simulator.core.tokens import TextCursor, make_prompt, text_of
from simulator.profiles import packaged_profiles
from simulator.replay import ReplayOptions, replay
from simulator.server.app import make_app
from simulator.server.server import ServerSettings, SimulatedServer
from simulator.traces import TraceRequest
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2

ROUTABLE = actuator_pb2.ENDPOINT_STATE_ROUTABLE
DRAINING = actuator_pb2.ENDPOINT_STATE_DRAINING
EVICTING = actuator_pb2.ENDPOINT_STATE_EVICTING


class Fleet:
    """Some simulated servers of one service."""

    def __init__(self) -> None:
        self.servers: dict[str, SimulatedServer] = {}
        self.addresses: dict[str, str] = {}
        self._runners: list[web.AppRunner] = []

    async def add(self, name: str, *, stream_interval: int = 1) -> SimulatedServer:
        base = packaged_profiles()["a100-8b-tp1"]
        quick = base.lifecycle.model_copy(update={"first_sleep_s": 0.01, "sleep_s": 0.01, "wake_s": 0.01})
        profile = base.model_copy(update={"lifecycle": quick})
        server = SimulatedServer(
            ServerSettings(name, "dsllama-8b", profile, stream_interval=stream_interval, time_scale=3.0)
        )
        runner = web.AppRunner(make_app(server), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        self.servers[name] = server
        self.addresses[name] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return server

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def endpoints(self, states: dict[str, int]) -> list[tuple]:
        return [
            (name, self.addresses[name], state, types_pb2.ROLE_COLOCATED, "dsllama-8b")
            for name, state in states.items()
        ]


@pytest.fixture
async def fleet():
    made = Fleet()
    yield made
    await made.stop()


async def release_and_wake(
    gateway, fleet: Fleet, name: str, revision: int, *, load: asyncio.Task, evict: bool, wait_until
) -> None:
    """What an actuator does to one replica: hide, drain, sleep, wake, show. `evict`: in the middle of its work."""
    states = dict.fromkeys(fleet.servers, ROUTABLE)
    if evict:
        await wait_until(lambda: load.done() or fleet.servers[name].driver.engine.unfinished > 0, timeout_s=20.0)
    await gateway.publish(revision, {"chat": fleet.endpoints({**states, name: EVICTING if evict else DRAINING})})
    received = fleet.servers[name].stats.requests_received
    await gateway.actuator.wait_acknowledged(revision, drained=name)
    await wait_until(lambda: fleet.servers[name].driver.engine.unfinished == 0, timeout_s=20.0)
    async with gateway.http.post(fleet.addresses[name] + "/sleep?level=1") as answer:
        assert answer.status == 200
    await asyncio.sleep(0.02)
    assert fleet.servers[name].stats.requests_received == received
    async with gateway.http.post(fleet.addresses[name] + "/wake_up") as answer:
        assert answer.status == 200
    await gateway.publish(revision + 1, {"chat": fleet.endpoints(states)})


@pytest.mark.parametrize("stream_interval", [1, 3])
async def test_replicas_come_and_go_under_load_and_no_client_notices(gateway, fleet, wait_until, stream_interval):
    names = ["a", "b", "c"]
    for name in names:
        await fleet.add(name, stream_interval=stream_interval)
    await gateway.start()
    await gateway.publish(1, {"chat": fleet.endpoints(dict.fromkeys(names, ROUTABLE))})
    requests = [TraceRequest(i * 0.03, "chat", 300 + i % 50, 40 + i % 40) for i in range(80)]
    load = asyncio.create_task(replay(requests, ReplayOptions(url=gateway.url)))
    revision = 2
    while not load.done():
        for index, name in enumerate(names):
            await release_and_wake(gateway, fleet, name, revision, load=load, evict=index > 0, wait_until=wait_until)
            revision += 2
    report = await load
    assert report.outcomes == {"ok": len(requests)}, report.lost[:3]
    assert sum(server.stats.requests_received_while_asleep for server in fleet.servers.values()) == 0
    async with gateway.http.get(gateway.url + "/metrics") as response:
        page = await response.text()
    assert 'reissues_total{cause="evicted",service="chat"}' in page
    assert revision > 6


async def test_server_put_to_sleep_under_load_loses_nothing(gateway, fleet, wait_until):
    """vLLM's `/sleep` aborts what runs, with status 200; the gateway continues it elsewhere."""
    await fleet.add("a")
    await fleet.add("b")
    await gateway.start()
    await gateway.publish(1, {"chat": fleet.endpoints({"a": ROUTABLE, "b": ROUTABLE})})
    requests = [TraceRequest(0.0, "chat", 300, 500) for _ in range(6)]
    load = asyncio.create_task(replay(requests, ReplayOptions(url=gateway.url)))
    engines = [fleet.servers[name].driver.engine for name in "ab"]
    await wait_until(lambda: [engine.num_running for engine in engines] == [3, 3])
    gateway.actuator.publish(2, {"chat": fleet.endpoints({"a": DRAINING, "b": ROUTABLE})})
    await gateway.actuator.wait_acknowledged(2)
    async with gateway.http.post(fleet.addresses["a"] + "/sleep?level=1&mode=abort") as answer:
        assert answer.status == 200
    report = await load
    assert report.outcomes == {"ok": 6}
    assert fleet.servers["a"].stats.aborted == 3


async def test_evicted_chat_answer_is_the_one_that_a_single_server_gives(gateway, fleet, wait_until):
    await fleet.add("a")
    await fleet.add("b")
    await gateway.start()
    await gateway.publish(1, {"chat": fleet.endpoints({"a": ROUTABLE, "b": DRAINING})})
    # The simulated server counts four characters a token, so the whole template must be a multiple of four.
    question = make_prompt(100)[:-1]
    stream = asyncio.create_task(
        gateway.stream(
            "/v1/chat/completions",
            model="chat",
            messages=[{"role": "user", "content": question}],
            max_tokens=500,
            ignore_eos=True,
            stream_options={"include_usage": True},
        )
    )
    await wait_until(lambda: fleet.servers["a"].stats.generation_tokens > 30)
    await gateway.publish(2, {"chat": fleet.endpoints({"a": EVICTING, "b": ROUTABLE})})
    answer = await stream
    prompt = f"user: {question}\nassistant:"
    assert len(prompt) % 4 == 0
    assert answer.text == text_of(TextCursor.after(prompt).take(500))
    assert answer.usage["completion_tokens"] == 500
    assert (answer.roles, answer.finish_reasons) == (1, ["length"])
    assert fleet.servers["b"].stats.requests_received == 1
