"""The collector's keys in the store: newest partials, newest samples, history; and the merge of what is read back.

A round is written in pipelines of bounded size, one role behind the other: a role's samples and its partial go
together, so that a collector that dies in between has written both or neither. Merging yields to the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

import structlog

from metrics_collector.core.samples import EncodedSample, reading, schema_from, schema_message
from metrics_collector.core.schema import Reading, Schema
from metrics_collector.core.targets import RoleKey
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.role_window import RoleWindow, role_number, role_window_to_proto
from trimtab.domain.time import microseconds_of, seconds_of
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.observations import merge, merge_service
from trimtab.store.streams import MAX_READ, BoundedStream

log = structlog.get_logger(__name__)

# Keys that are not written any more expire.
_EXPIRE_S = 600
_TRIM_EVERY_ROUNDS = 60
_APPEND_MARGIN_S = 10.0
_PIPELINE_BYTES = 1_000_000
_YIELD_AFTER_S = 0.01
PREVIOUS = "/previous"
"""Behind a collector's name: the field of its partial before the newest."""

_Command = tuple[str | bytes | int, ...]


class Archive:
    """Reads and writes observations and samples. Every method raises ``StoreUnavailable``.

    Where targets are shared: ``may_write`` is whether this collector's lease holds, without which nothing is written;
    ``elsewhere`` names the replicas that other collectors scrape, whose samples these go on from and which are not
    removed; ``collectors`` is how many add to one history.
    """

    def __init__(
        self,
        store: Store,
        *,
        collector: str,
        history_windows: int,
        history_retention_s: float,
        may_write: Callable[[], bool] = lambda: True,
        elsewhere: Callable[[], Mapping[RoleKey, Collection[str]]] = dict,
        collectors: Callable[[], int] = lambda: 1,
    ) -> None:
        self._may_write = may_write
        self._elsewhere = elsewhere
        self._collectors = collectors
        self._store = store
        self._collector = collector
        self._history_windows = history_windows
        self.history_retention_s = history_retention_s
        self._streams: dict[RoleKey, BoundedStream[pb.RolePartial]] = {}
        self._newest: dict[RoleKey, bytes] = {}
        self._replicas: dict[RoleKey, frozenset[str]] = {}
        self._known: set[RoleKey] = set()
        self._forgotten: set[RoleKey] = set()
        self._schemas: dict[int, Schema] = {}
        self._rounds = 0

    async def write(
        self,
        windows: Sequence[RoleWindow],
        samples: Iterable[EncodedSample],
        *,
        at_s: float,
        schemas: Iterable[Schema] = (),
    ) -> list[pb.RoleObservation]:
        """Write one round; gives the merged observation of every role known to the store, in order.

        ``schemas`` are those of the samples (``core.samples.encode``). A role or replica that was in the last round
        and is not in this one is removed, but for replicas that are elsewhere by now.
        """
        if not self._may_write():
            return await self._read_back((), at_s=at_s)
        mine = {RoleKey(service=window.service, role=role_number(window.role)): window for window in windows}
        written = _by_role(samples)
        elsewhere, collectors = self._elsewhere(), self._collectors()
        await self._execute([self._schema_command(schemas)] if self._new(schemas) else [])
        newest: dict[RoleKey, bytes] = {}
        queued: list[_Command] = []
        size = 0
        pause = _Pause()
        for key in sorted(mine.keys() | written.keys() | self._newest.keys() | self._replicas.keys(), key=_order):
            batch = self._sample_commands(key, written.get(key, {}), elsewhere.get(key, ()))
            if key in mine:
                newest[key] = role_window_to_proto(mine[key]).SerializeToString()
                batch += self._partial_commands(key, newest[key], at_s=at_s, collectors=collectors)
            elif key in self._newest:
                place = keys.latest_partials(key.service, role_name(key))
                batch.append(("HDEL", place, self._collector, self._collector + PREVIOUS))
            batch_size = sum(len(part) for command in batch for part in command if isinstance(part, bytes))
            if queued and size + batch_size > _PIPELINE_BYTES:
                await self._execute(queued)
                queued, size = [], 0
            queued += batch
            size += batch_size
            await pause.after_a_while()
        queued += [("HDEL", keys.observed_roles(), _field(key)) for key in self._forgotten - mine.keys()]
        queued.append(("PUBLISH", keys.windows_written(), f"{at_s:.3f}"))
        await self._execute(queued)
        self._newest = newest
        self._replicas = {key: frozenset(found) for key, found in written.items()}
        self._rounds += 1
        return await self._read_back(mine.keys(), at_s=at_s)

    async def _execute(self, commands: Sequence[_Command]) -> None:
        if not commands:
            return
        pipeline = self._store.redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        await pipeline.execute()

    def _sample_commands(self, key: RoleKey, found: Mapping[str, bytes], elsewhere: Collection[str]) -> list[_Command]:
        place = keys.latest_samples(key.service, role_name(key))
        commands: list[_Command] = []
        fields: list[str | bytes] = []
        size = 0
        for replica, data in found.items():
            fields += (replica, data)
            size += len(data)
            if size > _PIPELINE_BYTES:
                commands.append(("HSET", place, *fields))
                fields, size = [], 0
        if fields:
            commands.append(("HSET", place, *fields))
        if found:
            commands.append(("EXPIRE", place, _EXPIRE_S))
        gone = self._replicas.get(key, frozenset()) - found.keys() - set(elsewhere)
        if gone:
            commands.append(("HDEL", place, *sorted(gone)))
        return commands

    def _partial_commands(self, key: RoleKey, data: bytes, *, at_s: float, collectors: int) -> list[_Command]:
        latest = keys.latest_partials(key.service, role_name(key))
        before = self._newest.get(key)
        fields = (
            (self._collector, data) if before is None else (self._collector, data, self._collector + PREVIOUS, before)
        )
        stream = self._stream(key)
        commands: list[_Command] = [
            ("HSET", latest, *fields),
            ("EXPIRE", latest, _EXPIRE_S),
            stream.append_bytes_command(data, oldest_s=at_s - self.history_retention_s),
            ("HSET", keys.observed_roles(), _field(key), f"{at_s:.3f}"),
        ]
        if self._rounds % _TRIM_EVERY_ROUNDS == 0:
            commands.append(("XTRIM", stream.key, "MAXLEN", self._history_windows * collectors))
            commands.append(("EXPIRE", stream.key, round(self.history_retention_s) + _EXPIRE_S))
        return commands

    def _new(self, schemas: Iterable[Schema]) -> bool:
        return self._rounds % _TRIM_EVERY_ROUNDS == 0 or any(one.fingerprint not in self._schemas for one in schemas)

    def _schema_command(self, schemas: Iterable[Schema]) -> _Command:
        """All that are known: the store may have lost them since they were written."""
        self._schemas |= {schema.fingerprint: schema for schema in schemas}
        fields: list[str | bytes] = []
        for fingerprint, schema in self._schemas.items():
            fields += (f"{fingerprint:016x}", schema_message(schema).SerializeToString())
        return ("HSET", keys.sample_schemas(), *fields) if fields else ("PING",)

    async def _read_back(self, mine: Collection[RoleKey], *, at_s: float) -> list[pb.RoleObservation]:
        wanted = sorted(set(mine) | self._known, key=_order)
        observations = await self.latest(wanted)
        observed = await self._observed()
        self._known = {key for key in observed if observed[key] > at_s - _EXPIRE_S}
        self._forgotten = {key for key in observed if observed[key] <= at_s - self.history_retention_s - _EXPIRE_S}
        return [observation for observation in observations if observation is not None]

    async def latest(self, wanted: Sequence[RoleKey]) -> list[pb.RoleObservation | None]:
        """The newest merged observation of each role; None for one that was never observed."""
        places = [keys.latest_partials(key.service, role_name(key)) for key in wanted]
        found: list[pb.RoleObservation | None] = []
        pause = _Pause()
        for first in range(0, len(places), 50):
            some = places[first : first + 50]
            pipeline = self._store.redis.pipeline(transaction=False)
            for place in some:
                pipeline.hgetall(place)
            for place, reply in zip(some, await pipeline.execute(), strict=True):
                found.append(_merged(reply, place=place))
                await pause.after_a_while()
        return found

    async def service(self, service: str) -> pb.GetServiceObservationResponse | None:
        """One service as a whole, with its roles and its front door; None when no role of it was ever observed."""
        wanted = [key for key in await self.roles() if key.service == service]
        pipeline = self._store.redis.pipeline(transaction=False)
        places = [keys.latest_partials(key.service, role_name(key)) for key in wanted]
        for place in places:
            pipeline.hgetall(place)
        replies = await pipeline.execute() if places else []
        partials = {
            key: found
            for key, place, reply in zip(wanted, places, replies, strict=True)
            if (found := _partials(reply, place=place))
        }
        roles = [key for key in partials if key.role != types_pb2.ROLE_UNSPECIFIED]
        if not roles:
            return None
        response = pb.GetServiceObservationResponse(
            service=merge_service([partial for key in roles for partial in partials[key]]),
            roles=[merge(partials[key]) for key in roles],
        )
        for key in partials.keys() - set(roles):
            response.front_door.CopyFrom(merge(partials[key]))
        return response

    async def roles(self) -> list[RoleKey]:
        """Every role that any collector has written, in order."""
        return sorted(await self._observed(), key=_order)

    async def _observed(self) -> dict[RoleKey, float]:
        return _observed(cast("dict[bytes, bytes]", await self._store.redis.hgetall(keys.observed_roles())))

    async def history(
        self, key: RoleKey, *, start_s: float, end_s: float, max_results: int, step_s: float = 0.0
    ) -> list[pb.RoleObservation]:
        """The newest ``max_results`` windows that ended in [start_s, end_s), oldest first.

        With ``step_s`` only the last window that ended in each step, where steps begin at multiples of it.
        """
        # An entry is appended when its window ends: some rounds later at worst, or a little before, by the error of
        # the collector's idea of the store's clock.
        entries = await self._stream(key).read_between(start_s - _APPEND_MARGIN_S, end_s + _APPEND_MARGIN_S, MAX_READ)
        windows: dict[int, list[pb.RolePartial]] = {}
        for entry in entries:
            end_us = microseconds_of(entry.message.window_end)
            if start_s * 1e6 <= end_us < end_s * 1e6:
                windows.setdefault(end_us, []).append(entry.message)
        ends = sorted(windows)
        if step_s > 0:
            step_us = max(1, round(step_s * 1e6))
            ends = sorted({end_us // step_us: end_us for end_us in ends}.values())
        merged: list[pb.RoleObservation] = []
        pause = _Pause()
        for end_us in ends[-max_results:]:
            merged.append(merge(windows[end_us]))
            await pause.after_a_while()
        return merged

    async def samples(self, key: RoleKey) -> dict[str, pb.ReplicaSample]:
        """Replica → its newest sample as stored, of any collector, by name. An unreadable one is skipped."""
        place = keys.latest_samples(key.service, role_name(key))
        reply = cast("dict[bytes, bytes]", await self._store.redis.hgetall(place))
        return _samples({name.decode(): reply[name] for name in sorted(reply)}, place=place)

    async def last_readings(self, wanted: Mapping[RoleKey, Sequence[str]]) -> dict[str, tuple[float, Reading]]:
        """Replica → when its page was read last, and the page's row, for the replicas of ``wanted`` that have one.

        The next collector of a replica goes on from it: what was counted since is counted once.
        """
        asked = [(key, list(names)) for key, names in sorted(wanted.items(), key=lambda item: _order(item[0])) if names]
        if not asked:
            return {}
        pipeline = self._store.redis.pipeline(transaction=False)
        pipeline.hgetall(keys.sample_schemas())
        for key, names in asked:
            pipeline.hmget(keys.latest_samples(key.service, role_name(key)), names)
        schemas, *replies = await pipeline.execute()
        known = _schemas(schemas)
        found: dict[str, tuple[float, Reading]] = {}
        for (key, names), reply in zip(asked, replies, strict=True):
            values = {name: data for name, data in zip(names, reply, strict=True) if data is not None}
            for name, sample in _samples(values, place=keys.latest_samples(key.service, role_name(key))).items():
                schema = known.get(sample.schema_fingerprint)
                row = None if schema is None else reading(sample, schema)
                if row is not None:
                    found[name] = (seconds_of(sample.sample_time), row)
        return found

    def _stream(self, key: RoleKey) -> BoundedStream[pb.RolePartial]:
        if key not in self._streams:
            self._streams[key] = BoundedStream(
                self._store,
                keys.partial_history(key.service, role_name(key)),
                pb.RolePartial,
                maxlen=self._history_windows,
                retention_s=self.history_retention_s,
            )
        return self._streams[key]


class _Pause:
    """Lets other tasks run when a while has passed without."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    async def after_a_while(self) -> None:
        if time.monotonic() - self._since_s > _YIELD_AFTER_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()


def role_name(key: RoleKey) -> str:
    """As the store's keys have it, such as ``ROLE_DECODE``."""
    return types_pb2.Role.Name(key.role)


def _by_role(samples: Iterable[EncodedSample]) -> dict[RoleKey, dict[str, bytes]]:
    found: dict[RoleKey, dict[str, bytes]] = {}
    for sample in samples:
        found.setdefault(sample.key, {})[sample.replica] = sample.data
    return found


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


def _schemas(reply: Mapping[bytes, bytes]) -> dict[int, Schema]:
    found: dict[int, Schema] = {}
    for field, data in reply.items():
        try:
            schema = schema_from(decode(pb.SampleSchema, data, place=f"{keys.sample_schemas()} {field!r}"))
        except CorruptEntry as error:
            log.warning("schema in the store is unreadable", error=str(error))
            continue
        if schema is not None:
            found[schema.fingerprint] = schema
    return found


def _samples(values: Mapping[str, bytes], *, place: str) -> dict[str, pb.ReplicaSample]:
    found: dict[str, pb.ReplicaSample] = {}
    for name, data in values.items():
        try:
            found[name] = decode(pb.ReplicaSample, data, place=f"{place} {name}")
        except CorruptEntry as error:
            log.warning("sample in the store is unreadable", error=str(error))
    return found


def _merged(reply: Mapping[bytes, bytes], *, place: str) -> pb.RoleObservation | None:
    partials = _partials(reply, place=place)
    return merge(partials) if partials else None


def _partials(reply: Mapping[bytes, bytes], *, place: str) -> list[pb.RolePartial]:
    partials: list[pb.RolePartial] = []
    for field in sorted(reply):
        try:
            partials.append(decode(pb.RolePartial, reply[field], place=f"{place} {field.decode()}"))
        except CorruptEntry as error:
            log.warning("partial in the store is unreadable", error=str(error))
    return partials
