"""Versioned documents: optimistic concurrency by etag, a revision per kind, and the last versions of each.

A document is one protobuf message under a name. Its etag changes with every write; a writer that names the etag it
read is refused when another wrote meanwhile. The revision counts changes of the whole kind, so that a reader
can check cheaply whether anything changed, and a version is named by the revision that made it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry, EtagMismatch, FencedOff

M = TypeVar("M", bound=Message)

DEFAULT_HISTORY = 20

# A version is stored as "<revision> <unix ms>\n<message>"; its etag is the revision.
# KEYS: documents, revision, history, token counter. ARGV: name, message, etag, history length, token.
# An etag of "*" means any; "" means that the document must not exist yet. An empty message deletes.
_FENCE = """
if ARGV[5] ~= '' then
  local current_token = tonumber(redis.call('GET', KEYS[4]) or '0')
  if current_token > tonumber(ARGV[5]) then return {'fenced', tostring(current_token)} end
end
local stored = redis.call('HGET', KEYS[1], ARGV[1])
local etag = stored and string.match(stored, '^(%d+) ') or ''
if ARGV[3] ~= '*' and ARGV[3] ~= etag then return {'etag', etag} end
"""
_PUT = (
    _FENCE
    + """
local revision = redis.call('INCR', KEYS[2])
local now = redis.call('TIME')
local unix_ms = string.format('%.0f', tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000))
local version = string.format('%d', revision) .. ' ' .. unix_ms .. '\\n' .. ARGV[2]
redis.call('HSET', KEYS[1], ARGV[1], version)
redis.call('LPUSH', KEYS[3], version)
redis.call('LTRIM', KEYS[3], 0, tonumber(ARGV[4]) - 1)
return {'done', version}
"""
)
_DELETE = (
    _FENCE
    + """
if etag == '' then return {'missing', ''} end
redis.call('INCR', KEYS[2])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3])
return {'done', ''}
"""
)


@dataclass(frozen=True, kw_only=True)
class Document(Generic[M]):
    """One version of one document."""

    name: str
    revision: int
    written_s: float
    """Unix seconds on the store's clock."""
    message: M

    @property
    def etag(self) -> str:
        """The etag by which a writer names the version that it changes."""
        return str(self.revision)


@dataclass(frozen=True)
class Listing(Generic[M]):
    """All documents of a kind, by name, at one revision."""

    documents: Sequence[Document[M]]
    revision: int


class Documents(Generic[M]):
    """The documents of one kind of one owner (an owner name of ``trimtab.store.keys``)."""

    def __init__(
        self, store: Store, owner: str, kind: str, message_type: type[M], *, history: int = DEFAULT_HISTORY
    ) -> None:
        if history < 1:
            raise ValueError(f"history is {history}, must be at least 1")
        self.kind = kind
        self._owner = owner
        self._store = store
        self._type = message_type
        self._history = history
        self._key = keys.documents(owner, kind)
        self._revision_key = keys.documents_revision(owner, kind)
        self._put = store.redis.register_script(_PUT)
        self._delete = store.redis.register_script(_DELETE)

    async def get(self, name: str) -> Document[M] | None:
        """The newest version, or None."""
        raw = await cast("Any", self._store.redis.hget(self._key, name))
        return None if raw is None else self._parse(name, raw)

    async def list(self) -> Listing[M]:
        """Every document, sorted by name, with the kind's revision, read in one transaction."""
        pipeline = self._store.redis.pipeline(transaction=True)
        pipeline.hgetall(self._key)
        pipeline.get(self._revision_key)
        found, revision = await pipeline.execute()
        documents = [self._parse(name.decode(), raw) for name, raw in found.items()]
        return Listing(sorted(documents, key=lambda document: document.name), int(revision or 0))

    async def revision(self) -> int:
        """How many changes the kind has seen."""
        return int(await self._store.redis.get(self._revision_key) or 0)

    async def put(
        self, name: str, message: M, *, expected_etag: str | None = None, token: int | None = None
    ) -> Document[M]:
        """Write a new version.

        ``expected_etag``: None for whatever is there, ``""`` for a document that must not exist, else the etag it
        must have (``EtagMismatch``). ``token``: the fencing token of the owner's lease (``FencedOff``).
        """
        version = await self._run(
            self._put, name, message.SerializeToString(), "*" if expected_etag is None else expected_etag, token
        )
        return self._parse(name, version)

    async def delete(self, name: str, *, expected_etag: str | None = None, token: int | None = None) -> bool:
        """Remove the document and its history; False when there was none. Etag and token as for ``put``."""
        removed = await self._run(self._delete, name, b"", "*" if expected_etag is None else expected_etag, token)
        return removed is not None

    async def history(self, name: str) -> Sequence[Document[M]]:
        """The last versions, newest first; empty when the document does not exist."""
        key = keys.document_history(self._owner, self.kind, name)
        found = await cast("Any", self._store.redis.lrange(key, 0, self._history - 1))
        return [self._parse(name, raw) for raw in found]

    async def version(self, name: str, revision: int) -> Document[M] | None:
        """One of the last versions, or None."""
        return next((document for document in await self.history(name) if document.revision == revision), None)

    async def _run(self, script: Any, name: str, data: bytes, etag: str, token: int | None) -> bytes | None:
        """What the script gives back; None when there was nothing to delete."""
        outcome, detail = await script(
            keys=[
                self._key,
                self._revision_key,
                keys.document_history(self._owner, self.kind, name),
                keys.lease_token(self._owner),
            ],
            args=[name, data, etag, self._history, "" if token is None else token],
        )
        if outcome == b"fenced":
            raise FencedOff(self._owner, token=token or 0, current_token=int(detail))
        if outcome == b"etag":
            raise EtagMismatch(name, expected_etag=etag, current_etag=detail.decode())
        return None if outcome == b"missing" else cast("bytes", detail)

    def _parse(self, name: str, raw: object) -> Document[M]:
        place = f"{self._key}, field {name}"
        head, separator, body = (raw if isinstance(raw, bytes) else b"").partition(b"\n")
        revision, _, unix_ms = head.partition(b" ")
        if not separator or not revision.isdigit() or not unix_ms.isdigit():
            raise CorruptEntry(f"{place}: is no version of a document")
        return Document(
            name=name,
            revision=int(revision),
            written_s=int(unix_ms) / 1000,
            message=decode(self._type, body, place=place),
        )
