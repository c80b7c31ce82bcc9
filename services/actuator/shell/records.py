"""The actuator's records in the store: read once, then only what changed is written, fenced, in one step.

Each record is a message of ``trimtab.store.v1`` (``trimtab.store.records``); what releases before store schema 2 wrote
is read by ``actuator.shell.legacy`` and rewritten when it changes. Other services do not read them, but ask over gRPC.
A record that cannot be read becomes a ``RefusedRecord`` of the state, and nothing is written in its place.
Gateways are stored by name only, see ``actuator.core.tick.resume``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from actuator.core.model import (
    Floor,
    Gateway,
    GroupOutcome,
    Hold,
    Meta,
    Operation,
    PlacedSpec,
    Pool,
    Replica,
    State,
    Step,
)
from actuator.core.refused import RefusedKind, RefusedRecord
from actuator.shell import legacy
from actuator.shell.refusals import refused_record
from trimtab.api.store.v1 import actuator_pb2 as pb
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.lease import Argument, fenced_write, hash_commands
from trimtab.store.message_codec import Rules
from trimtab.store.records import RecordKind, Refused, RefusedReason, record_codec

R = TypeVar("R")
_META_FIELD = "meta"
_TOKEN_FIELD = "token"  # noqa: S105  # a fencing token is no secret

_RULES = Rules(
    ids={
        PlacedSpec: ("spec.replica",),
        Hold: ("owner",),
        Step: ("replica", "kind"),
        Floor: ("service", "role"),
        GroupOutcome: ("group",),
    },
    within={Pool: "settings"},
)
REPLICA = RecordKind(
    name="replica",
    schema=1,
    codec=record_codec(Replica, pb.ReplicaRecord, _RULES),
    legacy=legacy.read_replica,
    name_of=lambda replica: replica.name,
    removing="its server is taken up again as it is found",
)
POOL = RecordKind(
    name="pool",
    schema=1,
    codec=record_codec(Pool, pb.PoolRecord, _RULES),
    legacy=legacy.read_pool,
    name_of=lambda pool: pool.pool,
    removing="its servers stay as they are until the policy engine says again what the pool should look like",
)
OPERATION = RecordKind(
    name="operation",
    schema=1,
    codec=record_codec(Operation, pb.OperationRecord, _RULES),
    legacy=legacy.read_operation,
    name_of=lambda operation: operation.operation_id,
    removing="what it left undone is put right from what its replicas are",
)
META = RecordKind(
    name="metadata record",
    schema=1,
    codec=record_codec(Meta, pb.ActuatorMetaRecord, _RULES),
    legacy=legacy.read_meta,
    removing="revisions go on from the clock; writers' tokens and answered requests are forgotten",
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What the store holds. ``last_token`` is the fencing token that wrote here last; None for an empty store."""

    state: State
    last_token: int | None


class _Hash(Generic[R]):
    """One hash of records, and its bytes as they were read or written last."""

    def __init__(self, key: str, records: "RecordKind[R]", kind: RefusedKind) -> None:
        self.key = key
        self._records = records
        self._kind = kind
        self._raw: dict[str, bytes] = {}
        self._pending: dict[str, bytes] = {}
        self._removed: list[str] = []

    def parse(self, raw: Mapping[bytes, bytes]) -> tuple[dict[str, R], list[RefusedRecord]]:
        self._raw = {_text(name): value for name, value in raw.items()}
        found: dict[str, R] = {}
        refused = []
        for name in sorted(self._raw):
            record = self._records.decode(self._raw[name], key=self.key, field=name)
            if isinstance(record, Refused):
                refused.append(refused_record(self._kind, record, self._records))
            else:
                found[name] = record
        return found, refused

    def changes(
        self, old: Mapping[str, R], new: Mapping[str, R], refused: Sequence[RefusedRecord]
    ) -> list[tuple[Argument, ...]]:
        """Commands for what differs; ``stored`` says that they were carried out."""
        kept = {record.name for record in refused if record.kind is self._kind}
        self._pending = {
            name: self._records.encode(new[name], self._raw.get(name) if name in old else None)
            for name in sorted(new)
            if name not in kept and old.get(name) is not new[name] and old.get(name) != new[name]
        }
        self._removed = sorted(old.keys() - new.keys() - kept)
        return hash_commands(self.key, self._pending, self._removed)

    def stored(self) -> None:
        self._raw.update(self._pending)
        for name in self._removed:
            self._raw.pop(name, None)


