"""Decision records in memory: by id, in order of time over all subjects, and by subject.

A record concerns its subject and every service whose counts it changes: a service's list also has the decisions of its
pool that moved it. Retention goes by a record's own subject (`policy_engine.core.shared.retention`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Set

from policy_engine.core.shared.retention import RetentionLimits, surplus
from trimtab.api.policy.v1 import decision_pb2


class DecisionIndex:
    """The records that are kept. Ids sort by time; a listing costs no more than what it returns."""

    def __init__(self, limits: RetentionLimits) -> None:
        self._limits = limits
        self._records: dict[str, decision_pb2.Decision] = {}
        self._ids: list[str] = []
        self._owned: dict[str, list[str]] = {}
        self._concerning: dict[str, list[str]] = {}
        self._open: dict[str, set[str]] = {}
        self._live: frozenset[str] | None = None
        self._may_exceed = False

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[decision_pb2.Decision]:
        """Every record, oldest first."""
        return (self._records[name] for name in self._ids)

    def get(self, decision_id: str) -> decision_pb2.Decision | None:
        """A record by id."""
        return self._records.get(decision_id)

    def put(self, record: decision_pb2.Decision) -> None:
        """Add a record, or replace it by its form with another outcome."""
        name, subject = record.decision_id, record.subject
        if name not in self._records:
            insort(self._ids, name)
            own = self._owned.setdefault(subject, [])
            insort(own, name)
            full = len(own) > self._limits.per_subject or len(self._ids) > self._limits.in_all
            self._may_exceed |= full or len(own) == 1
            for concerned in _concerned(record):
                insort(self._concerning.setdefault(concerned, []), name)
        self._records[name] = record
        if record.outcome.state == decision_pb2.OUTCOME_STATE_PENDING:
            self._open.setdefault(subject, set()).add(name)
        else:
            self._open.get(subject, set()).discard(name)

    def newest(self, *, subject: str = "", before: str = "", count: int) -> list[decision_pb2.Decision]:
        """At most `count` records, newest first; those that concern `subject`, or all; `before` that id, which need not
        be kept any more.
        """
        ids = self._concerning.get(subject, []) if subject else self._ids
        end = bisect_left(ids, before) if before else len(ids)
        return [self._records[name] for name in reversed(ids[max(0, end - count) : end])]

    def open_of(self, subject: str) -> list[decision_pb2.Decision]:
        """The subject's own records whose outcome is open, oldest first."""
        return [self._records[name] for name in sorted(self._open.get(subject, ()))]

    def set_live(self, subjects: Set[str]) -> None:
        """Set the services and pools that exist: of the others only some subjects' records are kept."""
        if self._live is None or self._live != subjects:
            self._live = frozenset(subjects)
            self._may_exceed = True

    def drop_surplus(self) -> list[str]:
        """Drop what is beyond the limits; the ids."""
        if not self._may_exceed:
            return []
        self._may_exceed = False
        open_ids = {name for ids in self._open.values() for name in ids}
        dropped = surplus(self._owned, open_ids=open_ids, live=self._live, limits=self._limits)
        for name in dropped:
            self._remove(name)
        return dropped

    def _remove(self, name: str) -> None:
        record = self._records.pop(name)
        _take_out(self._ids, name)
        for lists, keys in ((self._owned, {record.subject}), (self._concerning, _concerned(record))):
            for key in keys:
                _take_out(lists[key], name)
                if not lists[key]:
                    del lists[key]
        still_open = self._open.get(record.subject)
        if still_open is not None:
            still_open.discard(name)
            if not still_open:
                del self._open[record.subject]


def _take_out(ids: list[str], name: str) -> None:
    """Remove `name` from a sorted list that has it."""
    del ids[bisect_left(ids, name)]


def _concerned(record: decision_pb2.Decision) -> set[str]:
    """The record's subject and every service that it moves."""
    return {record.subject, *(count.service for count in record.counts if count.before != count.after)}
