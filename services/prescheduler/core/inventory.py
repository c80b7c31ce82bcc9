"""What one cluster has, from what its actuator lists."""

from collections.abc import Iterable

from prescheduler.core.model import ClusterInventory, ScaledReplica
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.operation import Operation, OperationState, StepKind
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import HoldOwner, LifeCycle

_LEAVING = frozenset({LifeCycle.DRAINING, LifeCycle.TERMINATING})
_TAKES_AWAY = frozenset(
    {
        (StepKind.DELETE, OperationState.PENDING),
        (StepKind.DELETE, OperationState.RUNNING),
        # A creation that is taken back.
        (StepKind.CREATE, OperationState.ROLLING_BACK),
    }
)


def cluster_inventory(
    cluster: str,
    *,
    inventory_revision: int,
    nodes: NodeColumns,
    replicas: Iterable[Replica],
    deleting: frozenset[str],
) -> ClusterInventory:
    """One cluster's inventory. ``deleting``: replicas that an unfinished operation takes away.

    Pooled replicas are left out: their pool owns their GPUs.
    """
    return ClusterInventory(
        cluster=cluster,
        inventory_revision=inventory_revision,
        nodes=nodes,
        replicas=tuple(
            ScaledReplica(
                name=item.replica,
                service=item.service,
                role=item.role,
                cluster=cluster,
                node=item.node,
                group=item.deployment_group,
                leaving=item.replica in deleting or _is_leaving(item),
            )
            for item in replicas
            if not item.pool
        ),
    )


def _is_leaving(replica: Replica) -> bool:
    return replica.life_cycle in _LEAVING or any(hold.owner is HoldOwner.SOFT_SCALE_IN for hold in replica.holds)


def taken_away(operations: Iterable[Operation]) -> frozenset[str]:
    """Replicas that unfinished operations take away; they may still look active."""
    return frozenset(
        step.replica for operation in operations for step in operation.steps if (step.kind, step.state) in _TAKES_AWAY
    )
