"""From a server's page to an observation over gRPC, on real sockets and a real store."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from aiohttp import web

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.store.observations import signal

OK = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


def file_sd(path: Path, *servers: tuple[str, str], service: str = "chat", role: str = "colocated") -> Path:
    """A targets file with (replica, host:port) pairs of one role."""
    groups = [
        {"targets": [address], "labels": {"service": service, "role": role, "replica": replica, "gpus": "2"}}
        for replica, address in servers
    ]
    path.write_text(json.dumps(groups))
    return path


def serving(page: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """A handler of the full and the filtered page."""

    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=page(), headers=OK)

    return answer


class Load:
    """Counters that grow with time: so many tokens a second."""

    def __init__(self, vllm_page: Callable[..., bytes], *, decode_tps: float) -> None:
        self._page = vllm_page
        self._decode_tps = decode_tps
        self._started = asyncio.get_running_loop().time()

    def page(self) -> bytes:
        elapsed_s = asyncio.get_running_loop().time() - self._started
        generated = self._decode_tps * elapsed_s
        return self._page(running=3, waiting=1, kv=0.5, generated=generated, computed=generated / 2, finished=elapsed_s)


async def observation(
    stub: "pb.collector_pb2_grpc.CollectorServiceAsyncStub",
    service: str,
    role: int,
    until: Callable[[pb.RoleObservation], bool],
) -> pb.RoleObservation:
    """The first observation of a role that satisfies ``until``."""
    last: object = None
    for _ in range(200):
        try:
            response = await stub.GetObservation(
                pb.GetObservationRequest(key=pb.RoleKey(service=service, role=role)), timeout=2
            )
        except grpc.aio.AioRpcError as error:
            last = error.code()
        else:
            last = response.observation
            if until(response.observation):
                return response.observation
        await asyncio.sleep(0.05)
    raise AssertionError(f"no such observation came; the last was {last}")


async def test_a_servers_page_becomes_an_observation(start_collector, page_server, vllm_page, tmp_path) -> None:
    load = Load(vllm_page, decode_tps=1000.0)
    server = await page_server(serving(load.page))
    collector = await start_collector(targets_files=[file_sd(tmp_path / "t.json", ("chat-0", server.host_and_port))])

    found = await observation(
        collector.stub,
        "chat",
        types_pb2.ROLE_COLOCATED,
        lambda item: signal(item, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_OK,
    )

    assert signal(found, pb.SIGNAL_DECODE_TPS).value == pytest.approx(1000.0, rel=0.1)
    assert signal(found, pb.SIGNAL_PREFILL_TPS).value == pytest.approx(500.0, rel=0.1)
    assert signal(found, pb.SIGNAL_RUNNING).value == 3.0
    assert signal(found, pb.SIGNAL_WAITING).value == 1.0
    assert signal(found, pb.SIGNAL_KV_USAGE_RATIO).value == 0.5
    assert list(found.reported_replicas) == ["chat-0"]
    assert found.window_end.ToMicroseconds() - found.window_start.ToMicroseconds() == 1_000_000
