"""Units: the one number that every stage before `coordinate` acts on, and its exchange with role counts.

- a colocated service: one unit is one replica;
- a strict P/D ratio p:d: one unit is p prefill and d decode replicas;
- a plain P/D ratio: one unit is one decode replica, and prefill = ceil(decode · p/d).

Role bounds become unit bounds here, so that nothing later can break a ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from trimtab.config.specs import Ratio, ServicePolicySpec
from trimtab.words import Role

RoleCounts = tuple[tuple[Role, int], ...]
"""Replicas by role, in the order of the policy's roles."""

_EPSILON = 1e-9


def ceil_units(value: float) -> int:
    """Round up, forgiving what floating point added to a whole number."""
    return max(0, ceil(value - _EPSILON * max(1.0, abs(value))))


@dataclass(frozen=True, slots=True)
class UnitShape:
    """How units turn into replicas of `roles` for one service."""

    roles: tuple[Role, ...]
    ratio: Ratio | None

    def counts(self, units: int) -> RoleCounts:
        """Replicas of each role for `units` whole units."""
        return tuple((role, self._of(role, units)) for role in self.roles)

    def units_of(self, role: Role, replicas: float) -> float:
        """How many units `replicas` of one role amount to, before rounding."""
        if self.ratio is None:
            return replicas
        if self.ratio.strict:
            return replicas / (self.ratio.prefill if role == Role.PREFILL else self.ratio.decode)
        return replicas if role == Role.DECODE else replicas * self.ratio.decode / self.ratio.prefill

    def _of(self, role: Role, units: int) -> int:
        if self.ratio is None:
            return units
        if self.ratio.strict:
            return units * (self.ratio.prefill if role == Role.PREFILL else self.ratio.decode)
        if role == Role.DECODE:
            return units
        return -(-units * self.ratio.prefill // self.ratio.decode)

    def least_units(self, role: Role, replicas: int) -> int:
        """The fewest units with at least `replicas` of `role`."""
        units = floor(self.units_of(role, max(0, replicas - 1)))
        while self._of(role, units) < replicas:
            units += 1
        return units

    def most_units(self, role: Role, replicas: int) -> int:
        """The most units with at most `replicas` of `role`."""
        units = ceil(self.units_of(role, replicas + 1))
        while units > 0 and self._of(role, units) > replicas:
            units -= 1
        return units


def shape_of(spec: ServicePolicySpec) -> UnitShape:
    """The unit shape of a scaled service."""
    return UnitShape(roles=tuple(item.role for item in spec.roles), ratio=spec.ratio)


@dataclass(frozen=True, slots=True)
class UnitBounds:
    """Inclusive bounds in units. `minimum` above `maximum` says that no whole unit satisfies the roles' bounds."""

    minimum: int
    maximum: int

    @property
    def empty(self) -> bool:
        """Whether no count of units satisfies the bounds of every role."""
        return self.minimum > self.maximum


def unit_bounds(spec: ServicePolicySpec) -> UnitBounds:
    """The bounds of every role, as bounds on units."""
    shape = shape_of(spec)
    return UnitBounds(
        minimum=max(shape.least_units(item.role, item.min_replicas) for item in spec.roles),
        maximum=min(shape.most_units(item.role, item.max_replicas) for item in spec.roles),
    )
