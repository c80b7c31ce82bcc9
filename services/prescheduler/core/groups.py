"""Deployment Groups that exist: the live replicas of a service inside one network domain (HeteroScale 3.4)."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prescheduler.core.model import ROLE_ORDER, ClusterInventory, DeploymentGroup
from prescheduler.core.tree import Tree
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import Role, TopologyLevel

_NOT_IN_LABELS = re.compile(r"[^a-z0-9-]+")


@dataclass(frozen=True, kw_only=True)
class GroupState:
    """One group at the start of a cycle, or as a cycle has made it so far.

    ``rows`` are the tree's rows of its replicas, those on nodes that the inventory no longer lists left out.
    """

    name: str
    service: str
    cluster: str
    rows: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)
    replicas: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    subgroup_class: SubgroupClass = SubgroupClass.LOW
    """The highest class of its nodes."""

    def count(self, role: Role) -> int:
        """Live replicas of a role."""
        return len(self.replicas.get(role, ()))

    @property
    def all_rows(self) -> tuple[int, ...]:
        """Rows of all its replicas."""
        return tuple(row for role in sorted(self.rows, key=ROLE_ORDER.__getitem__) for row in self.rows[role])

    def domain(self, tree: Tree, level: TopologyLevel) -> int | None:
        """The domain of ``level`` that holds all of it; None when it straddles, or its nodes are unknown."""
        of_row = tree.level(level).of_row
        domains = {int(of_row[row]) for row in self.all_rows}
        return domains.pop() if len(domains) == 1 else None


def index_groups(tree: Tree, inventories: Iterable[ClusterInventory]) -> dict[str, tuple[GroupState, ...]]:
    """Service → its groups in order of (name, cluster). Leaving replicas count no more."""
    rows: dict[tuple[str, str, str], dict[Role, list[int]]] = {}
    names: dict[tuple[str, str, str], dict[Role, list[str]]] = {}
    for inventory in inventories:
        for replica in sorted(inventory.replicas, key=lambda item: item.name):
            if replica.leaving:
                continue
            key = (replica.service, replica.group, inventory.cluster)
            names.setdefault(key, {}).setdefault(replica.role, []).append(replica.name)
            row = tree.rows_by_node.get((inventory.cluster, replica.node))
            if row is not None:
                rows.setdefault(key, {}).setdefault(replica.role, []).append(row)
    found: dict[str, list[GroupState]] = {}
    for key in sorted(names):
        service, group, cluster = key
        by_role = {role: tuple(items) for role, items in rows.get(key, {}).items()}
        found.setdefault(service, []).append(
            GroupState(
                name=group,
                service=service,
                cluster=cluster,
                rows=by_role,
                replicas={role: tuple(items) for role, items in names[key].items()},
                subgroup_class=highest_class(tree, (row for items in by_role.values() for row in items)),
            )
        )
    return {service: tuple(groups) for service, groups in found.items()}


def highest_class(tree: Tree, rows: Iterable[int]) -> SubgroupClass:
    """The scarcest class among nodes; LOW when none is known."""
    return SubgroupClass(max((int(tree.class_of_row[row]) for row in rows), default=int(SubgroupClass.LOW)))


def group_name(service: str, cluster: str, level: TopologyLevel, path: str, domain: str) -> str:
    """The name of the group of a service in one domain, a DNS-1123 label: the same in every cycle.

    ``path`` distinguishes domains of equal names, such as S1s of two S2s.
    """
    digest = _digest(service, cluster, level.value, path)[:6]
    label = _NOT_IN_LABELS.sub("-", domain.lower())[:20].strip("-")
    return "-".join(part for part in (service[:34].strip("-"), label, digest) if part)


def replica_name(service: str, role: Role, decision_id: str, ordinal: int) -> str:
    """The name of the n-th replica that a decision makes, a DNS-1123 label: a repeated cycle gives it again."""
    digest = _digest(service, role.value, decision_id, str(ordinal))[:8]
    return f"{service[:36].strip('-')}-{role.value}-{digest}"


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def bound_domain(tree: Tree, group: GroupState) -> tuple[TopologyLevel, str]:
    """The narrowest domain that holds all replicas of a group; (CLUSTER, cluster) when their nodes are unknown."""
    for level in (TopologyLevel.NODE, TopologyLevel.S1, TopologyLevel.S2):
        domain = group.domain(tree, level)
        if domain is not None:
            return level, tree.level(level).names[domain]
    return TopologyLevel.CLUSTER, group.cluster


def list_groups(tree: Tree, inventories: Iterable[ClusterInventory]) -> tuple[DeploymentGroup, ...]:
    """Every group of the reachable clusters, in order of (service, name, cluster)."""
    found: list[DeploymentGroup] = []
    by_service = index_groups(tree, inventories)
    for service in sorted(by_service):
        for group in by_service[service]:
            level, domain = bound_domain(tree, group)
            found.append(
                DeploymentGroup(
                    group=group.name,
                    service=service,
                    cluster=group.cluster,
                    domain=domain,
                    level=level,
                    subgroup_class=group.subgroup_class,
                    replicas={
                        role: group.replicas[role] for role in sorted(group.replicas, key=ROLE_ORDER.__getitem__)
                    },
                )
            )
    return tuple(found)
