"""Units: the one number that every stage before `coordinate` acts on, and its conversion to role counts.

A shape gives, for any roles, how many replicas of each belong together:

- a colocated service: one unit is one replica;
- a strict shape, such as the P/D ratio p:d: one unit is p prefill and d decode replicas;
- a plain one: one unit is one decode replica, and prefill = ceil(decode · p/d), likewise each of two prefill roles.

Role bounds become unit bounds here, so that nothing later can break a ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor

from trimtab.config.specs import ServicePolicySpec
from trimtab.domain.vocabulary import Role

RoleCounts = tuple[tuple[Role, int], ...]
"""Replicas by role, in the order of the policy's roles."""

_EPSILON = 1e-9


def ceil_units(value: float) -> int:
    """Round up, forgiving what floating point added to a whole number."""
    return max(0, ceil(value - _EPSILON * max(1.0, abs(value))))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShape:
    """How units turn into replicas of each role for one service.

    `parts` are the replicas of each role that belong together, in the order of the policy's roles. A `strict` unit is
    all of them. Else a unit is one replica of the role `lead`, and the others follow it, rounded up.
    """

    parts: Mapping[Role, int]
    lead: Role
    strict: bool = False

    def counts(self, units: int) -> RoleCounts:
        """Replicas of each role for `units` whole units."""
        return tuple((role, self._of(role, units)) for role in self.parts)

    def units_of(self, role: Role, replicas: float) -> float:
        """How many units `replicas` of one role amount to, before rounding."""
        if self.strict:
            return replicas / self.parts[role]
        return replicas if role == self.lead else replicas * self.parts[self.lead] / self.parts[role]

    def _of(self, role: Role, units: int) -> int:
        if self.strict:
            return units * self.parts[role]
        return units if role == self.lead else -(-units * self.parts[role] // self.parts[self.lead])

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
    """The unit shape of a service, led by its decode role; without a ratio every role has as many replicas."""
    roles = [item.role for item in spec.roles]
    parts = dict.fromkeys(roles, 1) if spec.ratio is None else {role: spec.ratio.parts[role] for role in roles}
    lead = Role.DECODE if Role.DECODE in parts else roles[0]
    return UnitShape(parts=parts, lead=lead, strict=spec.ratio is not None and spec.ratio.strict)


@dataclass(frozen=True, slots=True)
class UnitBounds:
    """Inclusive bounds in units. `minimum` is above `maximum` when no whole unit satisfies the roles' bounds."""

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
