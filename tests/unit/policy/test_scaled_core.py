"""The pipeline of a scaled service: seed formulas, cases from the field, clamps."""

import math
from dataclasses import replace

import pytest

from policy_engine.core.scaled.decide import RoleReplicas, ScaledInput, ScaledState, decide_scaled
from policy_engine.core.scaled.recommend import metric_role
from policy_engine.core.scaled.stabilise import History
from policy_engine.core.scaled.units import UnitShape, ceil_units, shape_of, unit_bounds
from policy_engine.core.shared.vocabulary import ClampKind, DecisionKind, Rule
from trimtab.config.resources import ServicePolicy
from trimtab.config.specs import LatencyBrake, Proportional, Ratio, RoleSpec, ServicePolicySpec
from trimtab.domain.measurement import Measurement, missing, ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

NOW = 10_000.0


def policy(
    *, low: int = 1, high: int = 50, roles: tuple[str, ...] = ("colocated",), ratio: dict | None = None,
    brake: dict | None = None, paused: bool = False, **proportional: object,
) -> ServicePolicy:  # fmt: skip
    spec: dict[str, object] = {
        "model": "m",
        "slo": {"ttftS": 1, "tpotS": 0.04},
        "roles": [{"role": role, "minReplicas": low, "maxReplicas": high} for role in roles],
        "proportional": {
            "targetPerReplica": 100,
            "scaleOutTolerance": 0.1,
            "scaleInTolerance": 0.1,
            "scaleOutCoolingS": 0,
            "scaleInCoolingS": 0,
            "stabilizationWindowS": 0,
            **proportional,
        },
    }
    if ratio:
        spec["ratio"] = ratio
    if brake:
        spec["latencyBrake"] = brake
    return ServicePolicy.model_validate({"metadata": {"name": "chat", "paused": paused}, "spec": spec})


def view(role: Role = Role.COLOCATED, *, now_s: float = NOW, **signals: Measurement | float) -> RoleSignals:
    values = {name: value if isinstance(value, Measurement) else ok(value) for name, value in signals.items()}
    base = {"running": ok(1), "waiting": ok(0), **values}
    return RoleSignals(role=role, window_end_s=now_s, **base)


HEARD = FrontDoor(window_end_s=NOW, held=ok(0))


def given(
    spec: ServicePolicy, *views: RoleSignals, desired: int | dict[Role, int] = 8, ready: int | None = None,
    front: FrontDoor = HEARD, state: ScaledState | None = None, now_s: float = NOW, unreachable: str = "",
) -> ScaledInput:  # fmt: skip
    counts = desired if isinstance(desired, dict) else {spec.spec.roles[0].role: desired}
    base = state or ScaledState(desired=tuple((role.role, counts[role.role]) for role in spec.spec.roles))
    return ScaledInput(
        now_s=now_s,
        policy=spec,
        views=views,
        front=replace(front, window_end_s=now_s),
        replicas=tuple(
            RoleReplicas(role, counts[role] if ready is None else ready, counts[role] if ready is None else ready)
            for role in counts
        ),
        state=base,
        unreachable=unreachable,
    )


def units(result) -> int:
    return result.state.desired[-1][1]


def kinds(result) -> set[ClampKind]:
    return {clamp.kind for clamp in result.draft.clamps} if result.draft else set()


def seen(window_s: float, count: int, now_s: float = NOW) -> History:
    """A history that has looked at `count` for the whole window."""
    return History(recommendations=((now_s - window_s + 0.1, count),), last_fit_s=now_s - 1)


# Proportional control


@pytest.mark.parametrize(
    ("tps", "desired", "expected"),
    [
        (800, 8, 8),  # R = 1
        (880, 8, 8),  # R = 1.1, on the edge of the tolerance
        (881, 8, 9),  # beyond it
        (1600, 8, 16),
        (719, 8, 8),  # R < 0.9, and the window's maximum is still 8
        (100, 1, 1),
    ],
)
def test_expected_is_the_sum_over_the_target(tps, desired, expected):
    result = decide_scaled(given(policy(stabilizationWindowS=60), view(decode_tps=tps), desired=desired))
    assert units(result) == expected


