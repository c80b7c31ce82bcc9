"""The replay client: what it sends, when, and what it counts as lost."""

import asyncio
import gzip
import json

import pytest
from aiohttp import web

from simulator.core.tokens import count_tokens
from simulator.replay import Outcome, ReplayOptions, replay
from simulator.replay.client import read_answer
from simulator.replay.prompts import PromptMaker
from simulator.traces import TraceRequest
from trimtab.api.actuator.v1 import actuator_pb2

ROUTABLE = actuator_pb2.ENDPOINT_STATE_ROUTABLE


def trace(count, *, gap_s=0.01, service="chat", output=8):
    return [TraceRequest(i * gap_s, service, 5 + i % 7, output) for i in range(count)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 100, 4095, 4096, 9000])
def test_prompts_have_exactly_the_tokens_asked_for(tokens):
    maker = PromptMaker(3)
    assert count_tokens(maker.text(5, tokens)) == tokens
    assert len(maker.text(5, tokens)) == 4 * tokens
    assert len(maker.token_ids(5, tokens)) == tokens
    assert maker.text(5, tokens) == PromptMaker(3).text(5, tokens)


def test_prompts_share_no_first_block():
    maker = PromptMaker(1)
    heads = {maker.text(index, 100)[:64] for index in range(2000)}
    assert len(heads) == 2000
    with pytest.raises(ValueError, match="at least one token"):
        maker.text(0, 0)


async def test_whole_trace_through_a_gateway_comes_back_complete(gateway):
    a, b = await gateway.server("a"), await gateway.server("b")
    await gateway.start()
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE), ("b", b.address, ROUTABLE)]})
    seen = []
    requests = trace(40)
    report = await replay(requests, ReplayOptions(url=gateway.url), on_progress=seen.append)
    assert report.outcomes == {"ok": 40}
    assert not report.stopped
    assert [(r.prompt_tokens, r.received_tokens) for r in report.records] == [(r.prompt_tokens, 8) for r in requests]
    assert all(r.ttft_s > 0 and r.e2e_s >= r.ttft_s and r.tpot_s >= 0 for r in report.records)
    assert (seen[-1].finished, seen[-1].lost, seen[-1].in_flight, seen[-1].received_tokens) == (40, 0, 0, 320)
    assert sorted(count_tokens(body["prompt"]) for body in a.bodies + b.bodies) == sorted(
        r.prompt_tokens for r in requests
    )


@pytest.mark.parametrize("how", ["abort", "reset", "eof"])
async def test_reissued_answers_are_whole_and_ungarbled(gateway, how):
    a, b = await gateway.server("a"), await gateway.server("b")
    await gateway.start(avoid_s=1e-9)
    a.break_after, a.break_how = 3, how
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE), ("b", b.address, ROUTABLE)]})
    report = await replay(trace(10, gap_s=0.03), ReplayOptions(url=gateway.url))
    assert report.outcomes == {"ok": 10}
    assert a.bodies


class Liar:
    """A gateway whose answers are wrong in ways of its own."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.url = ""

    async def __aenter__(self) -> "Liar":
        application = web.Application()
        application.router.add_post("/v1/completions", self.answer)
        self.runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


def event(text="", reason=None, **more):
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}], **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (event(" abc") + event(" def", "abort") + DONE, Outcome.ABORTED),
        (event(" abc") + b'data: {"error": {"message": "x"}}\n\n' + DONE, Outcome.STREAM_ERROR),
        (event(" abc", "stop") + DONE, Outcome.SHORT),
        (event(" abc" * 8, "length"), Outcome.SHORT),
        (event(" abc" * 8, "length") + DONE, Outcome.GARBLED),
        (b"data: {nonsense\n\n", Outcome.STREAM_ERROR),
        (b"", Outcome.SHORT),
    ],
)
async def test_wrong_answers_are_lost_requests(body, outcome):
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="text/event-stream")

    async with Liar(answer) as liar:
        report = await replay(trace(1), ReplayOptions(url=liar.url))
    assert [record.outcome for record in report.records] == [outcome]
    assert report.lost == report.records
    assert report.records[0].e2e_s is None


async def test_http_errors_and_broken_connections_are_lost_requests():
    async def answer(request: web.Request) -> web.Response:
        if "b" in (await request.json())["model"]:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=503, text="no replica")

    async with Liar(answer) as liar:
        requests = [TraceRequest(0.0, "a", 5, 8), TraceRequest(0.1, "b", 5, 8)]
        report = await replay(requests, ReplayOptions(url=liar.url))
    assert [record.outcome for record in report.records] == [Outcome.HTTP_ERROR, Outcome.CONNECTION]
    assert report.records[0].detail == "503 no replica"


async def test_slow_answers_run_into_the_timeout_and_count_from_the_planned_arrival():
    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async with Liar(answer) as liar:
        report = await replay(trace(1), ReplayOptions(url=liar.url, request_timeout_s=0.2))
    assert report.outcomes == {"timeout": 1}


async def test_gateway_that_restarts_is_tried_again(gateway, free_port):
    a = await gateway.server("a")
    run = asyncio.create_task(replay(trace(3), ReplayOptions(url=f"http://127.0.0.1:{free_port}")))
    await asyncio.sleep(0.2)
    await gateway.start(listen=f"127.0.0.1:{free_port}")
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE)]})
    report = await run
    assert report.outcomes == {"ok": 3}
    assert all(record.ttft_s > 0.1 for record in report.records)


async def test_gateway_that_never_comes_loses_every_request(free_port):
    options = ReplayOptions(url=f"http://127.0.0.1:{free_port}", connect_timeout_s=0.1)
    report = await replay(trace(3), options)
    assert report.outcomes == {"connection": 3}


async def test_too_many_requests_under_way_are_not_sent():
    release = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await release.wait()
        return web.Response(body=event(" abc", "length") + DONE, content_type="text/event-stream")

    async with Liar(answer) as liar:
        asyncio.get_running_loop().call_later(0.3, release.set)
        report = await replay(
            trace(5, gap_s=0.0, output=1), ReplayOptions(url=liar.url, max_in_flight=2, check_text=False)
        )
    assert report.outcomes["not_sent"] == 3


async def test_stop_ends_the_replay_early_and_says_so():
    stopping = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        stopping.set()
        await asyncio.sleep(30)
        return web.Response()

    async with Liar(answer) as liar:
        report = await replay(trace(100, gap_s=0.05), ReplayOptions(url=liar.url), stopping=stopping)
    assert report.stopped
    assert 0 < len(report.records) < 100
    assert set(report.outcomes) == {"unfinished"}


def test_real_servers_are_believed_by_their_usage():
    answer = read_answer(event("any text", "length", usage={"completion_tokens": 8}) + DONE)
    assert (answer.completion_tokens, answer.finish_reason, answer.done) == (8, "length", True)


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
async def test_report_is_written_as_json(tmp_path, name, free_port):
    report = await replay(trace(1), ReplayOptions(url=f"http://127.0.0.1:{free_port}", connect_timeout_s=0.05))
    report.write(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    read = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert (read["requests"], read["lost_requests"], read["records"][0]["outcome"]) == (1, 1, "connection")


async def test_wrong_url_is_a_lost_request_not_a_crash():
    report = await replay(trace(1), ReplayOptions(url="http://no-such-host.invalid", connect_timeout_s=0.05))
    assert report.outcomes == {"connection": 1}
