"""The assignment of targets to collectors: all live collectors compute the same one.

Each collector keeps a lease in the store (``trimtab.store.keys.collector_members``), and each reads all of them in the
same step in which it renews its own. A target belongs to the member with the highest hash of (member, target), so that
a member that comes or goes moves its own share and nothing else. There is no leader.

They agree on the members because these change only at moments that all can know beforehand:

* A member that joined counts from two intervals after its lease began, when every other one has read of it.
* One that died, or cannot reach the store, counts until its lease is over, which every other one has read before. The
  holder of a lease that is over reports nothing.
* One that leaves in order ends its lease at once. Only its own targets move then, so that it does no harm when one
  reads of it a round later than another.

Where no member counts yet, all that hold a lease do: a first collector works at once. Only members with the same
sources share targets: one cannot take a target that its sources do not list.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

JOIN_INTERVALS = 2
"""After so many a new member counts."""

LEASE_INTERVALS = 1.25
"""A lease is renewed twice an interval, and shares are computed in the middle of each: a collector that dies loses its
share within two intervals."""

MIN_LEASE_S = 1.0
"""Shorter leases would fall to a machine that is busy for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One collector's lease. Times are seconds on the store's clock.

    ``incarnation`` is another for each start of a process, ``sources`` a fingerprint of where its targets come from.
    ``interval_s`` is its own: members that share have the same.
    """

    name: str
    incarnation: str
    joined_at_s: float
    until_s: float
    interval_s: float
    sources: str

    def lives(self, now_s: float) -> bool:
        """Whether its lease holds."""
        return now_s < self.until_s

    def counts(self, now_s: float) -> bool:
        """Whether it has its share: every member has read its lease by now, and the lease holds."""
        return self.lives(now_s) and now_s >= self.joined_at_s + JOIN_INTERVALS * self.interval_s


def lease_s(interval_s: float) -> float:
    """How long a lease lasts from its renewal."""
    return max(MIN_LEASE_S, LEASE_INTERVALS * interval_s)


def parse_members(reply: Mapping[bytes, bytes]) -> tuple[Member, ...]:
    """The members in the store's hash, by name. A field that is no member is passed over."""
    found: list[Member] = []
    for name, value in reply.items():
        parts = value.decode("ascii", "replace").split(" ")
        try:
            incarnation, joined_ms, until_ms, interval_ms, sources = parts
            member = Member(
                name=name.decode(),
                incarnation=incarnation,
                joined_at_s=int(joined_ms) / 1000,
                until_s=int(until_ms) / 1000,
                interval_s=int(interval_ms) / 1000,
                sources=sources,
            )
        except ValueError:
            continue
        found.append(member)
    return tuple(sorted(found, key=lambda member: member.name))


def sharers(members: Iterable[Member], *, sources: str, at_s: float) -> tuple[str, ...]:
    """The names of those that share the targets of ``sources`` at ``at_s``, in order."""
    alike = [member for member in members if member.sources == sources and member.lives(at_s)]
    counting = [member for member in alike if member.counts(at_s)]
    return tuple(sorted(member.name for member in counting or alike))


def owner(target_id: str, names: Sequence[str]) -> str:
    """The owner of a target: the name with the highest hash. Raises ``ValueError`` for no name."""
    if len(names) == 1:
        return names[0]
    return max(names, key=lambda name: (_weight(name, target_id), name))


def share(target_ids: Collection[str], names: Sequence[str], *, name: str) -> frozenset[str]:
    """The targets of ``name`` among those of all ``names``; none for a stranger."""
    if name not in names:
        return frozenset()
    if len(names) == 1:
        return frozenset(target_ids)
    return frozenset(target_id for target_id in target_ids if owner(target_id, names) == name)


def sources_fingerprint(sources: Iterable[str]) -> str:
    """The same for the same sources in any order, in every process."""
    return hashlib.blake2b("\n".join(sorted(sources)).encode(), digest_size=8).hexdigest()


def _weight(name: str, target_id: str) -> bytes:
    return hashlib.blake2b(target_id.encode(), digest_size=8, key=hashlib.blake2b(name.encode()).digest()).digest()
