"""The bars of Trimtab in the TRE suite, as pure functions of the figures of the runs.

Figures of one trace are medians over seeds; a reduction is 1 − median of ours / median of theirs. Over traces they are
taken together by the geometric mean of those ratios. A figure that is not known, since runs failed or were left out,
is None: its bar is missed, or not judged where a filter left it out. Trimtab as shipped decides each second.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from lab.evaluation.bars import Bar, at_least, at_most
from lab.evaluation.study import Evaluation, geometric_mean

DEFAULT, PLAIN = "trimtab", "trimtab-plain"
KV, KV_TUNED_5S, KV_TUNED_1S, ORACLE = "kv-auto", "kv-auto-5s", "kv-auto-1s", "oracle"
P95, P99, ATTAINMENT = "e2e_p95_s", "e2e_p99_s", "slo_attainment"

VS_KV = 0.40
GEOMEAN_VS_TUNED_5S = 0.30
WORST_VS_TUNED_5S = -0.05
GEOMEAN_VS_TUNED_1S = 0.15
GAP_TO_ORACLE = 0.15
ATTAINED = 0.92

Medians = Callable[[str, str, str], float | None]
"""From policy, trace and metric to the median over seeds; None where it is not known."""


def medians_of(evaluation: Evaluation) -> Medians:
    """Medians of an evaluation's runs. A policy that failed on a seed has none: the seeds must be the same for all."""

    def median(policy: str, trace: str, metric: str) -> float | None:
        confidence = evaluation.confidence(policy, trace, metric)
        return confidence.median if confidence.seeds == len(evaluation.seeds) else None

    return median


def reduction(medians: Medians, trace: str, metric: str, *, ours: str, theirs: str) -> float | None:
    """1 − ours / theirs: 0.4 is 40 % less."""
    ratio = _ratio(medians, trace, metric, ours, theirs)
    return None if ratio is None else 1.0 - ratio


def geomean_reduction(medians: Medians, traces: Sequence[str], metric: str, *, ours: str, theirs: str) -> float | None:
    """1 − the geometric mean over traces of ours / theirs; None when one trace has no ratio."""
    mean = geometric_mean(_ratio(medians, trace, metric, ours, theirs) for trace in traces)
    return None if mean is None else 1.0 - mean


def worst_reduction(medians: Medians, traces: Sequence[str], metric: str, *, ours: str, theirs: str) -> float | None:
    """The least reduction of any trace; below 0 where ours is worse. None when one trace has none."""
    found = [reduction(medians, trace, metric, ours=ours, theirs=theirs) for trace in traces]
    known = [value for value in found if value is not None]
    return min(known) if known and len(known) == len(found) else None


def mean_attainment(medians: Medians, traces: Sequence[str], policy: str) -> float | None:
    """The mean over traces; None when one trace has none."""
    found = [medians(policy, trace, ATTAINMENT) for trace in traces]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known and len(known) == len(found) else None


def tre_bars(medians: Medians, traces: Sequence[str]) -> tuple[Bar, ...]:
    """The bars of the suite on its traces at their main loads."""

    def each(metric: str) -> Mapping[str, float | None]:
        return {trace: reduction(medians, trace, metric, ours=DEFAULT, theirs=KV) for trace in traces}

    gain = geomean_reduction(medians, traces, P95, ours=DEFAULT, theirs=ORACLE)
    return (
        at_least("p95_vs_kv", each(P95), VS_KV, policies=(DEFAULT, KV)),
        at_least("p99_vs_kv", each(P99), VS_KV, policies=(DEFAULT, KV)),
        at_least(
            "geomean_p95_vs_tuned_5s",
            geomean_reduction(medians, traces, P95, ours=DEFAULT, theirs=KV_TUNED_5S),
            GEOMEAN_VS_TUNED_5S,
            policies=(DEFAULT, KV_TUNED_5S),
        ),
        at_least(
            "worst_p95_vs_tuned_5s",
            worst_reduction(medians, traces, P95, ours=DEFAULT, theirs=KV_TUNED_5S),
            WORST_VS_TUNED_5S,
            policies=(DEFAULT, KV_TUNED_5S),
        ),
        at_least(
            "geomean_p95_vs_tuned_1s",
            geomean_reduction(medians, traces, P95, ours=DEFAULT, theirs=KV_TUNED_1S),
            GEOMEAN_VS_TUNED_1S,
            policies=(DEFAULT, KV_TUNED_1S),
        ),
        # How much longer than the oracle's: ours / theirs − 1.
        at_most("gap_to_oracle", None if gain is None else -gain, GAP_TO_ORACLE, policies=(DEFAULT, ORACLE)),
        at_least("slo_attainment_mean", mean_attainment(medians, traces, DEFAULT), ATTAINED, policies=(DEFAULT,)),
    )


def _ratio(medians: Medians, trace: str, metric: str, ours: str, theirs: str) -> float | None:
    mine, other = medians(ours, trace, metric), medians(theirs, trace, metric)
    return None if mine is None or other is None or other <= 0 else mine / other
