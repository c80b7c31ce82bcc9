"""An evaluation as plain data: one JSON object, and rows for a table of one figure a line.

Everything that may differ between two runs of the same inputs is under `machine`; all else is the same bit for bit.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from lab.evaluation.bars import Bar
from lab.evaluation.confidence import Confidence
from lab.evaluation.runner import error_line
from lab.evaluation.study import Evaluation
from lab.evaluation.suite import Suite
from lab.evaluation.summaries import ALL, FIGURE_METRICS, RUN_METRICS

T = TypeVar("T")

COMPARED = ("e2e_mean_s", "e2e_p50_s", "e2e_p95_s", "e2e_p99_s", "ttft_p95_s", "tpot_p95_s", "gpu_hours", "energy_kwh")
"""Metrics whose change against the baseline is given."""
CSV_COLUMNS = (
    "trace", "policy", "service", "metric",
    "seeds", "missing", "mean", "ci_low", "ci_high", "median", "low", "high", "pooled",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The whole result of a suite's run."""

    suite: Suite
    evaluation: Evaluation
    bars: tuple[Bar, ...]
    notes: tuple[str, ...]
    machine: Mapping[str, object]
    problems: tuple[str, ...] = ()
    """What went wrong with the suite's bars or notes; hours of runs are not thrown away for it."""

    @classmethod
    def of(cls, suite: Suite, evaluation: Evaluation, machine: Mapping[str, object]) -> Finding:
        """With the suite's own bars and notes. Bars are of the whole suite, also where a part of it was run."""
        asked = _of_whole(suite, evaluation)
        bars, no_bars = _asked("bars", suite.bars and functools.partial(_plain, suite.bars), asked)
        bars = tuple(_in_part(suite, bar, failed=bool(evaluation.failures)) for bar in bars)
        notes, no_notes = _asked("notes", suite.notes, evaluation)
        return cls(
            suite=suite, evaluation=evaluation, bars=bars, notes=notes, machine=machine, problems=no_bars + no_notes
        )

    @property
    def complete(self) -> bool:
        """Whether every case ran and every figure of them is known."""
        return not self.evaluation.failures and not self.problems

    @property
    def bars_missed(self) -> int:
        """How many bars are; those that are not judged are none of them."""
        return sum(bar.ok is False for bar in self.bars)

    @property
    def bars_not_judged(self) -> int:
        """How many bars are unknown because a filter left runs out that they need."""
        return sum(bar.ok is None for bar in self.bars)


def _of_whole(suite: Suite, evaluation: Evaluation) -> Evaluation:
    """The same runs among all policies and traces that the suite has."""
    whole = suite.whole
    if whole is None:
        return evaluation
    return dataclasses.replace(
        evaluation, policies=tuple(whole.policies), traces=tuple(whole.traces), baseline=whole.baseline
    )


def _in_part(suite: Suite, bar: Bar, *, failed: bool) -> Bar:
    """A bar that lacks nothing but runs that were left out is not judged.

    Where cases failed, too, a bar that does not name the policies of its runs stays missed: it is not known which of
    the two removed its figure.
    """
    needs = _needs(suite, bar)
    return bar.left_out(needs) if needs and (bar.policies or not failed) else bar


def _needs(suite: Suite, bar: Bar) -> str:
    """The runs of the bar that were left out, as text; empty when none were."""
    policies = [name for name in suite.left_out_policies if not bar.policies or name in bar.policies]
    wanting = {"policy": policies, "trace": suite.left_out_traces}
    plural = {"policy": "policies", "trace": "traces"}
    found = [
        f"{word if len(names) == 1 else plural[word]} {', '.join(names)}" for word, names in wanting.items() if names
    ]
    return f"needs {' and '.join(found)}" if found else ""


def _plain(ask: Callable[[Evaluation], Sequence[Bar]], evaluation: Evaluation) -> Sequence[Bar]:
    """Bars that can be written as JSON; TypeError or ValueError for others."""
    bars = ask(evaluation)
    json.dumps([bar.document() for bar in bars], allow_nan=False)
    return bars


