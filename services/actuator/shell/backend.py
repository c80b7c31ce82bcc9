"""The interface to what runs the servers; its errors say whether to try again."""

from collections.abc import Mapping
from typing import Protocol

from actuator.core.model import Gpu, PlacedSpec, Spec
from actuator.core.world import Listed, Node

POOL_LABEL = "trimtab.dev/pool"
GROUP_LABEL = "trimtab.dev/group"
DECISION_LABEL = "trimtab.dev/decision"
"""Kept on the server itself, so that membership survives a lost store."""


class BackendError(Exception):
    """A call failed. ``permanent``: the same call will fail again."""

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Backend(Protocol):
    """Every method is bounded in time and raises ``BackendError``; creating and deleting are idempotent."""

    @property
    def measures_gpus(self) -> bool:
        """Whether the memory of any GPU is measured."""
        ...

    # How old the values of `gpu_memory` may be when they are returned, in seconds.
    gpu_memory_age_s: float
    can_create: bool

    async def list_nodes(self) -> Mapping[str, Node]:
        """Every node of the cluster by name."""
        ...

    async def list_replicas(self) -> Mapping[str, Listed]:
        """Every replica that exists, whatever its state, by name."""
        ...

    async def create_replica(self, placed: PlacedSpec) -> None:
        """Makes the server, or finds the same one made already."""
        ...

    async def delete_replica(self, replica: str) -> None:
        """Ends the server; one that does not exist is fine."""
        ...

    async def gpu_memory(self) -> Mapping[Gpu, tuple[float, float]]:
        """Measured (used, total) GiB of each GPU; empty where nothing measures."""
        ...

    def measured_nodes(self) -> frozenset[str] | None:
        """Nodes whose GPUs are measured; None: all of them, or none where nothing measures."""
        ...

    async def close(self) -> None:
        """Frees connections."""
        ...


def labels_of(spec: Spec) -> dict[str, str]:
    """Labels that carry pool, group and decision."""
    labels = {POOL_LABEL: spec.pool, GROUP_LABEL: spec.group, DECISION_LABEL: spec.decision_id}
    return {key: value for key, value in labels.items() if value}
