"""Closes a window every interval: partials and samples to the store, merged observations to the watchers.

The store may be away: a round that cannot be written is lost for the store (its window is missing there), but scraping
goes on and the next window that is written holds right rates, since counters go on in memory.
"""

from collections.abc import Callable, Mapping, Sequence

import structlog
from redis.exceptions import ResponseError

from metrics_collector.core.demand import DemandBoard, forget, front_door_partials
from metrics_collector.core.partials import CountedReplica, RoleKey, role_partial
from metrics_collector.core.samples import EncodedSample
from metrics_collector.core.status import TargetStatus, replica_sample
from metrics_collector.core.targets import Target
from metrics_collector.core.windows import ReplicaWindow, Window, next_round, replica_window
from metrics_collector.shell.archive import Archive
from metrics_collector.shell.metrics import ScrapeMetrics
from metrics_collector.shell.settings import CollectorSettings
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.rpc.run import ServiceContext
from trimtab.store.errors import StoreUnavailable
from trimtab.store.observations import window_end_s

log = structlog.get_logger(__name__)


class Publisher:
    """The rounds. ``demand`` is what gateways have reported; ``observations`` the newest merged ones, by role."""

    def __init__(
        self,
        settings: CollectorSettings,
        archive: Archive,
        metrics: ScrapeMetrics,
        *,
        targets: Callable[[], Mapping[str, Target]],
        statuses: Callable[[], Mapping[str, TargetStatus]],
        replica_revisions: Callable[[], Mapping[str, int]],
        now_s: Callable[[], float],
        on_observation: Callable[[pb.RoleObservation], None],
    ) -> None:
        self._settings = settings
        self._archive = archive
        self._metrics = metrics
        self._targets = targets
        self._statuses = statuses
        self._replica_revisions = replica_revisions
        self._now_s = now_s
        self._on_observation = on_observation
        self._store_lost = False
        self.demand = DemandBoard()
        self.observations: dict[RoleKey, pb.RoleObservation] = {}

    @property
    def revision(self) -> int:
        """Grows with every window: the end of the newest one in milliseconds."""
        return max((item.window_end.ToMilliseconds() for item in self.observations.values()), default=0)

    async def run(self, context: ServiceContext) -> None:
        """One round per interval, at multiples of it on the store's clock, until the service stops."""
        interval_s = self._settings.scrape_interval_s
        number = next_round(0, self._now_s(), interval_s=interval_s)
        while not await context.pause(number * interval_s - self._now_s()):
            await self.round(number * interval_s)
            number = next_round(number, self._now_s(), interval_s=interval_s)

    async def round(self, end_s: float) -> None:
        """Close the window that ends at ``end_s``."""
        window = Window(start_s=end_s - self._settings.window_s, end_s=end_s)
        windows = {target_id: replica_window(status.series, window) for target_id, status in self._statuses().items()}
        try:
            merged = await self._archive.write(self._partials(window, windows), self._samples(windows), at_s=end_s)
        except (StoreUnavailable, ResponseError) as error:
            # A store that refuses a write, for want of memory say, is as good as away.
            self._metrics.rounds.labels("lost").inc()
            if not self._store_lost:
                self._store_lost = True
                log.warning("store lost, windows are not written", error=str(error))
            return
        self._metrics.rounds.labels("written").inc()
        if self._store_lost:
            self._store_lost = False
            log.info("the store is back, windows are written again")
        self.observations = {RoleKey(service=item.service, role=item.role): item for item in merged}
        for observation in merged:
            self._on_observation(observation)

    def fresh(self) -> list[pb.RoleObservation]:
        """The newest observations, without those too old to say anything about now."""
        oldest_s = self._now_s() - 2 * self._settings.window_s
        return [item for item in self.observations.values() if window_end_s(item) > oldest_s]

    def _partials(self, window: Window, windows: Mapping[str, ReplicaWindow | None]) -> list[pb.RolePartial]:
        """This collector's partials of every role that it has targets of, and of every front door."""
        roles: dict[RoleKey, list[CountedReplica]] = {}
        statuses = self._statuses()
        for target_id, target in self._targets().items():
            if not target.placed:
                continue
            replicas = roles.setdefault(RoleKey(service=target.service, role=target.role), [])
            if target.counted:
                replicas.append(
                    CountedReplica(
                        replica=target.replica,
                        window=windows[target_id],
                        stuck=statuses[target_id].stuck,
                        routable_by_actuator=target.routable_by_actuator,
                    )
                )
        collector = self._settings.collector_name
        revisions = self._replica_revisions()
        found = [
            role_partial(key, roles[key], window, collector=collector, replica_revisions=revisions)
            for key in sorted(roles, key=lambda key: (key.service, key.role))
        ]
        self.demand = forget(self.demand, now_s=window.end_s)
        return found + front_door_partials(
            self.demand, window, collector=collector, expiry_s=self._settings.demand_expiry_s
        )

    def _samples(self, windows: Mapping[str, ReplicaWindow | None]) -> Sequence[EncodedSample]:
        statuses = self._statuses()
        samples = [
            (target, replica_sample(target, statuses[target_id], windows[target_id]))
            for target_id, target in self._targets().items()
            if target.placed
        ]
        return [
            EncodedSample(target.key, target.replica, sample.SerializeToString())
            for target, sample in samples
            if sample is not None
        ]
