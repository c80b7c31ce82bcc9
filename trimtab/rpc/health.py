"""The gRPC health service, per service and overall.

Written here because the one in grpcio-health-checking never ends its Watch streams at a stop, so that every drain
would last its whole grace period.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """States of the services by full name; the empty name is the server: SERVING when all of them are."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._draining = False
        self._changed = asyncio.Event()

    def set(self, service_full_name: str, serving: bool) -> None:
        """Set one service's state and send it to its watchers; without effect after ``drain``."""
        if not self._draining and self._serving.get(service_full_name) != serving:
            self._serving[service_full_name] = serving
            self._notify()

    def drain(self) -> None:
        """Set every service to NOT_SERVING for good, send that to watchers and end their streams."""
        self._draining = True
        self._notify()

    def status(self, service_full_name: str) -> int:
        """The state of one service, or of the server for the empty name."""
        if service_full_name and service_full_name not in self._serving:
            return SERVICE_UNKNOWN
        if self._draining:
            return NOT_SERVING
        if service_full_name:
            return SERVING if self._serving[service_full_name] else NOT_SERVING
        return SERVING if self._serving and all(self._serving.values()) else NOT_SERVING

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> health_pb2.HealthCheckResponse:
        """The state now; NOT_FOUND for a service that this server does not have."""
        status = self.status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:200]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        _context: "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]",
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now and at every change, until the server drains."""
        sent: int | None = None
        while True:
            changed = self._changed
            status = self.status(request.service)
            if status != sent:
                yield health_pb2.HealthCheckResponse(status=status)
                sent = status
            if self._draining:
                return
            if changed is self._changed:
                await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
