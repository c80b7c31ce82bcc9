"""Receivers and sources that the arbiter considered, as values; a decision's candidates and clamps are made of them.

Every function that looks for capacity returns what it considered, in order. Of the same receiver and source the first
reason counts, unless the pair was taken in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from policy_engine.core.shared.vocabulary import Candidate, Clamp, ClampKind, MemberKey

MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """One receiver and one source. `donor` names the members that would give; empty for idle GPUs and for no source.

    `clamp` is the kind of limit that kept the pair from being taken, None where no limit did. `awake` is the receiver's
    number of awake replicas.
    """

    receiver: MemberKey
    donor: str = ""
    reason: str
    taken: bool = False
    clamp: ClampKind | None = None
    awake: int = 0


def candidates_of(considered: Iterable[Considered]) -> tuple[Candidate, ...]:
    """Each pair once, in the order in which they were considered; of those left at most `MAX_CANDIDATES`."""
    found: dict[tuple[MemberKey, str], Candidate] = {}
    for item in considered:
        key = (item.receiver, item.donor)
        if item.taken or (key not in found and len(found) < MAX_CANDIDATES):
            found[key] = Candidate(str(item.receiver), item.donor, item.taken, item.reason)
    return tuple(found.values())


def clamps_of(considered: Iterable[Considered]) -> tuple[Clamp, ...]:
    """The first clamp of each kind, by kind: the receiver's replicas with one more, and as they are."""
    found: dict[ClampKind, Clamp] = {}
    for item in considered:
        if item.clamp is not None and item.clamp not in found:
            where = f"{item.donor}: " if item.donor else ""
            detail = f"{item.receiver}: {where}{item.reason}"
            found[item.clamp] = Clamp(item.clamp, float(item.awake + 1), float(item.awake), detail)
    return tuple(found[kind] for kind in sorted(found))
