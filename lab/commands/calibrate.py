"""`trimtab calibrate`: Token Service Share for a model and its SLO, from the simulator or from recorded windows."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lab.calibration.calibrating import (
    Calibration,
    Form,
    calibrate_observed,
    calibrate_profile,
    calibrate_stages,
    form_words,
)
from lab.calibration.fitting import CalibrationError, Quality
from lab.calibration.observations import read_observations
from lab.calibration.report import document, policy_block, roles_block, roles_document
from lab.calibration.sweeps import Sweep
from lab.evaluation.statistics import Slo
from simulator.profiles import ProfileError, find_profile, load_profiles
from trimtab.cli.output import console, print_json
from trimtab.cli_errors import CommandError
from trimtab.domain.vocabulary import Role
from trimtab.views.text import MISSING

MAX_REPLICAS = 64
MAX_TARGET_S = 86_400.0
"""Of a latency: as a service policy has it."""


def calibrate_command(
    slo_ttft_s: Annotated[float, typer.Option("--slo-ttft", min=0.001, help="Target of TTFT at P95, seconds.")],
    slo_tpot_s: Annotated[float, typer.Option("--slo-tpot", min=0.0001, help="Target of TPOT at P95, seconds.")],
    profile: Annotated[str, typer.Option("--profile", help="Simulate this profile at fixed capacity.")] = "",
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Prefill and decode apart: a profile for each stage.")
    ] = False,
    decode_profile: Annotated[
        str, typer.Option("--decode-profile", help="Of the decode stage, where it is not --profile.")
    ] = "",
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
    """Fit a tokenServiceShare block, or one for each stage; print it with how well Z ranks SLO health."""
    if bool(profile) == (observations is not None):
        raise CommandError("give either --profile or --observations")
    if decode_profile and not (disaggregated and profile):
        raise CommandError("--decode-profile goes with --profile and --disaggregated")
    _check_out(out)
    for option, target_s in (("--slo-ttft", slo_ttft_s), ("--slo-tpot", slo_tpot_s)):
        if target_s > MAX_TARGET_S:
            raise CommandError(f"{option} {target_s:g}: give seconds, at most {MAX_TARGET_S:g}")
    slo = Slo(ttft_s=slo_ttft_s, tpot_s=slo_tpot_s)
    try:
        if observations is not None:
            found = _from_file(observations, slo, form, disaggregated)
        else:
            known = load_profiles(profiles_dir)
            sweep = Sweep(replicas=_counts(replicas), duration_s=duration_s, seed=seed)
            own = find_profile(known, profile)
            if disaggregated:
                found = calibrate_stages(own, find_profile(known, decode_profile or profile), slo, sweep, form)
            else:
                found = {Role.COLOCATED: calibrate_profile(own, slo, sweep, form)}
    except (CalibrationError, ProfileError) as error:
        raise CommandError(str(error)) from None
    today = datetime.datetime.now(datetime.UTC).date()
    colocated = found.get(Role.COLOCATED)
    block = policy_block(colocated, today) if colocated is not None else roles_block(found, today)
    if out is not None:
        try:
            out.write_text(block, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{out}: {error.strerror}") from None
    if as_json:
        print_json(document(colocated, today) if colocated is not None else roles_document(found, today))
        return
    for calibration in found.values():
        console.print(_table(calibration))
    console.print(block, markup=False, highlight=False, soft_wrap=True, end="")


def _check_out(out: Path | None) -> None:
    """Check before a fit, which takes a while, that its file can be written. Raises CommandError."""
    if out is None:
        return
    if out.is_dir():
        raise CommandError(f"--out {out}: is a folder; name a file in it")
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.parent}; make it first")


def _from_file(path: Path, slo: Slo, form: Form, disaggregated: bool) -> dict[Role, Calibration]:
    windows = read_observations(path, slo)
    if disaggregated and Role.COLOCATED in windows:
        raise CommandError(f"{path}: --disaggregated needs a column role with prefill or decode in every row")
    return {role: calibrate_observed(own, slo, source=str(path), form=form, role=role) for role, own in windows.items()}


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= MAX_REPLICAS for count in counts):
        raise CommandError(f"--replicas {text}: give numbers from 1 to {MAX_REPLICAS} with commas between them")
    return counts


def _table(calibration: Calibration) -> Table:
    stage = "" if calibration.role is Role.COLOCATED else f" of {calibration.role}"
    table = Table(title=f"Rank correlation{stage} with SLO health, on windows that no fit saw", title_justify="left")
    for name in ("signal", "Spearman", "Kendall", "windows"):
        table.add_column(name, justify="left" if name == "signal" else "right")
    for form, fitted in calibration.forms.items():
        chosen = " (chosen)" if form is calibration.form else ""
        _add(table, form_words(form, calibration.role) + chosen, fitted.judged)
    for name, found in calibration.raw.items():
        _add(table, name, found)
    return table


def _add(table: Table, name: str, found: Quality) -> None:
    figures = (MISSING if value is None else f"{value:.3f}" for value in (found.spearman, found.kendall))
    table.add_row(name, *figures, str(found.windows))
