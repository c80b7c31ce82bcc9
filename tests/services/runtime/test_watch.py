"""List and watch: snapshots, bookmarks, slow readers, lost and restarted servers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.rpc import errors
from trimtab.rpc.clients import channel
from trimtab.rpc.watch import WatchHub, follow

Start = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[object]]


def hub_of(stopping: asyncio.Event, **options: Any) -> WatchHub[str]:
    return WatchHub(snapshot=lambda: ["snapshot"], bookmark=lambda: "bookmark", stopping=stopping, **options)


async def take(stream: AsyncIterator[str], count: int) -> list[str]:
    return [await asyncio.wait_for(anext(stream), 30) for _ in range(count)]


async def test_snapshot_then_changes_then_bookmarks() -> None:
    hub = hub_of(asyncio.Event(), bookmark_interval_s=0.05)
    stream = hub.watch()
    assert await take(stream, 1) == ["snapshot"]
    hub.publish("a")
    hub.publish("b")
    assert await take(stream, 4) == ["a", "b", "bookmark", "bookmark"]
    await stream.aclose()
    assert hub.readers == 0


async def test_a_change_during_the_snapshot_is_neither_lost_nor_doubled() -> None:
    """The reader is registered in the same step in which its snapshot is taken."""
    state = ["one"]
    hub: WatchHub[str] = WatchHub(
        snapshot=lambda: [",".join(state)], bookmark=lambda: "bookmark", stopping=asyncio.Event()
    )
    stream = hub.watch()
    assert await take(stream, 1) == ["one"]
    state.append("two")
    hub.publish("two")
    assert await take(stream, 1) == ["two"]
    assert await take(hub.watch(), 1) == ["one,two"]


async def test_a_reader_may_ask_for_a_part() -> None:
    hub = hub_of(asyncio.Event())
    stream = hub.watch(snapshot=lambda: ["part"], keep=lambda message: message.startswith("a"))
    assert await take(stream, 1) == ["part"]
    for message in ("b1", "a1", "b2", "a2"):
        hub.publish(message)
    assert await take(stream, 2) == ["a1", "a2"]


async def test_a_slow_reader_is_cut_off_and_others_are_not() -> None:
    hub = hub_of(asyncio.Event(), queue_length=4)
    slow, quick = hub.watch(), hub.watch()
    await take(slow, 1)
    await take(quick, 1)
    for index in range(10):
        hub.publish(str(index))
        assert await take(quick, 1) == [str(index)]
    with pytest.raises(errors.ResourceExhausted, match="watch again"):
        await take(slow, 5)
    assert hub.readers == 1


async def test_stopping_ends_every_stream_at_once() -> None:
    stopping = asyncio.Event()
    hub = hub_of(stopping, bookmark_interval_s=30)
    stream = hub.watch()
    await take(stream, 1)
    asyncio.get_running_loop().call_later(0.05, stopping.set)
    started = time.monotonic()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(stream), 30)
    assert time.monotonic() - started < 25, "long before the next bookmark"
    assert hub.readers == 0


async def test_a_reader_that_does_not_read_ends_with_resource_exhausted_over_the_wire(start_demo: Start) -> None:
    demo = await start_demo()
    stream = demo.stub().WatchObservations(pb.WatchObservationsRequest())
    await stream.read()
    big = pb.WatchObservationsResponse(observation=pb.RoleObservation(service="x" * 1_000_000))
    for _ in range(200):
        demo.servicer.hub.publish(big)
        await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read_to_the_end(stream), 30)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert errors.error_reason(caught.value) == "WATCH_TOO_SLOW"


@pytest.mark.parametrize("backlog", [0, 12])
async def test_a_client_that_goes_away_leaves_no_reader_behind(
    start_demo: Start, eventually: Eventually, backlog: int
) -> None:
    """Also when the server is in the middle of sending: large messages that the client never reads."""
    demo = await start_demo()
    stream = demo.stub().WatchObservations(pb.WatchObservationsRequest())
    await stream.read()
    big = pb.WatchObservationsResponse(observation=pb.RoleObservation(service="x" * 1_000_000))
    for _ in range(backlog):
        demo.servicer.hub.publish(big)
    await asyncio.sleep(0.05)
    assert demo.servicer.hub.readers == 1
    stream.cancel()
    await eventually(lambda: demo.servicer.hub.readers == 0, what="the reader's end")


async def read_to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


class Following:
    """A ``follow`` loop under way, and what it saw."""

    def __init__(self, open_stream: Callable[[], Any], **options: Any) -> None:
        self.seen: list[Any] = []
        self.lost = 0
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(
            follow(open_stream, self.seen.append, stopping=self.stopping, on_lost=self._on_lost, **options)
        )

    def _on_lost(self) -> None:
        self.lost += 1

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, 30)

    def kinds(self) -> list[str]:
        return [message.WhichOneof("event") for message in self.seen]


async def test_follow_lists_again_after_a_restart(start_demo: Start, eventually: Eventually) -> None:
    first = await start_demo()
    stub = first.stub()
    following = Following(lambda: stub.WatchObservations(pb.WatchObservationsRequest()), bookmark_timeout_s=10)
    await eventually(lambda: len(following.seen) > 2)
    await first.server.drain()
    second = await start_demo(listen=first.address)
    second.servicer.revision = 7
    await eventually(lambda: following.kinds().count("snapshot") == 2, what="a second snapshot")
    assert [item.snapshot.revision for item in following.seen if item.HasField("snapshot")] == [1, 7]
    assert following.lost == 0, "back within the bookmark time-out"
    await following.stop()


async def test_follow_tells_a_loss_once_and_recovers(start_demo: Start, eventually: Eventually) -> None:
    first = await start_demo()
    stub = first.stub()
    following = Following(lambda: stub.WatchObservations(pb.WatchObservationsRequest()), bookmark_timeout_s=1.0)
    await eventually(lambda: following.seen)
    await first.server.drain()
    started = time.monotonic()
    await eventually(lambda: following.lost == 1, what="the loss")
    assert time.monotonic() - started < 25
    await asyncio.sleep(1.5)
    assert following.lost == 1, "told once, however often it tries to connect"
    await start_demo(listen=first.address)
    await eventually(lambda: following.kinds().count("snapshot") == 2, what="a second snapshot")
    await following.stop()


async def test_follow_leaves_a_server_that_is_connected_and_silent(eventually: Eventually) -> None:
    opened = 0

    async def silent() -> AsyncIterator[str]:
        nonlocal opened
        opened += 1
        yield f"hello {opened}"
        await asyncio.sleep(60)

    following = Following(silent, bookmark_timeout_s=0.1)
    await eventually(lambda: len(following.seen) >= 2)
    assert following.seen[:2] == ["hello 1", "hello 2"]
    assert following.lost >= 1
    await following.stop()


async def test_follow_tells_the_loss_of_a_server_that_never_was(free_port: int, eventually: Eventually) -> None:
    async with channel(f"127.0.0.1:{free_port}") as opened:
        stub = collector_pb2_grpc.CollectorServiceStub(opened)
        following = Following(lambda: stub.WatchObservations(pb.WatchObservationsRequest()), bookmark_timeout_s=0.2)
        await eventually(lambda: following.lost == 1)
        assert following.seen == []
        await following.stop()


async def test_a_defect_of_apply_is_not_taken_for_a_broken_stream() -> None:
    async def one() -> AsyncIterator[str]:
        yield "x"

    def broken(_message: str) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await asyncio.wait_for(follow(one, broken, stopping=asyncio.Event()), 30)


async def test_stopping_ends_follow_while_it_waits_for_a_message(eventually: Eventually) -> None:
    closed = asyncio.Event()

    async def silent() -> AsyncIterator[str]:
        try:
            yield "x"
            await asyncio.sleep(60)
        finally:
            closed.set()

    following = Following(silent, bookmark_timeout_s=60)
    await eventually(lambda: following.seen)
    await following.stop()
    assert closed.is_set(), "the stream was closed"
    assert following.lost == 0
