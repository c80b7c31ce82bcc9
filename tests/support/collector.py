"""A collector in this process on real sockets, and servers whose pages the test decides."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from metrics_collector.shell.serve import serve
from metrics_collector.shell.settings import CollectorSettings
from tests.support.serving import ANY_PORT, bound_port
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.errors import StartupError
from trimtab.rpc.clients import channel
from trimtab.rpc.run import ServiceContext

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class PageServer:
    """A vLLM server as far as /metrics goes; ``answer`` decides what a request gets."""

    answer: Answer
    requests: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    @property
    def host_and_port(self) -> str:
        return self.url.removeprefix("http://")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.path_qs)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.answer(request)
        finally:
            self.in_flight -= 1


StartServer = Callable[[Answer | bytes], Awaitable[PageServer]]


def _always(page: bytes) -> Answer:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    return answer


@asynccontextmanager
async def _page_servers() -> AsyncIterator[StartServer]:
    async with AsyncExitStack() as stack:

        async def start(answer: Answer | bytes) -> PageServer:
            server = PageServer(_always(answer) if isinstance(answer, bytes) else answer)
            application = web.Application()
            application.router.add_get("/{path:.*}", server.handle)
            running = TestServer(application, host="127.0.0.1")
            await running.start_server(shutdown_timeout=0.1)
            stack.push_async_callback(running.close)
            server.url = str(running.make_url("/")).rstrip("/")
            return server

        yield start


@pytest.fixture
async def page_server() -> AsyncIterator[StartServer]:
    """``await page_server(answer)``: one more server, on a port of its own; ``answer`` may be the page itself."""
    async with _page_servers() as start:
        yield start


def _vllm_page(
    *,
    running: float | str = 0,
    waiting: float | str = 0,
    kv: float | str = 0.0,
    generated: float | str = 0,
    computed: float | str = 0,
    cached: float | str = 0,
    finished: float | str = 0,
    preempted: float | str = 0,
    ttft: dict[str, float] | None = None,
    start_time: float | None = 1_700_000_000.0,
    awake: bool | None = True,
    without: tuple[str, ...] = (),
) -> bytes:
    """A page as vLLM 0.32 writes it, with the families that the collector reads and one that it does not.

    ``ttft`` is bound → cumulative count, the sum is ten seconds a request. ``without`` drops families by name.
    """
    label = 'engine="0",model_name="tiny"'
    families: list[tuple[str, str, list[tuple[str, float | str]]]] = [
        ("python_gc_objects_collected_total", "counter", [('python_gc_objects_collected_total{generation="0"}', 7.0)]),
        ("vllm:num_requests_running", "gauge", [(f"vllm:num_requests_running{{{label}}}", running)]),
        ("vllm:num_requests_waiting", "gauge", [(f"vllm:num_requests_waiting{{{label}}}", waiting)]),
        ("vllm:kv_cache_usage_perc", "gauge", [(f"vllm:kv_cache_usage_perc{{{label}}}", kv)]),
        (
            "vllm:prompt_tokens_by_source_total",
            "counter",
            [
                (f'vllm:prompt_tokens_by_source_total{{{label},source="local_compute"}}', computed),
                (f'vllm:prompt_tokens_by_source_total{{{label},source="local_cache_hit"}}', cached),
            ],
        ),
        ("vllm:generation_tokens_total", "counter", [(f"vllm:generation_tokens_total{{{label}}}", generated)]),
        ("vllm:num_preemptions_total", "counter", [(f"vllm:num_preemptions_total{{{label}}}", preempted)]),
        (
            "vllm:request_success_total",
            "counter",
            [('vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"}', finished)],
        ),
    ]
    if start_time is not None:
        families.append(("process_start_time_seconds", "gauge", [("process_start_time_seconds", start_time)]))
    if awake is not None:
        name = f'vllm:engine_sleep_state{{{label},sleep_state="awake"}}'
        families.append(("vllm:engine_sleep_state", "gauge", [(name, float(awake))]))
    if ttft is not None:
        name = "vllm:time_to_first_token_seconds"
        count = ttft["+Inf"]
        buckets: list[tuple[str, float | str]] = [
            (f'{name}_bucket{{engine="0",le="{bound}",model_name="tiny"}}', value) for bound, value in ttft.items()
        ]
        rest: list[tuple[str, float | str]] = [
            (f"{name}_count{{{label}}}", count),
            (f"{name}_sum{{{label}}}", 10 * count),
        ]
        families.append((name, "histogram", buckets + rest))
    lines: list[str] = []
    for name, kind, samples in families:
        if name in without:
            continue
        lines += [f"# HELP {name} Some help.", f"# TYPE {name} {kind}"]
        lines += [f"{sample} {value}" for sample, value in samples]
    return "\n".join([*lines, ""]).encode()


@pytest.fixture(scope="session")
def vllm_page() -> Callable[..., bytes]:
    """``vllm_page(running=3, generated=100, …)`` → bytes of a /metrics page."""
    return _vllm_page


@dataclass
class RunningCollector:
    settings: CollectorSettings
    context: ServiceContext
    task: "asyncio.Task[None]"
    stub: "collector_pb2_grpc.CollectorServiceAsyncStub"
    may_fail: bool = False


StartCollector = Callable[..., Awaitable[RunningCollector]]


@asynccontextmanager
async def _collectors(store_url: str) -> AsyncIterator[StartCollector]:
    async with AsyncExitStack() as stack:

        async def stop(running: RunningCollector) -> None:
            running.context.stopping.set()
            await asyncio.wait({running.task}, timeout=60)
            assert running.task.done(), "the collector does not stop"
            if not running.may_fail:
                running.task.result()

        async def start(**overrides: object) -> RunningCollector:
            given: dict[str, object] = {
                "listen": ANY_PORT,
                "store_url": store_url,
                "scrape_interval_s": 0.2,
                "scrape_timeout_s": 0.15,
                "window_s": 0.6,
                "targets_poll_s": 0.05,
                "drain_grace_s": 0.2,
            }
            settings = CollectorSettings.model_validate(given | overrides)
            context = ServiceContext("metrics-collector")
            task = asyncio.create_task(serve(settings, context))
            try:
                port = await bound_port(context, task)
            except StartupError:
                port = 0  # the test asks the task for it
            connection = channel(f"127.0.0.1:{port}")
            running = RunningCollector(settings, context, task, collector_pb2_grpc.CollectorServiceStub(connection))
            stack.push_async_callback(stop, running)
            stack.push_async_callback(connection.close)
            return running

        yield start


@pytest.fixture
async def start_collector(store_url: str) -> AsyncIterator[StartCollector]:
    """``await start_collector(**settings)``: a collector that scrapes five times a second into the test's store."""
    async with _collectors(store_url) as start:
        yield start


@dataclass(frozen=True)
class Shared:
    """The two fixtures above as context managers, for fixtures that serve a whole module."""

    page_servers: Callable[[], AbstractAsyncContextManager[StartServer]]
    collectors: Callable[[str], AbstractAsyncContextManager[StartCollector]]


@pytest.fixture(scope="session")
def shared() -> Shared:
    """What a module's own fixture starts servers and a collector with."""
    return Shared(_page_servers, _collectors)
