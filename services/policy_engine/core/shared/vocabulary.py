"""Closed enums of decisions: rules, clamps, kinds, regions. Append-only: they are metric labels and a contract."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimtab.domain.member import MemberKey as MemberKey


class DecisionKind(StrEnum):
    """What a decision changes."""

    SCALE = "SCALE"
    TRANSITION = "TRANSITION"
    POOL_BIRTH = "POOL_BIRTH"
    HOLD = "HOLD"


class Rule(StrEnum):
    """The rule that fired."""

    PROPORTIONAL_OUT = "PROPORTIONAL_OUT"
    PROPORTIONAL_IN = "PROPORTIONAL_IN"
    LATENCY_FLOOR = "LATENCY_FLOOR"
    BOUNDS = "BOUNDS"
    RATIO_REPAIR = "RATIO_REPAIR"
    FROM_ZERO = "FROM_ZERO"
    RESCUE_CRITICAL = "RESCUE_CRITICAL"
    RESCUE_HARD_GUARD = "RESCUE_HARD_GUARD"
    RESCUE_LOST_CAPACITY = "RESCUE_LOST_CAPACITY"
    IDLE_GPU = "IDLE_GPU"
    REBALANCE = "REBALANCE"
    FLOOR_REPAIR = "FLOOR_REPAIR"
    INITIAL = "INITIAL"
    HOLD = "HOLD"
    OPERATOR = "OPERATOR"
    RESCUE_LOAD = "RESCUE_LOAD"
    LEVEL_LOAD = "LEVEL_LOAD"
    LEVEL_LATENCY = "LEVEL_LATENCY"


VOLUNTARY = frozenset({Rule.REBALANCE, Rule.LEVEL_LOAD, Rule.LEVEL_LATENCY})
"""Rules that take from a donor while no rescue needs it: their transitions give way to a rescue's."""


class ClampKind(StrEnum):
    """What changed, or forbade, the number that a rule wanted."""

    MIN_REPLICAS = "MIN_REPLICAS"
    MAX_REPLICAS = "MAX_REPLICAS"
    SCALE_OUT_COOLING = "SCALE_OUT_COOLING"
    SCALE_IN_COOLING = "SCALE_IN_COOLING"
    STABILIZATION = "STABILIZATION"
    MAX_STEP = "MAX_STEP"
    TOLERANCE = "TOLERANCE"
    LATENCY_BRAKE = "LATENCY_BRAKE"
    RATIO = "RATIO"
    SIGNAL_QUALITY = "SIGNAL_QUALITY"
    PENDING_REPLICAS = "PENDING_REPLICAS"
    PAUSED = "PAUSED"
    UNREACHABLE = "UNREACHABLE"
    BUDGET_UNKNOWN = "BUDGET_UNKNOWN"
    STAGE_GUARD = "STAGE_GUARD"


class Region(StrEnum):
    """The region of a service's Z."""

    CRITICAL = "CRITICAL"
    NOMINAL = "NOMINAL"
    SURPLUS = "SURPLUS"


@dataclass(frozen=True, slots=True)
class Clamp:
    """A number that a rule wanted (`before`) and what was made of it (`after`), in the rule's own unit."""

    kind: ClampKind
    before: float
    after: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A receiver and a source that the arbiter looked at; `donor` is empty for idle GPUs."""

    receiver: str
    donor: str
    taken: bool
    reason: str
