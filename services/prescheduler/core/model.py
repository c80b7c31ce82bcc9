"""What the placement core reads and gives back.

Numbers of the enums are those of the wire contract (``trimtab.scheduler.v1``); a test keeps them equal. Every
type is frozen: a cycle is one function from inventories and requests to a plan.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from trimtab.words import Role
from trimtab.words import TopologyLevel as Level

__all__ = [
    "LEVELS",
    "ROLE_ORDER",
    "ClusterInventory",
    "Constraint",
    "DeploymentGroup",
    "GroupPlacement",
    "Level",
    "MissingCluster",
    "NodeColumns",
    "Outcome",
    "Plan",
    "ReplicaPlacement",
    "Role",
    "RoleRequest",
    "ScaleIn",
    "ScaledReplica",
    "ScalingRequest",
    "ServiceResult",
    "SubgroupClass",
    "level_label",
]


LEVELS = (Level.NODE, Level.S1, Level.S2, Level.CLUSTER)
"""From the narrowest."""

ROLE_ORDER = {role: position for position, role in enumerate(Role)}
"""Roles are listed, tried and numbered in this order."""


def level_label(level: Level) -> str:
    """As it stands in sentences: ``node``, ``S1``, ``S2``, ``cluster``."""
    return level.value.upper() if level in (Level.S1, Level.S2) else level.value


class SubgroupClass(IntEnum):
    """RDMA Subgroup classes (HeteroScale 3.4): the higher, the scarcer the hardware mix under one switch."""

    LOW = 1
    MEDIUM = 2
    HIGH = 3


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
class NodeColumns:
    """The nodes of one cluster as columns: row i of every column is node i.

    Bit i of ``free_gpu_masks`` is set when GPU i of the node can take a new scaled replica.
    """

    nodes: tuple[str, ...]
    vdcs: tuple[str, ...]
    s2s: tuple[str, ...]
    s1s: tuple[str, ...]
    gpu_types: tuple[str, ...]
    gpus: tuple[int, ...]
    free_gpu_masks: tuple[int, ...]


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
    """False when it has never answered: then only the requests say whether a decision rests on it."""


@dataclass(frozen=True, kw_only=True)
class RoleRequest:
    """How many replicas of a role a service should have, and what one of them needs."""

    role: Role
    replicas: int
    gpus_per_replica: int
    gpu_types: tuple[str, ...] = ()
    """In order of preference; empty for any type."""
    model: str = ""
    profile: str = ""
    ratio_part: int = 1
    """This role's part of the ratio's smallest unit."""


@dataclass(frozen=True, kw_only=True)
class ScalingRequest:
    """What a scaled service should have. Absolute: counts, not differences."""

    service: str
    decision_id: str
    roles: tuple[RoleRequest, ...]
    affinity: Level = Level.CLUSTER
    priority: int = 0
    allow_partial: bool = False
    created_s: float | None = None
    expires_s: float | None = None
    writer: str = ""
    token: int = 0
    clusters: frozenset[str] = frozenset()
    """Clusters whose replicas the decision rests on."""

    @property
    def bound_level(self) -> Level:
        """The widest level a group may span: of a disaggregated MoE service never more than an S2."""
        return Level.S2 if self.is_moe and self.affinity is Level.CLUSTER else self.affinity

    @property
    def is_moe(self) -> bool:
        """Whether prefill is split into attention and FFN, which share an S1 (DESIGN 8)."""
        return {Role.PREFILL_ATTENTION, Role.PREFILL_FFN} <= {item.role for item in self.roles}


@dataclass(frozen=True, kw_only=True)
class ReplicaPlacement:
    """One new replica: all its GPUs are on one node."""

    replica: str
    role: Role
    node: str
    gpu_indices: tuple[int, ...]
    gpu_type: str
    model: str
    profile: str


@dataclass(frozen=True, kw_only=True)
class ScaleIn:
    """Take ``count`` replicas of a role out of a group; the actuator picks the victims."""

    role: Role
    count: int


@dataclass(frozen=True, kw_only=True)
class GroupPlacement:
    """Everything that one cycle does to one Deployment Group."""

    group: str
    service: str
    cluster: str
    domain: str
    level: Level
    subgroup_class: SubgroupClass
    decision_id: str
    add: tuple[ReplicaPlacement, ...] = ()
    remove: tuple[ScaleIn, ...] = ()


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
    level: Level
    subgroup_class: SubgroupClass
    replicas: dict[Role, tuple[str, ...]] = field(default_factory=dict)
