"""Puts the service together: store, lease, actuators, cycles, gRPC."""

import os
import uuid

import structlog

from prescheduler.shell.clusters import Clusters
from prescheduler.shell.follower import follow_cycles
from prescheduler.shell.metrics import Metrics
from prescheduler.shell.records import Records
from prescheduler.shell.scheduler import Scheduler
from prescheduler.shell.servicer import SERVICE_NAME, PreSchedulerServicer
from prescheduler.shell.settings import PreSchedulerSettings
from trimtab.api.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from trimtab.domain.time import timestamp_of
from trimtab.rpc.run import ServiceContext, run_until_stopped
from trimtab.rpc.server import RpcServer
from trimtab.rpc.tls import ClientTls
from trimtab.rpc.watch import WatchHub
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.clock import StoreClock
from trimtab.store.lease import StoreLease, keep_lease

log = structlog.get_logger(__name__)


async def serve(settings: PreSchedulerSettings, context: ServiceContext) -> None:
    """Run until ``context.stopping`` is set, then drain and give the lease up."""
    store = await Store.connect(settings.store_url, stopping=context.stopping)
    try:
        await store.check_schema()
        clusters = Clusters(
            settings.actuators, timeout_s=settings.actuator_timeout_s, tls=ClientTls.from_settings(settings)
        )
        try:
            await _serve(settings, context, store, clusters)
        finally:
            await clusters.close()
    finally:
        await store.close()


async def _serve(settings: PreSchedulerSettings, context: ServiceContext, store: Store, clusters: Clusters) -> None:
    clock = StoreClock(store)
    await clock.refresh()
    metrics = Metrics(context.registry)
    lease = StoreLease(store, keys.PRESCHEDULER, f"{os.getpid()}-{uuid.uuid4().hex[:12]}", settings.lease_ttl_s)
    records = Records(store, kept_cycles=settings.kept_cycles)
    hub: WatchHub[scheduler_pb2.WatchCyclesResponse] = WatchHub(
        snapshot=tuple,
        bookmark=lambda: scheduler_pb2.WatchCyclesResponse(
            bookmark=scheduler_pb2.CycleBookmark(as_of=timestamp_of(clock.now_s()))
        ),
        stopping=context.stopping,
    )
    scheduler = Scheduler(settings, clusters=clusters, records=records, lease=lease, clock=clock, metrics=metrics)
    server = RpcServer(settings, context)
    server.add(
        scheduler_pb2_grpc.add_PreSchedulerServiceServicer_to_server,
        PreSchedulerServicer(scheduler, records, lease, hub),
        SERVICE_NAME,
    )
    await server.start()

    def publish(cycle: scheduler_pb2.Cycle) -> None:
        hub.publish(scheduler_pb2.WatchCyclesResponse(cycle=cycle))

    def leading(token: int | None) -> None:
        metrics.leading.set(0 if token is None else 1)

    try:
        await run_until_stopped(
            context,
            clock.run(context.stopping),
            keep_lease(lease, context.stopping, on_change=leading),
            scheduler.run(context),
            follow_cycles(records, publish, context),
        )
    finally:
        await server.drain()
