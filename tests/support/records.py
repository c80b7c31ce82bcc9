"""Stored records for tests: what releases with schema 1 of the store wrote, and records as they should not be."""

import base64
import json
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from trimtab.store.client import Store
from trimtab.store.message_fields import known_bytes
from trimtab.store.records import RecordKind, seal

_DATA = Path(__file__).parents[1] / "data" / "store_schema_1"

UNKNOWN = b"\xc2\x3e\x05later"
"""A field that no message has: number 1000, the bytes "later"."""


def old_hashes(name: str) -> dict[str, dict[str, bytes]]:
    """Key → field → bytes, as a release before schema numbers wrote them; ``name`` is the file's."""
    return {
        key: {field: base64.b64decode(raw) for field, raw in fields.items()}
        for key, fields in json.loads((_DATA / f"{name}.json").read_text())["hashes"].items()
    }


def old_streams(name: str) -> dict[str, list[bytes]]:
    """Key → entries, in the same way."""
    streams = json.loads((_DATA / f"{name}.json").read_text())["streams"]
    return {key: [base64.b64decode(raw) for raw in entries] for key, entries in streams.items()}


async def put_old(store: Store, name: str) -> None:
    """The store as such a release left it."""
    for key, fields in old_hashes(name).items():
        await store.redis.hset(key, mapping=fields)
    for key, entries in old_streams(name).items():
        for raw in entries:
            await store.redis.xadd(key, {"m": raw})


def newer(kind: RecordKind[Any], raw: bytes) -> bytes:
    """The record as a release after this one would write it."""
    message = _message(kind, raw)
    message.schema = kind.schema + 1
    return seal(message)


def truncated(kind: RecordKind[Any], raw: bytes) -> bytes:
    """The record without its last bytes."""
    return raw[:-9]


def garbage(kind: RecordKind[Any], raw: bytes) -> bytes:
    """Nothing of anybody's."""
    return b"\x00\xffnot a record"


def with_unknown_field(kind: RecordKind[Any], raw: bytes, *path: str) -> bytes:
    """The record with a field that this release does not know, at the top or inside; of a list in its first element."""
    message: Any = _message(kind, raw)
    part = message
    for name in path:
        part = getattr(part, name)
        part = part[0] if hasattr(part, "add") else part
    part.MergeFromString(UNKNOWN)
    return seal(message)


def has_unknown_field(message: Message) -> bool:
    """Whether a message holds it still, anywhere."""
    return message.SerializeToString(deterministic=True) != known_bytes(message) and UNKNOWN in (
        message.SerializeToString(deterministic=True)
    )


def _message(kind: RecordKind[Any], raw: bytes) -> Any:
    if not raw.startswith(b"\x08"):
        found = kind.decode(raw, key="k", field="f")
        raw = kind.encode(found)
    return kind.undamaged(raw)
