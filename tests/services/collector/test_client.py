"""Fetching over real sockets: servers that hang, break off, lie about their size or have moved on."""

import asyncio
import gzip
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import pytest
import trustme
from aiohttp import web

from metrics_collector.core.scrape_load import read_load
from metrics_collector.core.targets import Target
from metrics_collector.shell.answer import DownError, RefusedError
from metrics_collector.shell.client import ClientRules, Gzip, TargetClient
from metrics_collector.shell.request import Place, RequestHeads, TokenFile, tls_context
from metrics_collector.shell.scrape_config import ScrapeConfigs
from metrics_collector.shell.settings import CollectorSettings
from trimtab.api.common.v1 import types_pb2
from trimtab.config.dialects import load_dialects
from trimtab.errors import StartupError

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
        return await asyncio.wait_for(answer, 30)


@contextmanager
def fetching(
    address: str,
    *,
    timeout_s: float = 5.0,
    names: Sequence[str] = (),
    gzip: Gzip = Gzip.AUTO,
    token: TokenFile | None = None,
    tls: ssl.SSLContext | None = None,
    tls_server_name: str | None = None,
    rules: ClientRules | None = None,
) -> Iterator[Fetcher]:
    heads = RequestHeads(names, filter_pages=bool(names), token=token)
    rules = rules or ClientRules(heads=heads, max_page_bytes=LIMIT, gzip=gzip, tls=tls, tls_server_name=tls_server_name)
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


async def test_a_server_that_sends_on_from_the_filtered_page_is_asked_for_the_full_one(page_server) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/metrics/":
            return web.Response(status=307, headers={"Location": "/metrics"})
        return web.Response(body=b"a 1\n", headers=TEXT)

    server = await page_server(answer)
    with fetching(server.url, names=NAMES) as fetcher:
        assert await fetcher.fetch() == b"a 1\n"

    assert [path.partition("?")[0] for path in server.requests] == ["/metrics/", "/metrics"]


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
            assert time.monotonic() - started < 15.0


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


class RawServer:
    """Answers each request with the next of ``answers`` as it stands; None closes the connection instead."""

    def __init__(self, answers: Sequence[bytes | None], *, close: bool = False) -> None:
        self._answers = iter(answers)
        self._close = close
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = next(self._answers)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if self._close:
                    break
        writer.close()


@asynccontextmanager
async def raw(answers: Sequence[bytes | None], *, close: bool = False) -> AsyncIterator[RawServer]:
    server = RawServer(answers, close=close)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield server


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
SOME = PLAIN + b"Content-Length: 7\r\n\r\nsome 1\n"


async def test_a_target_keeps_its_connection_from_scrape_to_scrape() -> None:
    async with raw([SOME] * 5) as server:
        with fetching(server.url) as fetcher:
            pages = [await fetcher.fetch() for _ in range(5)]

    assert pages == [b"some 1\n"] * 5
    assert server.connections == 1


async def test_a_connection_that_closed_between_two_scrapes_is_no_failure() -> None:
    # The second request goes out before the client has heard that the server has closed.
    async with raw([SOME, None, SOME]) as server:
        with fetching(server.url) as fetcher:
            assert await fetcher.fetch() == b"some 1\n"
            assert await fetcher.fetch() == b"some 1\n"

    assert server.connections == 2


async def test_a_server_that_closes_again_and_again_is_down() -> None:
    async with raw([SOME, None, None]) as server:
        with fetching(server.url) as fetcher:
            await fetcher.fetch()
            with pytest.raises(DownError, match="closed the connection unanswered"):
                await fetcher.fetch()


async def test_pages_come_in_chunks_or_until_the_connection_ends() -> None:
    chunked = PLAIN + b"Transfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n3\r\n 1\n\r\n0\r\n\r\n"
    async with raw([chunked, SOME]) as server:
        with fetching(server.url) as fetcher:
            assert [await fetcher.fetch(), await fetcher.fetch()] == [b"some 1\n"] * 2
    assert server.connections == 1

    async with raw([PLAIN + b"\r\nsome 1\n", PLAIN + b"\r\nsome 2\n"], close=True) as server:
        with fetching(server.url) as fetcher:
            assert [await fetcher.fetch(), await fetcher.fetch()] == [b"some 1\n", b"some 2\n"]
    assert server.connections == 2


async def test_what_nobody_asked_for_is_not_taken_for_the_next_page() -> None:
    async with raw([SOME + SOME.replace(b"some 1", b"evil 1"), SOME]) as server:
        with fetching(server.url) as fetcher:
            assert [await fetcher.fetch(), await fetcher.fetch()] == [b"some 1\n"] * 2

    assert server.connections == 2


