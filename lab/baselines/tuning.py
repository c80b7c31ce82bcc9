"""Finds a baseline's best thresholds, so that comparisons are against tuned baselines.

The objective is given: it runs a baseline with a setting and returns its cost. Searches are exhaustive over a grid,
or one threshold after another until none improves. Both are repeatable; equal settings are tried once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

Setting = Mapping[str, float]
Objective = Callable[[Setting], float]
"""The cost of a setting, less is better. Not finite, or a ValueError: the setting is impossible."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One setting and what it cost; None where it is impossible."""

    setting: Setting
    cost: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The best setting, and all that were tried, in order."""

    best: Trial
    trials: tuple[Trial, ...]
    complete: bool
    """False when the budget of trials ended the search."""
    finals: tuple[Trial, ...] = ()
    """Of a search in two stages: the best of `trials` with what they cost in the second, which the best setting won."""


class NothingWorks(ValueError):
    """No setting that was tried is possible."""


class _Trials:
    """Settings tried so far, up to a limit."""

    def __init__(self, objective: Objective, limit: int) -> None:
        self._objective = objective
        self._limit = limit
        self._tried: dict[tuple[tuple[str, float], ...], Trial] = {}
        self.spent = False

    def cost(self, setting: Setting) -> float:
        """The cost, infinite where the setting is impossible or the trials are used up."""
        key = tuple(sorted(setting.items()))
        if key not in self._tried:
            if len(self._tried) >= self._limit:
                self.spent = True
                return math.inf
            try:
                cost = self._objective(dict(key))
            except ValueError:
                cost = math.nan
            self._tried[key] = Trial(dict(key), cost if math.isfinite(cost) else None)
        found = self._tried[key].cost
        return math.inf if found is None else found

    def result(self) -> Tuned:
        """The best of all; of equals the first. Raises `NothingWorks`."""
        trials = tuple(self._tried.values())
        possible = [trial for trial in trials if trial.cost is not None]
        if not possible:
            raise NothingWorks(f"none of the {len(trials)} settings that were tried is possible")
        best = min(possible, key=lambda trial: math.inf if trial.cost is None else trial.cost)
        return Tuned(best=best, trials=trials, complete=not self.spent)


def grid_search(space: Mapping[str, Sequence[float]], objective: Objective, *, max_trials: int = 1_000) -> Tuned:
    """Every combination, in order of names and values. Raises ValueError for an empty space, `NothingWorks`."""
    _check(space, max_trials)
    names = sorted(space)
    trials = _Trials(objective, max_trials)
    for values in itertools.product(*(space[name] for name in names)):
        trials.cost(dict(zip(names, values, strict=True)))
        if trials.spent:
            break
    return trials.result()


def coordinate_search(
    space: Mapping[str, Sequence[float]], objective: Objective, *, start: Setting, max_trials: int = 200
) -> Tuned:
    """One name after another: its best value with the others held, over and over until a round changes nothing.

    `start` (a baseline's defaults) is tried first, also where its values are not in the space. Finds a setting that no
    single change improves, which may not be the best of all. Raises ValueError when start and space have different
    names.
    """
    _check(space, max_trials)
    unknown = sorted(set(start) ^ set(space))
    if unknown:
        raise ValueError(f"start and space must have the same names; {', '.join(unknown)} is in one of them only")
    trials = _Trials(objective, max_trials)
    current = dict(start)
    cost = trials.cost(current)
    changed = True
    while changed and not trials.spent:
        changed = False
        for name in sorted(space):
            for value in space[name]:
                other = {**current, name: value}
                found = trials.cost(other)
                if found < cost:
                    current, cost, changed = other, found, True
    return trials.result()


def run_finals(tuned: Tuned, objective: Objective, *, finalists: int) -> Tuned:
    """The second stage of a search whose first looked at less: its best `finalists` by a dearer objective.

    Of equals, the one that was better before. Raises `NothingWorks` when none of them is possible.
    """
    possible = [trial for trial in tuned.trials if trial.cost is not None]
    ranked = sorted(possible, key=lambda trial: math.inf if trial.cost is None else trial.cost)[:finalists]
    trials = _Trials(objective, len(ranked))
    for trial in ranked:
        trials.cost(trial.setting)
    found = trials.result()
    return dataclasses.replace(tuned, best=found.best, finals=found.trials)


def _check(space: Mapping[str, Sequence[float]], max_trials: int) -> None:
    if not space or any(not values for values in space.values()):
        raise ValueError("the space needs at least one name, and at least one value each")
    if max_trials < 1:
        raise ValueError(f"max_trials must be at least 1, not {max_trials}")
