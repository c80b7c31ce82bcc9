"""What the engine keeps in the store from tick to tick, so that the next leader goes on where the last one stopped.

Desired state is protobuf, as the contracts with actuators and pre-scheduler are; the cores' own states are JSON of
their types. A state that does not parse (an older version wrote it) is replaced by a blank one and logged: a blank
state takes over what exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import structlog
from pydantic import TypeAdapter, ValidationError

from policy_engine.core.pool import PoolState
from policy_engine.core.scaled import ScaledState
from policy_engine.shell.records import Command
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.pool import DesiredPool, desired_from_proto, desired_to_proto
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry

log = structlog.get_logger(__name__)

S = TypeVar("S")

_POOL_STATE = TypeAdapter(PoolState)
_SCALED_STATE = TypeAdapter(ScaledState)
_POOLS = "pools"
_SCALED = "scaled"


@dataclass
class Memory:
    """The engine's states by name; the store's copy is written first, always."""

    pools: dict[str, PoolState] = field(default_factory=dict)
    desired: dict[str, DesiredPool] = field(default_factory=dict)
    scaled: dict[str, ScaledState] = field(default_factory=dict)
    requests: dict[str, scheduler_pb2.ScalingRequest] = field(default_factory=dict)

    def forget_pool(self, name: str) -> list[Command]:
        """Drop a deleted pool; the commands that do the same in the store."""
        self.pools.pop(name, None)
        self.desired.pop(name, None)
        return [("HDEL", keys.engine_state(_POOLS), name), ("HDEL", keys.desired_pools(), name)]

    def forget_scaled(self, name: str) -> list[Command]:
        """Drop a deleted service; the commands that do the same in the store."""
        self.scaled.pop(name, None)
        self.requests.pop(name, None)
        return [("HDEL", keys.engine_state(_SCALED), name), ("HDEL", keys.scaling_requests(), name)]


async def load_memory(store: Store) -> Memory:
    """Everything, in one transaction."""
    pipeline = store.redis.pipeline(transaction=True)
    pipeline.hgetall(keys.engine_state(_POOLS))
    pipeline.hgetall(keys.desired_pools())
    pipeline.hgetall(keys.engine_state(_SCALED))
    pipeline.hgetall(keys.scaling_requests())
    pools, desired, scaled, requests = await pipeline.execute()
    memory = Memory()
    for name, raw in _by_name(pools):
        memory.pools[name] = _parse(_POOL_STATE, raw, f"state of pool {name}", PoolState())
    for name, raw in _by_name(scaled):
        memory.scaled[name] = _parse(_SCALED_STATE, raw, f"state of service {name}", ScaledState())
    for name, raw in _by_name(desired):
        try:
            message = decode(actuator_pb2.PoolState, raw, place=f"desired state of pool {name}")
            memory.desired[name] = desired_from_proto(message)
        except (CorruptEntry, ValueError) as error:
            log.warning("a pool's desired state was left out", error=str(error))
    for name, raw in _by_name(requests):
        try:
            memory.requests[name] = decode(scheduler_pb2.ScalingRequest, raw, place=f"scaling request of {name}")
        except CorruptEntry as error:
            log.warning("a scaling request was left out", error=str(error))
    return memory


def _by_name(found: dict[bytes, bytes]) -> list[tuple[str, bytes]]:
    return [(name.decode(errors="replace"), found[name]) for name in sorted(found)]


def _parse(adapter: TypeAdapter[S], raw: bytes, place: str, blank: S) -> S:
    try:
        return adapter.validate_json(raw)
    except ValidationError as error:
        log.warning("starting from a blank state", place=place, faults=error.error_count())
        return blank


def pool_state_command(name: str, state: PoolState) -> Command:
    """Writes a pool's state."""
    return ("HSET", keys.engine_state(_POOLS), name, _POOL_STATE.dump_json(state))


def scaled_state_command(name: str, state: ScaledState) -> Command:
    """Writes a scaled service's state."""
    return ("HSET", keys.engine_state(_SCALED), name, _SCALED_STATE.dump_json(state))


def desired_command(desired: DesiredPool) -> Command:
    """Writes a pool's desired state."""
    return ("HSET", keys.desired_pools(), desired.pool, desired_to_proto(desired).SerializeToString())


def request_command(service: str, data: bytes) -> Command:
    """Writes a scaling request."""
    return ("HSET", keys.scaling_requests(), service, data)


async def read_hash(store: Store, key: str) -> list[tuple[str, bytes]]:
    """A hash of the store, by name."""
    return _by_name(cast("dict[bytes, bytes]", await cast("Any", store.redis.hgetall(key))))
