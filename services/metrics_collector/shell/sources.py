"""Where targets come from: file_sd documents on disk, and the actuators' replicas.

A document that cannot be read keeps its last good targets, is logged once and read again when it changes. The last
replicas of a lost actuator stay: they serve without it.
"""

from collections.abc import AsyncIterable, Callable, Sequence
from pathlib import Path

import grpc
import structlog

from metrics_collector.core.targets import Target, from_file_sd, from_replica
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.config.file_sd import FileSdError, file_stamp, read_file_sd
from trimtab.rpc.run import ServiceContext
from trimtab.rpc.watch import follow

log = structlog.get_logger(__name__)


def load_file(path: Path) -> tuple[Target, ...]:
    """The targets of one document. Raises ``FileSdError`` with one line that names the file."""
    return tuple(from_file_sd(listed) for listed in read_file_sd(path))


class FileTargets:
    """The targets of several documents, read again when a file's time, size or inode changes."""

    def __init__(self, paths: Sequence[Path], on_change: Callable[[], None]) -> None:
        self._paths = tuple(paths)
        self._on_change = on_change
        self._seen: dict[Path, tuple[int, int, int] | None] = {}
        self._targets: dict[Path, tuple[Target, ...]] = {}
        self.errors: dict[Path, str] = {}

    @property
    def targets(self) -> list[Target]:
        """Everything that the last good version of each file lists."""
        return [target for path in self._paths for target in self._targets.get(path, ())]

    def poll(self) -> None:
        """Look at every file once. Raises nothing."""
        changed = False
        for path in self._paths:
            stamp = file_stamp(path)
            if path in self._seen and self._seen[path] == stamp:
                continue
            self._seen[path] = stamp
            try:
                targets = load_file(path)
            except FileSdError as error:
                kept = len(self._targets.get(path, ()))
                self.errors[path] = str(error)
                log.warning("targets file refused, the last good one stays", error=str(error), targets=kept)
                continue
            self.errors.pop(path, None)
            if targets != self._targets.get(path):
                self._targets[path] = targets
                changed = True
                log.info("targets file read", file=str(path), targets=len(targets))
        if changed:
            self._on_change()

    async def run(self, context: ServiceContext, *, interval_s: float) -> None:
        """Poll until the service stops."""
        while not await context.pause(interval_s):
            self.poll()


class ActuatorTargets:
    """The replicas of one cluster, as its actuator's stream of them goes."""

    def __init__(
        self, cluster: str, stub: "actuator_pb2_grpc.ActuatorServiceAsyncStub", on_change: Callable[[], None]
    ) -> None:
        self.cluster = cluster
        self.revision: int | None = None
        self.connected = False
        self._stub = stub
        self._on_change = on_change
        self._replicas: dict[str, Target] = {}

    @property
    def targets(self) -> list[Target]:
        """The replicas of the last snapshot, with the changes since."""
        return list(self._replicas.values())

    async def run(self, context: ServiceContext, *, lost_after_s: float) -> None:
        """Follow the stream until the service stops."""
        await follow(
            self._open,
            self._apply,
            stopping=context.stopping,
            bookmark_timeout_s=lost_after_s,
            on_lost=self._lost,
            name=f"replicas of {self.cluster}",
        )

    def _open(self) -> AsyncIterable[actuator_pb2.WatchReplicasResponse]:
        call: grpc.aio.UnaryStreamCall[actuator_pb2.WatchReplicasRequest, actuator_pb2.WatchReplicasResponse]
        call = self._stub.WatchReplicas(actuator_pb2.WatchReplicasRequest())
        return call

    def _lost(self) -> None:
        self.connected = False
        log.warning("actuator lost, its last replicas stay", cluster=self.cluster, replicas=len(self._replicas))

    def _apply(self, message: actuator_pb2.WatchReplicasResponse) -> None:
        self.connected = True
        event = message.WhichOneof("event")
        if event == "snapshot":
            self.revision = message.snapshot.revision
            self._replicas = {
                replica.replica: from_replica(replica, cluster=self.cluster) for replica in message.snapshot.replicas
            }
        elif event == "changed":
            self.revision = max(self.revision or 0, message.changed.revision)
            self._replicas[message.changed.replica] = from_replica(message.changed, cluster=self.cluster)
        elif event == "removed":
            self.revision = max(self.revision or 0, message.removed.revision)
            self._replicas.pop(message.removed.replica, None)
        elif event == "bookmark":
            self.revision = message.bookmark.revision
            return
        self._on_change()
