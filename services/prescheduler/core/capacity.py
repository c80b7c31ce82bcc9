"""What is still free in a cycle: GPU masks per node and slot tables per level.

A slot is room for one replica: a node with f free GPUs has ⌊f / g⌋ slots for replicas of g GPUs. A table holds, for
one level and one g, the slots of every domain by GPU type and by class (cumulative: all nodes of that class or a
lower one). Taking a node changes one column of each table, so that a request is judged by sums over domains and
hopeless domains cost nothing (case 27). With g = 1 a table counts free GPUs.
"""

from collections.abc import Sequence

import numpy as np

from prescheduler.core.tree import IntArray, Tree
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import TopologyLevel

CLASSES = len(SubgroupClass)


class Capacity:
    """What is still free in one cycle; its only mutable state. GPUs are taken and never returned within a cycle."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.masks = tree.free_masks.copy()
        self.free: IntArray = np.bitwise_count(self.masks).astype(np.int64)
        self._tables: dict[tuple[TopologyLevel, int], IntArray] = {}

    def slots(self, level: TopologyLevel, gpus_per_replica: int, types: Sequence[int]) -> IntArray:
        """Slots by class and domain, shape (3, domains): row c counts nodes of class c + 1 and lower."""
        table = self._table(level, gpus_per_replica)
        if len(types) == 1:
            row: IntArray = table[:, types[0], :]
            return row
        total: IntArray = table[:, list(types), :].sum(axis=1)
        return total

    def free_gpus(self, types: Sequence[int] | None = None) -> int:
        """Free GPUs of all nodes, or of those of some types."""
        if types is None:
            return int(self.free.sum())
        return int(self.free[np.isin(self.tree.type_of_row, list(types))].sum())

    def take(self, row: int, gpus: int) -> tuple[int, ...]:
        """Take ``gpus`` GPUs of a node, lowest indices first, and return the indices.

        Raises ValueError for fewer free ones.
        """
        mask = int(self.masks[row])
        taken: list[int] = []
        while len(taken) < gpus:
            if not mask:
                raise ValueError(f"node row {row} has no {gpus} free GPUs")
            lowest = mask & -mask
            taken.append(lowest.bit_length() - 1)
            mask ^= lowest
        before = int(self.free[row])
        self.masks[row] = mask
        self.free[row] = before - gpus
        gpu_type = int(self.tree.type_of_row[row])
        first_class = int(self.tree.class_of_row[row]) - 1
        for (level, size), table in self._tables.items():
            lost = before // size - (before - gpus) // size
            if lost:
                table[first_class:, gpu_type, self.tree.level(level).of_row[row]] -= lost
        return tuple(taken)

    def _table(self, level: TopologyLevel, gpus_per_replica: int) -> IntArray:
        key = (level, gpus_per_replica)
        table = self._tables.get(key)
        if table is None:
            tree, domains = self.tree, self.tree.level(level)
            types = len(tree.gpu_types)
            cell = ((tree.class_of_row - 1) * types + tree.type_of_row) * domains.count + domains.of_row
            size = CLASSES * types * domains.count
            counts = np.bincount(cell, weights=self.free // gpus_per_replica, minlength=size)
            table = counts.astype(np.int64).reshape(CLASSES, types, domains.count).cumsum(axis=0)
            self._tables[key] = table
        return table
