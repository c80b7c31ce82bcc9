"""Builders of small fleets, and an actuator that keeps what it is told in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import pytest

from prescheduler.core.model import ClusterInventory, ScaledReplica
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.scaling import RoleRequest, ScalingRequest
from trimtab.domain.vocabulary import Role, TopologyLevel
from trimtab.rpc.errors import STATUS_DETAILS_KEY, FailedPrecondition

NodeRow = tuple[str, str, str, str, int, int]
"""(S2, S1, node, GPU type, GPUs, free GPUs)"""


@dataclass(frozen=True)
class Fleet:
    """Builders; none of them has state."""

    def cluster(
        self, name: str, rows: Iterable[NodeRow], replicas: Sequence[ScaledReplica] = (), *, vdc: str = "vdc-0"
    ) -> ClusterInventory:
        table = list(rows)
        return ClusterInventory(
            cluster=name,
            inventory_revision=1,
            nodes=NodeColumns(
                nodes=tuple(row[2] for row in table),
                vdcs=(vdc,) * len(table),
                s2s=tuple(row[0] for row in table),
                s1s=tuple(row[1] for row in table),
                gpu_types=tuple(row[3] for row in table),
                gpus=tuple(row[4] for row in table),
                free_gpu_masks=tuple((1 << row[5]) - 1 for row in table),
            ),
            replicas=tuple(replicas),
        )

    def replica(self, name: str, role: Role, node: str, **more: object) -> ScaledReplica:
        spec = {"service": "chat", "cluster": "a", "group": "g-0", "leaving": False} | more
        return ScaledReplica(name=name, role=role, node=node, **spec)  # type: ignore[arg-type]

    def request(self, *roles: RoleRequest, **more: object) -> ScalingRequest:
        spec = {"service": "chat", "decision_id": "d-1", "affinity": TopologyLevel.S2} | more
        return ScalingRequest(roles=roles, **spec)  # type: ignore[arg-type]

    def prefill(self, replicas: int, gpus: int = 1, types: tuple[str, ...] = (), part: int = 1) -> RoleRequest:
        return self.role(Role.PREFILL, replicas, gpus, types, part)

    def decode(self, replicas: int, gpus: int = 1, types: tuple[str, ...] = (), part: int = 1) -> RoleRequest:
        return self.role(Role.DECODE, replicas, gpus, types, part)

    def role(self, role: Role, replicas: int, gpus: int = 1, types: tuple[str, ...] = (), part: int = 1) -> RoleRequest:
        return RoleRequest(
            role=role,
            replicas=replicas,
            gpus_per_replica=gpus,
            gpu_types=types,
            ratio_part=part,
            model="m",
            profile="p",
        )


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    return Fleet()


@dataclass
class FakeActuator(actuator_pb2_grpc.ActuatorServiceServicer):
    """One cluster: nodes given as rows, replicas created by placements, refusals as the contract says."""

    cluster: str
    rows: list[NodeRow]
    replicas: dict[str, actuator_pb2.Replica] = field(default_factory=dict)
    operations: list[actuator_pb2.Operation] = field(default_factory=list)
    inventory_revision: int = 1
    highest_token: int = 0
    writes: list[actuator_pb2.ApplyPlacementsRequest] = field(default_factory=list)
    refuse: str = ""
    """Refuse every group with this reason."""
    race: bool = False
    """The inventory changes between the look and the next write, once."""
    delay_s: float = 0.0
    hang_writes: bool = False
    attempts: int = 0
    port: int = 0

    def taken(self, node: str) -> set[int]:
        return {index for item in self.replicas.values() if item.node == node for index in item.gpu_indices}

    async def ListNodes(self, request, context):
        await asyncio.sleep(self.delay_s)
        table = actuator_pb2.NodeTable()
        for s2, s1, node, gpu_type, gpus, free in self.rows:
            table.nodes.append(node)
            table.vdcs.append("vdc-0")
            table.s2s.append(s2)
            table.s1s.append(s1)
            table.gpu_types.append(gpu_type)
            table.gpus.append(gpus)
            table.free_gpu_masks.append(sum(1 << i for i in range(free) if i not in self.taken(node)))
        return actuator_pb2.ListNodesResponse(
            nodes=table, cluster=self.cluster, inventory_revision=self.inventory_revision
        )

    async def ListReplicas(self, request, context):
        return actuator_pb2.ListReplicasResponse(
            replicas=[self.replicas[name] for name in sorted(self.replicas)],
            revision=self.inventory_revision,
            cluster=self.cluster,
        )

    async def ListOperations(self, request, context):
        return actuator_pb2.ListOperationsResponse(operations=self.operations)

    async def ApplyPlacements(self, request, context):
        self.attempts += 1
        if self.hang_writes:
            await asyncio.sleep(60)
        if self.race:
            self.race = False
            self.inventory_revision += 1
        if request.fencing.token < self.highest_token:
            await self._abort(context, "FENCED_OFF", "an older token", highest_token=str(self.highest_token))
        if request.inventory_revision != self.inventory_revision:
            await self._abort(context, "OUTDATED_INVENTORY", f"the inventory is at revision {self.inventory_revision}")
        self.highest_token = request.fencing.token
        self.writes.append(request)
        response = actuator_pb2.ApplyPlacementsResponse()
        for group in request.groups:
            response.results.add(group=group.group, accepted=not self.refuse, detail=self.refuse)
            if self.refuse:
                continue
            for item in group.add:
                assert not self.taken(item.node) & set(item.gpu_indices), f"GPU of {item.node} given twice"
                self.replicas[item.replica] = actuator_pb2.Replica(
                    replica=item.replica,
                    service=group.service,
                    role=item.role,
                    cluster=self.cluster,
                    node=item.node,
                    gpu_indices=item.gpu_indices,
                    life_cycle=types_pb2.LIFE_CYCLE_STARTING,
                    deployment_group=group.group,
                )
            for cut in group.remove:
                names = [n for n in sorted(self.replicas) if self._matches(self.replicas[n], group.group, cut.role)]
                for name in names[: cut.count]:
                    self.replicas[name].life_cycle = types_pb2.LIFE_CYCLE_DRAINING
        if not self.refuse:
            self.inventory_revision += 1
        return response

    @staticmethod
    def _matches(replica: actuator_pb2.Replica, group: str, role: int) -> bool:
        live = replica.life_cycle in (types_pb2.LIFE_CYCLE_STARTING, types_pb2.LIFE_CYCLE_ACTIVE)
        return replica.deployment_group == group and replica.role == role and live

    @staticmethod
    async def _abort(context, reason: str, message: str, **metadata: str) -> None:
        status = FailedPrecondition(reason, message, metadata).to_status()
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, message, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture
async def start_actuator() -> AsyncIterator[Callable[..., object]]:
    """``actuator, stop = await start_actuator("a", rows)``; all are stopped at the end."""
    servers: list[grpc.aio.Server] = []

    async def start(cluster: str, rows: Iterable[NodeRow], port: int = 0):
        actuator = FakeActuator(cluster, list(rows))
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        actuator_pb2_grpc.add_ActuatorServiceServicer_to_server(actuator, server)
        actuator.port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        servers.append(server)
        return actuator, server

    yield start
    for server in servers:
        await server.stop(0)
