"""Channels to Trimtab's servers: bounded calls, retries, keepalive, fast reconnects, TLS.

    channel = clients.channel("127.0.0.1:7004")
    actuator = actuator_pb2_grpc.ActuatorServiceStub(channel)
    nodes = await actuator.ListNodes(actuator_pb2.ListNodesRequest())     # at most DEFAULT_DEADLINE_S

A unary call without ``timeout`` gets ``DEFAULT_DEADLINE_S``; inside a handler no call gets more time than the call
being served has left, and the request id travels on. UNAVAILABLE is retried twice within the deadline: writes carry
idempotency keys and fencing tokens, and the one method that counts (ReportDemand) is left out.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from trimtab.addresses import split_address
from trimtab.rpc.calls import REQUEST_ID_KEY, current_call, new_request_id
from trimtab.rpc.tls import ClientTls

__all__ = ["DEFAULT_DEADLINE_S", "MAX_MESSAGE_BYTES", "ClientTls", "channel"]

DEFAULT_DEADLINE_S = 5.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        },
        # Sums what it is sent: a retry of a call that had arrived would count twice.
        {"name": [{"service": "trimtab.collector.v1.CollectorService", "method": "ReportDemand"}]},
    ]
}
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own back-off grows to two minutes; a service that was restarted must be found within seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # One connection per channel, so that a closed channel is really closed.
    ("grpc.use_local_subchannel_pool", 1),
)


class _CallDefaults(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives a unary call its deadline and request id."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        call = current_call()
        timeout_s = DEFAULT_DEADLINE_S if client_call_details.timeout is None else client_call_details.timeout
        remaining_s = call.remaining_s() if call is not None else None
        if remaining_s is not None:
            timeout_s = min(timeout_s, remaining_s)
        metadata = client_call_details.metadata or grpc.aio.Metadata()
        if metadata.get(REQUEST_ID_KEY) is None:
            metadata.add(REQUEST_ID_KEY, call.request_id if call is not None else new_request_id())
        details = grpc.aio.ClientCallDetails(
            client_call_details.method,
            timeout_s,
            metadata,
            client_call_details.credentials,
            client_call_details.wait_for_ready,
        )
        return await continuation(details, request)


def channel(address: str, *, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects at the first call and again whenever it must.

    Raises ``ValueError`` for an address that is none, ``StartupError`` for TLS files that are wrong.
    """
    split_address(address)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=[_CallDefaults()])
    return grpc.aio.secure_channel(address, tls.credentials(), options=_OPTIONS, interceptors=[_CallDefaults()])
