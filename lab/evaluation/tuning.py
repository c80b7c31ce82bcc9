"""Finds a policy's best thresholds on a suite's training seeds, and keeps them in a file.

The search is that of `lab.baselines.tuning`; here a setting's runs are done in parallel and the suite
computes their cost. A search may be in two stages: many settings on one seed, the best of them on all, since what is
best on one seed is partly luck. A run that raises ValueError makes its setting impossible. Any other error ends the
search: a setting must not win because the others crashed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pydantic
import yaml

from lab.baselines.tuning import (
    NothingWorks,
    Setting,
    Trial,
    Tuned,
    coordinate_search,
    grid_search,
    run_finals,
)
from lab.evaluation.runner import Workers
from lab.evaluation.statistics import Slo
from lab.evaluation.suite import Suite, SuiteError, Tuning
from lab.evaluation.summaries import Case, RunSummary, summarise_run
from lab.virtual.result import RunResult
from trimtab.config.yamlfile import YamlError, read_yaml_documents

Runs = Callable[[Setting, Case], RunResult]


def tune(suite: Suite, policy: str, *, jobs: int, on_trial: Callable[[Trial], None] | None = None) -> Tuned:
    """The best setting of a policy and all that were tried. Raises `SuiteError`."""
    tuning = suite.tunings.get(policy)
    if tuning is None:
        there = ", ".join(suite.tunings) or "none"
        raise SuiteError(f"--tune {policy}: suite {suite.name} has policies to tune: {there}")
    with Workers(functools.partial(_summary_or_reason, tuning.run, suite.slos), jobs=jobs) as workers:
        bench = _Bench(workers, tuning, policy, on_trial)
        searched = tuning.seeds[:1] if tuning.in_two_stages else tuning.seeds
        objective = functools.partial(bench.cost, seeds=searched)
        try:
            if tuning.exhaustive:
                found = grid_search(tuning.space, objective, max_trials=tuning.max_trials)
            else:
                found = coordinate_search(tuning.space, objective, start=tuning.start, max_trials=tuning.max_trials)
            if tuning.finalists is not None and tuning.in_two_stages:
                over_all = functools.partial(bench.cost, seeds=tuning.seeds)
                found = run_finals(found, over_all, finalists=tuning.finalists)
        except NothingWorks as error:
            raise SuiteError(f"--tune {policy}: {error}") from None
        return found


class _Bench:
    """Runs settings of one policy, none twice on the same trace and seed."""

    def __init__(
        self,
        workers: Workers[tuple[Setting, Case], RunSummary | str],
        tuning: Tuning,
        policy: str,
        on_trial: Callable[[Trial], None] | None,
    ) -> None:
        self._workers = workers
        self._tuning = tuning
        self._policy = policy
        self._on_trial = on_trial
        self._done: dict[tuple[tuple[tuple[str, float], ...], Case], RunSummary | str] = {}

    def cost(self, setting: Setting, *, seeds: tuple[int, ...]) -> float:
        """What a setting costs on the tuning's traces and some of its seeds; NaN where a run is impossible."""
        key = tuple(sorted(setting.items()))
        cases = [Case(self._policy, trace, seed) for trace, seed in self._tuning.cases(seeds)]
        self._run(setting, [case for case in cases if (key, case) not in self._done])
        results = [self._done[key, case] for case in cases]
        summaries = [result for result in results if isinstance(result, RunSummary)]
        cost = float(self._tuning.cost(summaries)) if len(summaries) == len(results) else math.nan
        if self._on_trial is not None:
            self._on_trial(Trial(setting, cost if math.isfinite(cost) else None))
        return cost

    def _run(self, setting: Setting, cases: Sequence[Case]) -> None:
        key = tuple(sorted(setting.items()))
        outcomes = self._workers.run([(setting, case) for case in cases])
        for case, outcome in zip(cases, outcomes, strict=True):
            if outcome.result is None:
                where = f"{dict(setting)} on {case.trace}, seed {case.seed}"
                raise SuiteError(f"--tune {self._policy}: {where}: {outcome.error}")
            self._done[key, case] = outcome.result


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
    """Thresholds of each setting, and its `cost`: None where it is impossible. First seed only, with `finals`."""
    finals: tuple[dict[str, float | None], ...] = ()
    """Of a search in two stages: the settings among which was chosen on all seeds, with their costs there."""

    @classmethod
    def of(cls, tuning: Tuning, tuned: Tuned) -> TunedPolicy:
        """From a search that ended. Raises ValueError when its best setting has no cost."""
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
            finals=tuple({"cost": trial.cost, **trial.setting} for trial in tuned.finals),
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
