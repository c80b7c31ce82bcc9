"""Packs the replicas of a group into the nodes of one domain, all or none.

Best fit: low classes first, then the node with the fewest free GPUs that still takes a replica, then the tree's
order. Where the sizes of the roles divide one another and the roles allow the same types, the largest size first is
exact: it finds a packing when there is one. Otherwise every order of the roles is tried, which may miss a packing
that an exact search would find; it never makes a wrong one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from prescheduler.core.capacity import Capacity
from prescheduler.core.model import ROLE_ORDER
from prescheduler.core.tree import IntArray
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import Role, TopologyLevel


@dataclass(frozen=True, kw_only=True)
class Need:
    """So many new replicas of a role. ``types`` are the tree's type numbers, in ``tiers`` of equal preference."""

    role: Role
    count: int
    gpus: int
    tiers: tuple[tuple[int, ...], ...]

    @property
    def types(self) -> tuple[int, ...]:
        """Every allowed type."""
        return tuple(number for tier in self.tiers for number in tier)

    @property
    def total_gpus(self) -> int:
        """GPUs of all its replicas."""
        return self.count * self.gpus


@dataclass(frozen=True)
class Share:
    """``count`` replicas of a role on the node of one row."""

    role: Role
    row: int
    count: int
    gpus: int


class _Scratch:
    """Free GPUs of a range of rows while one packing is tried."""

    def __init__(self, capacity: Capacity, rows: tuple[int, int], max_class: SubgroupClass) -> None:
        first, last = rows
        self._first = first
        self._types = capacity.tree.type_of_row[first:last]
        self._classes = capacity.tree.class_of_row[first:last]
        self._free = np.where(self._classes <= int(max_class), capacity.free[first:last], 0)
        self.shares: list[Share] = []

    def fill(self, need: Need, rows: tuple[int, int] | None = None) -> bool:
        """Place all replicas of ``need``, within ``rows`` when given; False leaves the scratch unusable."""
        left = need.count
        for tier in need.tiers:
            if left == 0:
                break
            left = self._fill_tier(need, tier, left, rows)
        return left == 0

    def _fill_tier(self, need: Need, tier: tuple[int, ...], left: int, rows: tuple[int, int] | None) -> int:
        fits = self._free >= need.gpus
        fits &= self._types == tier[0] if len(tier) == 1 else np.isin(self._types, tier)
        if rows is not None:
            fits[: rows[0] - self._first] = False
            fits[rows[1] - self._first :] = False
        found: IntArray = np.flatnonzero(fits)
        if not len(found):
            return left
        keys = (self._classes[found] * 128 + self._free[found]).astype(np.uint16)
        found = found[np.argsort(keys, kind="stable")]
        reach = np.cumsum(self._free[found] // need.gpus)
        used = found[: int(np.searchsorted(reach, left)) + 1]
        for index in used.tolist():
            count = min(left, int(self._free[index]) // need.gpus)
            self._free[index] -= count * need.gpus
            self.shares.append(Share(need.role, self._first + index, count, need.gpus))
            left -= count
        return left


def pack(
    capacity: Capacity,
    rows: tuple[int, int],
    max_class: SubgroupClass,
    needs: Sequence[Need],
    *,
    prefill_s1s: Iterable[int] | None = None,
) -> tuple[Share, ...] | None:
    """Where every replica of ``needs`` goes within ``rows`` on nodes up to ``max_class``; None when it does not fit.

    ``prefill_s1s``: for disaggregated MoE, the S1 domains one of which has to hold all attention and FFN replicas.
    """
    if prefill_s1s is None:
        return _pack_flat(capacity, rows, max_class, needs)
    coupled = [need for need in needs if need.role in (Role.PREFILL_ATTENTION, Role.PREFILL_FFN)]
    free = [need for need in needs if need not in coupled]
    for s1 in prefill_s1s:
        inner = capacity.tree.level(TopologyLevel.S1).rows(s1)
        for order in _orders(coupled):
            for outer in _orders(free):
                scratch = _Scratch(capacity, rows, max_class)
                if all(scratch.fill(need, inner) for need in order) and all(scratch.fill(need) for need in outer):
                    return tuple(scratch.shares)
    return None


def _pack_flat(
    capacity: Capacity, rows: tuple[int, int], max_class: SubgroupClass, needs: Sequence[Need]
) -> tuple[Share, ...] | None:
    for order in _orders(needs):
        scratch = _Scratch(capacity, rows, max_class)
        if all(scratch.fill(need) for need in order):
            return tuple(scratch.shares)
    return None


def _orders(needs: Sequence[Need]) -> list[tuple[Need, ...]]:
    """The orders to try: largest first, then, where types or sizes conflict, all others."""
    largest_first = tuple(sorted(needs, key=lambda need: (-need.gpus, len(need.types), ROLE_ORDER[need.role])))
    if len(needs) < 2 or _exact(largest_first):
        return [largest_first]
    return [largest_first, *(order for order in permutations(largest_first) if order != largest_first)]


def _exact(needs: Sequence[Need]) -> bool:
    same_types = len({frozenset(need.types) for need in needs}) == 1
    same_tiers = len({need.tiers for need in needs}) == 1
    divides = all(larger.gpus % smaller.gpus == 0 for larger, smaller in pairwise(needs))
    return same_types and same_tiers and divides
