"""Fetching and scraping over real sockets: servers that hang, break off, lie about their size or have moved on."""

import asyncio
import gzip
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from metrics_collector.core.dialects import load_dialects
from metrics_collector.core.page import PageReader
from metrics_collector.core.rounds import ClosedSlice, close_slice, slices_of
from metrics_collector.core.targets import Target
from metrics_collector.core.window import Window
from metrics_collector.shell.answer import DownError, RefusedError
from metrics_collector.shell.client import ClientRules, Gzip, TargetClient
from metrics_collector.shell.metrics import ScrapeMetrics
from metrics_collector.shell.request import Place, RequestHeads, TokenFile
from metrics_collector.shell.rules import RulesByService
from metrics_collector.shell.scraper import Scraper
from metrics_collector.shell.settings import CollectorSettings
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2

TEXT = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
LIMIT = 100_000
NAMES = ("vllm:num_requests_running", "vllm:generation_tokens_total")


@dataclass
class Fetcher:
    """The client of one target, awaited."""

    client: TargetClient
    timeout_s: float
    done: "asyncio.Future[bytes]"

    async def fetch(self) -> bytes:
        self.done = asyncio.get_running_loop().create_future()
        self.client.fetch()
        timer = asyncio.get_running_loop().call_later(self.timeout_s, self.client.expire, self.timeout_s)
        try:
            return await self.done
        finally:
            timer.cancel()

    async def load(self) -> bytes | None:
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.client.fetch_load(answer.set_result)
        return await asyncio.wait_for(answer, 5)


@contextmanager
def fetching(
    address: str,
    *,
    timeout_s: float = 1.0,
    names: Sequence[str] = (),
    gzip: Gzip = Gzip.AUTO,
    token: TokenFile | None = None,
    tls: ssl.SSLContext | None = None,
    tls_server_name: str | None = None,
) -> Iterator[Fetcher]:
    heads = RequestHeads(names, filter_pages=bool(names), token=token)
    rules = ClientRules(heads=heads, max_page_bytes=LIMIT, gzip=gzip, tls=tls, tls_server_name=tls_server_name)
    fetcher: Fetcher
    client = TargetClient(
        Place(address),
        rules,
        answered=lambda page: fetcher.done.set_result(page),
        failed=lambda error: fetcher.done.set_exception(error),
    )
    fetcher = Fetcher(client, timeout_s, asyncio.get_running_loop().create_future())
    try:
        yield fetcher
    finally:
        client.close()


async def test_a_page_comes_as_it_is(page_server) -> None:
    server = await page_server(b"some 1\n")
    with fetching(server.url) as fetcher:
        page = await fetcher.fetch()

    assert page == b"some 1\n"
    assert server.requests == ["/metrics"]


async def test_a_packed_page_is_unpacked(page_server) -> None:
    body = b"some 1\n" * 1000

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "gzip"
        return web.Response(body=gzip.compress(body), headers=TEXT | {"Content-Encoding": "gzip"})

    server = await page_server(answer)
    with fetching(server.url, gzip=Gzip.ALWAYS) as fetcher:
        assert await fetcher.fetch() == body


async def test_the_filtered_page_is_asked_for_until_the_server_has_none(page_server) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=404) if request.path == "/metrics/" else web.Response(body=b"a 1\n", headers=TEXT)

    server = await page_server(answer)
    with fetching(server.url, names=NAMES) as fetcher:
        await fetcher.fetch()
        await fetcher.fetch()

    assert [path.partition("?")[0] for path in server.requests] == ["/metrics/", "/metrics", "/metrics"]
    assert "name[]=vllm%3Anum_requests_running" in server.requests[0].replace("name%5B%5D", "name[]")


async def test_after_a_restart_the_filtered_page_is_tried_again(page_server) -> None:
    answers = iter([404, 200, 503, 200])

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=b"a 1\n", status=next(answers), headers=TEXT)

    server = await page_server(answer)
    with fetching(server.url, names=NAMES) as fetcher:
        await fetcher.fetch()
        with pytest.raises(DownError, match="HTTP 503"):
            await fetcher.fetch()
        await fetcher.fetch()

    assert [path.partition("?")[0] for path in server.requests] == ["/metrics/", "/metrics", "/metrics", "/metrics/"]


@pytest.mark.parametrize("status", [301, 401, 404, 500, 503])
async def test_an_error_status_is_down(page_server, status: int) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=b"vllm:num_requests_running 0\n", headers=TEXT | {"Location": "/x"})

    server = await page_server(answer)
    with fetching(server.url) as fetcher, pytest.raises(DownError, match=f"HTTP {status}"):
        await fetcher.fetch()
    assert server.requests == ["/metrics"], "a redirect must not be followed to who knows where"


