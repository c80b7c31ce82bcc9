"""What the placement core reads and gives back.

Numbers of the enums are those of the wire contract (``trimtab.scheduler.v1``); a test keeps them equal. Every
type is frozen: a cycle is one function from inventories and requests to a plan.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from trimtab.domain.inventory import NodeColumns
from trimtab.domain.placement import GroupPlacement, SubgroupClass
from trimtab.domain.vocabulary import Role, TopologyLevel

LEVELS = (TopologyLevel.NODE, TopologyLevel.S1, TopologyLevel.S2, TopologyLevel.CLUSTER)
"""From the narrowest."""

ROLE_ORDER = {role: position for position, role in enumerate(Role)}
"""Roles are listed, tried and numbered in this order."""


def level_label(level: TopologyLevel) -> str:
    """A level's name in sentences: ``node``, ``S1``, ``S2``, ``cluster``."""
    return level.value.upper() if level in (TopologyLevel.S1, TopologyLevel.S2) else level.value


class Outcome(IntEnum):
    """What a cycle did for one request."""

    UNCHANGED = 1
    PLACED = 2
    PARTIAL = 3
    REMOVED = 4
    DENIED = 5
    HELD = 6


class Constraint(IntEnum):
    """What stood in the way of a request that was denied, held or placed in part."""

    NONE = 0
    CAPACITY = 1
    GPU_TYPE = 2
    AFFINITY = 3
    FRAGMENTATION = 4
    CLUSTER_UNREACHABLE = 5
    EXPIRED = 6
    FENCED_OFF = 7
    ACTUATOR_REFUSED = 8

    @property
    def label(self) -> str:
        """The metric label, such as ``gpu_type``."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class ScaledReplica:
    """A replica that exists. ``leaving`` ones (draining, terminating, in soft scale-in) count no more."""

    name: str
    service: str
    role: Role
    cluster: str
    node: str
    group: str
    leaving: bool = False


@dataclass(frozen=True, kw_only=True)
class ClusterInventory:
    """What one actuator answered at the start of the cycle."""

    cluster: str
    inventory_revision: int
    nodes: NodeColumns
    replicas: tuple[ScaledReplica, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MissingCluster:
    """A cluster that did not answer, and the services it is known to hold replicas of."""

    cluster: str
    error: str
    services: frozenset[str] = frozenset()
    known: bool = False
    """False when it has never answered: then only the requests' revisions show whether a decision rests on it."""


@dataclass(frozen=True, kw_only=True)
class ServiceResult:
    """What came of one request, in one sentence that names domains and counts."""

    service: str
    decision_id: str
    outcome: Outcome
    constraint: Constraint = Constraint.NONE
    detail: str = ""
    groups: tuple[GroupPlacement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One cycle: results in the order in which the requests were served."""

    results: tuple[ServiceResult, ...] = ()

    def by_cluster(self) -> dict[str, tuple[GroupPlacement, ...]]:
        """What each cluster's actuator has to apply, clusters in order of their names."""
        found: dict[str, list[GroupPlacement]] = {}
        for result in self.results:
            for group in result.groups:
                found.setdefault(group.cluster, []).append(group)
        return {cluster: tuple(found[cluster]) for cluster in sorted(found)}


@dataclass(frozen=True, kw_only=True)
class DeploymentGroup:
    """The live replicas of one service inside one network domain."""

    group: str
    service: str
    cluster: str
    domain: str
    level: TopologyLevel
    subgroup_class: SubgroupClass
    replicas: dict[Role, tuple[str, ...]] = field(default_factory=dict)
