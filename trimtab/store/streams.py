"""Streams of protobuf messages, bounded by count and by age.

An entry's id starts with the store's time in milliseconds, so a stream can be read by time as well as by id.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from trimtab.store.client import Store
from trimtab.store.codec import decode

M = TypeVar("M", bound=Message)

MAX_READ = 10_000
_FIELD = b"m"

_APPEND = """
local id = redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[2], '*', 'm', ARGV[1])
if ARGV[3] ~= '' then
  local newest_ms = tonumber(string.match(id, '^(%d+)-'))
  redis.call('XTRIM', KEYS[1], 'MINID', string.format('%.0f', newest_ms - tonumber(ARGV[3])))
end
return id
"""


@dataclass(frozen=True)
class Entry(Generic[M]):
    """One message and its id, such as ``1700000000000-0``."""

    id: str
    message: M

    @property
    def time_s(self) -> float:
        """When it was appended: Unix seconds on the store's clock."""
        return int(self.id.partition("-")[0]) / 1000


class BoundedStream(Generic[M]):
    """One stream under one key.

    It holds at most ``maxlen`` entries, none of them ``retention_s`` seconds older than the newest.
    """

    def __init__(
        self, store: Store, key: str, message_type: type[M], *, maxlen: int, retention_s: float | None = None
    ) -> None:
        if maxlen < 1 or (retention_s is not None and retention_s <= 0):
            raise ValueError(f"{key}: maxlen and retention_s must be more than 0")
        self.key = key
        self._store = store
        self._type = message_type
        self._maxlen = maxlen
        self._retention_ms = "" if retention_s is None else str(round(retention_s * 1000))
        self._append = store.redis.register_script(_APPEND)

    async def append(self, message: M) -> str:
        """Append and trim in one step; the entry's id. Raises ``StoreUnavailable``."""
        reply = await self._append(
            keys=[self.key], args=[message.SerializeToString(), self._maxlen, self._retention_ms]
        )
        return cast("bytes", reply).decode()

    def append_command(self, message: M) -> tuple[str | bytes | int, ...]:
        """The append as a command for ``fenced_write``; it trims by count only."""
        return ("XADD", self.key, "MAXLEN", self._maxlen, "*", _FIELD, message.SerializeToString())

    def append_bytes_command(self, data: bytes, *, oldest_s: float) -> tuple[str | bytes | int, ...]:
        """The append of a message in its binary form; it trims by age only: what is older than ``oldest_s`` goes."""
        oldest_ms = max(0, round(oldest_s * 1000))
        return ("XADD", self.key, "MINID", oldest_ms, "*", _FIELD, data)

    async def last_id(self) -> str:
        """The newest entry's id, whether or not it parses; ``"0"`` when there is none."""
        found = await self._store.redis.xrevrange(self.key, count=1)
        return cast("bytes", found[0][0]).decode() if found else "0"

    async def read_last(self, count: int) -> list[Entry[M]]:
        """The newest ``count`` entries, oldest of them first."""
        found = await self._store.redis.xrevrange(self.key, count=_bounded(count))
        return self._entries(found)[::-1]

    async def read_after(self, entry_id: str, count: int = MAX_READ) -> list[Entry[M]]:
        """The entries that came after ``entry_id``, oldest first; ``"0"`` for all that are kept."""
        found = await self._store.redis.xrange(self.key, min=f"({entry_id}", count=_bounded(count))
        return self._entries(found)

    async def read_between(self, start_s: float, end_s: float, count: int = MAX_READ) -> list[Entry[M]]:
        """The newest ``count`` entries appended in [start_s, end_s) on the store's clock, oldest of them first."""
        start_ms, end_ms = max(0, round(start_s * 1000)), max(0, round(end_s * 1000))
        if end_ms <= start_ms:
            return []
        found = await self._store.redis.xrevrange(
            self.key, max=f"({end_ms}-0", min=str(start_ms), count=_bounded(count)
        )
        return self._entries(found)[::-1]

    async def length(self) -> int:
        """How many entries are kept."""
        return int(await self._store.redis.xlen(self.key))

    def _entries(self, found: Any) -> list[Entry[M]]:
        """Raises ``CorruptEntry`` for one that does not parse."""
        entries: list[Entry[M]] = []
        for raw_id, fields in cast("list[tuple[bytes, Mapping[bytes, bytes]]]", found or []):
            entry_id = raw_id.decode()
            place = f"{self.key}, entry {entry_id}"
            entries.append(Entry(entry_id, decode(self._type, fields.get(_FIELD), place=place)))
        return entries


def _bounded(count: int) -> int:
    if count < 1:
        raise ValueError(f"count is {count}, must be at least 1")
    return min(count, MAX_READ)
