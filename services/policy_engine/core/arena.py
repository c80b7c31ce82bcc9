"""The picture of a pool that the arbiter looks at: who is awake where, who could be woken, what that would cost.

Occupancy is the desired awake set; beside it, replicas that are awake without being desired (a server that was just
restarted, one being put to sleep) keep their GPUs from counting as idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from policy_engine.core.draft import ReplicaChange
from policy_engine.core.guards import GuardState
from policy_engine.core.overlay import Gpu, OverlayReplica
from policy_engine.core.tss import Share, predicted_z
from policy_engine.core.vocabulary import ClampKind, MemberKey
from trimtab.words import LifeCycle

# On these a replica's GPUs may be given to another: it holds at most what a sleeper keeps.
OFF_GPU = frozenset({LifeCycle.SLEEPING, LifeCycle.FAILED})
SERVING = frozenset({LifeCycle.ACTIVE, LifeCycle.DRAINING, LifeCycle.REACTIVATING})
LOST = frozenset({LifeCycle.FAILED, LifeCycle.UNKNOWN, LifeCycle.STARTING, LifeCycle.TERMINATING})
UNKNOWN_LOAD = 1_000_000


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica of the pool as its actuator lists it. `in_flight` is None when the server could not be read."""

    replica: str
    life_cycle: LifeCycle
    routable: bool
    in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member at this tick. `received_ago_s` is None when it never received capacity."""

    key: MemberKey
    floor: int
    ceiling: int
    priority: int
    share: Share
    guard: GuardState
    received_ago_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Releases and the wakes that they make room for. `spare_gpus` are freed and not used."""

    wakes: tuple[OverlayReplica, ...]
    releases: tuple[OverlayReplica, ...]
    spare_gpus: int
    in_flight: int
    words: str

    @property
    def released_by_member(self) -> tuple[tuple[MemberKey, int], ...]:
        """How many replicas each donor gives."""
        counts: dict[MemberKey, int] = {}
        for item in self.releases:
            counts[item.member] = counts.get(item.member, 0) + 1
        return tuple(sorted(counts.items()))

    @property
    def donor_words(self) -> str:
        """The donors as text; empty for idle GPUs."""
        return " + ".join(str(key) for key, _ in self.released_by_member)


