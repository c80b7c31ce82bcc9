"""The units that follow from a scaled service's signals: proportional control and the latency brake.

Proportional control acts on a sum of tokens per second (HeteroScale, Algorithm 2): `expected = aggregate / target`,
where the aggregate also holds, while a queue does not shrink, the backlog's tokens over a drain horizon, since the
rate of tokens is capped by the capacity that it should size. The brake (Algorithm 3) turns latencies, which stay flat
and then jump, into floors of fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.scaled.units import UnitShape, ceil_units
from policy_engine.core.shared.vocabulary import Clamp, ClampKind, Rule
from trimtab.config.specs import LatencyBrake, Proportional, ServicePolicySpec
from trimtab.domain.measurement import Measurement, missing
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

SEVERE_FACTOR = 1.2
MODERATE_FACTOR = 1.1
DEMAND_EPSILON = 1e-6
# Roles that report the tokens of each metric.
_COUNTED: dict[str, tuple[Role, ...]] = {
    "decode-tps": (Role.COLOCATED, Role.DECODE),
    "prefill-tps": (Role.COLOCATED, Role.PREFILL, Role.PREFILL_ATTENTION),
}


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of one service, wherever they are: in its servers, or held by gateways."""

    running: float
    waiting: float
    held: float
    held_is_known: bool

    @property
    def queued(self) -> float:
        """Requests that wait, in servers and at the front door."""
        return self.waiting + self.held

    @property
    def any(self) -> bool:
        """Whether any request is running, queued or held."""
        return self.running + self.queued > DEMAND_EPSILON


def demand_of(views: tuple[RoleSignals, ...], front: FrontDoor) -> Demand:
    """The demand that was read. What could not be read adds nothing; `held_is_known`: gateways have reported."""
    return Demand(
        running=sum(view.running.number(0.0) for view in views),
        waiting=sum(view.waiting.number(0.0) for view in views),
        held=front.held.number(0.0),
        held_is_known=front.held.quality == Quality.OK,
    )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended units. `fit_for_in`: whether the signals may justify fewer than now.

    `fit` is False when the metric could not be read at all: such a tick is not remembered.
    """

    units: int
    rule: Rule
    expected_units: float | None
    fit: bool
    fit_for_in: bool
    brake_presses: bool = False
    clamps: tuple[Clamp, ...] = ()


def metric_role(spec: ServicePolicySpec, proportional: Proportional) -> Role:
    """The service's role whose tokens are counted. Raises ValueError when it has none."""
    counted = _COUNTED[proportional.metric]
    found = next((item.role for item in spec.roles if item.role in counted), None)
    if found is None:
        raise ValueError(f"{proportional.metric} needs one of the roles {', '.join(counted)}")
    return found


def metric_signal(proportional: Proportional, view: RoleSignals) -> Measurement:
    """The linear metric itself."""
    return view.decode_tps if proportional.metric == "decode-tps" else view.prefill_tps


def tokens_per_request(proportional: Proportional, view: RoleSignals, front: FrontDoor) -> float | None:
    """Mean tokens of the metric's kind per request: from what arrives, else from what finishes; None when unknown."""
    arriving = front.arrival_output_tps if proportional.metric == "decode-tps" else front.arrival_prompt_tps
    finished = (metric_signal(proportional, view), view.request_rps)
    pairs = (finished, (arriving, front.arrival_rps))
    for tokens, requests in pairs:
        if tokens.usable and requests.usable and requests.number(0.0) > 0 and tokens.number(0.0) > 0:
            return tokens.number(0.0) / requests.number(1.0)
    return None


