"""The replicas that each member would have by load, and which members are below that.

`allocation: load` uses the work of now, in the fast loop; `allocation: level` the steady work, in the slow loop: it
spreads the pool's room evenly before it is needed, above all once a burst is over.

The counts are found by marginal steps: from the floors on, each next replica goes to the member that is most pressed
with what it has so far, as long as its GPUs are left. With equal footprints no other counts have a lower worst ρ. Only
counts are solved; which GPUs, and in which order, is for the pool's bounded transitions. A member without a load keeps
what it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from policy_engine.core.pool.capacity_sources import order
from policy_engine.core.pool.donors import Terms
from policy_engine.core.pool.pool_candidates import MemberState, PoolCandidates
from policy_engine.core.shared.vocabulary import MemberKey


def solve_counts(candidates: PoolCandidates, *, steady: bool = False) -> dict[MemberKey, int]:
    """Awake replicas of each member for the least worst ρ within the pool's GPUs."""
    sizes = {item.member: len(item.gpu_indices) for item in candidates.overlay}
    free = len({gpu for item in candidates.overlay for gpu in item.gpus})
    counts: dict[MemberKey, int] = {}
    open_members: list[MemberState] = []
    for member in candidates.members:
        fixed = member.load is None or bool(member.shut) or member.key not in sizes
        counts[member.key] = candidates.awake_count(member.key) if fixed else member.floor
        free -= counts[member.key] * sizes.get(member.key, 0)
        if not fixed:
            open_members.append(member)
    queue = [(_need(member, counts[member.key], steady), member) for member in open_members]
    heapq.heapify(queue)
    while queue:
        _, member = heapq.heappop(queue)
        count = counts[member.key]
        worth = _work(member, steady) > 0 and count < member.ceiling
        if worth and sizes[member.key] <= free:
            counts[member.key] = count + 1
            free -= sizes[member.key]
            heapq.heappush(queue, (_need(member, count + 1, steady), member))
    return counts


def _work(member: MemberState, steady: bool) -> float:
    """Weighted by priority; 0 where it is not known."""
    return 0.0 if member.load is None else member.load.by(steady=steady) * member.weight


def _need(member: MemberState, count: int, steady: bool) -> tuple[float, int, MemberKey]:
    """The most pressed first, with `count` replicas."""
    work = _work(member, steady)
    rho = work / count if count > 0 else float("inf") if work > 0 else 0.0
    return (-rho, -member.priority, member.key)


def more_below_target(candidates: PoolCandidates, member: MemberState, *, steady: bool = False) -> Terms | None:
    """The terms on which the member gains once more; None when it has its replicas by load."""
    found = (terms for other, _, terms in below_target(candidates, steady=steady) if other.key == member.key)
    return next(found, None)


def below_target(candidates: PoolCandidates, *, steady: bool = False) -> Iterator[tuple[MemberState, str, Terms]]:
    """Members that should have more replicas, the most pressed first, with the reason and the terms of a release.

    Low loads are ignored, and a donor must end below the receiver by the rule's margin: each move then lowers the worst
    ρ of the members involved, and none is reversed while the load stays.
    """
    rule = candidates.rules.load
    target = solve_counts(candidates, steady=steady)
    for member in sorted(candidates.members, key=order):
        rho, awake = member.rho_by(steady=steady), candidates.awake_count(member.key)
        if rho is None or rho <= rule.level_above or target[member.key] <= awake or not member.share.fit:
            continue
        said = "no routable replica" if rho == float("inf") else f"ρ = {rho:.2f}"
        why = f"{said}, and the load asks for {target[member.key]} replicas, not {awake}"
        yield member, why, Terms(member.key, 0.0, rho - rule.level_margin, steady)
