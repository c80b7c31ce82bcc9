"""A suite's runs, carried out and summed up: from names and functions to an `Evaluation`."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping

from lab.evaluation.runner import Outcome, run_all
from lab.evaluation.statistics import Slo
from lab.evaluation.study import Evaluation
from lab.evaluation.suite import Suite, SuiteError
from lab.evaluation.summaries import Case, RunSummary, summarise_run
from lab.virtual.result import RunResult

_DRAWN = 3
"""Policies whose timelines are kept where a suite does not name any."""


def evaluate(
    suite: Suite, *, jobs: int, on_done: Callable[[Case, Outcome[RunSummary]], None] | None = None
) -> Evaluation:
    """Every case of a suite. Raises `SuiteError` when its `run` cannot be sent to worker processes."""
    work = functools.partial(summary_of, suite.run, suite.slos, drawn(suite))
    try:
        pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SuiteError(f"suite {suite.name}: its run cannot be sent to a worker process: {error}") from None
    outcomes = run_all(work, suite.cases, jobs=jobs, on_done=on_done)
    done = dict(zip(suite.cases, outcomes, strict=True))
    return Evaluation(
        policies=tuple(suite.policies),
        traces=tuple(suite.traces),
        seeds=suite.seeds,
        baseline=suite.baseline,
        runs={case: outcome.result for case, outcome in done.items() if outcome.result is not None},
        failures={case: outcome.error for case, outcome in done.items() if outcome.error is not None},
    )


def drawn(suite: Suite) -> frozenset[Case]:
    """The cases whose timelines are kept to be drawn: the first seed of the plotted policies."""
    policies = suite.plotted or tuple(suite.policies)[:_DRAWN]
    return frozenset(Case(policy, trace, suite.seeds[0]) for policy in policies for trace in suite.traces)


def summary_of(
    run: Callable[[Case], RunResult], slos: Mapping[str, Slo], kept: frozenset[Case], case: Case
) -> RunSummary:
    """One case run and summed up, where it runs."""
    return summarise_run(case, run(case), slos, keep_timeline=case in kept)
