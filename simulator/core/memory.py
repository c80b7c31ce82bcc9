"""HBM of every GPU and its holders; a claim that does not fit is refused whole, like CUDA's out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class GpuId:
    """One GPU of one node."""

    node: str
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Why a claim was refused: the first GPU on which it does not fit."""

    gpu: GpuId
    capacity_gib: float
    used_by_others_gib: float
    wanted_gib: float

    def __str__(self) -> str:
        free = max(0.0, self.capacity_gib - self.used_by_others_gib)
        return (
            f"CUDA out of memory. Tried to allocate {self.wanted_gib:.2f} GiB. GPU {self.gpu.index} has a total "
            f"capacity of {self.capacity_gib:.2f} GiB of which {free:.2f} GiB is free."
        )


class GpuMemory:
    """Memory of a set of GPUs by owner, in GiB."""

    def __init__(self, capacity_gib: Mapping[GpuId, float]) -> None:
        self.capacity_gib = dict(capacity_gib)
        self._claims: dict[GpuId, dict[str, float]] = {gpu: {} for gpu in self.capacity_gib}

    def used_gib(self, gpu: GpuId) -> float:
        """Memory in use on one GPU; raises KeyError for a GPU that does not exist."""
        return sum(self._claims[gpu].values())

    def held_gib(self, owner: str) -> float:
        """Memory an owner holds over all GPUs."""
        return sum(claims.get(owner, 0.0) for claims in self._claims.values())

    def owners(self, gpu: GpuId) -> tuple[str, ...]:
        """The holders of memory of a GPU, sorted."""
        return tuple(sorted(self._claims[gpu]))

    def set_claim(self, owner: str, gpus: Iterable[GpuId], gib_per_gpu: float) -> OutOfMemory | None:
        """Make the owner's claim exactly `gib_per_gpu` on each GPU; on refusal nothing changes."""
        wanted = tuple(gpus)
        for gpu in wanted:
            others = sum(gib for name, gib in self._claims[gpu].items() if name != owner)
            # A claim that shrinks or stays always passes: memory already held is never out of memory.
            if gib_per_gpu > self._claims[gpu].get(owner, 0.0) and others + gib_per_gpu > self.capacity_gib[gpu] + 1e-9:
                return OutOfMemory(gpu, self.capacity_gib[gpu], others, gib_per_gpu)
        for gpu in wanted:
            self._claims[gpu][owner] = gib_per_gpu
        return None

    def release(self, owner: str) -> None:
        """Give back everything the owner holds."""
        for claims in self._claims.values():
            claims.pop(owner, None)
