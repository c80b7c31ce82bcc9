"""Each baseline does what its documentation says, with the documentation's own figures where it has some."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.baselines.aibrix import Apa, Kpa, apa_replicas
from lab.baselines.dynamo_load import DynamoLoad
from lab.baselines.hpa import Hpa, HpaMetric, replicas_for
from lab.baselines.interface import (
    EachRole,
    FleetView,
    Replica,
    RoleKey,
    RoleView,
    Signal,
    started,
    within_budget,
)
from lab.baselines.kv_auto import KvAuto, LlumnixFreeness
from lab.baselines.static import Static
from lab.baselines.wva import Wva
from trimtab.domain.vocabulary import Role

KEY = RoleKey("chat")


def role(replicas, desired=None, *, key=KEY, **more):
    replicas = tuple(replicas)
    return RoleView(key=key, replicas=replicas, desired=len(replicas) if desired is None else desired, **more)


def replicas(count, starting=0, **figures):
    figures = {"kv_usage_ratio": 0.5, "running": 5.0, "waiting": 0.0, **figures}
    ready = [Replica(name=f"r{i}", **figures) for i in range(count)]
    return [*ready, *(Replica(name=f"s{i}", ready=False) for i in range(starting))]


def run(policy, views, *, step_s=15.0):
    """Answers to views of one role, one a step."""
    tick = started(EachRole(policy))
    return [tick(FleetView(now_s=i * step_s, roles=(view,)))[view.key] for i, view in enumerate(views)]


# --- HPA ---


@pytest.mark.parametrize(
    ("values", "starting", "target", "current", "expected"),
    [
        # The documentation: 200m against 100m doubles, 50m halves.
        ([200.0, 200.0], 0, 100.0, 2, 4),
        ([50.0] * 4, 0, 100.0, 4, 2),
        # The release note of configurable tolerance: 50 pods at 90 against 75.
        ([90.0] * 50, 0, 75.0, 50, 60),
        # Within a tenth of the target nothing is done, on either side and on its edge.
        ([110.0] * 10, 0, 100.0, 10, 10),
        ([90.0] * 10, 0, 100.0, 10, 10),
        ([111.0] * 10, 0, 100.0, 10, 12),
        ([89.0] * 10, 0, 100.0, 10, 9),
        # A missing metric counts as 0 where it would grow: (150 + 150) / 3 = 100, so nothing.
        ([150.0, 150.0, None], 0, 100.0, 3, 3),
        # … and dampens: 3 × 400 over 4 pods is 300 a pod, 12 pods instead of 16.
        ([400.0, 400.0, 400.0, None], 0, 100.0, 4, 12),
        # … and as the target where it would shrink: (4 × 50 + 4 × 100) / 8 = 75, six pods, not four.
        ([50.0] * 4 + [None] * 4, 0, 100.0, 8, 6),
        # Four of eight report exactly the target: nothing.
        ([100.0] * 4 + [None] * 4, 0, 100.0, 8, 8),
        # A missing one may not turn the direction: (120 + 0) / 2 = 60 would shrink.
        ([120.0, None], 0, 100.0, 2, 2),
        # Pods that start count as 0 where it would grow: (2 × 300) / 4 = 150, six pods; else they do not count.
        ([300.0, 300.0], 2, 100.0, 4, 6),
        ([50.0, 50.0], 2, 100.0, 4, 1),
        # Nobody has the metric: nothing can be said.
        ([None, None], 0, 100.0, 2, None),
        ([], 3, 100.0, 3, None),
    ],
)
def test_hpa_replicas_for_a_metric(values, starting, target, current, expected):
    assert replicas_for(values, starting=starting, target=target, current=current) == expected


@given(
    values=st.lists(st.one_of(st.none(), st.floats(0, 1000)), max_size=12),
    starting=st.integers(0, 5),
    current=st.integers(1, 12),
)
def test_hpa_never_turns_the_direction_of_what_it_knows(values, starting, current):
    found = replicas_for(values, starting=starting, target=100.0, current=len(values) + starting or current)
    known = [value for value in values if value is not None]
    if found is not None and known:
        current = len(values) + starting
        mean = sum(known) / len(known)
        assert found <= current or mean > 100
        assert found >= 0


HPA = Hpa(metrics=(HpaMetric(signal=Signal.RUNNING, target=10.0),))


def hpa_at(count, running, **more):
    return role(replicas(count, running=running), **more)


def test_hpa_scales_in_only_after_its_window_agrees():
    # Ten pods that need three, but twelve at 60 s: until 300 s after that nothing is taken away.
    views = [hpa_at(10, 3.0)] * 4 + [hpa_at(10, 11.5)] + [hpa_at(10, 3.0)] * 25
    answers = run(HPA, views)
    assert answers[4] == 12
    assert answers[:4] == [10] * 4
    assert answers[5:24] == [10] * 19
    assert answers[24] == 3


def test_hpa_doubles_or_adds_four_in_fifteen_seconds():
    assert run(HPA, [hpa_at(2, 1000.0)]) == [6]
    assert run(HPA, [hpa_at(10, 1000.0)]) == [20]
    # Twice as fast a loop does not grow twice as fast.
    fast = dataclasses.replace(HPA, period_s=5.0)
    assert run(fast, [hpa_at(2, 1000.0), hpa_at(6, 1000.0), hpa_at(6, 1000.0), hpa_at(6, 1000.0)], step_s=5.0) == [
        6,
        6,
        6,
        12,
    ]


def test_hpa_decides_each_fifteen_seconds_and_holds_between():
    assert run(HPA, [hpa_at(2, 15.0), hpa_at(3, 20.0), hpa_at(3, 20.0), hpa_at(3, 20.0)], step_s=5.0) == [3, 3, 3, 6]


def test_hpa_with_two_metrics_takes_the_larger_and_does_not_shrink_without_one():
    both = Hpa(
        metrics=(HpaMetric(signal=Signal.RUNNING, target=10.0), HpaMetric(signal=Signal.KV_USAGE, target=0.5)),
        down_window_s=0.0,
    )
    assert run(both, [role(replicas(4, running=2.0, kv_usage_ratio=1.0))]) == [8]
    assert run(both, [role(replicas(4, running=2.0, kv_usage_ratio=0.25))]) == [2]
    assert run(both, [role(replicas(4, running=2.0, kv_usage_ratio=None))]) == [4]
    assert run(both, [role(replicas(4, running=20.0, kv_usage_ratio=None))]) == [8]


# --- AIBrix ---


@pytest.mark.parametrize(
    ("current", "value", "up_rate", "expected"),
    [
        # AIBrix's own table (apa_test.go): 45, 35 and 90 against 30 from two pods.
        (2, 45.0, 2.0, 3),
        (2, 35.0, 2.0, 3),
        (2, 90.0, 2.0, 4),
        (2, 90.0, 2.5, 5),
        # A tenth is tolerated.
        (2, 33.0, 2.0, 2),
        (2, 27.0, 2.0, 2),
        # Down to a half at most: 6 × 1/30 is 1, the floor is 3.
        (6, 15.0, 2.0, 3),
        (6, 1.0, 2.0, 3),
        (6, 20.0, 2.0, 4),
    ],
)
def test_apa_table(current, value, up_rate, expected):
    assert apa_replicas(current, value=value, target=30.0, up_rate=up_rate) == expected


def test_apa_waits_out_its_cooldown_before_it_shrinks():
    apa = Apa(signal=Signal.KV_USAGE, target=0.5, window_s=10.0, down_cooldown_s=60.0)
    views = [role(replicas(4, kv_usage_ratio=0.5))] + [role(replicas(4, kv_usage_ratio=0.2))] * 9
    assert run(apa, views, step_s=10.0) == [4] * 7 + [3] + [2] * 2


KPA = Kpa(target=10.0)


def test_kpa_follows_the_stable_window_and_at_most_doubles():
    assert run(KPA, [role(replicas(2, running=14.0))] * 3) == [3] * 3
    assert run(KPA, [role(replicas(2, running=90.0))]) == [4]
    assert run(KPA, [role(replicas(4, running=10.5))]) == [4]


def test_kpa_panics_when_six_seconds_ask_for_twice_what_is_ready_and_does_not_shrink_in_panic():
    calm, rush = role(replicas(2, running=10.0)), role(replicas(2, running=50.0))
    answers = run(KPA, [calm] * 30 + [rush] * 3 + [calm] * 5, step_s=2.0)
    assert answers[29] == 2
    # The minute's mean would ask for three at most; the panic window doubles.
    assert answers[31] == 4
    assert min(answers[32:]) == 4


def test_kpa_leaves_panic_a_stable_window_after_the_last_cause():
    calm, rush = role(replicas(2, running=10.0)), role(replicas(2, running=50.0))
    answers = run(KPA, [rush] * 4 + [calm] * 45, step_s=2.0)
    # The panic window holds the rush until 12 s; 60 s later it is over.
    assert answers[33] == 4
    assert answers[-1] == 2


def test_kpa_counts_waiting_requests_as_in_flight():
    assert run(KPA, [role(replicas(2, running=10.0, waiting=10.0))]) == [4]


# --- WVA ---

WVA = Wva()


def wva_at(loads, **more):
    return role([Replica(name=f"r{i}", kv_usage_ratio=kv, waiting=q) for i, (kv, q) in enumerate(loads)], **more)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        # The documentation's five replicas: spare KV is 0.15 on average, spare queue 3.2: neither up nor down.
        ([(0.70, 2), (0.75, 3), (0.60, 1), (0.65, 2), (0.55, 1)], 5),
        # Spare KV of 0.05 is below 0.1.
        ([(0.75, 0)] * 3, 4),
        # Spare queue of 2 is below 3.
        ([(0.3, 3)] * 2, 3),
        # At 0.80 or with five waiting a replica is saturated; nothing is left.
        ([(0.80, 0)], 2),
        ([(0.1, 5)], 2),
        # One replica's load fits on the other two: 0.45 each, 0.35 spare.
        ([(0.3, 0)] * 3, 2),
        # On one it does not: 0.8.
        ([(0.4, 0)] * 2, 2),
        # Just so: 0.7 on one, 0.1 spare.
        ([(0.35, 1), (0.35, 1)], 1),
        # A single one stays.
        ([(0.0, 0)], 1),
    ],
)
def test_wva_table(loads, expected):
    assert run(WVA, [wva_at(loads)]) == [expected]


def test_wva_waits_for_replicas_that_start_and_for_what_it_asked_for():
    starting = role([*replicas(2, kv_usage_ratio=0.79), Replica(name="s", ready=False)])
    assert run(WVA, [starting]) == [3]
    assert run(WVA, [wva_at([(0.79, 0)] * 2, desired=3)]) == [3]


def test_wva_looks_at_the_worst_of_the_last_minute():
    views = [wva_at([(0.79, 0)] * 2, desired=2)] + [wva_at([(0.1, 0)] * 2)] * 6
    fast = dataclasses.replace(WVA, period_s=10.0)
    answers = run(fast, views, step_s=15.0)
    assert answers[:5] == [3, 3, 3, 3, 3]
    assert answers[5:] == [1, 1]


def test_wva_does_not_shrink_on_half_of_its_replicas():
    half = role([*replicas(2, kv_usage_ratio=0.1), *replicas(2, kv_usage_ratio=None)])
    assert run(WVA, [half]) == [4]


# --- Llumnix ---


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (role(replicas(2, kv_usage_ratio=0.71)), 3),
        (role(replicas(2, kv_usage_ratio=0.70)), 2),
        # Two at 0.2 would be one at 0.4; at 0.14 one at 0.28.
        (role(replicas(2, kv_usage_ratio=0.20)), 2),
        (role(replicas(2, kv_usage_ratio=0.14)), 1),
        (role(replicas(1, kv_usage_ratio=0.0)), 1),
        # One that starts counts as empty: 2 × 0.9 / 3.
        (role(replicas(2, starting=1, kv_usage_ratio=0.9)), 3),
        (role(replicas(2, starting=1, kv_usage_ratio=0.1)), 3),
        # Not everybody has reported.
        (role([*replicas(3, kv_usage_ratio=0.95), *replicas(1, kv_usage_ratio=None)]), 4),
    ],
)
def test_kv_auto_table(view, expected):
    assert run(KvAuto(), [view]) == [expected]


def test_kv_auto_sees_a_queue_only_when_it_is_told_to():
    queued = role(replicas(2, kv_usage_ratio=0.5, waiting=40.0, kv_blocks=1000, waiting_kv_blocks=600.0))
    assert run(KvAuto(), [queued]) == [2]
    assert run(KvAuto(queue_aware=True), [queued]) == [3]
    assert run(KvAuto(queue_aware=True), [role(replicas(2, kv_usage_ratio=0.9))]) == [2]


@pytest.mark.parametrize(
    ("usage", "running", "waiting_blocks", "expected"),
    [
        # 2 × 1000 blocks, free 200, 20 requests: 10 steps each, neither below 10 nor above 60.
        (0.9, 10.0, 0.0, 2),
        # 19 free blocks for 20 requests; one empty replica more lifts that to 51.
        (0.9905, 10.0, 0.0, 3),
        # Waiting prompts want 3,000 blocks: −2,800 free; three more make 200, which is 10 each.
        (0.9, 10.0, 1500.0, 5),
        # 1,900 free, 900 without one: 90 steps for each of ten.
        (0.05, 5.0, 0.0, 1),
        (0.3, 5.0, 0.0, 2),
    ],
)
def test_llumnix_freeness_table(usage, running, waiting_blocks, expected):
    view = role(
        replicas(2, kv_usage_ratio=usage, running=running, kv_blocks=1000, waiting_kv_blocks=waiting_blocks),
    )
    assert run(LlumnixFreeness(), [view]) == [expected]


# --- Dynamo's load planner ---


def test_dynamo_load_moves_one_worker_an_interval_by_the_mean():
    planner = DynamoLoad(period_s=30.0)
    high, low = role(replicas(3, kv_usage_ratio=0.95)), role(replicas(3, kv_usage_ratio=0.4))
    # The first answer rests on one pull; the next on those of an interval.
    assert run(planner, [high] * 4, step_s=10.0) == [4, 3, 3, 4]
    assert run(planner, [low] * 4, step_s=10.0) == [2, 3, 3, 2]
    assert run(planner, [role(replicas(3, kv_usage_ratio=0.7))]) == [3]


def test_dynamo_load_gives_a_new_decode_worker_three_intervals():
    planner = DynamoLoad(period_s=30.0)
    grown = [role(replicas(3, kv_usage_ratio=0.95))] + [role(replicas(4, kv_usage_ratio=0.3))] * 5
    assert run(planner, grown, step_s=30.0) == [4, 4, 4, 4, 3, 3]


def test_dynamo_load_scales_prefill_by_its_queue_unless_the_queue_is_falling():
    prefill = RoleKey("chat", Role.PREFILL)

    def queue(*lengths):
        return [role(replicas(2, waiting=length), key=prefill) for length in lengths]

    planner = DynamoLoad(period_s=30.0)
    assert run(planner, queue(3.0, 8.0, 8.0, 8.0), step_s=10.0)[-1] == 3
    assert run(planner, queue(3.0, 20.0, 12.0, 7.0), step_s=10.0)[-1] == 2
    assert run(planner, queue(0.1))[-1] == 1
    assert run(planner, [role(replicas(1, waiting=0.0), key=prefill)]) == [1]


def test_dynamo_load_does_nothing_while_workers_start():
    assert run(DynamoLoad(), [role(replicas(2, starting=1, kv_usage_ratio=0.99))]) == [3]


# --- the interface ---


def fleet(*wanted, budget_gpus, current=1):
    roles = tuple(role(replicas(current), key=RoleKey(name), gpus_per_replica=gpus) for name, gpus, _ in wanted)
    view = FleetView(now_s=0.0, roles=roles, budget_gpus=budget_gpus)
    return within_budget(view, {RoleKey(name): count for name, _, count in wanted})


def test_a_budget_is_shared_in_turn():
    # One each takes four of the eight; the next three replicas in turn take the other four.
    assert fleet(("a", 1, 5), ("b", 1, 5), ("c", 2, 3), budget_gpus=8) == {
        RoleKey("a"): 2,
        RoleKey("b"): 2,
        RoleKey("c"): 2,
    }
    assert fleet(("a", 1, 5), ("b", 1, 0), ("c", 2, 1), budget_gpus=8) == {
        RoleKey("a"): 5,
        RoleKey("b"): 0,
        RoleKey("c"): 1,
    }


@given(
    counts=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5),
    budget=st.integers(0, 20),
)
def test_a_budget_is_never_exceeded_by_growing(counts, budget):
    roles = tuple(
        role(replicas(current), key=RoleKey(f"m{i}"), gpus_per_replica=gpus, min_replicas=0)
        for i, (gpus, _, current) in enumerate(counts)
    )
    wanted = {RoleKey(f"m{i}"): want for i, (_, want, _) in enumerate(counts)}
    granted = within_budget(FleetView(now_s=0.0, roles=roles, budget_gpus=budget), wanted)
    used = sum(granted[r.key] * r.gpus_per_replica for r in roles)
    kept = sum(min(wanted[r.key], r.desired) * r.gpus_per_replica for r in roles)
    assert used <= max(budget, kept)
    assert all(min(wanted[r.key], r.desired) <= granted[r.key] <= wanted[r.key] for r in roles)
    open_to = [r.gpus_per_replica for r in roles if granted[r.key] < wanted[r.key]]
    assert not open_to or budget - used < max(open_to)


def test_bounds_hold_whatever_a_policy_asks_for():
    view = role(replicas(2, kv_usage_ratio=0.99), min_replicas=1, max_replicas=2)
    assert run(KvAuto(), [view]) == [2]
    assert run(KvAuto(), [role(replicas(2, kv_usage_ratio=0.0), min_replicas=2)]) == [2]


def test_static_keeps_its_split_within_bounds():
    views = (
        role(replicas(1)),
        role(replicas(3), key=RoleKey("code"), max_replicas=4),
        role(replicas(2), key=RoleKey("x")),
    )
    tick = started(Static({KEY: 2, RoleKey("code"): 9}))
    assert tick(FleetView(now_s=0.0, roles=views)) == {KEY: 2, RoleKey("code"): 4, RoleKey("x"): 2}


def test_absurd_values_are_missing_ones():
    assert Replica(name="r", running=float("nan")).value(Signal.RUNNING) is None
    assert Replica(name="r", running=float("inf")).value(Signal.RUNNING) is None
    assert run(HPA, [hpa_at(4, float("nan"))]) == [4]
