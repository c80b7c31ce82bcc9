"""A small service on real sockets, for the tests of the gRPC runtime."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.config.settings import ServiceSettings
from trimtab.rpc.clients import ClientTls, channel
from trimtab.rpc.errors import Unavailable
from trimtab.rpc.run import ServiceContext
from trimtab.rpc.server import RpcServer
from trimtab.rpc.watch import WatchHub

DEMO_SERVICE = "trimtab.collector.v1.CollectorService"


class DemoServicer(collector_pb2_grpc.CollectorServiceServicer):
    """ListTargets does what the test says; WatchObservations streams a hub."""

    def __init__(self, context: ServiceContext) -> None:
        self.behaviour: Callable[[pb.ListTargetsRequest, Any], Awaitable[pb.ListTargetsResponse]] = self.answer
        self.calls = 0
        self.demand_reports = 0
        self.revision = 1
        self.hub: WatchHub[pb.WatchObservationsResponse] = WatchHub(
            snapshot=lambda: [
                pb.WatchObservationsResponse(snapshot=pb.ObservationSnapshot(revision=self.revision)),
            ],
            bookmark=lambda: pb.WatchObservationsResponse(bookmark=pb.Bookmark(revision=self.revision)),
            stopping=context.stopping,
            bookmark_interval_s=0.05,
            queue_length=16,
        )

    async def answer(self, request: pb.ListTargetsRequest, _context: Any) -> pb.ListTargetsResponse:
        return pb.ListTargetsResponse(next_page_token=request.page_token)

    async def ListTargets(self, request: pb.ListTargetsRequest, context: Any) -> pb.ListTargetsResponse:
        self.calls += 1
        return await self.behaviour(request, context)

    async def ReportDemand(self, request: pb.ReportDemandRequest, context: Any) -> pb.ReportDemandResponse:
        self.demand_reports += 1
        raise Unavailable("X", "not now")

    async def WatchObservations(
        self, request: pb.WatchObservationsRequest, context: Any
    ) -> AsyncIterator[pb.WatchObservationsResponse]:
        async for message in self.hub.watch():
            yield message


@dataclass
class DemoServer:
    """The running service and how to reach it."""

    settings: ServiceSettings
    context: ServiceContext
    server: RpcServer
    servicer: DemoServicer
    stack: AsyncExitStack = field(repr=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def open_channel(self, tls: ClientTls | None = None) -> grpc.aio.Channel:
        opened = channel(self.address, tls=tls)
        self.stack.push_async_callback(opened.close)
        return opened

    def stub(self, tls: ClientTls | None = None) -> "collector_pb2_grpc.CollectorServiceAsyncStub":
        return collector_pb2_grpc.CollectorServiceStub(self.open_channel(tls))


@pytest.fixture
async def start_demo() -> AsyncIterator[Callable[..., Awaitable[DemoServer]]]:
    """``await start_demo(listen=…, default_deadline_s=…)``: started; drained at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(*, default_deadline_s: float = 10.0, **settings: Any) -> DemoServer:
            chosen = ServiceSettings(**{"listen": "127.0.0.1:0", "drain_grace_s": 0.2, **settings})
            context = ServiceContext("demo")
            server = RpcServer(chosen, context, default_deadline_s=default_deadline_s)
            servicer = DemoServicer(context)
            server.add(collector_pb2_grpc.add_CollectorServiceServicer_to_server, servicer, DEMO_SERVICE)
            await server.start()
            stack.push_async_callback(server.drain)
            return DemoServer(chosen, context, server, servicer, stack)

        yield start
        await asyncio.sleep(0)
