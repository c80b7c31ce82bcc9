"""The ``static`` backend: servers that somebody else started, listed in a Prometheus ``file_sd`` document.

    - targets: ["10.0.0.7:8000"]
      labels: {service: chat, role: colocated, replica: chat-0, model: qwen, node: gpu-a, gpu_indices: "0,1"}

``service`` is required; ``role`` is colocated unless given; ``replica`` and ``node`` default to the address. Without
``gpu_indices`` nothing is known of its GPUs. Nothing can be created or deleted, and no memory is measured. The file
is read again when it changes; one that does not parse keeps the last good list and is reported.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pydantic

from actuator.core.model import Gpu, Role, Spec
from actuator.core.world import Listed, Node, RunState
from actuator.shell.backend import BackendError
from trimtab.config.yamlfile import YamlError, read_yaml_documents

_HOST_PORT = re.compile(r"[A-Za-z0-9_.\-\[\]:]+:\d{1,5}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class _Group(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)
    targets: list[str]
    labels: dict[str, str] = {}


_GROUPS = pydantic.TypeAdapter(list[_Group])


class TargetsFileError(Exception):
    """The file cannot be used; one line that names it and the place."""


def read_targets(path: Path) -> Mapping[str, Listed]:
    """Servers of the file by replica name. Raises ``TargetsFileError``."""
    try:
        groups = _GROUPS.validate_python(_document(path))
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise TargetsFileError(f"{path}: {place or 'document'}: {first['msg']}") from error
    found: dict[str, Listed] = {}
    for index, group in enumerate(groups):
        for target in group.targets:
            listed = _target(target, group.labels, place=f"{path}: [{index}]")
            if listed.spec.replica in found:
                raise TargetsFileError(f"{path}: [{index}]: replica {listed.spec.replica} is listed twice")
            found[listed.spec.replica] = listed
    return found


def _document(path: Path) -> object:
    try:
        if path.suffix == ".json":
            document: object = json.loads(path.read_text(encoding="utf-8"))
            return document
        documents = read_yaml_documents(path)
    except OSError as error:
        raise TargetsFileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, YamlError) as error:
        raise TargetsFileError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    return documents[0] if documents else []


def _target(target: str, labels: Mapping[str, str], *, place: str) -> Listed:
    if _HOST_PORT.fullmatch(target) is None:
        raise TargetsFileError(f"{place}: {target[:80]!r} is not host:port")
    service = labels.get("service", "")
    if _NAME.fullmatch(service) is None:
        raise TargetsFileError(
            f"{place}: label service is {service[:80]!r}, must be a name of letters, digits, hyphens"
        )
    role = labels.get("role", Role.COLOCATED.value)
    if role not in {known.value for known in Role}:
        raise TargetsFileError(f"{place}: label role is {role[:80]!r}, must be one of {', '.join(Role)}")
    scheme = labels.get("__scheme__", "http")
    if scheme not in ("http", "https"):
        raise TargetsFileError(f"{place}: label __scheme__ is {scheme[:80]!r}, must be http or https")
    indices = labels.get("gpu_indices", "")
    if indices and re.fullmatch(r"\d{1,3}(,\d{1,3})*", indices) is None:
        raise TargetsFileError(f"{place}: label gpu_indices is {indices[:80]!r}, must be like 0,1")
    spec = Spec(
        replica=labels.get("replica") or target,
        service=service,
        role=Role(role),
        model=labels.get("model", ""),
        profile="",
        node=labels.get("node") or target.rpartition(":")[0],
        gpu_indices=tuple(sorted({int(index) for index in indices.split(",") if index})),
        gpu_type=labels.get("gpu_type", ""),
    )
    return Listed(spec=spec, address=f"{scheme}://{target}", run_state=RunState.RUNNING)


class StaticBackend:
    """Servers of one file."""

    measures_gpus = False

    def __init__(self, path: Path) -> None:
        """Reads the file once. Raises ``TargetsFileError``."""
        self._path = path
        self._stamp = self._look()
        self._listed = read_targets(path)

    async def list_nodes(self) -> Mapping[str, Node]:
        """The nodes that the targets name, as far as their GPUs are known. All are taken."""
        types: dict[str, str] = {}
        gpus: dict[str, int] = {}
        for name in sorted(self._listed):
            spec = self._listed[name].spec
            gpus[spec.node] = max(gpus.get(spec.node, 0), *(index + 1 for index in spec.gpu_indices), 0)
            types[spec.node] = types.get(spec.node) or spec.gpu_type
        return {
            node: Node(node=node, vdc="", s2="", s1="", gpu_type=types[node], gpus=count, taken=frozenset(range(count)))
            for node, count in gpus.items()
        }

    async def list_replicas(self) -> Mapping[str, Listed]:
        """Reads the file again when it changed; a bad one raises ``BackendError`` and the last good list stays."""
        stamp = self._look()
        if stamp != self._stamp:
            try:
                self._listed = read_targets(self._path)
            except TargetsFileError as error:
                raise BackendError(f"{error}; the last good list stays") from error
            self._stamp = stamp
        return self._listed

    async def create_replica(self, spec: Spec) -> None:
        """Not possible."""
        raise BackendError(f"{spec.replica} is not in {self._path}, and a static backend creates none", permanent=True)

    async def delete_replica(self, replica: str) -> None:
        """Not possible while it is listed."""
        if replica in self._listed:
            raise BackendError(f"{replica} is in {self._path}, and a static backend deletes none", permanent=True)

    async def gpu_memory(self) -> Mapping[Gpu, tuple[float, float]]:
        """Nothing is measured."""
        return {}

    async def close(self) -> None:
        """Holds nothing open."""

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
