"""Closes windows at every interval: partials and samples to the store, merged observations to the watchers.

Services with the same interval share a round. A round is worked in slices with a turn of the loop between them, so
that scrapes are not kept waiting. The store may be away: a round that cannot be written is lost for the store (its
window is missing there), but scraping goes on and the next window that is written holds right rates, since counters
go on in memory.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog
from redis.exceptions import ResponseError

from metrics_collector.core.demand import DemandBoard, forget, front_door_windows
from metrics_collector.core.gpu_table import GpuAverages, GpuClaim
from metrics_collector.core.liveness import LivenessReport
from metrics_collector.core.role_load import ReplicaLoads
from metrics_collector.core.schedule import next_round
from metrics_collector.core.targets import RoleKey
from metrics_collector.core.window import Window
from metrics_collector.core.window_close import ClosedSlice, Slice, close_slice, slices_of
from metrics_collector.shell.archive import Archive
from metrics_collector.shell.metrics import ScrapeMetrics
from metrics_collector.shell.scraper import Scraper
from metrics_collector.shell.settings import CollectorSettings
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.rpc.run import ServiceContext
from trimtab.store.errors import StoreUnavailable
from trimtab.store.observations import window_end_s

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Group:
    """The services of one interval. Each group has an archive of its own: what one no longer writes, it removes."""

    interval_s: float
    archive: Archive
    slices: list[Slice]
    version: int = -1


class Publisher:
    """The rounds. ``demand`` is what gateways have reported; ``observations`` the newest merged ones, by role."""

    def __init__(
        self,
        settings: CollectorSettings,
        new_archive: Callable[[], Archive],
        scraper: Scraper,
        metrics: ScrapeMetrics,
        *,
        replica_revisions: Callable[[], Mapping[str, int]],
        now_s: Callable[[], float],
        on_observation: Callable[[pb.RoleObservation], None],
        loads: ReplicaLoads,
    ) -> None:
        self._loads = loads
        self._settings = settings
        self._scraper = scraper
        self._metrics = metrics
        self._replica_revisions = replica_revisions
        self._now_s = now_s
        self._on_observation = on_observation
        intervals = {settings.scrape_interval_s, *settings.scrape_interval_by_service.values()}
        self._groups = [_Group(interval_s, new_archive(), []) for interval_s in sorted(intervals)]
        self._store_lost = False
        self.demand = DemandBoard()
        self.observations: dict[RoleKey, pb.RoleObservation] = {}

    @property
    def revision(self) -> int:
        """Grows with every window: the end of the newest one in milliseconds."""
        return max((item.window_end.ToMilliseconds() for item in self.observations.values()), default=0)

    async def run(self, context: ServiceContext) -> None:
        """One round per interval, at multiples of it on the store's clock, until the service stops."""
        async with asyncio.TaskGroup() as tasks:
            for group in self._groups:
                tasks.create_task(self._rounds(group, context))

    async def _rounds(self, group: _Group, context: ServiceContext) -> None:
        interval_s = group.interval_s
        number = next_round(0, self._now_s(), interval_s=interval_s)
        while not await context.pause(number * interval_s - self._now_s()):
            await self._round(group, number * interval_s)
            number = next_round(number, self._now_s(), interval_s=interval_s)

    async def _round(self, group: _Group, end_s: float) -> None:
        """Close the windows that end at ``end_s``."""
        settings = self._settings
        length_s = settings.window_s_at(group.interval_s)
        window = Window(start_s=end_s - length_s, end_s=end_s)
        closed: list[ClosedSlice] = []
        witnesses = self._witnesses()
        slices = self._slices(group)
        gpus = self._gpus(slices, window)
        for part in slices:
            closed.append(self._close(part, window, witnesses, gpus))
            await asyncio.sleep(0)
        self.demand = forget(self.demand, now_s=end_s)
        windows = [found for one in closed for found in one.role_windows]
        windows += [
            found
            for found in front_door_windows(
                self.demand, window, collector=settings.collector_name, expiry_s=settings.demand_expiry_s
            )
            if settings.interval_of(found.service) == group.interval_s
        ]
        try:
            merged = await group.archive.write(
                windows,
                [sample for one in closed for sample in one.samples],
                at_s=end_s,
                schemas={schema for one in closed for schema in one.schemas},
            )
        except (StoreUnavailable, ResponseError) as error:
            # A store that refuses a write, for lack of memory for example, counts as away.
            self._metrics.rounds.labels("lost").inc()
            if not self._store_lost:
                self._store_lost = True
                log.warning("store lost, windows are not written", error=str(error))
            return
        self._metrics.rounds.labels("written").inc()
        if self._store_lost:
            self._store_lost = False
            log.info("the store is back, windows are written again")
        self._tell(merged)

    def _slices(self, group: _Group) -> list[Slice]:
        """The slices of a group, made anew when targets have changed."""
        settings, scraper = self._settings, self._scraper
        if group.version != scraper.version:
            group.version = scraper.version
            group.slices = slices_of(
                [one for one in scraper.targets.values() if settings.interval_of(one.service) == group.interval_s],
                collector=settings.collector_name,
                stuck_after_s=lambda key: settings.stuck_after(key.role),
            )
        return group.slices

    def _witnesses(self) -> Mapping[str, LivenessReport]:
        """What servers' own counts and gateways' reports say beside the pages, by target."""
        scraper = self._scraper
        found = dict(scraper.witnesses)
        for replica, load in self._loads.totals(self._now_s()).items():
            if replica in scraper.targets:
                own = found.get(replica, LivenessReport())
                since_s = load.moved_at_s if load.in_flight else own.open_since_s
                found[replica] = replace(own, in_flight=load.in_flight, open_since_s=since_s)
        return found

    def _gpus(self, slices: Sequence[Slice], window: Window) -> Mapping[str, GpuAverages]:
        """GPU averages of replicas that count and are awake, by target."""
        scraper = self._scraper
        if not scraper.gpus.nodes:
            return {}
        claims = [
            GpuClaim(
                replica=target.target_id,
                node=target.node,
                gpu_indices=target.gpu_indices,
                counts=target.counted and scraper.statuses[target.target_id].state != pb.TARGET_STATE_ASLEEP,
            )
            for part in slices
            for target in part.expected_replicas.targets
        ]
        return scraper.gpus.window(window.start_s, window.end_s).for_replicas(claims)

    def _close(
        self, part: Slice, window: Window, witnesses: Mapping[str, LivenessReport], gpus: Mapping[str, GpuAverages]
    ) -> ClosedSlice:
        scraper = self._scraper
        closed = close_slice(
            scraper.table,
            part,
            window,
            states=[scraper.statuses[target_id].failure for target_id in part.expected_replicas.target_ids],
            witnesses=witnesses,
            gpus=gpus,
            collector=self._settings.collector_name,
            replica_revisions=self._replica_revisions(),
        )
        scraper.judge(closed)
        return closed

    def _tell(self, merged: list[pb.RoleObservation]) -> None:
        before = self.observations
        self.observations = {RoleKey(service=item.service, role=item.role): item for item in merged}
        for key, observation in self.observations.items():
            known = before.get(key)
            if known is None or known.window_end != observation.window_end or known != observation:
                self._on_observation(observation)

    def fresh(self) -> list[pb.RoleObservation]:
        """The newest observations, without those that are older than two windows."""
        now_s, settings = self._now_s(), self._settings
        return [
            item
            for item in self.observations.values()
            if window_end_s(item) > now_s - 2 * settings.window_s_at(settings.interval_of(item.service))
        ]
