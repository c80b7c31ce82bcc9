"""One scheduling cycle as one function: inventories and requests in, placements and reasons out.

HeteroScale 3.4, Algorithm 4. Requests are served by priority, then age, then name; what one takes is gone for the
rest of the cycle, what a scale-in frees comes back with the next cycle's tree. The order in which clusters, nodes,
replicas and requests are given changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from prescheduler.core.admission import admission, clock_text, held
from prescheduler.core.candidates import Candidate, Search
from prescheduler.core.capacity import Capacity
from prescheduler.core.groups import GroupState, bound_domain, group_name, highest_class, index_groups, replica_name
from prescheduler.core.model import (
    ROLE_ORDER,
    ClusterInventory,
    Constraint,
    MissingCluster,
    Outcome,
    Plan,
    ServiceResult,
)
from prescheduler.core.packing import Need
from prescheduler.core.placement_backoff import Backoff, wait_until
from prescheduler.core.rejection import explain
from prescheduler.core.scale_in import plan_scale_in
from prescheduler.core.tree import Tree, build_tree
from trimtab.domain.placement import GroupPlacement, ReplicaPlacement
from trimtab.domain.scaling import RoleRequest, ScalingRequest
from trimtab.domain.vocabulary import Role, TopologyLevel


def plan_cycle(
    inventories: Sequence[ClusterInventory],
    requests: Iterable[ScalingRequest],
    *,
    now_s: float,
    missing: Sequence[MissingCluster] = (),
    highest_tokens: Mapping[str, int] | None = None,
    backoffs: Mapping[str, Backoff] | None = None,
) -> Plan:
    """Serve every request once. ``now_s`` is the store's clock; ``highest_tokens`` the highest fencing token by writer.

    ``backoffs``: how often services have placed lately (``pacing``). At most one request per service. Raises
    ``InventoryError`` when a node table contradicts itself.
    """
    tree = build_tree(inventories)
    lost = tuple(sorted(missing, key=lambda item: item.cluster))
    cycle = _Cycle(
        capacity=Capacity(tree),
        groups=index_groups(tree, inventories),
        names={replica.name for inventory in inventories for replica in inventory.replicas},
        live={item.name for inventory in inventories for item in inventory.replicas if not item.leaving},
        missing=lost,
        backoffs=backoffs or {},
        now_s=now_s,
    )
    results = []
    for request in sorted(requests, key=_rank):
        refusal = admission(request, now_s, highest_tokens or {}, lost, reachable=bool(inventories))
        results.append(refusal if refusal is not None else _serve(cycle, request))
    return Plan(results=tuple(results))


def _rank(request: ScalingRequest) -> tuple[int, float, str]:
    return -request.priority, inf if request.created_s is None else request.created_s, request.service


@dataclass(kw_only=True)
class _Cycle:
    """What the requests of one cycle share."""

    capacity: Capacity
    groups: dict[str, tuple[GroupState, ...]]
    names: set[str]
    live: set[str]
    missing: tuple[MissingCluster, ...]
    backoffs: Mapping[str, Backoff]
    now_s: float
    ordinals: dict[tuple[str, Role], int] = field(default_factory=dict)

    @property
    def tree(self) -> Tree:
        return self.capacity.tree


@dataclass(kw_only=True)
class _Changes:
    """What a request does to each group, by (cluster, group)."""

    found: dict[tuple[str, str], GroupPlacement] = field(default_factory=dict)

    def merge(self, change: GroupPlacement) -> None:
        known = self.found.get((change.cluster, change.group))
        if known is not None:
            change = replace(
                known,
                add=known.add + change.add,
                remove=known.remove + change.remove,
                subgroup_class=max(known.subgroup_class, change.subgroup_class, key=lambda found: found or 0),
            )
        self.found[change.cluster, change.group] = change

    def sorted(self) -> tuple[GroupPlacement, ...]:
        return tuple(self.found[key] for key in sorted(self.found))


def _serve(cycle: _Cycle, request: ScalingRequest) -> ServiceResult:
    roles = sorted(request.roles, key=lambda item: ROLE_ORDER[item.role])
    groups = cycle.groups.get(request.service, ())
    present = {item.role: sum(group.count(item.role) for group in groups) for item in roles}
    changes = _Changes()
    wanted = {item.role: max(0, item.replicas - present[item.role]) for item in roles}
    pace = wait_until(cycle.backoffs, request.service, request.decision_id, cycle.now_s)
    if any(wanted.values()) and pace is not None and not pace.replicas <= cycle.live:
        times = "once" if pace.placements == 1 else f"{pace.placements} times"
        return held(
            request,
            Constraint.NONE,
            f"placed {times} for this decision, and replicas are missing again; the actuator's operations say why; "
            f"next try at {clock_text(pace.next_s)}",
        )
    placed, constraint, detail = _scale_out(cycle, request, roles, wanted, changes)
    denied = any(wanted.values()) and not any(placed.values())
    surplus = {
        # Replicas of no group were not placed by Trimtab: they count, and stay.
        item.role: min(
            max(0, present[item.role] - item.replicas), sum(group.count(item.role) for group in groups if group.name)
        )
        for item in roles
    }
    if denied and not request.allow_partial:
        # A request moves its roles together or not at all, so nothing is taken away either.
        surplus = {}
    _scale_in(cycle, request, groups, surplus, changes)
    removed = any(surplus.values())
    sentence = _summary(roles, placed, wanted, surplus, changes)
    if placed != wanted:
        outcome = Outcome.PARTIAL if any(placed.values()) else Outcome.DENIED
        sentence = f"{sentence}; {detail}" if sentence else detail
        silent = [item.cluster for item in cycle.missing if item.cluster not in cycle.tree.vdc_of_cluster]
        sentence += "".join(f" (cluster {cluster} did not answer)" for cluster in silent)
    elif any(placed.values()):
        outcome = Outcome.PLACED
    else:
        outcome = Outcome.REMOVED if removed else Outcome.UNCHANGED
    return ServiceResult(
        service=request.service,
        decision_id=request.decision_id,
        outcome=outcome,
        constraint=constraint,
        detail=sentence or "as requested already",
        groups=changes.sorted(),
    )


def _summary(
    roles: Sequence[RoleRequest],
    placed: Mapping[Role, int],
    wanted: Mapping[Role, int],
    surplus: Mapping[Role, int],
    changes: _Changes,
) -> str:
    added = [
        f"{placed[item.role]} of {wanted[item.role]} {item.role.value}"
        if placed[item.role] < wanted[item.role]
        else f"{placed[item.role]} {item.role.value}"
        for item in roles
        if wanted[item.role] and any(placed.values())
    ]
    taken = [f"{surplus[item.role]} {item.role.value}" for item in roles if surplus.get(item.role)]
    parts = []
    if added:
        where = sorted({_where(item) for item in changes.sorted() if item.add})
        parts.append(f"placed {' and '.join(added)} in {_some(where)}")
    if taken:
        where = sorted({f"{item.group} of cluster {item.cluster}" for item in changes.sorted() if item.remove})
        parts.append(f"takes {' and '.join(taken)} out of {_some(where)}")
    return "; ".join(parts)


def _where(group: GroupPlacement) -> str:
    cluster = f"cluster {group.cluster}"
    return cluster if group.level is TopologyLevel.CLUSTER else f"{group.domain} of {cluster}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _scale_out(
    cycle: _Cycle,
    request: ScalingRequest,
    roles: Sequence[RoleRequest],
    wanted: Mapping[Role, int],
    changes: _Changes,
) -> tuple[dict[Role, int], Constraint, str]:
    """Place what is wanted in one group, or with ``allow_partial`` whole units in as many groups as it takes."""
    left = dict(wanted)
    while needs := _needs(cycle.tree, roles, left):
        candidate = Search(cycle.capacity, request, needs, cycle.groups.get(request.service, ())).best()
        if candidate is None and request.allow_partial:
            candidate = _largest_part(cycle, request, roles, left)
        if candidate is None:
            constraint, detail = explain(cycle.capacity, request, needs, cycle.groups.get(request.service, ()))
            return {role: wanted[role] - left[role] for role in wanted}, constraint, detail
        change = _commit(cycle, request, candidate)
        changes.merge(change)
        for item in change.add:
            left[item.role] -= 1
    return dict(wanted), Constraint.NONE, ""


def _largest_part(
    cycle: _Cycle, request: ScalingRequest, roles: Sequence[RoleRequest], left: Mapping[Role, int]
) -> Candidate | None:
    """The largest multiple of the ratio's unit that one domain holds."""
    parts = {item.role: item.ratio_part for item in roles}
    too_many = max(-(-left[role] // parts[role]) for role in left)
    fitting, best = 0, None
    while too_many - fitting > 1:
        units = (too_many + fitting) // 2
        needs = _needs(cycle.tree, roles, {role: min(left[role], units * parts[role]) for role in left})
        candidate = Search(cycle.capacity, request, needs, cycle.groups.get(request.service, ())).best()
        if candidate is None:
            too_many = units
        else:
            fitting, best = units, candidate
    return best


def _needs(tree: Tree, roles: Sequence[RoleRequest], counts: Mapping[Role, int]) -> tuple[Need, ...]:
    ids = {name: number for number, name in enumerate(tree.gpu_types)}
    needs = []
    for item in roles:
        if not counts[item.role]:
            continue
        tiers: tuple[tuple[int, ...], ...]
        if item.gpu_types:
            tiers = tuple((ids[name],) for name in dict.fromkeys(item.gpu_types) if name in ids)
        else:
            tiers = (tuple(range(len(tree.gpu_types))),)
        needs.append(Need(role=item.role, count=counts[item.role], gpus=item.gpus_per_replica, tiers=tiers))
    return tuple(needs)


def _commit(cycle: _Cycle, request: ScalingRequest, candidate: Candidate) -> GroupPlacement:
    """Deduct a candidate from the tree, name its replicas, and make it part of the service's groups."""
    tree = cycle.tree
    by_role = {item.role: item for item in request.roles}
    cluster = tree.level(candidate.level).clusters[candidate.domain]
    name = candidate.group.name if candidate.group is not None else _new_group(tree, request, candidate)
    added: list[ReplicaPlacement] = []
    rows: dict[Role, list[int]] = {}
    names: dict[Role, list[str]] = {}
    for share in sorted(candidate.shares, key=lambda item: (ROLE_ORDER[item.role], item.row)):
        role = by_role[share.role]
        for _ in range(share.count):
            replica = _next_name(cycle, request, share.role)
            rows.setdefault(share.role, []).append(share.row)
            names.setdefault(share.role, []).append(replica)
            added.append(
                ReplicaPlacement(
                    replica=replica,
                    role=share.role,
                    node=tree.node_names[share.row],
                    gpu_indices=cycle.capacity.take(share.row, share.gpus),
                    gpu_type=tree.gpu_types[int(tree.type_of_row[share.row])],
                    model=role.model,
                    profile=role.profile,
                )
            )
    present = cycle.groups.get(request.service, ())
    # A group of this very domain whose nodes the inventory does not list just now is the same group.
    same = next((item for item in present if (item.name, item.cluster) == (name, cluster)), None)
    before = candidate.group or same or GroupState(name=name, service=request.service, cluster=cluster)
    after = GroupState(
        name=name,
        service=request.service,
        cluster=cluster,
        rows={role: (*before.rows.get(role, ()), *rows.get(role, ())) for role in (*before.rows, *rows)},
        replicas={role: (*before.replicas.get(role, ()), *names.get(role, ())) for role in (*before.replicas, *names)},
        subgroup_class=max(
            before.subgroup_class, highest_class(tree, (row for items in rows.values() for row in items))
        ),
    )
    others = [item for item in present if (item.name, item.cluster) != (name, cluster)]
    cycle.groups[request.service] = tuple(sorted((*others, after), key=lambda item: (item.name, item.cluster)))
    return GroupPlacement(
        group=name,
        service=request.service,
        cluster=cluster,
        domain=tree.level(candidate.level).names[candidate.domain],
        level=candidate.level,
        subgroup_class=after.subgroup_class,
        decision_id=request.decision_id,
        add=tuple(added),
    )


def _new_group(tree: Tree, request: ScalingRequest, candidate: Candidate) -> str:
    level = tree.level(candidate.level)
    first, _ = level.rows(candidate.domain)
    return group_name(
        request.service,
        level.clusters[candidate.domain],
        candidate.level,
        _path(tree, candidate.level, first),
        level.names[candidate.domain],
    )


def _path(tree: Tree, level: TopologyLevel, row: int) -> str:
    """Names of the switches above and including a domain, from the widest."""
    wanted = {
        TopologyLevel.CLUSTER: (),
        TopologyLevel.S2: (TopologyLevel.S2,),
        TopologyLevel.S1: (TopologyLevel.S2, TopologyLevel.S1),
        TopologyLevel.NODE: (TopologyLevel.S2, TopologyLevel.S1, TopologyLevel.NODE),
    }[level]
    return "/".join(tree.level(item).names[int(tree.level(item).of_row[row])] for item in wanted)


def _next_name(cycle: _Cycle, request: ScalingRequest, role: Role) -> str:
    """The first name of this decision that no replica has: after a lost reply a cycle repeats itself name by name."""
    ordinal = cycle.ordinals.get((request.service, role), 0)
    while (name := replica_name(request.service, role, request.decision_id, ordinal)) in cycle.names:
        ordinal += 1
    cycle.ordinals[request.service, role] = ordinal + 1
    cycle.names.add(name)
    return name


def _scale_in(
    cycle: _Cycle,
    request: ScalingRequest,
    groups: Sequence[GroupState],
    surplus: Mapping[Role, int],
    changes: _Changes,
) -> None:
    if not any(surplus.values()):
        return
    by_key = {(group.cluster, group.name): group for group in groups}
    parts = {item.role: item.ratio_part for item in request.roles}
    for key, cuts in plan_scale_in([group for group in groups if group.name], surplus, parts).items():
        group = by_key[key]
        level, domain = bound_domain(cycle.tree, group)
        changes.merge(
            GroupPlacement(
                group=group.name,
                service=request.service,
                cluster=group.cluster,
                domain=domain,
                level=level,
                subgroup_class=group.subgroup_class,
                decision_id=request.decision_id,
                remove=cuts,
            )
        )
