"""Replicas that come and go on virtual time: the pre-scheduler's core places them, the actuator's creates and deletes.

A cycle reads the actuator's nodes and replicas as they are now, plans on a tree made of them, and sends the actuator
whole groups, exactly as the pre-scheduler's shell does with its clusters; there is one cluster here and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from actuator.core.admission_placement import PlacementRequest, apply_placements
from actuator.core.fencing import Refused
from actuator.core.model import Limits, PlacedSpec
from actuator.core.placement_exchange import group_requests, node_columns
from actuator.core.world import Node
from lab.virtual.actuation import ActuatorPace, VirtualActuator
from lab.virtual.gateway import CLUSTER
from lab.virtual.servers import VirtualServers
from lab.virtual.staged_gateway import StagedGateway
from prescheduler.core.inventory import cluster_inventory, taken_away
from prescheduler.core.model import ClusterInventory, ServiceResult
from prescheduler.core.placement_backoff import Backoff, note_placements
from prescheduler.core.plan import plan_cycle
from prescheduler.core.writes import ClusterWrite, fold_writes
from simulator.core.profile import Profile
from trimtab.domain.placement import GroupPlacement
from trimtab.domain.scaling import ScalingRequest

WRITER = "pre-scheduler"
RETRY_PLACEMENT_S = 5.0
"""The pre-scheduler's `retry_placement_s`: the first wait when what was placed is missing again."""


class PlacingActuator(VirtualActuator):
    """An actuator whose servers are created and deleted. `profiles` are the cluster's, by name."""

    def __init__(
        self,
        servers: VirtualServers,
        gateway: StagedGateway,
        *,
        nodes: Sequence[Node],
        profiles: Mapping[str, Profile],
        limits: Limits | None = None,
        pace: ActuatorPace | None = None,
        on_created: Callable[[PlacedSpec], None],
        on_deleted: Callable[[str], None],
    ) -> None:
        super().__init__(
            servers,
            gateway,
            nodes=nodes,
            specs=(),
            profiles=profiles,
            limits=limits,
            pace=pace,
            on_created=on_created,
            on_deleted=on_deleted,
        )

    def place(self, groups: Sequence[GroupPlacement], *, inventory_revision: int) -> ClusterWrite:
        """Apply the result of a cycle; the groups that were refused, and why."""
        request = PlacementRequest(
            groups=group_requests(groups),
            inventory_revision=inventory_revision,
            expire_s=None,
            request_id="",
            validate_only=False,
            writer=WRITER,
            token=1,
        )
        try:
            answer = apply_placements(
                self._with_gateway(), request, self._world(), now_s=self._now_s, limits=self.limits
            )
        except Refused as error:
            return ClusterWrite(refused={}, error=str(error))
        self.state = answer.state
        self._step()
        return ClusterWrite(refused={item.group: item.detail for item in answer.results if not item.accepted})

    def inventory(self) -> ClusterInventory:
        """The cluster's nodes with their free GPUs, and its replicas, as the pre-scheduler reads them."""
        return cluster_inventory(
            CLUSTER,
            inventory_revision=self.state.meta.inventory_revision,
            nodes=node_columns(self.state, self._world()),
            replicas=self.listed_replicas(),
            deleting=taken_away(self.listed_operations()),
        )


class PreScheduler:
    """One cycle after another over the standing requests."""

    def __init__(self, actuator: PlacingActuator) -> None:
        self.denied = 0
        """Cycles in which a request was not served in full."""
        self._actuator = actuator
        self._backoffs: dict[str, Backoff] = {}

    def cycle(self, requests: Sequence[ScalingRequest], now_s: float) -> tuple[ServiceResult, ...]:
        """Look, plan, write; what came of each request."""
        inventory = self._actuator.inventory()
        plan = plan_cycle([inventory], requests, now_s=now_s, backoffs=self._backoffs)
        groups = plan.by_cluster().get(CLUSTER, ())
        if groups:
            write = self._actuator.place(groups, inventory_revision=inventory.inventory_revision)
            plan = fold_writes(plan, {CLUSTER: write})
        self._backoffs = note_placements(self._backoffs, plan, now_s=now_s, first_wait_s=RETRY_PLACEMENT_S)
        self.denied += sum(1 for result in plan.results if result.constraint)
        return plan.results
