"""The endpoint registry of one cluster: which replicas are routable, for gateways that need nothing but the store.

The actuator writes it in the same step as the records that it is derived from (``commands``), so that the two cannot
disagree, under the token of its lease, so that an actuator that was replaced cannot write it any more. It outlives the
actuator: a gateway that starts while none is there routes by it.

A gateway's acknowledgement (by which revision it routes, what it has left on hidden replicas) goes the other way
through the same store. ``speak`` writes it and reads the head of the registry in one transaction. So the store
alone orders the two: a set that a gateway has not seen yet was written after its acknowledgement, and the actuator,
which reads acknowledgements after it has written a set, finds every gateway that may still route by the one before.
That holds for a gateway that the actuator does not know, and whether or not an actuator was there when it came.

Only commands of Redis 7.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from trimtab.api.actuator.v1 import actuator_pb2, registry_pb2
from trimtab.domain.time import timestamp_of
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import Argument, hash_commands

SCHEMA_VERSION = 1
"""Of what the hash holds. Raised with a change of meaning; a field that old readers may ignore is none."""

HEAD = "@head"
"""The field beside the services'; no service can have this name."""

# KEYS: words. ARGV: gateway, its word as it was read. One that has spoken meanwhile stays.
_FORGET = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What the store said to a gateway that spoke. ``head`` is None in a store that holds no set."""

    head: registry_pb2.RegistryHead | None
    # An actuator holds the cluster's lease at this moment.
    has_leader: bool


class EndpointRegistry:
    """The registry of one cluster, from both sides."""

    def __init__(self, store: Store, cluster: str) -> None:
        self.cluster = cluster
        self._store = store
        self._key = keys.endpoints(cluster)
        self._words = keys.gateway_words(cluster)
        self._forget = store.redis.register_script(_FORGET)

    # The actuator's side

    def commands(
        self, old: Mapping[str, bytes] | None, new: Mapping[str, bytes], head: registry_pb2.RegistryHead
    ) -> list[tuple[Argument, ...]]:
        """What a ``fenced_write`` does so that ``new`` (service → ServiceEndpoints) takes the place of ``old``.

        ``old`` is None when it is not known what stands there: then nothing of it is left.
        """
        before: Mapping[str, bytes] = {} if old is None else old
        written = {name: new[name] for name in sorted(new) if before.get(name) != new[name]}
        return [
            *([("DEL", self._key)] if old is None else []),
            *hash_commands(self._key, {**written, HEAD: head.SerializeToString()}, sorted(before.keys() - new.keys())),
            ("PUBLISH", keys.endpoints_written(self.cluster), str(head.revision)),
        ]

    def new_head(self, *, revision: int, leader_term: int, lease_s: float, now_s: float) -> registry_pb2.RegistryHead:
        """A head of this layout; ``now_s`` are Unix seconds on the store's clock."""
        return registry_pb2.RegistryHead(
            schema_version=SCHEMA_VERSION,
            cluster=self.cluster,
            revision=revision,
            reign=leader_term,
            lease_s=lease_s,
            write_time=timestamp_of(now_s),
        )

    async def look(self) -> tuple[bytes | None, Mapping[str, bytes]]:
        """The stored head, and gateway → its last acknowledgement. Raises ``StoreUnavailable``."""
        pipeline = self._store.redis.pipeline(transaction=True)
        pipeline.hget(self._key, HEAD)
        pipeline.hgetall(self._words)
        raw, found = await pipeline.execute()
        words = {name.decode("utf-8", "replace"): word for name, word in sorted(found.items())}
        return raw, words

    async def head(self) -> registry_pb2.RegistryHead | None:
        """The head alone; None in a store that holds no set. Raises ``StoreUnavailable``, ``CorruptEntry``."""
        raw = await cast("Any", self._store.redis.hget(self._key, HEAD))
        return None if raw is None else self._head(raw)

    async def forget(self, gateway: str, word: bytes) -> None:
        """Remove an acknowledgement, unless the gateway has written another since. Raises ``StoreUnavailable``."""
        await self._forget(keys=[self._words], args=[gateway, word])

    # A gateway's side

    async def speak(self, word: actuator_pb2.AcknowledgeEndpointsRequest, *, is_news: bool) -> Heard:
        """Write the gateway's acknowledgement and read the head. ``is_news``: an actuator may wait for it.

        Raises ``StoreUnavailable`` (the acknowledgement may be stored all the same), ``CorruptEntry``.
        """
        pipeline = self._store.redis.pipeline(transaction=True)
        pipeline.hset(self._words, word.gateway, word.SerializeToString())
        pipeline.hget(self._key, HEAD)
        pipeline.exists(keys.lease(keys.actuator(self.cluster)))
        if is_news:
            pipeline.publish(keys.gateways_spoke(self.cluster), word.gateway)
        _, raw, has_leader, *_ = await pipeline.execute()
        return Heard(head=None if raw is None else self._head(raw), has_leader=bool(has_leader))

    async def read(self) -> actuator_pb2.WatchEndpointsResponse | None:
        """The whole set; None in a store that holds none. Raises ``StoreUnavailable``, ``CorruptEntry``."""
        found = cast("dict[bytes, bytes]", await cast("Any", self._store.redis.hgetall(self._key)))
        raw = found.pop(HEAD.encode(), None)
        if raw is None:
            return None
        head = self._head(raw)
        services = [
            decode(actuator_pb2.ServiceEndpoints, value, place=f"{self._key}, field {name.decode('utf-8', 'replace')}")
            for name, value in sorted(found.items())
        ]
        return actuator_pb2.WatchEndpointsResponse(
            services=services, revision=head.revision, cluster=head.cluster, lease_s=head.lease_s
        )

    def _head(self, raw: object) -> registry_pb2.RegistryHead:
        head = decode(registry_pb2.RegistryHead, raw, place=f"{self._key}, field {HEAD}")
        if head.schema_version != SCHEMA_VERSION:
            raise CorruptEntry(
                f"{self._key}: has layout {head.schema_version}, this version of Trimtab reads {SCHEMA_VERSION}: "
                "run gateways and actuators of one version"
            )
        return head


def service_bytes(services: Sequence[actuator_pb2.ServiceEndpoints]) -> dict[str, bytes]:
    """Service → its endpoints as they are stored."""
    return {one.service: one.SerializeToString(deterministic=True) for one in services}
