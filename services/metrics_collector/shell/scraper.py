"""Scrapes every target on its own schedule, one request in flight each, so that no target waits for another.

A target is due once per interval at a phase of its own, made from its id: the load is spread, and a restart scrapes at
the same moments. Intervals are aligned to the store's clock. A scrape that comes late is not made up for.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping

import structlog

from metrics_collector.core.exposition import PageError, PageReader
from metrics_collector.core.status import TargetStatus, failed, rounds_to_skip, succeeded
from metrics_collector.core.targets import Target
from metrics_collector.shell.fetch import DownError, Fetcher, RefusedError
from metrics_collector.shell.metrics import ScrapeMetrics
from metrics_collector.shell.settings import CollectorSettings
from trimtab.api.collector.v1 import collector_pb2 as pb

log = structlog.get_logger(__name__)

# Scrapes start in this part of an interval, so that what they bring is in the window that ends with it.
_SPREAD = 0.75
_STATES_TOLD = (pb.TARGET_STATE_DOWN, pb.TARGET_STATE_BAD_PAGE, pb.TARGET_STATE_STUCK)


class Scraper:
    """One task per target that has an address. ``statuses`` holds what each has shown."""

    def __init__(
        self,
        settings: CollectorSettings,
        fetcher: Fetcher,
        reader: PageReader,
        metrics: ScrapeMetrics,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._reader = reader
        self._metrics = metrics
        self._now_s = now_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.targets: dict[str, Target] = {}
        self.statuses: dict[str, TargetStatus] = {}

    def update(self, targets: Mapping[str, Target]) -> None:
        """Scrape these targets from now on. One that is gone takes its samples with it; one whose address changed is
        another server, and starts anew."""
        for target_id in [target_id for target_id in self.targets if target_id not in targets]:
            self._stop(target_id)
        for target_id, target in targets.items():
            before = self.targets.get(target_id)
            if before is not None and before.address != target.address:
                self._stop(target_id)
            self.targets[target_id] = target
            self.statuses.setdefault(target_id, TargetStatus())
            if target.address and target_id not in self._tasks:
                self._tasks[target_id] = asyncio.create_task(self._scrape_forever(target_id, target.address))

    async def run(self, stopping: asyncio.Event) -> None:
        """Wait for the stop. A task that ended by a defect ends the collector with it."""
        stop = asyncio.create_task(stopping.wait())
        try:
            while not stop.done():
                await asyncio.wait({stop, *self._tasks.values()}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                raise_failures(self._tasks.values())
        finally:
            stop.cancel()
            for target_id in list(self._tasks):
                self._stop(target_id)

    def _stop(self, target_id: str) -> None:
        task = self._tasks.pop(target_id, None)
        if task is not None:
            task.cancel()
        target = self.targets.pop(target_id, None)
        if target is not None:
            self._fetcher.forget(target.address)
        self.statuses.pop(target_id, None)

    async def _scrape_forever(self, target_id: str, address: str) -> None:
        interval_s = self._settings.scrape_interval_s
        phase_s = phase(target_id) * _SPREAD * interval_s
        due_s = next_due(self._now_s(), phase_s=phase_s, interval_s=interval_s)
        while True:
            await asyncio.sleep(due_s - self._now_s())
            self._metrics.lateness.observe(max(0.0, self._now_s() - due_s))
            status = await self._scrape(target_id, address)
            skip = rounds_to_skip(
                status.consecutive_failures, interval_s=interval_s, max_backoff_s=self._settings.max_backoff_s
            )
            due_s = next_due(self._now_s() + skip * interval_s, phase_s=phase_s, interval_s=interval_s)

    async def _scrape(self, target_id: str, address: str) -> TargetStatus:
        before = self.statuses[target_id]
        started_s = self._now_s()
        try:
            page = await self._fetcher.fetch(address)
            sample = self._reader.read(page.body)
        except DownError as error:
            status = failed(before, pb.TARGET_STATE_DOWN, str(error), duration_s=self._now_s() - started_s)
        except (RefusedError, PageError) as error:
            status = failed(before, pb.TARGET_STATE_BAD_PAGE, str(error), duration_s=self._now_s() - started_s)
        else:
            self._metrics.rejected.inc(sample.rejected)
            status = succeeded(
                before,
                sample,
                # The server made the page at some moment of the request: its middle is off by least.
                at_s=started_s + page.duration_s / 2,
                duration_s=page.duration_s,
                keep_s=self._settings.window_s,
                stuck_after_s=self._settings.stuck_after(self.targets[target_id].role),
            )
        self._metrics.scrapes.labels(pb.TargetState.Name(status.state).removeprefix("TARGET_STATE_").lower()).inc()
        self.statuses[target_id] = status
        if status.state != before.state and (status.state in _STATES_TOLD or before.state in _STATES_TOLD):
            log.info(
                "target changed",
                target=target_id,
                address=address,
                state=pb.TargetState.Name(status.state),
                error=status.last_error or None,
            )
        return status


def phase(target_id: str) -> float:
    """A target's place in the interval, 0 to 1: the same in every process."""
    return zlib.crc32(target_id.encode()) / 2**32


def next_due(now_s: float, *, phase_s: float, interval_s: float) -> float:
    """The first moment after ``now_s`` that lies ``phase_s`` behind a multiple of ``interval_s``."""
    rounds = (now_s - phase_s) // interval_s + 1
    return rounds * interval_s + phase_s


def raise_failures(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Raise what the first failed task raised; cancelled and running ones are fine."""
    for task in list(tasks):
        if task.done() and not task.cancelled():
            task.result()
