"""The bars of the TRE suite on tables made by hand."""

import math

import pytest

from lab.suites.tre_bars import geomean_reduction, reduction, tre_bars, worst_reduction

TRACES = ("one", "two")
P95_S = {
    "trimtab": (10.0, 12.0),
    "kv-auto": (20.0, 30.0),
    "kv-auto-5s": (20.0, 15.0),
    "kv-auto-1s": (12.5, 15.0),
    "oracle": (9.0, 11.0),
}


def table(changes=None, attainment=0.95, p99=2.0):
    """Medians by policy, trace and metric: P95 as above but for `changes`, P99 so many times that."""
    found = {policy: dict(zip(TRACES, values, strict=True)) for policy, values in P95_S.items()}
    for (policy, trace), value in (changes or {}).items():
        found[policy][trace] = value

    def medians(policy, trace, metric):
        value = found[policy][trace]
        if metric == "slo_attainment":
            return attainment
        if value is None:
            return None
        return value * (p99 if metric == "e2e_p99_s" else 1.0)

    return medians


def bars_of(medians, traces=TRACES):
    return {bar.name: bar for bar in tre_bars(medians, traces)}


def test_every_bar_that_was_asked_for_is_there_under_its_name():
    bars = bars_of(table())
    assert list(bars) == [
        "p95_vs_kv",
        "p99_vs_kv",
        "geomean_p95_vs_tuned_5s",
        "worst_p95_vs_tuned_5s",
        "geomean_p95_vs_tuned_1s",
        "gap_to_oracle",
        "slo_attainment_mean",
    ]
    assert {name: bar.bar for name, bar in bars.items()} == {
        "p95_vs_kv": 0.40,
        "p99_vs_kv": 0.40,
        "geomean_p95_vs_tuned_5s": 0.30,
        "worst_p95_vs_tuned_5s": -0.05,
        "geomean_p95_vs_tuned_1s": 0.15,
        "gap_to_oracle": 0.15,
        "slo_attainment_mean": 0.92,
    }


def test_figures_of_a_table():
    bars = bars_of(table())
    assert bars["p95_vs_kv"].value == {"one": pytest.approx(0.5), "two": pytest.approx(0.6)}
    assert bars["geomean_p95_vs_tuned_5s"].value == pytest.approx(1 - math.sqrt(0.5 * 0.8))
    assert bars["worst_p95_vs_tuned_5s"].value == pytest.approx(0.2)
    assert bars["geomean_p95_vs_tuned_1s"].value == pytest.approx(0.2)
    assert bars["gap_to_oracle"].value == pytest.approx(math.sqrt(10 / 9 * 12 / 11) - 1)
    assert bars["slo_attainment_mean"].value == pytest.approx(0.95)
    assert all(bar.ok for bar in bars.values())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("p95_vs_kv", {("kv-auto", "two"): 19.0}),
        ("p99_vs_kv", {("kv-auto", "one"): 16.0}),
        ("geomean_p95_vs_tuned_5s", {("kv-auto-5s", "one"): 14.0, ("kv-auto-5s", "two"): 14.0}),
        ("worst_p95_vs_tuned_5s", {("kv-auto-5s", "two"): 11.0}),
        ("geomean_p95_vs_tuned_1s", {("kv-auto-1s", "one"): 10.0}),
        ("gap_to_oracle", {("oracle", "one"): 8.0}),
    ],
)
def test_each_bar_is_missed_by_what_it_is_about(name, changes):
    missed = bars_of(table(changes))
    assert not missed[name].ok
    assert bars_of(table())[name].ok


def test_one_bad_trace_is_not_made_good_by_another():
    bars = bars_of(table({("kv-auto", "one"): 10.0, ("kv-auto", "two"): 1000.0}))
    assert bars["p95_vs_kv"].value["one"] == pytest.approx(0.0)
    assert not bars["p95_vs_kv"].ok


def test_a_policy_that_is_slower_than_the_tuned_one_somewhere_says_by_how_much():
    medians = table({("kv-auto-5s", "two"): 10.0})
    value = worst_reduction(medians, TRACES, "e2e_p95_s", ours="trimtab", theirs="kv-auto-5s")
    assert value == pytest.approx(-0.2)


def test_what_did_not_run_is_not_told_and_its_bar_missed():
    for policy in ("trimtab", "kv-auto-5s"):
        medians = table({(policy, "two"): None})
        bars = bars_of(medians)
        assert bars["geomean_p95_vs_tuned_5s"].value is None
        assert bars["worst_p95_vs_tuned_5s"].value is None
        assert not bars["geomean_p95_vs_tuned_5s"].ok
        assert geomean_reduction(medians, TRACES, "e2e_p95_s", ours="trimtab", theirs="kv-auto-5s") is None
        assert reduction(medians, "one", "e2e_p95_s", ours="trimtab", theirs="kv-auto-5s") == pytest.approx(0.5)
    assert not bars_of(table(attainment=None))["slo_attainment_mean"].ok
    assert not any(bar.ok for bar in tre_bars(table(), ()))
