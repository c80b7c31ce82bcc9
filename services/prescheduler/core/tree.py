"""The topology tree of a cycle as arrays: node → S1 → S2 → cluster → VDC.

Rows are nodes in the order of (cluster, S2, S1, node), so that every domain of every level is one range of rows and
sums over domains are sums over ranges. The tree is built fresh each cycle (HeteroScale 3.4, Algorithm 4, step 1) and
never changed; ``capacity`` holds what a cycle takes from it. Switch names need to be unique within their parent only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from prescheduler.core.model import LEVELS, ClusterInventory
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import TopologyLevel

IntArray = npt.NDArray[np.int64]
MaskArray = npt.NDArray[np.uint64]

MAX_GPUS_PER_NODE = 64


class InventoryError(ValueError):
    """A cluster's node table contradicts itself; the message names the cluster, the node and the column."""


@dataclass(frozen=True, kw_only=True)
class DomainLevel:
    """The domains of one level. Domain d holds the rows ``starts[d]`` to ``starts[d + 1]``."""

    level: TopologyLevel
    starts: IntArray
    of_row: IntArray
    names: tuple[str, ...]
    clusters: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many domains the level has."""
        return len(self.names)

    def rows(self, domain: int) -> tuple[int, int]:
        """First row and the row after the last."""
        return int(self.starts[domain]), int(self.starts[domain + 1])


@dataclass(frozen=True, kw_only=True)
class Tree:
    """All reachable nodes. Arrays have one entry per row; classes are ``SubgroupClass`` numbers."""

    node_names: tuple[str, ...]
    gpu_types: tuple[str, ...]
    type_of_row: IntArray
    gpus: IntArray
    free_masks: MaskArray
    levels: dict[TopologyLevel, DomainLevel]
    vdc_of_cluster: dict[str, str]
    class_of_row: IntArray
    """Of the S1 that the node hangs on."""

    def level(self, level: TopologyLevel) -> DomainLevel:
        """The domains of ``level``."""
        return self.levels[level]

    @cached_property
    def rows_by_node(self) -> dict[tuple[str, str], int]:
        """(cluster, node) → row."""
        clusters = self.level(TopologyLevel.CLUSTER)
        of_row = clusters.of_row.tolist()
        return {
            (clusters.clusters[cluster], node): row
            for row, (cluster, node) in enumerate(zip(of_row, self.node_names, strict=True))
        }

    def domain_class(self, level: TopologyLevel, domain: int) -> SubgroupClass:
        """The class of a whole domain: of an S1 or a node its own, of a wider domain the highest under it."""
        first, last = self.level(level).rows(domain)
        return SubgroupClass(int(self.class_of_row[first:last].max()))


def build_tree(inventories: Iterable[ClusterInventory]) -> Tree:
    """The tree of every cluster that answered; the order of clusters and of rows does not matter.

    Raises ``InventoryError`` when a table contradicts itself.
    """
    ordered = sorted(inventories, key=lambda item: item.cluster)
    names: list[str] = []
    types: list[str] = []
    gpus: list[int] = []
    masks: list[int] = []
    paths: dict[TopologyLevel, list[int]] = {level: [] for level in LEVELS}
    labels: dict[TopologyLevel, list[tuple[str, str]]] = {level: [] for level in LEVELS}
    vdcs: dict[str, str] = {}
    for inventory in ordered:
        check_columns(inventory.cluster, inventory.nodes)
        columns = inventory.nodes
        if columns.nodes:
            vdcs[inventory.cluster] = columns.vdcs[0]
        previous: tuple[str, str] | None = None
        keys = sorted(zip(columns.s2s, columns.s1s, columns.nodes, range(len(columns.nodes)), strict=True))
        for s2, s1, node, index in keys:
            if previous is None:
                labels[TopologyLevel.CLUSTER].append((inventory.cluster, inventory.cluster))
            if previous is None or previous[0] != s2:
                labels[TopologyLevel.S2].append((s2, inventory.cluster))
            if previous != (s2, s1):
                labels[TopologyLevel.S1].append((s1, inventory.cluster))
            labels[TopologyLevel.NODE].append((node, inventory.cluster))
            for level in LEVELS:
                paths[level].append(len(labels[level]) - 1)
            previous = (s2, s1)
            names.append(node)
            types.append(columns.gpu_types[index])
            gpus.append(columns.gpus[index])
            masks.append(columns.free_gpu_masks[index])
    type_names = tuple(sorted(set(types)))
    type_ids = {name: number for number, name in enumerate(type_names)}
    type_of_row = np.array([type_ids[name] for name in types], dtype=np.int64)
    levels = {level: _domain_level(level, paths[level], labels[level]) for level in LEVELS}
    return Tree(
        node_names=tuple(names),
        gpu_types=type_names,
        type_of_row=type_of_row,
        gpus=np.array(gpus, dtype=np.int64),
        free_masks=np.array(masks, dtype=np.uint64),
        levels=levels,
        vdc_of_cluster=vdcs,
        class_of_row=_classes(type_of_row, levels[TopologyLevel.S1], levels[TopologyLevel.S2]),
    )


def check_columns(cluster: str, columns: NodeColumns) -> None:
    """Raises ``InventoryError`` when ``columns`` contradict themselves or exceed the bits of a mask."""
    count = len(columns.nodes)
    for name in ("vdcs", "s2s", "s1s", "gpu_types", "gpus", "free_gpu_masks"):
        length = len(getattr(columns, name))
        if length != count:
            raise InventoryError(f"cluster {cluster}: column {name} has {length} rows, column nodes {count}")
    if len(set(columns.nodes)) != count:
        seen: set[str] = set()
        twice = next(node for node in columns.nodes if node in seen or seen.add(node))  # type: ignore[func-returns-value]
        raise InventoryError(f"cluster {cluster}: node {twice!r} is listed twice")
    if len(set(columns.vdcs)) > 1:
        raise InventoryError(f"cluster {cluster}: nodes name several VDCs: {', '.join(sorted(set(columns.vdcs)))}")
    if not all(columns.nodes):
        raise InventoryError(f"cluster {cluster}: column nodes has an empty entry in row {columns.nodes.index('')}")
    rows = zip(columns.nodes, columns.gpu_types, columns.gpus, columns.free_gpu_masks, strict=True)
    for row, (node, gpu_type, gpus, mask) in enumerate(rows):
        # The GPU type of given servers may not be known; then nothing can be placed beside them.
        if mask and not gpu_type:
            raise InventoryError(f"cluster {cluster}: column gpu_types has an empty entry in row {row}, with free GPUs")
        if not 0 <= gpus <= MAX_GPUS_PER_NODE:
            raise InventoryError(f"cluster {cluster}: node {node} has {gpus} GPUs; 0 to {MAX_GPUS_PER_NODE} are known")
        if mask >> gpus:
            raise InventoryError(f"cluster {cluster}: node {node} has {gpus} GPUs but its free mask is {mask:#x}")


def _domain_level(level: TopologyLevel, path: Sequence[int], labels: Sequence[tuple[str, str]]) -> DomainLevel:
    of_row = np.array(path, dtype=np.int64)
    starts = np.searchsorted(of_row, np.arange(len(labels) + 1)).astype(np.int64)
    return DomainLevel(
        level=level,
        starts=starts,
        of_row=of_row,
        names=tuple(name for name, _ in labels),
        clusters=tuple(cluster for _, cluster in labels),
    )


def _classes(type_of_row: IntArray, s1: DomainLevel, s2: DomainLevel) -> IntArray:
    """HIGH under a mixed S1; else MEDIUM under a mixed S2; else LOW (HeteroScale 3.4, three priority tiers)."""
    if not len(type_of_row):
        return np.zeros(0, dtype=np.int64)
    mixed_s1 = _mixed(type_of_row, s1)[s1.of_row]
    mixed_s2 = _mixed(type_of_row, s2)[s2.of_row]
    return np.where(
        mixed_s1, int(SubgroupClass.HIGH), np.where(mixed_s2, int(SubgroupClass.MEDIUM), int(SubgroupClass.LOW))
    ).astype(np.int64)


def _mixed(type_of_row: IntArray, level: DomainLevel) -> npt.NDArray[np.bool_]:
    first = level.starts[:-1]
    mixed: npt.NDArray[np.bool_] = np.minimum.reduceat(type_of_row, first) != np.maximum.reduceat(type_of_row, first)
    return mixed
