"""The notes of the TRE suite's report, from the figures: where the paper's plain rules lose, and how."""

from __future__ import annotations

from collections.abc import Sequence

from lab.evaluation.study import Evaluation
from lab.suites.tre_bars import ATTAINMENT, DEFAULT, KV_TUNED_1S, KV_TUNED_5S, P95, PLAIN, medians_of, reduction

RIVALS = (KV_TUNED_5S, KV_TUNED_1S, DEFAULT)
_SAME = 0.02
"""Differences of medians below this share are called none."""


def notes(evaluation: Evaluation) -> Sequence[str]:
    """One paragraph for each rival of the plain rules that ran, and one on the models that lose."""
    if PLAIN not in evaluation.policies:
        return []
    found = [text for rival in RIVALS if rival in evaluation.policies for text in [_against(evaluation, rival)] if text]
    return [*found, *_weakest(evaluation)]


def _against(evaluation: Evaluation, rival: str) -> str:
    medians = medians_of(evaluation)
    worse = []
    for trace in evaluation.traces:
        change = reduction(medians, trace, P95, ours=PLAIN, theirs=rival)
        if change is not None and change < -_SAME:
            worse.append(f"{trace} (P95 {-change:.0%} longer)")
    if not worse:
        return f"The plain rules lose to {rival} on no trace."
    return f"The plain rules lose to {rival} on {', '.join(worse)}."


def _weakest(evaluation: Evaluation) -> Sequence[str]:
    """The model that the plain rules serve worst, by trace, where that is below nine tenths."""
    lines = []
    for trace in evaluation.traces:
        by_service = {
            service: evaluation.confidence(PLAIN, trace, ATTAINMENT, service).median
            for service in evaluation.services()
        }
        known = {service: value for service, value in by_service.items() if value is not None}
        if not known:
            continue
        service = min(known, key=lambda name: (known[name], name))
        if known[service] < 0.9:
            moves = evaluation.confidence(PLAIN, trace, "transitions").median
            default = evaluation.confidence(DEFAULT, trace, ATTAINMENT, service).median
            beside = "" if default is None else f", {default:.2f} under {DEFAULT}"
            lines.append(f"{trace}: {service} {known[service]:.2f}{beside}, {moves:.0f} transitions")
    if not lines:
        return []
    return ["Where the plain rules leave a model below 0.9 of its requests in SLO: " + "; ".join(lines) + "."]
