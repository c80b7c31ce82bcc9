"""Nothing is lost or counted twice while a server sleeps, wakes, fails and loses clients."""

import asyncio
import json
import random

import aiohttp
import pytest

from simulator.core.requests import FinishReason
from simulator.core.tokens import TextCursor, make_prompt, text_of
from simulator.server.faults import Fault

REASONS = (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR)


async def one_request(http: aiohttp.ClientSession, url: str, source: random.Random, number: int) -> str:
    """Send a request, read its answer wholly; how it ended."""
    await asyncio.sleep(source.uniform(0, 0.6))
    prompt, tokens = make_prompt(source.randint(1, 300), number), source.randint(1, 60)
    body = {"prompt": prompt, "max_tokens": tokens, "stream": source.random() < 0.6}
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200
        raw = await response.text()
    if body["stream"]:
        chunks = [json.loads(part[6:]) for part in raw.split("\n\n") if part.startswith("data: {")]
        assert raw.endswith("data: [DONE]\n\n")
        text = "".join(c["choices"][0]["text"] for c in chunks)
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons[:-1] == [None] * (len(chunks) - 1)
        reason = reasons[-1]
    else:
        choice = json.loads(raw)["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    # Whatever was cut off, what came is the beginning of the answer.
    assert text_of(TextCursor.after(prompt).take(tokens)).startswith(text)
    assert (len(text) == 4 * tokens) or reason == "abort"
    return str(reason)


async def disturb(http: aiohttp.ClientSession, url: str, server, source: random.Random) -> None:
    """Sleep and wake in every mode, pause, heal from faults; the server ends awake and well."""
    for mode in ("abort", "keep", "wait", "abort"):
        await asyncio.sleep(source.uniform(0.02, 0.1))
        async with http.post(url + f"/sleep?level=1&mode={mode}") as response:
            assert response.status == 200
        await asyncio.sleep(source.uniform(0.0, 0.05))
        async with http.post(url + "/wake_up") as response:
            assert response.status == 200
        server.set_fault(source.choice([Fault.WEDGED, Fault.SLOW, Fault.NONE]))
        await asyncio.sleep(0.03)
        server.set_fault(Fault.NONE)
    async with http.post(url + "/pause?mode=keep"):
        pass
    async with http.post(url + "/resume"):
        pass


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_requests_and_tokens_are_conserved_under_churn(
    make_server, http, until, quick_profile, seed: int
) -> None:
    source = random.Random(seed)
    # 90 blocks of 16 tokens and five places: requests queue and preempt each other.
    memory = quick_profile.memory.model_copy(update={"kv_cache_gib": 90 * 16 * 131072 / 2**30})
    limits = quick_profile.limits.model_copy(update={"max_num_seqs": 5, "max_model_len": 512})
    at = await make_server(profile=quick_profile.model_copy(update={"memory": memory, "limits": limits}))
    tasks = [asyncio.create_task(one_request(http, at.url, source, number)) for number in range(40)]
    leaving = [asyncio.create_task(one_request(http, at.url, source, 100 + number)) for number in range(5)]
    disturbance = asyncio.create_task(disturb(http, at.url, at.server, source))
    await asyncio.sleep(0.35)
    for task in leaving:
        task.cancel()
    await disturbance
    reasons = await asyncio.gather(*tasks)
    await asyncio.gather(*leaving, return_exceptions=True)
    await until(lambda: at.server.load == 0)
    stats, metrics = at.server.stats, at.server.metrics
    assert set(reasons) <= {"length", "abort"}
    assert stats.requests_received >= 40
    assert stats.requests_received == stats.requests_finished + stats.aborted + stats.requests_failed
    assert stats.requests_finished >= reasons.count("length")
    assert sum(metrics.finished_count(reason) for reason in REASONS) == stats.requests_received
    assert at.server.driver.unfinished == 0
    assert at.server.engine.pool.used_blocks == 0
    page = at.server.page.render()
    assert f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {stats.generation_tokens}.0' in page
