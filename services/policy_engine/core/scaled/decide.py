"""The pipeline of a scaled service: observe → recommend → stabilise → bound → coordinate → decide.

All stages before `coordinate` act on one number, units. The result is absolute: the counts that the service should
have, not a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policy_engine.core.scaled.recommend import (
    Demand,
    Recommendation,
    demand_of,
    metric_role,
    proportional_units,
    with_brake,
)
from policy_engine.core.scaled.stabilise import History, bound, remember, stabilise
from policy_engine.core.scaled.units import RoleCounts, UnitBounds, UnitShape, ceil_units, shape_of, unit_bounds
from policy_engine.core.shared.draft import CountChange, Draft, HoldNotes, NamedSignal, named_signals, note_clamps
from policy_engine.core.shared.vocabulary import Clamp, ClampKind, DecisionKind, Rule
from trimtab.config.resources import ServicePolicy
from trimtab.config.specs import PolicyKind, Proportional
from trimtab.domain.role_signals import FrontDoor, RoleSignals, fresh_front_door, fresh_role
from trimtab.domain.vocabulary import Role


@dataclass(frozen=True, slots=True)
class RoleReplicas:
    """Replicas of one role as the actuators list them. `existing` leaves out those that are terminating."""

    role: Role
    ready: int
    existing: int


@dataclass(frozen=True, slots=True)
class ScaledState:
    """What a scaled service's next decision rests on beside its signals; kept in the store.

    `desired` is None before the first decision.
    """

    desired: RoleCounts | None = None
    history: History = field(default_factory=History)
    queued: float | None = None
    queued_at_s: float | None = None
    notes: HoldNotes = ()


@dataclass(frozen=True, slots=True)
class ScaledInput:
    """One tick's input, whole: a decision is computed again from it, bit for bit."""

    now_s: float
    policy: ServicePolicy
    views: tuple[RoleSignals, ...]
    front: FrontDoor
    replicas: tuple[RoleReplicas, ...]
    state: ScaledState
    # Why the service must hold (an actuator that does not answer); empty when it need not.
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class ScaledResult:
    """The next state (with the desired counts), the draft of a decision, and why the service holds.

    `draft` is None when nothing is recorded.
    """

    state: ScaledState
    draft: Draft | None
    holding: str = ""


@dataclass(frozen=True, slots=True)
class _Tick:
    """What `observe` made of the input."""

    proportional: Proportional
    shape: UnitShape
    bounds: UnitBounds
    desired: RoleCounts
    base_units: int
    ready_units: float
    views: tuple[RoleSignals, ...]
    front: FrontDoor
    demand: Demand


def decide_scaled(given: ScaledInput) -> ScaledResult:
    """One tick of one scaled service."""
    if given.policy.spec.kind != PolicyKind.SCALED:
        return ScaledResult(given.state, None, "no proportional policy and in no pool")
    if given.state.desired is None:
        return _initial(given)
    tick = _observe(given, given.state.desired)
    if given.policy.metadata.paused or given.unreachable:
        return _held(given, tick)
    recommendation, history = _recommend(given, tick)
    stable, clamps = stabilise(
        recommendation,
        proportional=tick.proportional,
        history=history,
        base_units=tick.base_units,
        now_s=given.now_s,
    )
    units, bound_clamps = bound(stable, tick.bounds)
    rule = _rule(recommendation.rule, tick.base_units, stable, units)
    all_clamps = (*recommendation.clamps, *clamps, *bound_clamps)
    return _coordinate(given, tick, units, rule, all_clamps, history, recommendation)


def _rule(recommended: Rule, base: int, stable: int, bounded: int) -> Rule:
    """Bounds are the rule only where they alone move the count, not where they shorten a step."""
    if bounded == base:
        return Rule.HOLD
    return recommended if (stable > base) == (bounded > base) and stable != base else Rule.BOUNDS


def _observe(given: ScaledInput, desired: RoleCounts) -> _Tick:
    spec = given.policy.spec
    shape = shape_of(spec)
    views = tuple(fresh_role(view, now_s=given.now_s, staleness_s=spec.staleness_s) for view in given.views)
    front = fresh_front_door(given.front, now_s=given.now_s, staleness_s=spec.staleness_s)
    ready = {item.role: item.ready for item in given.replicas}
    return _Tick(
        proportional=spec.scaling,
        shape=shape,
        bounds=unit_bounds(spec),
        desired=desired,
        base_units=ceil_units(shape.units_of(shape.lead, dict(desired).get(shape.lead, 0))),
        ready_units=shape.units_of(shape.lead, ready.get(shape.lead, 0)),
        views=views,
        front=front,
        demand=demand_of(views, front),
    )


