"""Stored records: protobuf messages with a schema number and a checksum, read one by one and refused one by one.

A record's bytes are a message of ``trimtab.store.v1`` whose first field is ``schema`` (so they start with 0x08) and
whose last is ``checksum``, the CRC-32 of everything before it: a message that was cut off between two fields would
parse. What starts with another byte was written before records had schemas.

    REPLICA = RecordKind(name="replica", schema=1, codec=record_codec(Replica, …), removing="…")
    found = REPLICA.decode(raw, key=keys.replicas(cluster), field=name)    # Replica | Refused
    raw = REPLICA.encode(replica, previous=raw)

A message changes compatibly by gaining fields: fields that a release does not know survive its rewrites. Anything
else, a new member of an enum too, raises the kind's ``schema`` and adds an upgrade from the number before.
"""

import binascii
import dataclasses
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from google.protobuf.message import Error as ProtobufError
from google.protobuf.message import Message

from trimtab.store.message_codec import Codec, Rules

V = TypeVar("V")

SCHEMA_FIELD = "schema"
CHECKSUM_FIELD = "checksum"
_FIRST = b"\x08"
"""Tag of field 1, a varint."""
_LAST = b"\x7d"
"""Tag of field 15, four bytes."""
_TRAILER = struct.Struct("<cI")
_MAX_SCHEMA_BYTES = 5

# The errors of readers of foreign bytes: each means that the bytes are not what they should be.
_UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, ProtobufError)


class RefusedReason(StrEnum):
    """Why a record is not read."""

    NEWER = "newer"
    CORRUPT = "corrupt"


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A record that this release cannot read. Its bytes stay in the store as they are.

    ``remedy`` is what an operator can do.
    """

    kind: str
    key: str
    field: str
    reason: RefusedReason
    why: str
    remedy: str
    raw: bytes = dataclasses.field(default=b"", repr=False)

    def __str__(self) -> str:
        place = f"{self.key}, field {self.field}" if self.field else self.key
        return f"{place}: {self.why}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class RecordKind(Generic[V]):
    """One kind of stored record.

    ``upgrades``: from each older schema, what makes the next one's message of its message (both without checksum).
    ``legacy`` reads what was written before records had schemas, whatever does not start with 0x08; it raises for what
    it cannot read. ``name_of`` gives the field of its hash that a value belongs in: one that stands in another is
    refused. ``removing`` says what becomes of a record's subject when an operator removes the record.
    """

    name: str
    schema: int
    codec: Codec[V]
    removing: str
    upgrades: Mapping[int, Callable[[bytes], bytes]] = dataclasses.field(default_factory=dict)
    legacy: Callable[[bytes], V] | None = None
    name_of: Callable[[V], str] | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a message without the two fields, and for a gap in the upgrades."""
        fields = self.codec.message_type.DESCRIPTOR.fields_by_name
        if [fields[name].number for name in (SCHEMA_FIELD, CHECKSUM_FIELD) if name in fields] != [1, 15]:
            raise ValueError(f"{self.name}: its message needs schema = 1 (uint32) and checksum = 15 (fixed32)")
        missing = set(range(min(self.upgrades, default=self.schema), self.schema)) - set(self.upgrades)
        if missing or max(self.upgrades, default=0) >= self.schema:
            raise ValueError(f"{self.name}: upgrades {sorted(self.upgrades)} do not lead to schema {self.schema}")

    def decode(self, raw: object, *, key: str, field: str = "") -> V | Refused:
        """The value, or why there is none. ``key`` and ``field`` say where in the store it stands. Never raises."""
        data = raw if isinstance(raw, bytes) else b""
        newer = RefusedReason.NEWER

        def refused(why: str, reason: RefusedReason = RefusedReason.CORRUPT) -> Refused:
            remedy = self._remedy(key, field, reason)
            return Refused(kind=self.name, key=key, field=field, reason=reason, why=why, remedy=remedy, raw=data)

        try:
            if not data.startswith(_FIRST):
                value = self._decode_legacy(data)
            elif (schema := schema_of(data)) > self.schema:
                return refused(f"has schema {schema}, this release reads {self.name}s up to {self.schema}", newer)
            else:
                value = self.codec.read(self._upgraded(data))
        except _UNREADABLE as error:
            return refused(f"is no {self.name}: {_one_line(error)}")
        if self.name_of is not None and self.name_of(value) != field:
            return refused(f"is the {self.name} {self.name_of(value)!r}")
        return value

    def encode(self, value: V, previous: bytes | None = None) -> bytes:
        """The record's bytes. With ``previous``, the bytes that it replaces, unknown fields of those survive.

        Raises ``ValueError`` for a value that cannot be stored.
        """
        message = self.codec.write(value, self._base(previous) if previous is not None else None)
        setattr(message, SCHEMA_FIELD, self.schema)
        return seal(message)

    def undamaged(self, raw: bytes) -> Any | None:
        """The message of a record whose checksum is right, of whatever schema; None when there is none.

        For a best effort: a refused record of a newer release may mean something else by a field.
        """
        try:
            return self.codec.message_type.FromString(unseal(raw))
        except _UNREADABLE:
            return None

    def damaged(self, raw: bytes) -> Any:
        """What parses of a record from its beginning, whatever its checksum: any of it may be wrong."""
        message = self.codec.message_type()
        try:
            message.MergeFromString(raw[: _whole_fields(raw)])
        except ProtobufError:
            message.Clear()
        return message

    def _upgraded(self, raw: bytes) -> Message:
        """The record as a message of this release's schema. Raises one of ``_UNREADABLE``."""
        body, schema = unseal(raw), schema_of(raw)
        for number in range(schema, self.schema):
            if number not in self.upgrades:
                raise ValueError(f"has schema {schema}, which this release does not upgrade any more")
            body = self.upgrades[number](body)
        return self.codec.message_type.FromString(body)

    def _base(self, previous: bytes) -> Message | None:
        """What a rewrite starts from; None when nothing of the bytes before can be kept."""
        try:
            return self._upgraded(previous) if previous.startswith(_FIRST) else None
        except _UNREADABLE:
            return None

    def _decode_legacy(self, data: bytes) -> V:
        if self.legacy is None:
            raise ValueError("does not begin with a schema number")
        return self.legacy(data)

    def _remedy(self, key: str, field: str, reason: RefusedReason) -> str:
        command = f"HDEL '{key}' '{field}'" if field else f"DEL '{key}'"
        newer = "run the newer release again, or " if reason is RefusedReason.NEWER else ""
        return f"{newer}restore the store from a backup, or remove the record with {command}: {self.removing}"


