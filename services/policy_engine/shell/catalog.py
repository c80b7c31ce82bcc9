"""The resources that users applied: stored as documents, cached and parsed, with what the server adds.

Every process reads them; changes go through the leader, one at a time, so that rules over several resources hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.resources import Pool, ResourceError, ServicePolicy, parse_pool, parse_service_policy
from trimtab.domain.time import timestamp_of
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.documents import Document, Documents

log = structlog.get_logger(__name__)

P = TypeVar("P", policy_pb2.ServicePolicy, policy_pb2.Pool)

POLICIES: Final = "service-policies"
POOLS: Final = "pools"


@dataclass(frozen=True)
class Snapshot:
    """Every resource at one time.

    The protobuf forms carry etag, revision, times and `paused`; one that does not parse any more is only among those.
    """

    policies: dict[str, ServicePolicy] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    policy_protos: dict[str, policy_pb2.ServicePolicy] = field(default_factory=dict)
    pool_protos: dict[str, policy_pb2.Pool] = field(default_factory=dict)
    pause_reasons: dict[str, str] = field(default_factory=dict)

    def pool_of(self, service: str) -> Pool | None:
        """The pool that the service lives in."""
        for pool in self.pools.values():
            if any(member.service == service for member in pool.spec.members):
                return pool
        return None

    def members_of(self, pool: Pool) -> tuple[ServicePolicy, ...]:
        """The policies of a pool's members, by name; missing ones are left out."""
        names = sorted({member.service for member in pool.spec.members})
        return tuple(self.policies[name] for name in names if name in self.policies)

    def etags(self, pool: Pool | None, policies: tuple[ServicePolicy, ...]) -> tuple[tuple[str, str], ...]:
        """`kind/name` → etag of what a decision rests on."""
        found = {f"ServicePolicy/{policy.name}": policy.metadata.etag for policy in policies}
        if pool is not None:
            found[f"Pool/{pool.name}"] = pool.metadata.etag
        return tuple(sorted(found.items()))


def pause_field(kind: str, name: str) -> str:
    """The field of the paused hash."""
    return f"{kind}/{name}"


class Catalog:
    """The resources in the store, and the newest snapshot of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.policies: Documents[policy_pb2.ServicePolicy] = Documents(
            store, keys.POLICY_ENGINE, POLICIES, policy_pb2.ServicePolicy
        )
        self.pools: Documents[policy_pb2.Pool] = Documents(store, keys.POLICY_ENGINE, POOLS, policy_pb2.Pool)
        self.snapshot = Snapshot()
        self._revisions: tuple[int, int, bytes] | None = None

    async def refresh(self) -> Snapshot:
        """Read again what has changed."""
        pipeline = self._store.redis.pipeline(transaction=False)
        pipeline.get(keys.documents_revision(keys.POLICY_ENGINE, POLICIES))
        pipeline.get(keys.documents_revision(keys.POLICY_ENGINE, POOLS))
        pipeline.hgetall(keys.paused())
        policies, pools, paused = await pipeline.execute()
        seen = (int(policies or 0), int(pools or 0), json.dumps(sorted(map(repr, paused.items()))).encode())
        if seen != self._revisions:
            self.snapshot = await self._read(
                {name.decode(errors="replace"): why.decode(errors="replace") for name, why in paused.items()}
            )
            self._revisions = seen
        return self.snapshot

    async def _read(self, paused: dict[str, str]) -> Snapshot:
        policies = (await self.policies.list()).documents
        pools = (await self.pools.list()).documents
        snapshot = Snapshot(pause_reasons=paused)
        for policy_document in policies:
            proto = dressed(policy_document, paused=pause_field(POLICIES, policy_document.name) in paused)
            snapshot.policy_protos[policy_document.name] = proto
            try:
                snapshot.policies[policy_document.name] = parse_service_policy(proto)
            except ResourceError as error:
                log.warning("a stored policy does not parse any more", policy=policy_document.name, error=str(error))
        for pool_document in pools:
            pool_proto = dressed(pool_document, paused=pause_field(POOLS, pool_document.name) in paused)
            snapshot.pool_protos[pool_document.name] = pool_proto
            try:
                snapshot.pools[pool_document.name] = parse_pool(pool_proto)
            except ResourceError as error:
                log.warning("a stored pool does not parse any more", pool=pool_document.name, error=str(error))
        return snapshot


def dressed(document: Document[P], *, paused: bool) -> P:
    """The stored message with the metadata that the server adds."""
    message = document.message
    message.metadata.name = document.name
    message.metadata.etag = document.etag
    message.metadata.revision = document.revision
    message.metadata.paused = paused
    message.metadata.update_time.CopyFrom(timestamp_of(document.written_s))
    return message


def bare(message: P) -> P:
    """A copy without what the server adds, as it is stored and compared."""
    copy = type(message)()
    copy.CopyFrom(message)
    name, created = message.metadata.name, message.metadata.create_time
    has_created = message.metadata.HasField("create_time")
    copy.metadata.Clear()
    copy.metadata.name = name
    if has_created:
        copy.metadata.create_time.CopyFrom(created)
    return copy
