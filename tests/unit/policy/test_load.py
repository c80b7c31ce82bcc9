"""The leading measure: what is coming and what is left over, in replicas' worth of work."""

import math

import pytest

from policy_engine.core.pool.load import (
    ArrivalMemory,
    Load,
    OutputMemory,
    load_of,
    recall,
    remember_arrivals,
    remember_output,
)
from trimtab.config.poolrules import LoadRule
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.measurement import Measurement, missing, ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

PROFILE = TokenServiceShare(theta_tps=20, capacity_prefill_tps=8000, capacity_decode_tps=2000)
RULE = LoadRule(backlog_horizon_s=10)
NEW = OutputMemory()


def view(role=Role.COLOCATED, **signals):
    values = {"running": 0.0, "waiting": 0.0, **signals}
    typed = {name: value if isinstance(value, Measurement) else ok(value) for name, value in values.items()}
    return RoleSignals(role=role, window_end_s=100.0, **typed)


def front(rps=4.0, prompt_tps=4000.0, output_tps=1000.0, held=0.0):
    numbers = {"arrival_rps": rps, "arrival_prompt_tps": prompt_tps, "arrival_output_tps": output_tps, "held": held}
    return FrontDoor(100.0, **{name: v if isinstance(v, Measurement) else ok(v) for name, v in numbers.items()})


def load(signals, door, *, profile=PROFILE, routable=2, memory=NEW, rule=RULE):
    return load_of(rule, profile, signals, door, tpot_s=0.05, routable=routable, memory=memory)


@pytest.mark.parametrize(
    ("signals", "door", "arriving", "backlog"),
    [
        # 4000 / 8000 of a replica for prompts, 1000 / 2000 for output
        (view(), front(), 1.0, 0.0),
        # 20 waiting, each 1000 + 250 tokens: 20 · (1000 / 8000 + 250 / 2000) = 5 replica-seconds, within 10 s
        (view(waiting=20), front(), 1.0, 0.5),
        # held at gateways counts the same
        (view(waiting=12), front(held=8), 1.0, 0.5),
        # 150 run where arrivals explain 1000 · 0.05 = 50: the rest takes (150 / 0.05 − 1000) / 2000
        (view(running=150), front(), 1.0, 1.0),
        (view(running=50), front(), 1.0, 0.0),
        # half of each prompt is in the prefix cache
        (view(prefix_hit_ratio=0.5), front(), 0.75, 0.0),
        # nothing arrives and nobody is there
        (view(), front(0, 0, 0), 0.0, 0.0),
        # a burst is over: what runs is all there is
        (view(running=100), front(0, 0, 0), 0.0, 1.0),
    ],
)
def test_work_is_what_arrives_and_what_is_left_over(signals, door, arriving, backlog):
    found = load(signals, door)
    assert found.arriving == pytest.approx(arriving)
    assert found.backlog == pytest.approx(backlog)
    assert found.rho == pytest.approx((arriving + backlog) / 2)
    assert found.with_replicas(4) == pytest.approx((arriving + backlog) / 4)


@pytest.mark.parametrize(
    ("role", "arriving", "backlog"),
    [(Role.PREFILL, 0.5, 20 * 1000 / 8000 / 10), (Role.DECODE, 0.5, 20 * 250 / 2000 / 10)],
)
def test_a_stage_has_its_own_work(role, arriving, backlog):
    found = load(view(role, waiting=20), front())
    assert found.arriving == pytest.approx(arriving)
    assert found.backlog == pytest.approx(backlog)


def test_a_burst_shows_before_any_request_runs():
    """Nothing is served differently yet, so a share would say that all is well; what arrives says the opposite."""
    calm, burst = load(view(running=20), front()), load(view(running=20), front(20, 20_000, 5_000))
    assert calm.rho == pytest.approx(0.5)
    assert burst.rho == pytest.approx(2.5)


def test_nobody_awake_leaves_work_without_a_ratio():
    frozen = view(running=300, waiting=300)
    found = load(frozen, front(held=20), routable=0)
    assert found.backlog == pytest.approx(0.5), "sleepers' gauges are frozen, what gateways hold is not"
    assert found.rho is None


