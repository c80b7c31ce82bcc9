"""The resources that users applied: stored as documents, cached and parsed, with what the server adds.

Every process reads them; changes go through the leader, one at a time, so that rules over several resources hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import structlog
from google.protobuf.message import Message

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.kinds import ResourceKind, ResourceSet
from trimtab.config.resources import KINDS, POOL, SERVICE_POLICY, Pool, Resource, ResourceError, ServicePolicy
from trimtab.domain.time import timestamp_of
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.documents import Document, Documents

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Every resource at one time.

    `messages` are by kind, then name, and carry etag, revision, times and `paused`; a resource that does not parse any
    more is only among those. `pause_reasons` are by `pause_field`.
    """

    resources: ResourceSet = field(default_factory=ResourceSet)
    messages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pause_reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> Mapping[str, ServicePolicy]:
        """Every ServicePolicy, by name."""
        return self.resources.of(SERVICE_POLICY)

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Every Pool, by name."""
        return self.resources.of(POOL)

    def messages_of(self, kind: ResourceKind[Any, M]) -> Mapping[str, M]:
        """The protobuf forms of one kind, by name."""
        return self.messages.get(kind.name, {})

    @property
    def names(self) -> frozenset[str]:
        """The names of the resources of all kinds, also of those that do not parse."""
        return frozenset(name for messages in self.messages.values() for name in messages)

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
        resources = [*policies, *(() if pool is None else (pool,))]
        return tuple(sorted((f"{one.kind}/{one.name}", one.metadata.etag) for one in resources))


def pause_field(kind: ResourceKind[Any, Any], name: str) -> str:
    """The field of the paused hash."""
    return f"{kind.collection}/{name}"


class Catalog:
    """The resources in the store, and the newest snapshot of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._documents: dict[str, Documents[Any]] = {
            kind.name: Documents(store, keys.POLICY_ENGINE, kind.collection, kind.message) for kind in KINDS
        }
        self.snapshot = Snapshot()
        self._seen: tuple[object, ...] | None = None

    def documents(self, kind: ResourceKind[Any, M]) -> Documents[M]:
        """The stored documents of one kind."""
        return self._documents[kind.name]

    async def refresh(self) -> Snapshot:
        """Read again what has changed."""
        pipeline = self._store.redis.pipeline(transaction=False)
        for kind in KINDS:
            pipeline.get(keys.documents_revision(keys.POLICY_ENGINE, kind.collection))
        pipeline.hgetall(keys.paused())
        *revisions, paused = await pipeline.execute()
        seen = (*(int(revision or 0) for revision in revisions), tuple(sorted(paused.items())))
        if seen != self._seen:
            self.snapshot = await self._read(
                {name.decode(errors="replace"): why.decode(errors="replace") for name, why in paused.items()}
            )
            self._seen = seen
        return self.snapshot

    async def _read(self, paused: dict[str, str]) -> Snapshot:
        messages: dict[str, dict[str, Any]] = {}
        parsed: list[Resource] = []
        for kind in KINDS:
            own = messages[kind.name] = {}
            for document in (await self.documents(kind).list()).documents:
                own[document.name] = dressed(document, paused=pause_field(kind, document.name) in paused)
                try:
                    parsed.append(kind.parse(own[document.name]))
                except ResourceError as error:
                    log.warning(
                        "a stored resource does not parse any more",
                        kind=kind.name,
                        name=document.name,
                        error=str(error),
                    )
        return Snapshot(resources=ResourceSet(parsed), messages=messages, pause_reasons=paused)


def dressed(document: Document[M], *, paused: bool) -> M:
    """The stored message with the metadata that the server adds."""
    metadata = metadata_of(document.message)
    metadata.name = document.name
    metadata.etag = document.etag
    metadata.revision = document.revision
    metadata.paused = paused
    metadata.update_time.CopyFrom(timestamp_of(document.written_s))
    return document.message


def metadata_of(message: Message) -> policy_pb2.ResourceMetadata:
    """The metadata that messages of every kind have."""
    return cast("policy_pb2.ResourceMetadata", cast("Any", message).metadata)
