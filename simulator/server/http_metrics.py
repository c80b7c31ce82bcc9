"""The families around vLLM's own: the Python process, and HTTP requests as prometheus-fastapi-instrumentator counts.

`/health`, `/metrics`, `/version`, `/load` and `/ping` are not counted, as in vLLM; unknown paths count as `none`.
Process figures are those of the simulating process, shared by all its servers, except the start time.
"""

from __future__ import annotations

import gc
import platform
import resource
import time

from simulator.server.exposition import Counter, Gauge, Histogram, Labels, Page, Summary

_HIGH_RESOLUTION_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5),
    *(3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
_LOW_RESOLUTION_EDGES = (0.1, 0.5, 1.0)
_NO_CONTENT = (
    "Content length of {} requests by handler. Only value of header is respected. Otherwise ignored. "
    "No percentile calculated. "
)
_MAX_FDS = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class ProcessMetrics:
    """`python_*` and `process_*`, at the head of the page."""

    def __init__(self, page: Page, *, start_time_s: float) -> None:
        generations: tuple[Labels, ...] = tuple((("generation", str(n)),) for n in range(3))
        self._collected = page.add(
            Counter("python_gc_objects_collected_total", "Objects collected during gc", generations)
        )
        self._uncollectable = page.add(
            Counter("python_gc_objects_uncollectable_total", "Uncollectable objects found during GC", generations)
        )
        self._collections = page.add(
            Counter("python_gc_collections_total", "Number of times this generation was collected", generations)
        )
        self._generations = generations
        major, minor, patch = platform.python_version_tuple()
        info = page.add(Gauge("python_info", "Python platform information", ()))
        info.set(
            1.0,
            (
                ("implementation", platform.python_implementation()),
                ("major", major),
                ("minor", minor),
                ("patchlevel", patch),
                ("version", platform.python_version()),
            ),
        )
        self._virtual = page.add(Gauge("process_virtual_memory_bytes", "Virtual memory size in bytes."))
        self._resident = page.add(Gauge("process_resident_memory_bytes", "Resident memory size in bytes."))
        start = page.add(Gauge("process_start_time_seconds", "Start time of the process since unix epoch in seconds."))
        start.set(start_time_s)
        self._cpu = page.add(Counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds."))
        open_fds = page.add(Gauge("process_open_fds", "Number of open file descriptors."))
        max_fds = page.add(Gauge("process_max_fds", "Maximum number of open file descriptors."))
        open_fds.set(33.0)
        max_fds.set(float(_MAX_FDS))

    def refresh(self) -> None:
        """Read the process's figures."""
        for labels, stats in zip(self._generations, gc.get_stats(), strict=True):
            self._collected.set_total(float(stats["collected"]), labels)
            self._uncollectable.set_total(float(stats["uncollectable"]), labels)
            self._collections.set_total(float(stats["collections"]), labels)
        resident_bytes = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        self._resident.set(resident_bytes)
        self._virtual.set(resident_bytes * 3)
        self._cpu.set_total(round(time.process_time(), 2))


class HttpMetrics:
    """`http_*`, at the end of the page."""

    def __init__(self, page: Page, *, created_s: float) -> None:
        self._requests = page.add(
            Counter(
                "http_requests_total",
                "Total number of requests by method, status and handler.",
                (),
                created_s=created_s,
            )
        )
        self._request_size = page.add(Summary("http_request_size_bytes", _NO_CONTENT.format("incoming")))
        self._response_size = page.add(
            Summary("http_response_size_bytes", _NO_CONTENT.format("outgoing").replace("requests", "responses"))
        )
        self._high = page.add(
            Histogram(
                "http_request_duration_highr_seconds",
                "Latency with many buckets but no API specific labels. Made for more accurate percentile "
                "calculations. ",
                _HIGH_RESOLUTION_EDGES,
                created_s=created_s,
            )
        )
        self._low = page.add(
            Histogram(
                "http_request_duration_seconds",
                "Latency with only few buckets by handler. Made to be only used if aggregation by handler is "
                "important. ",
                _LOW_RESOLUTION_EDGES,
                (),
            )
        )

    def record(
        self,
        handler: str,
        method: str,
        status: int,
        duration_s: float,
        *,
        request_bytes: int,
        response_bytes: int,
        now_s: float,
    ) -> None:
        """Count one answered request; `now_s` is unix time."""
        by_handler = (("handler", handler),)
        by_method = (("handler", handler), ("method", method))
        self._requests.add(1, (*by_method, ("status", f"{status // 100}xx")), now_s=now_s)
        self._request_size.observe(float(request_bytes), by_handler, now_s=now_s)
        self._response_size.observe(float(response_bytes), by_handler, now_s=now_s)
        self._high.observe(duration_s)
        self._low.observe(duration_s, by_method, now_s=now_s)
