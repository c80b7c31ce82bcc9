"""Completions and chats over real sockets: bodies, events, errors, continuation, hand-over of KV."""

import asyncio
import json

import aiohttp
import pytest

from simulator.core.memory import OutOfMemory
from simulator.core.sleep import SleepState
from simulator.core.tokens import make_prompt, token_ids
from simulator.server.server import Standalone

# The answers of the recorded server, with what differs between servers filled in.
RECORDED_COMPLETION = (
    '{"id":ID,"object":"text_completion","created":CREATED,"model":"tiny","choices":[{"index":0,"text":TEXT,'
    '"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,'
    '"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":FINGERPRINT,'
    '"usage":{"prompt_tokens":4,"total_tokens":12,"completion_tokens":8,"prompt_tokens_details":null,'
    '"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
RECORDED_CHAT = (
    '{"id":ID,"object":"chat.completion","created":CREATED,"model":"tiny","choices":[{"index":0,"message":{"role":'
    '"assistant","content":TEXT,"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},'
    '"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}],'
    '"service_tier":null,"system_fingerprint":FINGERPRINT,"usage":{"prompt_tokens":PROMPT,"total_tokens":TOTAL,'
    '"completion_tokens":8,"prompt_tokens_details":null,"completion_tokens_details":null},"prompt_logprobs":null,'
    '"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
RECORDED_CHUNK = (
    '{"id":ID,"object":"text_completion","created":CREATED,"model":"tiny","choices":[{"index":0,"text":TEXT,"logprobs":'
    'null,"finish_reason":REASON,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}'
)
RECORDED_USAGE = (
    '{"id":ID,"object":"text_completion","created":CREATED,"model":"tiny","choices":[],"usage":{"prompt_tokens":4,'
    '"total_tokens":8,"completion_tokens":4},"system_fingerprint":FINGERPRINT}'
)


def filled(template: str, body: dict, **values: object) -> str:
    values |= {"ID": body["id"], "CREATED": body["created"], "FINGERPRINT": body.get("system_fingerprint")}
    for name, value in values.items():
        template = template.replace(f":{name}", ":" + json.dumps(value))
    return template


async def post(http: aiohttp.ClientSession, url: str, **body: object) -> str:
    async with http.post(url, json={"model": "tiny", **body}) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


async def events(http: aiohttp.ClientSession, url: str, **body: object) -> list[str]:
    text = await post(http, url, stream=True, **body)
    parts = text.split("\n\n")
    assert parts[-1] == ""
    assert parts[-2] == "data: [DONE]"
    return [part.removeprefix("data: ") for part in parts[:-2]]


def text_of_events(chunks: list[str]) -> str:
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices)


async def test_a_completion_has_the_recorded_fields_in_the_recorded_order(make_server, http) -> None:
    at = await make_server()
    text = await post(http, at.url + "/v1/completions", prompt="the quick brown", max_tokens=8)
    body = json.loads(text)
    assert text == filled(RECORDED_COMPLETION, body, TEXT=body["choices"][0]["text"])
    assert len(body["choices"][0]["text"]) == 32


async def test_a_chat_has_the_recorded_fields_in_the_recorded_order(make_server, http) -> None:
    at = await make_server()
    messages = [{"role": "user", "content": "sleep wake metric"}]
    text = await post(http, at.url + "/v1/chat/completions", messages=messages, max_tokens=8)
    body = json.loads(text)
    content, used = body["choices"][0]["message"]["content"], body["usage"]
    assert text == filled(
        RECORDED_CHAT, body, TEXT=content, PROMPT=used["prompt_tokens"], TOTAL=used["prompt_tokens"] + 8
    )


async def test_streamed_chunks_are_those_of_the_recorded_server(make_server, http) -> None:
    at = await make_server()
    options = {"include_usage": True}
    chunks = await events(
        http, at.url + "/v1/completions", prompt="the quick brown", max_tokens=4, stream_options=options
    )
    assert len(chunks) == 5
    for position, chunk in enumerate(chunks[:4]):
        body = json.loads(chunk)
        reason = "length" if position == 3 else None
        assert chunk == filled(RECORDED_CHUNK, body, TEXT=body["choices"][0]["text"], REASON=reason)
    assert chunks[4] == filled(RECORDED_USAGE, json.loads(chunks[4]))
    plain = json.loads(await post(http, at.url + "/v1/completions", prompt="the quick brown", max_tokens=4))
    assert text_of_events(chunks) == plain["choices"][0]["text"]


async def test_without_usage_the_last_chunk_carries_the_fingerprint(make_server, http) -> None:
    at = await make_server()
    chunks = [json.loads(c) for c in await events(http, at.url + "/v1/completions", prompt="x", max_tokens=2)]
    assert ["system_fingerprint" in c for c in chunks] == [False, True]


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 10), (4, [1, 4, 4, 1]), (100, [1, 9])])
async def test_stream_interval_is_the_number_of_tokens_in_a_chunk_after_the_first(
    make_server, http, interval: int, sizes: list[int]
) -> None:
    at = await make_server(stream_interval=interval)
    chunks = await events(http, at.url + "/v1/completions", prompt="x", max_tokens=10)
    assert [len(json.loads(c)["choices"][0]["text"]) // 4 for c in chunks] == sizes


async def test_a_chat_stream_starts_with_the_role(make_server, http) -> None:
    at = await make_server()
    messages = [{"role": "user", "content": "hi"}]
    chunks = [
        json.loads(c)
        for c in await events(http, at.url + "/v1/chat/completions", messages=messages, max_completion_tokens=3)
    ]
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]


