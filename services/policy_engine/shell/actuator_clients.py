"""The engine's view of every cluster's actuator: its replicas and operations, kept by watching.

An actuator that does not answer counts as lost: its last replicas and operations are kept to show, its services hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Mapping

import grpc
import structlog

from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.domain.operation import Operation, operation_from_proto
from trimtab.domain.replica import Replica, replica_from_proto
from trimtab.rpc.clients import ClientTls, channel
from trimtab.rpc.errors import describe
from trimtab.rpc.watch import follow

log = structlog.get_logger(__name__)

MAX_OPERATIONS = 512
CALL_TIMEOUT_S = 3.0
# A decision does not wait longer for counts that only choose between plans.
COUNT_TIMEOUT_S = 1.0


class ActuatorLink:
    """One actuator: its channel, and the newest state from its watches.

    `generation` grows with every snapshot of replicas, so that a publisher notices that the actuator came back.
    """

    def __init__(
        self, cluster: str, address: str, *, tls: ClientTls | None, lost_after_s: float, on_news: Callable[[], None]
    ) -> None:
        self.cluster = cluster
        self.address = address
        self.replicas: dict[str, Replica] = {}
        self.operations: dict[str, Operation] = {}
        self.revision = 0
        self.generation = 0
        self.reachable = False
        self.detail = "not reached yet"
        self._lost_after_s = lost_after_s
        self._on_news = on_news
        self._channel: grpc.aio.Channel = channel(address, tls=tls)
        self.stub: actuator_pb2_grpc.ActuatorServiceAsyncStub = actuator_pb2_grpc.ActuatorServiceStub(self._channel)

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow both watches until `stopping`."""
        try:
            await asyncio.gather(
                follow(
                    self._open_replicas,
                    self._take_replicas,
                    stopping=stopping,
                    bookmark_timeout_s=self._lost_after_s,
                    on_lost=self._lost,
                    name=f"replicas of {self.cluster}",
                ),
                follow(
                    self._open_operations,
                    self._take_operations,
                    stopping=stopping,
                    bookmark_timeout_s=self._lost_after_s,
                    name=f"operations of {self.cluster}",
                ),
            )
        finally:
            await self._channel.close()

    async def in_flight(self, pool: str) -> dict[str, int | None]:
        """Requests in each of the pool's servers, as the actuator last saw them; empty when it does not answer.

        A watch brings a count only when something else of a replica changes, which may be long ago.
        """
        found: dict[str, int | None] = {}
        page_token = ""
        try:
            while True:
                request = actuator_pb2.ListReplicasRequest(pool=pool, page_size=1000, page_token=page_token)
                page = await self.stub.ListReplicas(request, timeout=COUNT_TIMEOUT_S)
                for item in page.replicas:
                    found[item.replica] = item.in_flight if item.HasField("in_flight") else None
                page_token = page.next_page_token
                if not page_token:
                    return found
        except grpc.aio.AioRpcError as error:
            log.warning("requests in flight are those last told", pool=pool, error=describe(error))
            return {}

    async def list_replicas(self, pool: str) -> list[Replica]:
        """The pool's replicas as the actuator lists them now. Raises AioRpcError."""
        request = actuator_pb2.ListReplicasRequest(pool=pool, page_size=1000)
        answer = await self.stub.ListReplicas(request, timeout=CALL_TIMEOUT_S)
        return _replicas(answer.replicas)

    def take_operation(self, message: actuator_pb2.Operation) -> Operation:
        """Keep an operation from an answer or a watch; an older form never replaces one that has ended."""
        operation = operation_from_proto(message)
        known = self.operations.get(operation.operation_id)
        if known is not None and known.finished and not operation.finished:
            return known
        self.operations[operation.operation_id] = operation
        if operation.finished and (known is None or not known.finished):
            self._on_news()
        if len(self.operations) > MAX_OPERATIONS:
            done = sorted(name for name, item in self.operations.items() if item.finished)
            for name in done[: len(self.operations) - MAX_OPERATIONS]:
                del self.operations[name]
        return operation

    def _open_replicas(self) -> AsyncIterable[actuator_pb2.WatchReplicasResponse]:
        return self.stub.WatchReplicas(actuator_pb2.WatchReplicasRequest())

    def _open_operations(self) -> AsyncIterable[actuator_pb2.WatchOperationsResponse]:
        return self.stub.WatchOperations(actuator_pb2.WatchOperationsRequest())

    def _take_replicas(self, message: actuator_pb2.WatchReplicasResponse) -> None:
        event = message.WhichOneof("event")
        if event == "snapshot":
            self._take_snapshot(message.snapshot)
        elif self.generation == 0:
            return  # nothing counts before a snapshot of the right cluster
        elif event == "changed":
            self.replicas.pop(message.changed.replica, None)
            self.replicas.update({item.replica: item for item in _replicas([message.changed])})
            self.revision = max(self.revision, message.changed.revision)
        elif event == "removed":
            self.replicas.pop(message.removed.replica, None)
            self.revision = max(self.revision, message.removed.revision)
        elif event == "bookmark":
            self.revision = message.bookmark.revision
            self._answers()

    def _take_snapshot(self, snapshot: actuator_pb2.ReplicaSnapshot) -> None:
        if snapshot.cluster and snapshot.cluster != self.cluster:
            self.reachable = False
            self.generation = 0
            self.detail = f"{self.address} is the actuator of cluster {snapshot.cluster}, not {self.cluster}"
            log.error("wrong cluster", expected=self.cluster, found=snapshot.cluster, address=self.address)
            return
        self.replicas = {item.replica: item for item in _replicas(snapshot.replicas)}
        self.revision = snapshot.revision
        self.generation += 1
        self._answers()

    def _answers(self) -> None:
        if not self.reachable:
            self.reachable = True
            self.detail = ""
            self._on_news()

    def _take_operations(self, message: actuator_pb2.WatchOperationsResponse) -> None:
        event = message.WhichOneof("event")
        if event == "snapshot":
            for operation in message.snapshot.operations:
                self.take_operation(operation)
        elif event == "operation":
            self.take_operation(message.operation)

    def _lost(self) -> None:
        self.reachable = False
        self.detail = f"the actuator of {self.cluster} at {self.address} does not answer"


