"""Scale-in: how many replicas of each role every group gives up; the actuator picks the victims.

Groups of the highest class first, so that scarce hardware becomes free first (HeteroScale 3.4), and inside a class
in order of names. A group is emptied, or keeps its P/D ratio as far as the counts allow, and never keeps prefill
without decode while another choice exists. What becomes free is not available in the same cycle.
"""

from collections.abc import Mapping, Sequence

from prescheduler.core.groups import GroupState
from prescheduler.core.model import ROLE_ORDER
from trimtab.domain.placement import ScaleIn
from trimtab.domain.vocabulary import Role

GroupKey = tuple[str, str]
"""(cluster, group)"""


def plan_scale_in(
    groups: Sequence[GroupState], surplus: Mapping[Role, int], parts: Mapping[Role, int]
) -> dict[GroupKey, tuple[ScaleIn, ...]]:
    """What each group gives up, in the order in which groups are asked.

    ``surplus``: how many to take by role, at most what exists. ``parts``: the roles' parts of the ratio's unit.
    """
    left = {role: count for role, count in surplus.items() if count > 0}
    ordered = sorted(groups, key=lambda group: (-int(group.subgroup_class), group.name, group.cluster))
    counts = {_key(group): {role: group.count(role) for role in group.replicas} for group in ordered}
    for group in ordered:
        _take_whole_units(counts[_key(group)], left, parts)
    _take_singles(ordered, counts, left, parts)
    taken: dict[GroupKey, tuple[ScaleIn, ...]] = {}
    for group in ordered:
        now = counts[_key(group)]
        cuts = tuple(
            ScaleIn(role=role, count=group.count(role) - now[role])
            for role in sorted(now, key=ROLE_ORDER.__getitem__)
            if group.count(role) > now[role]
        )
        if cuts:
            taken[_key(group)] = cuts
    return taken


def _key(group: GroupState) -> GroupKey:
    return group.cluster, group.name


def _take_whole_units(counts: dict[Role, int], left: dict[Role, int], parts: Mapping[Role, int]) -> None:
    """Shrink one group to the fewest whole units that cover what it cannot give up."""
    stays = {role: count - min(count, left.get(role, 0)) for role, count in counts.items()}
    units = max((-(-stay // parts.get(role, 1)) for role, stay in stays.items()), default=0)
    for role, count in counts.items():
        kept = min(count, units * parts.get(role, 1))
        if kept < count:
            left[role] -= count - kept
            counts[role] = kept


def _take_singles(
    ordered: Sequence[GroupState],
    counts: dict[GroupKey, dict[Role, int]],
    left: dict[Role, int],
    parts: Mapping[Role, int],
) -> None:
    """The rest, one by one: from the group that has most of the role for its ratio, last ones of a role last."""
    for role in sorted(left, key=ROLE_ORDER.__getitem__):
        while left[role] > 0:
            options = [group for group in ordered if counts[_key(group)].get(role, 0) > 0]
            if not options:
                break
            best = min(options, key=lambda group: _reluctance(counts[_key(group)], role, parts, group))
            counts[_key(best)][role] -= 1
            left[role] -= 1


def _reluctance(
    counts: Mapping[Role, int], role: Role, parts: Mapping[Role, int], group: GroupState
) -> tuple[bool, float, int, str, str]:
    others = [count / parts.get(other, 1) for other, count in counts.items() if other is not role]
    strands = counts[role] == 1 and any(others)
    excess = counts[role] / parts.get(role, 1) - min(others, default=0.0)
    return strands, -excess, -int(group.subgroup_class), group.name, group.cluster
