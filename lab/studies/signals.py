"""`python -m lab.studies.signals`: HeteroScale's eight scaling signals on the simulator, and what comes out.

Prints two tables; with `--out` it writes `report.md` with figures and `signals.json` into a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lab.studies.findings import Study
from lab.studies.observing import Signal, Unit
from lab.studies.report import document, markdown
from lab.studies.runs import (
    MORNING_HOURS,
    Setting,
    cache_windows,
    capacity_rps,
    fixed_day,
    scaled,
    steps,
)
from lab.virtual.fixed.ratio_sweep import SERVICE_A, SERVICE_B
from simulator.profiles import ProfileError, find_profile, packaged_profiles
from trimtab import cli_errors
from trimtab.cli.extras import require

PROFILE = "h100-70b-tp4"
_SERVICES = {"A": SERVICE_A, "B": SERVICE_B}
command = typer.Typer(add_completion=False)


def run(setting: Setting, progress: Progress) -> Study:
    """All runs, one after the other."""
    task = progress.add_task("capacity", total=5 + len(Signal))

    def done(following: str) -> None:
        progress.update(task, advance=1, description=following)

    capacity = capacity_rps(setting, setting.unit, setting.units)
    decode_capacity = capacity_rps(setting, setting.decode_bound, setting.units)
    done("load in steps")
    curve = steps(setting, setting.unit, capacity)
    decode_curve = steps(setting, setting.decode_bound, decode_capacity)
    done("a day at fixed size")
    day = fixed_day(setting, capacity)
    first, hours = MORNING_HOURS
    by_signal = {}
    for signal in Signal:
        done(f"scaled by {signal}")
        by_signal[signal] = scaled(setting, capacity, signal, curve, from_hour=first, hours=hours)
    done("a day scaled by decode TPS")
    scaled_day = scaled(setting, capacity, Signal.DECODE_TPS, curve, from_hour=0.0, hours=24.0)
    done("a changing cache")
    cache = cache_windows(setting, capacity / setting.units)
    done("done")
    return Study(
        setting=setting,
        capacity_rps=capacity,
        decode_capacity_rps=decode_capacity,
        curve=curve,
        decode_curve=decode_curve,
        day=day,
        scaled=by_signal,
        scaled_day=scaled_day,
        cache=cache,
    )


@command.command()
def main(
    out: Annotated[Path | None, typer.Option(help="Folder for report.md, figures and signals.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
    profile: Annotated[str, typer.Option(help="Of both roles.")] = PROFILE,
    service: Annotated[str, typer.Option(help="A or B of the seed: lengths and limits.")] = "A",
    units: Annotated[int, typer.Option(help="Units at fixed size.", min=1)] = 6,
    prefill: Annotated[int, typer.Option(help="Prefill replicas of a unit with one decode replica.", min=1)] = 2,
    compress: Annotated[float, typer.Option(help="How much faster the day runs.", min=1.0)] = 10.0,
    seed: Annotated[int, typer.Option(min=0)] = 1,
) -> None:
    """Study the eight signals: about two minutes of CPU."""
    errors = Console(stderr=True)
    if out is not None:
        require("matplotlib", what="drawing figures into --out")
    try:
        if service not in _SERVICES:
            raise ValueError(f"there is no service {service!r}; there are {', '.join(_SERVICES)}")  # noqa: TRY301
        setting = Setting(
            profile=find_profile(packaged_profiles(), profile),
            service=_SERVICES[service],
            unit=Unit(prefill, 1),
            decode_bound=Unit(2 * prefill, 1),
            units=units,
            most_units=units + (units + 1) // 2,
            compress=compress,
            seed=seed,
        )
        with Progress(console=errors, transient=True) as progress:
            study = run(setting, progress)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "signals.json").write_text(json.dumps(document(study), indent=1) + "\n", encoding="utf-8")
            from lab.studies.plots import draw  # loads matplotlib, which takes a while

            figures = draw(study, out)
            (out / "report.md").write_text(markdown(study, [path.name for path in figures]), encoding="utf-8")
    except (ProfileError, ValueError, OSError) as error:
        errors.print(f"signals: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        sys.stdout.write(json.dumps(document(study), indent=1) + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_measures_table(study))
    console.print(_findings_table(study))
    if out is not None:
        console.print(f"report: {out / 'report.md'}", soft_wrap=True, highlight=False)


def _measures_table(study: Study) -> Table:
    table = Table(title="The eight signals over a day at fixed size, against the load")
    table.add_column("signal")
    headings = ("Pearson", "Spearman", "R² of a line", "elasticity", "peak/valley", "SNR dB", "valley", "peak")
    for heading in headings:
        table.add_column(heading, justify="right")
    for signal, one in study.measures().items():
        row = (one.pearson, one.spearman, one.line_r2, one.elasticity, one.dynamic_range)
        cells = ["–" if value is None else f"{value:.2f}" for value in row]
        snr = "–" if one.snr_db is None else f"{one.snr_db:.1f}"
        table.add_row(str(signal), *cells, snr, f"{one.low:.4g}", f"{one.high:.4g}")
    return table


def _findings_table(study: Study) -> Table:
    table = Table(title="The seed's findings", show_lines=True)
    for heading in ("finding", "", "here"):
        table.add_column(heading, overflow="fold")
    for one in study.findings():
        table.add_row(f"{one.claim} ({one.where})", str(one.verdict), one.figures)
    return table


if __name__ == "__main__":
    cli_errors.run(command, "lab.studies.signals")
