"""The fleet: nodes, GPU assignments and memory, replicas and their counters; the admin API calls it.

Replica specs are written to the state file at every change, so that a fleet that was killed starts the same servers
again on the same ports; their counters begin at zero, as those of restarted servers do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pydantic
import structlog

from simulator.core.memory import GpuId, GpuMemory, OutOfMemory
from simulator.core.profile import Profile
from simulator.fleet.model import ConflictError, FleetConfigError, Inventory, Node, ReplicaSpec, first_violation
from simulator.fleet.model import resolve_profile as resolve
from simulator.fleet.replica import Replica, Scales, bind
from simulator.server.server import ServerStats, SimulatedServer

log = structlog.get_logger(__name__)

MAX_REPLICAS = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class FleetSettings:
    """How a fleet is run."""

    listen_host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    server_port_base: int = 8100
    scales: Scales = dataclasses.field(default_factory=Scales)
    stream_interval: int = 1
    state_file: Path | None = None


class _SavedReplica(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    spec: ReplicaSpec
    port: int


class _SavedFleet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    version: int = 1
    replicas: list[_SavedReplica] = []


class Fleet:
    """All replicas of one process."""

    def __init__(self, inventory: Inventory, profiles: Mapping[str, Profile], settings: FleetSettings) -> None:
        self.settings = settings
        self.profiles = profiles
        self.nodes: dict[str, Node] = {n.node: n for n in sorted(inventory.nodes, key=lambda n: n.node)}
        capacity = {gpu: node.memory_gib for node in self.nodes.values() for gpu in node.gpu_ids()}
        self.memory = GpuMemory(capacity)
        self.replicas: dict[str, Replica] = {}
        self.revision = 0
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self._retired: dict[str, ServerStats] = defaultdict(ServerStats)
        self._awake_since_s: dict[str, float] = {}
        self._awake_gpu_s: dict[str, float] = defaultdict(float)

    # --- admin API ------------------------------------------------------------------------------------------------

    def create(self, spec: ReplicaSpec) -> tuple[Replica, bool]:
        """Run a replica; the flag says whether it is new.

        Raises ConflictError when the name or a GPU is taken, FleetConfigError when the spec fits no node or profile.
        """
        existing = self.replicas.get(spec.replica)
        if existing is not None:
            if spec.replica in self._deletions:
                raise ConflictError(f"replica {spec.replica!r} is being deleted")
            if existing.spec != spec:
                raise ConflictError(f"replica {spec.replica!r} exists with another spec")
            return existing, False
        node, profile = self._place(spec)
        if len(self.replicas) >= MAX_REPLICAS:
            raise ConflictError(f"the fleet has {MAX_REPLICAS} replicas, its limit")
        replica = self._add(spec, profile, self._free_socket())
        self._save()
        log.info("created", replica=spec.replica, node=node.node, gpus=spec.gpu_indices, profile=profile.name)
        return replica, True

    async def delete(self, name: str) -> bool:
        """End a replica and wait for its end; False when there is none of that name."""
        if name not in self.replicas:
            return False
        if name not in self._deletions:
            self._deletions[name] = asyncio.get_running_loop().create_task(self._delete(name))
        # The caller may go away; the deletion goes on.
        await asyncio.shield(self._deletions[name])
        return True

    async def _delete(self, name: str) -> None:
        replica = self.replicas[name]
        await replica.stop()
        self.release(replica)
        del self.replicas[name]
        del self._deletions[name]
        self.revision += 1
        self._save()
        log.info("deleted", replica=name)

    def free_gpu_indices(self, node: Node) -> list[int]:
        """GPUs of a node that no replica is assigned to."""
        taken = {i for r in self.replicas.values() if r.spec.node == node.node for i in r.spec.gpu_indices}
        return [index for index in range(node.gpus) if index not in taken]

    def awake_replicas(self, gpu: GpuId) -> list[str]:
        """Replicas that run awake on a GPU, sorted."""
        return sorted(name for name, r in self.replicas.items() if r.awake and gpu in r.spec.gpu_ids())

    def stats_by_service(self) -> dict[str, ServerStats]:
        """Counters of every server that ever lived, by service."""
        services = {r.spec.service for r in self.replicas.values()} | set(self._retired)
        result = {}
        for service in sorted(services):
            total = ServerStats()
            total.add(self._retired[service])
            for replica in self.replicas.values():
                if replica.spec.service == service and replica.server is not None:
                    total.add(replica.server.stats)
            result[service] = total
        return result

    def gpu_seconds_awake(self) -> dict[str, float]:
        """GPU-seconds with the memory of an awake replica, start-up included, by service; wall-clock seconds."""
        now_s = time.monotonic()
        result = dict(self._awake_gpu_s)
        for name, since_s in self._awake_since_s.items():
            spec = self.replicas[name].spec
            result[spec.service] = result.get(spec.service, 0.0) + (now_s - since_s) * len(spec.gpu_indices)
        return dict(sorted(result.items()))

    # --- what replicas ask ----------------------------------------------------------------------------------------

    def claim(self, replica: Replica, gib_per_gpu: float) -> OutOfMemory | None:
        """Set the replica's memory on its GPUs."""
        name = replica.spec.replica
        refused = self.memory.set_claim(name, replica.spec.gpu_ids(), gib_per_gpu)
        if refused is None:
            self._account(replica, awake=gib_per_gpu >= replica.profile.memory.awake_gib)
        return refused

    def release(self, replica: Replica) -> None:
        """Give the replica's memory back."""
        self._account(replica, awake=False)
        self.memory.release(replica.spec.replica)

    def changed(self, replica: Replica) -> None:
        """Note a change that `GET /replicas` shows."""
        self.revision += 1
        replica.revision = self.revision

    def retire(self, replica: Replica, stats: ServerStats) -> None:
        """Keep the counters of a server that has ended."""
        self._retired[replica.spec.service].add(stats)

    def peer(self, engine_id: str) -> SimulatedServer | None:
        """The running server of a replica."""
        replica = self.replicas.get(engine_id)
        return replica.server if replica is not None else None

    # --- life -----------------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Start the replicas of the state file and return their number.

        Raises FleetConfigError when the file cannot be read or written, or a replica does not fit the nodes any more.
        """
        path = self.settings.state_file
        if path is None:
            return 0
        if not path.exists():
            self._check_writable(path)
            return 0
        try:
            saved = _SavedFleet.model_validate_json(path.read_bytes())
        except OSError as error:
            raise FleetConfigError(f"{path}: {error.strerror}") from error
        except pydantic.ValidationError as error:
            raise FleetConfigError(f"{path}: {first_violation(error)}: repair or remove the file") from error
        for entry in saved.replicas:
            _, profile = self._place(entry.spec)
            try:
                sock = bind(self.settings.listen_host, entry.port)
            except OSError:
                log.warning("port taken, using another", replica=entry.spec.replica, port=entry.port)
                sock = self._free_socket()
            self._add(entry.spec, profile, sock)
        self._check_writable(path)
        return len(saved.replicas)

    def _check_writable(self, path: Path) -> None:
        try:
            self._save()
        except OSError as error:
            raise FleetConfigError(f"{path}: cannot be written: {error.strerror}") from error

    async def stop(self) -> None:
        """End every replica; the state file keeps them."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas.values()))

    def _place(self, spec: ReplicaSpec) -> tuple[Node, Profile]:
        node = self.nodes.get(spec.node)
        if node is None:
            raise FleetConfigError(f"node: {spec.node!r} is not known; there are {', '.join(self.nodes)}")
        if spec.gpu_indices[-1] >= node.gpus:
            raise FleetConfigError(f"gpu_indices: {spec.node} has {node.gpus} GPUs, no GPU {spec.gpu_indices[-1]}")
        profile = resolve(spec, node, self.profiles)
        wanted = set(spec.gpu_ids())
        for name, other in sorted(self.replicas.items()):
            shared = wanted.intersection(other.spec.gpu_ids())
            if shared and not spec.shares_gpus_with(other.spec):
                gpu = min(shared)
                raise ConflictError(f"GPU {gpu.index} of {gpu.node} belongs to replica {name!r}")
        return node, profile

    def _add(self, spec: ReplicaSpec, profile: Profile, sock: socket.socket) -> Replica:
        replica = Replica(
            spec, profile, self, sock, scales=self.settings.scales, stream_interval=self.settings.stream_interval
        )
        self.replicas[spec.replica] = replica
        self.changed(replica)
        replica.start()
        return replica

    def _free_socket(self) -> socket.socket:
        """A socket on the lowest free port from the base upwards."""
        taken = {replica.port for replica in self.replicas.values()}
        base = self.settings.server_port_base
        for port in range(base, min(base + 2 * MAX_REPLICAS, 65536)):
            if port in taken:
                continue
            try:
                return bind(self.settings.listen_host, port)
            except OSError:
                continue
        raise ConflictError(f"no port is free from {base} upwards")

    def _account(self, replica: Replica, *, awake: bool) -> None:
        name = replica.spec.replica
        now_s = time.monotonic()
        since_s = self._awake_since_s.pop(name, None)
        if since_s is not None:
            self._awake_gpu_s[replica.spec.service] += (now_s - since_s) * len(replica.spec.gpu_indices)
        if awake:
            self._awake_since_s[name] = now_s

    def _save(self) -> None:
        path = self.settings.state_file
        if path is None:
            return
        saved = _SavedFleet(
            replicas=[_SavedReplica(spec=r.spec, port=r.port) for _, r in sorted(self.replicas.items())]
        )
        write_whole(path, json.dumps(saved.model_dump(mode="json"), indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file that others read: they find the old one or the new one, nothing in between."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
