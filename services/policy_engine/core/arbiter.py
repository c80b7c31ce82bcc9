"""The arbiter of a pool (TRE, section IV): at most one transition per call, from whom to whom, and why.

- *fast* (rescue): a hard-guard breach comes first, then a member below its floor, then critical members, members that
  lost routable capacity and members whose load is more than they can do; the most pressed first. Sources in this order:
  idle GPUs, the member's own awake but held replicas, a donor's release.
- *slow* (rebalance): a receiver below Z = 1 and a donor that stays above it; with `allocation: level`, while everybody
  is well, also a move that spreads the pool's room by what usually arrives, or else one that makes requests quicker.
- Idle GPUs are always given, to the most pressed member that has demand: one in need by the fast loop, else by the slow
  one, since a gift that nobody needs is not worth a transition every few seconds.

The loops exclude each other: a rescue that found a source is the tick's transition. One that nothing could serve is
not pending and does not keep the slow loop waiting. How pressed a member is says its ρ where it has one, else 1/Z: of
both, 1 is just enough.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from policy_engine.core.arena import EFFECT_AFTER_S, Arena, MemberState, Plan
from policy_engine.core.bundle import NextTerms, bundled
from policy_engine.core.donors import HEALTHY_Z, Terms
from policy_engine.core.draft import ReplicaChange, Transition
from policy_engine.core.latency import quicker
from policy_engine.core.resolve import below_target, more_below_target
from policy_engine.core.sources import Log, order, source
from policy_engine.core.vocabulary import Candidate, Clamp, MemberKey, Region, Rule

# Whose needs are brief more often than this is not levelled by what they add up to.
MOSTLY = 0.5


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
    """A member that must gain capacity now, and how a donor has to stand afterwards."""

    member: MemberState
    rule: Rule
    why: str
    terms: Terms


def arbitrate(arena: Arena, *, fast_due: bool, slow_due: bool) -> Verdict:
    """One tick. With neither loop due nothing is looked at."""
    log = Log()
    unserved: list[_Event] = []
    if fast_due:
        excess = _over_ceiling(arena)
        if excess is not None:
            return excess
        for event in _events(arena, log):
            plan = source(arena, event.member, log, event.terms)
            if plan is not None:
                full = bundled(arena, event.member, plan, _NEXT[event.rule])
                return _verdict(arena, full, event.rule, event.why, event.member, log)
            if event.rule != Rule.LEVEL_LOAD:
                unserved.append(event)
    urgent_clamps = tuple(log.clamps[kind] for kind in sorted(log.clamps))
    if fast_due or slow_due:
        gift = _idle_gift(arena, log, anyone=slow_due)
        if gift is not None:
            return gift
    if slow_due:
        move = _rebalance(arena, log)
        if move is not None:
            return move
        level = _level(arena, log) or _quicken(arena, log) if arena.rules.allocation == "level" else None
        if level is not None:
            return level
    holding = "; ".join(f"{event.member.key}: {event.why}, and nothing can serve it" for event in unserved)
    return Verdict(
        None,
        Rule.HOLD,
        holding,
        candidates=log.candidates,
        clamps=urgent_clamps,
        holding=holding,
        unserved=tuple(f"{event.rule} {event.member.key}" for event in unserved),
    )


def _events(arena: Arena, log: Log) -> Iterator[_Event]:
    """Who must gain now, most urgent first."""
    ordered = sorted(arena.members, key=order)
    for member in ordered:
        if member.guard.hard and member.share.demand:
            # A breach says that Z is too kind: a donor that stays healthy may give, even to a Z above its own.
            yield _Event(member, Rule.RESCUE_HARD_GUARD, member.guard.hard, _terms(arena, member))
    for member in ordered:
        awake = arena.awake_count(member.key)
        if awake < member.floor:
            why = f"{awake} awake, the floor is {member.floor}"
            yield _Event(member, Rule.FLOOR_REPAIR, why, Terms(member.key, 0.0))
    if arena.rules.allocation == "load":
        for member, why, terms in below_target(arena):
            yield _Event(member, Rule.LEVEL_LOAD, why, terms)
    for member in ordered:
        event = _urgent(arena, member, log)
        if event is not None:
            yield event


def _urgent(arena: Arena, member: MemberState, log: Log) -> _Event | None:
    """A member that its Z, its lost replicas or its load make a receiver."""
    share = member.share
    if _waits(arena, member, log):
        return None
    critical = share.fit and share.demand and share.region == Region.CRITICAL and share.z is not None
    unseen = _unseen(arena, member) if critical and share.z else ""
    if unseen:
        log.left(member, "", unseen, None, arena.awake_count(member.key))
        critical = False
    if critical:
        why = share.detail or f"Z = {share.z:.2f} is critical"
        return _Event(member, Rule.RESCUE_CRITICAL, why, _terms(arena, member))
    if _lost_and_missed(arena, member):
        why = f"lost {arena.lost_count(member.key)} of its awake replicas"
        return _Event(member, Rule.RESCUE_LOST_CAPACITY, why, _terms(arena, member))
    rho = member.load.rho if member.load is not None else None
    if rho is not None and share.fit and rho > _rescue_above(arena, member):
        why = f"ρ = {rho:.2f}: more work comes than its replicas can do"
        return _Event(member, Rule.RESCUE_LOAD, why, _terms(arena, member))
    return None


def _waits(arena: Arena, member: MemberState, log: Log) -> bool:
    """Whether its need has to last first; not when it lost capacity or has none."""
    if member.waits_s <= 0 or arena.routable_count(member.key) == 0 or _lost_and_missed(arena, member):
        return False
    why = f"its needs are brief: this one has to last {member.waits_s:.0f} s more"
    log.left(member, "", why, None, arena.awake_count(member.key))
    return True


def _rescue_above(arena: Arena, member: MemberState) -> float:
    """From which ρ on it is rescued: with a surplus of Z and settled arrivals a little more is chance."""
    rule = arena.rules.load
    surplus = member.share.region == Region.SURPLUS and member.load is not None and member.load.settled
    return max(rule.rescue_above, rule.surplus_rescue_above) if surplus else rule.rescue_above


def _enough(arena: Arena, member: MemberState) -> Terms | None:
    """A member that has no load, or one within its limit, gains one replica at a time."""
    del arena, member
    return None


def _more_by_load(arena: Arena, member: MemberState) -> Terms | None:
    rho = member.load.rho if member.load is not None else None
    return _terms(arena, member) if rho is not None and rho > arena.rules.load.rescue_above else None


_NEXT: dict[Rule, NextTerms] = {
    Rule.RESCUE_HARD_GUARD: _more_by_load,
    Rule.FLOOR_REPAIR: _enough,
    Rule.LEVEL_LOAD: more_below_target,
    Rule.RESCUE_CRITICAL: _more_by_load,
    Rule.RESCUE_LOST_CAPACITY: _more_by_load,
    Rule.RESCUE_LOAD: _more_by_load,
}


def _unseen(arena: Arena, member: MemberState) -> str:
    """Why the member's Z does not tell of it as it is now; empty when it does.

    Its window may be from before a move. Or the window was idle when it began: requests that came since have prompts
    computed and no tokens yet, which looks like starving. Until a window was busy throughout, the load says more, where
    it says that there is no lack.
    """
    if member.moved_ago_s is not None and member.moved_ago_s < arena.rules.settle_s:
        return f"moved {member.moved_ago_s:.0f} s ago: its Z has not seen it"
    rho, rule = member.rho_by(steady=False), arena.rules.load
    begins = member.began_ago_s is not None and member.began_ago_s < EFFECT_AFTER_S
    if begins and rho is not None and rho <= rule.rescue_above:
        return f"was idle {member.began_ago_s:.0f} s ago: its Z has not seen a busy window, and ρ = {rho:.2f}"
    return ""


def _terms(arena: Arena, member: MemberState) -> Terms:
    """A donor stays better off than the receiver is: by Z while that is below 1, above 1 otherwise; by ρ too."""
    z = member.share.z
    threshold = None if z is None or z >= HEALTHY_Z else _above(arena, member)
    return Terms(member.key, threshold, _rho_limit(arena, member))


def _above(arena: Arena, member: MemberState) -> float:
    """The receiver's weighted Z and the margin over it."""
    return (member.weighted_z or 0.0) * (1.0 + arena.rules.donor_margin)


