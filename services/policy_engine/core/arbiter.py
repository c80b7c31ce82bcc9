"""The arbiter of a pool (TRE, section IV): at most one transition per tick, from whom to whom, and why.

- *fast* (rescue): a hard-guard breach comes first, then a member below its floor, then critical members and members
  that lost routable capacity, lowest Z first. Sources in this order: idle GPUs, the member's own awake but held
  replicas, a donor's release.
- *slow* (rebalance): a receiver below Z = 1 and a donor that stays above it.
- Idle GPUs are always given, to the lowest Z that has demand: below 1 by the fast loop, else by the slow one, since
  a gift that nobody needs is not worth a transition every few seconds.

The loops exclude each other: a rescue that found a source is the tick's transition. One that nothing could serve is
not pending and does not keep the slow loop waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policy_engine.core.arena import Arena, MemberState, Plan
from policy_engine.core.draft import ReplicaChange, Transition
from policy_engine.core.vocabulary import Candidate, Clamp, ClampKind, MemberKey, Region, Rule

HEALTHY_Z = 1.0
MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the arbiter decided. `transition` is None when it leaves everything as it is.

    `clamps` say what kept an event from being served; `holding` is the same in words. `unserved` names those events by
    rule and member.
    """

    transition: Transition | None
    rule: Rule
    reason: str
    receiver: MemberKey | None = None
    candidates: tuple[Candidate, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    holding: str = ""
    unserved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Event:
    """A member that must gain capacity now. `threshold_z`: what a donor's predicted Z has to stay above."""

    member: MemberState
    rule: Rule
    why: str
    threshold_z: float


class _Log:
    """Collects the pairs that were looked at, each once, and the clamps of those that were left."""

    def __init__(self) -> None:
        self.candidates: dict[tuple[str, str], Candidate] = {}
        self.clamps: dict[ClampKind, Clamp] = {}

    def left(self, receiver: MemberState, donor: str, reason: str, kind: ClampKind | None, awake: int) -> None:
        key = (str(receiver.key), donor)
        if key not in self.candidates and len(self.candidates) < MAX_CANDIDATES:
            self.candidates[key] = Candidate(str(receiver.key), donor, False, reason)
        if kind is not None and kind not in self.clamps:
            where = f"{donor}: " if donor else ""
            self.clamps[kind] = Clamp(kind, float(awake + 1), float(awake), f"{receiver.key}: {where}{reason}")

    def taken(self, receiver: MemberState, plan: Plan) -> None:
        key = (str(receiver.key), plan.donor_words)
        self.candidates[key] = Candidate(str(receiver.key), plan.donor_words, True, plan.words)

    def all(self) -> tuple[Candidate, ...]:
        return tuple(self.candidates.values())


def arbitrate(arena: Arena, *, fast_due: bool, slow_due: bool) -> Verdict:
    """One tick. With neither loop due nothing is looked at."""
    log = _Log()
    unserved: list[_Event] = []
    if fast_due:
        excess = _over_ceiling(arena)
        if excess is not None:
            return excess
        for event in _events(arena):
            plan = _source(arena, event.member, log, threshold_z=event.threshold_z)
            if plan is not None:
                return _verdict(arena, plan, event.rule, event.why, event.member, log)
            unserved.append(event)
    urgent_clamps = tuple(log.clamps[kind] for kind in sorted(log.clamps))
    if fast_due or slow_due:
        gift = _idle_gift(arena, log, any_z=slow_due)
        if gift is not None:
            return gift
    if slow_due:
        move = _rebalance(arena, log)
        if move is not None:
            return move
    holding = "; ".join(f"{event.member.key}: {event.why}, and nothing can serve it" for event in unserved)
    return Verdict(
        None,
        Rule.HOLD,
        holding,
        candidates=log.all(),
        clamps=urgent_clamps,
        holding=holding,
        unserved=tuple(f"{event.rule} {event.member.key}" for event in unserved),
    )


def _order(member: MemberState) -> tuple[float, int, MemberKey]:
    """Lowest Z first; a Z that cannot be told ranks as healthy; then priority, then name."""
    z = HEALTHY_Z if member.share.z is None else member.share.z
    return (z, -member.priority, member.key)


def _events(arena: Arena) -> Iterator[_Event]:
    """Who must be rescued, most urgent first."""
    ordered = sorted(arena.members, key=_order)
    for member in ordered:
        if member.guard.hard and member.share.demand:
            # A breach says that Z is too kind: a donor that stays healthy may give, even to a Z above its own.
            z = HEALTHY_Z if member.share.z is None else min(member.share.z, HEALTHY_Z)
            yield _Event(member, Rule.RESCUE_HARD_GUARD, member.guard.hard, z)
    for member in ordered:
        awake = arena.awake_count(member.key)
        if awake < member.floor:
            yield _Event(member, Rule.FLOOR_REPAIR, f"{awake} awake, the floor is {member.floor}", 0.0)
    for member in ordered:
        share = member.share
        if share.fit and share.demand and share.region == Region.CRITICAL and share.z is not None:
            why = share.detail or f"Z = {share.z:.2f} is critical"
            yield _Event(member, Rule.RESCUE_CRITICAL, why, min(share.z, HEALTHY_Z))
        elif _lost_and_missed(arena, member):
            lost = arena.lost_count(member.key)
            z = HEALTHY_Z if share.z is None else min(share.z, HEALTHY_Z)
            yield _Event(member, Rule.RESCUE_LOST_CAPACITY, f"lost {lost} of its awake replicas", z)


def _lost_and_missed(arena: Arena, member: MemberState) -> bool:
    """Lost capacity is an event while it is felt: below the floor, or asked for and not healthy without it."""
    if arena.lost_count(member.key) == 0:
        return False
    if arena.routable_count(member.key) < member.floor:
        return True
    return member.share.demand and (member.share.z is None or member.share.z < HEALTHY_Z)


def _source(arena: Arena, receiver: MemberState, log: _Log, *, threshold_z: float) -> Plan | None:
    """Idle GPUs, then own held replicas, then a donor's release."""
    awake = arena.awake_count(receiver.key)
    if awake >= receiver.ceiling:
        log.left(receiver, "", f"is at its ceiling of {receiver.ceiling}", ClampKind.MAX_REPLICAS, awake)
        return None
    without_donor = arena.idle_plan(receiver) or arena.held_plan(receiver)
    if without_donor is not None:
        return without_donor
    log.left(receiver, "", arena.why_no_idle(receiver), None, awake)
    return _donor_plan(arena, receiver, log, threshold_z=threshold_z)


def _donor_plan(arena: Arena, receiver: MemberState, log: _Log, *, threshold_z: float) -> Plan | None:
    """The gentlest release that makes room.

    That is: no server has to start up first, surplus donors, no GPU freed in vain, highest predicted Z, least loaded.
    """
    fit: list[tuple[tuple[int, bool, int, float, int, str], Plan]] = []
    obstructed: list[Plan] = []
    awake = arena.awake_count(receiver.key)
    for plan in arena.donor_plans(receiver):
        if plan.obstacle:
            obstructed.append(plan)
            continue
        refusal: tuple[str, str, ClampKind | None] | None = None
        lowest = float("inf")
        for key, released in plan.released_by_member:
            reason, kind, predicted = arena.check_donor(key, released, threshold_z)
            if reason:
                refusal = (str(key), reason, kind)
                break
            lowest = min(lowest, predicted)
        if refusal is not None:
            log.left(receiver, *refusal, awake)
            continue
        surplus = all(arena.member(key).share.region == Region.SURPLUS for key, _ in plan.released_by_member)
        rank = (plan.cold_starts, not surplus, plan.spare_gpus, -lowest, plan.in_flight, plan.wakes[0].replica)
        fit.append((rank, plan))
    fit.sort(key=lambda item: item[0])
    for _, plan in fit[1:]:
        if plan.donor_words != fit[0][1].donor_words:
            log.left(receiver, plan.donor_words, plan.remark or "another donor is the gentler one", None, awake)
    for plan in obstructed:
        log.left(receiver, plan.donor_words, plan.obstacle, None, awake)
    return arena.filled(fit[0][1], receiver) if fit else None


def _idle_gift(arena: Arena, log: _Log, *, any_z: bool) -> Verdict | None:
    for member in sorted(arena.members, key=_order):
        z = member.share.z
        if not member.share.demand or not member.share.fit or z is None or (z >= HEALTHY_Z and not any_z):
            continue
        if arena.awake_count(member.key) >= member.ceiling:
            continue
        plan = arena.idle_plan(member)
        if plan is not None:
            return _verdict(
                arena, plan, Rule.IDLE_GPU, f"idle GPUs, and the lowest Z with demand ({z:.2f})", member, log
            )
    return None


def _rebalance(arena: Arena, log: _Log) -> Verdict | None:
    for member in sorted(arena.members, key=_order):
        share = member.share
        if not share.demand or not share.fit or share.z is None or share.z >= HEALTHY_Z:
            continue
        plan = _source(arena, member, log, threshold_z=HEALTHY_Z)
        if plan is not None:
            return _verdict(arena, plan, Rule.REBALANCE, f"Z = {share.z:.2f} is below 1", member, log)
    return None


def _over_ceiling(arena: Arena) -> Verdict | None:
    """A ceiling that was lowered: the least loaded replica goes, one a tick."""
    for member in sorted(arena.members, key=lambda item: item.key):
        awake = arena.awake_count(member.key)
        if awake > member.ceiling:
            victim = arena.least_loaded(member.key)
            transition = Transition(releases=(arena.change(victim),), wakes=())
            reason = f"{member.key} has {awake} awake and may have {member.ceiling}"
            return Verdict(transition, Rule.BOUNDS, reason)
    return None


def _verdict(arena: Arena, plan: Plan, rule: Rule, why: str, receiver: MemberState, log: _Log) -> Verdict:
    log.taken(receiver, plan)
    transition = Transition(
        releases=tuple(arena.change(item) for item in plan.releases),
        wakes=tuple(arena.change(item) for item in plan.wakes),
    )
    wakes = _names(transition.wakes)
    source = f"releases {_names(transition.releases)}" if transition.releases else plan.words
    remark = f"; {plan.remark}" if plan.remark else ""
    reason = f"{receiver.key}: {why}; wakes {wakes}, {source}{remark}"
    return Verdict(transition, rule, reason, receiver=receiver.key, candidates=log.all())


def _names(changes: tuple[ReplicaChange, ...]) -> str:
    return ", ".join(change.replica for change in changes)
