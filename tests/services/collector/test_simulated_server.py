"""The collector against the simulated vLLM server: both ends of one contract, checked by what the client counted."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from metrics_collector.core.page import PageReader
from metrics_collector.core.samples import expand
from metrics_collector.core.schema import SCALARS
from simulator.profiles import packaged_profiles
from simulator.server.app import make_app
from simulator.server.faults import Fault
from simulator.server.server import ServerSettings, SimulatedServer
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.config.dialects import load_dialects
from trimtab.domain.signals import Latency
from trimtab.store import keys
from trimtab.store.observations import signal

CHAT = pb.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)


@pytest.fixture
async def simulated() -> AsyncIterator[tuple[SimulatedServer, str]]:
    """A server whose iterations take 2 ms, and its URL."""
    base = packaged_profiles()["a100-8b-tp1"]
    timing = base.timing.model_copy(update={"host_s": 0.001, "weights_s": 0.001, "linear_s": 0.0, "token_s": 1e-6})
    server = SimulatedServer(
        ServerSettings("tiny-0", "tiny", base.model_copy(update={"timing": timing}), bring_up_scale=0)
    )
    runner = web.AppRunner(make_app(server), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def complete(url: str, *, max_tokens: int, index: int) -> tuple[int, int]:
    """(prompt, completion) tokens of one request, as the client is told."""
    body = {"model": "tiny", "prompt": f"request {index} says " * 20, "max_tokens": max_tokens}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        usage = (await response.json())["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]


def targets_file(path: Path, url: str) -> Path:
    labels = {"service": "chat", "role": "colocated", "replica": "tiny-0"}
    path.write_text(json.dumps([{"targets": [url.removeprefix("http://")], "labels": labels}]))
    return path


async def test_the_filtered_page_says_the_same_as_the_full_one(simulated) -> None:
    _, url = simulated
    await complete(url, max_tokens=5, index=0)
    reader = PageReader(load_dialects())
    names = "&".join(f"name[]={name}" for name in reader.sample_names("vllm-v1"))
    async with aiohttp.ClientSession() as session:
        full = await (await session.get(f"{url}/metrics")).read()
        filtered = await (await session.get(f"{url}/metrics/?{names}")).read()

    of_full, _ = reader.read(full, None)
    of_filtered, _ = reader.read(filtered, None)
    assert list(of_filtered.values) == list(of_full.values)
    assert of_filtered.schema is of_full.schema
    assert len(filtered) * 2 < len(full)
    assert not any(math.isnan(value) for value in of_full.values[:SCALARS])
    assert set(of_full.schema.histograms) == set(Latency)


async def test_token_totals_equal_what_the_client_counted(
    simulated, start_collector, store, tmp_path, eventually
) -> None:
    _, url = simulated
    collector = await start_collector(targets_files=[targets_file(tmp_path / "t.json", url)])
    usages = await asyncio.gather(*(complete(url, max_tokens=50, index=index) for index in range(8)))

    async def totals() -> tuple[float, float]:
        found = await store.redis.hget(keys.latest_samples("chat", "ROLE_COLOCATED"), "tiny-0")
        sample = expand(pb.ReplicaSample.FromString(found or b""))
        return sample.prompt_tokens_total, sample.generation_tokens_total

    wanted = tuple(float(sum(usage[which] for usage in usages)) for which in (0, 1))
    for _ in range(600):
        if await totals() == wanted:
            break
        await asyncio.sleep(0.05)
    assert await totals() == wanted
    assert wanted[1] == 400
    assert not collector.task.done()


async def test_a_sleeping_simulated_server_is_shown_asleep_and_counts_nothing(
    simulated, start_collector, tmp_path
) -> None:
    _, url = simulated
    collector = await start_collector(targets_files=[targets_file(tmp_path / "t.json", url)])
    async with aiohttp.ClientSession() as session, session.post(f"{url}/sleep?level=1") as response:
        assert response.status == 200

    for _ in range(600):
        listed = await collector.stub.ListTargets(pb.ListTargetsRequest(), timeout=30, wait_for_ready=True)
        if [item.state for item in listed.targets] == [pb.TARGET_STATE_ASLEEP]:
            break
        await asyncio.sleep(0.05)
    assert [item.state for item in listed.targets] == [pb.TARGET_STATE_ASLEEP]
    for _ in range(600):
        observation = (await collector.stub.GetObservation(pb.GetObservationRequest(key=CHAT), timeout=30)).observation
        if not observation.reported_replicas:
            break
        await asyncio.sleep(0.05)
    assert list(observation.reported_replicas) == []
    assert signal(observation, pb.SIGNAL_RUNNING).quality == types_pb2.QUALITY_MISSING


async def test_case_5_a_simulated_engine_that_wedges_under_load_is_stuck_not_load(
    simulated, start_collector, tmp_path
) -> None:
    server, url = simulated
    collector = await start_collector(targets_files=[targets_file(tmp_path / "t.json", url)], stuck_after_s=0.8)
    stream = collector.stub.WatchObservations(pb.WatchObservationsRequest(keys=[CHAT]), timeout=20, wait_for_ready=True)
    requests = [asyncio.create_task(complete(url, max_tokens=2000, index=index)) for index in range(3)]
    while server.engine.num_running < 3:  # noqa: ASYNC110  (the engine has no event for it)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    server.set_fault(Fault.WEDGED)

    seen: list[types_pb2.Measurement] = []
    async for message in stream:
        if message.HasField("observation"):
            seen.append(signal(message.observation, pb.SIGNAL_RUNNING))
            if seen[-1].quality == types_pb2.QUALITY_STALE:
                break
    stream.cancel()
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)

    assert seen[-1].quality == types_pb2.QUALITY_STALE
    assert any(item.value > 0 for item in seen[:-1]), "until then it was load"


async def test_a_malformed_simulated_page_is_refused(simulated) -> None:
    server, url = simulated
    server.set_fault(Fault.MALFORMED_METRICS)
    async with aiohttp.ClientSession() as session:
        page = await (await session.get(f"{url}/metrics")).read()

    with pytest.raises(Exception, match="cut"):
        PageReader(load_dialects()).read(page, None)
