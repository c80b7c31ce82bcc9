"""A stream of records, bounded by count. An entry that cannot be read is refused by itself."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from trimtab.store.client import Store
from trimtab.store.lease import Argument
from trimtab.store.records import RecordKind, Refused

V = TypeVar("V")

_FIELD = b"m"


class RecordStream(Generic[V]):
    """One stream under one key, of at most ``maxlen`` entries."""

    def __init__(self, store: Store, key: str, kind: RecordKind[V], *, maxlen: int) -> None:
        if maxlen < 1:
            raise ValueError(f"{key}: maxlen must be at least 1")
        self.key = key
        self._store = store
        self._kind = kind
        self._maxlen = maxlen

    def append_command(self, value: V) -> tuple[Argument, ...]:
        """The append as a command for ``fenced_write``."""
        return ("XADD", self.key, "MAXLEN", self._maxlen, "*", _FIELD, self._kind.encode(value))

    async def read_last(self, count: int) -> list[tuple[str, V | Refused]]:
        """The newest ``count`` entries with their ids, oldest of them first. Raises ``StoreUnavailable``."""
        return self._entries(await self._store.redis.xrevrange(self.key, count=count))[::-1]

    async def read_after(self, entry_id: str, count: int) -> list[tuple[str, V | Refused]]:
        """At most ``count`` entries after an id, oldest first; ``"0"`` for the first. Raises ``StoreUnavailable``."""
        return self._entries(await self._store.redis.xrange(self.key, min=f"({entry_id}", count=count))

    def _entries(self, found: Any) -> list[tuple[str, V | Refused]]:
        entries: list[tuple[str, V | Refused]] = []
        for raw_id, fields in cast("list[tuple[bytes, Mapping[bytes, bytes]]]", found or []):
            entry_id = raw_id.decode()
            record = self._kind.decode(fields.get(_FIELD), key=self.key, field=entry_id)
            if isinstance(record, Refused):
                record = dataclasses.replace(record, remedy=record.remedy.replace("HDEL '", "XDEL '"))
            entries.append((entry_id, record))
        return entries
