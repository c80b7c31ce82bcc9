"""Decision records in the store: written by the leader in one step with what they decide, read by every process.

The stream carries each record as it was written, and again with each new outcome; the index holds the newest form by
id and is bounded by its writer. Every process tails the stream into memory, and serves reads and watches from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import structlog

from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.domain.time import microseconds_of, timestamp_of, timestamp_of_microseconds, to_microseconds
from trimtab.rpc.watch import WatchHub
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry, StoreUnavailable
from trimtab.store.lease import Argument
from trimtab.store.streams import BoundedStream
from trimtab.waiting import stopped_within

log = structlog.get_logger(__name__)

POLL_INTERVAL_S = 0.25
_TRIM_EVERY = 64

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
    """The records, newest in memory."""

    def __init__(self, store: Store, *, kept: int, stopping: asyncio.Event, now: Callable[[], float]) -> None:
        self._store = store
        self._kept = kept
        self._stopping = stopping
        self._stream = BoundedStream(store, keys.decisions(), decision_pb2.Decision, maxlen=kept)
        self._records: dict[str, decision_pb2.Decision] = {}
        # Ids of records whose outcome is open; some may be gone from the records.
        self._open: set[str] = set()
        self._after = "0"
        self._written = 0
        self._loaded = False
        self.hub: WatchHub[policy_pb2.WatchDecisionsResponse] = WatchHub(
            snapshot=list, bookmark=lambda: self._bookmark(now()), stopping=stopping
        )

    @staticmethod
    def _bookmark(now_s: float) -> policy_pb2.WatchDecisionsResponse:
        response = policy_pb2.WatchDecisionsResponse()
        response.bookmark.as_of.CopyFrom(timestamp_of(now_s))
        return response

    def commands(self, records: Iterable[decision_pb2.Decision]) -> list[Command]:
        """What writes `records`, new ones or new outcomes, for a fenced write."""
        found: list[Command] = []
        for record in records:
            found.append(("HSET", keys.decision_index(), record.decision_id, record.SerializeToString()))
            found.append(self._stream.append_command(record))
            self._written += 1
        if found and (self._written % _TRIM_EVERY) < len(found) // 2 and len(self._records) > self._kept:
            old = sorted(self._records)[: len(self._records) - self._kept]
            found.append(("HDEL", keys.decision_index(), *old[:1000]))
            for name in old[:1000]:
                del self._records[name]
        return found

    def wrote(self, records: Iterable[decision_pb2.Decision]) -> None:
        """Show at once what this process wrote itself; the stream brings it again."""
        for record in records:
            self._take(record)

    def get(self, decision_id: str) -> decision_pb2.Decision | None:
        """A record by id."""
        return self._records.get(decision_id)

    def newest(self, *, subject: str = "", before: str = "", count: int) -> list[decision_pb2.Decision]:
        """Newest first; `before` continues after that id."""
        found: list[decision_pb2.Decision] = []
        for decision_id in sorted(self._records, reverse=True):
            record = self._records[decision_id]
            if (before and decision_id >= before) or (subject and not _concerns(record, subject)):
                continue
            found.append(record)
            if len(found) == count:
                break
        return found

    def pending_of(self, subject: str) -> list[decision_pb2.Decision]:
        """Decisions on that very subject whose outcome is open, oldest first."""
        found = (self._records.get(decision_id) for decision_id in sorted(self._open))
        return [record for record in found if record is not None and record.subject == subject]

    async def load(self) -> None:
        """Read the index once; the stream from its end on."""
        last = await self._stream.read_last(1)
        self._after = last[-1].id if last else "0"
        found = await cast("Any", self._store.redis.hgetall(keys.decision_index()))
        self._records, self._open = {}, set()
        for raw_id in sorted(found):
            name = raw_id.decode(errors="replace")
            try:
                self._keep(decode(decision_pb2.Decision, found[raw_id], place=f"decision {name}"))
            except CorruptEntry as error:
                log.warning("a decision was left out", error=str(error))
        self._loaded = True

    async def run(self) -> None:
        """Tail the stream until the stop."""
        while not self._stopping.is_set():
            try:
                if not self._loaded:
                    await self.load()
                for entry in await self._stream.read_after(self._after):
                    self._after = entry.id
                    self._take(entry.message)
            except StoreUnavailable:
                # The store may come back without its last second; the index tells what is left.
                self._loaded = False
            except CorruptEntry as error:
                log.warning("the decision stream does not parse; reading on from its end", error=str(error))
                self._loaded = False
            if await stopped_within(self._stopping, POLL_INTERVAL_S):
                return

    def _take(self, record: decision_pb2.Decision) -> None:
        known = self._records.get(record.decision_id)
        if known is not None and not _newer(record, known):
            return
        self._keep(record)
        while len(self._records) > 2 * self._kept:
            del self._records[min(self._records)]
        self.hub.publish(policy_pb2.WatchDecisionsResponse(decision=record))

    def _keep(self, record: decision_pb2.Decision) -> None:
        self._records[record.decision_id] = record
        if record.outcome.state == decision_pb2.OUTCOME_STATE_PENDING:
            self._open.add(record.decision_id)
        else:
            self._open.discard(record.decision_id)


def _newer(record: decision_pb2.Decision, known: decision_pb2.Decision) -> bool:
    return record.outcome.update_time.ToNanoseconds() > known.outcome.update_time.ToNanoseconds()


def _concerns(record: decision_pb2.Decision, subject: str) -> bool:
    """A decision concerns its subject and every service that it moves."""
    if record.subject == subject:
        return True
    return any(count.service == subject and count.before != count.after for count in record.counts)


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
