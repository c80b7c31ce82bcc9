"""What the engine keeps in the store from turn to turn, so that the next leader goes on where the last one stopped.

A record that cannot be read is refused by itself: it is kept as it is, and its subject, a pool or a scaled service, is
held until an operator has restored or removed the record. The store's copy is written first, always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import structlog

from policy_engine.core.pool import PoolState
from policy_engine.core.scaled import ScaledState
from policy_engine.shell.records import Command
from policy_engine.shell.state_records import (
    DESIRED_POOL,
    POOL_STATE,
    SCALED_STATE,
    StoredDesiredPool,
    StoredPoolState,
    StoredScaledState,
)
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.message_forms import has_unknown_fields
from trimtab.store.records import RecordKind, Refused, RefusedReason

log = structlog.get_logger(__name__)

V = TypeVar("V")

POOLS = keys.engine_state("pools")
SCALED = keys.engine_state("scaled")
DESIRED = keys.desired_pools()
REQUESTS = keys.scaling_requests()

_Place = tuple[str, str]
"""A hash and its field."""


@dataclass
class Memory:
    """The engine's states by name, and the records that were refused."""

    pools: dict[str, PoolState] = field(default_factory=dict)
    desired: dict[str, actuator_pb2.PoolState] = field(default_factory=dict)
    scaled: dict[str, ScaledState] = field(default_factory=dict)
    requests: dict[str, scheduler_pb2.ScalingRequest] = field(default_factory=dict)
    refused: dict[_Place, Refused] = field(default_factory=dict)
    _previous: dict[_Place, bytes] = field(default_factory=dict)
    """Records with fields that this release does not know, which its rewrites keep."""

    def pool_names(self) -> set[str]:
        """Every pool that the store has anything of."""
        return {*self.pools, *self.desired, *(name for key, name in self.refused if key in (POOLS, DESIRED))}

    def service_names(self) -> set[str]:
        """Every scaled service that the store has anything of."""
        return {*self.scaled, *self.requests, *(name for key, name in self.refused if key in (SCALED, REQUESTS))}

    def why_pool_held(self, name: str) -> str:
        """The refused records of a pool; empty when all of it could be read."""
        return self._why_held((POOLS, name), (DESIRED, name))

    def why_service_held(self, name: str) -> str:
        """The refused records of a scaled service; empty when all of it could be read."""
        return self._why_held((SCALED, name), (REQUESTS, name))

    def _why_held(self, *places: _Place) -> str:
        return "; ".join(str(self.refused[place]) for place in places if place in self.refused)

    def pool_state_command(self, name: str, state: PoolState) -> Command:
        """Writes a pool's state."""
        return self._write(POOL_STATE, POOLS, name, StoredPoolState(state=state))

    def scaled_state_command(self, name: str, state: ScaledState) -> Command:
        """Writes a scaled service's state."""
        return self._write(SCALED_STATE, SCALED, name, StoredScaledState(state=state))

    def desired_command(self, desired: actuator_pb2.PoolState) -> Command:
        """Writes a pool's desired state."""
        return self._write(DESIRED_POOL, DESIRED, desired.pool, StoredDesiredPool(state=desired))

    def request_command(self, request: scheduler_pb2.ScalingRequest) -> Command:
        """Writes a scaling request, in the form that the pre-scheduler reads."""
        self._check_may_write((REQUESTS, request.service))
        return ("HSET", REQUESTS, request.service, request.SerializeToString())

    def forget_pool(self, name: str) -> list[Command]:
        """Drop a deleted pool; the commands that do the same in the store."""
        self.pools.pop(name, None)
        self.desired.pop(name, None)
        return self._forget((POOLS, name), (DESIRED, name))

    def forget_scaled(self, name: str) -> list[Command]:
        """Drop a deleted service; the commands that do the same in the store."""
        self.scaled.pop(name, None)
        self.requests.pop(name, None)
        return self._forget((SCALED, name), (REQUESTS, name))

    def _forget(self, *places: _Place) -> list[Command]:
        for place in places:
            self._previous.pop(place, None)
            refused = self.refused.pop(place, None)
            if refused is not None:
                log.warning("a refused record goes with its deleted subject", key=refused.key, field=refused.field)
        return [("HDEL", *place) for place in places]

    def _write(self, kind: RecordKind[V], key: str, name: str, value: V) -> Command:
        place = (key, name)
        self._check_may_write(place)
        raw = kind.encode(value, previous=self._previous.get(place))
        if place in self._previous:
            self._previous[place] = raw
        return ("HSET", key, name, raw)

    def _check_may_write(self, place: _Place) -> None:
        """Raises CorruptEntry: what was refused is not written over, whatever asks for it."""
        if place in self.refused:
            raise CorruptEntry(str(self.refused[place]))

    def take(self, key: str, name: str, raw: bytes) -> None:
        """Read one field of a hash, in the place of what was known of it."""
        if key == POOLS:
            pool = self._read(POOL_STATE, key, name, raw)
            if pool is not None:
                self.pools[name] = pool.state
        elif key == SCALED:
            scaled = self._read(SCALED_STATE, key, name, raw)
            if scaled is not None:
                self.scaled[name] = scaled.state
        elif key == DESIRED:
            desired = self._read(DESIRED_POOL, key, name, raw)
            if desired is not None and desired.state.pool == name:
                self.desired[name] = desired.state
            elif desired is not None:
                self._refuse(DESIRED_POOL.name, key, name, f"is of pool {desired.state.pool!r}", raw)
        else:
            self._take_request(name, raw)

    def _take_request(self, name: str, raw: bytes) -> None:
        self.refused.pop((REQUESTS, name), None)
        try:
            request = decode(scheduler_pb2.ScalingRequest, raw, place="it")
        except CorruptEntry as error:
            self._refuse("scaling request", REQUESTS, name, str(error), raw)
            return
        if request.service == name:
            self.requests[name] = request
        else:
            self._refuse("scaling request", REQUESTS, name, f"is of service {request.service!r}", raw)

    def _read(self, kind: RecordKind[V], key: str, name: str, raw: bytes) -> V | None:
        place = (key, name)
        self.refused.pop(place, None)
        self._previous.pop(place, None)
        found = kind.decode(raw, key=key, field=name)
        if isinstance(found, Refused):
            self.refused[place] = found
            return None
        message = kind.readable(raw)
        if message is not None and has_unknown_fields(message):
            self._previous[place] = raw
        return found

    def _refuse(self, kind: str, key: str, name: str, why: str, raw: bytes) -> None:
        remedy = f"restore the store from a backup, or remove the record with HDEL '{key}' '{name}'"
        self.refused[key, name] = Refused(
            kind=kind, key=key, field=name, reason=RefusedReason.CORRUPT, why=why, remedy=remedy, raw=raw
        )

    async def look_again(self, store: Store) -> None:
        """Read the refused records again: an operator may have restored or removed them."""
        for key, name in sorted(self.refused):
            raw = await cast("Any", store.redis.hget(key, name))
            if raw is None:
                del self.refused[key, name]
            elif raw != self.refused[key, name].raw:
                self.take(key, name, raw)


async def load_memory(store: Store) -> Memory:
    """Everything, in one transaction."""
    hashes = (POOLS, DESIRED, SCALED, REQUESTS)
    pipeline = store.redis.pipeline(transaction=True)
    for key in hashes:
        pipeline.hgetall(key)
    memory = Memory()
    for key, found in zip(hashes, await pipeline.execute(), strict=True):
        for name, raw in _by_name(found):
            memory.take(key, name, raw)
    return memory


def _by_name(found: Mapping[bytes, bytes]) -> list[tuple[str, bytes]]:
    return [(name.decode(errors="replace"), found[name]) for name in sorted(found)]


async def read_hash(store: Store, key: str) -> list[tuple[str, bytes]]:
    """A hash of the store, by name."""
    return _by_name(cast("dict[bytes, bytes]", await cast("Any", store.redis.hgetall(key))))


class RefusedLog:
    """Names each refused record in the log once, and says when it is read again."""

    def __init__(self) -> None:
        self._named: dict[_Place, Refused] = {}

    def show(self, refused: Iterable[Refused]) -> None:
        """Log what is new among those that are refused now."""
        now = {(item.key, item.field): item for item in refused}
        for place in sorted(now):
            if self._named.get(place) != now[place]:
                item = now[place]
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
