"""A collector process beside a real vLLM: what it adds up is what the clients were told that they used."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest

from tests.vllm.server import MODEL_NAME, VllmServer
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.rpc.clients import channel
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.observations import signal

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]
CHAT = pb.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)
LOAD_S = float(os.environ.get("TRIMTAB_VLLM_LOAD_S", "60"))
WINDOW_S = 5
EDGE_SHARE = 0.05
WORDS = ["rudder", "ship", "queue", "surface", "arrive", "compute", "small", "seven", "twelve", "edge"]
COMMON = " ".join(WORDS * 20)
"""Longer than a block of the cache, so that whoever comes after the first finds it there."""


@dataclass
class Usage:
    """What the responses said, added up."""

    requests: int = 0
    streamed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: dict, *, streamed: bool) -> None:
        self.requests += 1
        self.streamed += streamed
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def complete(http: aiohttp.ClientSession, url: str, body: dict, counted: Usage) -> None:
    """One completion, plain or as a stream; its usage is counted when its answer is whole."""
    async with http.post(f"{url}/v1/completions", json={"model": MODEL_NAME, **body}) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            counted.add((await response.json())["usage"], streamed=False)
            return
        usages = []
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if line.startswith(b"data: ") and data != b"[DONE]" and (usage := json.loads(data).get("usage")):
                usages.append(usage)
        assert len(usages) == 1, "a stream says once what it used"
        counted.add(usages[0], streamed=True)


async def client(url: str, *, seed: int, until_s: float, counted: Usage) -> None:
    """Requests one after another until ``until_s``: half of them streams, two thirds with the common beginning."""
    draw = random.Random(seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        while time.monotonic() < until_s:
            own = " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))
            body: dict = {
                "prompt": f"{COMMON} {own}" if draw.random() < 2 / 3 else f"{seed} {own}",
                "max_tokens": draw.randrange(1, 40),
                "temperature": 1.0,
                "seed": draw.randrange(1 << 30),
            }
            if draw.random() < 0.5:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            await complete(http, url, body, counted)
            await asyncio.sleep(draw.random() * 0.3)


@dataclass(frozen=True)
class Collector:
    """A collector process, as its clients see it."""

    stub: "collector_pb2_grpc.CollectorServiceAsyncStub"

    async def state(self) -> "pb.TargetState.ValueType":
        listed = await self.stub.ListTargets(pb.ListTargetsRequest(service="chat"), timeout=5)
        return listed.targets[0].state if listed.targets else pb.TARGET_STATE_UNSPECIFIED

    async def sample(self) -> pb.ReplicaSample:
        """The newest sample of the one replica, read back from the store."""
        listed = await self.stub.ListReplicaSamples(pb.ListReplicaSamplesRequest(key=CHAT), timeout=5)
        (sample,) = listed.samples
        return sample

    async def windows(self, since_s: float) -> list[pb.RoleObservation]:
        """The windows that ended after ``since_s``, oldest first."""
        request = pb.QueryHistoryRequest(key=CHAT, max_results=1000)
        request.start_time.FromMilliseconds(round(since_s * 1000))
        return list((await self.stub.QueryHistory(request, timeout=10)).observations)


async def until(condition: Callable[[], Awaitable[bool]], *, within_s: float, what: str) -> None:
    give_up = time.monotonic() + within_s
    while True:
        try:
            if await condition():
                return
        except grpc.aio.AioRpcError as error:
            what = f"{what} (last: {error.details()})"
        assert time.monotonic() < give_up, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.2)


def start_collector(
    server: VllmServer, store: EmbeddedStore, folder: Path, ports: Sequence[int]
) -> subprocess.Popen[bytes]:
    """A collector that has one target, the server."""
    targets = folder / "targets.json"
    labels = {"service": "chat", "role": "colocated", "replica": "chat-0"}
    targets.write_text(json.dumps([{"targets": [server.address], "labels": labels}]))
    command = [
        *(sys.executable, "-m", "metrics_collector", "--store-url", store.url, "--targets-files", str(targets)),
        *("--listen", f"127.0.0.1:{ports[0]}", "--metrics-listen", f"127.0.0.1:{ports[1]}"),
        *("--window-s", str(WINDOW_S), "--scrape-interval-s", "1"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'services'}"}
    with (folder / "collector.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)


@asynccontextmanager
async def running_collector(
    server: VllmServer, store: EmbeddedStore, folder: Path, ports: Sequence[int]
) -> AsyncIterator[Collector]:
    process = start_collector(server, store, folder, ports)
    connection = channel(f"127.0.0.1:{ports[0]}")
    collector = Collector(collector_pb2_grpc.CollectorServiceStub(connection))  # type: ignore[arg-type]
    try:
        await until(lambda: _is(collector, pb.TARGET_STATE_UP), within_s=30, what="the server is seen as up")
        yield collector
    finally:
        await connection.close()
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _is(collector: Collector, state: "pb.TargetState.ValueType") -> bool:
    return await collector.state() == state


def tiles(windows: Sequence[pb.RoleObservation]) -> list[pb.RoleObservation]:
    """Windows that lie end to end, without a gap and without an overlap, from the first to the last second."""
    by_end_s = {round(window.window_end.ToMilliseconds() / 1000): window for window in windows}
    first_s, last_s = min(by_end_s), max(by_end_s)
    for phase in range(WINDOW_S):
        ends_s = range(first_s + phase, last_s + 1, WINDOW_S)
        if all(end_s in by_end_s for end_s in ends_s):
            return [by_end_s[end_s] for end_s in ends_s]
    raise AssertionError("the collector left out windows: no row of them lies end to end")


def total(windows: Sequence[pb.RoleObservation], wanted: "pb.Signal.ValueType") -> float:
    """A rate times the windows' length, summed."""
    return sum(signal(window, wanted).value * WINDOW_S for window in windows)


