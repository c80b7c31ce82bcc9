"""The actuators: what every cluster has, and one write to each.

A cluster that does not answer in time, answers under another name or with a table that contradicts itself is left
out with the reason; the others are not delayed by it beyond the time-out.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc
import structlog

from prescheduler.core.inventory import cluster_inventory, taken_away
from prescheduler.core.model import ClusterInventory
from prescheduler.core.tree import InventoryError, check_columns
from prescheduler.core.writes import ClusterWrite
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.inventory import columns_from_proto
from trimtab.domain.operation import operation_from_proto
from trimtab.domain.placement import GroupPlacement, placement_to_proto
from trimtab.domain.replica import Replica, replica_from_proto
from trimtab.domain.time import timestamp_of
from trimtab.rpc import clients
from trimtab.rpc.errors import describe, error_info

log = structlog.get_logger(__name__)

_PAGE_SIZE = 5_000
_MAX_PAGES = 200
_MAX_ATTEMPTS = 3
_FENCED_OFF = "FENCED_OFF"
_OUTDATED = "OUTDATED_INVENTORY"


class ClusterSilent(Exception):
    """A cluster is left out of this cycle; the message says why."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What the clusters answered. ``silent``: cluster → why it is left out."""

    inventories: tuple[ClusterInventory, ...]
    silent: Mapping[str, str]
    as_of_s: float


@dataclass(frozen=True, kw_only=True)
class WriteOutcome:
    """The result of one write. With ``fenced_off``, ``highest_token`` is the one that the actuator has seen."""

    write: ClusterWrite
    fenced_off: bool = False
    highest_token: int = 0


class Clusters:
    """One channel per actuator, opened once."""

    def __init__(self, actuators: Mapping[str, str], *, timeout_s: float, tls: clients.ClientTls | None = None) -> None:
        self._timeout_s = timeout_s
        self._channels = {name: clients.channel(actuators[name], tls=tls) for name in sorted(actuators)}
        self._stubs = {name: actuator_pb2_grpc.ActuatorServiceStub(item) for name, item in self._channels.items()}

    async def close(self) -> None:
        """Close every channel."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def collect(self, *, as_of_s: float) -> View:
        """Ask every actuator at once."""
        names = list(self._stubs)
        answers = await asyncio.gather(*(self._ask(name) for name in names))
        return View(
            inventories=tuple(answer for answer in answers if isinstance(answer, ClusterInventory)),
            silent={
                name: answer
                for name, answer in zip(names, answers, strict=True)
                if not isinstance(answer, ClusterInventory)
            },
            as_of_s=as_of_s,
        )

    async def apply(
        self,
        cluster: str,
        groups: Iterable[GroupPlacement],
        *,
        inventory_revision: int,
        fencing: types_pb2.Fencing,
        expire_s: float,
        request_id: str,
    ) -> WriteOutcome:
        """Everything that a cycle does to one cluster, in one call."""
        request = actuator_pb2.ApplyPlacementsRequest(
            groups=[placement_to_proto(group) for group in groups],
            inventory_revision=inventory_revision,
            fencing=fencing,
            expire_time=timestamp_of(expire_s),
            request_id=request_id,
        )
        try:
            response = await self._stubs[cluster].ApplyPlacements(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return _failed_write(error)
        answered = {item.group: item for item in response.results}
        refused = {}
        for group in request.groups:
            answer = answered.get(group.group)
            if answer is None:
                refused[group.group] = "the actuator gave no result for it"
            elif not answer.accepted:
                refused[group.group] = answer.detail or "the actuator gave no reason"
        return WriteOutcome(write=ClusterWrite(refused=refused))

    async def _ask(self, cluster: str) -> ClusterInventory | str:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._inventory(cluster)
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except grpc.aio.AioRpcError as error:
            return describe(error)
        except (ClusterSilent, InventoryError, ValueError) as error:
            return str(error)

    async def _inventory(self, cluster: str) -> ClusterInventory:
        """Nodes first, then operations, then replicas: changes in between never make a count too low.

        A placement that lands after the nodes were read makes their revision old, and the write is refused.
        """
        stub = self._stubs[cluster]
        nodes = await stub.ListNodes(actuator_pb2.ListNodesRequest(), timeout=self._timeout_s)
        if nodes.cluster != cluster:
            raise ClusterSilent(f"its actuator says that it is of cluster {nodes.cluster!r}")
        deleting = await self._deleting(stub)
        for _ in range(_MAX_ATTEMPTS):
            replicas = await self._replicas(stub)
            if replicas is not None:
                found = cluster_inventory(
                    cluster,
                    inventory_revision=nodes.inventory_revision,
                    nodes=columns_from_proto(nodes.nodes),
                    replicas=replicas,
                    deleting=deleting,
                )
                check_columns(cluster, found.nodes)
                return found
        raise ClusterSilent("its replicas changed while they were listed")

    async def _replicas(self, stub: "actuator_pb2_grpc.ActuatorServiceAsyncStub") -> list[Replica] | None:
        """Every scaled replica at one revision; None when it changed between two pages."""
        found: list[Replica] = []
        token, revision = "", None
        for _ in range(_MAX_PAGES):
            page = await stub.ListReplicas(
                actuator_pb2.ListReplicasRequest(page_size=_PAGE_SIZE, page_token=token), timeout=self._timeout_s
            )
            if revision is not None and page.revision != revision:
                return None
            revision = page.revision
            found += [replica_from_proto(item) for item in page.replicas if not item.pool]
            token = page.next_page_token
            if not token:
                return found
        raise ClusterSilent(f"it lists more than {_MAX_PAGES} pages of replicas")

    async def _deleting(self, stub: "actuator_pb2_grpc.ActuatorServiceAsyncStub") -> frozenset[str]:
        """Replicas that an unfinished operation takes away; they may still look active."""
        found: set[str] = set()
        token = ""
        for _ in range(_MAX_PAGES):
            page = await stub.ListOperations(
                actuator_pb2.ListOperationsRequest(unfinished_only=True, page_size=_PAGE_SIZE, page_token=token),
                timeout=self._timeout_s,
            )
            found |= taken_away(map(operation_from_proto, page.operations))
            token = page.next_page_token
            if not token:
                return frozenset(found)
        raise ClusterSilent(f"it lists more than {_MAX_PAGES} pages of unfinished operations")


def _failed_write(error: grpc.aio.AioRpcError) -> WriteOutcome:
    info = error_info(error)
    reason = info.reason if info is not None else ""
    highest = info.metadata["highest_token"] if info is not None and "highest_token" in info.metadata else ""
    return WriteOutcome(
        write=ClusterWrite(
            refused={},
            error=describe(error),
            unanswered=error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
            outdated=reason == _OUTDATED,
        ),
        fenced_off=reason == _FENCED_OFF,
        highest_token=int(highest) if highest.isdecimal() else 0,
    )