def _replicas(messages: Iterable[actuator_pb2.Replica]) -> list[Replica]:
    """The replicas in messages; one that this release cannot read is left out."""
    found: list[Replica] = []
    for message in messages:
        try:
            found.append(replica_from_proto(message))
        except ValueError as error:
            log.warning("a replica was left out", error=str(error))
    return found


class Fleet:
    """Every actuator, by cluster."""

    def __init__(
        self,
        actuators: Mapping[str, str],
        *,
        tls: ClientTls | None,
        lost_after_s: float,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.links = {
            cluster: ActuatorLink(cluster, address, tls=tls, lost_after_s=lost_after_s, on_news=on_news)
            for cluster, address in sorted(actuators.items())
        }

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow every actuator until `stopping`."""
        await asyncio.gather(*(link.run(stopping) for link in self.links.values()))

    def revisions(self) -> tuple[tuple[str, int], ...]:
        """Replica revision by cluster, of those that answer."""
        return tuple((name, link.revision) for name, link in self.links.items() if link.reachable)

    def replicas_of(self, service: str) -> list[Replica]:
        """A service's scaled replicas in all clusters, by name."""
        found = [
            item
            for link in self.links.values()
            for item in link.replicas.values()
            if item.service == service and not item.pool
        ]
        return sorted(found, key=lambda replica: (replica.cluster, replica.replica))

    def why_blind(self, service: str) -> str:
        """Why a scaled service's replicas cannot be counted; empty when they can."""
        if not self.links:
            return "no actuator is configured"
        lost = [link for link in self.links.values() if not link.reachable]
        holding = [
            link
            for link in lost
            if link.generation == 0 or any(item.service == service and not item.pool for item in link.replicas.values())
        ]
        if holding:
            return holding[0].detail
        return lost[0].detail if len(lost) == len(self.links) else ""
