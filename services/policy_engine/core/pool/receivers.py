"""Whether a member's signs of need can be trusted, and the Z and ρ that a donor must keep when it gives to it."""

from __future__ import annotations

from policy_engine.core.pool.considered import Considered
from policy_engine.core.pool.donors import HEALTHY_Z, Terms
from policy_engine.core.pool.pool_candidates import EFFECT_AFTER_S, MemberState, PoolCandidates


def left_out(candidates: PoolCandidates, member: MemberState, reason: str) -> Considered:
    """The member as a receiver that is passed over, and why."""
    return Considered(receiver=member.key, reason=reason, awake=candidates.awake_count(member.key))


def must_wait(candidates: PoolCandidates, member: MemberState) -> Considered | None:
    """Set while its need has to last first; never when it lost capacity or has none."""
    if member.waits_s <= 0 or candidates.routable_count(member.key) == 0 or lost_and_missed(candidates, member):
        return None
    return left_out(candidates, member, f"its needs are brief: this one has to last {member.waits_s:.0f} s more")


def unseen(candidates: PoolCandidates, member: MemberState) -> str:
    """Why the member's Z does not describe it as it is now; empty when it does.

    Its window may be from before a move. Or the window was idle when it began: requests that came since have prompts
    computed and no tokens yet, which gives a low Z. Until a window was busy throughout, a load that shows no lack
    overrides Z.
    """
    if member.moved_ago_s is not None and member.moved_ago_s < candidates.rules.settle_s:
        return f"moved {member.moved_ago_s:.0f} s ago: its Z has not seen it"
    rho, rule = member.rho_by(steady=False), candidates.rules.load
    begins = member.began_ago_s is not None and member.began_ago_s < EFFECT_AFTER_S
    if begins and rho is not None and rho <= rule.rescue_above:
        return f"was idle {member.began_ago_s:.0f} s ago: its Z has not seen a busy window, and ρ = {rho:.2f}"
    return ""


def lost_and_missed(candidates: PoolCandidates, member: MemberState) -> bool:
    """Whether the member lost capacity that it needs: it is below its floor, or has demand and is not healthy."""
    if candidates.lost_count(member.key) == 0:
        return False
    if candidates.routable_count(member.key) < member.floor:
        return True
    return member.share.demand and (member.share.z is None or member.share.z < HEALTHY_Z)


def release_terms(candidates: PoolCandidates, member: MemberState) -> Terms:
    """A donor stays better off than the receiver is: by Z while that is below 1, above 1 otherwise; by ρ too."""
    z = member.share.z
    threshold = None if z is None or z >= HEALTHY_Z else z_threshold(candidates, member)
    return Terms(member.key, threshold, rho_limit(candidates, member))


def z_threshold(candidates: PoolCandidates, member: MemberState) -> float:
    """The donor's least Z after a release: the receiver's weighted one and the margin over it."""
    return (member.weighted_z or 0.0) * (1.0 + candidates.rules.donor_margin)


def rho_limit(candidates: PoolCandidates, member: MemberState) -> float | None:
    """The donor's largest ρ after a release: the receiver's less the margin; None when the receiver has none."""
    rho, rule = member.weighted_rho, candidates.rules.load
    return None if rho is None else max(rule.donor_below, rho - rule.margin)