def test_scale_in_after_a_whole_window_of_low_load():
    state = ScaledState(desired=((Role.COLOCATED, 8),), history=History(last_fit_s=NOW - 1))
    result = decide_scaled(given(policy(), view(decode_tps=390), state=state))
    assert units(result) == 4
    assert result.draft.rule == Rule.PROPORTIONAL_IN
    assert result.draft.counts[0].before == 8
    assert result.draft.counts[0].after == 4


def test_case_01_a_missing_read_is_no_zero():
    """8 replicas exactly at target, 4 of 8 scrapes fail: hold, never 8 → 4."""
    state = ScaledState(desired=((Role.COLOCATED, 8),), history=History(last_fit_s=NOW - 1))
    half = Measurement(400.0, Quality.PARTIAL, 4, 8)
    result = decide_scaled(given(policy(), view(decode_tps=half), state=state))
    assert units(result) == 8
    absent = decide_scaled(given(policy(), view(decode_tps=missing()), state=state))
    assert units(absent) == 8
    assert absent.draft.kind == DecisionKind.HOLD
    assert kinds(absent) == {ClampKind.SIGNAL_QUALITY}


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        (Measurement(390.0, Quality.PARTIAL, 19, 20), 4 + 1),  # 95 %: the unread one counts at its target
        (Measurement(390.0, Quality.PARTIAL, 18, 20), 20),
        (Measurement(390.0, Quality.RESET, 20, 20), 20),
        (Measurement(390.0, Quality.WARMING, 20, 20), 20),
        (Measurement(390.0, Quality.STALE, 20, 20), 20),
    ],
)
def test_scale_in_needs_a_fit_signal(signal, expected):
    state = ScaledState(desired=((Role.COLOCATED, 20),), history=History(last_fit_s=NOW - 1))
    result = decide_scaled(given(policy(), view(decode_tps=signal), desired=20, state=state))
    assert units(result) == expected


def test_a_partial_signal_scales_out_on_what_was_measured():
    half = Measurement(1200.0, Quality.PARTIAL, 4, 8)
    assert units(decide_scaled(given(policy(), view(decode_tps=half)))) == 12


def test_case_08_a_decision_on_six_of_eight():
    """One replica is pending and one hangs: the six that answer suffice to grow."""
    six = Measurement(1200.0, Quality.PARTIAL, 6, 8)
    result = decide_scaled(given(policy(), view(decode_tps=six)))
    assert units(result) == 12
    assert result.draft.rule == Rule.PROPORTIONAL_OUT


def test_replicas_that_have_just_become_ready_do_not_look_like_load():
    """Five are ready, the window knows two of them, at 250 tokens/s each: five, not eight."""
    young = Measurement(500.0, Quality.PARTIAL, 2, 5)
    assert units(decide_scaled(given(policy(), view(decode_tps=young), desired=5))) == 5


def test_case_02_the_windows_maximum_counts():
    """From 10, recommendations 3, 12, 11, 12 at t = 0, 10, 20, 30 s, window 300 s: no scale-in."""
    spec = policy(stabilizationWindowS=300, scaleOutTolerance=0.5)
    state = ScaledState(desired=((Role.COLOCATED, 10),))
    for step, tps in enumerate((300, 1200, 1100, 1200)):
        now_s = NOW + 10 * step
        result = decide_scaled(given(spec, view(decode_tps=tps, now_s=now_s), state=state, now_s=now_s))
        state = result.state
        assert units(result) == 10, f"at {10 * step} s"


def test_case_03_no_requests_is_a_known_state():
    """Load, then none: latencies have no samples. The minimum is reached after the window, on nothing but numbers."""
    spec = policy(low=1, stabilizationWindowS=60, brake={"ttftTargetS": 1})
    state = ScaledState(desired=((Role.COLOCATED, 6),))
    reached_at = None
    for step in range(0, 80, 5):
        now_s = NOW + step
        idle = view(decode_tps=0, running=0, now_s=now_s, ttft_p95_s=missing("nothing finished"))
        result = decide_scaled(given(spec, idle, desired=6, state=state, now_s=now_s))
        state = result.state
        if units(result) == 1 and reached_at is None:
            reached_at = step
    assert reached_at is not None
    assert 60 <= reached_at <= 70


