"""Why a group found no place: the binding constraint, and a sentence that names domains and counts.

From the widest question to the narrowest: are there enough free GPUs at all, enough of an allowed type, enough
inside one domain of the affinity level, enough on single nodes.
"""

from collections.abc import Sequence

import numpy as np

from prescheduler.core.candidates import Search, whole
from prescheduler.core.capacity import Capacity
from prescheduler.core.groups import GroupState
from prescheduler.core.model import Constraint, level_label
from prescheduler.core.packing import Need
from prescheduler.core.tree import IntArray
from trimtab.domain.scaling import ScalingRequest
from trimtab.domain.vocabulary import TopologyLevel


def explain(
    capacity: Capacity, request: ScalingRequest, needs: Sequence[Need], groups: Sequence[GroupState]
) -> tuple[Constraint, str]:
    """The constraint that binds ``needs``, given that no candidate exists, and the sentence about it."""
    wanted = sum(need.total_gpus for need in needs)
    free = capacity.free_gpus()
    if free < wanted:
        return Constraint.CAPACITY, f"{shape(capacity, needs)} need {_gpus(wanted)}; {free} are free in all"
    by_type = _short_of_type(capacity, request, needs)
    if by_type is not None:
        return Constraint.GPU_TYPE, by_type
    level = request.bound_level
    if not whole(request, needs, None):
        return _explain_expansion(capacity, request, needs, groups)
    enough = _domains_with_gpus(capacity, level, needs)
    if not enough.any():
        return Constraint.AFFINITY, _no_domain(capacity, level, needs)
    return Constraint.FRAGMENTATION, _scattered(capacity, level, needs, np.flatnonzero(enough))


def shape(capacity: Capacity, needs: Sequence[Need]) -> str:
    """Such as ``2 prefill of 4 L20 GPUs and 8 decode of 1 GPU``."""
    return " and ".join(f"{need.count} {need.role.value} of {_size(capacity, need)}" for need in needs)


def _size(capacity: Capacity, need: Need) -> str:
    names = capacity.tree.gpu_types
    types = "" if len(need.tiers) == 1 and len(need.types) == len(names) else " or ".join(names[n] for n in need.types)
    return f"{need.gpus} {types + ' ' if types else ''}{'GPU' if need.gpus == 1 else 'GPUs'}"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _short_of_type(capacity: Capacity, request: ScalingRequest, needs: Sequence[Need]) -> str | None:
    asked = {item.role: " or ".join(item.gpu_types) for item in request.roles}
    for need in needs:
        inside = [other for other in needs if set(other.types) <= set(need.types)]
        wanted = sum(other.total_gpus for other in inside)
        free = capacity.free_gpus(need.types)
        if free < wanted:
            others = capacity.free_gpus() - free
            return (
                f"{shape(capacity, inside)} need {_gpus(wanted)} of {asked[need.role]}; "
                f"{free} are free, and {others} of other types"
            )
    return None


def _domains_with_gpus(capacity: Capacity, level: TopologyLevel, needs: Sequence[Need]) -> IntArray:
    """Domains that hold enough free GPUs of every allowed type, scattered or not."""
    enough = np.ones(capacity.tree.level(level).count, dtype=np.int64)
    for need in needs:
        wanted = sum(other.total_gpus for other in needs if set(other.types) <= set(need.types))
        enough &= capacity.slots(level, 1, need.types)[-1] >= wanted
    return enough


def _no_domain(capacity: Capacity, level: TopologyLevel, needs: Sequence[Need]) -> str:
    """Names the domain that covers most of the GPUs needed."""
    types = sorted({number for need in needs for number in need.types})
    free = capacity.slots(level, 1, types)[-1]
    wanted = sum(need.total_gpus for need in needs)
    covered = sum(
        (np.minimum(need.total_gpus, capacity.slots(level, 1, need.types)[-1]) for need in needs), np.zeros_like(free)
    )
    best = int(np.argmax(np.minimum(np.minimum(covered, free), wanted)))
    names = {n: capacity.tree.gpu_types[n] or "of unknown type" for n in types}
    by_type = [f"{int(capacity.slots(level, 1, (n,))[-1][best])} {names[n]}" for n in types]
    return (
        f"no {level_label(level)} holds {shape(capacity, needs)} together; {_name(capacity, level, best)} comes "
        f"nearest with {' and '.join(by_type)} free, of {int(free.sum())} in all"
    )


def _scattered(capacity: Capacity, level: TopologyLevel, needs: Sequence[Need], domains: IntArray) -> str:
    """Names the domain that comes nearest, by the share of the replicas that it could hold one role at a time."""
    room = {need.role: capacity.slots(level, need.gpus, need.types)[-1][domains] for need in needs}
    reach = np.minimum.reduce([np.minimum(1.0, room[need.role] / need.count) for need in needs])
    at = int(np.argmax(reach))
    name = _name(capacity, level, int(domains[at]))
    short = [need for need in needs if int(room[need.role][at]) < need.count]
    if short:
        fits = " and ".join(
            f"{int(room[need.role][at])} of {need.count} {need.role.value} of {_size(capacity, need)}" for need in short
        )
        return f"{name} has enough free GPUs, but scattered over its nodes: they hold {fits}"
    return f"{name} has enough free GPUs, but its nodes do not hold {shape(capacity, needs)} at once"


def _explain_expansion(
    capacity: Capacity, request: ScalingRequest, needs: Sequence[Need], groups: Sequence[GroupState]
) -> tuple[Constraint, str]:
    """Only some roles grow, so they have to join a group that has the others."""
    level = request.bound_level
    search = Search(capacity, request, needs, groups)
    hosts = [domain for domain in sorted(search.hosts) if search.allowed[domain]]
    growing = " and ".join(need.role.value for need in needs)
    if not hosts:
        where = f"no group of {request.service} inside one {level_label(level)} has its other roles"
        return Constraint.AFFINITY, f"{growing} alone would be cut off: {where}"
    types = sorted({number for need in needs for number in need.types})
    free = capacity.slots(level, 1, types)[-1]
    shown = ", ".join(f"{_name(capacity, level, domain)} has {int(free[domain])}" for domain in hosts[:3])
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    wanted = sum(need.total_gpus for need in needs)
    scattered = any(int(free[domain]) >= wanted for domain in hosts)
    return (
        Constraint.FRAGMENTATION if scattered else Constraint.AFFINITY,
        f"{shape(capacity, needs)} need {_gpus(wanted)} beside the group's other roles; of free GPUs {shown}{more}",
    )


def _name(capacity: Capacity, level: TopologyLevel, domain: int) -> str:
    domains = capacity.tree.level(level)
    if level is TopologyLevel.CLUSTER:
        return f"cluster {domains.names[domain]}"
    return f"{domains.names[domain]} of cluster {domains.clusters[domain]}"
