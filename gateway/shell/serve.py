"""Puts a gateway together and runs it until it is asked to stop."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from collections.abc import Mapping, Sequence

import grpc
import structlog
from aiohttp import web

from gateway.core.demand import DemandTally, until_report_s
from gateway.core.routing import Router, RoutingLimits
from gateway.shell.actuators import ActuatorLink
from gateway.shell.dispatch import Dispatcher
from gateway.shell.metrics import GatewayMetrics
from gateway.shell.proxy import Catalogue, Proxy
from gateway.shell.registry import RegistryLink
from gateway.shell.routes import ClusterRoutes
from gateway.shell.settings import GatewaySettings
from gateway.shell.upstream import Upstream
from trimtab.api.collector.v1 import collector_pb2, collector_pb2_grpc
from trimtab.config.settings import split_address
from trimtab.rpc.clients import ClientTls, channel
from trimtab.rpc.errors import describe
from trimtab.rpc.run import ServiceContext, StartupError, run_until_stopped
from trimtab.store.client import Store

log = structlog.get_logger(__name__)

_DEMAND_DEADLINE_S = 2.0
_CLOSE_S = 1.0


async def serve(settings: GatewaySettings, context: ServiceContext) -> None:
    """Run one gateway. Requests under way at a stop get `drain_grace_s` to end."""
    metrics = GatewayMetrics(context.registry)
    limits = RoutingLimits(
        max_held_per_service=settings.max_held_per_service, max_hold_s=settings.max_hold_s, avoid_s=settings.avoid_s
    )
    dispatcher = Dispatcher(Router(limits, services=settings.services), renewal_s=settings.acknowledge_s)
    metrics.in_flight.set_function(lambda: dispatcher.router.total_in_flight)
    tls = ClientTls.from_settings(settings)
    channels = [channel(address, tls=tls) for address in settings.actuators.values()]
    catalogue = Catalogue(dispatcher.router, clusters=len(settings.clusters), max_waiting=settings.max_held_per_service)
    store = Store(settings.store_url) if settings.registry else None
    routes = {
        cluster: ClusterRoutes(cluster, dispatcher, metrics, gateway=settings.name, on_first_set=catalogue.one_more)
        for cluster in settings.clusters
    }
    links = _links(settings, routes, metrics, channels, store)
    collector = channel(settings.collector, tls=tls)
    demand = DemandTally(time.monotonic())
    ended = asyncio.Event()
    async with Upstream(
        connect_timeout_s=settings.connect_timeout_s, idle_timeout_s=settings.idle_timeout_s
    ) as upstream:
        proxy = Proxy(
            dispatcher=dispatcher,
            upstream=upstream,
            demand=demand,
            metrics=metrics,
            registry=context.registry,
            catalogue=catalogue,
            standings=lambda: [routes[cluster].standing for cluster in settings.clusters],
            settle_timeout_s=settings.max_hold_s,
        )
        inner = ServiceContext(context.name, stopping=ended, registry=context.registry)
        loops = asyncio.ensure_future(
            run_until_stopped(
                inner,
                dispatcher.run(),
                _report_demand(settings, collector, demand, dispatcher, metrics),
                *(loop for link in links for loop in link.loops(ended)),
            )
        )
        try:
            await _serve_http(settings, context, proxy, loops)
        finally:
            ended.set()
            await asyncio.gather(loops, return_exceptions=True)
            for one in (*channels, collector):
                await one.close()
            if store is not None:
                await store.close()
    if not loops.cancelled() and loops.exception() is not None:
        loops.result()


def _links(
    settings: GatewaySettings,
    routes: Mapping[str, ClusterRoutes],
    metrics: GatewayMetrics,
    channels: Sequence[grpc.aio.Channel],
    store: Store | None,
) -> list[ActuatorLink | RegistryLink]:
    """Every way to every cluster."""
    links: list[ActuatorLink | RegistryLink] = [
        ActuatorLink(
            address,
            channel,
            routes[cluster],
            metrics,
            gateway=settings.name,
            acknowledge_s=settings.acknowledge_s,
        )
        for (cluster, address), channel in zip(settings.actuators.items(), channels, strict=True)
    ]
    if store is not None:
        links += [
            RegistryLink(store, routes[cluster], metrics, acknowledge_s=settings.acknowledge_s)
            for cluster in sorted(set(settings.registry))
        ]
    return links


async def _serve_http(
    settings: GatewaySettings, context: ServiceContext, proxy: Proxy, loops: asyncio.Future[None]
) -> None:
    """Listen until the stop, or until a background loop fails; then let what is under way end."""
    runner = web.AppRunner(
        proxy.application(max_body_bytes=settings.max_body_bytes),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_CLOSE_S,
    )
    await runner.setup()
    host, port = split_address(settings.listen)
    try:
        try:
            site = web.TCPSite(
                runner,
                host,
                port,
                reuse_address=True,
                reuse_port=False,
                ssl_context=_server_tls(settings),
                backlog=1024,
            )
            await site.start()
        except OSError as error:
            raise StartupError(_listen_error(settings.listen, error)) from error
        context.ports["http"] = runner.addresses[0][1]
        log.info("gateway listens", address=settings.listen, actuators=settings.actuators, registry=settings.registry)
        stop = asyncio.ensure_future(_until(context.stopping))
        try:
            await asyncio.wait({stop, loops}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        await site.stop()
        await proxy.drain(settings.drain_grace_s)
    finally:
        await runner.cleanup()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def _listen_error(address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"address {address} is in use; stop what listens there, or set --listen"
    return f"cannot listen on {address}: {os.strerror(error.errno) if error.errno else error}"


def _server_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        tls.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
        if settings.tls_client_ca_file is not None:
            tls.load_verify_locations(settings.tls_client_ca_file)
            tls.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"TLS files of the gateway: {error}") from error
    return tls


async def _report_demand(
    settings: GatewaySettings,
    collector: grpc.aio.Channel,
    demand: DemandTally,
    dispatcher: Dispatcher,
    metrics: GatewayMetrics,
) -> None:
    """Report demand at an interval. A collector that was away gets what it missed."""
    stub = collector_pb2_grpc.CollectorServiceStub(collector)
    was_up = True
    while True:
        await asyncio.sleep(until_report_s(time.time(), settings.demand_s))
        held = {service: dispatcher.router.held(service) for service in dispatcher.router.services}
        for service, count in held.items():
            metrics.held.labels(service).set(count)
        reports = demand.report(time.monotonic(), held)
        if not reports:
            continue
        request = collector_pb2.ReportDemandRequest(
            gateway=settings.name,
            demands=[
                collector_pb2.ServiceDemand(
                    service=report.service,
                    interval_s=report.interval_s,
                    arrivals=report.arrivals,
                    prompt_tokens=report.prompt_tokens,
                    requested_output_tokens=report.requested_output_tokens,
                    held=report.held,
                )
                for report in reports
            ],
            replicas=[
                collector_pb2.ReplicaDemand(replica=one.replica, in_flight=one.in_flight, answered=one.answered)
                for one in demand.report_replicas(dispatcher.router.traffic())
            ],
        )
        try:
            await stub.ReportDemand(request, timeout=_DEMAND_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            metrics.demand_failures.inc()
            if was_up:
                log.warning("demand report failed, keeping its counts for the next", error=describe(error))
            was_up = False
        else:
            demand.delivered()
            was_up = True