async def test_nobody_listens(free_port: int) -> None:
    address = f"http://127.0.0.1:{free_port}"
    with fetching(address) as fetcher, pytest.raises(DownError, match=r"^connection refused$"):
        await fetcher.fetch()


async def test_a_server_that_hangs_or_drips_is_given_up_in_time(page_server) -> None:
    async def hang(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=TEXT)
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"a 1\n")
            await asyncio.sleep(0.02)
        return response

    for answer in (hang, drip):
        server = await page_server(answer)
        with fetching(server.url, timeout_s=0.2) as fetcher:
            started = time.monotonic()
            with pytest.raises(DownError, match=r"no page within 0\.2 s"):
                await fetcher.fetch()
            assert time.monotonic() - started < 1.0


async def test_case_11_an_endless_page_is_refused_at_its_limit(page_server) -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers=TEXT)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)
            sent += 65_536

    server = await page_server(answer)
    with fetching(server.url) as fetcher, pytest.raises(RefusedError, match="more than 100000 bytes"):
        await fetcher.fetch()
    assert sent < 100 * LIMIT


async def test_case_11_a_bomb_is_refused_while_it_unpacks(page_server) -> None:
    bomb = gzip.compress(b"\n" * 50_000_000)

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers=TEXT | {"Content-Encoding": "gzip"})

    server = await page_server(answer)
    with fetching(server.url) as fetcher, pytest.raises(RefusedError, match="more than 100000 bytes"):
        await fetcher.fetch()


@pytest.mark.parametrize(
    ("body", "headers", "reason"),
    [
        (gzip.compress(b"some 1\n" * 1000)[:-20], TEXT | {"Content-Encoding": "gzip"}, "packed page is cut"),
        (b"this is no gzip", TEXT | {"Content-Encoding": "gzip"}, "does not unpack"),
        (b"some 1\n", TEXT | {"Content-Encoding": "br"}, "content encoding 'br'"),
        (b"<html>", {"Content-Type": "text/html"}, "content type 'text/html'"),
        (b"{}", {"Content-Type": "application/json"}, "content type 'application/json'"),
    ],
    ids=["cut gzip", "no gzip", "another encoding", "HTML", "JSON"],
)
async def test_case_11_what_is_no_page_is_refused_with_a_reason(page_server, body, headers, reason) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    server = await page_server(answer)
    with fetching(server.url) as fetcher, pytest.raises(RefusedError, match=reason):
        await fetcher.fetch()