@pytest.mark.parametrize(
    ("signals", "door", "profile", "rule"),
    [
        (view(), front(), TokenServiceShare(theta_tps=20, capacity_decode_tps=2000), RULE),
        (view(), front(), TokenServiceShare(theta_tps=20, capacity_prefill_tps=8000), RULE),
        (view(), front(), PROFILE, LoadRule(enabled=False)),
        (view(), front(rps=missing()), PROFILE, RULE),
        (view(), front(prompt_tps=missing()), PROFILE, RULE),
        (view(), front(output_tps=missing()), PROFILE, RULE),
        (view(running=missing()), front(), PROFILE, RULE),
        (view(waiting=Measurement(9.0, Quality.STALE)), front(), PROFILE, RULE),
        (view(), FrontDoor(), PROFILE, RULE),
    ],
)
def test_what_cannot_be_read_is_no_load_at_all(signals, door, profile, rule):
    assert load(signals, door, profile=profile, rule=rule) is None


def test_outputs_are_what_requests_took_of_late_where_they_may_ask_for_more():
    """Clients send max_tokens 4096 and stop after 100: what they may ask for is not what is coming."""
    asked = front(4, 4000, 4 * 4096)
    assert load(view(), asked).arriving == pytest.approx(0.5 + 4 * 4096 / 2000)
    known = OutputMemory(decode_tps=400.0, request_rps=4.0, window_end_s=99.0)
    assert load(view(), asked, memory=known).arriving == pytest.approx(0.5 + 4 * 100 / 2000)
    less = front(4, 4000, 4 * 50)
    assert load(view(), less, memory=known).arriving == pytest.approx(0.5 + 4 * 50 / 2000)
    unknown = front(4, 4000, missing())
    assert load(view(), unknown, memory=known).arriving == pytest.approx(0.5 + 4 * 100 / 2000)


def test_the_memory_of_outputs_moves_once_a_window_and_forgets_in_4_s():
    first = remember_output(NEW, view(decode_tps=400.0, request_rps=4.0))
    assert first.tokens == pytest.approx(100)
    assert remember_output(first, view(decode_tps=9000.0, request_rps=3.0)) == first, "the same window"
    later = RoleSignals(role=Role.COLOCATED, window_end_s=104.0, decode_tps=ok(1000.0), request_rps=ok(8.0))
    kept = math.exp(-1)
    second = remember_output(first, later)
    assert second.tokens == pytest.approx((400 * kept + 1000 * (1 - kept)) / (4 * kept + 8 * (1 - kept)))
    few = RoleSignals(role=Role.COLOCATED, window_end_s=104.0, decode_tps=ok(50.0), request_rps=ok(1.0))
    kept = math.exp(-4 * 1.0 / 20)
    third = remember_output(first, few)
    assert third.decode_tps == pytest.approx(400 * kept + 50 * (1 - kept)), "four requests move it by a fifth"
    assert remember_output(second, view(decode_tps=missing(), request_rps=ok(1.0))) == second
    assert NEW.tokens is None


def test_a_lull_between_two_bursts_is_no_end_of_them():
    memory = remember_arrivals(ArrivalMemory(), Load(2.0, 0.0, 2), 100.0, 60.0)
    assert memory.arriving == 2.0
    assert remember_arrivals(memory, Load(9.0, 0.0, 2), 100.0, 60.0) == memory, "the same window"
    memory = remember_arrivals(memory, Load(0.0, 0.0, 2), 160.0, 60.0)
    assert memory.arriving == pytest.approx(2.0 / math.e)
    lull = Load(0.1, 0.5, 2, usual=memory.arriving)
    assert (lull.work, lull.steady) == (pytest.approx(0.6), pytest.approx(2.0 / math.e + 0.5))
    assert lull.with_replicas(2, steady=True) == pytest.approx(lull.steady / 2)
    assert Load(3.0, 0.5, 2).steady == 3.5, "with nothing remembered, what arrives now is all there is"
    assert remember_arrivals(memory, Load(3.0, 0.0, 2), 161.0, 0.0).arriving == 3.0, "only the newest counts"
    assert remember_arrivals(memory, None, 161.0, 60.0) == memory, "what cannot be told changes nothing"


def test_a_load_is_divided_by_the_replicas_alone():
    assert Load(1.5, 0.5, 4).rho == 0.5
    assert Load(1.5, 0.5, 0).rho is None
    assert Load(0.0, 0.0, 0).with_replicas(1) == 0.0


NO_TREND = LoadRule(trend_s=0, memory_s=15, rise_above=0.25)


def recalled(arrivals, rule=NO_TREND):
    """The load after windows, one second apart, in which so much work arrived."""
    memory = ArrivalMemory()
    for second, work in enumerate(arrivals):
        memory = remember_arrivals(memory, Load(work, 0.0, 2), 100.0 + second, rule.memory_s)
    return recall(Load(arrivals[-1], 0.5, 2), memory, rule)


