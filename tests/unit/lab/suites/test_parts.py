"""What each bar of the packaged suites needs, where a part of a suite is run."""

import pytest

from lab.evaluation.catalogue import find_suite
from lab.evaluation.documents import Finding
from lab.evaluation.study import Evaluation
from lab.evaluation.suite import Options

OTHERS = "needs traces sinusoidal, decode, prefill, alternating, simul-spike, real-code"


@pytest.mark.parametrize(
    ("name", "filters", "needs"),
    [
        (
            "tre",
            {"policies": ["trimtab", "kv-auto"]},
            {
                "p95_vs_kv": "no figure sinusoidal, decode, prefill, alternating, simul-spike, real-conv, real-code",
                "geomean_p95_vs_tuned_5s": "needs policy kv-auto-5s",
                "worst_p95_vs_tuned_5s": "needs policy kv-auto-5s",
                "geomean_p95_vs_tuned_1s": "needs policy kv-auto-1s",
                "gap_to_oracle": "needs policy oracle",
                "slo_attainment_mean": "no figure",
            },
        ),
        (
            "tre",
            {"traces": ["real-conv"]},
            {"p95_vs_kv": OTHERS, "gap_to_oracle": OTHERS, "slo_attainment_mean": OTHERS},
        ),
        (
            "diurnal",
            {"policies": ["trimtab"]},
            {"gpu_hours_saved_against_peak": "needs policy static-peak", "slo_attainment": "no figure"},
        ),
        (
            "smoke",
            {"policies": ["static-4"], "traces": ["burst"]},
            {
                "p95_reduction_of_twice_the_replicas": "needs policy static-2 and trace steady",
                "lost_requests": "needs policies static-1, static-2, fitted and trace steady",
            },
        ),
    ],
    ids=["tre, two policies", "tre, one trace", "diurnal, one policy", "smoke, one of each"],
)
def test_a_bar_says_what_it_needs_of_what_was_left_out(name, filters, needs):
    """No run has figures here, so a bar that lacks nothing else has no reason but that."""
    part = find_suite(name, Options()).only(**filters)
    nothing = Evaluation(
        policies=tuple(part.policies), traces=tuple(part.traces), seeds=part.seeds, baseline=part.baseline, runs={}
    )
    bars = {bar.name: bar for bar in Finding.of(part, nothing, {}).bars}
    assert {bar: bars[bar].reason for bar in needs} == needs
    assert {bar: bars[bar].ok for bar in needs} == {
        bar: False if reason.startswith("no figure") else None for bar, reason in needs.items()
    }
