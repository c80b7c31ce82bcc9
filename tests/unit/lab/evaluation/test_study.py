"""Figures over seeds, against another policy, and what is asked of them."""

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.evaluation.bars import Bar, at_least, at_most
from lab.evaluation.confidence import Confidence, t_quantile
from lab.evaluation.study import Evaluation, geometric_mean
from lab.evaluation.suite import SuiteError
from lab.evaluation.summaries import Case, summarise_run
from tests.unit.lab.evaluation.made_up import SLOS, columns, result, suite

# Two-sided quantiles of Student's t from printed tables.
T_TABLE = [
    (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (9, 0.95, 2.262), (10, 0.95, 2.228),
    (30, 0.95, 2.042), (120, 0.95, 1.980), (1, 0.99, 63.657), (4, 0.99, 4.604), (9, 0.9, 1.833), (1, 0.5, 1.000),
]  # fmt: skip


@pytest.mark.parametrize(("degrees", "confidence", "expected"), T_TABLE)
def test_students_t_is_that_of_the_tables(degrees, confidence, expected):
    assert t_quantile(degrees, confidence) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_students_t_has_no_quantile_outside_its_range(degrees, confidence):
    with pytest.raises(ValueError, match="degrees"):
        t_quantile(degrees, confidence)


def test_a_spread_by_hand():
    confidence = Confidence.of([2.0, 4.0, 9.0])
    assert (
        confidence.seeds,
        confidence.missing,
        confidence.mean,
        confidence.median,
        confidence.low,
        confidence.high,
    ) == (3, 0, 5, 4, 2, 9)
    half = 4.3027 * statistics.stdev([2, 4, 9]) / math.sqrt(3)
    assert (confidence.ci_low, confidence.ci_high) == (
        pytest.approx(5 - half, abs=1e-3),
        pytest.approx(5 + half, abs=1e-3),
    )


def test_one_seed_has_no_interval_and_none_has_nothing():
    assert Confidence.of([3.0]) == Confidence(1, 0, 3.0, 3.0, 3.0, 3.0, None, None)
    assert Confidence.of([None, math.nan]) == Confidence(0, 2, None, None, None, None, None, None)
    assert Confidence.of([]) == Confidence(0, 0, None, None, None, None, None, None)


def test_missing_seeds_are_counted_and_are_not_zero():
    confidence = Confidence.of([4.0, None, 6.0])
    assert (confidence.seeds, confidence.missing, confidence.mean, confidence.low) == (2, 1, 5.0, 4.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_mean_lies_within_its_interval_and_range(values):
    confidence = Confidence.of(values)
    slack = 1e-9 * max(map(abs, values))
    assert confidence.ci_low - slack <= confidence.mean <= confidence.ci_high + slack
    assert confidence.low - slack <= confidence.mean <= confidence.high + slack


def evaluation(e2e_s: dict[Case, float], failures: dict[Case, str] | None = None) -> Evaluation:
    """One request a run, of the given E2E."""
    runs = {}
    for case, took_s in e2e_s.items():
        row = ("chat", 0.0, took_s / 2, took_s, 2, False)
        runs[case] = summarise_run(case, result(columns([row]), case=case), SLOS)
    return Evaluation(
        policies=("new", "old"), traces=("t",), seeds=(1, 2, 3), baseline="old", runs=runs, failures=failures or {}
    )


PAIRS = {
    Case("old", "t", 1): 1.0,
    Case("old", "t", 2): 2.0,
    Case("old", "t", 3): 10.0,
    Case("new", "t", 1): 0.5,
    Case("new", "t", 2): 1.8,
    Case("new", "t", 3): 2.0,
}


def test_a_change_is_taken_seed_by_seed():
    change = evaluation(PAIRS).change("new", "t", "e2e_p95_s", against="old")
    assert change.median == pytest.approx(-0.5)
    assert (change.low, change.high) == (pytest.approx(-0.8), pytest.approx(-0.1))
    same = evaluation(PAIRS).change("old", "t", "e2e_p95_s", against="old")
    assert (same.low, same.high) == (0, 0)


def test_a_seed_that_failed_is_missing_from_both_sides_of_a_change():
    left = {case: value for case, value in PAIRS.items() if case != Case("new", "t", 3)}
    some = evaluation(left, {Case("new", "t", 3): "gone"})
    change = some.change("new", "t", "e2e_p95_s", against="old")
    assert (change.seeds, change.missing, change.median) == (2, 1, pytest.approx(-0.3))
    assert some.confidence("new", "t", "e2e_p95_s").seeds == 2
    assert some.change("new", "t", "e2e_p95_s", against="nobody") == Confidence.of([None] * 3)


def test_what_was_not_run_is_none():
    nothing = evaluation({})
    assert nothing.pooled("new", "t") is None
    assert nothing.confidence("new", "t", "e2e_p95_s").mean is None
    assert nothing.services() == ()


@pytest.mark.parametrize(
    ("values", "mean"),
    [((2.0, 8.0), 4.0), ((3.0,), 3.0), ((), None), ((1.0, None), None), ((1.0, 0.0), None), ((1.0, math.nan), None)],
)
def test_geometric_mean(values, mean):
    assert geometric_mean(values) == (None if mean is None else pytest.approx(mean))


@pytest.mark.parametrize(
    ("made", "ok", "told"),
    [
        (at_least("b", 0.4, 0.4), True, 0.4),
        (at_least("b", 0.39, 0.4), False, 0.39),
        (at_most("b", 0.4, 0.4), True, 0.4),
        (at_most("b", 0.41, 0.4), False, 0.41),
        (at_most("b", None, 0.4), False, None),
        (at_least("b", math.nan, 0.4), False, None),
        (at_least("b", math.inf, 0.4), False, None),
        (at_least("b", {"x": 0.5, "y": 0.4}, 0.4), True, {"x": 0.5, "y": 0.4}),
        (at_least("b", {"x": 0.5, "y": 0.3}, 0.4), False, {"x": 0.5, "y": 0.3}),
        (at_most("b", {"x": 0.1, "y": None}, 0.4), False, {"x": 0.1, "y": None}),
        (at_most("b", {}, 0.4), False, {}),
    ],
)
def test_a_bar_is_met_by_every_value_or_missed(made, ok, told):
    assert made == Bar("b", told, 0.4, ok, made.reason)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (at_least("b", 0.5, 0.4), None),
        (at_least("b", 0.3, 0.4), None),
        (at_least("b", {"x": None, "y": 0.3}, 0.4), None),
        (at_least("b", {"x": None, "y": 0.5, "z": None}, 0.4), "no figure x, z"),
        (at_most("b", None, 0.4), "no figure"),
        (at_most("b", {}, 0.4), "no figure"),
    ],
)
def test_only_a_bar_that_lacks_nothing_but_figures_can_have_been_left_out(made, reason):
    """One that falls short with what there is of it is missed, whatever was left out beside."""
    assert made.document().get("reason") == reason
    left = made.left_out("--policy")
    assert left == (made if reason is None else Bar("b", made.value, 0.4, None, "--policy"))