@pytest.mark.parametrize("cut", [1, 7, 19])
async def test_a_completion_continues_elsewhere_as_if_it_had_never_stopped(make_server, http, cut: int) -> None:
    one, other = await make_server(), await make_server(stream_interval=3)
    prompt = "Tell me about trim tabs, please."
    whole = json.loads(await post(http, one.url + "/v1/completions", prompt=prompt, max_tokens=20))
    text = whole["choices"][0]["text"]
    sent = text[: cut * 4]
    chunks = await events(http, other.url + "/v1/completions", prompt=prompt + sent, max_tokens=20 - cut)
    assert sent + text_of_events(chunks) == text


async def test_a_chat_continues_with_the_answer_so_far_as_its_last_message(make_server, http) -> None:
    one, other = await make_server(), await make_server()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    whole = json.loads(await post(http, one.url + "/v1/chat/completions", messages=messages, max_tokens=12))
    text = whole["choices"][0]["message"]["content"]
    rest = json.loads(
        await post(
            http,
            other.url + "/v1/chat/completions",
            messages=[*messages, {"role": "assistant", "content": text[:20]}],
            max_tokens=7,
            continue_final_message=True,
            add_generation_prompt=False,
        )
    )
    assert text[:20] + rest["choices"][0]["message"]["content"] == text


async def test_token_ids_in_and_out(make_server, http) -> None:
    at = await make_server()
    ids = token_ids(make_prompt(20))
    url = at.url + "/v1/completions"
    plain = json.loads(await post(http, url, prompt=ids, max_tokens=6, return_token_ids=True))
    choice = plain["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == 6
    chunks = await events(http, url, prompt=ids + choice["token_ids"][:2], max_tokens=4, return_token_ids=True)
    streamed = [token for c in chunks for token in json.loads(c)["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"][2:]
    async with http.post(at.url + "/tokenize", json={"prompt": make_prompt(20)}) as response:
        assert await response.json() == {"count": 20, "max_model_len": 4096, "tokens": ids, "token_strs": None}


async def test_several_prompts_and_n_give_indexed_choices(make_server, http) -> None:
    at = await make_server()
    body = json.loads(await post(http, at.url + "/v1/completions", prompt=["abc", "def"], n=2, max_tokens=3))
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 14,
        "completion_tokens": 12,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    chunks = await events(http, at.url + "/v1/completions", prompt=["abc", "def"], max_tokens=3)
    indexes = [json.loads(c)["choices"][0]["index"] for c in chunks]
    assert sorted(indexes) == [0, 0, 0, 1, 1, 1]


async def test_a_stop_string_cuts_the_text_in_both_kinds_of_answer(make_server, http) -> None:
    at = await make_server()
    url = at.url + "/v1/completions"
    text = json.loads(await post(http, url, prompt="stop", max_tokens=12))["choices"][0]["text"]
    stop = text[22:27]
    plain = json.loads(await post(http, url, prompt="stop", max_tokens=12, stop=[stop]))["choices"][0]
    assert (plain["text"], plain["finish_reason"], plain["stop_reason"]) == (text[:22], "stop", stop)
    chunks = await events(http, url, prompt="stop", max_tokens=12, stop=stop)
    assert text_of_events(chunks) == text[:22]
    assert json.loads(chunks[-1])["choices"][0]["stop_reason"] == stop


async def test_the_request_id_of_the_client_is_kept(make_server, http) -> None:
    at = await make_server()
    for _ in range(2):
        async with http.post(
            at.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "r-7"}
        ) as response:
            assert (await response.json())["id"] == "cmpl-r-7"
            assert response.headers["X-Request-Id"] == "r-7"


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        (b'{"model": "nope", "prompt": "x"}', 404, "NotFoundError", "The model `nope` does not exist."),
        (b"{bad", 400, "Bad Request", "'loc': 'body.1', 'msg': 'JSON decode error'"),
        (b'{"prompt": "x", "max_tokens": 0}', 400, "Bad Request", "greater than or equal to 1"),
        (b'{"max_tokens": 1}', 400, "Bad Request", "'loc': 'body.prompt', 'msg': 'Field required'"),
        (b'{"prompt": "x", "max_tokens": 5000}', 400, "BadRequestError", "5000 > 4096 - 1"),
        (b'{"prompt": "x", "max_tokens": 3, "min_tokens": 4}', 400, "BadRequestError", "min_tokens must be"),
        (b'{"prompt": "' + b"x" * 17000 + b'"}', 400, "BadRequestError", "maximum context length is 4096"),
        (b'{"prompt": ""}', 400, "Bad Request", "at least 1 character"),
    ],
)
async def test_errors_have_vllms_shape(make_server, http, body: bytes, status: int, kind: str, text: str) -> None:
    at = await make_server()
    async with http.post(at.url + "/v1/completions", data=body) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == (kind, status)
    assert text in error["message"]
    assert at.server.stats.requests_received == 0


