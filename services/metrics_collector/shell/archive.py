"""The collector's keys in the store: newest partials, newest samples, history; and the merge of what is read back.

All writes of a round go in one pipeline, and so does the read of what every collector has written about each role.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import structlog
from redis.asyncio.client import Pipeline

from metrics_collector.core.partials import RoleKey
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.observations import merge
from trimtab.store.streams import MAX_READ, BoundedStream

log = structlog.get_logger(__name__)

# What nobody writes any more leaves the store by itself.
_EXPIRE_S = 600
_TRIM_EVERY_ROUNDS = 60
_APPEND_MARGIN_S = 10.0


class Archive:
    """Reads and writes observations. Every method raises ``StoreUnavailable``."""

    def __init__(self, store: Store, *, collector: str, history_windows: int, history_retention_s: float) -> None:
        self._store = store
        self._collector = collector
        self._history_windows = history_windows
        self._history_retention_s = history_retention_s
        self._streams: dict[RoleKey, BoundedStream[pb.RolePartial]] = {}
        self._written: set[RoleKey] = set()
        self._replicas: dict[RoleKey, set[str]] = {}
        self._known: set[RoleKey] = set()
        self._forgotten: set[RoleKey] = set()
        self._rounds = 0

    async def write(
        self, partials: Sequence[pb.RolePartial], samples: Iterable[pb.ReplicaSample], *, at_s: float
    ) -> list[pb.RoleObservation]:
        """Write one round; gives the merged observation of every role known to the store, in order.

        A role or replica that was in the last round and is not in this one is removed.
        """
        pipeline = self._store.redis.pipeline(transaction=False)
        mine = {RoleKey(service=partial.service, role=partial.role): partial for partial in partials}
        replicas = self._queue_samples(pipeline, samples)
        self._queue_partials(pipeline, mine, at_s=at_s)
        places = [
            keys.latest_partials(key.service, role_name(key)) for key in sorted(mine.keys() | self._known, key=_order)
        ]
        read_from = len(pipeline)
        for place in places:
            pipeline.hgetall(place)
        pipeline.hgetall(keys.observed_roles())
        *replies, observed = (await pipeline.execute())[read_from:]
        self._rounds += 1
        self._written = set(mine)
        self._replicas = replicas
        last_s = _observed(observed)
        self._known = {key for key in last_s if last_s[key] > at_s - _EXPIRE_S}
        self._forgotten = {key for key in last_s if last_s[key] <= at_s - self._history_retention_s - _EXPIRE_S}
        merged = [_merged(reply, place=place) for place, reply in zip(places, replies, strict=True)]
        return [observation for observation in merged if observation is not None]

    def _queue_partials(self, pipeline: Pipeline, mine: Mapping[RoleKey, pb.RolePartial], *, at_s: float) -> None:
        trim = self._rounds % _TRIM_EVERY_ROUNDS == 0
        for key, partial in mine.items():
            latest = keys.latest_partials(key.service, role_name(key))
            pipeline.hset(latest, self._collector, partial.SerializeToString())
            pipeline.expire(latest, _EXPIRE_S)
            stream = self._stream(key)
            pipeline.execute_command(*stream.append_command(partial))
            if trim:
                oldest_ms = max(0, round((at_s - self._history_retention_s) * 1000))
                pipeline.xtrim(stream.key, minid=oldest_ms, approximate=False)
                pipeline.expire(stream.key, round(self._history_retention_s) + _EXPIRE_S)
            pipeline.hset(keys.observed_roles(), _field(key), f"{at_s:.3f}")
        for key in sorted(self._written - mine.keys(), key=_order):
            pipeline.hdel(keys.latest_partials(key.service, role_name(key)), self._collector)
        for key in sorted(self._forgotten - mine.keys(), key=_order):
            pipeline.hdel(keys.observed_roles(), _field(key))

    def _queue_samples(self, pipeline: Pipeline, samples: Iterable[pb.ReplicaSample]) -> dict[RoleKey, set[str]]:
        """Queues the samples and the removal of those whose replica is gone; the replicas written, by role."""
        by_role: dict[RoleKey, dict[str, bytes]] = {}
        for sample in samples:
            key = RoleKey(service=sample.service, role=sample.role)
            by_role.setdefault(key, {})[sample.replica] = sample.SerializeToString()
        for key in sorted(self._replicas.keys() | by_role.keys(), key=_order):
            written = by_role.get(key, {})
            place = keys.latest_samples(key.service, role_name(key))
            if written:
                pipeline.hset(place, items=[part for pair in sorted(written.items()) for part in pair])
                pipeline.expire(place, _EXPIRE_S)
            gone = self._replicas.get(key, set()) - written.keys()
            if gone:
                pipeline.hdel(place, *sorted(gone))
        return {key: set(written) for key, written in by_role.items()}

    async def latest(self, wanted: Sequence[RoleKey]) -> list[pb.RoleObservation | None]:
        """The newest merged observation of each role; None for one that was never observed."""
        pipeline = self._store.redis.pipeline(transaction=False)
        places = [keys.latest_partials(key.service, role_name(key)) for key in wanted]
        for place in places:
            pipeline.hgetall(place)
        replies = await pipeline.execute() if places else []
        return [_merged(reply, place=place) for place, reply in zip(places, replies, strict=True)]

    async def roles(self) -> list[RoleKey]:
        """Every role that any collector has written, in order."""
        return sorted(
            _observed(cast("dict[bytes, bytes]", await self._store.redis.hgetall(keys.observed_roles()))), key=_order
        )

    async def history(
        self, key: RoleKey, *, start_s: float, end_s: float, max_results: int
    ) -> list[pb.RoleObservation]:
        """The newest ``max_results`` windows that ended in [start_s, end_s), oldest first."""
        # An entry is appended when its window ends: some rounds later at worst, or a little before, by the error of
        # the collector's idea of the store's clock.
        entries = await self._stream(key).read_between(start_s - _APPEND_MARGIN_S, end_s + _APPEND_MARGIN_S, MAX_READ)
        windows: dict[int, list[pb.RolePartial]] = {}
        for entry in entries:
            end_us = entry.message.window_end.ToMicroseconds()
            if start_s * 1e6 <= end_us < end_s * 1e6:
                windows.setdefault(end_us, []).append(entry.message)
        return [merge(windows[end_us]) for end_us in sorted(windows)[-max_results:]]

    def _stream(self, key: RoleKey) -> BoundedStream[pb.RolePartial]:
        if key not in self._streams:
            self._streams[key] = BoundedStream(
                self._store,
                keys.partial_history(key.service, role_name(key)),
                pb.RolePartial,
                maxlen=self._history_windows,
                retention_s=self._history_retention_s,
            )
        return self._streams[key]


def role_name(key: RoleKey) -> str:
    """As the store's keys have it, such as ``ROLE_DECODE``."""
    return types_pb2.Role.Name(key.role)


def _field(key: RoleKey) -> str:
    return f"{key.service}/{role_name(key)}"


def _order(key: RoleKey) -> tuple[str, int]:
    return key.service, key.role


def _observed(reply: Mapping[bytes, bytes]) -> dict[RoleKey, float]:
    """Role → when its last window was written, from the hash of observed roles; unknown roles are passed over."""
    found: dict[RoleKey, float] = {}
    for field, last in reply.items():
        service, _, name = field.decode("utf-8", "replace").rpartition("/")
        number = types_pb2.Role.DESCRIPTOR.values_by_name.get(name)
        if number is not None:
            found[RoleKey(service=service, role=types_pb2.Role.Value(name))] = float(last)
    return found


def _merged(reply: Mapping[bytes, bytes], *, place: str) -> pb.RoleObservation | None:
    partials: list[pb.RolePartial] = []
    for field in sorted(reply):
        try:
            partials.append(decode(pb.RolePartial, reply[field], place=f"{place} {field.decode()}"))
        except CorruptEntry as error:
            log.warning("partial in the store is unreadable", error=str(error))
    return merge(partials) if partials else None
