"""The move that shortens requests most while no member is in need and loads are steady.

By Little's law the requests in service divided by the requests that arrive per second are a member's mean latency. With
another number of replicas it changes as the speed per request does (`predict.speed`). A move is judged by the sum over
all members of `requests per second · latency³`; the cube gives long requests their weight. Requests of 600 tokens gain
more by a replica than those of 100 tokens lose.

Levelling by load does not make such moves: there, a member with short requests may be more loaded than another.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.pool.capacity_sources import source
from policy_engine.core.pool.considered import Considered
from policy_engine.core.pool.donors import Terms
from policy_engine.core.pool.pool_candidates import MemberState, Plan, PoolCandidates
from policy_engine.core.pool.predict import speed

# After a move the window still covers the time before it.
SETTLED_AFTER_S = 6.0
# Arrivals that differ by more from the usual ones are on their way elsewhere.
STEADY_RATIO = 0.2


@dataclass(frozen=True, slots=True)
class Quicker:
    """A move, and the share by which it lowers the sum of cubed latencies."""

    member: MemberState
    plan: Plan
    gain: float


def burden(member: MemberState, replicas: int) -> float:
    """The member's requests per second times its cubed latency in s³, as predicted; 0 where little is known of it."""
    load = member.load
    latency_s = None if load is None else load.latency_s
    if load is None or not latency_s or load.routable <= 0:
        return 0.0
    now, then = load.with_replicas(load.routable, steady=True), load.with_replicas(replicas, steady=True)
    if now is None or then is None:
        return float("inf")
    slower = speed(now, member.lost_at_capacity) / speed(then, member.lost_at_capacity)
    return member.weight * load.request_rps * (latency_s * slower) ** 3


def quicker(candidates: PoolCandidates) -> tuple[Quicker | None, tuple[Considered, ...]]:
    """The move that lowers the burden most, if it does so by the rule's share; None without one. And what was
    considered for it."""
    rule = candidates.rules.load
    total = sum(burden(member, candidates.awake_count(member.key)) for member in candidates.members)
    if rule.latency_gain <= 0 or not 0 < total < float("inf"):
        return None, ()
    best: Quicker | None = None
    considered: list[Considered] = []
    for member in sorted(candidates.members, key=lambda item: item.key):
        rho = member.rho_by(steady=True)
        if rho is None or rho <= rule.level_above or not _settled(member):
            continue
        sought = source(candidates, member, Terms(member.key, 0.0, rule.donor_below, steady=True))
        considered += sought.considered
        plan = sought.plan
        if plan is None or plan.cold_starts or not _donors_may(candidates, plan):
            continue
        gain = _gain(candidates, plan) / total
        if gain >= rule.latency_gain and (best is None or gain > best.gain):
            best = Quicker(member, plan, gain)
    return best, tuple(considered)


def _settled(member: MemberState) -> bool:
    """Whether its load is known and as usual, has been so for a while, and its window began after its last move."""
    load = member.load
    if load is None or not member.share.fit:
        return False
    if member.moved_ago_s is not None and member.moved_ago_s < SETTLED_AFTER_S:
        return False
    return load.settled and abs(load.work - load.steady) <= STEADY_RATIO * max(1.0, load.steady)


def _donors_may(candidates: PoolCandidates, plan: Plan) -> bool:
    """Their loads are steady, too, and within the limit also by what arrives now."""
    for key, released in plan.released_by_member:
        member = candidates.member(key)
        rho = None if member.load is None else member.load.with_replicas(candidates.routable_count(key) - released)
        if not _settled(member) or rho is None or rho * member.weight > candidates.rules.load.donor_below:
            return False
    return True


def _gain(candidates: PoolCandidates, plan: Plan) -> float:
    """By how much the burden falls; negative where it rises."""
    return sum(
        burden(candidates.member(key), candidates.awake_count(key))
        - burden(candidates.member(key), candidates.awake_count(key) + change)
        for key, change in plan.change_by_member.items()
    )
