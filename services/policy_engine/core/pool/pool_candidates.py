"""The state of a pool as the arbiter's rules use it: which replicas are awake where, and what waking another takes.

Occupancy is the desired awake set. Replicas that are awake without being desired (a server that was just restarted,
one being put to sleep) keep their GPUs from counting as idle. A replica that is starting where a desired one is awake
does not: the memory is taken, so it waits. It gets the memory first when the desired replica is released.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from policy_engine.core.pool.gpu_layout import Gpu, OverlayReplica
from policy_engine.core.pool.guards import GuardState
from policy_engine.core.pool.load import Load
from policy_engine.core.pool.predict import POWER, USUAL_SPARE
from policy_engine.core.pool.tss import Share
from policy_engine.core.shared.draft import ReplicaChange
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.poolrules import PoolRules
from trimtab.domain.vocabulary import LifeCycle

# On these a replica's GPUs may be given to another: it holds at most what a sleeper keeps.
OFF_GPU = frozenset({LifeCycle.SLEEPING, LifeCycle.FAILED})
SERVING = frozenset({LifeCycle.ACTIVE, LifeCycle.DRAINING, LifeCycle.REACTIVATING})
LOST = frozenset({LifeCycle.FAILED, LifeCycle.UNKNOWN, LifeCycle.STARTING, LifeCycle.TERMINATING})
UNKNOWN_LOAD = 1_000_000
# A change's effect is in a window that began after it: windows are 5 s unless the collector is set otherwise.
EFFECT_AFTER_S = 5.0
DEFAULT_RULES = PoolRules()


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica of the pool as its actuator lists it. `in_flight` is None when the server could not be read."""

    replica: str
    life_cycle: LifeCycle
    routable: bool
    in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member at this tick. `received_ago_s` is None when it never received capacity.

    `load` is None where it cannot be computed. `moved_ago_s`: since the end of its last gain or release. `began_ago_s`:
    from the first window with demand to the newest; None where its beginning was not observed. `brief`: the share of
    its recent needs that were brief; `waits_s`: for how much longer a need therefore has to last before it is served.
    `weight` follows from the priority: above 1 the member ranks as worse served than it is. `exponent` and
    `lost_at_capacity` are for predictions. `shut` is the reason why it may neither gain nor give; empty when it may.
    """

    key: MemberKey
    floor: int
    ceiling: int
    priority: int
    share: Share
    guard: GuardState
    received_ago_s: float | None = None
    load: Load | None = None
    moved_ago_s: float | None = None
    began_ago_s: float | None = None
    waits_s: float = 0.0
    brief: float = 0.0
    weight: float = 1.0
    exponent: float = POWER
    lost_at_capacity: float = 1.0 - 1.0 / USUAL_SPARE
    shut: str = ""

    @property
    def weighted_z(self) -> float | None:
        """Z as members are compared by it."""
        return None if self.share.z is None else self.share.z / self.weight

    @property
    def weighted_rho(self) -> float | None:
        """ρ as members are compared by it; infinite for work without a routable replica."""
        return self.rho_by(steady=False)

    def rho_by(self, *, steady: bool) -> float | None:
        """The same by the work of now, or by the steady one."""
        if self.load is None:
            return None
        rho = self.load.with_replicas(self.load.routable, steady=steady)
        if rho is None:
            return float("inf") if self.load.by(steady=steady) > 0 else 0.0
        return rho * self.weight


@dataclass(frozen=True, slots=True)
class Plan:
    """Releases and the wakes that they make room for. `spare_gpus` are freed and not used.

    `cold_starts`: the number of servers that have to start before the wakes are done; `remark` names them. `obstacle`
    is the reason why the plan cannot be carried out; empty when it can.
    """

    wakes: tuple[OverlayReplica, ...]
    releases: tuple[OverlayReplica, ...]
    spare_gpus: int
    in_flight: int
    words: str
    cold_starts: int = 0
    remark: str = ""
    obstacle: str = ""

    @property
    def released_by_member(self) -> tuple[tuple[MemberKey, int], ...]:
        """How many replicas each donor gives."""
        counts: dict[MemberKey, int] = {}
        for item in self.releases:
            counts[item.member] = counts.get(item.member, 0) + 1
        return tuple(sorted(counts.items()))

    @property
    def change_by_member(self) -> Mapping[MemberKey, int]:
        """By how many replicas each member grows, below 0 for those that shrink."""
        found: dict[MemberKey, int] = {}
        for item in self.wakes:
            found[item.member] = found.get(item.member, 0) + 1
        for key, released in self.released_by_member:
            found[key] = found.get(key, 0) - released
        return found

    @property
    def donor_words(self) -> str:
        """The donors as text; empty for idle GPUs."""
        return " + ".join(str(key) for key, _ in self.released_by_member)


@dataclass(frozen=True)
class PoolCandidates:
    """One pool at one tick. `barred` are replicas whose last transition failed a short while ago."""

    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    members: tuple[MemberState, ...]
    replicas: tuple[ReplicaFacts, ...]
    residence_s: float
    barred: frozenset[str] = frozenset()
    rules: PoolRules = DEFAULT_RULES

    @cached_property
    def _by_name(self) -> dict[str, OverlayReplica]:
        return {item.replica: item for item in self.overlay}

    @cached_property
    def _overlay_of(self) -> dict[MemberKey, list[OverlayReplica]]:
        found: dict[MemberKey, list[OverlayReplica]] = {}
        for item in self.overlay:
            found.setdefault(item.member, []).append(item)
        return found

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
    def _waiting(self) -> tuple[OverlayReplica, ...]:
        """Undesired replicas that start where a desired one has the memory."""
        desired = set(self.awake)
        return tuple(
            item
            for item in self.overlay
            if item.replica not in desired and self._starts(item) and self._shut_out(item, frozenset())
        )

    @cached_property
    def _intruders(self) -> dict[Gpu, list[OverlayReplica]]:
        """GPUs on which someone is awake, or may be, without being desired."""
        left_out = set(self.awake).union(item.replica for item in self._waiting)
        found: dict[Gpu, list[OverlayReplica]] = {}
        for item in self.overlay:
            life_cycle = self._life_cycle(item)
            if item.replica not in left_out and life_cycle is not None and life_cycle not in OFF_GPU:
                for gpu in item.gpus:
                    found.setdefault(gpu, []).append(item)
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
        """The member's awake replica with the fewest requests in flight; one that does not serve comes first."""
        return min(self._awake_by_member[key], key=lambda item: (self._routable(item), self._load(item), item.replica))

    def change(self, item: OverlayReplica) -> ReplicaChange:
        """The replica as a decision names it."""
        return ReplicaChange(item.replica, item.member.service, item.member.role, len(item.gpu_indices))

    def idle_plan(self, receiver: MemberState) -> Plan | None:
        """Wake a sleeper whose GPUs are all idle."""
        for item in self._wakeable(receiver.key, frozenset({LifeCycle.SLEEPING})):
            if not self._blockers(item) and self._intruder(item) is None:
                return Plan((item,), (), 0, 0, "its GPUs are idle")
        return None

    def held_plan(self, receiver: MemberState) -> Plan | None:
        """Take back an own replica that is awake but held (a release that was not completed)."""
        for item in self._wakeable(receiver.key, SERVING):
            if not self._blockers(item) and self._intruder(item) is None:
                return Plan((item,), (), 0, 0, "it is awake already and only held")
        return None

    def why_no_idle(self, receiver: MemberState) -> str:
        """In words, for the record."""
        sleepers = list(self._wakeable(receiver.key, frozenset({LifeCycle.SLEEPING})))
        for item in sleepers:
            intruder = self._intruder(item)
            if not self._blockers(item) and intruder is not None:
                return self._intrusion(intruder)
        return "no idle GPUs for a sleeper of it" if sleepers else "it has no sleeper that could be woken"

    def donor_plans(self, receiver: MemberState) -> Iterator[Plan]:
        """Every wake of the receiver that needs others released: each with all of the replicas in its way.

        With those that cannot be carried out, for the record, and with cold starts, for want of anything better. A cold
        start is no faster than a replica that the receiver has lost and that starts again already.
        """
        back = next((own for own in self._awake_by_member.get(receiver.key, ()) if self._starts(own)), None)
        for item in self._overlay_of.get(receiver.key, ()):
            blockers = self._blockers(item)
            if not blockers or any(other.member == receiver.key for other in blockers):
                continue
            released = frozenset(blocker.replica for blocker in blockers)
            ahead = self._ahead(item, released)
            cold = item in self._waiting
            remarks = [f"waiting server {name} starts on its GPUs" for name in ahead]
            remarks += [f"{item.replica} has to start up"] if cold else []
            obstacle = self._obstacle(item, blockers)
            if remarks and back is not None:
                obstacle = obstacle or f"{remarks[0]}, and {back.replica} starts already"
            yield Plan(
                wakes=(item,),
                releases=blockers,
                spare_gpus=sum(len(blocker.gpu_indices) for blocker in blockers)
                - sum(1 for gpu in item.gpus if gpu in self._occupant),
                in_flight=sum(self._load(blocker) for blocker in blockers),
                words="; ".join(["a donor makes room", *remarks]),
                cold_starts=len(remarks),
                remark="; ".join(remarks),
                obstacle=obstacle,
            )

    def _obstacle(self, item: OverlayReplica, blockers: tuple[OverlayReplica, ...]) -> str:
        """Why `item` cannot be woken in the place of `blockers`; empty when it can."""
        for other in (item, *blockers):
            if other.replica in self.barred:
                return f"{other.replica} is being repaired, or its last transition failed"
        if self._life_cycle(item) != LifeCycle.SLEEPING and item not in self._waiting:
            return f"{item.replica} is {self._life_cycle(item) or 'not listed'}"
        intruder = self._intruder(item)
        return "" if intruder is None else self._intrusion(intruder)

    def fillers(self, plan: Plan) -> Iterator[OverlayReplica]:
        """Sleepers, of any member, for GPUs that the plan's releases free and its wakes leave unused.

        One may also use GPUs that are idle now.
        """
        released = frozenset(item.replica for item in plan.releases)
        taken = {gpu for item in plan.wakes for gpu in item.gpus}
        freed = {gpu for item in plan.releases for gpu in item.gpus} - taken
        moved = released.union(item.replica for item in plan.wakes)
        seen: set[str] = set()
        for gpu in sorted(freed):
            for item in self._sleepers_on.get(gpu, ()):
                if item.replica in seen or item.replica in moved or not taken.isdisjoint(item.gpus):
                    continue
                seen.add(item.replica)
                others = {blocker.replica for blocker in self._blockers(item)}
                if others <= released and self._intruder(item) is None and not self._ahead(item, released):
                    yield item

    def with_wake(self, plan: Plan, item: OverlayReplica) -> Plan:
        """The plan with one more wake on GPUs that its releases free."""
        freed = {gpu for release in plan.releases for gpu in release.gpus}
        used = sum(1 for gpu in item.gpus if gpu in freed)
        return replace(plan, wakes=(*plan.wakes, item), spare_gpus=plan.spare_gpus - used)

    @cached_property
    def _sleepers_on(self) -> dict[Gpu, list[OverlayReplica]]:
        left_out = self.barred.union(self.awake)
        found: dict[Gpu, list[OverlayReplica]] = {}
        for item in self.overlay:
            if item.replica not in left_out and self._life_cycle(item) == LifeCycle.SLEEPING:
                for gpu in item.gpus:
                    found.setdefault(gpu, []).append(item)
        return found

    def find_member(self, key: MemberKey) -> MemberState | None:
        """The member of that key; None for one whose policy is gone."""
        return self._members.get(key)

    def stages_beside(self, key: MemberKey) -> tuple[MemberState, ...]:
        """The other stages of the member's service that live in this pool."""
        return tuple(item for item in self.members if item.key.service == key.service and item.key != key)

    def _wakeable(self, key: MemberKey, life_cycles: frozenset[LifeCycle]) -> Iterable[OverlayReplica]:
        left_out = self.barred.union(self.awake)
        for item in self._overlay_of.get(key, ()):
            if item.replica not in left_out and self._life_cycle(item) in life_cycles:
                yield item

    def _blockers(self, item: OverlayReplica) -> tuple[OverlayReplica, ...]:
        found = {self._occupant[gpu].replica: self._occupant[gpu] for gpu in item.gpus if gpu in self._occupant}
        return tuple(found[name] for name in sorted(found))

    def _shut_out(self, item: OverlayReplica, released: frozenset[str]) -> bool:
        """Whether a desired replica that is not to be released is awake on its GPUs: then it cannot come up."""
        return any(
            other.replica not in released and self._life_cycle(other) in SERVING for other in self._blockers(item)
        )

    def _ahead(self, item: OverlayReplica, released: frozenset[str]) -> list[str]:
        """Waiting servers that may get the GPUs of `item` first once `released` have gone."""
        mine = set(item.gpus)
        return [
            other.replica
            for other in self._waiting
            if other != item and not mine.isdisjoint(other.gpus) and not self._shut_out(other, released)
        ]

    def _intruder(self, item: OverlayReplica) -> OverlayReplica | None:
        found = (other for gpu in item.gpus for other in self._intruders.get(gpu, ()) if other != item)
        return next(found, None)

    def _intrusion(self, intruder: OverlayReplica) -> str:
        if self._starts(intruder):
            return f"waiting server {intruder.replica} starts on its GPUs"
        return f"{intruder.replica} on its GPUs is {self._life_cycle(intruder)} and may be awake"

    def _life_cycle(self, item: OverlayReplica) -> LifeCycle | None:
        facts = self._facts.get(item.replica)
        return facts.life_cycle if facts is not None else None

    def _starts(self, item: OverlayReplica) -> bool:
        return self._life_cycle(item) == LifeCycle.STARTING

    def _routable(self, item: OverlayReplica) -> bool:
        facts = self._facts.get(item.replica)
        return facts is not None and facts.routable

    def _load(self, item: OverlayReplica) -> int:
        facts = self._facts.get(item.replica)
        return UNKNOWN_LOAD if facts is None or facts.in_flight is None else facts.in_flight
