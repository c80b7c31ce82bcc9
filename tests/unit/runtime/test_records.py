"""A record is read, or refused with its key and a remedy; whatever its bytes are, nothing is raised."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actuator.core.model import GroupOutcome, Meta
from trimtab.api.store.v1 import actuator_pb2 as pb
from trimtab.store.message_codec import Rules
from trimtab.store.records import RecordKind, Refused, RefusedReason, record_codec, seal, unseal

_CODEC = record_codec(Meta, pb.ActuatorMetaRecord, Rules(ids={GroupOutcome: ("group",)}))


def _from_json(raw: bytes) -> Meta:
    return Meta(**json.loads(raw))


def _second(raw: bytes) -> bytes:
    """Schema 2 counts endpoint revisions by tens."""
    message = pb.ActuatorMetaRecord.FromString(raw)
    message.endpoint_revision *= 10
    return message.SerializeToString()


def _third(raw: bytes) -> bytes:
    message = pb.ActuatorMetaRecord.FromString(raw)
    message.inventory_digest = f"third of {message.endpoint_revision}"
    return message.SerializeToString()


def _kind(schema: int = 1, **more: Any) -> RecordKind[Meta]:
    return RecordKind(name="sample", schema=schema, codec=_CODEC, removing="its counters begin again", **more)


_KIND = _kind(legacy=_from_json)
_META = Meta(
    endpoint_revision=3,
    operation_counter=70_000,
    inventory_digest="abc",
    fencing={"policy-engine": 4},
    requests={"r2": (GroupOutcome(group="g", accepted=True, operation_id="op-1"),), "r1": ()},
)


def _decode(raw: object, kind: RecordKind[Meta] = _KIND) -> Meta | Refused:
    return kind.decode(raw, key="trimtab:{actuator/a}:revisions", field="meta")


def _refused(raw: object, kind: RecordKind[Meta] = _KIND) -> Refused:
    found = _decode(raw, kind)
    assert isinstance(found, Refused)
    return found


def test_a_record_comes_back_and_says_its_schema_first() -> None:
    raw = _KIND.encode(_META)
    assert raw[:2] == b"\x08\x01"
    assert _decode(raw) == _META
    # Still a message for every tool that reads protobuf.
    assert pb.ActuatorMetaRecord.FromString(raw).endpoint_revision == 3


def test_a_record_of_before_schemas_is_read_by_its_own_reader() -> None:
    assert _decode(b'{"endpoint_revision": 7}') == Meta(endpoint_revision=7)
    assert _refused(b'{"endpoint_revision": 7}', _kind()).reason is RefusedReason.CORRUPT
    assert "is no sample" in _refused(b'{"endpoint_revision": ').why


@pytest.mark.parametrize("length", range(len(_KIND.encode(_META))))
def test_a_record_that_was_cut_off_anywhere_is_refused(length: int) -> None:
    refused = _refused(_KIND.encode(_META)[:length])
    assert refused.reason is RefusedReason.CORRUPT
    assert (refused.key, refused.field) == ("trimtab:{actuator/a}:revisions", "meta")


@given(at=st.integers(min_value=0), bit=st.integers(min_value=0, max_value=7))
def test_a_record_with_a_wrong_bit_is_refused(at: int, bit: int) -> None:
    raw = bytearray(_KIND.encode(_META))
    raw[at % len(raw)] ^= 1 << bit
    assert isinstance(_decode(bytes(raw)), Refused)


@given(raw=st.binary() | st.binary().map(lambda tail: b"\x08\x01" + tail) | st.text().map(str.encode))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    assert isinstance(_decode(raw), Refused)


@pytest.mark.parametrize("raw", [None, "text", 3])
def test_what_are_no_bytes_is_refused(raw: object) -> None:
    assert _refused(raw).reason is RefusedReason.CORRUPT


def test_a_record_of_a_newer_release_says_so_and_what_to_do() -> None:
    message = _CODEC.write(_META)
    message.schema = 2
    refused = _refused(seal(message))
    assert refused.reason is RefusedReason.NEWER
    assert refused.raw == seal(message)
    assert str(refused) == (
        "trimtab:{actuator/a}:revisions, field meta: has schema 2, this release reads samples up to 1; run the newer "
        "release again, or restore the store from a backup, or remove the record with HDEL "
        "'trimtab:{actuator/a}:revisions' 'meta': its counters begin again"
    )


def test_an_older_record_is_brought_up_step_by_step() -> None:
    kind = _kind(3, upgrades={1: _second, 2: _third})
    found = _decode(_KIND.encode(_META), kind)
    assert isinstance(found, Meta)
    assert (found.endpoint_revision, found.inventory_digest) == (30, "third of 30")
    assert _refused(_KIND.encode(_META), _kind(3, upgrades={2: _third})).why == (
        "is no sample: has schema 1, which this release does not upgrade any more"
    )


def test_an_upgrade_that_fails_refuses_the_record() -> None:
    assert "division" in _refused(_KIND.encode(_META), _kind(2, upgrades={1: lambda _: bytes(1 // 0)})).why


def test_upgrades_must_lead_to_the_schema() -> None:
    with pytest.raises(ValueError, match="do not lead to schema 3"):
        _kind(3, upgrades={1: _second})
    with pytest.raises(ValueError, match="do not lead to schema 1"):
        _kind(1, upgrades={1: _second})


def test_fields_of_a_later_release_survive_a_rewrite() -> None:
    added = b"\xc2\x3e\x05later"
    raw = seal(pb.ActuatorMetaRecord.FromString(unseal(_KIND.encode(_META)) + added))
    assert _decode(raw) == _META
    again = _KIND.encode(Meta(endpoint_revision=4), previous=raw)
    assert _decode(again) == Meta(endpoint_revision=4)
    assert added in again


def test_a_rewrite_of_an_older_record_keeps_what_its_upgrade_keeps() -> None:
    kind = _kind(2, upgrades={1: _second})
    added = b"\xc2\x3e\x05later"
    raw = seal(pb.ActuatorMetaRecord.FromString(unseal(_KIND.encode(_META)) + added))
    again = kind.encode(Meta(endpoint_revision=4), previous=raw)
    assert added in again
    assert _decode(again, kind) == Meta(endpoint_revision=4)


@pytest.mark.parametrize("previous", [b"", b'{"endpoint_revision": 7}', b"\x08", _KIND.encode(_META)[:-3]])
def test_a_rewrite_of_what_cannot_be_read_starts_anew(previous: bytes) -> None:
    assert _KIND.encode(_META, previous=previous) == _KIND.encode(_META)


def test_a_message_without_schema_and_checksum_is_no_record() -> None:
    with pytest.raises(ValueError, match="needs schema = 1"):
        RecordKind(name="outcome", schema=1, codec=record_codec(GroupOutcome, pb.PlacementOutcome), removing="nothing")
