"""Decision records in the store: written by the leader in one step with what they decide, read by every process.

The hash holds the newest form of each record by id; the leader drops from it what is beyond the limits of retention.
The stream has each record as it was written, and again with each new outcome. Its length is bounded; every process
follows it and keeps the records in memory for reads and watches.
The input that a record was made from is written once, in a hash of its own, and read when it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Set
from typing import Any, cast

import structlog

from policy_engine.core.shared.retention import RetentionLimits
from policy_engine.shell.decision_index import DecisionIndex
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.domain.time import microseconds_of, timestamp_of, timestamp_of_microseconds, to_microseconds
from trimtab.rpc.watch import WatchHub
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry, StoreUnavailable
from trimtab.store.lease import Argument, hash_commands
from trimtab.store.streams import BoundedStream
from trimtab.tasks import stopped_within

log = structlog.get_logger(__name__)

POLL_INTERVAL_S = 0.25
NEWS_KEPT = 1000
"""Entries of the stream. A process that falls behind by more reads the hash again."""
_READ_AT_ONCE = 200
_DROPPED_AT_ONCE = 1000

Command = tuple[Argument, ...]


class IdSource:
    """Decision ids: time-ordered as text, unique within a process, and between leaders by their times."""

    def __init__(self) -> None:
        self._last = (0, 0)

    def next(self, now_s: float) -> str:
        """`d-<unix ms in hex>-<n>`; the time never goes back."""
        unix_ms = max(int(now_s * 1000), self._last[0])
        number = self._last[1] + 1 if unix_ms == self._last[0] else 0
        self._last = (unix_ms, number)
        return f"d-{unix_ms:012x}-{number}"


class DecisionLog:
    """The records that are kept, in memory, and how they get into the store and out of it."""

    def __init__(
        self, store: Store, *, limits: RetentionLimits, stopping: asyncio.Event, now: Callable[[], float]
    ) -> None:
        self._store = store
        self._limits = limits
        self._stopping = stopping
        self._stream = BoundedStream(store, keys.decisions(), decision_pb2.Decision, maxlen=NEWS_KEPT)
        self._index = DecisionIndex(limits)
        self._live: Set[str] | None = None
        # Dropped from memory; the leader's next write drops them from the store.
        self._dropped: list[str] = []
        self._after = "0"
        self._loaded = False
        # The hash and the stream are read one after the other, never side by side.
        self._reading = asyncio.Lock()
        self.hub: WatchHub[policy_pb2.WatchDecisionsResponse] = WatchHub(
            snapshot=list, bookmark=lambda: self._bookmark(now()), stopping=stopping
        )

    @staticmethod
    def _bookmark(now_s: float) -> policy_pb2.WatchDecisionsResponse:
        response = policy_pb2.WatchDecisionsResponse()
        response.bookmark.as_of.CopyFrom(timestamp_of(now_s))
        return response

    def commands(self, records: Iterable[decision_pb2.Decision]) -> list[Command]:
        """What writes `records`, new ones or new outcomes, for a fenced write; and drops what retention has dropped."""
        found: list[Command] = []
        inputs: list[Command] = []
        for record in records:
            if record.replay:
                inputs.append(("HSET", keys.decision_inputs(), record.decision_id, record.replay))
            bare = without_input(record)
            found.append(("HSET", keys.decision_index(), record.decision_id, bare.SerializeToString()))
            found.append(self._stream.append_command(bare))
        dropped, self._dropped = self._dropped[:_DROPPED_AT_ONCE], self._dropped[_DROPPED_AT_ONCE:]
        return [
            *inputs,
            *found,
            *hash_commands(keys.decision_index(), {}, dropped),
            *hash_commands(keys.decision_inputs(), {}, dropped),
        ]

    async def with_input(self, record: decision_pb2.Decision) -> decision_pb2.Decision:
        """A copy of a record with the input that it was made from, as far as that is kept."""
        whole = decision_pb2.Decision()
        whole.CopyFrom(record)
        raw = await cast("Any", self._store.redis.hget(keys.decision_inputs(), record.decision_id))
        whole.replay = raw or b""
        return whole

    def wrote(self, records: Iterable[decision_pb2.Decision]) -> None:
        """Show at once what this process wrote itself; the stream brings it again."""
        for record in records:
            self._take(without_input(record))

    def set_live(self, subjects: Set[str], *, leading: bool) -> None:
        """Set the services and pools that exist: of others, only some subjects' decisions are kept.

        A process that does not lead drops records from its memory alone.
        """
        self._live = subjects
        self._index.set_live(subjects)
        self._dropped += self._index.drop_surplus()
        if not leading:
            self._dropped.clear()

    def get(self, decision_id: str) -> decision_pb2.Decision | None:
        """A record by id."""
        return self._index.get(decision_id)

    def newest(self, *, subject: str = "", before: str = "", count: int) -> list[decision_pb2.Decision]:
        """Newest first; `before` continues after that id."""
        return self._index.newest(subject=subject, before=before, count=count)

    def pending_of(self, subject: str) -> list[decision_pb2.Decision]:
        """Decisions on that very subject whose outcome is open, oldest first."""
        return self._index.open_of(subject)

    async def load(self) -> None:
        """Read the hash, and the stream from where it ended before. Watchers get what is new in it.

        Raises `StoreUnavailable`. A record that does not parse is logged and left out.
        """
        async with self._reading:
            last_id = await self._stream.last_id()
            index = DecisionIndex(self._limits)
            async for name, raw in self._stored():
                try:
                    index.put(decode(decision_pb2.Decision, raw, place=f"decision {name}"))
                except CorruptEntry as error:
                    log.warning("a decision was left out", error=str(error))
            if self._live is not None:
                index.set_live(self._live)
            self._dropped = index.drop_surplus()
            before, self._index = self._index, index
            self._after = last_id
        if self._loaded:
            for record in index:
                known = before.get(record.decision_id)
                if known is None or _newer(record, known):
                    self._publish(record)
        self._loaded = True

    async def _stored(self) -> AsyncIterator[tuple[str, bytes]]:
        """The hash in portions, so that no call takes long; a field may come twice."""
        cursor = 0
        while True:
            cursor, found = await cast("Any", self._store.redis).hscan(
                keys.decision_index(), cursor, count=_READ_AT_ONCE
            )
            for raw_id, raw in found.items():
                yield raw_id.decode(errors="replace"), raw
            if cursor == 0:
                return

    async def run(self) -> None:
        """Follow the stream until the stop."""
        stale = True
        while not self._stopping.is_set():
            try:
                if stale:
                    await self.load()
                    stale = False
                stale = not await self.follow()
            except StoreUnavailable:
                # The store may come back without its last second; the hash has what is left.
                stale = True
            except CorruptEntry as error:
                log.warning("the decision stream does not parse; reading on from its end", error=str(error))
                stale = True
            if await stopped_within(self._stopping, POLL_INTERVAL_S):
                return

    async def follow(self) -> bool:
        """Take what the stream brings; False when it may have dropped entries that were not read."""
        async with self._reading:
            entries = await self._stream.read_after(self._after)
            for entry in entries:
                self._after = entry.id
                self._take(entry.message)
        return len(entries) < NEWS_KEPT

    def _take(self, record: decision_pb2.Decision) -> None:
        known = self._index.get(record.decision_id)
        if known is not None and not _newer(record, known):
            return
        self._index.put(record)
        self._dropped += self._index.drop_surplus()
        self._publish(record)

    def _publish(self, record: decision_pb2.Decision) -> None:
        self.hub.publish(policy_pb2.WatchDecisionsResponse(decision=record))


def without_input(record: decision_pb2.Decision) -> decision_pb2.Decision:
    """A copy without the input that it was made from."""
    bare = decision_pb2.Decision()
    bare.CopyFrom(record)
    bare.ClearField("replay")
    return bare


def _newer(record: decision_pb2.Decision, known: decision_pb2.Decision) -> bool:
    return record.outcome.update_time.ToNanoseconds() > known.outcome.update_time.ToNanoseconds()


def with_outcome(
    record: decision_pb2.Decision,
    state: decision_pb2.OutcomeState.ValueType,
    *,
    now_s: float,
    detail: str = "",
    operation_ids: Iterable[str] = (),
) -> decision_pb2.Decision:
    """A copy of `record` with a new outcome; operations add up."""
    changed = decision_pb2.Decision()
    changed.CopyFrom(record)
    known = list(record.outcome.operation_ids)
    changed.outcome.state = state
    changed.outcome.detail = detail
    del changed.outcome.operation_ids[:]
    changed.outcome.operation_ids.extend([*known, *(item for item in operation_ids if item not in known)])
    updated_us = max(to_microseconds(now_s), microseconds_of(record.outcome.update_time) + 1)
    changed.outcome.update_time.CopyFrom(timestamp_of_microseconds(updated_us))
    return changed
