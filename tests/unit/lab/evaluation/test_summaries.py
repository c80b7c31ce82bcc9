"""A run in figures: tables worked out by hand, numpy's quantiles, and what a lost request may never do."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.evaluation.histogram import Histogram
from lab.evaluation.summaries import FIGURE_METRICS, RUN_METRICS, Case, pooled, summarise_run, thinned
from lab.virtual.result import TimelinePoint
from tests.unit.lab.evaluation.made_up import CASE, NAN, SLOS, columns, result

ROWS = [
    # service, arrival, first token, end, output tokens, lost
    ("chat", 0.0, 0.5, 1.5, 11, False),  # TTFT 0.5, TPOT 0.1: both just in time
    ("chat", 1.0, 2.5, 3.0, 11, False),  # TTFT 1.5: late
    ("chat", 2.0, 2.5, 4.5, 11, False),  # TPOT 0.2: slow
    ("chat", 3.0, 3.5, 3.5, 1, False),  # one token, none to be slow
    ("chat", 4.0, NAN, NAN, 11, True),
    ("code", 5.0, 7.0, 9.0, 11, False),  # TTFT 2, TPOT 0.2: both just in time
    ("code", 9.0, NAN, NAN, 11, False),  # cut off
]


def test_a_run_by_hand():
    summary = summarise_run(CASE, result(columns(ROWS), energy_kwh=None, transitions=3, counts={"looks": 7}), SLOS)
    chat, code = summary.services
    assert (chat.service, chat.requests, chat.complete, chat.lost, chat.unfinished) == ("chat", 5, 4, 1, 0)
    assert (code.service, code.requests, code.complete, code.lost, code.unfinished) == ("code", 2, 1, 0, 1)
    assert chat.slo_attainment == 2 / 5
    assert (chat.ttft_good, chat.tpot_good) == (3, 3)
    assert code.slo_attainment == 1 / 2
    total = summary.total
    assert summary.value("slo_attainment") == 3 / 7
    assert summary.value("goodput_rps") == pytest.approx(0.3)
    assert summary.value("output_tps") == pytest.approx((4 * 11 + 1) / 10)
    assert total.e2e.count == 5
    assert total.e2e.mean_s == pytest.approx((1.5 + 2.0 + 2.5 + 0.5 + 4.0) / 5)
    assert total.e2e.p50_s == pytest.approx(2.0)
    # Positions 3.8 and 3.96 of the ascending 0.5, 1.5, 2, 2.5, 4.
    assert total.e2e.p95_s == pytest.approx(2.5 + 0.8 * 1.5)
    assert total.e2e.p99_s == pytest.approx(2.5 + 0.96 * 1.5)
    assert total.tpot.count == 4
    assert summary.value("tpot_p50_s") == pytest.approx(0.15)
    assert summary.value("ttft_p95_s", "code") == pytest.approx(2.0)
    assert summary.value("energy_kwh") is None
    assert (summary.value("transitions"), summary.value("counts.looks"), summary.value("counts.nothing")) == (
        3,
        7,
        None,
    )
    assert summary.value("lost", "no-such-service") is None
    with pytest.raises(KeyError, match="speed"):
        summary.value("speed")


def test_a_lost_request_is_no_latency_and_in_no_slo():
    kept = summarise_run(CASE, result(columns(ROWS[:4])), SLOS)
    dropped = [(*row[:2], NAN, NAN, row[4], True) if row[2] - row[1] > 1 else row for row in ROWS[:4]]
    faster = summarise_run(CASE, result(columns(dropped)), SLOS)
    assert faster.value("ttft_p99_s") < kept.value("ttft_p99_s")
    assert faster.value("lost") == 1
    assert faster.value("slo_attainment") == kept.value("slo_attainment")
    nothing = summarise_run(CASE, result(columns([ROWS[4]])), SLOS)
    assert (nothing.value("slo_attainment"), nothing.value("e2e_p95_s"), nothing.value("goodput_rps")) == (0, None, 0)


def test_a_run_without_requests_has_no_share_of_them():
    summary = summarise_run(CASE, result(columns([])), SLOS)
    assert [summary.value(name) for name in ("requests", "slo_attainment", "e2e_mean_s")] == [0, None, None]


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([("batch", 0.0, 1.0, 2.0, 5, False)], {}, "no SLO is known for batch"),
        ([("chat", NAN, 1.0, 2.0, 5, False)], {}, "arrival"),
        ([("chat", 0.0, 1.0, 2.0, 5, True)], {}, "both complete and lost"),
        ([("chat", 0.0, NAN, 2.0, 5, False)], {}, "no first token"),
        ([("chat", 3.0, 1.0, 2.0, 5, False)], {}, "negative"),
        (ROWS, {"gpu_hours": NAN}, "gpu_hours"),
        (ROWS, {"energy_kwh": math.inf}, "energy_kwh"),
        (ROWS, {"counts": {"looks": NAN}}, "count"),
        (ROWS, {"duration_s": 0.0}, "duration_s"),
        (ROWS, {"seed": 9}, "the result is of p on t, seed 9"),
    ],
)
def test_a_result_that_cannot_be_is_refused(rows, changes, words):
    with pytest.raises(ValueError, match=words):
        summarise_run(CASE, dataclasses.replace(result(columns(rows)), **changes), SLOS)


def test_columns_of_different_length_are_refused():
    broken = dataclasses.replace(columns(ROWS), lost=np.zeros(3, dtype=np.bool_))
    with pytest.raises(ValueError, match="differ in length"):
        summarise_run(CASE, result(broken), SLOS)


def test_pooled_runs_add_up_and_lost_ones_stay_lost():
    first = summarise_run(CASE, result(columns(ROWS)), SLOS).total
    second = summarise_run(Case("p", "t", 2), result(columns(ROWS[:2]), case=Case("p", "t", 2)), SLOS).total
    both = pooled([first, second])
    assert (both.requests, both.complete, both.lost, both.unfinished, both.good) == (9, 7, 1, 1, 4)
    assert both.duration_s == 20
    assert both.e2e.count == 7
    assert both.e2e.mean_s == pytest.approx((10.5 + 3.5) / 7)
    assert both.e2e.p50_s == pytest.approx(2.0, rel=0.005)
    assert FIGURE_METRICS["goodput_rps"](both) == pytest.approx(4 / 20)
    with pytest.raises(ValueError, match="nothing"):
        pooled([])


def test_every_metric_is_written_in_a_runs_document():
    document = summarise_run(CASE, result(columns(ROWS)), SLOS).to_json()
    assert set(FIGURE_METRICS) == set(document["all"])
    assert set(RUN_METRICS) <= set(document)
    assert document["services"]["chat"]["slo_attainment"] == 0.4


latencies = st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=60)


@given(values=latencies, q=st.sampled_from([0.01, 0.5, 0.9, 0.95, 0.99, 1.0]))
def test_a_histograms_quantile_is_numpys_within_half_a_percent(values, q):
    exact = float(np.quantile(values, q, method="inverted_cdf"))
    assert Histogram.of(np.array(values)).quantile_s(q) == pytest.approx(exact, rel=0.00501)


@given(parts=st.lists(st.lists(st.floats(0, 1e4), max_size=20), max_size=5))
def test_merged_histograms_are_the_histogram_of_all(parts):
    merged = Histogram.merged(Histogram.of(np.array(part)) for part in parts)
    whole = Histogram.of(np.array([value for part in parts for value in part]))
    assert (merged.first, merged.counts) == (whole.first, whole.counts)
    assert merged.mean_s == (None if whole.mean_s is None else pytest.approx(whole.mean_s))


def test_a_cdf_ascends_to_one_and_bounds_its_values():
    steps = Histogram.of(np.array([0.1, 0.2, 0.2, 5.0])).cdf()
    assert [share for _, share in steps] == [0.25, 0.75, 1.0]
    assert [bound for bound, _ in steps] == pytest.approx([0.1, 0.2, 5.0], rel=0.01)
    assert all(bound >= value for (bound, _), value in zip(steps, (0.1, 0.2, 5.0), strict=True))
    assert Histogram().cdf() == []


def test_a_timeline_is_thinned_role_by_role():
    points = [TimelinePoint(float(at_s), name, "colocated", 1, 1, 0, 0) for at_s in range(1000) for name in "ab"]
    kept = thinned(points, 100)
    assert [point.at_s for point in kept if point.service == "b"] == [float(at_s) for at_s in range(0, 1000, 10)]
    assert thinned(points[:50], 100) == tuple(sorted(points[:50], key=lambda point: (point.service, point.at_s)))