def test_case_05_a_stuck_queue_is_not_load():
    """Waiting = 200 on replicas that do not move: reported as stuck, not as load."""
    stuck = Measurement(None, Quality.STALE, 1, 7, "6 stale")
    state = ScaledState(desired=((Role.COLOCATED, 7),), queued=200.0, history=History(last_fit_s=NOW - 1))
    result = decide_scaled(given(policy(), view(decode_tps=stuck, waiting=stuck), desired=7, state=state))
    assert units(result) == 7
    assert "stale" in result.draft.clamps[0].detail


def test_case_12_a_sum_not_an_average():
    """8 replicas each at 0.9 of what 0.5 is the target for: at least 15."""
    result = decide_scaled(given(policy(targetPerReplica=0.5), view(decode_tps=8 * 0.9)))
    assert units(result) == 15


def test_case_13_pending_replicas_count():
    """Start-up takes 180 s, ready replicas stay hot: one step, not 2 → 4 → 8 → 16."""
    spec = policy()
    state = ScaledState(desired=((Role.COLOCATED, 2),))
    path = []
    for step in range(18):
        now_s = NOW + 10 * step
        hot = view(decode_tps=400, now_s=now_s)
        result = decide_scaled(given(spec, hot, desired=2, ready=2, state=state, now_s=now_s))
        state = result.state
        path.append(units(result))
    assert path == [4] * 18


def test_case_15_a_spike_is_a_bounded_step():
    result = decide_scaled(given(policy(maxStepUnits=3), view(decode_tps=8 * 100 * 50), desired=8))
    assert units(result) == 11
    assert ClampKind.MAX_STEP in kinds(result)


def test_case_17_restart_at_steady_seven():
    """Two seconds of data after a restart, all of it low: 7 stays 7."""
    spec = policy(stabilizationWindowS=60)
    lost = ScaledState()
    existing = ScaledInput(
        now_s=NOW,
        policy=spec,
        views=(view(decode_tps=50),),
        front=HEARD,
        replicas=(RoleReplicas(Role.COLOCATED, 7, 7),),
        state=lost,
    )
    first = decide_scaled(existing)
    assert first.draft.rule == Rule.INITIAL
    assert units(first) == 7
    state = first.state
    for step in (0, 1, 2):
        result = decide_scaled(
            replace(existing, now_s=NOW + step, state=state, views=(view(decode_tps=50, now_s=NOW + step),))
        )
        state = result.state
        assert units(result) == 7


def test_a_gap_in_the_ring_starts_a_new_window():
    """An engine that was away for ten minutes has not seen ten minutes of low load."""
    old = History(recommendations=((NOW - 700, 2),), last_fit_s=NOW - 600)
    state = ScaledState(desired=((Role.COLOCATED, 8),), history=old)
    result = decide_scaled(given(policy(stabilizationWindowS=60), view(decode_tps=100), state=state))
    assert units(result) == 8
    assert ClampKind.STABILIZATION in kinds(result)


def test_coolings_are_separate():
    spec = policy(scaleOutCoolingS=30, scaleInCoolingS=300)
    history = History(last_fit_s=NOW - 1, last_in_s=NOW - 10, last_out_s=NOW - 40)
    state = ScaledState(desired=((Role.COLOCATED, 8),), history=history)
    assert units(decide_scaled(given(spec, view(decode_tps=1600), state=state))) == 16
    low = decide_scaled(given(spec, view(decode_tps=100), state=state))
    assert units(low) == 8
    assert ClampKind.SCALE_IN_COOLING in kinds(low)
    cooling = replace(state, history=replace(history, last_out_s=NOW - 20))
    assert units(decide_scaled(given(spec, view(decode_tps=1600), state=cooling))) == 8


