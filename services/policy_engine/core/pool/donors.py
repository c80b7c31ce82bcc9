"""Whether a member may give, and its predicted Z and ρ afterwards.

A donor keeps its floor, its signals are fit for a release, no soft guard of its own is passed, it did not just gain,
and it does not end worse off than the receiver: by Z, and by ρ where both have one.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.pool.pool_candidates import MemberState, PoolCandidates
from policy_engine.core.pool.predict import z_after
from policy_engine.core.shared.vocabulary import ClampKind, MemberKey

HEALTHY_Z = 1.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a release is for, and how a donor must stand after it.

    Its predicted Z stays above `threshold_z`, weighted by priority; None for above 1, whatever its priority. Its ρ
    stays at or below `rho_limit`, weighted too; None for no limit. With `steady` it is the ρ by its steady work.
    """

    receiver: MemberKey
    threshold_z: float | None
    rho_limit: float | None = None
    steady: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reason` is why a member may not give; empty when it may. Predictions are weighted; `rho` is None if unknown."""

    reason: str
    clamp: ClampKind | None = None
    z: float = 0.0
    rho: float | None = None


def judge(candidates: PoolCandidates, key: MemberKey, released: int, terms: Terms) -> Judgement:
    """Of `key` as the donor of `released` replicas."""
    member = candidates.find_member(key)
    if member is None:
        return Judgement("is no member any more")
    if member.shut:
        return Judgement(member.shut)
    awake, routable = candidates.awake_count(key), candidates.routable_count(key)
    if min(awake, routable) - released < member.floor:
        reason = f"{min(awake, routable)} − {released} is below its floor of {member.floor}"
        return Judgement(reason, ClampKind.MIN_REPLICAS)
    if not member.share.fit_for_release:
        detail = member.share.detail or "partial"
        return Judgement(f"its signal is not fit for a release: {detail}", ClampKind.SIGNAL_QUALITY)
    if member.guard.soft:
        return Judgement(member.guard.soft, ClampKind.LATENCY_BRAKE)
    if member.received_ago_s is not None and member.received_ago_s < candidates.residence_s:
        return Judgement(f"received capacity {member.received_ago_s:.0f} s ago", ClampKind.SCALE_IN_COOLING)
    stage = _other_stage(candidates, key, terms) if candidates.rules.stage_guard else ""
    if stage:
        return Judgement(stage, ClampKind.STAGE_GUARD)
    return _outlook(candidates, member, routable, released, terms)


def _outlook(candidates: PoolCandidates, member: MemberState, routable: int, released: int, terms: Terms) -> Judgement:
    """By what is predicted of it."""
    after = routable - released
    rho: float | None = None
    if member.load is not None:
        plain = member.load.with_replicas(after, steady=terms.steady)
        rho = (float("inf") if member.load.work > 0 else 0.0) if plain is None else plain * member.weight
        if terms.rho_limit is not None and rho > terms.rho_limit:
            return Judgement(f"its ρ would rise to {rho:.2f}, above {terms.rho_limit:.2f}", None, rho=rho)
    if member.share.idle:
        return Judgement("", None, float("inf"), rho)
    if member.share.z is None:
        return Judgement("its Z cannot be told", ClampKind.SIGNAL_QUALITY, rho=rho)
    settles = member.moved_ago_s is not None and member.moved_ago_s < candidates.rules.settle_s
    if settles and rho is None:
        return Judgement(f"moved {member.moved_ago_s:.0f} s ago: its Z has not seen it", ClampKind.SCALE_IN_COOLING)
    plain_z = predicted(candidates, member, routable, after)
    z = plain_z / member.weight
    compared, threshold = (plain_z, HEALTHY_Z) if terms.threshold_z is None else (z, terms.threshold_z)
    if compared <= threshold:
        return Judgement(f"its Z would fall to {compared:.2f}, not above {threshold:.2f}", None, z, rho)
    return Judgement("", None, z, rho)


def predicted(candidates: PoolCandidates, member: MemberState, replicas: int, after: int) -> float:
    """The member's Z with `after` replicas instead of `replicas`; 0 where it has none now."""
    return z_after(
        candidates.rules,
        member.share.z or 0.0,
        replicas=replicas,
        after=after,
        load=member.load,
        exponent=member.exponent,
        lost_at_capacity=member.lost_at_capacity,
    )


def _other_stage(candidates: PoolCandidates, key: MemberKey, terms: Terms) -> str:
    """Why the other stage of the donor's service forbids the release; empty when it does not.

    Stages press on each other: with less decode capacity KV waits in prefill, with less prefill nothing reaches decode.
    So a stage in need vetoes the other, unless what is released is for itself.
    """
    for stage in candidates.stages_beside(key):
        if stage.key == terms.receiver or not stage.share.demand:
            continue
        if stage.guard.soft:
            return f"its other stage {stage.key}: {stage.guard.soft}"
        if stage.share.z is None or stage.share.z < HEALTHY_Z:
            said = "cannot be told" if stage.share.z is None else f"is {stage.share.z:.2f}"
            return f"the Z of its other stage {stage.key} {said}"
        rho = stage.load.rho if stage.load is not None else None
        if rho is not None and rho > candidates.rules.load.rescue_above:
            return f"the ρ of its other stage {stage.key} is {rho:.2f}"
    return ""
