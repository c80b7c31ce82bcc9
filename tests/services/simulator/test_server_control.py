"""What sleep, wake and pause answer, as a real vLLM 0.32 does, and what they do to requests and gauges."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest

from simulator.core.memory import GpuId, OutOfMemory
from simulator.core.profile import Profile
from simulator.core.requests import FinishReason
from simulator.core.sleep import SleepState
from simulator.core.tokens import OutputPlan
from simulator.server.driver import MAX_DEBT_S
from simulator.server.faults import Fault
from simulator.server.vllm_metrics import RequestParams

_ENTRY = re.compile(r"^### (GET|POST) (/\S+)(?:  body=b'(.*)')?\n-> (\d+) in .*\n(.*)$", re.M)
_KNOWN = ("/sleep", "/wake_up", "/is_sleeping", "/is_paused", "/pause", "/resume", "/health", "/reset_prefix_cache")


def recorded_sequence(material: Path) -> list[tuple[str, str, int, str]]:
    """(method, path, status, body) of the recorded control calls, up to the point where CPU vLLM failed to free KV."""
    text = (material / "vllm" / "captures" / "eager-endpoints.txt").read_text(encoding="utf-8")
    text = text[text.index("SLEEP/WAKE/PAUSE SEQUENCE") : text.index("### POST /release_kv_cache_memory")]
    found = _ENTRY.findall(text)
    return [(m, path, int(status), body) for m, path, _, status, body in found if path.startswith(_KNOWN)]


async def test_control_calls_answer_byte_for_byte_as_the_recorded_server_did(make_server, http, material: Path) -> None:
    at = await make_server()
    sequence = recorded_sequence(material)
    assert len(sequence) > 70
    for position, (method, path, status, body) in enumerate(sequence):
        async with http.request(method, at.url + path) as response:
            got = (await response.text(), response.status)
        assert got == (body, status), f"call {position}: {method} {path}"


# (method, path, status, body, is_sleeping afterwards, is_paused afterwards), one call after the other.
CALLS: list[tuple[str, str, int, str, bool, bool]] = [
    ("POST", "/sleep?level=1", 200, '{"status":"sleeping","level":1}', True, True),
    ("POST", "/sleep?level=1", 200, '{"status":"sleeping","level":1}', True, True),
    ("POST", "/wake_up", 200, '{"status":"awake","tags":null}', False, False),
    ("POST", "/wake_up", 200, '{"status":"awake","tags":null}', False, False),
    # With its weights alone it still sleeps.
    ("POST", "/sleep?level=2", 200, '{"status":"sleeping","level":2}', True, True),
    ("POST", "/wake_up?tags=weights", 200, '{"status":"sleeping","tags":["weights"]}', True, True),
    ("POST", "/wake_up?tags=kv_cache", 200, '{"status":"awake","tags":["kv_cache"]}', False, False),
    # Level 0 stops the scheduler alone.
    ("POST", "/sleep?level=0", 200, '{"status":"sleeping","level":0}', True, True),
    ("POST", "/wake_up?tags=scheduling", 200, '{"status":"awake","tags":["scheduling"]}', False, False),
    ("POST", "/wake_up?tags=bogus", 200, '{"status":"awake","tags":["bogus"]}', False, False),
    ("GET", "/sleep", 405, '{"detail":"Method Not Allowed"}', False, False),
    ("POST", "/sleep", 200, '{"status":"sleeping","level":1}', True, True),
    ("POST", "/is_sleeping", 405, '{"detail":"Method Not Allowed"}', True, True),
    ("POST", "/wake_up", 200, '{"status":"awake","tags":null}', False, False),
    # A pause looks like sleep to who asks, and a wake ends it as well as a resume.
    ("POST", "/pause", 200, '{"status":"paused"}', True, True),
    ("POST", "/wake_up", 200, '{"status":"awake","tags":null}', False, False),
    ("POST", "/pause?mode=keep", 200, '{"status":"paused"}', True, True),
    ("POST", "/resume", 200, '{"status":"resumed"}', False, False),
    ("POST", "/resume", 200, '{"status":"resumed"}', False, False),
]


async def test_control_calls_one_after_the_other(make_server, http) -> None:
    at = await make_server()
    for position, (method, path, status, body, sleeping, paused) in enumerate(CALLS):
        async with http.request(method, at.url + path) as response:
            assert (response.status, await response.text()) == (status, body), f"call {position}: {method} {path}"
        for question, answer in (("is_sleeping", sleeping), ("is_paused", paused)):
            async with http.get(f"{at.url}/{question}") as response:
                assert await response.json() == {question: answer}, f"call {position}: {method} {path}"
        async with http.get(at.url + "/health") as response:
            assert (response.status, await response.text()) == (200, "")


@pytest.mark.parametrize(
    ("query", "kind", "param"),
    [
        ("level=3", "less_than_equal", "query.level"),
        ("level=abc", "int_parsing", "query.level"),
        ("level=1&mode=bogus", "literal_error", "query.mode"),
    ],
)
async def test_a_wrong_sleep_is_refused_and_changes_nothing(make_server, http, query: str, kind: str, param) -> None:
    at = await make_server()
    async with http.post(f"{at.url}/sleep?{query}") as response:
        error = (await response.json())["error"]
    assert (error["code"], error["param"], error["type"]) == (400, param, "Bad Request")
    assert f"'type': '{kind}'" in error["message"]
    async with http.get(at.url + "/is_sleeping") as response:
        assert await response.json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("POST", "/pause?mode=bogus", 400, None),
        ("GET", "/nothing", 404, {"detail": "Not Found"}),
        ("GET", "/version", 200, {"version": "0.32.0"}),
        ("GET", "/load", 200, {"server_load": 0}),
    ],
)
async def test_other_routes(make_server, http, method: str, path: str, status: int, body) -> None:
    at = await make_server()
    async with http.request(method, at.url + path) as response:
        assert response.status == status
        if body is not None:
            assert await response.json() == body


def sample(page: str, name: str, **labels: str) -> float:
    for line in page.splitlines():
        if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} {labels} is not on the page")


async def page_of(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url + "/metrics") as response:
        return await response.text()


async def generate(http: aiohttp.ClientSession, url: str, tokens: int, prompt: str = "one two three") -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens}
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200
        return await response.json()


async def test_abort_ends_requests_in_flight_with_200_and_finish_reason_abort(make_server, http, until) -> None:
    at = await make_server()
    long = asyncio.create_task(generate(http, at.url, 2000))
    await until(lambda: at.server.engine.num_running == 1)
    async with http.post(at.url + "/sleep?level=1&mode=abort") as response:
        assert response.status == 200
    answer = await long
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["completion_tokens"] < 2000
    page = await page_of(http, at.url)
    assert sample(page, "vllm:request_success_total", finished_reason="abort") == 1
    assert sample(page, "vllm:num_requests_running") == 0
    assert at.server.stats.aborted == 1


async def test_wait_lets_requests_finish_before_it_sleeps(make_server, http, until) -> None:
    at = await make_server()
    running = asyncio.create_task(generate(http, at.url, 600))
    await until(lambda: at.server.engine.num_running == 1)
    async with http.post(at.url + "/sleep?level=1&mode=wait") as response:
        assert (await response.json()) == {"status": "sleeping", "level": 1}
    assert running.done() or at.server.engine.unfinished == 0
    assert (await running)["choices"][0]["finish_reason"] == "length"


async def test_keep_freezes_requests_leaves_a_stale_gauge_and_goes_on_after_the_wake(make_server, http, until) -> None:
    at = await make_server()
    kept = asyncio.create_task(generate(http, at.url, 1000))
    await until(lambda: at.server.stats.generation_tokens > 5)
    async with http.post(at.url + "/sleep?level=1&mode=keep") as response:
        assert response.status == 200
    tokens_asleep = at.server.stats.generation_tokens
    page = await page_of(http, at.url)
    assert sample(page, "vllm:num_requests_running") == 1
    assert sample(page, "vllm:engine_sleep_state", sleep_state="awake") == 0
    await asyncio.sleep(0.03)
    assert at.server.stats.generation_tokens == tokens_asleep
    async with http.post(at.url + "/wake_up") as response:
        assert response.status == 200
    assert (await kept)["usage"]["completion_tokens"] == 1000


async def test_requests_to_a_sleeping_server_hang_unseen_by_the_gauges_until_it_wakes(make_server, http, until) -> None:
    at = await make_server()
    await generate(http, at.url, 3)
    async with http.post(at.url + "/sleep?level=1"):
        pass
    waiting = asyncio.create_task(generate(http, at.url, 4))
    await until(lambda: at.server.load == 1)
    page = await page_of(http, at.url)
    assert sample(page, "vllm:num_requests_waiting") == 0
    assert sample(page, "vllm:generation_tokens_total") == 3
    async with http.get(at.url + "/load") as response:
        assert await response.json() == {"server_load": 1}
    async with http.get(at.url + "/health") as response:
        assert response.status == 200
    assert not waiting.done()
    async with http.post(at.url + "/wake_up"):
        pass
    assert (await waiting)["usage"]["completion_tokens"] == 4
    page = await page_of(http, at.url)
    assert sample(page, "vllm:generation_tokens_total") == 7
    assert at.server.stats.requests_received_while_asleep == 1


async def test_after_a_sleep_of_level_2_the_weights_have_to_be_loaded_again(make_server, http) -> None:
    at = await make_server()

    async def post(path: str, body: object = None) -> int:
        async with http.post(at.url + path, json=body) as response:
            return response.status

    reload = {"method": "reload_weights"}
    assert await post("/sleep?level=2") == 200
    assert await post("/collective_rpc", reload) == 500, "their memory is not back"
    assert await post("/wake_up?tags=weights") == 200
    assert (await post("/collective_rpc", {}), await post("/collective_rpc", {"method": "no_such"})) == (400, 500)
    assert await post("/wake_up?tags=kv_cache") == 200
    prompt = {"prompt": "x", "max_tokens": 1}
    assert await post("/v1/completions", prompt) == 200
    assert at.server.stats.requests_received_without_weights == 1, "a real server would answer nonsense"
    assert await post("/collective_rpc", reload) == 200
    assert await post("/v1/completions", prompt) == 200
    assert at.server.stats.requests_received_without_weights == 1


async def test_a_stream_to_a_sleeping_server_gets_its_headers_at_once(make_server, http) -> None:
    at = await make_server()
    async with http.post(at.url + "/sleep?level=1"):
        pass
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    async with http.post(at.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        async with http.post(at.url + "/wake_up"):
            pass
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_a_sleeping_server_is_counted_as_aborted(make_server, http, until) -> None:
    at = await make_server()
    async with http.post(at.url + "/sleep?level=1"):
        pass
    gone = asyncio.create_task(generate(http, at.url, 4))
    await until(lambda: at.server.load == 1)
    gone.cancel()
    await until(lambda: at.server.load == 0)
    assert at.server.stats.aborted == 1
    assert at.server.driver.unfinished == 0


@pytest.mark.parametrize(("level", "states"), [(0, (0.0, 0.0, 0.0)), (1, (0.0, 1.0, 0.0)), (2, (0.0, 0.0, 1.0))])
async def test_the_sleep_state_metric_by_level(make_server, http, level: int, states: tuple[float, ...]) -> None:
    at = await make_server()
    async with http.post(at.url + f"/sleep?level={level}"):
        pass
    page = await page_of(http, at.url)
    names = ("awake", "weights_offloaded", "discard_all")
    assert tuple(sample(page, "vllm:engine_sleep_state", sleep_state=n) for n in names) == states
    assert sample(page, "vllm:sleep_mode_operation_duration_seconds_count", operation="sleep") == 1


def with_lifecycle(profile: Profile, **seconds: float) -> Profile:
    return profile.model_copy(update={"lifecycle": profile.lifecycle.model_copy(update=seconds)})


async def test_the_first_sleep_is_slower_and_a_second_call_while_asleep_is_quick(
    make_server, http, quick_profile
) -> None:
    at = await make_server(profile=with_lifecycle(quick_profile, first_sleep_s=2.0, sleep_s=0.05))
    loop = asyncio.get_running_loop()
    seconds = []
    for path in ("/sleep", "/sleep", "/wake_up", "/sleep"):
        started_s = loop.time()
        async with http.post(at.url + path):
            pass
        seconds.append(loop.time() - started_s)
    assert seconds[0] >= 2.0
    assert seconds[1] < 1.9
    assert 0.05 <= seconds[3] < 1.9


@pytest.mark.parametrize(("scale", "least_s", "most_s"), [(0.1, 0.5, 3.0), (0.0, 0.2, 3.0)])
async def test_bring_up_scale_shortens_only_the_first_sleep_and_never_below_a_later_one(
    make_server, quick_profile, scale: float, least_s: float, most_s: float
) -> None:
    profile = with_lifecycle(quick_profile, first_sleep_s=5.0, sleep_s=0.2)
    at = await make_server(profile=profile, bring_up_scale=scale)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await at.server.sleep(1, "abort")
    assert least_s <= loop.time() - started_s < most_s


async def test_a_wake_without_memory_answers_500_and_the_server_stays_asleep(make_server, http) -> None:
    at = await make_server()
    async with http.post(at.url + "/sleep"):
        pass

    class Full:
        def claim_memory(self, state: SleepState) -> OutOfMemory | None:
            return None if state.missing else OutOfMemory(GpuId("node-0", 0), 40.0, 34.0, 34.0)

    at.server._surroundings = Full()
    async with http.post(at.url + "/wake_up") as response:
        assert response.status == 500
        error = (await response.json())["error"]
    assert "CUDA out of memory" in error["message"]
    assert error["type"] == "InternalServerError"
    async with http.get(at.url + "/is_sleeping") as response:
        assert await response.json() == {"is_sleeping": True}


async def test_faults(make_server, http, until) -> None:
    at = await make_server()
    at.server.set_fault(Fault.HTTP_500)
    async with http.get(at.url + "/health") as response:
        assert response.status == 500
    at.server.set_fault(Fault.WEDGED)
    stuck = asyncio.create_task(generate(http, at.url, 3))
    await until(lambda: at.server.engine.unfinished == 1)
    await asyncio.sleep(0.02)
    async with http.get(at.url + "/health") as response:
        assert response.status == 200
    assert not stuck.done()
    at.server.set_fault(Fault.NONE)
    assert (await stuck)["usage"]["completion_tokens"] == 3
    at.server.set_fault(Fault.HUNG)
    with pytest.raises(TimeoutError):
        async with http.get(at.url + "/health", timeout=aiohttp.ClientTimeout(total=0.1)):
            pass
    at.server.set_fault(Fault.MALFORMED_METRICS)
    page = await page_of(http, at.url)
    assert not page.endswith("\n")
    assert " NaN\n" in page
    at.server.set_fault(Fault.WAKE_REFUSED)
    async with http.post(at.url + "/sleep"):
        pass
    async with http.post(at.url + "/wake_up") as response:
        assert response.status == 500
    at.server.set_fault(Fault.NONE)
    async with http.post(at.url + "/wake_up") as response:
        assert json.loads(await response.text()) == {"status": "awake", "tags": None}


async def test_a_healed_server_goes_on_with_the_iteration_that_was_under_way(make_server, http, until) -> None:
    at = await make_server()
    # Longer than what the engine makes up for at once after a stall of this test.
    tokens = 1 + int(1.2 * MAX_DEBT_S / 0.002)
    running = asyncio.create_task(generate(http, at.url, tokens))
    await until(lambda: at.server.engine.in_step)
    for fault in (Fault.WEDGED, Fault.NONE, Fault.SLOW, Fault.NONE, Fault.HUNG, Fault.NONE):
        at.server.set_fault(fault)
    await until(lambda: at.server.stats.generation_tokens > 10)
    at.server.set_fault(Fault.WEDGED)
    stood_at = at.server.stats.generation_tokens
    await asyncio.sleep(0.05)
    assert at.server.stats.generation_tokens == stood_at
    at.server.set_fault(Fault.NONE)
    assert (await running)["usage"]["completion_tokens"] == tokens
    # Tokens come 2 ms apart but for the one that the stand-still held up.
    assert sample(at.server.page.render(), "vllm:inter_token_latency_seconds_sum") >= 0.05 + (tokens - 2) * 0.002


async def test_a_request_on_the_way_to_sleep_counts_as_misrouted(make_server, http, until, quick_profile) -> None:
    at = await make_server(profile=with_lifecycle(quick_profile, first_sleep_s=0.2))
    sleeping = asyncio.create_task(at.server.sleep(1, "abort"))
    await until(lambda: at.server.sleep_state.paused)
    assert not at.server.sleep_state.offloaded
    waiting = at.server.submit("r", "x", OutputPlan(2, FinishReason.LENGTH), RequestParams(1, 2))
    assert at.server.stats.requests_received_while_asleep == 1
    await sleeping
    assert not waiting.done()
    async with http.post(at.url + "/wake_up"):
        pass
    assert (await waiting).generated_tokens == 2


async def test_a_wake_from_level_2_is_quick_and_the_reload_takes_as_long_as_reading_the_weights(
    make_server, http, quick_profile
) -> None:
    at = await make_server(profile=with_lifecycle(quick_profile, wake_s=0.3, wake_level2_s=0.6))
    loop = asyncio.get_running_loop()

    async def timed(path: str, body: object = None) -> float:
        started_s = loop.time()
        async with http.post(at.url + path, json=body) as response:
            assert response.status == 200
        return loop.time() - started_s

    await timed("/sleep?level=1")
    assert await timed("/wake_up") >= 0.3
    await timed("/sleep?level=2")
    await timed("/wake_up?tags=weights")
    assert await timed("/collective_rpc", {"method": "reload_weights"}) >= 0.6
    await timed("/wake_up?tags=kv_cache")
    await timed("/sleep?level=1")
    assert await timed("/wake_up") >= 0.3, "its weights are there again"
    at = await make_server(profile=with_lifecycle(quick_profile, wake_s=10.0))
    await timed("/sleep?level=2")
    assert await timed("/wake_up?tags=weights") < 9.0, "there is nothing to copy back"


async def test_a_second_deeper_sleep_throws_nothing_away(make_server, http) -> None:
    at = await make_server()
    for path in ("/sleep?level=1", "/sleep?level=2", "/wake_up"):
        async with http.post(at.url + path) as response:
            assert response.status == 200
    await generate(http, at.url, 1)
    assert at.server.stats.requests_received_without_weights == 0


async def test_a_prefix_cache_with_held_blocks_is_reset_only_with_its_requests(make_server, http, until) -> None:
    at = await make_server()

    async def reset(query: str = "") -> object:
        async with http.post(f"{at.url}/reset_prefix_cache{query}") as response:
            assert response.status == 200
            return await response.json()

    await generate(http, at.url, 1, "abcd" * 64)
    assert await reset() == {"success": True}
    running = asyncio.create_task(generate(http, at.url, 1000, "abcd" * 64))
    await until(lambda: at.server.engine.num_running == 1)
    assert await reset() == {"success": False}
    assert await reset("?reset_running_requests=true") == {"success": True}
    assert (await running)["usage"]["completion_tokens"] == 1000


@pytest.mark.parametrize(
    ("body", "said"),
    [(b"{", "JSON decode error"), (b"[]", "Request body must be a JSON object"), (b"{}", "Missing 'method'")],
)
async def test_a_call_to_the_workers_without_a_method_is_refused(make_server, http, body: bytes, said: str) -> None:
    at = await make_server()
    async with http.post(at.url + "/collective_rpc", data=body) as response:
        assert response.status == 400
        assert said in (await response.json())["error"]["message"]


async def test_sleeping_forgets_the_prefix_cache_and_kv_that_nobody_fetched(make_server, http) -> None:
    at = await make_server()
    prompt = "abcd" * 64
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with http.post(at.url + "/v1/completions", json=body):
        pass
    assert at.server.engine.pool.used_blocks == 4
    async with http.post(at.url + "/sleep"):
        pass
    assert at.server.engine.pool.used_blocks == 0
    async with http.post(at.url + "/wake_up"):
        pass
    await generate(http, at.url, 1, prompt)
    assert at.server.engine.counters.prefix_hits_tokens == 0


async def test_slow_makes_iterations_five_times_as_long(make_server, http) -> None:
    at = await make_server()
    at.server.set_fault(Fault.SLOW)
    await generate(http, at.url, 10)
    finished = at.server.page.render()
    assert sample(finished, "vllm:inter_token_latency_seconds_sum") == pytest.approx(9 * 0.01, rel=0.05)
