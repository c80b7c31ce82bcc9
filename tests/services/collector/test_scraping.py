"""The schedule over real sockets: who is scraped when, and what a failing or hanging target does to the rest."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from metrics_collector.core.page import PageReader
from metrics_collector.core.schedule import MOST_SPREAD, SPREADS
from metrics_collector.core.targets import Target
from metrics_collector.core.window import Window
from metrics_collector.core.window_close import ClosedSlice, close_slice, slices_of
from metrics_collector.shell.metrics import ScrapeMetrics
from metrics_collector.shell.scrape_config import ScrapeConfigs
from metrics_collector.shell.scraper import Scraper
from metrics_collector.shell.settings import CollectorSettings
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.config.dialects import load_dialects

TEXT = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


@asynccontextmanager
async def scraping(**overrides: object) -> AsyncIterator[Scraper]:
    """A running scraper, ten times a second."""
    settings = CollectorSettings.model_validate(
        {"scrape_interval_s": 0.1, "scrape_timeout_s": 0.08, "window_s": 0.5, "filter_pages": False} | overrides
    )
    rules = ScrapeConfigs(settings, load_dialects())
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


async def test_the_more_targets_have_an_address_the_more_of_the_interval_their_scrapes_take() -> None:
    def fleet(number: int, address: str) -> dict[str, Target]:
        return {f"chat-{index}": target(f"chat-{index}", address) for index in range(number)}

    async with scraping(scrape_interval_s=1.0, scrape_timeout_s=0.8, window_s=5.0) as scraper:
        scraper.update(fleet(40, "http://127.0.0.1:9"))
        few = scraper.spread(1.0)
        scraper.update(fleet(400, "") | fleet(40, "http://127.0.0.1:9"))
        assert scraper.spread(1.0) == few, "nobody is scraped without an address"
        scraper.update(fleet(400, "http://127.0.0.1:9"))
        assert scraper.spread(1.0) == MOST_SPREAD
    assert few == SPREADS[0]


async def test_one_bad_target_never_delays_another(page_server, vllm_page, eventually) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def answer(_request: web.Request) -> web.Response:
        beside.append(sum(server.in_flight for server in hanging))
        return web.Response(body=vllm_page(running=1), headers=TEXT)

    beside: list[int] = []
    """For each page of the healthy one: how many requests hung at that moment."""
    healthy = await page_server(answer)
    hanging = [await page_server(hang) for _ in range(5)]
    async with scraping() as scraper:
        scraper.update(
            {"good": target("good", healthy.url)}
            | {f"hang-{number}": target(f"hang-{number}", server.url) for number, server in enumerate(hanging)}
        )
        await eventually(lambda: len(beside) >= 8 and sum(count > 0 for count in beside) >= 3)

    assert all(server.most_in_flight == 1 for server in hanging)


async def test_a_page_that_waits_while_this_process_stands_still_is_not_dated_by_guess(vllm_page, eventually) -> None:
    """A reading is dated at the middle of its request: one of a second would be half a second off."""
    page = vllm_page(generated=1000)
    asked, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            loop.call_soon_threadsafe(asked.set)
            go.wait(10)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
            # The next requests are not answered at all.
            ended.wait(10)

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with scraping(scrape_interval_s=2.0, scrape_timeout_s=1.0, window_s=5.0) as scraper:
                scraper.update({"a": target("a", address)})
                await asyncio.wait_for(asked.wait(), 30)
                go.set()
                time.sleep(1.2)  # noqa: ASYNC251  (the whole process is held up, as by its machine)
                await eventually(lambda: scraper.statuses["a"].consecutive_failures == 1)
                status, levels = scraper.statuses["a"], scraper.table.levels(["a"])
                assert (status.state, status.last_error) == (
                    pb.TARGET_STATE_DOWN,
                    "its page was read later than 1 s",
                )
                assert levels == []
        finally:
            ended.set()
            thread.join(10)


async def test_a_failing_target_is_scraped_less_often_and_found_again(page_server, vllm_page, eventually) -> None:
    broken = True

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=500) if broken else web.Response(body=vllm_page(), headers=TEXT)

    server = await page_server(answer)
    async with scraping(max_backoff_s=0.4) as scraper:
        scraper.update({"r": target("r", server.url)})
        await eventually(lambda: scraper.statuses["r"].consecutive_failures >= 4)
        before, since_s = len(server.requests), time.monotonic()
        await asyncio.sleep(0.8)
        assert len(server.requests) - before <= 1 + (time.monotonic() - since_s) / 0.4
        assert scraper.statuses["r"].state == pb.TARGET_STATE_DOWN
        assert scraper.statuses["r"].last_error == "/metrics: HTTP 500"
        broken = False
        await eventually(lambda: scraper.statuses["r"].state == pb.TARGET_STATE_UP)
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
        states=[scraper.statuses[name].failure for name in part.expected_replicas.target_ids],
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
        (
            {"scrape_interval_by_service": {"chat": 30}},
            "chat is scraped every 30 s, but gauges count as stuck after 10",
        ),
        ({"scrape_interval_by_service": {"chat": 90}}, "less than or equal to 60"),
        ({"stuck_after_by_role": {"encoder": 5}}, "'encoder' is none of"),
        ({"collector_name": "Collector 0"}, "is not a name"),
        ({"actuators": {"local": "nowhere"}}, "is not host:port"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectorSettings.model_validate(overrides)


def test_a_service_may_have_an_interval_of_its_own() -> None:
    settings = CollectorSettings.model_validate({"scrape_interval_by_service": {"slow": 10, "fast": 0.5}})

    assert [settings.interval_of(name) for name in ("slow", "fast", "other")] == [10, 0.5, 1]
    assert [settings.timeout_of(name) for name in ("slow", "fast", "other")] == [0.8, 0.4, 0.8]
    assert [settings.window_s_at(interval_s) for interval_s in (10, 0.5, 1)] == [20, 5, 5]


async def test_services_are_scraped_at_their_own_intervals(page_server, vllm_page, eventually) -> None:
    fast, slow = await page_server(vllm_page()), await page_server(vllm_page())
    async with scraping(scrape_interval_by_service={"slow": 0.6}) as scraper:
        scraper.update({"f": target("f", fast.url), "s": replace(target("s", slow.url), service="slow")})
        await eventually(lambda: len(fast.requests) >= 13)

    # Two or three, and one more for each time that this test is held up for long.
    assert 1 <= len(slow.requests) <= 6


def test_a_role_may_have_longer_iterations_than_the_rest() -> None:
    settings = CollectorSettings.model_validate({"stuck_after_by_role": {"prefill": 60}})

    assert settings.stuck_after(types_pb2.ROLE_PREFILL) == 60
    assert settings.stuck_after(types_pb2.ROLE_DECODE) == 10


async def test_case_8_one_pod_without_address_and_one_that_hangs_leave_six_of_eight_in_time(
    page_server, vllm_page, eventually
) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    servers = [await page_server(vllm_page(running=1, generated=100)) for _ in range(6)]
    hanging = await page_server(hang)
    everybody = {f"r-{number}": target(f"r-{number}", server.url) for number, server in enumerate(servers)}
    everybody |= {"pending": target("pending", ""), "hangs": target("hangs", hanging.url)}
    async with scraping() as scraper:
        scraper.update(everybody)
        started = time.monotonic()
        good = [status for name, status in scraper.statuses.items() if name.startswith("r-")]
        await eventually(
            lambda: all(one.state == pb.TARGET_STATE_UP for one in good) and scraper.statuses["hangs"].failure
        )
        closed = judged(scraper)
        took_s = time.monotonic() - started
        states = {name: scraper.statuses[name].state for name in ("pending", "hangs")}

    (window,) = closed.role_windows
    assert list(window.reported_replicas) == [f"r-{number}" for number in range(6)]
    assert sorted(window.missing_replicas) == ["hangs", "pending"]
    assert states == {"pending": pb.TARGET_STATE_PENDING, "hangs": pb.TARGET_STATE_DOWN}
    assert took_s < 20.0, "nobody waits for the one that hangs"


async def test_a_nodes_gpu_exporter_is_no_server_and_fills_the_board(page_server, vllm_page, eventually) -> None:
    exporter = await page_server(b'# TYPE DCGM_FI_DEV_GPU_UTIL gauge\nDCGM_FI_DEV_GPU_UTIL{gpu="0"} 40\n')
    dcgm = replace(target("node-a", exporter.url), exporter="dcgm", node="node-a", service="", counted=False)
    async with scraping(filter_pages=True) as scraper:
        scraper.update({"node-a": dcgm})
        await eventually(lambda: scraper.statuses["node-a"].state == pb.TARGET_STATE_UP)
        now_s = time.time()
        found = scraper.gpus.window(now_s - 5, now_s).for_replica("node-a", (0,))
        assert "node-a" not in scraper.table
        scraper.update({})
        assert scraper.gpus.nodes == 0

    assert found.utilisation_ratio == pytest.approx(0.4)
    assert set(exporter.requests) == {"/metrics"}, "an exporter is asked for its whole page"
