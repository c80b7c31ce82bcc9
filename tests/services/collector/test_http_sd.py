"""Targets by URL: good answers are followed; bad, slow and huge ones change nothing and are told in one line."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from aiohttp.test_utils import TestServer

from metrics_collector.shell.http_sd import HttpTargets, shown
from trimtab.errors import StartupError
from trimtab.rpc.run import ServiceContext

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def listing(*addresses: str) -> web.Response:
    groups = [{"targets": list(addresses), "labels": {"service": "chat", "role": "decode"}}]
    return web.json_response(groups)


@asynccontextmanager
async def sd_server(answer: Answer) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_get("/targets", answer)
    async with TestServer(application, host="127.0.0.1") as server:
        yield str(server.make_url("/targets"))


def always(response: Callable[[], web.Response]) -> Answer:
    async def answer(_request: web.Request) -> web.Response:
        return response()

    return answer


async def ask(targets: HttpTargets, url: str, *, timeout_s: float = 5.0) -> None:
    async with ClientSession(timeout=ClientTimeout(total=timeout_s)) as session:
        await targets.ask(session, url)


def make(url: str, **options: object) -> HttpTargets:
    return HttpTargets([url], lambda: None, **{"interval_s": 30.0, "timeout_s": 5.0} | options)  # type: ignore[arg-type]


async def test_a_good_answer_gives_its_targets() -> None:
    async with sd_server(always(lambda: listing("h:1", "h:2"))) as url:
        targets = make(url)
        await ask(targets, url)

    assert [(item.target_id, item.source, item.counted) for item in targets.targets] == [
        ("h:1", "http_sd", True),
        ("h:2", "http_sd", True),
    ]
    assert targets.errors == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: web.Response(status=503), "HTTP 503"),
        (lambda: web.Response(text="<html>", content_type="text/html"), "content type 'text/html'"),
        (lambda: web.Response(body=b"{", content_type="application/json"), "not JSON"),
        (lambda: web.json_response([{"targets": ["no port"]}]), "[0].targets[0]: 'no port' must be host:port"),
        (lambda: web.Response(body=b" " * 2000, content_type="application/json"), "more than 1000 bytes"),
        (lambda: web.Response(status=302, headers={"Location": "/elsewhere"}), "HTTP 302"),
    ],
)
async def test_a_bad_answer_keeps_the_last_good_one(bad: Callable[[], web.Response], message: str) -> None:
    responses = iter([lambda: listing("h:1"), bad])
    async with sd_server(always(lambda: next(responses)())) as url:
        targets = make(url, max_bytes=1000)
        await ask(targets, url)
        await ask(targets, url)

    assert [item.target_id for item in targets.targets] == ["h:1"]
    assert message in targets.errors[url]
    assert "\n" not in targets.errors[url]


async def test_a_slow_server_is_given_up_and_keeps_its_targets() -> None:
    calls = 0

    async def answer(_request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls > 1:
            await asyncio.sleep(30)
        return listing("h:1")

    async with sd_server(answer) as url:
        targets = make(url, timeout_s=0.3)
        await ask(targets, url)
        await ask(targets, url, timeout_s=0.3)

    assert [item.target_id for item in targets.targets] == ["h:1"]
    assert targets.errors[url].endswith("no answer within 0.3 s")


async def test_a_server_that_comes_back_is_followed_again(eventually) -> None:
    state = {"listed": "h:1", "status": 200}

    async def answer(_request: web.Request) -> web.Response:
        return listing(state["listed"]) if state["status"] == 200 else web.Response(status=500)

    changes: list[int] = []
    context = ServiceContext("test")
    async with sd_server(answer) as url:
        targets = HttpTargets([url], lambda: changes.append(1), interval_s=0.05, timeout_s=5.0)
        task = asyncio.create_task(targets.run(context))
        await eventually(lambda: targets.targets)
        state["status"] = 500
        await eventually(lambda: targets.errors)
        state |= {"status": 200, "listed": "h:2"}
        await eventually(lambda: [item.target_id for item in targets.targets] == ["h:2"])
        context.stopping.set()
        await asyncio.wait_for(task, 30)

    assert targets.errors == {}
    assert len(changes) == 2, "the same answer again is no change"


async def test_the_server_is_told_the_interval_and_given_the_token_of_the_moment(tmp_path) -> None:
    seen: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers["X-Prometheus-Refresh-Interval-Seconds"], request.headers["Authorization"]))
        return listing("h:1")

    token = tmp_path / "token"
    token.write_text("one\n")
    async with sd_server(answer) as url:
        targets = make(url, token_file=token)
        await ask(targets, url)
        token.write_text("two\n")
        await ask(targets, url)
        token.unlink()
        await ask(targets, url)

    assert seen == [("30", "Bearer one"), ("30", "Bearer two")]
    assert "token" in targets.errors[url]


def test_a_ca_file_that_is_none_is_the_operators_to_mend(tmp_path) -> None:
    with pytest.raises(StartupError, match="http_sd_ca_file"):
        make("https://h/x", ca_file=tmp_path / "none.pem")


def test_secrets_of_a_url_reach_no_log() -> None:
    assert shown("https://user:secret@h:1/targets?token=secret") == "https://h:1/targets"