def _asked(
    what: str, ask: Callable[[Evaluation], Sequence[T]] | None, evaluation: Evaluation
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """A suite's notes on its runs, and the errors of making them."""
    try:
        return (tuple(ask(evaluation)) if ask else ()), ()
    except Exception as error:  # noqa: BLE001 - a suite's own mistake, whatever it is
        return (), (f"the suite's {what} could not be told: {error_line(error)}",)


def document(finding: Finding) -> dict[str, object]:
    """The whole as one object: machine, inputs, results by trace and policy, failures, bars, notes."""
    evaluation = finding.evaluation
    return {
        "machine": dict(finding.machine),
        "inputs": inputs(finding.suite),
        "results": {
            trace: {policy: _results(evaluation, policy, trace) for policy in evaluation.policies}
            for trace in evaluation.traces
        },
        "failures": [
            {"policy": case.policy, "trace": case.trace, "seed": case.seed, "error": error}
            for case, error in evaluation.failures.items()
        ],
        "problems": list(finding.problems),
        "bars": [bar.document() for bar in finding.bars],
        "notes": list(finding.notes),
    }


def inputs(suite: Suite) -> dict[str, object]:
    """What was run, as plain data."""
    return {
        "suite": suite.name,
        "policies": dict(suite.policies),
        "baseline": suite.baseline,
        "traces": dict(suite.traces),
        "seeds": list(suite.seeds),
        "slos": {name: dataclasses.asdict(slo) for name, slo in suite.slos.items()},
        **suite.inputs,
    }


def json_text(finding: Finding) -> str:
    """`document` as text. Raises ValueError where a suite let NaN or infinity into it."""
    return json.dumps(document(finding), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def csv_text(evaluation: Evaluation) -> str:
    """Every figure over seeds and pooled, one a line; what is missing is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(_rows(evaluation))
    return text.getvalue()


def _rows(evaluation: Evaluation) -> Iterator[Sequence[object]]:
    services = (ALL, *evaluation.services())
    for trace in evaluation.traces:
        for policy in evaluation.policies:
            for service in services:
                together = evaluation.pooled(policy, trace, service)
                for metric, of in FIGURE_METRICS.items():
                    confidence = evaluation.confidence(policy, trace, metric, service)
                    yield _row((trace, policy, service, metric), confidence, of(together) if together else None)
            for metric in (*RUN_METRICS, *count_names(evaluation)):
                yield _row((trace, policy, ALL, metric), evaluation.confidence(policy, trace, metric), None)


def _row(head: Sequence[str], confidence: Confidence, together: float | None) -> Sequence[object]:
    figures = (
        confidence.mean,
        confidence.ci_low,
        confidence.ci_high,
        confidence.median,
        confidence.low,
        confidence.high,
        together,
    )
    return (*head, confidence.seeds, confidence.missing, *("" if figure is None else figure for figure in figures))


def count_names(evaluation: Evaluation) -> tuple[str, ...]:
    """`counts.NAME` of everything that a policy counted."""
    return tuple(sorted({f"counts.{name}" for run in evaluation.runs.values() for name in run.counts}))


def _results(evaluation: Evaluation, policy: str, trace: str) -> dict[str, object]:
    runs = evaluation.of(policy, trace)
    return {
        "over_seeds": {
            **_confidences(evaluation, policy, trace, (*FIGURE_METRICS, *RUN_METRICS, *count_names(evaluation)), ALL),
        },
        "pooled": _pooled(evaluation, policy, trace, ALL),
        "services": {
            service: {
                "over_seeds": _confidences(evaluation, policy, trace, tuple(FIGURE_METRICS), service),
                "pooled": _pooled(evaluation, policy, trace, service),
            }
            for service in evaluation.services()
        },
        "change": {
            metric: dataclasses.asdict(evaluation.change(policy, trace, metric, against=evaluation.baseline))
            for metric in COMPARED
        },
        "runs": [run.to_json() for run in runs],
    }


def _confidences(
    evaluation: Evaluation, policy: str, trace: str, metrics: Sequence[str], service: str
) -> dict[str, object]:
    return {metric: dataclasses.asdict(evaluation.confidence(policy, trace, metric, service)) for metric in metrics}


def _pooled(evaluation: Evaluation, policy: str, trace: str, service: str) -> dict[str, object] | None:
    together = evaluation.pooled(policy, trace, service)
    return None if together is None else together.to_json()
