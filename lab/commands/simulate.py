"""`trimtab simulate profile`: what the simulator takes for each GPU and model, against what was measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lab.fitting.comparing import Compared, compare_profile
from lab.fitting.tables import TableError
from lab.material import MEANING, MaterialError, perf_folder
from simulator.core.profile import Profile
from simulator.core.timing import BatchWork
from simulator.profiles import ProfileError, find_profile, packaged_profiles
from trimtab.cli.output import console, print_json
from trimtab.cli_errors import CommandError
from trimtab.views.text import MISSING

app = typer.Typer(no_args_is_help=True, help="The simulator's profiles.")
_SMALL_BATCH = BatchWork(prefill_tokens=0, decode_seqs=8, kv_tokens=8000, attention_pairs=0.0)
_PREFILL = BatchWork(prefill_tokens=2048, decode_seqs=0, kv_tokens=0, attention_pairs=2048**2 / 2)


@app.callback()
def group() -> None:
    """The simulator's profiles."""


@app.command("profile")
def profile_command(
    name: Annotated[str, typer.Argument(metavar="[NAME]")] = "",
    material: Annotated[
        Path | None, typer.Option("--material", help=f"Compare with every measured load, too. {MEANING}")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Predicted against measured: every profile with its fit errors, or one with each part and measured load."""
    try:
        profiles = [find_profile(packaged_profiles(), name)] if name else list(packaged_profiles().values())
        perf = None if material is None else perf_folder(material)
        compared = {one.name: [] if perf is None else compare_profile(perf, one.name) for one in profiles}
    except (ProfileError, MaterialError) as error:
        raise CommandError(str(error)) from error
    except TableError as error:
        raise CommandError(f"{error}; docs/profiles.md lists the tables") from error
    if as_json:
        print_json([_document(profile, compared[profile.name]) for profile in profiles])
    elif name:
        _print_one(profiles[0], compared[profiles[0].name])
    else:
        console.print(_table(profiles, None if material is None else compared))


def _document(profile: Profile, compared: Sequence[Compared]) -> dict[str, object]:
    timing = profile.timing.model_dump(mode="json")
    return {
        "name": profile.name,
        "model": profile.model,
        "gpu_type": profile.gpu_type,
        "tensor_parallel": profile.tensor_parallel,
        "estimate": is_estimate(profile),
        "small_batch_s": profile.iteration_model().iteration_s(_SMALL_BATCH),
        "prefill_2048_s": profile.iteration_model().iteration_s(_PREFILL),
        "timing": timing,
        "measured": [dataclasses.asdict(one) for one in compared],
    }


def is_estimate(profile: Profile) -> bool:
    """Whether nothing was measured on this GPU."""
    return profile.timing.source.text.startswith("ESTIMATE")


def _table(profiles: Sequence[Profile], compared: Mapping[str, Sequence[Compared]] | None = None) -> Table:
    """A row a profile; with `compared` also how far off, in the median, it is over the loads of its own."""
    table = Table(title="Profiles: what an iteration takes, and how far the fit is from what was measured")
    for column in ("profile", "GPU", "8 decoding", "prefill of 2,048", "fit error: predicted against measured"):
        table.add_column(column)
    for column in () if compared is None else ("loads", "TTFT off by", "TPOT off by"):
        table.add_column(column, justify="right", no_wrap=True)
    for profile in profiles:
        model = profile.iteration_model()
        errors = ", ".join(f"{part} {error:+.1%}" for part, error in profile.timing.source.fit_error.items())
        table.add_row(
            profile.name,
            f"{profile.tensor_parallel} x {profile.gpu_type}",
            f"{1e3 * model.iteration_s(_SMALL_BATCH):.1f} ms",
            f"{1e3 * model.iteration_s(_PREFILL):.0f} ms",
            f"estimate, from the tables of another GPU: {errors}" if is_estimate(profile) else errors or MISSING,
            *(() if compared is None else _medians(compared[profile.name])),
        )
    return table


def _medians(compared: Sequence[Compared]) -> tuple[str, str, str]:
    """How many loads, and the median of the absolute relative errors of TTFT and TPOT."""
    if not compared:
        return "0", MISSING, MISSING
    ttft = statistics.median(abs(one.ttft_predicted_s / one.ttft_measured_s - 1) for one in compared)
    tpot = statistics.median(abs(one.tpot_predicted_s / one.tpot_measured_s - 1) for one in compared)
    return str(len(compared)), f"{ttft:.0%}", f"{tpot:.0%}"


def _print_one(profile: Profile, compared: Sequence[Compared]) -> None:
    console.print(_table([profile]))
    console.print(f"{profile.timing.source.text} ({profile.timing.source.date})", highlight=False)
    if not compared:
        console.print("No end-to-end load of this GPU, model and tensor parallelism to compare with (see --material).")
        return
    table = Table(title="End to end: predicted / measured")
    for column in ("precision", "clients", "in", "out", "TTFT, ms", "", "TPOT, ms", ""):
        table.add_column(column, justify="right")
    for one in compared:
        table.add_row(
            one.precision,
            str(one.concurrency),
            str(one.prompt_tokens),
            str(one.output_tokens),
            f"{1e3 * one.ttft_predicted_s:.0f} / {1e3 * one.ttft_measured_s:.0f}",
            f"{one.ttft_predicted_s / one.ttft_measured_s - 1:+.0%}",
            f"{1e3 * one.tpot_predicted_s:.1f} / {1e3 * one.tpot_measured_s:.1f}",
            f"{one.tpot_predicted_s / one.tpot_measured_s - 1:+.0%}",
        )
    console.print(table)
