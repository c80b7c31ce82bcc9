"""The ``static`` backend: servers that run already, listed in a Prometheus ``file_sd`` document.

    - targets: ["10.0.0.7:8000"]
      labels: {service: chat, role: colocated, replica: chat-0, model: qwen, node: gpu-a, gpu_indices: "0,1"}

``service`` is required; ``role`` is colocated unless given; ``replica`` and ``node`` default to the address. Without
``gpu_indices`` nothing is known of its GPUs. Nothing can be created or deleted. Memory is
measured where the file names the node's DCGM exporter, as the metrics collector takes it:

    - targets: ["10.0.0.7:9400"]
      labels: {exporter: dcgm, node: gpu-a}

The file is read again when it changes; one that does not parse keeps the last good list and is reported.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from actuator.core.model import Gpu, PlacedSpec, Placement, Spec
from actuator.core.world import Listed, Node, RunState
from actuator.shell.backend import BackendError
from actuator.shell.gpu_exporter import GpuExporters
from trimtab.config.file_sd import FileSdError, FileSdTarget, file_stamp, read_file_sd
from trimtab.domain.vocabulary import Role

TargetsFileError = FileSdError
"""The file cannot be used; one line that names it and the place."""


def read_targets(path: Path) -> Mapping[str, Listed]:
    """Servers of the file by replica name. Raises ``TargetsFileError``."""
    return _servers(read_file_sd(path))


def _servers(targets: Sequence[FileSdTarget]) -> Mapping[str, Listed]:
    return {target.replica: _listed(target) for target in targets if not target.labels.exporter}


def _exporters(targets: Sequence[FileSdTarget]) -> Mapping[str, str]:
    """Pages of GPU exporters by node."""
    found = {}
    for target in targets:
        if target.labels.exporter and not target.labels.node:
            raise TargetsFileError(f"{target.place}: label node is '', must name the node whose GPUs it shows")
        if target.labels.exporter:
            found[target.labels.node] = target.url + (target.labels.metrics_path or "/metrics")
    return found


def _listed(target: FileSdTarget) -> Listed:
    labels = target.labels
    if not labels.service:
        raise TargetsFileError(f"{target.place}: label service is '', must name the service")
    spec = Spec(
        replica=target.replica,
        service=labels.service,
        role=Role(labels.role.value) if labels.role is not None else Role.COLOCATED,
        model=labels.model,
        profile="",
        gpu_type=labels.gpu_type,
    )
    placement = Placement(node=labels.node or target.address.rpartition(":")[0], gpu_indices=labels.gpu_indices)
    return Listed(spec=spec, placement=placement, address=target.url, run_state=RunState.RUNNING)


class StaticBackend:
    """Servers of one file."""

    can_create = False

    def __init__(self, path: Path, *, exporter_interval_s: float = 30.0) -> None:
        """Reads the file once. Raises ``TargetsFileError``. What exporters show may be ``exporter_interval_s`` old."""
        self._path = path
        self._stamp = file_stamp(path)
        self.gpu_memory_age_s = exporter_interval_s
        self._exporters = GpuExporters()
        self._read()

    def _read(self) -> None:
        targets = read_file_sd(self._path)
        self._listed, self._pages = _servers(targets), _exporters(targets)

    @property
    def measures_gpus(self) -> bool:
        """Whether the file names any exporter."""
        return bool(self._pages)

    def measured_nodes(self) -> frozenset[str] | None:
        """Nodes with an exporter."""
        return frozenset(self._pages)

    async def list_nodes(self) -> Mapping[str, Node]:
        """The nodes that the targets name, as far as their GPUs are known. All are taken."""
        types: dict[str, str] = {}
        gpus: dict[str, int] = {}
        for name in sorted(self._listed):
            listed = self._listed[name]
            node, indices = listed.placement.node, listed.placement.gpu_indices
            gpus[node] = max(gpus.get(node, 0), *(index + 1 for index in indices), 0)
            types[node] = types.get(node) or listed.spec.gpu_type
        return {
            node: Node(node=node, vdc="", s2="", s1="", gpu_type=types[node], gpus=count, taken=frozenset(range(count)))
            for node, count in gpus.items()
        }

    async def list_replicas(self) -> Mapping[str, Listed]:
        """Reads the file again when it changed; a bad one raises ``BackendError`` and the last good list stays."""
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            try:
                self._read()
            except TargetsFileError as error:
                raise BackendError(f"{error}; the last good list stays") from error
            self._stamp = stamp
        return self._listed

    async def create_replica(self, placed: PlacedSpec) -> None:
        """Not possible. Always raises ``BackendError``."""
        raise BackendError(
            f"{placed.replica} is not in {self._path}, and a static backend creates none", permanent=True
        )

    async def delete_replica(self, replica: str) -> None:
        """Not possible while it is listed. Raises ``BackendError`` then."""
        if replica in self._listed:
            raise BackendError(f"{replica} is in {self._path}, and a static backend deletes none", permanent=True)

    async def gpu_memory(self) -> Mapping[Gpu, tuple[float, float]]:
        """What the exporters show."""
        return await self._exporters.memory(self._pages)

    async def close(self) -> None:
        """Closes the connections to the exporters."""
        await self._exporters.close()