@dataclass(frozen=True)
class Arena:
    """One pool at one tick. `barred` are replicas whose last transition failed a short while ago."""

    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    members: tuple[MemberState, ...]
    replicas: tuple[ReplicaFacts, ...]
    residence_s: float
    barred: frozenset[str] = frozenset()

    @cached_property
    def _by_name(self) -> dict[str, OverlayReplica]:
        return {item.replica: item for item in self.overlay}

    @cached_property
    def _facts(self) -> dict[str, ReplicaFacts]:
        return {item.replica: item for item in self.replicas}

    @cached_property
    def _members(self) -> dict[MemberKey, MemberState]:
        return {item.key: item for item in self.members}

    @cached_property
    def _occupant(self) -> dict[Gpu, OverlayReplica]:
        return {gpu: self._by_name[name] for name in self.awake for gpu in self._by_name[name].gpus}

    @cached_property
    def _intruders(self) -> dict[Gpu, str]:
        """GPUs on which someone is awake, or may be, without being desired."""
        desired = set(self.awake)
        found: dict[Gpu, str] = {}
        for item in self.overlay:
            facts = self._facts.get(item.replica)
            if facts is not None and item.replica not in desired and facts.life_cycle not in OFF_GPU:
                found.update(dict.fromkeys(item.gpus, item.replica))
        return found

    @cached_property
    def _awake_by_member(self) -> dict[MemberKey, list[OverlayReplica]]:
        found: dict[MemberKey, list[OverlayReplica]] = {}
        for name in self.awake:
            item = self._by_name[name]
            found.setdefault(item.member, []).append(item)
        return found

    def member(self, key: MemberKey) -> MemberState:
        """The member of that key."""
        return self._members[key]

    def awake_count(self, key: MemberKey) -> int:
        """How many of the member's replicas are desired awake."""
        return len(self._awake_by_member.get(key, ()))

    def routable_count(self, key: MemberKey) -> int:
        """How many of those take requests now."""
        return sum(1 for item in self._awake_by_member.get(key, ()) if self._routable(item))

    def lost_count(self, key: MemberKey) -> int:
        """How many of those are gone: failed, unknown, starting again, or not listed at all."""
        return sum(1 for item in self._awake_by_member.get(key, ()) if self._life_cycle(item) in (None, *LOST))

    def least_loaded(self, key: MemberKey) -> OverlayReplica:
        """The member's awake replica with the least in flight; one that serves nobody comes before all."""
        return min(self._awake_by_member[key], key=lambda item: (self._routable(item), self._load(item), item.replica))

    def change(self, item: OverlayReplica) -> ReplicaChange:
        """The replica as a decision names it."""
        return ReplicaChange(item.replica, item.member.service, item.member.role, len(item.gpu_indices))

    def idle_plan(self, receiver: MemberState) -> Plan | None:
        """Wake a sleeper all of whose GPUs nobody uses."""
        for item in self._wakeable(receiver.key, frozenset({LifeCycle.SLEEPING})):
            if not self._blockers(item) and not self._intruded(item):
                return Plan((item,), (), 0, 0, "its GPUs are idle")
        return None

    def held_plan(self, receiver: MemberState) -> Plan | None:
        """Take back an own replica that is awake but held (a release that was not completed)."""
        for item in self._wakeable(receiver.key, SERVING):
            if not self._blockers(item) and not self._intruded(item):
                return Plan((item,), (), 0, 0, "it is awake already and only held")
        return None

    def why_no_idle(self, receiver: MemberState) -> str:
        """In words, for the record."""
        sleepers = list(self._wakeable(receiver.key, frozenset({LifeCycle.SLEEPING})))
        return "no idle GPUs for a sleeper of it" if sleepers else "it has no sleeper that could be woken"

    def donor_plans(self, receiver: MemberState) -> Iterator[Plan]:
        """Every wake of the receiver that needs others released: each with all of the replicas in its way."""
        for item in self._wakeable(receiver.key, frozenset({LifeCycle.SLEEPING})):
            blockers = self._blockers(item)
            if not blockers or self._intruded(item):
                continue
            if any(blocker.member == receiver.key or blocker.replica in self.barred for blocker in blockers):
                continue
            freed = sum(len(blocker.gpu_indices) for blocker in blockers)
            overlap = sum(1 for gpu in item.gpus if gpu in self._occupant)
            load = sum(self._load(blocker) for blocker in blockers)
            yield Plan((item,), blockers, freed - overlap, load, "a donor makes room")

    def filled(self, plan: Plan, receiver: MemberState) -> Plan:
        """Wake further replicas of the receiver on GPUs that the releases free beyond its first wake."""
        if plan.spare_gpus == 0:
            return plan
        room = receiver.ceiling - self.awake_count(receiver.key) - len(plan.wakes)
        released = {item.replica for item in plan.releases}
        taken = {gpu for item in plan.wakes for gpu in item.gpus}
        wakes = list(plan.wakes)
        for item in self._wakeable(receiver.key, frozenset({LifeCycle.SLEEPING})):
            if room <= 0:
                break
            others = {blocker.replica for blocker in self._blockers(item)}
            if taken.isdisjoint(item.gpus) and others and others <= released and not self._intruded(item):
                wakes.append(item)
                taken.update(item.gpus)
                room -= 1
        used = sum(len(item.gpu_indices) for item in wakes[1:])
        return replace(plan, wakes=tuple(wakes), spare_gpus=plan.spare_gpus - used)

    def check_donor(self, key: MemberKey, released: int, threshold_z: float) -> tuple[str, ClampKind | None, float]:
        """Why `key` may not give `released` replicas (empty when it may), the clamp, and its predicted Z."""
        member = self._members.get(key)
        if member is None:
            return "is no member any more", None, 0.0
        awake, routable = self.awake_count(key), self.routable_count(key)
        if min(awake, routable) - released < member.floor:
            return (
                f"{min(awake, routable)} − {released} is below its floor of {member.floor}",
                ClampKind.MIN_REPLICAS,
                0.0,
            )
        if not member.share.fit_for_release:
            detail = member.share.detail or "partial"
            return f"its signal is not fit for a release: {detail}", ClampKind.SIGNAL_QUALITY, 0.0
        if member.guard.soft:
            return member.guard.soft, ClampKind.LATENCY_BRAKE, 0.0
        if member.received_ago_s is not None and member.received_ago_s < self.residence_s:
            return f"received capacity {member.received_ago_s:.0f} s ago", ClampKind.SCALE_IN_COOLING, 0.0
        if member.share.idle:
            return "", None, float("inf")
        if member.share.z is None:
            return "its Z cannot be told", ClampKind.SIGNAL_QUALITY, 0.0
        predicted = predicted_z(member.share.z, replicas=routable, released=released)
        if predicted <= threshold_z:
            return f"its Z would fall to {predicted:.2f}, not above {threshold_z:.2f}", None, predicted
        return "", None, predicted

    def _wakeable(self, key: MemberKey, life_cycles: frozenset[LifeCycle]) -> Iterable[OverlayReplica]:
        left_out = self.barred.union(self.awake)
        for item in self.overlay:
            if item.member == key and item.replica not in left_out and self._life_cycle(item) in life_cycles:
                yield item

    def _blockers(self, item: OverlayReplica) -> tuple[OverlayReplica, ...]:
        found = {self._occupant[gpu].replica: self._occupant[gpu] for gpu in item.gpus if gpu in self._occupant}
        return tuple(found[name] for name in sorted(found))

    def _intruded(self, item: OverlayReplica) -> bool:
        return any(self._intruders.get(gpu, item.replica) != item.replica for gpu in item.gpus)

    def _life_cycle(self, item: OverlayReplica) -> LifeCycle | None:
        facts = self._facts.get(item.replica)
        return facts.life_cycle if facts is not None else None

    def _routable(self, item: OverlayReplica) -> bool:
        facts = self._facts.get(item.replica)
        return facts is not None and facts.routable

    def _load(self, item: OverlayReplica) -> int:
        facts = self._facts.get(item.replica)
        return UNKNOWN_LOAD if facts is None or facts.in_flight is None else facts.in_flight