def _rho_limit(arena: Arena, member: MemberState) -> float | None:
    rho, rule = member.weighted_rho, arena.rules.load
    return None if rho is None else max(rule.donor_below, rho - rule.margin)


def _lost_and_missed(arena: Arena, member: MemberState) -> bool:
    """Lost capacity is an event while it is felt: below the floor, or asked for and not healthy without it."""
    if arena.lost_count(member.key) == 0:
        return False
    if arena.routable_count(member.key) < member.floor:
        return True
    return member.share.demand and (member.share.z is None or member.share.z < HEALTHY_Z)


def _idle_gift(arena: Arena, log: Log, *, anyone: bool) -> Verdict | None:
    """Idle GPUs for the most pressed member with demand; unless for `anyone`, one with Z below 1."""
    for member in sorted(arena.members, key=order):
        z = member.share.z
        if not member.share.demand or not member.share.fit or z is None or (z >= HEALTHY_Z and not anyone):
            continue
        if member.shut or arena.awake_count(member.key) >= member.ceiling:
            continue
        plan = arena.idle_plan(member)
        if plan is not None:
            why = f"idle GPUs, and it is the most pressed with demand (Z = {z:.2f})"
            return _verdict(arena, plan, Rule.IDLE_GPU, why, member, log)
    return None


