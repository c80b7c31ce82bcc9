"""`trimtab evaluate SUITE --tune POLICY`: a policy's best thresholds, from the suite's training seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.baselines.tuning import Setting, Trial
from lab.evaluation.suite import Suite, SuiteError, Tuning
from lab.evaluation.tuning import TunedPolicy, tune, write_tuned
from trimtab.cli.output import console, errors, print_json
from trimtab.views.text import MISSING

FILE_NAME = "tuned.yaml"


def part_of(suite: Suite, policy: str, *, traces: Sequence[str], seeds: int | None) -> Suite:
    """The suite with a smaller search for the policy: only these traces, only the first seeds. Raises `SuiteError`."""
    tuning = suite.tunings.get(policy)
    if tuning is None:
        return suite
    unknown = [name for name in traces if name not in tuning.traces]
    if unknown:
        raise SuiteError(f"--trace {unknown[0]}: {policy} is tuned on {', '.join(tuning.traces)}")
    if seeds is not None and seeds > len(tuning.seeds):
        raise SuiteError(f"--seeds {seeds}: {policy} is tuned on {len(tuning.seeds)} seeds")
    kept = tuple(name for name in tuning.traces if not traces or name in traces)
    smaller = dataclasses.replace(tuning, traces=kept, seeds=tuning.seeds[:seeds])
    return dataclasses.replace(suite, tunings={**suite.tunings, policy: smaller})


def run_tuning(
    suite: Suite,
    policy: str,
    *,
    jobs: int,
    path: Path | None,
    machine: Callable[[], Mapping[str, object]],
    as_json: bool,
) -> None:
    """Search, print and, with a path, write. Raises `SuiteError`."""
    with _progress() as progress:
        task = progress.add_task(f"tuning {policy}", total=None, best=MISSING)
        costs: list[float] = []

        def on_trial(trial: Trial) -> None:
            if trial.cost is not None:
                costs.append(trial.cost)
            progress.update(task, advance=1, best=f"{min(costs):.4g}" if costs else MISSING)

        tuned = tune(suite, policy, jobs=jobs, on_trial=on_trial)
    tuning = suite.tunings[policy]
    found = TunedPolicy.of(tuning, tuned)
    if path is not None:
        write_tuned(path, policy, found)
    if as_json:
        results = {"policy": policy, **found.model_dump(mode="json")}
        inputs = {"suite": suite.name, "space": dict(tuning.space), "start": dict(tuning.start), **suite.inputs}
        print_json({"machine": machine(), "inputs": inputs, "results": results, "bars": []})
        return
    seeds = 1 if tuned.finals else len(tuning.seeds)
    where = f"on {len(tuning.traces)} traces × {seeds} seeds"
    console.print(f"{policy}: {tuning.cost_name}; {where}", markup=False, highlight=False)
    console.print(trials_table(tuning, tuned.trials, best=tuned.best.setting))
    if tuned.finals:
        console.print(f"the best of these on all {len(tuning.seeds)} seeds", highlight=False)
        console.print(trials_table(tuning, tuned.finals, best=tuned.best.setting))
    if not tuned.complete:
        console.print("The limit of trials ended the search: there may be better settings.", style="yellow")
    console.print(f"best: {_setting_text(tuned.best)}", markup=False, highlight=False)
    if path is not None:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def trials_table(tuning: Tuning, trials: Sequence[Trial], *, best: Setting) -> Table:
    """Every trial, the best first and the impossible last; equals in the order in which they were tried."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("cost", justify="right")
    for name in sorted(tuning.space):
        table.add_column(name, justify="right")
    for trial in sorted(trials, key=lambda one: (one.cost is None, one.cost or 0.0)):
        cost = MISSING if trial.cost is None else f"{trial.cost:.4g}"
        values = (f"{trial.setting[name]:g}" for name in sorted(tuning.space))
        table.add_row(cost, *values, style="bold" if trial.setting == best else "")
    return table


def _setting_text(trial: Trial) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(trial.setting.items()))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} trials, best {task.fields[best]}"),
        TimeElapsedColumn(),
        console=errors,
        disable=not errors.is_terminal,
        transient=True,
    )
