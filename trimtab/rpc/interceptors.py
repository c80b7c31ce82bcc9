"""What happens around every call of a server: request id, deadline, metrics, logs, error mapping.

One interceptor in place of five: the outcome of a call (code, duration, request id) is known in one place, and a
call costs one wrapper.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trimtab.rpc.calls import (
    MAX_REQUEST_ID_LENGTH,
    REQUEST_ID_KEY,
    CallScope,
    enter_call,
    new_request_id,
)
from trimtab.rpc.errors import (
    STATUS_DETAILS_KEY,
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    RpcError,
    Unavailable,
    Violation,
    describe,
)
from trimtab.store.errors import EtagMismatch, FencedOff, StoreUnavailable

log = structlog.get_logger(__name__)

_TRANSIENT = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
_Context = Any  # grpc.aio.ServicerContext, whose two type parameters differ by method.


def map_error(error: Exception, request_id: str) -> RpcError:
    """The RpcError that a caller sees for ``error``; what is unexpected becomes INTERNAL without its text."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, StoreUnavailable):
        return Unavailable("STORE_UNAVAILABLE", f"the store does not answer: {error}")
    if isinstance(error, EtagMismatch):
        return Aborted("ETAG_MISMATCH", str(error), {"etag": error.current_etag})
    if isinstance(error, FencedOff):
        return FailedPrecondition("FENCED_OFF", str(error), {"highest_token": str(error.current_token)})
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() in _TRANSIENT:
            return Unavailable("UPSTREAM_UNAVAILABLE", f"a service that this one needs failed: {describe(error)}")
        return Internal("UPSTREAM_FAILED", f"a service that this one needs refused: {describe(error)}")
    return Internal("INTERNAL", f"internal error; the server's log has it under request id {request_id}")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server.

    A unary call that comes without a deadline gets ``default_deadline_s``, with a warning the first time for each
    method. Server streams last until their client, or the server, ends them. gRPC's own services (health,
    reflection) are counted and logged, and need no deadline.
    """

    def __init__(self, registry: CollectorRegistry, *, default_deadline_s: float) -> None:
        self._default_deadline_s = default_deadline_s
        self._warned: set[str] = set()
        self._handled = Counter(
            "trimtab_rpc_server_handled", "Calls that ended, by status code", ["method", "code"], registry=registry
        )
        self._duration = Histogram(
            "trimtab_rpc_server_handling_seconds",
            "Duration of unary calls",
            ["method"],
            registry=registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )
        self._in_flight = Gauge("trimtab_rpc_server_in_flight", "Calls under way", ["method"], registry=registry)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of the method that is called; None stays None (UNIMPLEMENTED)."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else (grpc.unary_stream_rpc_method_handler)
            )
            decode = _decoding(handler.request_deserializer)
            return make(self._streaming(method, inner), decode, handler.response_serializer)
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else (grpc.unary_unary_rpc_method_handler)
        )
        return make(self._unary(method, inner), _decoding(handler.request_deserializer), handler.response_serializer)

    def _unary(self, method: str, inner: Any) -> Any:
        async def handle(request: Any, context: _Context) -> Any:
            async with self._around(method, context, streaming=False) as limit_s:
                _require_decoded(request)
                if limit_s is None:
                    return await inner(request, context)
                try:
                    async with asyncio.timeout(limit_s) as limit:
                        return await inner(request, context)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise DeadlineExceeded(
                        "DEFAULT_DEADLINE", f"not done within the server's {limit_s:g} s; set a deadline"
                    ) from None

        return handle

    def _streaming(self, method: str, inner: Any) -> Any:
        if inspect.isasyncgenfunction(inner):

            async def generate(request: Any, context: _Context) -> AsyncIterator[Any]:
                async with self._around(method, context, streaming=True):
                    _require_decoded(request)
                    async with aclosing(inner(request, context)) as messages:
                        async for message in messages:
                            yield message

            return generate

        async def write(request: Any, context: _Context) -> None:
            async with self._around(method, context, streaming=True):
                _require_decoded(request)
                await inner(request, context)

        return write

    @asynccontextmanager
    async def _around(self, method: str, context: _Context, *, streaming: bool) -> AsyncIterator[float | None]:
        """One call from start to outcome. Yields the time limit to enforce here: None when the client set one."""
        started = time.monotonic()
        request_id = _request_id(context)
        remaining_s: float | None = context.time_remaining()
        limit_s = None
        if remaining_s is None and not streaming and not method.startswith("/grpc."):
            limit_s = remaining_s = self._default_deadline_s
            if method not in self._warned:
                self._warned.add(method)
                log.warning("call without a deadline", method=method, default_deadline_s=limit_s, peer=context.peer())
        scope = CallScope(request_id, None if remaining_s is None else started + remaining_s)
        enter_call(scope)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        in_flight = self._in_flight.labels(method)
        in_flight.inc()
        code = grpc.StatusCode.OK.name
        try:
            context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))
            yield limit_s
        except grpc.aio.AbortError:
            code = _code_of(context)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED.name
            raise
        except Exception as error:
            mapped = map_error(error, request_id)
            code = mapped.code.name
            if mapped.reason == "INTERNAL":
                log.exception("call failed", method=method, peer=context.peer())
            else:
                log.info("call refused", method=method, code=code, reason=mapped.reason, message=mapped.message)
            status = mapped.to_status()
            await context.abort(
                mapped.code,
                status.message,
                ((STATUS_DETAILS_KEY, status.SerializeToString()), (REQUEST_ID_KEY, request_id)),
            )
        finally:
            scope.active = False
            in_flight.dec()
            self._handled.labels(method, code).inc()
            duration_s = time.monotonic() - started
            if not streaming:
                self._duration.labels(method).observe(duration_s)
            log.debug("call ended", method=method, code=code, duration_s=round(duration_s, 6))


class _Undecodable:
    """A placeholder for a request that is no message of the method's type; gRPC alone would answer INTERNAL."""


def _decoding(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def decode(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            return _Undecodable()

    return decode


def _require_decoded(request: Any) -> None:
    if isinstance(request, _Undecodable):
        raise InvalidRequest([Violation("", "the bytes are no message of this method's request type")])


def _request_id(context: _Context) -> str:
    """The caller's id when it is a short printable one, else a fresh id."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and 0 < len(value) <= MAX_REQUEST_ID_LENGTH:
            return value if value.isprintable() else new_request_id()
    return new_request_id()


def _code_of(context: _Context) -> str:
    code = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN.name)