@pytest.mark.parametrize(
    ("filters", "policies", "traces"),
    [
        ({}, (), ()),
        ({"policies": ["slow", "fast"], "traces": ["one", "other"], "seeds": 2}, (), ()),
        ({"policies": ["slow"]}, ("fast",), ()),
        ({"traces": ["one"], "policies": ["fast"]}, ("slow",), ("other",)),
    ],
)
def test_a_part_knows_what_was_taken_away(filters, policies, traces):
    part = suite().only(**filters)
    assert (part.left_out_policies, part.left_out_traces) == (policies, traces)
    smaller = part.only(seeds=1)
    assert (smaller.left_out_policies, smaller.left_out_traces) == (policies, traces)


def test_a_part_of_a_part_lacks_what_both_took_away():
    part = suite().only(policies=["fast"]).only(traces=["one"])
    assert (part.left_out_policies, part.left_out_traces) == (("slow",), ("other",))


def test_lost_requests_are_known_when_all_ran_or_some_are_lost():
    assert evaluation(PAIRS).lost_requests() == 0.0
    some = {case: value for case, value in PAIRS.items() if case.seed != 3}
    assert evaluation(some).lost_requests() is None
    runs = dict(evaluation(some).runs)
    case = Case("old", "t", 1)
    runs[case] = summarise_run(case, result(columns([("chat", 0.0, math.nan, math.nan, 2, True)]), case=case), SLOS)
    assert dataclasses.replace(evaluation(some), runs=runs).lost_requests() == 1.0


def test_a_part_of_a_suite():
    whole = suite()
    part = whole.only(policies=["fast"], traces=["other"], seeds=2)
    assert part.cases == (Case("fast", "other", 1), Case("fast", "other", 2))
    assert (part.baseline, whole.only(traces=["one"]).baseline) == ("fast", "slow")
    assert len(whole.cases) == 12


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"policies": ["quick"]}, "--policy quick: suite made-up has slow, fast"),
        ({"traces": ["third"]}, "--trace third: suite made-up has one, other"),
        ({"seeds": 4}, "--seeds 4: suite made-up has 3 seeds"),
        ({"seeds": 0}, "--seeds 0"),
    ],
)
def test_a_part_that_is_not_there_is_named(wanted, words):
    with pytest.raises(SuiteError, match=words):
        suite().only(**wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"baseline": "none"}, "baseline"),
        ({"seeds": (1, 1)}, "twice"),
        ({"seeds": ()}, "must not be empty"),
        ({"plotted": ("none",)}, "none of its policies"),
        ({"inputs": {"x": math.nan}}, "not JSON compliant"),
    ],
)
def test_a_suite_that_contradicts_itself_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        suite(**change)
