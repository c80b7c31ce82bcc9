"""The server's bootstrap and what surrounds every call, over real sockets."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.errors import StartupError
from trimtab.rpc import errors
from trimtab.rpc.calls import REQUEST_ID_KEY, current_call
from trimtab.store.errors import EtagMismatch, FencedOff, StoreUnavailable

Start = Callable[..., Awaitable[Any]]
SERVICE = "trimtab.collector.v1.CollectorService"
METHOD = f"/{SERVICE}/ListTargets"


def raising(error: Exception) -> Callable[[Any, Any], Awaitable[pb.ListTargetsResponse]]:
    async def behave(_request: Any, _context: Any) -> pb.ListTargetsResponse:
        raise error

    return behave


async def refused(stub: Any, **arguments: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListTargets(pb.ListTargetsRequest(), **arguments)
    return caught.value


@pytest.mark.parametrize(
    ("error", "code", "reason", "words"),
    [
        (errors.NotFound("TARGET_NOT_FOUND", "no target x"), "NOT_FOUND", "TARGET_NOT_FOUND", "no target x"),
        (errors.AlreadyExists("X", "is there"), "ALREADY_EXISTS", "X", "is there"),
        (errors.FailedPrecondition("EXPIRED", "too late"), "FAILED_PRECONDITION", "EXPIRED", "too late"),
        (errors.Aborted("ETAG", "changed"), "ABORTED", "ETAG", "changed"),
        (errors.ResourceExhausted("FULL", "no room"), "RESOURCE_EXHAUSTED", "FULL", "no room"),
        (StoreUnavailable("refused"), "UNAVAILABLE", "STORE_UNAVAILABLE", "store does not answer"),
        (
            EtagMismatch("pool", expected_etag="1", current_etag="2"),
            "ABORTED",
            "ETAG_MISMATCH",
            "'pool' was changed meanwhile",
        ),
        (FencedOff("policy-engine", token=1, current_token=2), "FAILED_PRECONDITION", "FENCED_OFF", "2 is newer"),
        (ValueError("a secret"), "INTERNAL", "INTERNAL", "internal error"),
    ],
)
async def test_errors_arrive_with_code_reason_and_text(
    start_demo: Start, error: Exception, code: str, reason: str, words: str
) -> None:
    demo = await start_demo()
    demo.servicer.behaviour = raising(error)
    caught = await refused(demo.stub())
    assert caught.code().name == code
    assert errors.error_reason(caught) == reason
    assert words in errors.describe(caught)
    assert "secret" not in errors.describe(caught)
    info = errors.error_info(caught)
    assert info is not None
    assert info.domain == "trimtab.dev"


async def test_fenced_off_tells_the_highest_token(start_demo: Start) -> None:
    demo = await start_demo()
    demo.servicer.behaviour = raising(FencedOff("policy-engine", token=3, current_token=9))
    info = errors.error_info(await refused(demo.stub()))
    assert info is not None
    assert info.metadata["highest_token"] == "9"


async def test_an_invalid_request_names_each_field(start_demo: Start) -> None:
    demo = await start_demo()
    demo.servicer.behaviour = raising(
        errors.InvalidRequest(
            [errors.Violation("a.b", "is required"), errors.Violation("c[0]", "is 3, must be at most 2")]
        )
    )
    caught = await refused(demo.stub())
    assert caught.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert errors.field_violations(caught) == [
        errors.Violation("a.b", "is required"),
        errors.Violation("c[0]", "is 3, must be at most 2"),
    ]
    assert errors.describe(caught) == "invalid argument: a.b: is required; c[0]: is 3, must be at most 2"


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFound("NO_SUCH", "no " + "é" * 5_000_000, {"name": "n" * 100_000}),
        errors.InvalidRequest([errors.Violation(f"a[{i}]", "é" * 500) for i in range(100)]),
        errors.InvalidRequest([errors.Violation("f" * 100_000, "is \ud800 no text")]),
    ],
)
async def test_an_error_of_any_size_arrives_whole_in_kind(start_demo: Start, error: errors.RpcError) -> None:
    demo = await start_demo()
    demo.servicer.behaviour = raising(error)
    async with grpc.aio.insecure_channel(demo.address) as raw:
        caught = await refused(collector_pb2_grpc.CollectorServiceStub(raw), timeout=5)
    assert (caught.code(), errors.error_reason(caught)) == (error.code, error.reason)
    sent = sum(len(key) + len(value) for key, value in caught.trailing_metadata() or ())
    assert sent * 4 / 3 + 3 * len((caught.details() or "").encode()) < 8192
    if isinstance(error, errors.InvalidRequest) and len(error.violations) > 1:
        assert errors.field_violations(caught)[-1].description == "and 95 more"


@pytest.mark.parametrize("method", ["ListTargets", "WatchObservations"])
async def test_bytes_that_are_no_request_are_refused_as_such(start_demo: Start, method: str) -> None:
    demo = await start_demo()
    async with grpc.aio.insecure_channel(demo.address) as raw:
        open_call = raw.unary_stream if method.startswith("Watch") else raw.unary_unary
        call = open_call(f"/{SERVICE}/{method}")(b"\xff\xff\xff", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if method.startswith("Watch") else call)
    assert (caught.value.code().name, errors.error_reason(caught.value)) == ("INVALID_ARGUMENT", "INVALID_REQUEST")


async def test_a_failing_upstream_is_told_apart_from_a_defect(start_demo: Start) -> None:
    upstream, demo = await start_demo(), await start_demo()
    upstream_stub = upstream.stub()

    async def ask_upstream(request: pb.ListTargetsRequest, _context: Any) -> pb.ListTargetsResponse:
        return await upstream_stub.ListTargets(request)

    demo.servicer.behaviour = ask_upstream
    stub = demo.stub()
    upstream.servicer.behaviour = raising(errors.Unavailable("X", "gone"))
    assert errors.error_reason(await refused(stub)) == "UPSTREAM_UNAVAILABLE"
    upstream.servicer.behaviour = raising(errors.NotFound("X", "nothing"))
    caught = await refused(stub)
    assert (caught.code().name, errors.error_reason(caught)) == ("INTERNAL", "UPSTREAM_FAILED")


async def test_unavailable_is_retried_except_where_a_repeat_would_count_twice(start_demo: Start) -> None:
    demo = await start_demo()
    demo.servicer.behaviour = raising(errors.Unavailable("X", "not now"))
    stub = demo.stub()
    await refused(stub)
    assert demo.servicer.calls == 3
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.ReportDemand(pb.ReportDemandRequest())
    assert demo.servicer.demand_reports == 1


async def test_a_call_without_a_deadline_gets_the_servers_and_a_warning(start_demo: Start) -> None:
    demo = await start_demo(default_deadline_s=0.1)

    async def hang(_request: Any, _context: Any) -> pb.ListTargetsResponse:
        await asyncio.sleep(30)
        return pb.ListTargetsResponse()

    demo.servicer.behaviour = hang
    async with grpc.aio.insecure_channel(demo.address) as raw:
        stub = collector_pb2_grpc.CollectorServiceStub(raw)
        with structlog.testing.capture_logs() as logs:
            started = time.monotonic()
            caught = await refused(stub)
            await refused(stub)
    assert (caught.code().name, errors.error_reason(caught)) == ("DEADLINE_EXCEEDED", "DEFAULT_DEADLINE")
    assert time.monotonic() - started < 25
    assert [entry["method"] for entry in logs if entry["event"] == "call without a deadline"] == [METHOD]


async def test_a_time_out_inside_a_handler_is_not_taken_for_the_deadline(start_demo: Start) -> None:
    demo = await start_demo()
    demo.servicer.behaviour = raising(TimeoutError())
    async with grpc.aio.insecure_channel(demo.address) as raw:
        caught = await refused(collector_pb2_grpc.CollectorServiceStub(raw))
    assert errors.error_reason(caught) == "INTERNAL"


async def test_the_clients_deadline_ends_the_handler(
    start_demo: Start, eventually: Callable[..., Awaitable[None]]
) -> None:
    demo = await start_demo()
    cancelled = asyncio.Event()

    async def hang(_request: Any, _context: Any) -> pb.ListTargetsResponse:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return pb.ListTargetsResponse()

    demo.servicer.behaviour = hang
    caught = await refused(demo.stub(), timeout=1.0)
    assert caught.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(cancelled.wait(), 30)
    await eventually(
        lambda: (
            demo.context.registry.get_sample_value(
                "trimtab_rpc_server_handled_total", {"method": METHOD, "code": "CANCELLED"}
            )
            == 1
        )
    )
    assert demo.context.registry.get_sample_value("trimtab_rpc_server_in_flight", {"method": METHOD}) == 0


async def test_deadline_and_request_id_travel_to_the_next_service(start_demo: Start) -> None:
    upstream, demo = await start_demo(), await start_demo()
    upstream_stub = upstream.stub()
    seen: dict[str, Any] = {}

    async def look(_request: Any, context: Any) -> pb.ListTargetsResponse:
        call = current_call()
        assert call is not None
        seen.update(request_id=call.request_id, remaining_s=context.time_remaining())
        return pb.ListTargetsResponse()

    async def ask_upstream(request: pb.ListTargetsRequest, _context: Any) -> pb.ListTargetsResponse:
        return await upstream_stub.ListTargets(request)

    upstream.servicer.behaviour = look
    demo.servicer.behaviour = ask_upstream
    call = demo.stub().ListTargets(pb.ListTargetsRequest(), timeout=3.0, metadata=((REQUEST_ID_KEY, "abc-1"),))
    await call
    assert seen["request_id"] == "abc-1"
    assert 0 < seen["remaining_s"] < 4, "less than the default of a call"
    assert dict(await call.trailing_metadata())[REQUEST_ID_KEY] == "abc-1"


async def test_work_that_outlives_its_call_is_not_bound_by_the_calls_deadline(start_demo: Start) -> None:
    upstream, demo = await start_demo(), await start_demo()
    upstream_stub = upstream.stub()
    answered = asyncio.Event()
    kept: list[asyncio.Task[Any]] = []

    async def later() -> pb.ListTargetsResponse:
        await answered.wait()
        return await upstream_stub.ListTargets(pb.ListTargetsRequest(page_token="late"))

    async def spawn(_request: Any, _context: Any) -> pb.ListTargetsResponse:
        kept.append(asyncio.create_task(later()))
        return pb.ListTargetsResponse()

    stub = demo.stub()
    await stub.ListTargets(pb.ListTargetsRequest())
    demo.servicer.behaviour = spawn
    await stub.ListTargets(pb.ListTargetsRequest(), timeout=1.5)
    await asyncio.sleep(1.55)
    answered.set()
    assert (await kept[0]).next_page_token == "late"


async def test_a_hostile_request_id_is_replaced(start_demo: Start) -> None:
    demo = await start_demo()
    call = demo.stub().ListTargets(pb.ListTargetsRequest(), metadata=((REQUEST_ID_KEY, "x" * 4000),))
    await call
    assert len(dict(await call.trailing_metadata())[REQUEST_ID_KEY]) == 32


async def test_outcomes_are_counted_by_code(start_demo: Start, eventually: Callable[..., Awaitable[None]]) -> None:
    demo = await start_demo()
    registry = demo.context.registry
    stub = demo.stub()
    await stub.ListTargets(pb.ListTargetsRequest())
    demo.servicer.behaviour = raising(errors.NotFound("X", "x"))
    await refused(stub)
    await refused(stub)

    def counts() -> list[float | None]:
        return [
            registry.get_sample_value("trimtab_rpc_server_handled_total", {"method": METHOD, "code": code})
            for code in ("OK", "NOT_FOUND")
        ]

    # A call is counted when it is over on the server, which is a moment after its client knows.
    await eventually(lambda: counts() == [1, 2])
    assert registry.get_sample_value("trimtab_rpc_server_handling_seconds_count", {"method": METHOD}) == 3


async def test_an_unknown_method_is_unimplemented_and_makes_no_series(start_demo: Start) -> None:
    demo = await start_demo()
    method = demo.open_channel().unary_unary(f"/{SERVICE}/Nonsense")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    names = {sample.labels.get("method") for metric in demo.context.registry.collect() for sample in metric.samples}
    assert not any("Nonsense" in (name or "") for name in names)


async def health(demo: Any, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(demo.open_channel())
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_health_is_kept_per_service(start_demo: Start) -> None:
    demo = await start_demo()
    assert [await health(demo, name) for name in ("", SERVICE)] == ["SERVING", "SERVING"]
    demo.server.set_serving(SERVICE, False)
    assert [await health(demo, name) for name in ("", SERVICE)] == ["NOT_SERVING", "NOT_SERVING"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(demo, "other.Service")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(ValueError, match="was not added"):
        demo.server.set_serving("other.Service", True)


async def test_drain_tells_health_watchers_ends_watches_and_lets_calls_finish(start_demo: Start) -> None:
    demo = await start_demo(drain_grace_s=60.0)
    entered, finish = asyncio.Event(), asyncio.Event()

    async def slow(_request: Any, _context: Any) -> pb.ListTargetsResponse:
        entered.set()
        await finish.wait()
        return pb.ListTargetsResponse(next_page_token="done")

    demo.servicer.behaviour = slow
    opened = demo.open_channel()
    stub = collector_pb2_grpc.CollectorServiceStub(opened)
    health_stub = health_pb2_grpc.HealthStub(opened)
    states: list[int] = []

    async def watch_health() -> None:
        async for response in health_stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
            states.append(response.status)

    async def watch_observations() -> None:
        async for _ in stub.WatchObservations(pb.WatchObservationsRequest()):
            watching.set()

    watching = asyncio.Event()
    watches = asyncio.gather(watch_health(), watch_observations())
    call = asyncio.ensure_future(stub.ListTargets(pb.ListTargetsRequest()))
    await asyncio.wait_for(entered.wait(), 30)
    await asyncio.wait_for(watching.wait(), 30)

    started = time.monotonic()
    drain = asyncio.create_task(demo.server.drain())
    await asyncio.wait_for(watches, 30)
    assert states == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    assert not drain.done(), "the call under way holds the drain"
    finish.set()
    assert (await call).next_page_token == "done"
    await asyncio.wait_for(drain, 30)
    assert time.monotonic() - started < 50, "nothing else waited for the grace period"
    assert demo.context.stopping.is_set()


async def test_a_call_that_does_not_end_is_cut_off_after_the_grace(start_demo: Start) -> None:
    demo = await start_demo(drain_grace_s=0.1)
    entered = asyncio.Event()

    async def hang(_request: Any, _context: Any) -> pb.ListTargetsResponse:
        entered.set()
        await asyncio.sleep(60)
        return pb.ListTargetsResponse()

    demo.servicer.behaviour = hang
    call = asyncio.ensure_future(demo.stub().ListTargets(pb.ListTargetsRequest()))
    await asyncio.wait_for(entered.wait(), 30)
    await asyncio.wait_for(demo.server.drain(), 30)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call


async def test_a_busy_port_is_named(start_demo: Start) -> None:
    first = await start_demo()
    with pytest.raises(StartupError, match=rf"{first.address}: the port is in use"):
        await start_demo(listen=first.address)


async def test_an_address_of_another_machine_is_named(start_demo: Start) -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1:0: Cannot assign requested address"):
        await start_demo(listen="192.0.2.1:0", insecure_listen=True)


async def test_a_port_is_free_again_after_the_drain(start_demo: Start) -> None:
    first = await start_demo()
    await first.stub().ListTargets(pb.ListTargetsRequest())
    await first.server.drain()
    second = await start_demo(listen=first.address)
    assert second.server.port == first.server.port


@pytest.mark.parametrize("enabled", [True, False])
async def test_reflection_by_flag(start_demo: Start, enabled: bool) -> None:
    demo = await start_demo(reflection=enabled)
    stub = reflection_pb2_grpc.ServerReflectionStub(demo.open_channel())
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)]))
    if enabled:
        response = await call.read()
        file = descriptor_pb2.FileDescriptorProto.FromString(response.file_descriptor_response.file_descriptor_proto[0])
        assert file.service[0].name == "CollectorService"
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_garbage_on_the_port_harms_nobody(start_demo: Start) -> None:
    demo = await start_demo()
    with socket.create_connection(("127.0.0.1", demo.server.port), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 16)
        await demo.stub().ListTargets(pb.ListTargetsRequest())
    assert demo.servicer.calls == 1


async def test_a_request_that_does_not_parse_is_refused(start_demo: Start) -> None:
    demo = await start_demo()
    method = demo.open_channel().unary_unary(METHOD)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"\xff\xff\xff")
    assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN)
    assert demo.servicer.calls == 0
