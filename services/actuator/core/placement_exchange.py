"""What actuator and pre-scheduler exchange: the nodes with their free GPUs, and placements as admission judges them."""

from collections.abc import Iterable

from actuator.core.admission_placement import GroupRequest
from actuator.core.gpu_occupancy import taken_gpus
from actuator.core.held import held
from actuator.core.model import PlacedSpec, Placement, Spec, State
from actuator.core.world import World
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.placement import GroupPlacement


def node_columns(state: State, world: World) -> NodeColumns:
    """Nodes by name; a GPU is free when no replica, pool, backend, or record that cannot be read claims it."""
    claimed = {gpu for pool in state.pools.values() for gpu in pool.gpus} | held(state, world).gpus.keys()
    taken = taken_gpus(state.replicas, claimed, world)
    nodes = [world.nodes[name] for name in sorted(world.nodes)]
    return NodeColumns(
        nodes=tuple(node.node for node in nodes),
        vdcs=tuple(node.vdc for node in nodes),
        s2s=tuple(node.s2 for node in nodes),
        s1s=tuple(node.s1 for node in nodes),
        gpu_types=tuple(node.gpu_type for node in nodes),
        gpus=tuple(node.gpus for node in nodes),
        free_gpu_masks=tuple(
            sum(1 << index for index in range(node.gpus) if (node.node, index) not in taken) for node in nodes
        ),
    )


def group_requests(groups: Iterable[GroupPlacement]) -> tuple[GroupRequest, ...]:
    """Placements as admission judges them: replicas to create, and how many of each role to remove."""
    return tuple(
        GroupRequest(
            group=group.group,
            service=group.service,
            add=tuple(
                PlacedSpec(
                    spec=Spec(
                        replica=item.replica,
                        service=group.service,
                        role=item.role,
                        model=item.model,
                        profile=item.profile,
                        gpu_type=item.gpu_type,
                        group=group.group,
                        decision_id=group.decision_id,
                    ),
                    placement=Placement(node=item.node, gpu_indices=tuple(sorted(item.gpu_indices))),
                )
                for item in group.add
            ),
            remove=tuple((item.role, item.count) for item in group.remove),
            decision_id=group.decision_id,
        )
        for group in groups
    )
