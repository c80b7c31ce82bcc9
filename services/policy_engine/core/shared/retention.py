"""Which decision records are dropped when there are too many: by subject, so that no subject displaces another's.

Each subject (a service or a pool) keeps its newest `per_subject` records. All subjects together keep `in_all`; beyond
that the oldest record of the subject with the most records goes, so a subject that holds no more than its equal share
loses nothing to a busier one. Of subjects that were deleted, those with the newest records are kept.

Within a subject a record whose outcome is open goes last: the engine still waits for what comes of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    """How many decision records are kept: of each subject, in all, and of how many deleted subjects."""

    per_subject: int
    in_all: int
    deleted_subjects: int = 100


def surplus(
    owned: Mapping[str, Sequence[str]], *, open_ids: Set[str], live: Set[str] | None, limits: RetentionLimits
) -> list[str]:
    """Ids of the records to drop, sorted.

    `owned` has the ids of each subject's own records, in ascending order; ids sort by time. `open_ids` are records
    without a final outcome. `live` are the subjects that exist; None while that is not known, and nothing is dropped
    for having been deleted.
    """
    dropped: set[str] = set()
    left = dict(owned)
    for subject in _deleted_too_long(owned, live, limits.deleted_subjects):
        dropped.update(left.pop(subject))
    going = {subject: _going(ids, open_ids) for subject, ids in left.items()}
    counts = {subject: len(ids) for subject, ids in left.items()}
    for subject in sorted(left):
        while counts[subject] > limits.per_subject:
            dropped.add(next(going[subject]))
            counts[subject] -= 1
    total = sum(counts.values())
    # The largest first; of equal ones the one whose newest record is the oldest.
    queue = [(-count, left[subject][-1], subject) for subject, count in counts.items() if count]
    heapq.heapify(queue)
    while total > limits.in_all:
        count, newest, subject = heapq.heappop(queue)
        dropped.add(next(going[subject]))
        total -= 1
        if count + 1 < 0:
            heapq.heappush(queue, (count + 1, newest, subject))
    return sorted(dropped)


def _going(ids: Sequence[str], open_ids: Set[str]) -> Iterator[str]:
    """A subject's records in the order in which they go."""
    yield from (name for name in ids if name not in open_ids)
    yield from (name for name in ids if name in open_ids)


def _deleted_too_long(owned: Mapping[str, Sequence[str]], live: Set[str] | None, kept: int) -> list[str]:
    """Deleted subjects beyond the `kept` ones with the newest records."""
    if live is None:
        return []
    deleted = sorted((ids[-1], subject) for subject, ids in owned.items() if ids and subject not in live)
    return [subject for _, subject in deleted[: max(0, len(deleted) - kept)]]
