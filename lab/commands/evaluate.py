"""`trimtab evaluate`: policies × traces × seeds on virtual time, as tables, files and one page."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lab.commands.tune import FILE_NAME, part_of, run_tuning
from lab.evaluation.catalogue import SUITES, find_suite
from lab.evaluation.documents import Finding, csv_text, document, json_text
from lab.evaluation.drawing import Plot, to_file
from lab.evaluation.evaluating import evaluate
from lab.evaluation.outputs import Folder
from lab.evaluation.report import report
from lab.evaluation.runner import Outcome, usable_cpus
from lab.evaluation.suite import Options, Suite, SuiteError
from lab.evaluation.summaries import Case, RunSummary
from lab.evaluation.tables import summary_line, tables
from trimtab import __version__
from trimtab.cli.extras import require
from trimtab.cli.output import console, errors, print_error, print_json
from trimtab.cli.signals import ended_by_sigterm
from trimtab.cli_errors import CommandError

MAX_DURATION_S = 604_800.0
_FIXED_FILES = frozenset({"results.json", "table.csv", "report.html"})


def _folder(text: str) -> Path:
    """An empty name would be the folder that one is in."""
    if not text.strip():
        raise CommandError("--out: the name is empty; name a folder")
    return Path(text)


@ended_by_sigterm()
def evaluate_command(
    name: Annotated[str, typer.Argument(metavar="[SUITE]", help="A suite's name; --list shows them.")] = "",
    list_suites: Annotated[bool, typer.Option("--list", help="Show the suites and end.")] = False,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Only this policy; may be given again.")] = None,
    trace: Annotated[list[str] | None, typer.Option("--trace", help="Only this trace; may be given again.")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Only the first N seeds.")] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", min=1.0, help="Seconds of each trace, where the suite takes it.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Processes; by default one a processor.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=_folder,
            metavar="PATH",
            help="Folder for the files; by default evaluation/SUITE, none with --json.",
        ),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw plots, for the folder and the page.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    require_bars: Annotated[
        bool, typer.Option("--require-bars", help="Exit with 2 when a bar is missed, or none was judged.")
    ] = False,
    tune_policy: Annotated[
        str, typer.Option("--tune", metavar="POLICY", help="Find this policy's best thresholds on training seeds.")
    ] = "",
    write: Annotated[
        bool, typer.Option("--write", help="With --tune: write to the file that the suite itself reads.")
    ] = False,
) -> None:
    """Run a suite: policies × traces × seeds on virtual time; write tables, plots and a report.

    Exit status: 0 when all ran, 1 when a case failed, 2 with --require-bars when a bar is missed or none was judged.
    """
    if list_suites:
        _list(as_json)
        return
    if not name:
        raise CommandError(f"name a suite: {', '.join(sorted(SUITES))} (trimtab evaluate --list)")
    if write and not tune_policy:
        raise CommandError("--write: only a search has settings to write; add --tune POLICY")
    if duration is not None and duration > MAX_DURATION_S:
        raise CommandError(f"--duration {duration:g}: give seconds, at most {MAX_DURATION_S:g}")
    started = time.time()
    used = jobs or usable_cpus()
    try:
        whole = find_suite(name, Options(duration_s=duration))
        if tune_policy:
            run_tuning(
                part_of(whole, tune_policy, traces=trace or (), seeds=seeds),
                tune_policy,
                jobs=used,
                path=_tuned_path(whole, out, write=write, as_json=as_json),
                machine=lambda: _machine(used, started),
                as_json=as_json,
            )
            return
        suite = whole.only(policies=policy or (), traces=trace or (), seeds=seeds)
        no_files = as_json and out is None
        if plots and not no_files:
            require("matplotlib", what="drawing plots (else --no-plots)")
        folder = None if no_files else Folder.claimed(out or Path("evaluation") / name)
        if folder is not None:
            folder.check(_FIXED_FILES)
        with _progress() as progress:
            evaluation = evaluate(suite, jobs=used, on_done=_reporting(progress, suite))
        finding = Finding.of(suite, evaluation, _machine(used, started))
        if folder is not None:
            _write(finding, folder, draw=plots)
    except SuiteError as error:
        raise CommandError(str(error)) from None
    _show(finding, folder, as_json=as_json)
    if not finding.complete:
        raise typer.Exit(1)
    if require_bars:
        _require(finding)


def _require(finding: Finding) -> None:
    """Ends with status 2 for a missed bar, or where a filter left nothing to require."""
    if finding.bars and finding.bars_not_judged == len(finding.bars):
        print_error(f"--require-bars: no bar was judged; {finding.bars[0].name} {finding.bars[0].reason}")
        raise typer.Exit(2)
    if finding.bars_missed:
        raise typer.Exit(2)


def _tuned_path(suite: Suite, out: Path | None, *, write: bool, as_json: bool) -> Path | None:
    if write:
        if suite.tuned_file is None:
            raise SuiteError(f"--write: suite {suite.name} reads no file of settings; use --out")
        return suite.tuned_file
    return None if as_json and out is None else (out or Path("evaluation") / suite.name) / FILE_NAME


def _list(as_json: bool) -> None:
    if as_json:
        print_json({name: entry.about for name, entry in SUITES.items()})
        return
    table = Table("suite", "what it is")
    for name, entry in SUITES.items():
        table.add_row(name, entry.about)
    console.print(table)


def _progress() -> Progress:
    """On standard error, and only when that is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
        transient=True,
    )


def _reporting(progress: Progress, suite: Suite) -> Callable[[Case, Outcome[RunSummary]], None]:
    task = progress.add_task(suite.name, total=len(suite.cases))

    def done(case: Case, outcome: Outcome[RunSummary]) -> None:
        progress.advance(task)
        if outcome.error is not None:
            progress.console.print(f"failed: {case}: {outcome.error}", style="red", markup=False, highlight=False)

    return done


def _machine(jobs: int, started: float) -> dict[str, object]:
    """Where and when it ran, and with what: all that may differ between two runs of the same inputs."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "started_at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "wall_s": round(time.time() - started, 1),
        "jobs": jobs,
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "trimtab": __version__,
    }


def _write(finding: Finding, folder: Folder, *, draw: bool) -> None:
    with errors.status("drawing", spinner="dots") if errors.is_terminal else _progress():
        drawn = _draw(finding) if draw else []
        folder.write(
            {
                "results.json": json_text(finding),
                "table.csv": csv_text(finding.evaluation),
                "report.html": report(finding, drawn),
                **{f"{plot.name}.svg": to_file(plot.svg) for plot in drawn},
            }
        )


def _draw(finding: Finding) -> list[Plot]:
    # Drawing takes a second to load, which a listing or `--json` need not wait for.
    from lab.evaluation.plots import plots

    return list(plots(finding.evaluation, finding.suite.slos))


def _show(finding: Finding, folder: Folder | None, *, as_json: bool) -> None:
    if as_json:
        print_json(document(finding))
        return
    for table in tables(finding):
        console.print(table)
    console.print(f"\n{summary_line(finding)}", markup=False, highlight=False)
    if folder is not None:
        console.print(f"{folder.path / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
