"""What scraping costs: ``python -m bench.scrape --json``.

A child process serves one page under many loopback addresses: that of a simulated vLLM server that worked and slept,
or, with ``--page``, one that a real server wrote. This process runs the whole collector (fetch, parse, windows, store)
against it, with an embedded store beside. Reported are this process's CPU seconds per 1,000 scrapes, the lateness of
the scrapes, and how long one page takes to read beside prometheus_client's parser. The figures come from one run on one
machine; on a busy one they are worse.
"""

import argparse
import asyncio
import gzip
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from metrics_collector.core.dialect import VLLM_V1
from metrics_collector.core.exposition import PageReader
from metrics_collector.shell.serve import serve
from metrics_collector.shell.settings import CollectorSettings
from simulator.core.requests import FinishReason
from simulator.core.tokens import OutputPlan
from simulator.profiles import packaged_profiles
from simulator.server.server import ServerSettings, SimulatedServer
from simulator.server.vllm_metrics import RequestParams
from trimtab.logging import configure_logging
from trimtab.rpc.run import ServiceContext
from trimtab.store.embedded import EmbeddedStore

REPLICAS_PER_ROLE = 50
WARM_UP_S = 4.0
LATENESS_SHARE_BAR = 0.2
EXTRACT_SPEEDUP_BAR = 20.0


def simulated_page() -> bytes:
    """The page of a simulated server after 50 requests, a sleep and a wake: 53 KB, a little shorter than a real one."""

    async def work() -> bytes:
        profile = packaged_profiles()["a100-8b-tp1"]
        server = SimulatedServer(ServerSettings("bench-0", "bench", profile, time_scale=100.0))
        plan, params = OutputPlan(20, FinishReason.LENGTH), RequestParams(n=1, max_tokens=20)
        await asyncio.gather(*(server.submit(f"r-{index}", "prompt " * 100, plan, params) for index in range(50)))
        await server.sleep(1, "wait")
        await server.wake(None)
        return server.page.render().encode()

    return asyncio.run(work())


def read_page(path: Path) -> bytes:
    """A page from a file, gzip when the name ends in ``.gz``."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def filter_page(page: bytes) -> bytes:
    """What ``/metrics/?name[]=…`` answers: the samples that are asked for, under their families' headers."""
    names = frozenset(name.encode() for name in VLLM_V1.sample_names())
    families = frozenset(name.removesuffix(b"_bucket") for name in names)
    kept: list[bytes] = []
    for line in page.splitlines(keepends=True):
        words = line.split(None, 3)
        wanted = words[2] in families if line.startswith(b"#") else words[0].partition(b"{")[0] in names
        if wanted:
            kept.append(line)
    return b"".join(kept)


def serve_pages(port: int, page: bytes) -> None:
    """The child: the page under every loopback address, whole at /metrics, filtered at /metrics/."""
    filtered = filter_page(page)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=filtered if request.path == "/metrics/" else page, content_type="text/plain")

    application = web.Application()
    application.router.add_get("/metrics", answer)
    application.router.add_get("/metrics/", answer)
    web.run_app(application, host="0.0.0.0", port=port, access_log=None, print=None, loop=uvloop.new_event_loop())


def write_targets(path: Path, count: int, port: int) -> None:
    """``count`` replicas at addresses of their own, some to each role."""
    groups = [
        {
            "targets": [f"127.0.{1 + index // 250}.{1 + index % 250}:{port}"],
            "labels": {"service": f"s-{index // REPLICAS_PER_ROLE}", "role": "colocated", "replica": f"r-{index}"},
        }
        for index in range(count)
    ]
    path.write_text(json.dumps(groups))


def await_port(port: int) -> None:
    """Wait until somebody listens. Raises ``TimeoutError``."""
    give_up = time.monotonic() + 20
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > give_up:
            raise TimeoutError(f"nobody listens on port {port}")
        time.sleep(0.05)


