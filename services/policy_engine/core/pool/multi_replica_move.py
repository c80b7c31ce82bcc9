"""More than one replica for one receiver in one transition, where its load says how many it lacks.

A drain, a sleep and a wake take seconds, so a burst that needs three replicas more would be met after three times as
long. With ρ the need is known at once: while it stays above its limit with what the transition gives so far, the next
source is looked for in the state after it. All of it is one operation, rolled back as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from policy_engine.core.pool.capacity_sources import source
from policy_engine.core.pool.donors import Terms, predicted
from policy_engine.core.pool.pool_candidates import MemberState, Plan, PoolCandidates, ReplicaFacts
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.domain.vocabulary import LifeCycle

NextTerms = Callable[[PoolCandidates, MemberState], Terms | None]
"""On what terms the receiver gains once more in a world; None when it has enough."""


def bundled(candidates: PoolCandidates, receiver: MemberState, plan: Plan, next_terms: NextTerms) -> Plan:
    """The plan, and what else `receiver` needs, up to the rule's number of wakes."""
    world, step = candidates, plan
    while _gained(plan, receiver.key) < candidates.rules.load.max_wakes and not step.cold_starts:
        world = after_plan(world, step)
        terms = next_terms(world, world.member(receiver.key))
        if terms is None:
            break
        found = source(world, world.member(receiver.key), terms).plan
        if found is None or found.cold_starts:
            break
        plan, step = _joined(plan, found), found
    return plan


def _gained(plan: Plan, key: MemberKey) -> int:
    return sum(1 for item in plan.wakes if item.member == key)


def _joined(plan: Plan, more: Plan) -> Plan:
    return replace(
        plan,
        wakes=(*plan.wakes, *more.wakes),
        releases=(*plan.releases, *more.releases),
        spare_gpus=plan.spare_gpus + more.spare_gpus,
        in_flight=plan.in_flight + more.in_flight,
        words=f"{plan.words}; then {more.words}",
    )


def after_plan(candidates: PoolCandidates, plan: Plan) -> PoolCandidates:
    """The pool as it will be once `plan` is done, as far as it can be foretold."""
    released = {item.replica for item in plan.releases}
    woken = {item.replica for item in plan.wakes}
    change = plan.change_by_member
    return replace(
        candidates,
        awake=tuple(sorted((set(candidates.awake) - released) | woken)),
        members=tuple(_changed(candidates, member, change.get(member.key, 0)) for member in candidates.members),
        replicas=tuple(_moved(item, released, woken) for item in candidates.replicas),
    )


def _changed(candidates: PoolCandidates, member: MemberState, change: int) -> MemberState:
    if change == 0:
        return member
    routable = candidates.routable_count(member.key)
    share, load = member.share, member.load
    if share.z and not share.idle and routable > 0:
        share = replace(share, z=predicted(candidates, member, routable, routable + change))
    if load is not None:
        load = replace(load, routable=max(0, load.routable + change))
    return replace(member, share=share, load=load)


def _moved(facts: ReplicaFacts, released: set[str], woken: set[str]) -> ReplicaFacts:
    if facts.replica in released:
        return replace(facts, life_cycle=LifeCycle.SLEEPING, routable=False, in_flight=0)
    if facts.replica in woken:
        return replace(facts, life_cycle=LifeCycle.ACTIVE, routable=True, in_flight=0)
    return facts
