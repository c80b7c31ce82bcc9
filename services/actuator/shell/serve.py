"""Puts the actuator together and runs it."""

import asyncio
import os
import socket

from actuator.shell.backend import Backend
from actuator.shell.controller import Controller, ControllerParts
from actuator.shell.engine_client import EngineClient
from actuator.shell.executor import Executor
from actuator.shell.local_backend import LocalBackend
from actuator.shell.metrics import ActuatorMetrics
from actuator.shell.observer import Observer
from actuator.shell.publisher import Publisher
from actuator.shell.records import Records
from actuator.shell.registry import RegistryRouting
from actuator.shell.routing import StreamRouting
from actuator.shell.servicer import ActuatorServicer
from actuator.shell.settings import ActuatorSettings
from actuator.shell.static_backend import StaticBackend, TargetsFileError
from actuator.shell.vllm_client import VllmClient
from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.errors import StartupError
from trimtab.rpc.run import ServiceContext, run_until_stopped
from trimtab.rpc.server import RpcServer
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.clock import StoreClock
from trimtab.store.lease import StoreLease
from trimtab.store.news import follow_news
from trimtab.store.registry import EndpointRegistry

SERVICE = "trimtab.actuator.v1.ActuatorService"


def make_backend(settings: ActuatorSettings) -> Backend:
    """Raises ``StartupError`` for a targets file that cannot be used."""
    if settings.backend == "local":
        return LocalBackend(settings.fleet_url, settings.cluster)
    if settings.targets_file is None:
        raise StartupError("backend static needs targets_file")
    try:
        return StaticBackend(settings.targets_file, exporter_interval_s=settings.gpu_exporter_interval_s)
    except TargetsFileError as error:
        raise StartupError(str(error)) from error


def make_client(settings: ActuatorSettings) -> EngineClient:
    """The client of the engines that the cluster's servers run."""
    return VllmClient(probe_timeout_s=settings.probe_timeout_s, canary_timeout_s=settings.canary_timeout_s)


async def serve(settings: ActuatorSettings, context: ServiceContext) -> None:
    """Run until ``context.stopping``; health is SERVING while this process is the cluster's actuator.

    Raises ``StartupError`` for a targets file that cannot be used and for a store of another schema.
    """
    backend = make_backend(settings)
    client = make_client(settings)
    limits = settings.limits()
    store = await Store.connect(settings.store_url, stopping=context.stopping)
    await store.check_schema()
    clock = StoreClock(store)
    await clock.refresh()
    metrics = ActuatorMetrics(context.registry)
    owner = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    observer = Observer(
        backend,
        client,
        now_s=clock.now_s,
        interval_s=settings.observe_interval_s,
        urgent_interval_s=settings.urgent_interval_s,
    )
    publisher = Publisher(cluster=settings.cluster, probe=observer.probe)
    stream = StreamRouting(cluster=settings.cluster, lease_s=settings.gateway_lease_s)
    routing = RegistryRouting(
        EndpointRegistry(store, settings.cluster),
        stream,
        lease_s=settings.gateway_lease_s,
        grace_s=limits.gateway_grace_s,
        now_s=clock.now_s,
    )
    parts = ControllerParts(
        lease=StoreLease(store, keys.actuator(settings.cluster), owner, settings.lease_ttl_s),
        records=Records(store, settings.cluster),
        observer=observer,
        publisher=publisher,
        routing=routing,
        metrics=metrics,
        limits=limits,
        now_s=clock.now_s,
    )
    controller = Controller(parts, interval_s=settings.observe_interval_s)
    observer.listen(urgent=controller.urgent, on_news=controller.kick)
    stream.listen(controller.hear_router)
    executor = Executor(backend, client, limits, controller.on_outcome, may_act=lambda: parts.lease.held)
    controller.use(executor)
    server = RpcServer(settings, context)
    servicer = ActuatorServicer(
        controller,
        publisher,
        stream,
        metrics,
        cluster=settings.cluster,
        limits=limits,
        now_s=clock.now_s,
        can_create=backend.can_create,
    )
    server.add(actuator_pb2_grpc.add_ActuatorServiceServicer_to_server, servicer, SERVICE)
    server.set_serving(SERVICE, False)
    await server.start()
    try:
        await run_until_stopped(
            context,
            clock.run(context.stopping),
            observer.run(context.stopping),
            controller.keep_lease(context.stopping),
            controller.run(context.stopping),
            follow_news(store, keys.gateways_spoke(settings.cluster), controller.kick, stopping=context.stopping),
            _show_health(context, server, controller),
        )
    finally:
        publisher.close()
        routing.close()
        await server.drain()
        await executor.stop()
        await client.close()
        await backend.close()
        await parts.lease.release()
        await store.close()


async def _show_health(context: ServiceContext, server: RpcServer, controller: Controller) -> None:
    shown = False
    while not context.stopping.is_set():
        if controller.serving is not shown:
            shown = controller.serving
            server.set_serving(SERVICE, shown)
        await asyncio.sleep(0.1)
