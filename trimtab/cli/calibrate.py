"""`trimtab calibrate`: Token Service Share for a model and its SLO, from the simulator or from recorded windows."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from simulator.calibration.calibrating import Calibration, Form, calibrate_observed, calibrate_profile
from simulator.calibration.fitting import CalibrationError, Quality
from simulator.calibration.observations import read_observations
from simulator.calibration.report import document, policy_block
from simulator.calibration.sweeps import Sweep
from simulator.evaluation.statistics import Slo
from simulator.profiles import ProfileError, find_profile, load_profiles
from trimtab.cli.connect import CommandError
from trimtab.cli.output import MISSING, console, print_json

MAX_REPLICAS = 64
MAX_TARGET_S = 86_400.0
"""Of a latency: as a service policy has it."""


def calibrate_command(
    slo_ttft_s: Annotated[float, typer.Option("--slo-ttft", min=0.001, help="Target of TTFT at P95, seconds.")],
    slo_tpot_s: Annotated[float, typer.Option("--slo-tpot", min=0.0001, help="Target of TPOT at P95, seconds.")],
    profile: Annotated[str, typer.Option("--profile", help="Simulate this profile at fixed capacity.")] = "",
    profiles_dir: Annotated[Path | None, typer.Option("--profiles", help="Folder with profiles of your own.")] = None,
    observations: Annotated[
        Path | None, typer.Option("--observations", help="Recorded windows instead: CSV, or JSON lines (.jsonl).")
    ] = None,
    form: Annotated[
        Form, typer.Option("--form", help="Weigh waiting requests by the length of answers, or by one fixed weight.")
    ] = Form.ANSWERS,
    replicas: Annotated[str, typer.Option("--replicas", help="Fleet sizes to simulate, such as 1,3.")] = "1,3",
    duration_s: Annotated[
        float, typer.Option("--duration", min=180, max=86_400, help="Length of each simulated run, seconds.")
    ] = Sweep().duration_s,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the fit's loads.")] = Sweep().seed,
    out: Annotated[Path | None, typer.Option("--out", help="Write the YAML block there as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Fit a tokenServiceShare block; print it with how well Z ranks SLO health."""
    if bool(profile) == (observations is not None):
        raise CommandError("give either --profile or --observations")
    for option, target_s in (("--slo-ttft", slo_ttft_s), ("--slo-tpot", slo_tpot_s)):
        if target_s > MAX_TARGET_S:
            raise CommandError(f"{option} {target_s:g}: give seconds, at most {MAX_TARGET_S:g}")
    slo = Slo(ttft_s=slo_ttft_s, tpot_s=slo_tpot_s)
    try:
        if observations is not None:
            windows = read_observations(observations, slo)
            calibration = calibrate_observed(windows, slo, source=str(observations), form=form)
        else:
            known = find_profile(load_profiles(profiles_dir), profile)
            sweep = Sweep(replicas=_counts(replicas), duration_s=duration_s, seed=seed)
            calibration = calibrate_profile(known, slo, sweep, form)
    except (CalibrationError, ProfileError) as error:
        raise CommandError(str(error)) from None
    today = datetime.datetime.now(datetime.UTC).date()
    block = policy_block(calibration, today)
    if out is not None:
        try:
            out.write_text(block, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{out}: {error.strerror}") from None
    if as_json:
        print_json(document(calibration, today))
        return
    console.print(_table(calibration))
    console.print(block, markup=False, highlight=False, soft_wrap=True, end="")


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= MAX_REPLICAS for count in counts):
        raise CommandError(f"--replicas {text}: give numbers from 1 to {MAX_REPLICAS} with commas between them")
    return counts


def _table(calibration: Calibration) -> Table:
    table = Table(title="Rank correlation with SLO health, on windows that no fit saw", title_justify="left")
    for name in ("signal", "Spearman", "Kendall", "windows"):
        table.add_column(name, justify="left" if name == "signal" else "right")
    names = {Form.ANSWERS: "Z, waiting by answers", Form.FIXED: "Z, fixed weights"}
    for form, fitted in calibration.forms.items():
        chosen = " (chosen)" if form is calibration.form else ""
        _add(table, names[form] + chosen, fitted.judged)
    for name, found in calibration.raw.items():
        _add(table, name, found)
    return table


def _add(table: Table, name: str, found: Quality) -> None:
    figures = (MISSING if value is None else f"{value:.3f}" for value in (found.spearman, found.kendall))
    table.add_row(name, *figures, str(found.windows))