def test_backlog_counts_while_the_queue_does_not_shrink():
    """60 waiting requests of 50 tokens each, to be gone in 30 s: 100 tokens/s, one replica more."""
    state = ScaledState(desired=((Role.COLOCATED, 8),), queued=50.0)
    full = view(decode_tps=800, waiting=60, request_rps=16)
    assert units(decide_scaled(given(policy(), full, state=state))) == 9
    shrinking = replace(state, queued=70.0)
    assert units(decide_scaled(given(policy(), full, state=shrinking))) == 8


def test_two_ticks_on_one_window_see_no_standing_queue():
    spec, full = policy(), view(decode_tps=800, waiting=60, request_rps=16)
    first = decide_scaled(given(spec, full))
    again = decide_scaled(given(spec, full, state=first.state, now_s=NOW + 0.5))
    assert first.state.queued == 60
    assert again.state.queued_at_s == first.state.queued_at_s


# Zero


def test_case_20_from_zero_on_held_requests():
    state = ScaledState(desired=((Role.COLOCATED, 0),))
    silent = RoleSignals(role=Role.COLOCATED)
    asked = decide_scaled(given(policy(low=0), silent, desired=0, front=FrontDoor(held=ok(1)), state=state))
    assert units(asked) == 1
    assert asked.draft.rule == Rule.FROM_ZERO
    unasked = decide_scaled(given(policy(low=0), silent, desired=0, front=FrontDoor(held=ok(0)), state=state))
    assert units(unasked) == 0


@pytest.mark.parametrize(
    ("held", "running", "expected"), [(ok(0), 0, 0), (ok(1), 0, 1), (missing(), 0, 1), (ok(0), 1, 1)]
)
def test_the_last_unit_leaves_only_when_nobody_asks_and_gateways_say_so(held, running, expected):
    state = ScaledState(desired=((Role.COLOCATED, 2),), history=History(last_fit_s=NOW - 1))
    idle = view(decode_tps=0, running=running)
    result = decide_scaled(given(policy(low=0), idle, desired=2, front=FrontDoor(held=held), state=state))
    assert units(result) == expected


# Latency brake


@pytest.mark.parametrize(
    ("ttft_s", "tps", "expected", "rule"),
    [
        (1.0, 1000, 12, Rule.LATENCY_FLOOR),  # α: 1.2 × 10
        (0.8, 1000, 11, Rule.LATENCY_FLOOR),  # β: 1.1 × 10
        (0.79, 1000, 10, None),
        (0.8, 100, 11, Rule.LATENCY_FLOOR),  # and no scale-in
        (1.0, 2000, 20, Rule.PROPORTIONAL_OUT),  # the larger wins
    ],
)
def test_latency_gives_floors(ttft_s, tps, expected, rule):
    spec = policy(brake={"ttftTargetS": 1.0, "alpha": 1.0, "beta": 0.8})
    state = ScaledState(desired=((Role.COLOCATED, 10),), history=History(last_fit_s=NOW - 1))
    result = decide_scaled(given(spec, view(decode_tps=tps, ttft_p95_s=ttft_s), desired=10, state=state))
    assert units(result) == expected
    if rule is not None:
        assert result.draft.rule == rule


def test_waiting_requests_without_a_latency_are_a_breach():
    spec = policy(brake={"ttftTargetS": 1.0})
    result = decide_scaled(given(spec, view(decode_tps=1000, waiting=5, ttft_p95_s=missing()), desired=10))
    assert units(result) == 11


def test_the_brakes_defaults_are_the_papers():
    """HeteroScale, Algorithm 3: a severe breach at 1.5 times the target, a moderate one at 1.2 times."""
    brake = policy(brake={"ttftTargetS": 1.0}).spec.latency_brake
    assert (brake.alpha, brake.beta) == (1.5, 1.2)
    assert LatencyBrake(tbt_target_s=1.0, alpha=1.0).beta == 0.8
    assert LatencyBrake(tbt_target_s=1.0, alpha=1.0, beta=0.9).beta == 0.9


