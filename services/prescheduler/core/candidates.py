"""Candidates for new replicas: which domain, in which class, in an existing group or a new one.

A candidate is a domain of the request's affinity level, taken up to a class: its nodes of higher classes are left
alone. In order of preference (HeteroScale 3.4, step 4, least valuable resource first): lowest class; existing group;
fewest replicas on a less preferred GPU type; tightest fit; position in the tree. Domains that sums show to be too
small are dropped before anything is tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prescheduler.core.capacity import CLASSES, Capacity
from prescheduler.core.groups import GroupState
from prescheduler.core.packing import Need, Share, pack
from prescheduler.core.tree import IntArray
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.scaling import ScalingRequest
from trimtab.domain.vocabulary import Role, TopologyLevel

BoolArray = npt.NDArray[np.bool_]

_COUPLED = (Role.PREFILL_ATTENTION, Role.PREFILL_FFN)
_MAX_NARROW_TRIES = 4


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A domain, the group in it (None: a new one), and the nodes that take the new replicas."""

    level: TopologyLevel
    domain: int
    group: GroupState | None
    subgroup_class: SubgroupClass
    shares: tuple[Share, ...]


def fits_by_sums(
    capacity: Capacity, level: TopologyLevel, needs: Sequence[Need], domains: slice = slice(None)
) -> BoolArray:
    """Which domains can hold ``needs`` as far as sums tell, shape (3, domains): by class, cumulative.

    Necessary always; sufficient when all roles allow the same types and their sizes divide one another. Raises
    ValueError when no role needs anything.
    """
    ok: BoolArray | None = None
    for need in needs:
        inside = [other for other in needs if set(other.types) <= set(need.types)]
        demand = sum(other.total_gpus // need.gpus for other in inside if other.gpus % need.gpus == 0)
        fits = capacity.slots(level, need.gpus, need.types)[:, domains] >= demand
        if len(inside) > 1:
            fits &= capacity.slots(level, 1, need.types)[:, domains] >= sum(other.total_gpus for other in inside)
        ok = fits if ok is None else ok & fits
    if ok is None:
        raise ValueError("no role needs anything")
    return ok


def hosts_by_domain(
    capacity: Capacity, request: ScalingRequest, needs: Sequence[Need], groups: Sequence[GroupState]
) -> dict[int, GroupState]:
    """Domain of the affinity level → the service's group that lies wholly in it and would be whole with ``needs``."""
    hosts: dict[int, GroupState] = {}
    for group in groups:
        domain = group.domain(capacity.tree, request.bound_level)
        if not group.name or domain is None:
            continue
        if domain not in hosts or (not whole(request, needs, hosts[domain]) and whole(request, needs, group)):
            hosts[domain] = group
    return hosts


def whole(request: ScalingRequest, needs: Sequence[Need], group: GroupState | None) -> bool:
    """Whether a group would have every role of its service: prefill and decode of two groups never work together."""
    needed = {need.role for need in needs}
    return all(
        item.role in needed or (group is not None and group.count(item.role) > 0)
        for item in request.roles
        if item.replicas > 0
    )


class Search:
    """The search for one group of ``needs`` for one request."""

    def __init__(
        self, capacity: Capacity, request: ScalingRequest, needs: Sequence[Need], groups: Sequence[GroupState]
    ) -> None:
        self._capacity = capacity
        self._request = request
        self._needs = needs
        self._level = request.bound_level
        self._coupled = tuple(need for need in needs if need.role in _COUPLED)
        self._binds_s1 = request.is_moe and self._level is TopologyLevel.S2 and bool(self._coupled)
        self.hosts = hosts_by_domain(capacity, request, needs, groups)
        self.allowed = self._allowed_domains(groups)

    def best(self) -> Candidate | None:
        """The best candidate, or None when there is none."""
        ok = fits_by_sums(self._capacity, self._level, self._needs) & self.allowed
        if not ok[-1].any():
            return None
        if self._binds_s1:
            ok &= self._s1_fits()
        for class_index in range(CLASSES):
            domains = np.flatnonzero(ok[class_index])
            for domain in self._ranked(domains, class_index):
                shares = self._pack(domain, SubgroupClass(class_index + 1))
                if shares is not None:
                    return Candidate(
                        level=self._level,
                        domain=domain,
                        group=self.hosts.get(domain),
                        subgroup_class=SubgroupClass(class_index + 1),
                        shares=shares,
                    )
        return None

    def _allowed_domains(self, groups: Sequence[GroupState]) -> BoolArray:
        domains = self._capacity.tree.level(self._level)
        allowed = np.full(domains.count, whole(self._request, self._needs, None))
        for domain, group in self.hosts.items():
            allowed[domain] = whole(self._request, self._needs, group)
        return allowed

    def _ranked(self, domains: IntArray, class_index: int) -> Iterator[int]:
        if not len(domains):
            return iter(())
        new = np.ones(len(domains), dtype=np.int64)
        for domain in self.hosts:
            new[domains == domain] = 0
        keys = (domains, self._leftover(self._level, class_index)[domains], self._detours(domains, class_index), new)
        ranked: list[int] = domains[np.lexsort(keys)].tolist()
        return iter(ranked)

    def _leftover(self, level: TopologyLevel, class_index: int, domains: slice = slice(None)) -> IntArray:
        """Free GPUs of the allowed types that would be left: the fewer, the tighter the fit."""
        types = sorted({number for need in self._needs for number in need.types})
        free: IntArray = self._capacity.slots(level, 1, types)[class_index, domains]
        return free - sum(need.total_gpus for need in self._needs)

    def _detours(self, domains: IntArray, class_index: int) -> IntArray:
        """Replicas that a domain would put on a less preferred type, counted once for each preference missed."""
        cost = np.zeros(len(domains), dtype=np.int64)
        for need in self._needs:
            reach = np.zeros(len(domains), dtype=np.int64)
            for tier in need.tiers[:-1]:
                reach += self._capacity.slots(self._level, need.gpus, tier)[class_index, domains]
                cost += np.maximum(0, need.count - reach)
        return cost

    def _pack(self, domain: int, max_class: SubgroupClass) -> tuple[Share, ...] | None:
        rows = self._capacity.tree.level(self._level).rows(domain)
        if self._binds_s1:
            options = self._s1_options(domain, max_class)
            return pack(self._capacity, rows, max_class, self._needs, prefill_s1s=options)
        shares = self._pack_narrower(domain, rows, max_class)
        return shares if shares is not None else pack(self._capacity, rows, max_class, self._needs)

    def _pack_narrower(self, domain: int, rows: tuple[int, int], max_class: SubgroupClass) -> tuple[Share, ...] | None:
        """A wide limit is no reason to scatter: take the narrowest switch that holds all, where the group is if it can.

        Also keeps the packing itself small in wide domains.
        """
        group = self.hosts.get(domain)
        for level in (TopologyLevel.S1, TopologyLevel.S2):
            if level is self._level or self._level is TopologyLevel.NODE:
                return None
            inner = self._capacity.tree.level(level)
            first, last = int(inner.of_row[rows[0]]), int(inner.of_row[rows[1] - 1]) + 1
            part = slice(first, last)
            found = np.flatnonzero(fits_by_sums(self._capacity, level, self._needs, part)[int(max_class) - 1])
            if not len(found):
                continue
            leftover = self._leftover(level, int(max_class) - 1, part)[found]
            home = {int(inner.of_row[row]) for row in group.all_rows} if group is not None else set()
            away = np.array([first + int(item) not in home for item in found], dtype=np.int64)
            for item in found[np.lexsort((found, leftover, away))][:_MAX_NARROW_TRIES].tolist():
                shares = pack(self._capacity, inner.rows(first + item), max_class, self._needs)
                if shares is not None:
                    return shares
        return None

    def _s1_fits(self) -> BoolArray:
        """For MoE: which S2s have an S1 that holds the attention and FFN replicas, as far as sums tell."""
        tree = self._capacity.tree
        s1, s2 = tree.level(TopologyLevel.S1), tree.level(TopologyLevel.S2)
        inner = fits_by_sums(self._capacity, TopologyLevel.S1, self._coupled)
        first_s1 = s1.of_row[s2.starts[:-1]]
        found: BoolArray = np.logical_or.reduceat(inner, first_s1, axis=1)
        return found

    def _s1_options(self, domain: int, max_class: SubgroupClass) -> list[int]:
        """S1s of an S2 for attention and FFN, tightest first; those of an existing group stay where they are."""
        tree = self._capacity.tree
        s1 = tree.level(TopologyLevel.S1)
        rows = tree.level(TopologyLevel.S2).rows(domain)
        first, last = int(s1.of_row[rows[0]]), int(s1.of_row[rows[1] - 1]) + 1
        fits = fits_by_sums(self._capacity, TopologyLevel.S1, self._coupled, slice(first, last))[int(max_class) - 1]
        found = np.flatnonzero(fits)
        leftover = self._leftover(TopologyLevel.S1, int(max_class) - 1, slice(first, last))[found]
        options = [first + int(item) for item in found[np.lexsort((found, leftover))]]
        group = self.hosts.get(domain)
        home = {int(s1.of_row[row]) for role in _COUPLED for row in (group.rows.get(role, ()) if group else ())}
        return [option for option in options if option in home] if home else options
