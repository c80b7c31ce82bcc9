"""Figures of passes: golden values by hand, and what a lost request may never do."""

import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lab.evaluation import DemoSummary, PassFigures, Slo, summarise, summary_table
from lab.evaluation.statistics import Distribution, quantile
from simulator.replay import Outcome, ReplayReport, RequestRecord

SLOS = {"chat": Slo(1.0, 0.05), "code": Slo(2.0, 0.1)}


def record(index, service="chat", outcome=Outcome.OK, ttft_s=0.5, tpot_s=0.02, e2e_s=1.0):
    complete = outcome is Outcome.OK
    return RequestRecord(
        index=index,
        service=service,
        arrival_s=float(index),
        prompt_tokens=10,
        output_tokens=20,
        outcome=outcome,
        received_tokens=20 if complete else 3,
        ttft_s=ttft_s,
        tpot_s=tpot_s if complete else None,
        e2e_s=e2e_s if complete else None,
    )


def report(*records):
    return ReplayReport(tuple(records), duration_s=10.0, wall_s=11.0, started_unix_s=0.0)


def test_attainment_needs_both_targets_and_a_complete_answer():
    summary = summarise(
        report(
            record(0),
            record(1, ttft_s=1.5),
            record(2, tpot_s=0.06),
            record(3, tpot_s=None),
            record(4, outcome=Outcome.SHORT),
            record(5, service="code", ttft_s=1.5, tpot_s=0.06),
        ),
        SLOS,
    )
    chat, code = summary.services
    assert (chat.requests, chat.lost, chat.slo_attainment) == (5, 1, pytest.approx(2 / 5))
    assert (chat.ttft_attainment, chat.tpot_attainment) == (pytest.approx(3 / 5), pytest.approx(3 / 5))
    assert (code.slo_attainment, summary.total.slo_attainment) == (1.0, pytest.approx(3 / 6))
    assert chat.goodput_rps == pytest.approx(0.2)
    assert summary.total.output_tps == pytest.approx((5 * 20 + 3) / 10)
    assert summary.outcomes == {"ok": 5, "short": 1}


def test_lost_requests_are_no_latencies():
    summary = summarise(report(record(0, ttft_s=0.2), record(1, outcome=Outcome.TIMEOUT, ttft_s=99.0)), SLOS)
    assert (summary.total.ttft.count, summary.total.ttft.p99_s) == (1, 0.2)
    nothing = summarise(report(record(0, outcome=Outcome.CONNECTION)), SLOS).total
    assert (nothing.slo_attainment, nothing.ttft.p95_s, nothing.e2e.mean_s) == (0.0, None, None)


def test_a_summary_says_when_its_trace_began():
    begun = dataclasses.replace(report(record(0)), started_unix_s=1_800_000_000.25)
    assert summarise(begun, SLOS).to_json()["started_unix_s"] == 1_800_000_000.25


def test_service_without_slo_is_named():
    with pytest.raises(KeyError, match="batch"):
        summarise(report(record(0, service="batch")), SLOS)


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), q=st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_quantiles_are_numpys(values, q):
    assert quantile(sorted(values), q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-9)


def test_distribution_of_nothing_has_no_values():
    assert Distribution.of([]) == Distribution(0, None, None, None, None)


def figures(name, summary, **counts):
    defaults = {"gpu_hours": 0.25, "misrouted_requests": 0}
    return PassFigures(name=name, summary=summary, **{**defaults, **counts})


def demo(policy_report, static_report, **counts):
    return DemoSummary(
        policy=figures("policy", summarise(policy_report, SLOS), **{"wakes": 2, "releases": 2, **counts}),
        static=figures("static", summarise(static_report, SLOS)),
        inputs={"seed": 1},
    )


GOOD = report(record(0), record(1), record(2, service="code"))
WORSE = report(record(0), record(1, ttft_s=3.0), record(2, service="code", ttft_s=3.0))


def test_bars_of_a_good_demo_are_met():
    summary = demo(GOOD, WORSE)
    assert summary.ok
    read = json.loads(json.dumps(summary.to_json()))
    assert [(bar["name"], bar["value"], bar["ok"]) for bar in read["bars"]] == [
        ("slo_gain_points", 66.67, True),
        ("wakes", 2, True),
        ("releases", 2, True),
        ("lost_requests", 0, True),
        ("misrouted_requests", 0, True),
    ]
    assert read["results"]["policy"]["summary"]["total"]["slo_attainment"] == 1.0


@pytest.mark.parametrize(
    ("summary", "missed"),
    [
        (demo(GOOD, GOOD), "slo_gain_points"),
        (demo(GOOD, WORSE, wakes=0), "wakes"),
        (demo(GOOD, WORSE, releases=0), "releases"),
        (demo(GOOD, WORSE, misrouted_requests=1), "misrouted_requests"),
        (demo(report(record(0), record(1), record(2, outcome=Outcome.SHORT)), WORSE), "lost_requests"),
    ],
)
def test_each_missed_bar_is_said(summary, missed):
    assert not summary.ok
    assert [bar.name for bar in summary.bars if not bar.ok] == [missed]


def test_table_shows_both_passes_of_each_service():
    console = Console(file=io.StringIO(), width=140, no_color=True)
    console.print(summary_table(demo(GOOD, WORSE)))
    shown = console.file.getvalue()
    assert shown.count("policy") == 4
    assert "+66.7 points" in shown
    assert "100.0%" in shown
