"""A hash of records as its only writer knows it: values by field, and the fields that were refused.

A refused record is never written over: it stays as it is until an operator has restored or removed it, which
`look_again` sees, or until its subject is deleted (`forget`).
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar, cast

import structlog

from trimtab.store.client import Store
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import Argument
from trimtab.store.message_forms import has_unknown_fields
from trimtab.store.records import Refused, RefusedReason

log = structlog.get_logger(__name__)

V = TypeVar("V")


class Kind(Protocol[V]):
    """What a hash needs of its records; ``RecordKind`` is one."""

    @property
    def name(self) -> str: ...

    def decode(self, raw: object, *, key: str, field: str = "") -> V | Refused: ...

    def encode(self, value: V, previous: bytes | None = None) -> bytes: ...

    def undamaged(self, raw: bytes) -> Any | None: ...


class RecordHash(Generic[V]):
    """One hash. ``fault`` returns why a value does not belong under a name; empty when it does."""

    def __init__(self, kind: Kind[V], key: str, *, fault: Callable[[str, V], str] = lambda name, value: "") -> None:
        self.key = key
        self.values: dict[str, V] = {}
        self.refused: dict[str, Refused] = {}
        self._kind = kind
        self._fault = fault
        # Records with fields that this release does not know, which its rewrites keep.
        self._previous: dict[str, bytes] = {}

    def take(self, name: str, raw: bytes) -> None:
        """Read one field, in the place of what was known of it."""
        for known in (self.values, self.refused, self._previous):
            cast("dict[str, Any]", known).pop(name, None)
        found = self._kind.decode(raw, key=self.key, field=name)
        if isinstance(found, Refused):
            self.refused[name] = found
            return
        fault = self._fault(name, found)
        if fault:
            self.refused[name] = corrupt(self._kind.name, self.key, name, fault, raw)
            return
        self.values[name] = found
        message = self._kind.undamaged(raw)
        if message is not None and has_unknown_fields(message):
            self._previous[name] = raw

    def encode(self, name: str, value: V) -> bytes:
        """The bytes to write under a name. Raises ``CorruptEntry`` for one that was refused."""
        if name in self.refused:
            raise CorruptEntry(str(self.refused[name]))
        raw = self._kind.encode(value, previous=self._previous.get(name))
        if name in self._previous:
            self._previous[name] = raw
        return raw

    def command(self, name: str, value: V) -> tuple[Argument, ...]:
        """Writes one value. Raises ``CorruptEntry`` for one that was refused."""
        return ("HSET", self.key, name, self.encode(name, value))

    def forget(self, name: str) -> tuple[Argument, ...]:
        """Drop a name whose subject is deleted; the command that does the same in the store."""
        self.values.pop(name, None)
        self._previous.pop(name, None)
        if self.refused.pop(name, None) is not None:
            log.warning("a refused record goes with its deleted subject", key=self.key, field=name)
        return ("HDEL", self.key, name)

    async def look_again(self, store: Store) -> None:
        """Read what was refused once more. Raises ``StoreUnavailable``."""
        for name in sorted(self.refused):
            raw = await cast("Any", store.redis.hget(self.key, name))
            if raw is None:
                del self.refused[name]
            elif raw != self.refused[name].raw:
                self.take(name, raw)


def corrupt(kind: str, key: str, name: str, why: str, raw: bytes) -> Refused:
    """The refusal of a record that parses and makes no sense."""
    remedy = f"restore the store from a backup, or remove the record with HDEL '{key}' '{name}'"
    return Refused(kind=kind, key=key, field=name, reason=RefusedReason.CORRUPT, why=why, remedy=remedy, raw=raw)


class RefusedLog:
    """Logs each refused record once, and again when it is readable."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], Refused] = {}

    def show(self, refused: Iterable[Refused]) -> None:
        """Log what is new among those that are refused now."""
        now = {(item.key, item.field): item for item in refused}
        for place in sorted(now):
            item = now[place]
            if self._named.get(place) != item:
                log.error(
                    "a stored record is refused, its subject is held",
                    kind=item.kind,
                    key=item.key,
                    field=item.field,
                    reason=item.reason.value,
                    why=item.why,
                    remedy=item.remedy,
                )
        for key, name in sorted(set(self._named) - set(now)):
            log.info("a record that was refused is read again, or gone", key=key, field=name)
        self._named = now