def _view(tick: _Tick, role: Role) -> RoleSignals:
    return next((view for view in tick.views if view.role == role), RoleSignals(role=role))


def _recommend(given: ScaledInput, tick: _Tick) -> tuple[Recommendation, History]:
    spec = given.policy.spec
    recommendation = proportional_units(
        spec=spec,
        proportional=tick.proportional,
        shape=tick.shape,
        base_units=tick.base_units,
        ready_units=tick.ready_units,
        view=_view(tick, metric_role(spec, tick.proportional)),
        front=tick.front,
        demand=tick.demand,
        previous_queued=given.state.queued,
        floor_units=tick.bounds.minimum,
    )
    pending = tick.base_units - tick.ready_units
    if pending > 0 and recommendation.expected_units is not None and recommendation.expected_units > tick.ready_units:
        detail = f"{pending:g} units are on their way and count"
        clamp = Clamp(ClampKind.PENDING_REPLICAS, tick.ready_units, float(tick.base_units), detail)
        recommendation = replace(recommendation, clamps=(*recommendation.clamps, clamp))
    if spec.latency_brake is not None:
        recommendation = with_brake(
            recommendation,
            brake=spec.latency_brake,
            views=tick.views,
            demand=tick.demand,
            ready_units=tick.ready_units,
            base_units=tick.base_units,
        )
    if not recommendation.fit and not recommendation.brake_presses:
        return recommendation, given.state.history
    history = remember(
        given.state.history,
        now_s=given.now_s,
        units=recommendation.units,
        base_units=tick.base_units,
        window_s=tick.proportional.stabilization_window_s,
        max_gap_s=spec.staleness_s,
    )
    return recommendation, history


def _coordinate(
    given: ScaledInput,
    tick: _Tick,
    units: int,
    rule: Rule,
    clamps: tuple[Clamp, ...],
    history: History,
    recommendation: Recommendation,
) -> ScaledResult:
    """Units → counts, and the record."""
    counts = tick.shape.counts(units)
    if units == tick.base_units and counts != tick.desired:
        counts, rule, clamps = _repair(tick, counts, clamps, fit=recommendation.fit_for_in)
    if units > tick.base_units:
        history = replace(history, last_out_s=given.now_s)
    elif units < tick.base_units:
        history = replace(history, last_in_s=given.now_s)
    notes, new_clamps = note_clamps(given.state.notes, clamps, given.now_s)
    state = _next_state(given, tick, desired=counts, history=history, notes=notes)
    if counts != tick.desired:
        reason = _reason(given, tick, rule, units, recommendation)
        draft = _draft(given, tick, DecisionKind.SCALE, rule, reason, clamps, counts)
    elif new_clamps:
        clamp = new_clamps[0]
        reason = f"stays at {_words(tick.desired)}: {_clamp_words(clamp)}"
        draft = _draft(given, tick, DecisionKind.HOLD, Rule.HOLD, reason, clamps, counts)
    else:
        draft = None
    unread = () if recommendation.fit else recommendation.clamps
    quality = (clamp for clamp in clamps if clamp.kind == ClampKind.SIGNAL_QUALITY)
    holding = next((clamp.detail for clamp in (*quality, *unread)), "")
    return ScaledResult(state, draft, holding)


def _repair(
    tick: _Tick, counts: RoleCounts, clamps: tuple[Clamp, ...], *, fit: bool
) -> tuple[RoleCounts, Rule, tuple[Clamp, ...]]:
    """Bring counts that are off the ratio back to it; one that would shrink a role waits for a signal fit for that."""
    before = dict(tick.desired)
    shrinking = [role for role, count in counts if count < before.get(role, 0)]
    if shrinking and not fit:
        role = shrinking[0]
        detail = f"{role.value} is above the ratio; the signal is not fit for scale-in"
        clamp = Clamp(ClampKind.RATIO, float(dict(counts)[role]), float(before[role]), detail)
        return tick.desired, Rule.HOLD, (*clamps, clamp)
    changed = next(role for role, count in counts if count != before.get(role, 0))
    clamp = Clamp(ClampKind.RATIO, float(before.get(changed, 0)), float(dict(counts)[changed]), changed.value)
    return counts, Rule.RATIO_REPAIR, (*clamps, clamp)