def test_the_brake_does_not_compound_while_replicas_start():
    spec = policy(brake={"ttftTargetS": 1.0})
    state = ScaledState(desired=((Role.COLOCATED, 10),))
    for step in range(6):
        hot = view(decode_tps=1000, ttft_p95_s=5.0, now_s=NOW + step)
        result = decide_scaled(given(spec, hot, desired=10, ready=10, state=state, now_s=NOW + step))
        state = result.state
        assert units(result) == 12


# Ratio and bounds


@pytest.mark.parametrize(
    ("ratio", "tps", "expected"),
    [
        ({"prefill": 1, "decode": 5}, 700, {Role.PREFILL: 2, Role.DECODE: 7}),  # ceil(7 · 1/5)
        ({"prefill": 1, "decode": 5, "strict": True}, 700, {Role.PREFILL: 2, Role.DECODE: 10}),
        ({"prefill": 9, "decode": 1}, 300, {Role.PREFILL: 27, Role.DECODE: 3}),
        ({"prefill": 2, "decode": 3}, 700, {Role.PREFILL: 5, Role.DECODE: 7}),
    ],
)
def test_one_signal_sizes_both_stages(ratio, tps, expected):
    spec = policy(roles=("prefill", "decode"), ratio=ratio, high=60)
    shape = shape_of(spec.spec)
    start = dict(shape.counts(1 if ratio.get("strict") else 2))
    views = (view(Role.PREFILL, decode_tps=0), view(Role.DECODE, decode_tps=tps))
    result = decide_scaled(given(spec, *views, desired=start))
    assert dict(result.state.desired) == expected


def test_prefill_tokens_may_be_the_metric():
    spec = policy(roles=("prefill", "decode"), ratio={"prefill": 1, "decode": 3}, metric="prefill-tps")
    views = (view(Role.PREFILL, prefill_tps=400), view(Role.DECODE, decode_tps=1))
    result = decide_scaled(given(spec, *views, desired={Role.PREFILL: 2, Role.DECODE: 6}))
    assert dict(result.state.desired) == {Role.PREFILL: 4, Role.DECODE: 12}


def test_role_bounds_are_unit_bounds():
    spec = ServicePolicy.model_validate(
        {
            "metadata": {"name": "chat"},
            "spec": {
                "model": "m",
                "slo": {"ttftS": 1, "tpotS": 1},
                "roles": [
                    {"role": "prefill", "minReplicas": 2, "maxReplicas": 4},
                    {"role": "decode", "minReplicas": 3, "maxReplicas": 100},
                ],
                "ratio": {"prefill": 1, "decode": 5},
                "proportional": {"targetPerReplica": 1},
            },
        }
    ).spec
    bounds = unit_bounds(spec)
    assert (bounds.minimum, bounds.maximum) == (6, 20)
    strict = unit_bounds(spec.model_copy(update={"ratio": Ratio(prefill=1, decode=5, strict=True)}))
    assert (strict.minimum, strict.maximum) == (2, 4)


MOE = {Role.PREFILL_ATTENTION: 1, Role.PREFILL_FFN: 3, Role.DECODE: 4}


@pytest.mark.parametrize(
    ("strict", "units", "counts"),
    [(True, 2, (2, 6, 8)), (False, 8, (2, 6, 8)), (False, 5, (2, 4, 5)), (False, 0, (0, 0, 0))],
)
def test_a_shape_may_have_three_roles(strict, units, counts):
    shape = UnitShape(parts=MOE, lead=Role.DECODE, strict=strict)
    assert shape.counts(units) == tuple(zip(MOE, counts, strict=True))
    for role, count in shape.counts(units):
        assert shape.least_units(role, count) <= units <= shape.most_units(role, count)


