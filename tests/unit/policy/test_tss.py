"""Token Service Share: the seed's formula, regions with hysteresis, idle and zero-routable rules."""

from dataclasses import replace

import pytest

from policy_engine.core.pool.guards import GuardState, check_guards
from policy_engine.core.pool.predict import power_z
from policy_engine.core.pool.tss import ShareState, region_of, share_of, waiting_weight_of
from policy_engine.core.shared.vocabulary import Region
from trimtab.config.specs import Guards, Slo, TokenServiceShare
from trimtab.domain.measurement import Measurement, missing, ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

PROFILE = TokenServiceShare(theta_tps=20, prefill_weight=0.05, waiting_weight=8, smoothing=1.0)
NEW = ShareState()


def window(prefill=0.0, decode=0.0, running=0.0, waiting=0.0, end_s=100.0, **more):
    def typed(value):
        return value if isinstance(value, Measurement) else ok(value)

    return RoleSignals(
        role=Role.COLOCATED,
        window_end_s=end_s,
        prefill_tps=typed(prefill),
        decode_tps=typed(decode),
        running=typed(running),
        waiting=typed(waiting),
        **more,
    )


def held(count=0.0):
    return FrontDoor(window_end_s=100.0, held=ok(count))


@pytest.mark.parametrize(
    ("view", "front", "raw"),
    [
        # (0.05 · 4000 + 800) / (20 + 8 · 0) = 50
        (window(4000, 800, 20, 0), held(), 50.0),
        # (0.05 · 4000 + 800) / (20 + 8 · 10) = 10: a queue shows before any latency does
        (window(4000, 800, 20, 10), held(), 10.0),
        # requests that gateways hold wait too
        (window(4000, 800, 20, 4), held(6), 10.0),
        # the seed's figure 1: prefill-heavy against decode-heavy at a like queue
        (window(2852.1, 1002.5, 40.6, 0), held(), (0.05 * 2852.1 + 1002.5) / 40.6),
        (window(831.5, 1540.0, 42.4, 0), held(), (0.05 * 831.5 + 1540.0) / 42.4),
    ],
)
def test_raw_share(view, front, raw):
    share, state = share_of(PROFILE, view, front, routable=2, previous=NEW)
    assert share.raw_tps == pytest.approx(raw)
    assert share.z == pytest.approx(raw / 20)
    assert state.smoothed_tps == pytest.approx(raw)


def test_the_seeds_pair_is_ordered_as_its_health():
    """Aggregate throughput ranks the prefill-heavy case first (3854 against 2371 tokens/s), the share does not."""
    prefill_heavy, _ = share_of(PROFILE, window(2852.1, 1002.5, 40.6), held(), routable=1, previous=NEW)
    decode_heavy, _ = share_of(PROFILE, window(831.5, 1540.0, 42.4), held(), routable=1, previous=NEW)
    assert prefill_heavy.z < decode_heavy.z


def test_smoothing_moves_once_a_window():
    profile = PROFILE.model_copy(update={"smoothing": 0.25})
    before = ShareState(smoothed_tps=40, region=Region.SURPLUS, window_end_s=95.0)
    share, state = share_of(profile, window(0, 80, 10), held(), routable=1, previous=before)
    assert state.smoothed_tps == pytest.approx(0.25 * 8 + 0.75 * 40)
    again, same = share_of(profile, window(0, 80, 10), held(), routable=1, previous=state)
    assert same.smoothed_tps == pytest.approx(state.smoothed_tps)
    assert again.z == share.z


@pytest.mark.parametrize(
    ("z", "previous", "expected"),
    [
        (0.79, Region.NOMINAL, Region.CRITICAL),
        (0.80, Region.NOMINAL, Region.NOMINAL),
        (0.84, Region.CRITICAL, Region.CRITICAL),  # inside the hysteresis
        (0.86, Region.CRITICAL, Region.NOMINAL),
        (1.30, Region.NOMINAL, Region.NOMINAL),
        (1.31, Region.NOMINAL, Region.SURPLUS),
        (1.26, Region.SURPLUS, Region.SURPLUS),
        (1.24, Region.SURPLUS, Region.NOMINAL),
        (0.5, Region.SURPLUS, Region.CRITICAL),
        (2.0, Region.CRITICAL, Region.SURPLUS),
    ],
)
def test_regions_have_hysteresis_on_both_edges(z, previous, expected):
    assert region_of(z, previous, PROFILE) == expected


def test_light_load_ranks_as_surplus_and_leaves_the_smoothed_share_alone():
    before = ShareState(smoothed_tps=10, region=Region.CRITICAL, window_end_s=95.0)
    share, state = share_of(PROFILE, window(0, 3, 0.5), held(), routable=1, previous=before)
    assert share.idle
    assert share.region == Region.SURPLUS
    assert state.smoothed_tps == 10


def test_a_held_request_is_not_idle():
    share, _ = share_of(PROFILE, window(0, 3, 0.0), held(1), routable=1, previous=NEW)
    assert not share.idle
    assert share.region == Region.CRITICAL


