"""Versioned documents: etags, revisions, history, fencing."""

import asyncio

import pytest

from trimtab.api.common.v1 import types_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.documents import Documents
from trimtab.store.errors import CorruptEntry, EtagMismatch, FencedOff
from trimtab.store.lease import StoreLease

OWNER = keys.POLICY_ENGINE


def fencing(token: int) -> types_pb2.Fencing:
    return types_pb2.Fencing(writer="w", token=token)


@pytest.fixture
def documents(store: Store) -> Documents[types_pb2.Fencing]:
    return Documents(store, OWNER, "test", types_pb2.Fencing, history=3)


async def test_put_get_list_delete(documents: Documents[types_pb2.Fencing]) -> None:
    assert await documents.get("a") is None
    assert (await documents.list()).documents == []
    second = await documents.put("b", fencing(2))
    first = await documents.put("a", fencing(1))
    assert (second.revision, first.revision) == (1, 2)
    assert await documents.get("a") == first
    listing = await documents.list()
    assert [document.name for document in listing.documents] == ["a", "b"]
    assert listing.revision == 2
    assert await documents.delete("a") is True
    assert await documents.delete("a") is False
    assert await documents.get("a") is None
    assert await documents.revision() == 3, "a removal is a change, a removal of nothing is none"


async def test_an_empty_message_is_a_document(documents: Documents[types_pb2.Fencing]) -> None:
    await documents.put("empty", types_pb2.Fencing())
    found = await documents.get("empty")
    assert found is not None
    assert found.message == types_pb2.Fencing()


async def test_bytes_that_look_like_the_header_are_kept(documents: Documents[types_pb2.Fencing]) -> None:
    message = types_pb2.Fencing(writer="\n12 34\n*", token=10)
    await documents.put("a", message)
    found = await documents.get("a")
    assert found is not None
    assert found.message == message


async def test_a_writer_that_missed_a_change_is_refused(documents: Documents[types_pb2.Fencing]) -> None:
    first = await documents.put("a", fencing(1), expected_etag="")
    second = await documents.put("a", fencing(2), expected_etag=first.etag)
    with pytest.raises(EtagMismatch, match="changed meanwhile") as caught:
        await documents.put("a", fencing(3), expected_etag=first.etag)
    assert caught.value.current_etag == second.etag
    with pytest.raises(EtagMismatch, match="changed meanwhile"):
        await documents.delete("a", expected_etag=first.etag)
    with pytest.raises(EtagMismatch, match="exists already"):
        await documents.put("a", fencing(3), expected_etag="")
    with pytest.raises(EtagMismatch, match="does not exist"):
        await documents.put("b", fencing(3), expected_etag="1")
    assert await documents.get("a") == second


async def test_of_many_concurrent_writers_one_wins(documents: Documents[types_pb2.Fencing]) -> None:
    base = await documents.put("a", fencing(0))
    results = await asyncio.gather(
        *(documents.put("a", fencing(index), expected_etag=base.etag) for index in range(1, 21)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, EtagMismatch) for result in results) == 19


async def test_an_etag_is_never_used_again(documents: Documents[types_pb2.Fencing]) -> None:
    first = await documents.put("a", fencing(1))
    await documents.delete("a")
    second = await documents.put("a", fencing(1))
    assert first.etag != second.etag


async def test_history_is_bounded_newest_first(store: Store, documents: Documents[types_pb2.Fencing]) -> None:
    for token in range(1, 6):
        await documents.put("a", fencing(token))
    history = await documents.history("a")
    assert [document.message.token for document in history] == [5, 4, 3]
    assert [document.revision for document in history] == [5, 4, 3]
    assert await store.redis.llen(keys.document_history(OWNER, "test", "a")) == 3
    assert await documents.version("a", 4) == history[1]
    assert await documents.version("a", 1) is None
    await documents.delete("a")
    assert await documents.history("a") == []


async def test_written_time_is_the_stores(store: Store, documents: Documents[types_pb2.Fencing]) -> None:
    seconds, microseconds = await store.redis.time()
    document = await documents.put("a", fencing(1))
    assert document.written_s == pytest.approx(seconds + microseconds / 1e6, abs=1)


async def test_a_fenced_off_writer_changes_nothing(store: Store, documents: Documents[types_pb2.Fencing]) -> None:
    old = StoreLease(store, OWNER, "old")
    token = await old.acquire_or_renew()
    await documents.put("a", fencing(1), token=token)
    await old.release()
    await StoreLease(store, OWNER, "new").acquire_or_renew()
    with pytest.raises(FencedOff):
        await documents.put("a", fencing(2), token=token)
    with pytest.raises(FencedOff):
        await documents.delete("a", token=token)
    found = await documents.get("a")
    assert found is not None
    assert found.message == fencing(1)


@pytest.mark.parametrize("raw", [b"", b"garbage", b"1 2", b"x y\n", b"1 2\n\xff\xff"])
async def test_a_value_that_does_not_parse_names_its_key(
    store: Store, documents: Documents[types_pb2.Fencing], raw: bytes
) -> None:
    await store.redis.hset(keys.documents(OWNER, "test"), "a", raw)
    with pytest.raises(CorruptEntry, match=r"trimtab:{policy-engine}:docs:test, field a"):
        await documents.get("a")


def test_history_needs_room(store_url: str) -> None:
    with pytest.raises(ValueError, match="history"):
        Documents(Store(store_url), OWNER, "test", types_pb2.Fencing, history=0)
