"""Follows every actuator's endpoint sets and acknowledges them.

An acknowledgement says by which revision this gateway routes and what it still has on hidden replicas; it goes out at
once after every new set and whenever a hidden replica has become free, and otherwise at an interval, as the lease's
heartbeat. An actuator that is gone leaves its last set in force.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import structlog

from simulator.gateway.core import Endpoint, EndpointState, Role
from simulator.gateway.dispatch import Dispatcher
from simulator.gateway.metrics import GatewayMetrics
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.rpc.errors import describe
from trimtab.rpc.watch import follow

log = structlog.get_logger(__name__)

_ROLES = {
    types_pb2.ROLE_COLOCATED: Role.COLOCATED,
    types_pb2.ROLE_PREFILL: Role.PREFILL,
    types_pb2.ROLE_DECODE: Role.DECODE,
}
_STATES = {
    actuator_pb2.ENDPOINT_STATE_ROUTABLE: EndpointState.ROUTABLE,
    actuator_pb2.ENDPOINT_STATE_EVICTING: EndpointState.EVICTING,
}
_ACKNOWLEDGE_DEADLINE_S = 2.0
_WARN_EVERY_S = 5.0


def endpoints_of(response: actuator_pb2.WatchEndpointsResponse) -> list[Endpoint]:
    """Endpoints that gateways talk to. A state unknown here is taken for draining: nothing new goes there."""
    return [
        Endpoint(
            cluster=response.cluster,
            replica=endpoint.replica,
            service=service.service,
            model=endpoint.model or service.service,
            address=endpoint.address.rstrip("/"),
            role=_ROLES[endpoint.role],
            state=_STATES.get(endpoint.state, EndpointState.DRAINING),
        )
        for service in response.services
        for endpoint in service.endpoints
        if endpoint.role in _ROLES and endpoint.replica and endpoint.address.startswith(("http://", "https://"))
    ]


class ActuatorLink:
    """The stream from, and the acknowledgements to, one actuator."""

    def __init__(
        self,
        cluster: str,
        address: str,
        channel: grpc.aio.Channel,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        *,
        gateway: str,
        acknowledge_s: float,
        on_first_set: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._address = address
        self._stub = actuator_pb2_grpc.ActuatorServiceStub(channel)
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._gateway = gateway
        self._acknowledge_s = acknowledge_s
        self._on_first_set = on_first_set
        self._has_set = False
        self._news = asyncio.Event()
        self._warned_s = -_WARN_EVERY_S
        metrics.actuator_up.labels(address).set(0)
        dispatcher.on_report(self._report)

    async def watch(self, stopping: asyncio.Event) -> None:
        """Follow the stream until `stopping`."""
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
        if response.cluster != self._cluster:
            self._warn(
                "endpoint set refused: it is another cluster's", cluster=response.cluster, expected=self._cluster
            )
            return
        if response.lease_s > 0:
            self._dispatcher.lease_s = min(self._dispatcher.lease_s, response.lease_s)
        try:
            self._dispatcher.apply(
                response.cluster,
                response.revision,
                [service.service for service in response.services],
                endpoints_of(response),
            )
        except ValueError as error:
            self._warn("endpoint set refused", error=str(error))
            return
        if not self._has_set:
            self._has_set = True
            self._on_first_set()
        self._metrics.revision.labels(response.cluster).set(response.revision)
        self._news.set()

    def _lost(self) -> None:
        self._metrics.actuator_up.labels(self._address).set(0)
        log.warning("actuator is silent, routing by its last endpoint set", actuator=self._address)

    def _report(self, cluster: str) -> None:
        if cluster == self._cluster:
            self._news.set()

    async def acknowledge(self, stopping: asyncio.Event) -> None:
        """Acknowledge until `stopping`."""
        while not stopping.is_set():
            self._news.clear()
            await self._acknowledge_once()
            try:
                await asyncio.wait_for(self._news.wait(), self._acknowledge_s)
            except TimeoutError:
                continue

    async def _acknowledge_once(self) -> None:
        router = self._dispatcher.router
        request = actuator_pb2.AcknowledgeEndpointsRequest(
            gateway=self._gateway,
            revision=router.revision(self._cluster),
            in_flight=[
                actuator_pb2.ReplicaInFlight(replica=item.replica, requests=item.requests, pinned=item.pinned)
                for item in router.left_behind(self._cluster)
            ],
        )
        stalls = self._dispatcher.stalls
        try:
            response = await self._stub.AcknowledgeEndpoints(request, timeout=_ACKNOWLEDGE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            self._metrics.acknowledge_failures.labels(self._address).inc()
            self._warn("acknowledgement failed", error=describe(error))
            current = True  # Nobody is there to say otherwise: the last set stays in force.
        else:
            current = response.current_revision <= request.revision
        # An answer to a question from before a stall says nothing about the time since.
        if current and stalls == self._dispatcher.stalls:
            self._dispatcher.trust(self._cluster)

    def _warn(self, event: str, **fields: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(event, actuator=self._address, **fields)