def test_demand_without_a_routable_replica_is_critical_at_zero():
    frozen = window(9000, 9000, 50, 50)
    share, state = share_of(PROFILE, frozen, held(3), routable=0, previous=ShareState(smoothed_tps=30))
    assert (share.z, share.region, share.demand) == (0.0, Region.CRITICAL, True)
    assert state.smoothed_tps == 30
    nobody, _ = share_of(PROFILE, frozen, held(0), routable=0, previous=NEW)
    assert nobody.z is None
    assert not nobody.demand


@pytest.mark.parametrize("name", ["prefill", "decode", "running", "waiting"])
def test_a_missing_signal_neither_receives_nor_gives(name):
    values = {"prefill": 10, "decode": 10, "running": 5, "waiting": 0, name: missing()}
    before = ShareState(smoothed_tps=30, region=Region.SURPLUS, window_end_s=95.0)
    share, state = share_of(PROFILE, window(**values), held(), routable=2, previous=before)
    assert not share.fit
    assert not share.fit_for_release
    assert share.z == pytest.approx(1.5)
    assert state == before
    assert "missing" in share.detail


@pytest.mark.parametrize(("reported", "fit"), [(20, True), (19, True), (18, False)])
def test_a_donor_needs_95_percent(reported, fit):
    quality = Quality.OK if reported == 20 else Quality.PARTIAL
    part = Measurement(400.0, quality, reported, 20)
    share, _ = share_of(PROFILE, window(0, part, 10), held(), routable=20, previous=NEW)
    assert share.fit
    assert share.fit_for_release is fit


def test_an_unread_replica_counts_at_its_target():
    part = Measurement(300.0, Quality.PARTIAL, 3, 4)
    share, _ = share_of(PROFILE, window(0, part, 10), held(), routable=4, previous=NEW)
    assert share.raw_tps == pytest.approx((30 * 3 + 20) / 4)


@pytest.mark.parametrize(
    ("z", "replicas", "released", "expected"),
    [(2.0, 4, 1, 2.0 * 0.75**1.5), (2.0, 2, 1, 2.0 * 0.5**1.5), (2.0, 1, 1, 0.0), (2.0, 0, 1, 0.0)],
)
def test_z_falls_faster_than_the_replicas(z, replicas, released, expected):
    assert power_z(z, replicas=replicas, after=replicas - released) == pytest.approx(expected)


def test_guards_soft_and_hard():
    guards = Guards.model_validate({"ttftP95S": {"soft": 1, "hard": 2}, "kvUsageRatio": {"soft": 0.8}})
    calm = check_guards(guards, window(ttft_p95_s=ok(0.9), kv_usage_ratio=ok(0.8)))
    assert calm == GuardState()
    soft = check_guards(guards, window(ttft_p95_s=ok(1.5)))
    assert "soft" in soft.soft
    assert not soft.hard
    hard = check_guards(guards, window(ttft_p95_s=ok(2.5)))
    assert hard.soft
    assert "hard limit of 2 s" in hard.hard
    assert check_guards(guards, window(ttft_p95_s=missing())) == GuardState()


@pytest.mark.parametrize(("role", "absent"), [(Role.PREFILL, "decode"), (Role.DECODE, "prefill")])
def test_a_stage_counts_its_own_tokens(role, absent):
    view = replace(window(**{"prefill": 900, "decode": 300, "running": 10, absent: missing()}), role=role)
    share, _ = share_of(PROFILE, view, held(), routable=1, previous=NEW)
    assert share.fit
    assert share.raw_tps == pytest.approx(0.05 * 900 / 10 if role == Role.PREFILL else 30.0)


@pytest.mark.parametrize(
    ("own", "role", "answer_tokens", "weight"),
    [
        # An answer of 200 tokens may take 15 s at 75 ms each: 7.5 times the 2 s that a first token may take.
        (None, Role.COLOCATED, 200.0, 7.5),
        (None, Role.DECODE, 900.0, 33.75),
        # Short answers: one that waits is still as much as one that runs.
        (None, Role.COLOCATED, 10.0, 1.0),
        (None, Role.COLOCATED, None, 8.0),
        (None, Role.PREFILL, 200.0, 8.0),
        (4.0, Role.COLOCATED, 200.0, 4.0),
    ],
)
def test_what_a_waiting_request_counts_follows_the_length_of_answers_unless_the_profile_says_it(
    own: float | None, role: Role, answer_tokens: float | None, weight: float
) -> None:
    assert waiting_weight_of(own, Slo(ttft_s=2.0, tpot_s=0.075), role, answer_tokens) == pytest.approx(weight)


def test_a_share_takes_the_waiting_weight_that_it_is_given() -> None:
    share, _ = share_of(PROFILE, window(0, 400, 20, 10), held(), routable=1, previous=ShareState(), waiting_weight=2.0)
    assert share.outstanding == 40
    assert share.raw_tps == 10
