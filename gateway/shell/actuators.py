"""Follows one actuator's stream of endpoint sets and acknowledges them to it.

An acknowledgement has the revision that this gateway routes by and its requests on hidden replicas. It goes out at once
after every new set and whenever a hidden replica has become free, and otherwise at an interval, as the lease's
heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from gateway.shell.metrics import GatewayMetrics
from gateway.shell.routes import ClusterRoutes
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.rpc.errors import describe
from trimtab.rpc.watch import follow

_ACKNOWLEDGE_DEADLINE_S = 2.0


class ActuatorLink:
    """The stream from, and the acknowledgements to, one actuator."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        routes: ClusterRoutes,
        metrics: GatewayMetrics,
        *,
        gateway: str,
        acknowledge_s: float,
    ) -> None:
        self._address = address
        self._way = f"actuator {address}"
        self._stub = actuator_pb2_grpc.ActuatorServiceStub(channel)
        self._routes = routes
        self._metrics = metrics
        self._gateway = gateway
        self._acknowledge_s = acknowledge_s
        self._news = asyncio.Event()
        metrics.actuator_up.labels(address).set(0)
        routes.join(self._way, self._news.set)

    def loops(self, stopping: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """What has to run until `stopping`."""
        return [self._watch(stopping), self._acknowledge(stopping)]

    async def _watch(self, stopping: asyncio.Event) -> None:
        request = actuator_pb2.WatchEndpointsRequest(gateway=self._gateway)
        await follow(
            lambda: self._stub.WatchEndpoints(request),
            self._apply,
            stopping=stopping,
            on_lost=self._lost,
            name=f"endpoints of {self._address}",
        )

    def _apply(self, response: actuator_pb2.WatchEndpointsResponse) -> None:
        self._metrics.actuator_up.labels(self._address).set(1)
        self._routes.offer(response, has_leader=True)
        if response.revision == self._routes.revision:
            self._routes.heard(self._way)

    def _lost(self) -> None:
        self._metrics.actuator_up.labels(self._address).set(0)
        self._routes.quiet(self._way, "its stream is silent")

    async def _acknowledge(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self._news.clear()
            await self._acknowledge_once()
            try:
                await asyncio.wait_for(self._news.wait(), self._acknowledge_s)
            except TimeoutError:
                continue

    async def _acknowledge_once(self) -> None:
        stalls, ack = self._routes.stalls, self._routes.ack()
        try:
            response = await self._stub.AcknowledgeEndpoints(ack, timeout=_ACKNOWLEDGE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            self._metrics.acknowledge_failures.labels(self._address).inc()
            self._routes.warn("acknowledgement failed", actuator=self._address, error=describe(error))
            self._routes.unanswered(self._way, stalls=stalls)
        else:
            if response.current_revision <= ack.revision:
                self._routes.current(stalls=stalls)
