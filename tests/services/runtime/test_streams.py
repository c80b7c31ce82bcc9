"""Bounded streams."""

import asyncio

import pytest

from trimtab.api.common.v1 import types_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import CorruptEntry, StoreUnavailable
from trimtab.store.lease import fenced_write
from trimtab.store.streams import BoundedStream

KEY = keys.decisions()


def message(number: int) -> types_pb2.Fencing:
    return types_pb2.Fencing(token=number)


def tokens(entries: list[object]) -> list[int]:
    return [entry.message.token for entry in entries]  # type: ignore[attr-defined]


async def test_reads_in_order_from_either_end(store: Store) -> None:
    stream = BoundedStream(store, KEY, types_pb2.Fencing, maxlen=100)
    ids = [await stream.append(message(number)) for number in range(5)]
    assert tokens(await stream.read_last(2)) == [3, 4]
    assert tokens(await stream.read_last(50)) == [0, 1, 2, 3, 4]
    assert tokens(await stream.read_after("0")) == [0, 1, 2, 3, 4]
    assert tokens(await stream.read_after(ids[2])) == [3, 4]
    assert tokens(await stream.read_after("0", count=2)) == [0, 1]
    assert await stream.read_after(ids[-1]) == []
    assert [entry.id for entry in await stream.read_last(5)] == ids


async def test_an_empty_stream_is_empty(store: Store) -> None:
    stream = BoundedStream(store, KEY, types_pb2.Fencing, maxlen=100)
    assert (await stream.read_last(5), await stream.read_after("0"), await stream.length()) == ([], [], 0)


async def test_never_holds_more_than_its_length(store: Store) -> None:
    stream = BoundedStream(store, KEY, types_pb2.Fencing, maxlen=3)
    for number in range(10):
        await stream.append(message(number))
    assert await stream.length() == 3
    assert tokens(await stream.read_after("0")) == [7, 8, 9]


async def test_forgets_what_is_too_old(store: Store) -> None:
    stream = BoundedStream(store, KEY, types_pb2.Fencing, maxlen=100, retention_s=0.05)
    await stream.append(message(1))
    await asyncio.sleep(0.1)
    await stream.append(message(2))
    assert tokens(await stream.read_after("0")) == [2]


async def test_reads_by_time(store: Store) -> None:
    stream = BoundedStream(store, KEY, types_pb2.Fencing, maxlen=100)
    for second in range(1, 6):
        await store.redis.xadd(KEY, {"m": message(second).SerializeToString()}, id=f"{second}000-0")
    assert tokens(await stream.read_between(2.0, 4.0)) == [2, 3], "half-open"
    assert tokens(await stream.read_between(0.0, 10.0, count=2)) == [4, 5], "the newest win"
    assert await stream.read_between(4.0, 4.0) == []
    assert [entry.time_s for entry in await stream.read_between(3.0, 3.001)] == [3.0]


async def test_can_be_appended_to_under_a_lease(store: Store) -> None:
    stream = BoundedStream(store, KEY, types_pb2.Fencing, maxlen=2)
    for number in range(4):
        await fenced_write(store, keys.POLICY_ENGINE, 1, [stream.append_command(message(number))])
    assert tokens(await stream.read_after("0")) == [2, 3]


async def test_an_entry_that_does_not_parse_names_itself(store: Store) -> None:
    await store.redis.xadd(KEY, {"other": b"x"}, id="7-0")
    with pytest.raises(CorruptEntry, match=r"decisions, entry 7-0"):
        await BoundedStream(store, KEY, types_pb2.Fencing, maxlen=5).read_last(1)


async def test_bounds_are_checked(store: Store) -> None:
    with pytest.raises(ValueError, match="maxlen"):
        BoundedStream(store, KEY, types_pb2.Fencing, maxlen=0)
    with pytest.raises(ValueError, match="retention_s"):
        BoundedStream(store, KEY, types_pb2.Fencing, maxlen=1, retention_s=0)
    with pytest.raises(ValueError, match="count"):
        await BoundedStream(store, KEY, types_pb2.Fencing, maxlen=1).read_last(0)


async def test_a_store_that_is_away_is_said_to_be(free_port: int) -> None:
    stream = BoundedStream(Store(f"redis://127.0.0.1:{free_port}/0"), KEY, types_pb2.Fencing, maxlen=1)
    with pytest.raises(StoreUnavailable):
        await stream.append(message(1))
