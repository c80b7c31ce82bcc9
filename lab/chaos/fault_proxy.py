"""A proxy between a gateway and its actuator that passes everything on, and delays acknowledgements on request.

The gateway also follows the registry in the store, where it may read a set before it comes here. The sets known here
are complete only while no newer one is stored there (`knows_all`).

A late acknowledgement is still delivered after its sender has given it up, as by a slow network: the actuator then gets
an old one. Endpoint sets are passed on at once. Sets sent to the gateway and their confirmations are kept here for
checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.store.errors import CorruptEntry, StoreUnavailable
from trimtab.store.registry import EndpointRegistry

_CALL_S = 2.0
_SERVICE = "trimtab.actuator.v1.ActuatorService"
_Context = grpc.aio.ServicerContext[object, object]


class FaultProxy:
    """Serves the two methods that gateways call, and no others."""

    def __init__(
        self, upstream: actuator_pb2_grpc.ActuatorServiceAsyncStub, registry: EndpointRegistry | None = None
    ) -> None:
        self._upstream = upstream
        self._registry = registry
        self._late: set[asyncio.Task[pb.AcknowledgeEndpointsResponse]] = set()
        self.delay_s = 0.0
        self.newest_revision = 0
        self.acknowledged_revision = 0
        self.delivered = 0
        """Acknowledgements that the actuator has answered."""
        self.hidden_since: dict[str, int] = {}
        """Replica → the revision of the endpoint set that hid it, for those that are listed and not routable."""

    async def watch_endpoints(
        self, request: pb.WatchEndpointsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEndpointsResponse]:
        """Every set, as it comes."""
        # The first one may be several sets after the last: which replicas were hidden all the time is not known.
        self.hidden_since = {}
        try:
            async for message in self._upstream.WatchEndpoints(request):
                self._note(message)
                yield message
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")

    async def knows_all(self) -> bool:
        """Whether the gateway can have learnt of no newer set than has come through here by now."""
        if self._registry is None:
            return True
        try:
            head = await self._registry.head()
        except (StoreUnavailable, CorruptEntry):
            return False
        return head is not None and head.revision <= self.newest_revision

    def _note(self, message: pb.WatchEndpointsResponse) -> None:
        hidden = {
            endpoint.replica
            for service in message.services
            for endpoint in service.endpoints
            if endpoint.state != pb.ENDPOINT_STATE_ROUTABLE
        }
        self.newest_revision = message.revision
        self.hidden_since = {name: self.hidden_since.get(name, message.revision) for name in sorted(hidden)}

    async def acknowledge_endpoints(
        self, request: pb.AcknowledgeEndpointsRequest, context: _Context
    ) -> pb.AcknowledgeEndpointsResponse:
        """Passed on after `delay_s`, also when the gateway waits no longer."""
        self.acknowledged_revision = max(self.acknowledged_revision, request.revision)
        delivery = asyncio.create_task(self._deliver(request, self.delay_s))
        self._late.add(delivery)
        delivery.add_done_callback(self._delivered)
        try:
            return await asyncio.shield(delivery)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
            raise

    async def _deliver(
        self, request: pb.AcknowledgeEndpointsRequest, delay_s: float
    ) -> pb.AcknowledgeEndpointsResponse:
        await asyncio.sleep(delay_s)
        response = await self._upstream.AcknowledgeEndpoints(request, timeout=_CALL_S)
        self.delivered += 1
        return response

    def _delivered(self, delivery: asyncio.Task[pb.AcknowledgeEndpointsResponse]) -> None:
        self._late.discard(delivery)
        if not delivery.cancelled():
            delivery.exception()

    async def close(self) -> None:
        """Drops what is still late."""
        for delivery in list(self._late):
            delivery.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)


async def serve_fault_proxy(fault_proxy: FaultProxy) -> tuple[grpc.aio.Server, str]:
    """A server that runs, and its host:port, which the system chose."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "WatchEndpoints": grpc.unary_stream_rpc_method_handler(
            fault_proxy.watch_endpoints,
            request_deserializer=pb.WatchEndpointsRequest.FromString,
            response_serializer=pb.WatchEndpointsResponse.SerializeToString,
        ),
        "AcknowledgeEndpoints": grpc.unary_unary_rpc_method_handler(
            fault_proxy.acknowledge_endpoints,
            request_deserializer=pb.AcknowledgeEndpointsRequest.FromString,
            response_serializer=pb.AcknowledgeEndpointsResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