def test_bounds_of_three_roles_are_unit_bounds():
    roles = [
        RoleSpec(role=Role.PREFILL_ATTENTION, min_replicas=1, max_replicas=9),
        RoleSpec(role=Role.PREFILL_FFN, min_replicas=2, max_replicas=8),
        RoleSpec(role=Role.DECODE, min_replicas=0, max_replicas=10),
    ]
    spec = ServicePolicySpec.model_construct(roles=roles, ratio=None)
    assert shape_of(spec).lead == Role.DECODE
    assert (unit_bounds(spec).minimum, unit_bounds(spec).maximum) == (2, 8)


@pytest.mark.parametrize(
    ("metric", "roles", "counted"),
    [
        ("decode-tps", (Role.COLOCATED,), Role.COLOCATED),
        ("prefill-tps", (Role.COLOCATED,), Role.COLOCATED),
        ("decode-tps", (Role.PREFILL, Role.DECODE), Role.DECODE),
        ("prefill-tps", (Role.PREFILL, Role.DECODE), Role.PREFILL),
        ("prefill-tps", tuple(MOE), Role.PREFILL_ATTENTION),
    ],
)
def test_each_metric_is_counted_at_one_role(metric, roles, counted):
    spec = ServicePolicySpec.model_construct(roles=[RoleSpec(role=role, max_replicas=1) for role in roles])
    assert metric_role(spec, Proportional(metric=metric, target_per_replica=1.0)) == counted


def test_counts_off_the_ratio_are_repaired():
    spec = policy(roles=("prefill", "decode"), ratio={"prefill": 1, "decode": 5})
    views = (view(Role.PREFILL, decode_tps=0), view(Role.DECODE, decode_tps=1000))
    grown = decide_scaled(given(spec, *views, desired={Role.PREFILL: 1, Role.DECODE: 10}))
    assert dict(grown.state.desired) == {Role.PREFILL: 2, Role.DECODE: 10}
    assert grown.draft.rule == Rule.RATIO_REPAIR
    unfit = (view(Role.PREFILL, decode_tps=0), view(Role.DECODE, decode_tps=missing()))
    held = decide_scaled(given(spec, *unfit, desired={Role.PREFILL: 4, Role.DECODE: 10}))
    assert dict(held.state.desired) == {Role.PREFILL: 4, Role.DECODE: 10}
    assert ClampKind.RATIO in kinds(held)


def test_a_lowered_maximum_acts_at_once_and_is_the_rule():
    result = decide_scaled(given(policy(high=5), view(decode_tps=800)))
    assert units(result) == 5
    assert result.draft.rule == Rule.BOUNDS
    assert ClampKind.MAX_REPLICAS in kinds(result)


def test_a_bound_that_shortens_a_step_is_not_the_rule():
    result = decide_scaled(given(policy(high=10), view(decode_tps=5000)))
    assert units(result) == 10
    assert result.draft.rule == Rule.PROPORTIONAL_OUT


# Holds and records


def test_paused_and_unreachable_hold():
    paused = decide_scaled(given(policy(paused=True), view(decode_tps=5000)))
    assert units(paused) == 8
    assert kinds(paused) == {ClampKind.PAUSED}
    blind = decide_scaled(given(policy(), view(decode_tps=5000), unreachable="the actuator does not answer"))
    assert units(blind) == 8
    assert kinds(blind) == {ClampKind.UNREACHABLE}


def test_old_windows_are_missing():
    late = view(decode_tps=100, now_s=NOW - 16)
    result = decide_scaled(given(policy(), late))
    assert units(result) == 8
    assert "16 s ago" in result.draft.clamps[0].detail


def test_a_hold_is_recorded_once_not_every_tick():
    spec, state, records = policy(), ScaledState(desired=((Role.COLOCATED, 8),)), 0
    for step in range(20):
        now_s = NOW + 5 * step
        blind = view(decode_tps=missing(), now_s=now_s)
        result = decide_scaled(given(spec, blind, state=state, now_s=now_s))
        state = result.state
        records += result.draft is not None
    assert records == 1


def test_ceil_forgives_rounding():
    assert ceil_units(0.1 * 3 / 0.1) == 3
    assert ceil_units(3.000001) == 4
    assert ceil_units(math.nextafter(8, 9)) == 8