def record_codec(value_type: type[V], message_type: type[Message], rules: Rules | None = None) -> Codec[V]:
    """A codec for a record's own message: values have no schema number and no checksum."""
    rules = rules or Rules()
    name = message_type.DESCRIPTOR.full_name
    own = rules.only_stored.get(name, frozenset()) | {SCHEMA_FIELD, CHECKSUM_FIELD}
    return Codec(value_type, message_type, replace(rules, only_stored={**rules.only_stored, name: own}))


def schema_of(raw: bytes) -> int:
    """The schema number that a record begins with. Raises ``ValueError`` when it begins with none."""
    try:
        number, end = _varint(raw, 1)
    except IndexError:
        number, end = 0, 0
    if not raw.startswith(_FIRST) or number == 0 or end > 1 + _MAX_SCHEMA_BYTES:
        raise ValueError("does not begin with a schema number")
    return number


def seal(message: Message) -> bytes:
    """The message's bytes and their checksum, as a last field. Its own ``checksum`` must not be set."""
    body = message.SerializeToString(deterministic=True)
    return body + _TRAILER.pack(_LAST, binascii.crc32(body))


def unseal(raw: bytes) -> bytes:
    """The message's bytes without the checksum. Raises ``ValueError`` unless it stands at the end and is right."""
    body, trailer = raw[: -_TRAILER.size], raw[-_TRAILER.size :]
    if len(trailer) < _TRAILER.size or _TRAILER.unpack(trailer) != (_LAST, binascii.crc32(body)):
        raise ValueError("cut off or damaged: the checksum is not right")
    return body


def _whole_fields(raw: bytes) -> int:
    """Length of the whole fields that a message begins with."""
    whole = at = 0
    try:
        while at < len(raw):
            tag, at = _varint(raw, at)
            if tag & 7 == 0:
                _, at = _varint(raw, at)
            elif tag & 7 == 2:
                length, at = _varint(raw, at)
                at += length
            else:
                at += {1: 8, 5: 4}[tag & 7]
            if at > len(raw):
                break
            whole = at
    except (IndexError, KeyError):
        pass
    return whole


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number that begins at an offset, and the offset after it. Raises ``IndexError`` when it is cut off."""
    number = shift = 0
    while True:
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}…"