@pytest.mark.parametrize(
    ("arrivals", "rise"),
    [
        ((0.5, 0.9, 1.5), 3 * (0.5 - 0.25)),  # 0.5 replicas more each second, carried on for three seconds
        ((0.1, 0.5, 0.9, 1.5), 3 * (0.5 - 0.25)),  # only the last two seconds count
        ((0.5, 0.6, 1.0), 0.0),  # 0.25 each second is noise
        ((1.5, 0.9, 0.5), 0.0),  # a fall is not carried on: who gives has to stay well if it ends
        ((0.5, 1.5), 0.0),  # one second is too short to tell
        ((1.5,), 0.0),
    ],
)
def test_a_rise_is_carried_on(arrivals, rise):
    found = recalled(arrivals)
    assert found.rise == pytest.approx(rise)
    assert found.rho == pytest.approx((arrivals[-1] + rise + 0.5) / 2)
    assert recalled(arrivals, NO_TREND.model_copy(update={"lead_s": 0})).rise == 0.0


def test_a_rise_is_no_part_of_the_steady_load():
    calm, rising = recalled((0.5, 0.5, 0.5)), recalled((0.5, 0.5, 1.5))
    assert rising.rise > 0
    assert rising.steady - calm.steady == pytest.approx((1 - math.exp(-1 / 15)) * 1.0)


def test_after_a_gap_a_rise_is_spread_over_it():
    """Windows that could not be read do not make a slow change a steep one."""
    memory = remember_arrivals(ArrivalMemory(), Load(0.5, 0.0, 2), 100.0, 15.0)
    memory = remember_arrivals(memory, Load(4.5, 0.0, 2), 110.0, 15.0)
    assert recall(Load(4.5, 0.0, 2), memory, NO_TREND).rise == pytest.approx(3 * (0.4 - 0.25))


def test_requests_and_their_rate_are_remembered_for_their_latency():
    memory = remember_arrivals(ArrivalMemory(), load(view(running=30, waiting=10), front(rps=4.0)), 100.0, 15.0)
    memory = remember_arrivals(memory, load(view(running=30, waiting=10), front(rps=4.0)), 101.0, 15.0)
    found = recall(load(view(), front()), memory, RULE)
    assert (found.requests, found.request_rps) == (pytest.approx(40.0), pytest.approx(4.0))


@pytest.mark.parametrize(
    ("arrivals", "settled"),
    [
        ([1.0] * 16, True),
        ([1.0] * 15, False),  # not seen for the memory's 15 s yet
        ([1.0] * 40 + [3.0] * 5, False),  # a step
        ([1.0] * 40 + [3.0] * 60, True),  # is settled after some time
        ([1.0] * 40 + [1.5] + [1.0] * 3, True),  # one window is none
        ([0.04 * second for second in range(60)], False),  # a slow drift
    ],
)
def test_arrivals_are_settled_when_what_is_usual_has_not_changed_for_a_while(arrivals, settled):
    assert recalled(arrivals).settled is settled


@pytest.mark.parametrize("per_s", [0.02, -0.02])
def test_a_lasting_trend_is_carried_on_both_ways(per_s):
    """0.02 replicas a second for two minutes, each second too little to be a rise: 8 s of it are to come."""
    arrivals = [4.0 + per_s * second for second in range(120)]
    found = recalled(arrivals, LoadRule(trend_s=8))
    assert found.rise == pytest.approx(8 * per_s, rel=0.1)
    assert found.work == pytest.approx(arrivals[-1] + found.rise + 0.5)


def test_a_trend_takes_no_more_than_there_is():
    fallen = recalled([4.0] * 60 + [0.0], LoadRule(trend_s=600))
    assert fallen.work == pytest.approx(0.5), "the backlog is left"
    assert recalled([4.0] * 60, LoadRule(trend_s=600)).rise == pytest.approx(0.0), "without a change there is no trend"
    assert recalled([4.0, 0.0, 0.0], LoadRule(memory_s=0)).rise == 0.0, "without a memory there is none"
    risen = [4.0] * 60 + [4.2] * 3
    far = recalled(risen, LoadRule(memory_s=1.0, trend_s=600))
    assert far.rise == recalled(risen, LoadRule(memory_s=1.0, trend_s=2)).rise, "no further ahead than it looked back"
