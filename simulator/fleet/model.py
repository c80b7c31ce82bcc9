"""Input of the fleet: nodes from a `Topology` file, replicas from the admin API; parsed and checked at the edge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import pydantic.alias_generators

from simulator.core.memory import GpuId
from simulator.core.profile import Profile
from trimtab.config.yamlfile import YamlError, read_yaml_documents

POOL_LABEL = "trimtab.dev/pool"
_NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
_MEMORY_IN_TYPE = re.compile(r"-(\d+)GB$")
_DEFAULT_MEMORY_GIB: Mapping[str, float] = {"A100": 40.0, "H100": 80.0, "H200": 141.0, "L40S": 48.0, "B200": 180.0}

Name = Annotated[str, pydantic.Field(pattern=_NAME)]


class FleetConfigError(ValueError):
    """The node file or a request cannot be used; the text has the place and the reason."""


class ConflictError(ValueError):
    """A request contradicts what is there already."""


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Written(_Frozen):
    """What people write in YAML: camelCase keys, as in all of Trimtab's resources; snake_case is read too."""

    model_config = pydantic.ConfigDict(alias_generator=pydantic.alias_generators.to_camel, populate_by_name=True)


class Node(_Written):
    """One machine: its place in the topology and its GPUs."""

    node: Name
    cluster: Name = "local"
    vdc: Name = "vdc-0"
    s2: Name = "s2-0"
    s1: Name = "s1-0"
    gpu_type: str = pydantic.Field(min_length=1)
    gpus: Annotated[int, pydantic.Field(ge=1, le=128)]
    gpu_memory_gib: pydantic.PositiveFloat | None = None
    """HBM of one GPU; None: read off the GPU type (`A100-40GB`) or its usual size."""

    @property
    def memory_gib(self) -> float:
        """HBM of one GPU; raises FleetConfigError when neither the node nor its GPU type defines it."""
        if self.gpu_memory_gib is not None:
            return self.gpu_memory_gib
        named = _MEMORY_IN_TYPE.search(self.gpu_type)
        if named:
            return float(named[1])
        known = _DEFAULT_MEMORY_GIB.get(self.gpu_type.split("-")[0])
        if known is None:
            raise FleetConfigError(
                f"node {self.node}: gpu_type {self.gpu_type!r} has no known size: set gpu_memory_gib"
            )
        return known

    def gpu_ids(self) -> tuple[GpuId, ...]:
        """The node's GPUs."""
        return tuple(GpuId(self.node, index) for index in range(self.gpus))


class Inventory(_Written):
    """The nodes of a topology file."""

    nodes: Annotated[list[Node], pydantic.Field(min_length=1, max_length=10_000)]

    @pydantic.model_validator(mode="after")
    def _unique(self) -> Inventory:
        seen: set[str] = set()
        for node in self.nodes:
            if node.node in seen:
                raise ValueError(f"node {node.node!r} is listed twice")
            seen.add(node.node)
        return self


class _Metadata(_Written):
    name: Name


class _TopologyFile(_Written):
    api_version: Literal["trimtab.dev/v1"]
    kind: Literal["Topology"]
    metadata: _Metadata
    spec: Inventory


DEFAULT_INVENTORY = Inventory(
    nodes=[
        Node(node="node-0", gpu_type="A100-40GB", gpus=4, s1="s1-0"),
        Node(node="node-1", gpu_type="A100-40GB", gpus=4, s1="s1-0"),
        Node(node="node-2", gpu_type="H100-80GB", gpus=8, s1="s1-1"),
        Node(node="node-3", gpu_type="H100-80GB", gpus=8, s1="s1-1"),
    ]
)
"""Two machines of four A100-40GB, as in the TRE paper's testbed, and two of eight H100."""


def load_inventory(path: Path) -> Inventory:
    """Read a topology file: a `Topology` resource, or its bare `nodes`.

    Raises FleetConfigError with file, key and reason.
    """
    try:
        documents = read_yaml_documents(path)
        if len(documents) != 1:
            raise FleetConfigError(f"{path}: must hold one Topology, not {len(documents)} documents")
        document = documents[0]
        if isinstance(document, dict) and "kind" in document:
            inventory = _TopologyFile.model_validate(document).spec
        else:
            inventory = Inventory.model_validate(document)
        for node in inventory.nodes:
            _ = node.memory_gib
    except YamlError as error:
        raise FleetConfigError(str(error)) from error
    except pydantic.ValidationError as error:
        raise FleetConfigError(f"{path}: {first_violation(error)}") from error
    return inventory


def first_violation(error: pydantic.ValidationError) -> str:
    """`path: what is wrong` of the first violation."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "(document)"
    return f"{where}: {first['msg']}"


class ReplicaSpec(_Frozen):
    """Body of `POST /replicas`: one server to run."""

    replica: Name
    service: Name
    role: Literal["colocated", "prefill", "decode", "prefill-attention", "prefill-ffn"] = "colocated"
    """Shown and counted by; what a server does follows from the requests it gets."""
    model: Annotated[str, pydantic.Field(min_length=1, max_length=200)]
    """The name the server serves; the profile defines its costs."""
    node: Name
    gpu_indices: Annotated[list[Annotated[int, pydantic.Field(ge=0)]], pydantic.Field(min_length=1, max_length=128)]
    profile: str = ""
    """Empty: the packaged profile of this model on the node's GPU type."""
    labels: Annotated[dict[str, str], pydantic.Field(max_length=64)] = {}

    @pydantic.field_validator("gpu_indices")
    @classmethod
    def _sorted(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError("a GPU is named twice")
        return sorted(value)

    @property
    def pool(self) -> str | None:
        """The pool whose members may share GPUs."""
        return self.labels.get(POOL_LABEL)

    def gpu_ids(self) -> tuple[GpuId, ...]:
        """The replica's GPUs."""
        return tuple(GpuId(self.node, index) for index in self.gpu_indices)

    def shares_gpus_with(self, other: ReplicaSpec) -> bool:
        """Whether both may be assigned the same GPU."""
        return self.pool is not None and self.pool == other.pool


def resolve_profile(spec: ReplicaSpec, node: Node, profiles: Mapping[str, Profile]) -> Profile:
    """The profile a replica runs with; raises FleetConfigError when it does not fit model, GPUs or node."""
    if spec.profile:
        profile = profiles.get(spec.profile)
        if profile is None:
            raise FleetConfigError(f"profile: {spec.profile!r} is not known; there are {', '.join(sorted(profiles))}")
    else:
        matches = [p for p in profiles.values() if p.model == spec.model and node.gpu_type.startswith(p.gpu_type)]
        if not matches:
            raise FleetConfigError(
                f"profile: none is given and none is packaged for model {spec.model!r} on {node.gpu_type}; there are "
                f"{', '.join(sorted(profiles))}"
            )
        profile = matches[0]
    if not node.gpu_type.startswith(profile.gpu_type):
        raise FleetConfigError(f"profile: {profile.name} is for {profile.gpu_type}, {node.node} has {node.gpu_type}")
    if len(spec.gpu_indices) != profile.tensor_parallel:
        raise FleetConfigError(
            f"gpu_indices: profile {profile.name} needs {profile.tensor_parallel} GPUs, not {len(spec.gpu_indices)}"
        )
    return profile
