"""What the engine keeps in the store between cycles, so that the next leader goes on where the last one stopped.

A record that cannot be read is refused by itself: it is kept as it is, and its subject, a pool or a scaled service, is
held until an operator has restored or removed the record. The store's copy is written first, always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from policy_engine.core.pool.decide import PoolState
from policy_engine.core.scaled.decide import ScaledState
from policy_engine.shell.records import Command
from policy_engine.shell.state_records import DESIRED_POOL, POOL_STATE, SCALED_STATE
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.pool import DesiredPool
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.record_hash import RecordHash, corrupt
from trimtab.store.records import Refused


class _ScalingRequests:
    """The engine's requests are stored as the messages that the pre-scheduler takes."""

    name = "scaling request"

    def decode(self, raw: object, *, key: str, field: str = "") -> scheduler_pb2.ScalingRequest | Refused:
        try:
            return decode(scheduler_pb2.ScalingRequest, raw, place=key)
        except CorruptEntry:
            data = raw if isinstance(raw, bytes) else b""
            return corrupt(self.name, key, field, f"is no {self.name}", data)

    def encode(self, value: scheduler_pb2.ScalingRequest, previous: bytes | None = None) -> bytes:
        return value.SerializeToString()

    def undamaged(self, raw: bytes) -> Any | None:
        return None


def _of_pool(name: str, desired: DesiredPool) -> str:
    return "" if desired.pool == name else f"is of pool {desired.pool!r}"


def _of_service(name: str, request: scheduler_pb2.ScalingRequest) -> str:
    return "" if request.service == name else f"is of service {request.service!r}"


def _pool_states() -> RecordHash[PoolState]:
    return RecordHash(POOL_STATE, keys.engine_state("pools"))


def _desired_pools() -> RecordHash[DesiredPool]:
    return RecordHash(DESIRED_POOL, keys.desired_pools(), fault=_of_pool)


def _scaled_states() -> RecordHash[ScaledState]:
    return RecordHash(SCALED_STATE, keys.engine_state("scaled"))


def _scaling_requests() -> RecordHash[scheduler_pb2.ScalingRequest]:
    return RecordHash(_ScalingRequests(), keys.scaling_requests(), fault=_of_service)


@dataclass
class EngineState:
    """The engine's states by name, as they are in the store."""

    pool_states: RecordHash[PoolState] = field(default_factory=_pool_states)
    desired_pools: RecordHash[DesiredPool] = field(default_factory=_desired_pools)
    scaled_states: RecordHash[ScaledState] = field(default_factory=_scaled_states)
    scaling_requests: RecordHash[scheduler_pb2.ScalingRequest] = field(default_factory=_scaling_requests)

    @property
    def pools(self) -> dict[str, PoolState]:
        """Pool → its state."""
        return self.pool_states.values

    @property
    def desired(self) -> dict[str, DesiredPool]:
        """Pool → its desired state."""
        return self.desired_pools.values

    @property
    def scaled(self) -> dict[str, ScaledState]:
        """Scaled service → its state."""
        return self.scaled_states.values

    @property
    def requests(self) -> dict[str, scheduler_pb2.ScalingRequest]:
        """Scaled service → its last request."""
        return self.scaling_requests.values

    def hashes(self) -> tuple[RecordHash[Any], ...]:
        """All of them."""
        return (self.pool_states, self.desired_pools, self.scaled_states, self.scaling_requests)

    def refused(self) -> list[Refused]:
        """Every record that cannot be read."""
        return [record for found in self.hashes() for record in found.refused.values()]

    def why_pool_held(self, pool: str) -> str:
        """The refused records of a pool; empty when all of it could be read."""
        return _refusals(pool, self.pool_states, self.desired_pools)

    def why_service_held(self, service: str) -> str:
        """The refused records of a scaled service; empty when all of it could be read."""
        return _refusals(service, self.scaled_states, self.scaling_requests)

    def pool_names(self) -> set[str]:
        """Every pool that the store has anything of."""
        return _names(self.pool_states, self.desired_pools)

    def service_names(self) -> set[str]:
        """Every scaled service that the store has anything of."""
        return _names(self.scaled_states, self.scaling_requests)

    def pool_state_command(self, name: str, state: PoolState) -> Command:
        """Writes a pool's state."""
        return self.pool_states.command(name, state)

    def desired_command(self, desired: DesiredPool) -> Command:
        """Writes a pool's desired state."""
        return self.desired_pools.command(desired.pool, desired)

    def scaled_state_command(self, name: str, state: ScaledState) -> Command:
        """Writes a scaled service's state."""
        return self.scaled_states.command(name, state)

    def request_command(self, request: scheduler_pb2.ScalingRequest) -> Command:
        """Writes a scaling request."""
        return self.scaling_requests.command(request.service, request)

    def forget_pool(self, name: str) -> list[Command]:
        """Drop a deleted pool; the commands that do the same in the store."""
        return [self.pool_states.forget(name), self.desired_pools.forget(name)]

    def forget_scaled(self, name: str) -> list[Command]:
        """Drop a deleted service; the commands that do the same in the store."""
        return [self.scaled_states.forget(name), self.scaling_requests.forget(name)]

    async def look_again(self, store: Store) -> None:
        """Read refused records once more: an operator may have restored or removed them."""
        for found in self.hashes():
            await found.look_again(store)


def _refusals(name: str, *hashes: RecordHash[Any]) -> str:
    return "; ".join(str(found.refused[name]) for found in hashes if name in found.refused)


def _names(*hashes: RecordHash[Any]) -> set[str]:
    return {name for found in hashes for name in (*found.values, *found.refused)}


async def load_engine_state(store: Store) -> EngineState:
    """Everything, in one transaction."""
    memory = EngineState()
    pipeline = store.redis.pipeline(transaction=True)
    for found in memory.hashes():
        pipeline.hgetall(found.key)
    for found, entries in zip(memory.hashes(), await pipeline.execute(), strict=True):
        for name, raw in _by_name(entries):
            found.take(name, raw)
    return memory


def _by_name(found: Mapping[bytes, bytes]) -> list[tuple[str, bytes]]:
    return [(name.decode(errors="replace"), found[name]) for name in sorted(found)]


async def read_hash(store: Store, key: str) -> list[tuple[str, bytes]]:
    """A hash of the store, by name."""
    return _by_name(cast("dict[bytes, bytes]", await cast("Any", store.redis.hgetall(key))))