async def test_case_11_a_head_without_end_is_refused() -> None:
    async with raw([PLAIN + b"X-Long: " + b"x" * 200_000]) as server:
        with fetching(server.url) as fetcher, pytest.raises(RefusedError, match="head has more than"):
            await fetcher.fetch()


async def test_case_11_a_line_of_five_megabytes_is_refused() -> None:
    line = b"vllm:num_requests_running " + b"1" * 5_000_000 + b"\n"
    async with raw([PLAIN + b"Content-Length: %d\r\n\r\n" % len(line) + line]) as server:
        with fetching(server.url) as fetcher, pytest.raises(RefusedError, match="more than 100000 bytes"):
            await fetcher.fetch()


async def test_packed_pages_are_asked_for_where_it_is_said(page_server) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept-Encoding"])
        return web.Response(body=b"a 1\n", headers=TEXT)

    server = await page_server(answer)
    for choice in (Gzip.AUTO, Gzip.ALWAYS, Gzip.NEVER):
        with fetching(server.url, gzip=choice) as fetcher:
            await fetcher.fetch()

    assert asked == ["identity", "gzip", "identity"], "on the same machine packing costs more than it spares"


@pytest.mark.parametrize(
    ("body", "status", "load"),
    [(b'{"server_load": 3}', 200, 3.0), (b"{}", 200, None), (b"no", 404, None), (b"[" * 3000, 200, None)],
)
async def test_open_requests_of_a_server_are_read_where_it_counts_them(page_server, body, status, load) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/load"
        return web.Response(body=body, status=status, content_type="application/json")

    server = await page_server(answer)
    with fetching(server.url) as fetcher:
        assert read_load(await fetcher.load()) == load


def anybody(address: str) -> Target:
    return Target(
        target_id="a",
        address=address,
        service="chat",
        role=types_pb2.ROLE_COLOCATED,
        replica="a",
        cluster="",
        gpus=1,
        source="file_sd",
        counted=True,
    )


async def test_a_new_token_is_sent_as_soon_as_its_file_has_it(page_server, tmp_path) -> None:
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        tokens.append(request.headers["Authorization"])
        return web.Response(body=b"a 1\n", headers=TEXT)

    server = await page_server(answer)
    path = tmp_path / "token"
    path.write_text("first\n")
    settings = CollectorSettings.model_validate({"scrape_token_file": path, "filter_pages": False})
    rules = ScrapeConfigs(settings, load_dialects())
    with fetching(server.url, rules=rules.of(anybody(server.url))) as fetcher:
        await fetcher.fetch()
        path.write_text("second")
        rules.poll()
        await fetcher.fetch()
        path.write_text("two words")
        rules.poll()
        await fetcher.fetch()

    assert tokens == ["Bearer first", "Bearer second", "Bearer second"]


@pytest.mark.parametrize("content", [None, "", "two words", "caf\u00e9"])
def test_a_token_file_that_is_no_token_stops_the_start(tmp_path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)

    with pytest.raises(StartupError, match=f"token file {path}: "):
        TokenFile(path)


async def test_a_server_under_https_is_checked_by_the_given_authority(tmp_path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    for name, one in (("ca", authority), ("other", stranger)):
        one.cert_pem.write_to_path(tmp_path / f"{name}.pem")
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("vllm.example").configure_cert(server_side)
    server = RawServer([SOME] * 3)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=server_side)
    url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    ours = tls_context(tmp_path / "ca.pem", insecure_skip_verify=False)
    other = tls_context(tmp_path / "other.pem", insecure_skip_verify=False)
    careless = tls_context(tmp_path / "other.pem", insecure_skip_verify=True)
    async with listening:
        with fetching(url, tls=ours, tls_server_name="vllm.example") as fetcher:
            assert await fetcher.fetch() == b"some 1\n"
            assert await fetcher.fetch() == b"some 1\n"
        assert server.connections == 1
        with fetching(url, tls=ours) as fetcher, pytest.raises(DownError, match="certificate is refused"):
            await fetcher.fetch()
        with (
            fetching(url, tls=other, tls_server_name="vllm.example") as fetcher,
            pytest.raises(DownError, match="certificate is refused"),
        ):
            await fetcher.fetch()
        with fetching(url, tls=careless) as fetcher:
            assert await fetcher.fetch() == b"some 1\n"


@pytest.mark.parametrize("address", ["ftp://127.0.0.1:80", "127.0.0.1:80", "http://127.0.0.1", "http://a:b:1"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(ValueError, match=r"is not|IPv6"):
        Place(address)
