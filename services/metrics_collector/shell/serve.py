"""Puts the collector together and runs it until the stop."""

from collections.abc import Collection, Mapping, Sequence

import structlog

from metrics_collector.core.demand import without
from metrics_collector.core.page import PageReader
from metrics_collector.core.role_load import ReplicaLoads
from metrics_collector.core.sharing import sources_fingerprint
from metrics_collector.core.targets import RoleKey, Target, merge_targets
from metrics_collector.shell.archive import Archive
from metrics_collector.shell.collector_lease import CollectorLease
from metrics_collector.shell.http_sd import HttpTargets, shown
from metrics_collector.shell.metrics import FleetMetrics, ScrapeMetrics
from metrics_collector.shell.publisher import Publisher
from metrics_collector.shell.scrape_config import ScrapeConfigs, raise_file_limit
from metrics_collector.shell.scraper import Scraper
from metrics_collector.shell.servicer import SERVICE_NAME, CollectorServicer, bookmark, observed
from metrics_collector.shell.settings import CollectorSettings
from metrics_collector.shell.sources import ActuatorTargets, FileTargets, load_file
from metrics_collector.shell.target_assignment import Seeds, TargetAssignment
from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.config.dialects import DialectError, load_dialects
from trimtab.config.file_sd import FileSdError
from trimtab.domain.dialects.model import Dialect
from trimtab.errors import StartupError
from trimtab.rpc.clients import ClientTls, channel
from trimtab.rpc.run import ServiceContext, run_until_stopped
from trimtab.rpc.server import RpcServer
from trimtab.rpc.watch import WatchHub
from trimtab.store.client import Store
from trimtab.store.clock import StoreClock
from trimtab.store.errors import StoreUnavailable

log = structlog.get_logger(__name__)


async def serve(settings: CollectorSettings, context: ServiceContext) -> None:
    """Runs until ``context.stopping``. Raises ``StartupError`` for what the operator has to mend.

    The gRPC port is open, and NOT_SERVING, while the store is waited for.
    """
    _check_files(settings)
    raise_file_limit()
    store = Store(settings.store_url)
    channels = {
        cluster: channel(address, tls=ClientTls.from_settings(settings))
        for cluster, address in sorted(settings.actuators.items())
    }
    try:
        collector = _Collector(settings, context, store)
        collector.actuators = [
            ActuatorTargets(cluster, actuator_pb2_grpc.ActuatorServiceStub(one), collector.update_targets)
            for cluster, one in channels.items()
        ]
        await collector.run()
    finally:
        for one in channels.values():
            await one.close()
        await store.close()


def _check_files(settings: CollectorSettings) -> None:
    """A document that is wrong from the start is the operator's to mend; one that is not there yet is waited for."""
    for path in settings.targets_files:
        if path.exists():
            try:
                load_file(path)
            except FileSdError as error:
                raise StartupError(str(error)) from error


def _dialects(settings: CollectorSettings) -> tuple[Dialect, ...]:
    try:
        return load_dialects(settings.dialect_files)
    except DialectError as error:
        raise StartupError(str(error)) from error


