"""The gRPC server of every service: health, reflection, interceptors, TLS, bounds, drain.

server = RpcServer(settings, context)
server.add(add_ActuatorServiceServicer_to_server, servicer, "trimtab.actuator.v1.ActuatorService")
await server.start()
await context.stopping.wait()
await server.drain()
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trimtab.addresses import check_bindable
from trimtab.config.settings import ServiceSettings
from trimtab.errors import StartupError
from trimtab.rpc.clients import MAX_MESSAGE_BYTES
from trimtab.rpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from trimtab.rpc.health import HealthServicer
from trimtab.rpc.interceptors import CallInterceptor
from trimtab.rpc.run import ServiceContext
from trimtab.rpc.tls import server_credentials

log = structlog.get_logger(__name__)

DEFAULT_SERVER_DEADLINE_S = 10.0
MAX_CONCURRENT_CALLS = 4096

_OPTIONS: tuple[tuple[str, Any], ...] = (
    # Without this a second server silently shares a busy port.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients ping every 10 s; a server that allows less often would cut them off.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class RpcServer:
    """One gRPC server; every service added to it has a health state of its own.

    A service is SERVING from ``start`` on unless ``set_serving`` was called with another state before.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        context: ServiceContext,
        *,
        default_deadline_s: float = DEFAULT_SERVER_DEADLINE_S,
    ) -> None:
        self._settings = settings
        self._context = context
        self._health = HealthServicer()
        self._names: list[str] = []
        self._decided: set[str] = set()
        self.port = 0
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(context.registry, default_deadline_s=default_deadline_s)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, service_full_name: str) -> None:
        """Register a servicer with its generated ``add_…_to_server``; only before ``start``."""
        register(servicer, self._server)
        self._names.append(service_full_name)
        self._health.set(service_full_name, False)

    async def start(self) -> None:
        """Bind and serve. Raises ``StartupError`` for an address that cannot be had and for bad TLS files."""
        if self._settings.reflection:
            reflection.enable_server_reflection(
                (*self._names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )
        credentials = server_credentials(self._settings)
        address = self._settings.listen
        # gRPC writes the reason of a failed bind to its own log and raises without it.
        await asyncio.to_thread(check_bindable, "gRPC", address)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise StartupError(f"cannot listen for gRPC on {address}: {error}") from error
        await self._server.start()
        self._context.ports["grpc"] = self.port
        for name in self._names:
            if name not in self._decided:
                self._health.set(name, True)
        log.info("serving", listen=address, port=self.port, tls=credentials is not None, services=self._names)

    def set_serving(self, service_full_name: str, serving: bool) -> None:
        """Set whether one service can do its work right now, and send that to its health watchers.

        Raises ValueError for a service that was not added.
        """
        if service_full_name not in self._names:
            raise ValueError(f"{service_full_name!r} was not added to this server")
        self._decided.add(service_full_name)
        self._health.set(service_full_name, serving)

    async def drain(self) -> None:
        """NOT_SERVING, every watch ends, calls under way get ``drain_grace_s``, then the server is gone."""
        self._health.drain()
        self._context.stopping.set()
        await self._server.stop(self._settings.drain_grace_s)
        log.info("drained", port=self.port)
