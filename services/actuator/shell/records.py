"""The actuator's records in the store: read once, then only what changed is written, fenced, in one step.

Records are the core's own dataclasses as JSON: nobody else reads them, everybody else asks over gRPC. Gateways are
stored by name only, see ``actuator.core.tick.resume``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import pydantic

from actuator.core.model import Gateway, Meta, Operation, Pool, Replica, State
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import Argument, fenced_write, hash_commands

R = TypeVar("R")
_META_FIELD = "meta"
_TOKEN_FIELD = "token"  # noqa: S105  # a fencing token is no secret

_REPLICA = pydantic.TypeAdapter(Replica)
_POOL = pydantic.TypeAdapter(Pool)
_OPERATION = pydantic.TypeAdapter(Operation)
_META = pydantic.TypeAdapter(Meta)


@dataclass(frozen=True)
class _Hash(Generic[R]):
    key: str
    adapter: "pydantic.TypeAdapter[R]"

    def parse(self, raw: Mapping[bytes, bytes]) -> dict[str, R]:
        return {
            name.decode(): _decode(self.adapter, value, f"{self.key} {name.decode()}") for name, value in raw.items()
        }

    def changes(self, old: Mapping[str, R], new: Mapping[str, R]) -> list[tuple[Argument, ...]]:
        written = {
            name: new[name] for name in sorted(new) if old.get(name) is not new[name] and old.get(name) != new[name]
        }
        return hash_commands(
            self.key,
            {name: self.adapter.dump_json(value) for name, value in written.items()},
            sorted(old.keys() - new.keys()),
        )


class Records:
    """The records of one cluster."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self.owner = keys.actuator(cluster)
        self._replicas = _Hash(keys.replicas(cluster), _REPLICA)
        self._pools = _Hash(keys.pool_states(cluster), _POOL)
        self._operations = _Hash(keys.operations(cluster), _OPERATION)
        self._gateways = keys.gateways(cluster)
        self._meta = keys.revisions(cluster)

    async def load(self) -> State:
        """Everything stored; an empty state when nothing is. Raises ``StoreUnavailable``, ``CorruptEntry``."""
        pipeline = self._store.redis.pipeline(transaction=True)
        for key in (self._replicas.key, self._pools.key, self._operations.key, self._gateways, self._meta):
            pipeline.hgetall(key)
        replicas, pools, operations, gateways, meta = cast("list[dict[bytes, bytes]]", await pipeline.execute())
        raw_meta = meta.get(_META_FIELD.encode())
        return State(
            replicas=self._replicas.parse(replicas),
            pools=self._pools.parse(pools),
            operations=self._operations.parse(operations),
            gateways={name.decode(): Gateway(gateway=name.decode(), lease_until_s=0.0) for name in gateways},
            meta=_decode(_META, raw_meta, f"{self._meta} {_META_FIELD}") if raw_meta is not None else Meta(),
        )

    async def last_token(self) -> int | None:
        """The fencing token that wrote here last; None for an empty store."""
        raw = await cast("Any", self._store.redis.hget(self._meta, _TOKEN_FIELD))
        return int(raw) if raw is not None else None

    async def save(self, old: State, new: State, token: int, also: Sequence[tuple[Argument, ...]] = ()) -> None:
        """Writes what differs, and in the same step ``also`` (commands on keys of the same owner).

        Raises ``StoreUnavailable``, ``FencedOff``; then nothing may be acted on.
        """
        commands = [
            *self._replicas.changes(old.replicas, new.replicas),
            *self._pools.changes(old.pools, new.pools),
            *self._operations.changes(old.operations, new.operations),
            *hash_commands(
                self._gateways,
                dict.fromkeys(sorted(new.gateways.keys() - old.gateways.keys()), b"1"),
                sorted(old.gateways.keys() - new.gateways.keys()),
            ),
        ]
        if old.meta != new.meta:
            commands += hash_commands(self._meta, {_META_FIELD: _META.dump_json(new.meta)}, [])
        commands += also
        if commands:
            commands.append(("HSET", self._meta, _TOKEN_FIELD, token))
            await fenced_write(self._store, self.owner, token, commands)


def _decode(adapter: "pydantic.TypeAdapter[R]", raw: bytes, place: str) -> R:
    try:
        return adapter.validate_json(raw)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CorruptEntry(f"{place}: {where}: {first['msg']}") from error
