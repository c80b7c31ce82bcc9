"""Hashes and streams of records in a real store: each refused by itself, and kept as it is."""

import pytest
import structlog

from tests.support.records import garbage, has_unknown_field, newer, truncated, with_unknown_field
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import fenced_write
from trimtab.store.record_hash import RecordHash, RefusedLog
from trimtab.store.record_streams import RecordStream
from trimtab.store.records import Refused
from trimtab.store.schedule_results import SCHEDULE_RESULT

KEY = keys.schedule_results()


def result_of(service: str, detail: str = "") -> scheduler_pb2.ScalingResult:
    return scheduler_pb2.ScalingResult(service=service, detail=detail)


def fault(name: str, result: scheduler_pb2.ScalingResult) -> str:
    return "" if result.service == name else f"is of service {result.service!r}"


def hash_of(**entries: bytes) -> RecordHash[scheduler_pb2.ScalingResult]:
    found = RecordHash(SCHEDULE_RESULT, KEY, fault=fault)
    for name, raw in entries.items():
        found.take(name, raw)
    return found


GOOD = SCHEDULE_RESULT.encode(result_of("chat"))


@pytest.mark.parametrize("spoil", [newer, truncated, garbage])
async def test_a_refused_record_is_not_written_over_and_seen_again_once_it_is_restored(spoil, store: Store):
    bad = spoil(SCHEDULE_RESULT, GOOD)
    await store.redis.hset(KEY, "chat", bad)
    found = hash_of(chat=bad, code=SCHEDULE_RESULT.encode(result_of("code")))
    assert set(found.values) == {"code"}
    assert set(found.refused) == {"chat"}
    with pytest.raises(CorruptEntry, match="field chat: "):
        found.command("chat", result_of("chat"))
    await found.look_again(store)
    assert set(found.refused) == {"chat"}
    await store.redis.hset(KEY, "chat", GOOD)
    await found.look_again(store)
    assert found.refused == {}
    assert found.values["chat"] == result_of("chat")


async def test_a_refused_record_that_an_operator_removes_is_no_more(store: Store):
    found = hash_of(chat=b"x")
    await found.look_again(store)
    assert (found.refused, found.values) == ({}, {})
    await fenced_write(store, keys.PRESCHEDULER, 1, [found.command("chat", result_of("chat"))])
    assert SCHEDULE_RESULT.decode(await store.redis.hget(KEY, "chat"), key=KEY) == result_of("chat")


def test_a_value_under_a_foreign_name_is_refused():
    found = hash_of(code=GOOD)
    assert "is of service 'chat'" in str(found.refused["code"])
    assert "HDEL 'trimtab:{prescheduler}:results' 'code'" in str(found.refused["code"])


def test_what_is_unknown_survives_rewrite_after_rewrite():
    found = hash_of(chat=with_unknown_field(SCHEDULE_RESULT, GOOD, "result"))
    for detail in ("one", "two"):
        *_, raw = found.command("chat", result_of("chat", detail))
        assert has_unknown_field(SCHEDULE_RESULT.undamaged(raw))
        assert SCHEDULE_RESULT.decode(raw, key=KEY) == result_of("chat", detail)


def test_a_deleted_subject_takes_its_refused_record_along():
    found = hash_of(chat=b"x")
    with structlog.testing.capture_logs() as logs:
        assert found.forget("chat") == ("HDEL", KEY, "chat")
    assert found.refused == {}
    assert [(entry["key"], entry["field"]) for entry in logs] == [(KEY, "chat")]


def test_each_refused_record_is_logged_once_and_so_is_its_end():
    refused = list(hash_of(chat=b"x").refused.values())
    shown = RefusedLog()
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            shown.show(refused)
        shown.show([])
        shown.show([])
    assert [entry["log_level"] for entry in logs] == ["error", "info"]
    assert (logs[0]["key"], logs[0]["field"], logs[0]["reason"]) == (KEY, "chat", "corrupt")
    assert "HDEL" in logs[0]["remedy"]


async def test_an_entry_of_a_stream_that_cannot_be_read_hides_no_other(store: Store):
    stream = RecordStream(store, keys.cycles(), SCHEDULE_RESULT, maxlen=10)
    for command in (
        stream.append_command(result_of("chat")),
        ("XADD", keys.cycles(), "*", "m", newer(SCHEDULE_RESULT, GOOD)),
        ("XADD", keys.cycles(), "*", "other", "field"),
        stream.append_command(result_of("code")),
    ):
        await fenced_write(store, keys.PRESCHEDULER, 1, [command])
    entries = await stream.read_after("0", 10)
    values = [value for _, value in entries]
    assert (values[0], values[3]) == (result_of("chat"), result_of("code"))
    for (entry_id, _), refused in zip(entries[1:3], values[1:3], strict=True):
        assert isinstance(refused, Refused)
        assert f"XDEL '{keys.cycles()}' '{entry_id}'" in refused.remedy
    assert await stream.read_last(1) == entries[-1:]
    assert await stream.read_after(entries[2][0], 10) == entries[3:]