class Records:
    """The records of one cluster."""

    def __init__(self, store: Store, cluster: str) -> None:
        self._store = store
        self.owner = keys.actuator(cluster)
        self._replicas = _Hash(keys.replicas(cluster), REPLICA, RefusedKind.REPLICA)
        self._pools = _Hash(keys.pool_states(cluster), POOL, RefusedKind.POOL)
        self._operations = _Hash(keys.operations(cluster), OPERATION, RefusedKind.OPERATION)
        self._gateways = keys.gateways(cluster)
        self._meta = keys.revisions(cluster)
        self._raw_meta: bytes | None = None

    async def load(self) -> Loaded:
        """Everything stored; an empty state when nothing is. Raises ``StoreUnavailable``."""
        pipeline = self._store.redis.pipeline(transaction=True)
        for key in (self._replicas.key, self._pools.key, self._operations.key, self._gateways, self._meta):
            pipeline.hgetall(key)
        raw = cast("list[dict[bytes, bytes]]", await pipeline.execute())
        replicas, bad_replicas = self._replicas.parse(raw[0])
        pools, bad_pools = self._pools.parse(raw[1])
        operations, bad_operations = self._operations.parse(raw[2])
        meta, last_token, bad_meta = self._parse_meta(raw[4])
        state = State(
            replicas=replicas,
            pools=pools,
            operations=operations,
            gateways={_text(name): Gateway(gateway=_text(name), lease_until_s=0.0) for name in raw[3]},
            meta=meta,
            refused=(*bad_meta, *bad_pools, *bad_operations, *bad_replicas),
        )
        return Loaded(state=state, last_token=last_token)

    async def save(self, old: State, new: State, token: int, also: Sequence[tuple[Argument, ...]] = ()) -> None:
        """Writes what differs, and in the same step ``also`` (commands on keys of the same owner).

        Refused records are left as they are. Raises ``StoreUnavailable``, ``FencedOff``; then nothing may be acted on.
        Raises ``ValueError`` for a state with a refused metadata record, on which nothing may be written.
        """
        if any(record.kind is RefusedKind.META for record in new.refused):
            raise ValueError("the cluster's metadata cannot be read: nothing may be written")
        hashes: list[_Hash[Any]] = [self._replicas, self._pools, self._operations]
        commands = [
            *self._replicas.changes(old.replicas, new.replicas, new.refused),
            *self._pools.changes(old.pools, new.pools, new.refused),
            *self._operations.changes(old.operations, new.operations, new.refused),
            *hash_commands(
                self._gateways,
                dict.fromkeys(sorted(new.gateways.keys() - old.gateways.keys()), b"1"),
                sorted(old.gateways.keys() - new.gateways.keys()),
            ),
        ]
        raw_meta = self._raw_meta
        if old.meta != new.meta:
            raw_meta = META.encode(new.meta, self._raw_meta)
            commands += hash_commands(self._meta, {_META_FIELD: raw_meta}, [])
        commands += also
        if commands:
            commands.append(("HSET", self._meta, _TOKEN_FIELD, token))
            await fenced_write(self._store, self.owner, token, commands)
            self._raw_meta = raw_meta
            for each in hashes:
                each.stored()

    def _parse_meta(self, raw: Mapping[bytes, bytes]) -> tuple[Meta, int | None, list[RefusedRecord]]:
        self._raw_meta = raw.get(_META_FIELD.encode())
        refused = []
        meta = Meta()
        if self._raw_meta is not None:
            found = META.decode(self._raw_meta, key=self._meta, field=_META_FIELD)
            if isinstance(found, Refused):
                refused.append(refused_record(RefusedKind.META, found, META))
            else:
                meta = found
        token = raw.get(_TOKEN_FIELD.encode())
        if token is not None and not token.isdigit():
            refused.append(
                RefusedRecord(
                    kind=RefusedKind.META,
                    name=_TOKEN_FIELD,
                    reason=RefusedReason.CORRUPT.value,
                    why=f"{self._meta}, field {_TOKEN_FIELD}: {token[:40]!r} is no fencing token",
                    remedy=f"restore the store from a backup, or remove it with HDEL '{self._meta}' '{_TOKEN_FIELD}': "
                    "who wrote last is forgotten, and the next actuator reads every record anew",
                )
            )
            token = None
        return meta, int(token) if token is not None else None, refused


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
