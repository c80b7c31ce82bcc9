"""The planner that looks up profiles, the oracle that knows the trace, and the search for the best thresholds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.catalogue import BASELINES
from lab.baselines.dynamo_sla import DecodeProfile, DynamoSla, Forecast, PrefillProfile, Trend
from lab.baselines.interface import EachRole, FleetView, Replica, RoleKey, RoleView, Traffic, started
from lab.baselines.oracle import Demand, Oracle, demand_of
from lab.baselines.tuning import NothingWorks, coordinate_search, grid_search
from simulator.traces.model import TraceRequest
from trimtab.domain.vocabulary import Role

PREFILL = PrefillProfile(prompt_tokens=(1000.0, 3000.0), ttft_s=(0.1, 0.3), tps=(10_000.0, 8_000.0))
# 20 ms and 0.2 ms a sequence at 1,000 tokens, twice the latter at 5,000.
DECODE = DecodeProfile(
    context_tokens=(1000.0, 5000.0), batch=(1.0, 101.0, 201.0), itl_s=((0.02, 0.04, 0.06), (0.02, 0.06, 0.10))
)
PLANNER = DynamoSla(prefill=PREFILL, decode=DECODE, itl_s=0.04)


def view(role=Role.COLOCATED, ready=2, traffic=None):
    replicas = tuple(Replica(name=f"r{i}") for i in range(ready))
    return RoleView(key=RoleKey("chat", role), replicas=replicas, desired=ready, traffic=traffic)


def traffic(requests, prompt=2000.0, output=200.0, ttft_s=None, itl_s=None, interval_s=180.0):
    return Traffic(
        interval_s=interval_s,
        requests=requests,
        prompt_tokens=prompt,
        output_tokens=output,
        ttft_s=ttft_s,
        itl_s=itl_s,
    )


def planned(role, flow, planner=PLANNER, ready=2):
    return started(EachRole(planner))(FleetView(now_s=0.0, roles=(view(role, ready, flow),)))[RoleKey("chat", role)]


def test_profiles_are_linear_between_their_points_and_held_beyond():
    assert PREFILL.expected_ttft_s(2000) == pytest.approx(0.2)
    assert PREFILL.replica_tps(9000) == 8000
    assert DECODE.expected_itl_s(101, 3000) == pytest.approx(0.05)
    assert DECODE.expected_itl_s(500, 1000) == pytest.approx(0.06)
    # At 1,000 tokens 40 ms is reached at 101 sequences.
    assert DECODE.best_tps(0.04, 1000) == pytest.approx(101 / 0.04, rel=0.01)
    # Nothing is that fast: one sequence at a time.
    assert DECODE.best_tps(0.001, 1000) == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("role", "flow", "expected"),
    [
        # 1,800 requests in 180 s: 10 a second, 20,000 prompt tokens a second over 9,000 a replica.
        (Role.PREFILL, traffic(1800), 3),
        # 40 a second: 8,000 output tokens a second; at 2,100 tokens 40 ms holds about 79 sequences, 1,980 a second.
        (Role.DECODE, traffic(7200), 5),
        # Both on one replica: 2.22 and 1.01 add up.
        (Role.COLOCATED, traffic(1800), 4),
        # TTFT at half of what the profile says (cached prefixes): half the prefill.
        (Role.PREFILL, traffic(1800, ttft_s=0.1, itl_s=0.02), 2),
        # TTFT far above (a queue) is not held against prefill.
        (Role.PREFILL, traffic(1800, ttft_s=5.0, itl_s=0.02), 3),
    ],
)
def test_sla_planner_divides_the_load_by_what_a_replica_carries(role, flow, expected):
    assert planned(role, flow) == expected


def test_sla_planner_tightens_its_target_where_decode_is_slower_than_profiled():
    plain = planned(Role.DECODE, traffic(7200), ready=5)
    slower = planned(Role.DECODE, traffic(7200, ttft_s=0.2, itl_s=0.08), ready=5)
    assert slower > plain


def test_sla_planner_decides_each_interval_and_holds_without_traffic_figures():
    tick = started(EachRole(PLANNER))
    key = RoleKey("chat", Role.PREFILL)
    busy = traffic(600, interval_s=60.0)
    answers = [
        tick(FleetView(now_s=60.0 * i, roles=(view(Role.PREFILL, 2, busy if i else None),)))[key] for i in range(5)
    ]
    # Nothing known at first; after 180 s 10 a second.
    assert answers == [2, 2, 2, 3, 2]
    assert planned(Role.PREFILL, traffic(0, None, None)) == 1


def test_kalman_forecast_follows_a_trend_and_is_never_negative():
    trend = Trend()
    for value in range(0, 2000, 100):
        trend = trend.updated(float(value))
    assert trend.next(1900.0) == pytest.approx(2000, rel=0.05)
    falling = Trend()
    for value in (500.0, 400.0, 300.0, 200.0, 100.0, 0.0):
        falling = falling.updated(value)
    assert falling.next(0.0) == 0.0
    assert Trend().updated(7.0).next(7.0) == 7.0
    kalman = DynamoSla(prefill=PREFILL, decode=DECODE, forecast=Forecast.KALMAN)
    assert planned(Role.PREFILL, traffic(1800), kalman) == 3


def test_profiles_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="prompt_tokens must rise"):
        PrefillProfile(prompt_tokens=(2.0, 1.0), ttft_s=(1.0, 1.0), tps=(1.0, 1.0))
    with pytest.raises(ValueError, match="batch needs as many"):
        DecodeProfile(context_tokens=(1.0,), batch=(1.0, 2.0), itl_s=((0.1,),))


# --- the oracle ---

CHAT, CODE = RoleKey("chat"), RoleKey("code")


def test_demand_is_work_by_window():
    requests = [TraceRequest(t, s, 100, 10) for t, s in ((0.0, "chat"), (5.0, "chat"), (15.0, "code"), (16.0, "other"))]
    cost = {CHAT: lambda r: r.prompt_tokens * 0.05, CODE: lambda r: r.output_tokens * 1.0}
    assert demand_of(requests, cost) == {CHAT: Demand(10.0, (1.0, 0.0)), CODE: Demand(10.0, (0.0, 1.0))}


def fleet(now_s, budget_gpus=None, code_gpus=2):
    return FleetView(
        now_s=now_s,
        roles=(
            RoleView(key=CHAT, replicas=(), desired=1, max_replicas=8),
            RoleView(key=CODE, replicas=(), desired=1, max_replicas=8, gpus_per_replica=code_gpus),
        ),
        budget_gpus=budget_gpus,
    )


def test_oracle_scales_before_the_load_comes_and_after_it_went():
    demand = {CHAT: Demand(10.0, (0.8, 0.8, 3.2, 0.0)), CODE: Demand(10.0, (0.4, 0.4, 0.4, 0.4))}
    tick = started(Oracle(demand=demand, horizon_s=10.0, load=0.8))
    assert [tick(fleet(at_s))[CHAT] for at_s in (0.0, 10.0, 10.1, 20.0, 30.0, 99.0)] == [1, 1, 4, 4, 1, 1]


@pytest.mark.parametrize(
    ("chat", "code", "spend_all", "expected"),
    [
        # 8 and 4 replicas are needed, of one and two GPUs: each gets half of what it needs.
        (6.4, 3.2, False, (4, 2)),
        (0.8, 0.8, False, (1, 1)),
        # What is left goes where it relieves most.
        (0.8, 0.8, True, (4, 2)),
        (0.0, 6.4, False, (1, 3)),
    ],
)
def test_oracle_shares_a_budget_by_need(chat, code, spend_all, expected):
    demand = {CHAT: Demand(10.0, (chat,)), CODE: Demand(10.0, (code,))}
    desired = started(Oracle(demand=demand, spend_all=spend_all))(fleet(0.0, budget_gpus=8))
    assert (desired[CHAT], desired[CODE]) == expected


@given(chat=st.floats(0, 20), code=st.floats(0, 20), spend_all=st.booleans(), budget=st.integers(3, 20))
def test_oracle_stays_within_its_budget(chat, code, spend_all, budget):
    demand = {CHAT: Demand(10.0, (chat,)), CODE: Demand(10.0, (code,))}
    desired = started(Oracle(demand=demand, spend_all=spend_all))(fleet(0.0, budget_gpus=budget))
    assert desired[CHAT] + 2 * desired[CODE] <= budget
    assert min(desired.values()) >= 1


# --- tuning ---

SPACE = {"high": (0.5, 0.7, 0.9), "low": (0.1, 0.3, 0.6)}


def bowl(setting):
    """Least at 0.7 and 0.3; impossible where low is not below high."""
    if setting["low"] >= setting["high"]:
        raise ValueError("low must be below high")
    return (setting["high"] - 0.7) ** 2 + (setting["low"] - 0.3) ** 2


def test_grid_search_tries_every_setting_and_leaves_out_impossible_ones():
    tuned = grid_search(SPACE, bowl)
    assert tuned.best.setting == {"high": 0.7, "low": 0.3}
    assert len(tuned.trials) == 9
    assert [trial.setting for trial in tuned.trials if trial.cost is None] == [{"high": 0.5, "low": 0.6}]
    assert tuned.complete


def test_coordinate_search_finds_a_setting_that_no_single_change_improves():
    calls = []

    def counted(setting):
        calls.append(tuple(sorted(setting.items())))
        return bowl(setting)

    tuned = coordinate_search(SPACE, counted, start={"high": 0.9, "low": 0.1})
    assert tuned.best.setting == {"high": 0.7, "low": 0.3}
    assert len(calls) == len(set(calls)) < 9


def test_a_search_ends_when_its_trials_are_used_up_and_says_so():
    tuned = grid_search(SPACE, bowl, max_trials=2)
    assert (len(tuned.trials), tuned.complete) == (2, False)
    tuned = coordinate_search(SPACE, bowl, start={"high": 0.9, "low": 0.1}, max_trials=3)
    assert (len(tuned.trials), tuned.complete) == (3, False)


def test_costs_that_are_no_numbers_never_win():
    tuned = grid_search({"x": (1.0, 2.0, 3.0)}, lambda s: math.nan if s["x"] == 1.0 else -s["x"])
    assert (tuned.best.setting, tuned.trials[0].cost) == ({"x": 3.0}, None)
    with pytest.raises(NothingWorks, match="none of the 1 settings"):
        grid_search({"x": (1.0,)}, lambda s: math.inf)
    with pytest.raises(ValueError, match="y is in one of them only"):
        coordinate_search({"x": (1.0,)}, bowl, start={"x": 1.0, "y": 2.0})
    with pytest.raises(ValueError, match="at least one name"):
        grid_search({}, bowl)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_grid_search_never_misses_the_least_cost(costs):
    space = {"index": tuple(float(i) for i in range(len(costs)))}
    assert grid_search(space, lambda s: costs[int(s["index"])]).best.cost == min(costs)


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_every_baseline_runs_with_its_defaults_and_tunes_from_them(name):
    baseline = BASELINES[name]
    assert baseline.reference
    assert set(baseline.space) == set(baseline.defaults)
    hot = [
        Replica(
            name=f"r{i}",
            kv_usage_ratio=0.97,
            running=200.0,
            waiting=20.0,
            gpu_utilization_ratio=1.0,
            kv_blocks=1000,
            waiting_kv_blocks=900.0,
        )
        for i in range(2)
    ]
    overloaded = FleetView(now_s=0.0, roles=(RoleView(key=CHAT, replicas=tuple(hot), desired=2),))
    assert baseline.started()(overloaded)[CHAT] > 2
    blind = FleetView(
        now_s=0.0, roles=(RoleView(key=CHAT, replicas=(Replica(name="a"), Replica(name="b")), desired=2),)
    )
    assert baseline.started()(blind)[CHAT] == 2

    def cost(tick):
        return abs(tick(overloaded)[CHAT] - 3)

    tuned = baseline.tuned(cost, max_trials=60)
    assert tuned.best.cost is not None
    assert tuned.best.cost <= cost(baseline.started())
    assert tuned.trials[0].setting == baseline.defaults
    with pytest.raises(ValueError, match=f"{name} has no nonsense"):
        baseline.started({"nonsense": 1.0})
