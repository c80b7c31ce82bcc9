"""The tree as rows for people: one per domain, with GPUs by type."""

from dataclasses import dataclass

import numpy as np

from prescheduler.core.model import LEVELS
from prescheduler.core.tree import Tree
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import TopologyLevel


@dataclass(frozen=True, kw_only=True)
class DomainRow:
    """One domain. ``gpus``: type → (total, free), types in order of their names; types it lacks are left out."""

    name: str
    level: TopologyLevel
    parent: str
    cluster: str
    subgroup_class: SubgroupClass
    gpus: tuple[tuple[str, int, int], ...]
    nodes: int


def list_domains(tree: Tree, cluster: str = "") -> tuple[DomainRow, ...]:
    """Every domain, or those of one cluster: widest level first, then in the tree's order."""
    found: list[DomainRow] = []
    free = np.bitwise_count(tree.free_masks).astype(np.int64)
    types = len(tree.gpu_types)
    for position, level in reversed(list(enumerate(LEVELS))):
        domains = tree.level(level)
        cells = domains.of_row * types + tree.type_of_row
        shape = (domains.count, types)
        size = domains.count * types
        totals = np.bincount(cells, weights=tree.gpus, minlength=size).reshape(shape).astype(np.int64).tolist()
        frees = np.bincount(cells, weights=free, minlength=size).reshape(shape).astype(np.int64).tolist()
        nodes = np.diff(domains.starts).tolist()
        above = tree.level(LEVELS[position + 1]) if level is not TopologyLevel.CLUSTER else None
        for domain in range(domains.count):
            owner = domains.clusters[domain]
            if cluster not in ("", owner):
                continue
            first = int(domains.starts[domain])
            found.append(
                DomainRow(
                    name=domains.names[domain],
                    level=level,
                    parent=tree.vdc_of_cluster[owner] if above is None else above.names[int(above.of_row[first])],
                    cluster=owner,
                    subgroup_class=tree.domain_class(level, domain),
                    gpus=tuple(
                        (tree.gpu_types[number], totals[domain][number], frees[domain][number])
                        for number in range(types)
                        if totals[domain][number]
                    ),
                    nodes=nodes[domain],
                )
            )
    return tuple(found)