def seconds_per_call(call: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one call, the best of three rounds."""
    best = math.inf
    for _ in range(3):
        started = time.process_time()
        for _ in range(repeats):
            call()
        best = min(best, (time.process_time() - started) / repeats)
    return best


def lateness_quantile(before: dict[float, float], after: dict[float, float], quantile: float) -> float:
    """Upper bound of the bucket that holds the quantile of what came between two readings."""
    grown = {bound: after[bound] - before[bound] for bound in after}
    return next(bound for bound in sorted(grown) if grown[bound] >= quantile * grown[math.inf])


def lateness_buckets(registry: CollectorRegistry) -> dict[float, float]:
    """The collector's own histogram, cumulative."""
    return {
        float(sample.labels["le"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "trimtab_collector_scrape_lateness_seconds_bucket"
    }


async def scrape(url: str, targets: Path, *, filtered: bool, seconds: float) -> dict[str, float]:
    """Run the collector for ``seconds`` after its warm-up; what that cost."""
    settings = CollectorSettings(
        listen="127.0.0.1:0", store_url=url, targets_files=[targets], filter_pages=filtered, drain_grace_s=0.0
    )
    context = ServiceContext("bench")
    running = asyncio.create_task(serve(settings, context))
    await asyncio.sleep(WARM_UP_S)

    def scrapes(state: str) -> float:
        return context.registry.get_sample_value("trimtab_collector_scrapes_total", {"state": state}) or 0.0

    good, bad = scrapes("up"), scrapes("down") + scrapes("bad_page")
    buckets, cpu_s = lateness_buckets(context.registry), time.process_time()
    await asyncio.sleep(seconds)
    cpu_s = time.process_time() - cpu_s
    good, bad = scrapes("up") - good, scrapes("down") + scrapes("bad_page") - bad
    p99_s = lateness_quantile(buckets, lateness_buckets(context.registry), 0.99)
    context.stopping.set()
    await running
    return {
        "scrapes": good,
        "failed_scrapes": bad,
        "cpu_s_per_1000_scrapes": cpu_s / good * 1000 if good else math.inf,
        "p99_lateness_share": p99_s / settings.scrape_interval_s,
    }


def run(targets: int, seconds: float, page: bytes) -> dict[str, object]:
    """The whole report."""
    reader = PageReader(VLLM_V1)
    ours_s = seconds_per_call(lambda: reader.read(page), 200)
    theirs_s = seconds_per_call(lambda: list(text_string_to_metric_families(page.decode())), 5)
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        page_port, store_port = probe.getsockname()[1], other.getsockname()[1]
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddedStore(store_port, Path(folder) / "store")
        store.start()
        page_file = Path(folder) / "page.prom"
        page_file.write_bytes(page)
        command = [sys.executable, "-m", "bench.scrape", "--serve", str(page_port), "--page", str(page_file)]
        child = subprocess.Popen(command)
        try:
            await_port(page_port)
            path = Path(folder) / "targets.json"
            write_targets(path, targets, page_port)
            for name, filtered in (("full", False), ("filtered", True)):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    results[name] = runner.run(scrape(store.url, path, filtered=filtered, seconds=seconds))
        finally:
            child.terminate()
            child.wait(10)
            store.stop()
    bars = [
        {
            "name": "extract_speedup",
            "value": theirs_s / ours_s,
            "bar": EXTRACT_SPEEDUP_BAR,
            "ok": theirs_s / ours_s >= EXTRACT_SPEEDUP_BAR,
        },
        {
            "name": "p99_lateness_share",
            "value": results["filtered"]["p99_lateness_share"],
            "bar": LATENESS_SHARE_BAR,
            "ok": results["filtered"]["p99_lateness_share"] <= LATENESS_SHARE_BAR,
        },
    ]
    return {
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "platform": platform.machine()},
        "inputs": {"targets": targets, "seconds": seconds, "interval_s": 1.0, "page_bytes": len(page)},
        "results": {"read_page_s": ours_s, "prometheus_client_s": theirs_s, **results},
        "bars": bars,
    }


def main() -> int:
    """Exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--targets", type=int, default=200, help="how many servers, at most 60,000")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each of the two runs is measured")
    parser.add_argument(
        "--page", type=Path, help="a /metrics page that a server wrote, .gz too; else a simulated one's"
    )
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    page = read_page(arguments.page) if arguments.page is not None else simulated_page()
    if arguments.serve is not None:
        serve_pages(arguments.serve, page)
        return 0
    configure_logging("bench", level="warning")
    report = run(arguments.targets, arguments.seconds, page)
    bars = report["bars"] if isinstance(report["bars"], list) else []
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        for bar in bars:
            print(f"{bar['name']}: {bar['value']:.3g} (bar {bar['bar']:g}) {'ok' if bar['ok'] else 'MISSED'}")
    return 0 if all(bar["ok"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