def finished(windows: Sequence[pb.RoleObservation], wanted: "pb.Latency.ValueType") -> float:
    """How many observations a latency's histogram gained."""
    return sum(item.count for window in windows for item in window.latencies if item.latency == wanted)


async def test_a_minute_of_load_adds_up_to_what_the_clients_were_told(
    vllm_server: VllmServer, own_store: EmbeddedStore, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    counted = Usage()
    async with running_collector(vllm_server, own_store, tmp_path, free_ports(2)) as collector:
        await asyncio.sleep(WINDOW_S + 2)
        before, began_s = await collector.sample(), time.time()
        until_s = time.monotonic() + LOAD_S
        await asyncio.gather(
            *(client(vllm_server.url, seed=seed, until_s=until_s, counted=counted) for seed in range(4))
        )
        # The last page, the windows that still hold the load, and one more phase of them.
        await asyncio.sleep(2 * WINDOW_S + 3)
        after, windows = await collector.sample(), await collector.windows(began_s)

    row = tiles(windows)
    prefill, cached = total(row, pb.SIGNAL_PREFILL_TPS), total(row, pb.SIGNAL_PREFILL_CACHED_TPS)
    decode, requests = total(row, pb.SIGNAL_DECODE_TPS), total(row, pb.SIGNAL_REQUEST_RPS)
    print(
        f"\nclients: {counted}\ncollector: prompt {after.prompt_tokens_total - before.prompt_tokens_total:.0f}, "
        f"generation {after.generation_tokens_total - before.generation_tokens_total:.0f}; "
        f"{len(row)} windows end to end: prefill {prefill:.1f} + cached {cached:.1f}, decode {decode:.1f}, "
        f"requests {requests:.1f}, E2E count {finished(row, pb.LATENCY_E2E):.0f}"
    )

    assert counted.requests > 20
    assert 0 < counted.streamed < counted.requests
    assert counted.cached_tokens > 0, "the common beginning was never found in the cache"
    assert after.prompt_tokens_total - before.prompt_tokens_total == counted.prompt_tokens
    assert after.generation_tokens_total - before.generation_tokens_total == counted.completion_tokens
    assert finished(row, pb.LATENCY_E2E) == counted.requests
    assert finished(row, pb.LATENCY_TTFT) == counted.requests
    assert prefill == pytest.approx(counted.prompt_tokens - counted.cached_tokens, rel=EDGE_SHARE)
    assert cached == pytest.approx(counted.cached_tokens, rel=EDGE_SHARE)
    assert prefill + cached == pytest.approx(counted.prompt_tokens, rel=EDGE_SHARE)
    assert decode == pytest.approx(counted.completion_tokens, rel=EDGE_SHARE)
    assert requests == pytest.approx(counted.requests, rel=EDGE_SHARE)
    assert all(signal(window, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_OK for window in row)


async def test_only_the_series_that_are_read_are_asked_for(
    vllm_server: VllmServer, own_store: EmbeddedStore, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    already = len(vllm_server.log())
    async with running_collector(vllm_server, own_store, tmp_path, free_ports(2)):
        await asyncio.sleep(5)

    asked = re.findall(r'"GET (/metrics\S*)', vllm_server.log()[already:])
    assert len(asked) >= 4
    assert all(re.match(r"/metrics/\?name(\[\]|%5B%5D)=", path) for path in asked), asked[:3]


async def test_a_server_that_sleeps_is_seen_asleep_and_awake_again(
    vllm_server: VllmServer, own_store: EmbeddedStore, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    async with running_collector(vllm_server, own_store, tmp_path, free_ports(2)) as collector:
        assert await collector.state() == pb.TARGET_STATE_UP
        try:
            await asyncio.to_thread(vllm_server.post, "/sleep?level=1")
            await until(lambda: _is(collector, pb.TARGET_STATE_ASLEEP), within_s=10, what="it is seen asleep")
            await asyncio.sleep(2)
            asleep = await collector.sample()
        finally:
            await asyncio.to_thread(vllm_server.post, "/wake_up")
        await until(lambda: _is(collector, pb.TARGET_STATE_UP), within_s=10, what="it is seen awake")
        counted = Usage()
        async with aiohttp.ClientSession() as http:
            await complete(http, vllm_server.url, {"prompt": "seven ships", "max_tokens": 5}, counted)
        await asyncio.sleep(3)
        awake = await collector.sample()

    assert (asleep.state, asleep.awake) == (pb.TARGET_STATE_ASLEEP, False)
    assert (awake.state, awake.awake) == (pb.TARGET_STATE_UP, True)
    assert awake.prompt_tokens_total - asleep.prompt_tokens_total == counted.prompt_tokens, "counters survive a sleep"