def _rebalance(arena: Arena, log: Log) -> Verdict | None:
    """A receiver below 1 from a donor that stays above; in an overload, by the pool's rule, from one better off."""
    level = arena.rules.overload == "level" and _overloaded(arena)
    for member in sorted(arena.members, key=order):
        share = member.share
        if not share.demand or not share.fit or share.z is None or share.z >= HEALTHY_Z or _unseen(arena, member):
            continue
        if _waits(arena, member, log):
            continue
        threshold = _above(arena, member) if level else None
        plan = source(arena, member, log, Terms(member.key, threshold, _rho_limit(arena, member)))
        if plan is not None:
            why = f"Z = {share.z:.2f} is below 1" + (", as is everyone's" if level else "")
            return _verdict(arena, plan, Rule.REBALANCE, why, member, log)
    return None


def _level(arena: Arena, log: Log) -> Verdict | None:
    """Replicas for the member that is furthest below what the steady load gives it, if any can come."""
    more = functools.partial(more_below_target, steady=True)
    for member, why, terms in below_target(arena, steady=True):
        if member.brief > MOSTLY and arena.rules.load.patience_s > 0:
            log.left(
                member,
                "",
                "most of its needs are brief: what it usually has is no sign",
                None,
                arena.awake_count(member.key),
            )
            continue
        plan = source(arena, member, log, terms)
        if plan is not None:
            return _verdict(arena, bundled(arena, member, plan, more), Rule.LEVEL_LOAD, why, member, log)
    return None


def _quicken(arena: Arena, log: Log) -> Verdict | None:
    """With loads level and steady, the move that makes requests quicker, if there is one."""
    found = quicker(arena, log)
    if found is None:
        return None
    why = f"with a replica more the sum of cubed latencies falls by {found.gain:.0%}"
    return _verdict(arena, found.plan, Rule.LEVEL_LATENCY, why, found.member, log)


def _overloaded(arena: Arena) -> bool:
    """Every member that is asked for anything has less than it needs."""
    known = [item.share.z for item in arena.members if item.share.demand and item.share.z is not None]
    return bool(known) and all(z < HEALTHY_Z for z in known)


def _over_ceiling(arena: Arena) -> Verdict | None:
    """A ceiling that was lowered: the least loaded replica goes, one a tick."""
    for member in sorted(arena.members, key=lambda item: item.key):
        awake = arena.awake_count(member.key)
        if awake > member.ceiling and not member.shut:
            victim = arena.least_loaded(member.key)
            transition = Transition(releases=(arena.change(victim),), wakes=())
            reason = f"{member.key} has {awake} awake and may have {member.ceiling}"
            return Verdict(transition, Rule.BOUNDS, reason)
    return None


def _verdict(arena: Arena, plan: Plan, rule: Rule, why: str, receiver: MemberState, log: Log) -> Verdict:
    log.taken(receiver.key, plan.donor_words, plan.words)
    for key in sorted({item.member for item in plan.wakes} - {receiver.key}):
        log.taken(key, plan.donor_words, "it uses what the release frees beside")
    transition = Transition(
        releases=tuple(arena.change(item) for item in plan.releases),
        wakes=tuple(arena.change(item) for item in plan.wakes),
    )
    wakes = _names(transition.wakes)
    made = f"releases {_names(transition.releases)}" if transition.releases else plan.words
    remark = f"; {plan.remark}" if plan.remark else ""
    reason = f"{receiver.key}: {why}; wakes {wakes}, {made}{remark}"
    return Verdict(transition, rule, reason, receiver=receiver.key, candidates=log.candidates)


def _names(changes: tuple[ReplicaChange, ...]) -> str:
    return ", ".join(change.replica for change in changes)