class _Collector:
    """The parts, wired."""

    def __init__(self, settings: CollectorSettings, context: ServiceContext, store: Store) -> None:
        self._settings = settings
        self._context = context
        self._store = store
        self._clock = StoreClock(store)
        metrics = ScrapeMetrics(context.registry)
        self.actuators: list[ActuatorTargets] = []
        self._files = FileTargets(settings.targets_files, self.update_targets)
        self._urls = HttpTargets(
            settings.targets_urls,
            self.update_targets,
            interval_s=settings.http_sd_interval_s,
            timeout_s=settings.http_sd_timeout_s,
            max_bytes=settings.http_sd_max_bytes,
            ca_file=settings.http_sd_ca_file,
            token_file=settings.http_sd_token_file,
        )
        loads = self._loads = ReplicaLoads(expiry_s=settings.demand_expiry_s)
        self._membership = CollectorLease(
            store,
            name=settings.collector_name,
            sources=sources_fingerprint(settings.sources()),
            interval_s=settings.scrape_interval_s,
            now_s=self._clock.now_s,
            on_settled=self._settled,
            demand=lambda: loads.told(settings.collector_name, self._clock.now_s()),
            on_demand=self._take_demand,
        )
        dialects = _dialects(settings)
        self._rules = ScrapeConfigs(settings, dialects)
        self._scraper = Scraper(settings, self._rules.of, PageReader(dialects), metrics, now_s=self._clock.now_s)

        def new_archive() -> Archive:
            return Archive(
                store,
                collector=settings.collector_name,
                history_windows=settings.history_windows,
                history_retention_s=settings.history_retention_s,
                may_write=self._membership.may_report,
                elsewhere=self._elsewhere,
                collectors=lambda: self._membership.collectors,
            )

        archive = new_archive()
        self._assignment = TargetAssignment(self._membership, archive, apply=self._scrape, now_s=self._clock.now_s)
        self._publisher = Publisher(
            settings,
            new_archive,
            self._scraper,
            metrics,
            replica_revisions=self._replica_revisions,
            now_s=self._clock.now_s,
            on_observation=lambda item: self._hub.publish(observed(item)),
            loads=loads,
        )
        self._hub: WatchHub[pb.WatchObservationsResponse] = WatchHub(
            snapshot=list,
            bookmark=lambda: bookmark(self._publisher.revision),
            stopping=context.stopping,
        )
        context.registry.register(
            FleetMetrics(
                self._publisher.fresh,
                lambda: self._scraper.statuses,
                lambda: {actuator.cluster: actuator.connected for actuator in self.actuators},
                self._readable,
            )
        )
        self._server = RpcServer(settings, context)
        servicer = CollectorServicer(
            archive,
            self._publisher,
            self._hub,
            targets=lambda: self._assignment.everything,
            statuses=lambda: self._scraper.statuses,
            now_s=self._clock.now_s,
            keep_s=settings.window_s + settings.demand_expiry_s,
            loads=loads,
            sharers=lambda: self._membership.sharers,
        )
        self._server.add(collector_pb2_grpc.add_CollectorServiceServicer_to_server, servicer, SERVICE_NAME)

    async def run(self) -> None:
        settings, context = self._settings, self._context
        self._server.set_serving(SERVICE_NAME, False)
        await self._server.start()
        try:
            if not await self._store_is_up():
                return
            await self._clock.refresh()
            if not await self._joined():
                return
            self._files.poll()
            self._server.set_serving(SERVICE_NAME, True)
            await run_until_stopped(
                context,
                self._clock.run(context.stopping),
                self._files.run(context, interval_s=settings.targets_poll_s),
                *(one.run(context, lost_after_s=settings.actuator_lost_after_s) for one in self.actuators),
                self._urls.run(context),
                self._membership.run(context),
                self._assignment.run(context),
                self._rules.run(context),
                self._scraper.run(context.stopping),
                self._publisher.run(context),
            )
            await self._membership.leave()
        finally:
            await self._server.drain()

    async def _store_is_up(self) -> bool:
        """Waits for the store; False at a stop. Raises ``StartupError`` for one of another schema."""
        while not self._context.stopping.is_set():
            try:
                await self._store.wait_until_up(stopping=self._context.stopping)
                await self._store.check_schema()
            except StoreUnavailable as error:
                log.info("the store is not ready", error=str(error))
            else:
                return True
        return False

    async def _joined(self) -> bool:
        """Takes this collector's lease; False at a stop. Raises ``StartupError`` for a name that is in use."""
        while not self._context.stopping.is_set():
            try:
                await self._membership.join(self._context)
            except StoreUnavailable as error:
                log.info("the collector has no lease yet", error=str(error))
                await self._context.pause(0.2)
            else:
                return True
        return False

    def update_targets(self) -> None:
        """A source has changed."""
        targets = merge_targets(
            [*self._files.targets, *self._urls.targets],
            [target for one in self.actuators for target in one.targets],
            actuators_configured=bool(self._settings.actuators),
        )
        self._assignment.update(targets)

    def _scrape(self, targets: Mapping[str, Target], seeds: Seeds) -> None:
        """Scrape these, and begin those in ``seeds`` where another collector, or this one before, has stopped."""
        self._scraper.update(targets)
        for target_id, (at_s, reading) in seeds.items():
            self._scraper.table.seed(target_id, reading.schema, reading.values, at_s=at_s)

    def _settled(self) -> None:
        self._assignment.settled()

    def _elsewhere(self) -> Mapping[RoleKey, Collection[str]]:
        return self._assignment.elsewhere()

    def _take_demand(self, others: Sequence[pb.CollectorDemand]) -> None:
        gone = self._loads.take(others, self._clock.now_s())
        self._publisher.demand = without(self._publisher.demand, gone)

    def _readable(self) -> dict[str, bool]:
        """Whether the newest version of each document of targets was good."""
        files = {str(path): path not in self._files.errors for path in self._settings.targets_files}
        return files | {shown(url): url not in self._urls.errors for url in self._settings.targets_urls}

    def _replica_revisions(self) -> dict[str, int]:
        return {one.cluster: one.revision for one in self.actuators if one.revision is not None}
