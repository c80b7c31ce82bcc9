"""Where a receiver's capacity comes from: idle GPUs, its own held replicas, or the gentlest release that makes room.

The result holds every source that was considered and left, with the reason.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from policy_engine.core.pool.considered import Considered
from policy_engine.core.pool.donors import Judgement, Terms, judge, predicted
from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.pool_candidates import MemberState, Plan, PoolCandidates
from policy_engine.core.shared.vocabulary import ClampKind, MemberKey, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """The plan that was found, None without one, and the sources that were considered for it."""

    plan: Plan | None = None
    considered: tuple[Considered, ...] = ()


def pressure(member: MemberState) -> float:
    """How pressed a member is: its ρ, else 1/Z, weighted by priority. 1 means just enough, or unknown."""
    if member.weighted_rho is not None:
        return member.weighted_rho
    return _inverse(member.weighted_z)


def order(member: MemberState) -> tuple[float, int, MemberKey]:
    """The most pressed first; then priority, then name."""
    return (-pressure(member), -member.priority, member.key)


def _inverse(z: float | None) -> float:
    if z is None:
        return 1.0
    return 1.0 / z if z > 0 else float("inf")


def source(candidates: PoolCandidates, receiver: MemberState, terms: Terms) -> Sought:
    """Idle GPUs, then own held replicas, then a donor's release; what a release frees beside is given too."""
    awake = candidates.awake_count(receiver.key)
    if receiver.shut:
        return Sought(considered=(Considered(receiver=receiver.key, reason=receiver.shut, awake=awake),))
    if awake >= receiver.ceiling:
        reason = f"is at its ceiling of {receiver.ceiling}"
        full = Considered(receiver=receiver.key, reason=reason, clamp=ClampKind.MAX_REPLICAS, awake=awake)
        return Sought(considered=(full,))
    without_donor = candidates.idle_plan(receiver) or candidates.held_plan(receiver)
    if without_donor is not None:
        return Sought(plan=without_donor)
    no_idle = Considered(receiver=receiver.key, reason=candidates.why_no_idle(receiver), awake=awake)
    found = _donor_plan(candidates, receiver, terms)
    return replace(found, considered=(no_idle, *found.considered))


@dataclass(frozen=True, slots=True)
class _Fit:
    """A plan whose donors may all give. The lower the rank, the gentler."""

    rank: tuple[int, bool, int, float, int, str]
    plan: Plan


def _donor_plan(candidates: PoolCandidates, receiver: MemberState, terms: Terms) -> Sought:
    """The gentlest release that makes room.

    That is: no server has to start up first, donors that are well off, no GPU freed in vain, donors least pressed
    afterwards, fewest requests in flight.
    """
    fit: list[_Fit] = []
    obstructed: list[Plan] = []
    left: list[Considered] = []
    key, awake = receiver.key, candidates.awake_count(receiver.key)
    verdict_on = functools.cache(lambda donor, released: judge(candidates, donor, released, terms))
    for plan in candidates.donor_plans(receiver):
        if plan.obstacle:
            obstructed.append(plan)
            continue
        judged = [(donor, verdict_on(donor, released)) for donor, released in plan.released_by_member]
        refused = next(((donor, found) for donor, found in judged if found.reason), None)
        if refused is not None:
            donor, why = str(refused[0]), refused[1]
            left.append(Considered(receiver=key, donor=donor, reason=why.reason, clamp=why.clamp, awake=awake))
            continue
        full = replace(_filled(candidates, plan, receiver), words=_outlook(candidates, receiver, plan, judged))
        fit.append(_Fit(_rank(candidates, full, judged), full))
    fit.sort(key=lambda item: item.rank)
    for item in fit[1:]:
        if item.plan.donor_words != fit[0].plan.donor_words:
            reason = item.plan.remark or "another donor is the gentler one"
            left.append(Considered(receiver=key, donor=item.plan.donor_words, reason=reason, awake=awake))
    left += (Considered(receiver=key, donor=plan.donor_words, reason=plan.obstacle, awake=awake) for plan in obstructed)
    return Sought(plan=fit[0].plan if fit else None, considered=tuple(left))


def _rank(
    candidates: PoolCandidates, plan: Plan, judged: list[tuple[MemberKey, Judgement]]
) -> tuple[int, bool, int, float, int, str]:
    donor_below = candidates.rules.load.donor_below
    well_off = all(
        found.rho <= donor_below if found.rho is not None else candidates.member(key).share.region == Region.SURPLUS
        for key, found in judged
    )
    most_pressed = max(found.rho if found.rho is not None else _inverse(found.z) for _, found in judged)
    return (plan.cold_starts, not well_off, plan.spare_gpus, most_pressed, plan.in_flight, plan.wakes[0].replica)


def _outlook(
    candidates: PoolCandidates, receiver: MemberState, plan: Plan, judged: list[tuple[MemberKey, Judgement]]
) -> str:
    """The reason of a pair that was taken: the predicted Z and ρ of both sides."""
    said = []
    for key, found in judged:
        rho = f", ρ {found.rho:.2f}" if found.rho is not None else ""
        said.append(f"{key} keeps Z {found.z:.2f}{rho}" if found.z != float("inf") else f"{key} is idle{rho}")
    routable = candidates.routable_count(receiver.key)
    if receiver.share.z and routable:
        z = predicted(candidates, receiver, routable, routable + len(plan.wakes))
        said.append(f"{receiver.key} goes from Z {receiver.share.z:.2f} to {z:.2f}")
    return "; ".join([plan.words, *said])


def _filled(candidates: PoolCandidates, plan: Plan, receiver: MemberState) -> Plan:
    """Give what the releases free beyond the first wake to the member in most need: the receiver again, or another."""
    while plan.spare_gpus > 0:
        extra = _next_filler(candidates, plan, receiver)
        if extra is None:
            break
        plan = candidates.with_wake(plan, extra)
    return plan


def _next_filler(candidates: PoolCandidates, plan: Plan, receiver: MemberState) -> OverlayReplica | None:
    best: tuple[float, int, MemberKey] | None = None
    chosen: OverlayReplica | None = None
    donors = {key for key, _ in plan.released_by_member}
    for item in candidates.fillers(plan):
        member = candidates.find_member(item.member)
        if member is None or member.shut or item.member in donors:
            continue
        gained = sum(1 for wake in plan.wakes if wake.member == item.member)
        awake = candidates.awake_count(item.member) + gained
        asked = member.share.demand and (member.share.fit or item.member == receiver.key)
        wanted = asked or awake < member.floor
        if awake >= member.ceiling or not wanted:
            continue
        rank = (-_pressure_with(candidates, member, gained), -member.priority, member.key)
        if best is None or rank < best:
            best, chosen = rank, item
    return chosen


def _pressure_with(candidates: PoolCandidates, member: MemberState, gained: int) -> float:
    """How pressed the member will be with what the plan gives it already; just enough where it had nothing to go by."""
    if gained == 0:
        return pressure(member)
    routable = candidates.routable_count(member.key)
    if member.load is not None:
        return member.load.work / (routable + gained) * member.weight
    if not member.share.z or routable == 0:
        return 1.0
    return _inverse(predicted(candidates, member, routable, routable + gained) / member.weight)
