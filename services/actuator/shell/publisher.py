"""What the watchers of replicas and operations are sent. Opened when this process becomes the writer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from actuator.core.listing import listed_operation, listed_replica
from actuator.core.model import Operation, Replica, State
from actuator.core.world import ProbeResult
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.domain.operation import operation_to_proto
from trimtab.domain.replica import replica_to_proto
from trimtab.rpc.errors import Unavailable
from trimtab.rpc.watch import WatchHub

_RECENT_OPERATIONS = 50


class _Hubs:
    """The hubs of one leader term; closing it ends every stream."""

    def __init__(self, publisher: "Publisher") -> None:
        self.closed = asyncio.Event()
        self.replicas: WatchHub[pb.WatchReplicasResponse] = WatchHub(
            snapshot=publisher.replica_snapshot, bookmark=publisher.replica_bookmark, stopping=self.closed
        )
        self.operations: WatchHub[pb.WatchOperationsResponse] = WatchHub(
            snapshot=publisher.operation_snapshot, bookmark=publisher.operation_bookmark, stopping=self.closed
        )


class Publisher:
    """Turns two states into what changed between them."""

    def __init__(self, *, cluster: str, probe: Callable[[str], ProbeResult | None]) -> None:
        self._cluster = cluster
        self._sight = probe
        self._state = State()
        self._hubs: _Hubs | None = None

    def open(self) -> None:
        """Serve watchers from now on. The first state published is the first snapshot."""
        self.close()
        self._hubs = _Hubs(self)

    def close(self) -> None:
        """Ends every stream."""
        if self._hubs is not None:
            self._hubs.closed.set()
            self._hubs = None

    def publish(self, old: State, new: State) -> None:
        """Send every watcher what changed."""
        self._state = new
        if self._hubs is None:
            return
        for name in sorted(old.replicas.keys() - new.replicas.keys()):
            removed = pb.ReplicaRemoved(replica=name, revision=new.meta.replica_revision)
            self._hubs.replicas.publish(pb.WatchReplicasResponse(removed=removed))
        for name in sorted(new.replicas):
            if new.replicas[name] != old.replicas.get(name):
                self._hubs.replicas.publish(pb.WatchReplicasResponse(changed=self.replica(new.replicas[name])))
        for operation_id in sorted(new.operations):
            if new.operations[operation_id] != old.operations.get(operation_id):
                message = self.operation(new.operations[operation_id])
                self._hubs.operations.publish(pb.WatchOperationsResponse(operation=message))

    def watch_replicas(self) -> AsyncIterator[pb.WatchReplicasResponse]:
        """One reader's stream."""
        return self._open_hubs().replicas.watch()

    def watch_operations(self) -> AsyncIterator[pb.WatchOperationsResponse]:
        """One reader's stream."""
        return self._open_hubs().operations.watch()

    def replica(self, replica: Replica) -> pb.Replica:
        """One record with its newest in-flight count."""
        probe = self._sight(replica.name)
        in_flight = probe.in_flight if probe is not None else None
        return replica_to_proto(listed_replica(replica, cluster=self._cluster, in_flight=in_flight))

    def operation(self, operation: Operation) -> pb.Operation:
        """One operation as it is listed."""
        return operation_to_proto(listed_operation(operation, cluster=self._cluster))

    def replica_snapshot(self) -> Iterable[pb.WatchReplicasResponse]:
        """All replicas at the newest revision."""
        snapshot = pb.ReplicaSnapshot(
            replicas=[self.replica(self._state.replicas[name]) for name in sorted(self._state.replicas)],
            revision=self._state.meta.replica_revision,
            cluster=self._cluster,
        )
        return [pb.WatchReplicasResponse(snapshot=snapshot)]

    def replica_bookmark(self) -> pb.WatchReplicasResponse:
        """Nothing changed."""
        return pb.WatchReplicasResponse(bookmark=pb.ReplicaBookmark(revision=self._state.meta.replica_revision))

    def operation_snapshot(self) -> Iterable[pb.WatchOperationsResponse]:
        """Unfinished operations and the newest finished ones, oldest first."""
        ordered = sorted(self._state.operations.values(), key=lambda o: (o.create_s, o.operation_id))
        recent = {o.operation_id for o in [o for o in ordered if o.finished][-_RECENT_OPERATIONS:]}
        shown = [o for o in ordered if not o.finished or o.operation_id in recent]
        messages = [self.operation(operation) for operation in shown]
        return [pb.WatchOperationsResponse(snapshot=pb.OperationSnapshot(operations=messages))]

    def operation_bookmark(self) -> pb.WatchOperationsResponse:
        """Nothing changed."""
        return pb.WatchOperationsResponse(bookmark=pb.ReplicaBookmark(revision=self._state.meta.replica_revision))

    def _open_hubs(self) -> _Hubs:
        if self._hubs is None:
            raise Unavailable("STANDING_BY", "another actuator speaks for this cluster, or this one is starting")
        return self._hubs