async def raw_server(answer: bytes) -> tuple[asyncio.Server, str]:
    """Sends ``answer`` to whoever connects, and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\nsome 1\n", RefusedError),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n7\r\nsome 1\n\r\n",
            RefusedError,
        ),
        (b"SSH-2.0-OpenSSH_9.2\r\n", DownError),
        (b"", DownError),
    ],
    ids=["shorter than it says", "chunks without end", "not HTTP", "closed at once"],
)
async def test_case_11_a_broken_answer_is_an_error_not_a_page(answer: bytes, error: type[Exception]) -> None:
    server, url = await raw_server(answer)
    async with server:
        with fetching(url) as fetcher, pytest.raises(error):
            await fetcher.fetch()


# The schedule


@asynccontextmanager
async def scraping(**overrides: object) -> AsyncIterator[Scraper]:
    """A running scraper, ten times a second."""
    settings = CollectorSettings.model_validate(
        {"scrape_interval_s": 0.1, "scrape_timeout_s": 0.08, "window_s": 0.5, "filter_pages": False} | overrides
    )
    rules = RulesByService(settings, load_dialects())
    reader = PageReader(load_dialects())
    scraper = Scraper(settings, rules.of, reader, ScrapeMetrics(CollectorRegistry()), now_s=time.time)
    stopping = asyncio.Event()
    task = asyncio.create_task(scraper.run(stopping))
    yield scraper
    stopping.set()
    await task


def target(name: str, address: str, *, role: "types_pb2.Role.ValueType" = types_pb2.ROLE_COLOCATED) -> Target:
    return Target(
        target_id=name,
        address=address,
        service="chat",
        role=role,
        replica=name,
        cluster="",
        gpus=1,
        source="file_sd",
        counted=True,
    )


async def test_one_bad_target_never_delays_another(page_server, vllm_page, eventually) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    healthy = await page_server(vllm_page(running=1))
    hanging = [await page_server(hang) for _ in range(5)]
    async with scraping() as scraper:
        scraper.update(
            {"good": target("good", healthy.url)}
            | {f"hang-{number}": target(f"hang-{number}", server.url) for number, server in enumerate(hanging)}
        )
        started = time.monotonic()
        await eventually(lambda: len(healthy.requests) >= 8)
        took_s = time.monotonic() - started

    assert took_s < 1.3
    assert all(server.most_in_flight == 1 for server in hanging)


async def test_a_failing_target_is_scraped_less_often_and_found_again(page_server, vllm_page, eventually) -> None:
    broken = True

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=500) if broken else web.Response(body=vllm_page(), headers=TEXT)

    server = await page_server(answer)
    async with scraping(max_backoff_s=0.4) as scraper:
        scraper.update({"r": target("r", server.url)})
        await eventually(lambda: scraper.statuses["r"].consecutive_failures >= 4)
        before = len(server.requests)
        await asyncio.sleep(0.8)
        assert len(server.requests) - before <= 3
        assert scraper.statuses["r"].state == pb.TARGET_STATE_DOWN
        assert scraper.statuses["r"].last_error == "/metrics: HTTP 500"
        broken = False
        await eventually(lambda: scraper.statuses["r"].state == pb.TARGET_STATE_UP, timeout_s=1)
        assert scraper.statuses["r"].last_error == ""


async def test_a_target_that_leaves_takes_its_samples_with_it(page_server, vllm_page, eventually) -> None:
    server = await page_server(vllm_page())
    async with scraping() as scraper:
        scraper.update({"a": target("a", server.url)})
        await eventually(lambda: scraper.statuses["a"].last_success_s is not None)
        scraper.update({})
        assert scraper.statuses == {}
        scrapes = len(server.requests)
        await asyncio.sleep(0.25)
        assert len(server.requests) <= scrapes + 1


async def test_another_address_under_the_same_name_is_another_server(page_server, vllm_page, eventually) -> None:
    first, second = await page_server(vllm_page(generated=10**6)), await page_server(vllm_page(generated=10**6))
    async with scraping() as scraper:
        scraper.update({"a": target("a", first.url)})
        await eventually(lambda: len(first.requests) >= 3)
        scraper.update({"a": target("a", second.url)})
        assert scraper.statuses["a"].last_success_s is None
        assert scraper.table.levels(["a"]) == []
        await eventually(lambda: scraper.statuses["a"].last_success_s is not None)
        assert len(second.requests) >= 1


async def test_a_changed_label_keeps_the_samples(page_server, vllm_page, eventually) -> None:
    server = await page_server(vllm_page())
    async with scraping() as scraper:
        scraper.update({"a": target("a", server.url)})
        await eventually(lambda: scraper.statuses["a"].last_success_s is not None)
        scraper.update({"a": target("a", server.url, role=types_pb2.ROLE_DECODE)})
        assert scraper.statuses["a"].last_success_s is not None


def judged(scraper: Scraper) -> ClosedSlice:
    """Close a window over all targets, as a round does."""
    end_s = time.time()
    (part,) = slices_of(
        scraper.targets.values(), collector="c", stuck_after_s=lambda key: scraper.settings.stuck_after(key.role)
    )
    closed = close_slice(
        scraper.table,
        part,
        Window(start_s=end_s - scraper.settings.window_s, end_s=end_s),
        states=[scraper.statuses[name].failure for name in part.roster.target_ids],
        witnesses=scraper.witnesses,
        gpus=None,
        collector="c",
        replica_revisions={},
    )
    scraper.judge(closed)
    return closed


async def test_case_5_a_wedged_server_is_shown_as_stuck(page_server, vllm_page, eventually) -> None:
    server = await page_server(vllm_page(running=7, waiting=200, generated=70))
    async with scraping(stuck_after_s=0.3) as scraper:
        scraper.update({"a": target("a", server.url)})
        await eventually(lambda: len(server.requests) >= 6)
        judged(scraper)
        assert scraper.statuses["a"].state == pb.TARGET_STATE_STUCK
        assert "nothing has moved" in scraper.statuses["a"].last_error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scrape_timeout_s": 1.0}, "scrape_timeout_s must be below"),
        ({"window_s": 1.5}, "window_s must hold at least two scrapes"),
        ({"stuck_after_s": 0.5}, "shorter than scrape_interval_s"),
        ({"stuck_after_by_role": {"encoder": 5}}, "'encoder' is none of"),
        ({"collector_name": "Collector 0"}, "is not a name"),
        ({"actuators": {"local": "nowhere"}}, "is not host:port"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectorSettings.model_validate(overrides)


def test_a_role_may_have_longer_iterations_than_the_rest() -> None:
    settings = CollectorSettings.model_validate({"stuck_after_by_role": {"prefill": 60}})

    assert settings.stuck_after(types_pb2.ROLE_PREFILL) == 60
    assert settings.stuck_after(types_pb2.ROLE_DECODE) == 10