def _initial(given: ScaledInput) -> ScaledResult:
    """The first desired state: what exists, so that a lost store changes no count; else the floors."""
    if given.unreachable:
        return ScaledResult(given.state, None, given.unreachable)
    spec = given.policy.spec
    existing = {item.role: item.existing for item in given.replicas}
    adopted: RoleCounts = tuple((item.role, existing.get(item.role, 0)) for item in spec.roles)
    if any(count for _, count in adopted):
        counts, reason = adopted, f"takes over {_words(adopted)} that exist already"
    else:
        counts = shape_of(spec).counts(unit_bounds(spec).minimum)
        reason = f"starts with {_words(counts)}, the floor"
    draft = Draft(
        kind=DecisionKind.SCALE,
        subject=given.policy.name,
        rule=Rule.INITIAL,
        reason=reason,
        counts=tuple(CountChange(given.policy.name, role, existing.get(role, 0), count) for role, count in counts),
    )
    return ScaledResult(replace(given.state, desired=counts), draft)


def _held(given: ScaledInput, tick: _Tick) -> ScaledResult:
    kind = ClampKind.PAUSED if given.policy.metadata.paused else ClampKind.UNREACHABLE
    detail = "paused by an operator" if kind == ClampKind.PAUSED else given.unreachable
    clamp = Clamp(kind, float(tick.base_units), float(tick.base_units), detail)
    notes, new_clamps = note_clamps(given.state.notes, (clamp,), given.now_s)
    state = replace(given.state, notes=notes)
    reason = f"stays at {_words(tick.desired)}: {_clamp_words(clamp)}"
    draft = _draft(given, tick, DecisionKind.HOLD, Rule.HOLD, reason, (clamp,), tick.desired) if new_clamps else None
    return ScaledResult(state, draft, detail)


def _next_state(
    given: ScaledInput, tick: _Tick, *, desired: RoleCounts, history: History, notes: HoldNotes
) -> ScaledState:
    """The next state. `queued` is updated once per window: two ticks on one window are no sign of a steady queue."""
    window_s = max((view.window_end_s or 0.0 for view in tick.views), default=0.0)
    if given.state.queued_at_s is not None and window_s <= given.state.queued_at_s:
        return replace(given.state, desired=desired, history=history, notes=notes)
    return ScaledState(desired=desired, history=history, queued=tick.demand.queued, queued_at_s=window_s, notes=notes)


def _draft(
    given: ScaledInput,
    tick: _Tick,
    kind: DecisionKind,
    rule: Rule,
    reason: str,
    clamps: tuple[Clamp, ...],
    counts: RoleCounts,
) -> Draft:
    before = dict(tick.desired)
    name = given.policy.name
    return Draft(
        kind=kind,
        subject=name,
        rule=rule,
        reason=reason,
        inputs=_inputs(name, tick),
        clamps=clamps,
        counts=tuple(CountChange(name, role, before.get(role, 0), count) for role, count in counts),
    )


_INPUTS = ("decode_tps", "prefill_tps", "running", "waiting", "ttft_p95_s", "tbt_p95_s")
"""The signals of a role that a scaled service's decision records show."""


def _inputs(name: str, tick: _Tick) -> tuple[NamedSignal, ...]:
    found: list[NamedSignal] = []
    for view in tick.views:
        label = name if view.role == Role.COLOCATED else f"{name}/{view.role.value}"
        found += named_signals(label, _INPUTS, view, tick.front)
    found.append(NamedSignal(f"{name} held", "requests", tick.front.held))
    return tuple(found)


def _words(counts: RoleCounts) -> str:
    return " + ".join(f"{count} {role.value}" for role, count in counts)


def _clamp_words(clamp: Clamp) -> str:
    return clamp.kind.value.lower().replace("_", " ") + (f", {clamp.detail}" if clamp.detail else "")


def _reason(given: ScaledInput, tick: _Tick, rule: Rule, units: int, recommendation: Recommendation) -> str:
    target = tick.shape.counts(units)
    change = f"{_words(tick.desired)} → {_words(target)}"
    if rule in (Rule.PROPORTIONAL_OUT, Rule.PROPORTIONAL_IN) and recommendation.expected_units is not None:
        metric = tick.proportional.metric
        return (
            f"{metric} asks for {recommendation.expected_units:.2f} units at "
            f"{tick.proportional.target_per_replica:g} tokens/s a replica, {tick.base_units} are asked for: {change}"
        )
    if rule == Rule.FROM_ZERO:
        return f"{tick.demand.running + tick.demand.queued:.0f} requests and no replica: {change}"
    if rule == Rule.LATENCY_FLOOR:
        clamp = next(item for item in reversed(recommendation.clamps) if item.kind == ClampKind.LATENCY_BRAKE)
        return f"{clamp.detail}: {change}"
    if rule == Rule.BOUNDS:
        return f"the policy allows {tick.bounds.minimum} to {tick.bounds.maximum} units: {change}"
    if rule == Rule.RATIO_REPAIR:
        return f"back to the ratio: {change}"
    return change
