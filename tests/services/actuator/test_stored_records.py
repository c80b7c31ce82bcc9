"""The actuator's records in a store: what any release wrote is read, and what cannot be read is left as it is."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actuator.core.model import Gateway, Meta, Operation, Pool, Replica, State
from actuator.core.refused import RefusedKind, RefusedRecord
from actuator.shell import records as stored
from actuator.shell.records import Records
from tests.services.actuator.stored_before import BYTES, META, OPERATIONS, POOLS, REPLICAS
from trimtab.api.store.v1 import actuator_pb2 as pb
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.lease import StoreLease
from trimtab.store.records import RecordKind, Refused, seal, unseal

STATE = State(
    replicas={replica.name: replica for replica in REPLICAS},
    pools={pool.pool: pool for pool in POOLS},
    operations={operation.operation_id: operation for operation in OPERATIONS},
    gateways={"gateway-1": Gateway(gateway="gateway-1", lease_until_s=0.0)},
    meta=META,
)
HASHES = {
    "replicas": keys.replicas("local"),
    "pools": keys.pool_states("local"),
    "operations": keys.operations("local"),
    "revisions": keys.revisions("local"),
    "gateways": keys.gateways("local"),
}
SINCE_SCHEMA_2: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "data" / "records-of-schema-2.json").read_text(encoding="utf-8")
)
"""Records as the first release with store schema 2 wrote them: hash → field → hexadecimal bytes."""

# A field that no release knows, at the end of a message.
ADDED = b"\xc2\x3e\x05later"


async def _write(store: Store, hashes: Mapping[str, Mapping[str, str | bytes]]) -> None:
    for name, fields in hashes.items():
        await store.redis.hset(HASHES[name], mapping=dict(fields))


async def _bytes(store: Store, name: str) -> dict[str, bytes]:
    found: dict[bytes, bytes] = await store.redis.hgetall(HASHES[name])
    return {field.decode(): value for field, value in found.items()}


async def _token(store: Store, records: Records) -> int:
    token = await StoreLease(store, records.owner, "me", 30.0).acquire_or_renew()
    assert token is not None
    return token


async def test_what_the_release_before_wrote_is_read_whole(store: Store) -> None:
    await _write(store, BYTES)
    loaded = await Records(store, "local").load()
    assert loaded.state == STATE
    assert list(loaded.state.meta.requests) == ["z-1", "a-2"], "the oldest is forgotten first"
    assert loaded.last_token == 5


async def test_what_the_first_release_with_schemas_wrote_is_read_whole(store: Store) -> None:
    await _write(
        store, {name: {at: bytes.fromhex(raw) for at, raw in fields.items()} for name, fields in SINCE_SCHEMA_2.items()}
    )
    loaded = await Records(store, "local").load()
    assert replace(loaded.state, gateways=STATE.gateways) == STATE


async def test_an_old_record_is_rewritten_when_it_changes_and_not_before(store: Store) -> None:
    await _write(store, BYTES)
    records = Records(store, "local")
    state = (await records.load()).state
    changed = replace(state.replicas["chat-0"], detail="changed")
    new = replace(state, replicas={**state.replicas, "chat-0": changed})
    await records.save(state, new, await _token(store, records))
    raw = await _bytes(store, "replicas")
    assert raw["chat-0"][:1] == b"\x08"
    assert raw["chat-1"] == BYTES["replicas"]["chat-1"].encode()
    assert (await _bytes(store, "pools"))["shared"] == BYTES["pools"]["shared"].encode()
    assert (await Records(store, "local").load()).state == new


async def test_what_was_removed_is_gone(store: Store) -> None:
    records = Records(store, "local")
    token = await _token(store, records)
    await records.save(State(), STATE, token)
    less = replace(STATE, replicas={"chat-0": STATE.replicas["chat-0"]}, operations={}, pools={}, gateways={})
    await records.save(STATE, less, token)
    assert (await Records(store, "local").load()).state == less


def _added_everywhere(raw: bytes, message_type: type[Any]) -> bytes:
    """The record as a later release would write it, with a field more in the record and in each element of a list."""
    message = message_type.FromString(unseal(raw))
    for name in ("holds", "overlay", "steps"):
        for element in getattr(message, name, ()):
            element.MergeFromString(b"\xc2\x3e" + bytes([len(_id(element))]) + _id(element).encode())
    message.MergeFromString(ADDED)
    return seal(message)


def _id(element: Any) -> str:
    if hasattr(element, "placement"):
        return f"of {element.spec.replica}"
    return f"of {element.replica}" if hasattr(element, "replica") else f"of hold {element.owner}"


async def test_what_a_later_release_added_survives_a_rewrite(store: Store) -> None:
    records = Records(store, "local")
    token = await _token(store, records)
    await records.save(State(), STATE, token)
    for name, field, message_type in (
        ("replicas", "chat-1", pb.ReplicaRecord),
        ("pools", "shared", pb.PoolRecord),
        ("operations", "o-1", pb.OperationRecord),
        ("revisions", "meta", pb.ActuatorMetaRecord),
    ):
        raw = (await _bytes(store, name))[field]
        await _write(store, {name: {field: _added_everywhere(raw, message_type)}})
    state = (await records.load()).state
    assert state == STATE
    replica, pool, operation = state.replicas["chat-1"], state.pools["shared"], state.operations["o-1"]
    for round_ in range(2):
        new = replace(
            state,
            replicas={**state.replicas, "chat-1": replace(replica, holds=replica.holds[1:], detail=f"{round_}")},
            pools={**state.pools, "shared": replace(pool, overlay=pool.overlay[1:], awake=(f"{round_}",))},
            operations={"o-1": replace(operation, steps=tuple(reversed(operation.steps)), detail=f"{round_}")},
            meta=replace(state.meta, operation_counter=round_),
        )
        await records.save(state, new, token)
        state = new
    chat_1 = (await _bytes(store, "replicas"))["chat-1"]
    assert ADDED in chat_1
    assert b"of hold 2" in chat_1
    assert b"of hold 4" not in chat_1, "a hold that was lifted takes with it what was added to it"
    shared = (await _bytes(store, "pools"))["shared"]
    assert ADDED in shared
    assert b"of chat-1" in shared
    assert b"of code-0" in shared
    assert b"of chat-0" not in shared
    steps = pb.OperationRecord.FromString((await _bytes(store, "operations"))["o-1"]).steps
    assert [step.replica for step in steps] == ["code-0", "chat-1"]
    assert [f"of {step.replica}".encode() in step.SerializeToString() for step in steps] == [True, True]
    assert ADDED in (await _bytes(store, "revisions"))["meta"]
    assert (await Records(store, "local").load()).state == state


# What cannot be read


def _newer(raw: bytes, message_type: type[Any]) -> bytes:
    message = message_type.FromString(unseal(raw))
    message.schema = 2
    return seal(message)


def _odd(raw: bytes, message_type: type[Any]) -> bytes:
    """Whole, and with a value that this release does not know."""
    message = message_type.FromString(unseal(raw))
    for name in ("life_cycle", "state"):
        if hasattr(message, name):
            setattr(message, name, 99)
    for field, value in (("drain_timeout_s", float("nan")),):
        if hasattr(message, field):
            setattr(message, field, value)
    if isinstance(message, pb.ActuatorMetaRecord):
        return seal(pb.ActuatorMetaRecord(schema=1)) + b"\x00"
    return seal(message)


FAULTS: dict[str, Callable[[bytes, type[Any]], bytes]] = {
    "newer": _newer,
    "cut off": lambda raw, _type: raw[: len(raw) // 2],
    "empty": lambda _raw, _type: b"",
    "a value that is none": _odd,
    "JSON that is cut off": lambda _raw, _type: b'{"spec":{"repl',
    "JSON of something else": lambda _raw, _type: b'{"a": 1}',
}
KINDS: dict[RefusedKind, tuple[str, str, type[Any]]] = {
    RefusedKind.REPLICA: ("replicas", "chat-0", pb.ReplicaRecord),
    RefusedKind.POOL: ("pools", "shared", pb.PoolRecord),
    RefusedKind.OPERATION: ("operations", "o-1", pb.OperationRecord),
    RefusedKind.META: ("revisions", "meta", pb.ActuatorMetaRecord),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
async def test_one_bad_record_is_refused_for_itself_and_never_overwritten(
    store: Store, kind: RefusedKind, fault: str
) -> None:
    name, field, message_type = KINDS[kind]
    records = Records(store, "local")
    token = await _token(store, records)
    await records.save(State(), STATE, token)
    bad = FAULTS[fault]((await _bytes(store, name))[field], message_type)
    if kind is RefusedKind.META and fault == "JSON of something else":
        bad = b'{"fencing": "none"}'
    await _write(store, {name: {field: bad}})

    state = (await records.load()).state

    [refused] = state.refused
    assert (refused.kind, refused.name) == (kind, field)
    assert refused.reason == ("newer" if fault == "newer" else "corrupt")
    assert refused.why.startswith(f"{HASHES[name]}, field {field}: ")
    assert f"HDEL '{HASHES[name]}' '{field}'" in refused.remedy
    assert set(state.replicas) == set(STATE.replicas) - {field}
    assert set(state.pools) == set(STATE.pools) - {field}
    assert set(state.operations) == set(STATE.operations) - {field}

    if kind is RefusedKind.META:
        with pytest.raises(ValueError, match="metadata cannot be read"):
            await records.save(state, replace(state, operations={}), token)
    else:
        await records.save(state, replace(state, replicas={}, pools={}, operations={}), token)
        with_it = replace(STATE, refused=state.refused)
        await records.save(replace(state, replicas={}, pools={}, operations={}), with_it, token)
    assert (await _bytes(store, name))[field] == bad


@pytest.mark.parametrize("token", [b"", b"many", b"-1", b"1.5", "½".encode()])
async def test_a_token_that_is_none_is_refused_like_metadata(store: Store, token: bytes) -> None:
    await _write(store, {"revisions": {"token": token}})
    loaded = await Records(store, "local").load()
    assert loaded.last_token is None
    assert [(record.kind, record.name) for record in loaded.state.refused] == [(RefusedKind.META, "token")]


async def test_a_record_under_another_name_than_its_own_is_refused(store: Store) -> None:
    raw = stored.REPLICA.encode(STATE.replicas["chat-0"])
    await _write(store, {"replicas": {"chat-9": raw, b"\xff": raw}})
    refused = (await Records(store, "local").load()).state.refused
    assert [(record.name, record.why.rpartition(": ")[2]) for record in refused] == [
        ("\\xff", "is the replica 'chat-0'"),
        ("chat-9", "is the replica 'chat-0'"),
    ]


@pytest.mark.parametrize(
    ("fault", "known"),
    [
        ("newer", True),
        ("a value that is none", True),
        ("cut off", False),
        ("empty", False),
    ],
)
async def test_what_a_bad_record_says_for_certain_is_known(store: Store, fault: str, known: bool) -> None:
    records = Records(store, "local")
    await records.save(State(), STATE, await _token(store, records))
    for kind in (RefusedKind.REPLICA, RefusedKind.POOL, RefusedKind.OPERATION):
        name, field, message_type = KINDS[kind]
        await _write(store, {name: {field: FAULTS[fault]((await _bytes(store, name))[field], message_type)}})
    found = {record.kind: record for record in (await records.load()).state.refused}
    assert found[RefusedKind.REPLICA].gpus == ((("node-0", 0),) if known else None)
    assert found[RefusedKind.REPLICA].pool == ("shared" if known else "")
    assert found[RefusedKind.POOL].gpus == ((("node-0", 0), ("node-0", 1)) if known else None)
    assert found[RefusedKind.OPERATION].subject_certain is known
    assert found[RefusedKind.OPERATION].subject == ("" if fault == "empty" else "shared")


async def test_the_gpus_of_an_old_record_with_one_bad_field_are_known(store: Store) -> None:
    raw = BYTES["replicas"]["moe-p-0"].replace('"starting"', '"resting"')
    await _write(store, {"replicas": {"moe-p-0": raw}})
    [record] = (await Records(store, "local").load()).state.refused
    assert record.gpus == tuple(("node-7", index) for index in range(4))
    assert (record.pool, record.group) == ("", "moe-g1")


@pytest.mark.parametrize("name", ["replicas", "pools", "operations", "revisions"])
def test_a_record_that_was_cut_off_anywhere_is_refused(name: str) -> None:
    kind: RecordKind[Any] = {
        "replicas": stored.REPLICA,
        "pools": stored.POOL,
        "operations": stored.OPERATION,
        "revisions": stored.META,
    }[name]
    for field, text in SINCE_SCHEMA_2[name].items():
        raw = bytes.fromhex(text)
        for end in range(len(raw)):
            assert isinstance(kind.decode(raw[:end], key="k", field=field), Refused)
            kind.damaged(raw[:end])
    for field, text in BYTES[name].items():
        for end in range(len(text.encode()) if field != "token" else 0):
            assert isinstance(kind.decode(text.encode()[:end], key="k", field=field), Refused)


# Any value


def _any(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type of the core, each field drawn."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return st.one_of(*(st.none() if part is NoneType else _any(part) for part in parts))
    if origin is tuple:
        return st.lists(_any(parts[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(_any(parts[0]), _any(parts[1]), max_size=3)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: _any(hints[field.name]) for field in dataclasses.fields(hint)})
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return {
        int: st.integers(min_value=0, max_value=2**32 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8),
        bool: st.booleans(),
    }[hint]


@pytest.mark.parametrize(
    ("kind", "value_type"),
    [
        (stored.REPLICA, Replica),
        (stored.POOL, Pool),
        (stored.OPERATION, Operation),
        (stored.META, Meta),
    ],
)
@given(data=st.data())
def test_every_record_comes_back_as_it_was(kind: RecordKind[Any], value_type: type[Any], data: st.DataObject) -> None:
    value, other = data.draw(_any(value_type)), data.draw(_any(value_type))
    field = kind.name_of(value) if kind.name_of is not None else "meta"
    assert kind.decode(kind.encode(value), key="k", field=field) == value
    assert kind.decode(kind.encode(value, kind.encode(other)), key="k", field=field) == value


def test_a_refused_record_says_all_in_one_sentence() -> None:
    record = RefusedRecord(
        kind=RefusedKind.POOL, name="p", reason="corrupt", why="k, field p: is no pool", remedy="remove it"
    )
    assert record.text == "k, field p: is no pool; remove it"