async def test_a_json_error_is_the_recorded_one(make_server, http) -> None:
    at = await make_server()
    async with http.post(at.url + "/v1/completions", data=b"{bad") as response:
        assert await response.text() == (
            "{\"error\":{\"message\":\"1 validation error:\\n  {'type': 'json_invalid', 'loc': 'body.1', 'msg': "
            "'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting property name enclosed in "
            'double quotes\'}}","type":"Bad Request","param":"body.1","code":400}}'
        )


async def test_a_full_queue_answers_503_before_any_header_of_a_stream(make_server, http, quick_profile, until) -> None:
    limits = quick_profile.limits.model_copy(update={"max_num_queued_reqs": 1, "max_num_seqs": 1})
    at = await make_server(profile=quick_profile.model_copy(update={"limits": limits}))
    url = at.url + "/v1/completions"
    running = asyncio.create_task(post(http, url, prompt="a", max_tokens=1000))
    await until(lambda: at.server.engine.num_running == 1)
    queued = asyncio.create_task(post(http, url, prompt="a", max_tokens=1))
    await until(lambda: at.server.driver.unfinished == 2)
    async with http.post(url, json={"prompt": "a", "stream": True}) as response:
        assert response.status == 503
        assert (await response.json())["error"]["type"] == "Service Unavailable"
    assert 'reason="max_num_queued_reqs"} 1.0' in at.server.page.render()
    await asyncio.gather(running, queued)


async def test_a_client_that_disconnects_frees_its_place_in_the_engine(make_server, http, until) -> None:
    at = await make_server()
    url = at.url + "/v1/completions"
    response = await http.post(url, json={"prompt": "a", "max_tokens": 3000, "stream": True})
    await until(lambda: at.server.stats.generation_tokens > 3)
    response.close()
    await until(lambda: at.server.engine.unfinished == 0)
    assert at.server.stats.aborted == 1
    assert at.server.load == 0


async def test_a_client_that_stops_reading_is_cut_off(make_server, until, monkeypatch) -> None:
    monkeypatch.setattr("simulator.server.streaming.MAX_UNSENT_BYTES", 10_000)
    at = await make_server()
    host, port = at.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, "n": 64}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    await until(lambda: at.server.stats.aborted == 64, timeout_s=20)
    assert at.server.engine.unfinished == 0
    writer.close()


class Pair(Standalone):
    """Surroundings in which servers find each other's KV."""

    def __init__(self) -> None:
        self.peers = {}

    def claim_memory(self, state: SleepState) -> OutOfMemory | None:
        return None

    def has_remote_kv(self, engine_id: str, request_id: str) -> bool:
        return engine_id in self.peers and self.peers[engine_id].holds_kv(request_id)

    def release_remote_kv(self, engine_id: str, request_id: str) -> None:
        self.peers[engine_id].release_kv(request_id)


async def test_prefill_hands_its_kv_to_decode_and_frees_it_when_fetched(make_server, http, until) -> None:
    prefill, decode = await make_server(), await make_server()
    pair = Pair()
    pair.peers["tiny-0"] = prefill.server
    decode.server._surroundings = pair
    prompt = make_prompt(200)
    first = json.loads(
        await post(
            http,
            prefill.url + "/v1/completions",
            prompt=prompt,
            max_tokens=1,
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
        )
    )
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["remote_engine_id"] == "tiny-0"
    assert len(params["remote_block_ids"]) == 13
    assert prefill.server.engine.pool.used_blocks == 13
    second = json.loads(
        await post(http, decode.url + "/v1/completions", prompt=prompt, max_tokens=5, kv_transfer_params=params)
    )
    page = decode.server.page.render()
    assert 'source="external_kv_transfer"} 199.0' in page
    assert 'source="local_compute"} 1.0' in page
    assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 199.0' in page
    await until(lambda: prefill.server.engine.pool.used_blocks == 0)
    colocated = json.loads(await post(http, prefill.url + "/v1/completions", prompt=prompt, max_tokens=5))
    assert second["choices"][0]["text"] == colocated["choices"][0]["text"]


async def test_decode_computes_the_prompt_itself_when_the_prefill_server_is_gone(make_server, http) -> None:
    at = await make_server()
    params = {"do_remote_prefill": True, "remote_engine_id": "gone-0", "remote_request_id": "r"}
    body = json.loads(
        await post(http, at.url + "/v1/completions", prompt="abcd" * 9, max_tokens=2, kv_transfer_params=params)
    )
    assert body["usage"]["completion_tokens"] == 2
    assert 'source="local_compute"} 9.0' in at.server.page.render()