def proportional_units(
    *,
    spec: ServicePolicySpec,
    proportional: Proportional,
    shape: UnitShape,
    base_units: int,
    ready_units: float,
    view: RoleSignals,
    front: FrontDoor,
    demand: Demand,
    previous_queued: float | None,
    floor_units: int,
) -> Recommendation:
    """Algorithm 2 on sums.

    `base_units` are those that are ready or requested, so that a slow start never compounds.
    """
    if base_units == 0:
        return _from_zero(demand, floor_units)
    signal = metric_signal(proportional, view)
    if not signal.usable:
        kind, detail = ClampKind.SIGNAL_QUALITY, f"{proportional.metric} is {signal.said()}"
        if ready_units <= 0:
            kind, detail = ClampKind.PENDING_REPLICAS, "no replica is ready yet"
        clamp = Clamp(kind, float(base_units), float(base_units), detail)
        return Recommendation(base_units, Rule.HOLD, None, fit=False, fit_for_in=False, clamps=(clamp,))
    target = proportional.target_per_replica
    measured = signal.number(0.0)
    queue_stands = previous_queued is not None and demand.queued >= max(1.0, previous_queued)
    per_request = tokens_per_request(proportional, view, front) if queue_stands else None
    if per_request is not None:
        measured += demand.queued * per_request / proportional.drain_horizon_s
    role = metric_role(spec, proportional)
    expected = shape.units_of(role, measured / target)
    # Replicas that could not be read justify no growth (they may have started a moment ago), and for scale-in each
    # is taken to carry its target.
    supposed = shape.units_of(role, measured / target + signal.unread_replicas)
    clamps: tuple[Clamp, ...] = ()
    if expected / base_units > 1 + proportional.scale_out_tolerance:
        units, rule = ceil_units(expected), Rule.PROPORTIONAL_OUT
    elif supposed / base_units < 1 - proportional.scale_in_tolerance:
        units, clamps = _kept_from_zero(min(base_units, ceil_units(supposed)), demand)
        rule, expected = Rule.PROPORTIONAL_IN, supposed
    else:
        units, rule = base_units, Rule.HOLD
        if ceil_units(expected) != base_units:
            detail = f"R = {expected / base_units:.3f}"
            clamps = (Clamp(ClampKind.TOLERANCE, float(ceil_units(expected)), float(base_units), detail),)
    return Recommendation(units, rule, expected, fit=True, fit_for_in=signal.fit_for_release, clamps=clamps)


def _from_zero(demand: Demand, floor_units: int) -> Recommendation:
    if demand.any or floor_units > 0:
        rule = Rule.FROM_ZERO if demand.any else Rule.BOUNDS
        return Recommendation(max(1, floor_units), rule, None, fit=True, fit_for_in=False)
    return Recommendation(0, Rule.HOLD, 0.0, fit=True, fit_for_in=False)


def _kept_from_zero(units: int, demand: Demand) -> tuple[int, tuple[Clamp, ...]]:
    """Keep the last unit while there is demand, and while no gateway could report the next request."""
    if units > 0:
        return units, ()
    if demand.any:
        return 1, (Clamp(ClampKind.MIN_REPLICAS, 0.0, 1.0, "requests are in the service"),)
    if not demand.held_is_known:
        detail = "no gateway reports demand: nothing would wake the service from zero"
        return 1, (Clamp(ClampKind.SIGNAL_QUALITY, 0.0, 1.0, detail),)
    return 0, ()


def worst(signals: tuple[Measurement, ...]) -> Measurement:
    """The largest usable value, or a missing one."""
    usable = [signal for signal in signals if signal.usable]
    return max(usable, key=lambda signal: signal.number(0.0)) if usable else missing("no samples")


def with_brake(
    recommendation: Recommendation,
    *,
    brake: LatencyBrake,
    views: tuple[RoleSignals, ...],
    demand: Demand,
    ready_units: float,
    base_units: int,
) -> Recommendation:
    """Raise `recommendation` to the brake's floor on ready replicas, and forbid scale-in while latency presses."""
    pressing: list[tuple[float, str]] = []
    ttft = worst(tuple(view.ttft_p95_s for view in views))
    tbt = worst(tuple(view.tbt_p95_s for view in views))
    for name, signal, target in (("TTFT", ttft, brake.ttft_target_s), ("TBT", tbt, brake.tbt_target_s)):
        if target is None or not signal.usable:
            continue
        latency_s = signal.number(0.0)
        for limit, factor in ((brake.alpha, SEVERE_FACTOR), (brake.beta, MODERATE_FACTOR)):
            if latency_s >= limit * target:
                pressing.append((factor, f"{name} p95 {latency_s:.3g} s is at least {limit:g} × {target:g} s"))
                break
    if not pressing and demand.queued >= 1 and not ttft.usable and ready_units > 0:
        pressing.append((MODERATE_FACTOR, f"{demand.queued:.0f} requests wait and no latency was measured"))
    if not pressing:
        return recommendation
    factor, why = max(pressing)
    floor_units = ceil_units(factor * ready_units)
    units, rule, clamps = recommendation.units, recommendation.rule, recommendation.clamps
    if units < base_units:
        clamps = (*clamps, Clamp(ClampKind.LATENCY_BRAKE, float(units), float(base_units), f"no scale-in: {why}"))
        units, rule = base_units, Rule.HOLD
    if floor_units > units:
        clamps = (*clamps, Clamp(ClampKind.LATENCY_BRAKE, float(units), float(floor_units), why))
        units, rule = floor_units, Rule.LATENCY_FLOOR
    return Recommendation(
        units,
        rule,
        recommendation.expected_units,
        fit=recommendation.fit,
        fit_for_in=recommendation.fit_for_in,
        brake_presses=True,
        clamps=clamps,
    )
