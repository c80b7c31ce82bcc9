"""Finds a policy's best thresholds on a suite's training seeds, and keeps them in a file.

The search is that of `simulator.baselines.tuning`; here a setting's runs are done in parallel and what they cost is
reckoned by the suite. A run that raises ValueError makes its setting impossible. Any other error ends the search: a
setting must not win because the others crashed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pydantic
import yaml

from simulator.baselines.tuning import NothingWorks, Setting, Trial, Tuned, coordinate_search, grid_search
from simulator.evaluation.runner import Workers
from simulator.evaluation.statistics import Slo
from simulator.evaluation.suite import Suite, SuiteError, Tuning
from simulator.evaluation.summaries import Case, RunSummary, summarise_run
from simulator.virtual.result import RunResult
from trimtab.config.yamlfile import YamlError, read_yaml_documents

Runs = Callable[[Setting, Case], RunResult]


def tune(suite: Suite, policy: str, *, jobs: int, on_trial: Callable[[Trial], None] | None = None) -> Tuned:
    """The best setting of a policy and all that were tried. Raises `SuiteError`."""
    tuning = suite.tunings.get(policy)
    if tuning is None:
        there = ", ".join(suite.tunings) or "none"
        raise SuiteError(f"--tune {policy}: suite {suite.name} has policies to tune: {there}")
    with Workers(functools.partial(_summary_or_reason, tuning.run, suite.slos), jobs=jobs) as workers:
        objective = functools.partial(_cost, workers, tuning, policy, on_trial)
        try:
            if tuning.exhaustive:
                return grid_search(tuning.space, objective, max_trials=tuning.max_trials)
            return coordinate_search(tuning.space, objective, start=tuning.start, max_trials=tuning.max_trials)
        except NothingWorks as error:
            raise SuiteError(f"--tune {policy}: {error}") from None


def _cost(
    workers: Workers[tuple[Setting, Case], RunSummary | str],
    tuning: Tuning,
    policy: str,
    on_trial: Callable[[Trial], None] | None,
    setting: Setting,
) -> float:
    items = [(setting, Case(policy, trace, seed)) for trace, seed in tuning.cases]
    outcomes = workers.run(items)
    for (_, case), outcome in zip(items, outcomes, strict=True):
        if outcome.error is not None:
            raise SuiteError(f"--tune {policy}: {dict(setting)} on {case.trace}, seed {case.seed}: {outcome.error}")
    results = [outcome.result for outcome in outcomes]
    summaries = [result for result in results if isinstance(result, RunSummary)]
    cost = float(tuning.cost(summaries)) if len(summaries) == len(results) else math.nan
    if on_trial is not None:
        on_trial(Trial(setting, cost if math.isfinite(cost) else None))
    return cost


def _summary_or_reason(run: Runs, slos: Mapping[str, Slo], item: tuple[Setting, Case]) -> RunSummary | str:
    """One run of one setting, or why there cannot be one."""
    setting, case = item
    try:
        result = run(setting, case)
    except ValueError as error:
        return str(error)
    return summarise_run(case, result, slos)


# The file


class TunedPolicy(pydantic.BaseModel):
    """What is kept of a search."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    setting: dict[str, float]
    cost: float
    cost_name: str
    traces: tuple[str, ...]
    seeds: tuple[int, ...]
    complete: bool
    """False when the limit of trials ended the search."""
    trials: tuple[dict[str, float | None], ...]
    """Thresholds of each setting, and its `cost`: None where it is impossible."""

    @classmethod
    def of(cls, tuning: Tuning, tuned: Tuned) -> TunedPolicy:
        """From a search that ended."""
        if tuned.best.cost is None:
            raise ValueError("the best setting has no cost")
        return cls(
            setting=dict(tuned.best.setting),
            cost=tuned.best.cost,
            cost_name=tuning.cost_name,
            traces=tuning.traces,
            seeds=tuning.seeds,
            complete=tuned.complete,
            trials=tuple({"cost": trial.cost, **trial.setting} for trial in tuned.trials),
        )


_FILE = pydantic.TypeAdapter(dict[str, TunedPolicy])


def read_tuned(path: Path) -> dict[str, TunedPolicy]:
    """By policy; nothing when there is no file yet. Raises `SuiteError`, naming the file."""
    if not path.exists():
        return {}
    try:
        documents = read_yaml_documents(path)
        return _FILE.validate_python(documents[0] if documents else {})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SuiteError(f"{path}: not a file of --tune ({where}: {first['msg']}); name another or move it") from None
    except YamlError as error:
        raise SuiteError(str(error)) from None


def write_tuned(path: Path, policy: str, found: TunedPolicy) -> None:
    """Put what was found for a policy into a file, beside what it has for others. Raises `SuiteError`."""
    entries = {**read_tuned(path), policy: found}
    text = "# Written by `trimtab evaluate SUITE --tune POLICY`: each policy's best setting, and all that were tried.\n"
    plain = {name: entries[name].model_dump(mode="json") for name in sorted(entries)}
    text += yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=118)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror or error}") from None
