"""What stands between the gateway and what it speaks to, in a chaos run: late, and late to the end."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from lab.chaos.fault_proxy import FaultProxy
from lab.chaos.slow_link import SlowLink
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.registry import EndpointRegistry

DELAY_S = 0.3


class Server:
    """Keeps what it is sent, and when; answers each piece at once."""

    def __init__(self) -> None:
        self.received: list[tuple[float, bytes]] = []
        self.gone = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1024):
            self.received.append((time.monotonic(), piece))
            writer.write(b"+" + piece)
        writer.close()
        self.gone.set()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, int]]:
    kept = Server()
    listening = await asyncio.start_server(kept.handle, "127.0.0.1", 0)
    yield kept, listening.sockets[0].getsockname()[1]
    listening.close()


async def test_what_a_client_sends_comes_late_in_order_and_after_it_has_hung_up(
    server: tuple[Server, int], eventually: Callable[..., Awaitable[object]]
) -> None:
    kept, port = server
    delay_s = 0.0
    asked: list[float] = []

    def delay() -> float:
        asked.append(delay_s)
        return delay_s

    line = SlowLink("127.0.0.1", port, delay_s=delay)
    await line.start()
    host, _, line_port = line.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(line_port))
    writer.write(b"a")
    assert await asyncio.wait_for(reader.read(8), 30) == b"+a"
    delay_s, sent_at = DELAY_S, time.monotonic()
    writer.write(b"b")
    await writer.drain()
    await eventually(lambda: asked == [0.0, DELAY_S], what="the line's question for the delay of b")
    delay_s = 0.0
    writer.write(b"c")
    await writer.drain()
    writer.close()
    await asyncio.wait_for(kept.gone.wait(), 30)
    assert b"".join(piece for _, piece in kept.received) == b"abc"
    assert kept.received[1][0] - sent_at >= DELAY_S
    await line.close()


async def test_a_server_that_is_away_ends_the_connection(free_port: int) -> None:
    line = SlowLink("127.0.0.1", free_port, delay_s=lambda: 0.0)
    await line.start()
    host, _, line_port = line.address.partition(":")
    reader, _writer = await asyncio.open_connection(host, int(line_port))
    assert await asyncio.wait_for(reader.read(8), 30) == b""
    await line.close()


async def test_what_came_by_the_stream_is_complete_only_while_the_registry_holds_nothing_newer(store: Store) -> None:
    registry = EndpointRegistry(store, "local")
    fault_proxy = FaultProxy(None, registry)  # type: ignore[arg-type]  # nobody is called
    assert not await fault_proxy.knows_all(), "a store that holds nothing says nothing"
    known: list[bool] = []
    for revision in (7, 8, 8, 9):
        head = registry.new_head(revision=revision, leader_term=1, lease_s=3.0, now_s=time.time())
        await store.redis.hset(keys.endpoints("local"), "@head", head.SerializeToString())
        known.append(await fault_proxy.knows_all())
        fault_proxy._note(pb.WatchEndpointsResponse(revision=8))
    assert known == [False, True, True, False]
