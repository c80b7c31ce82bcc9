"""`python -m simulator.traces`: look at a trace, write a generated one, or take the lengths of a recorded one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from simulator.traces.catalogue import opened, workload
from simulator.traces.describe import LengthFigures, TraceFigures, describe
from simulator.traces.lengths import RecordedLaws, histogram, laws_text
from simulator.traces.model import TraceError
from simulator.traces.readers import read_trace, write_trace
from trimtab import cli_errors

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

_Seed = Annotated[int, typer.Option(help="Of a generated workload.", min=0)]
_Duration = Annotated[float | None, typer.Option(help="Seconds; a file is cut there.")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (TraceError, ValueError) as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None


@app.command("describe")
def describe_command(
    traces: Annotated[list[str], typer.Argument(help="Trace files or names of workloads.", metavar="FILE|NAME…")],
    seed: _Seed = 1,
    duration: _Duration = None,
    window: Annotated[float, typer.Option(help="Seconds of a window for rates.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print rates, burstiness and lengths."""
    with _one_line_errors():
        figures = {name: describe(opened(name, seed=seed, duration_s=duration), window_s=window) for name in traces}
    if as_json:
        sys.stdout.write(json.dumps({name: dataclasses.asdict(f) for name, f in figures.items()}) + "\n")
        return
    Console(width=None if sys.stdout.isatty() else 200).print(_table(figures, window))


def _table(figures: dict[str, TraceFigures], window_s: float) -> Table:
    table = Table()
    table.add_column("trace", overflow="fold")
    for heading in (
        "requests",
        "duration s",
        "mean RPS",
        f"peak {window_s:g} s",
        "peak/mean",
        "peak/min",
        "empty",
        "gap CV",
        "input mean / p50 / p95",
        "output mean / p50 / p95",
        "services",
    ):
        table.add_column(heading, justify="right")
    for name, f in figures.items():
        table.add_row(
            Path(name).name,
            f"{f.requests}",
            f"{f.duration_s:.0f}",
            f"{f.mean_rps:.2f}",
            _number(f.peak_rps, ".1f"),
            _number(f.peak_to_mean, ".2f"),
            _number(f.peak_to_least, ".1f"),
            _number(f.empty_windows, ".0%"),
            _number(f.gap_cv, ".2f"),
            _lengths(f.prompt),
            _lengths(f.output),
            f"{len(f.requests_by_service)}",
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _lengths(figures: LengthFigures) -> str:
    return f"{figures.mean:.1f} / {figures.p50} / {figures.p95}"


@app.command("write")
def write_command(
    name: Annotated[str, typer.Argument(help="A workload's name.")],
    path: Annotated[Path, typer.Argument(help="JSON lines; gzip when it ends in .gz.")],
    seed: _Seed = 1,
    duration: _Duration = None,
) -> None:
    """Write a generated workload to a file."""
    with _one_line_errors():
        count = write_trace(path, workload(name, seed=seed, duration_s=duration))
    Console().print(f"{count} requests in {path}")


@app.command("lengths")
def lengths_command(
    path: Annotated[Path, typer.Argument(help="A trace file.")],
    source: Annotated[str, typer.Option(help="Where the trace is from, with its licence.")],
    bins: Annotated[int, typer.Option(help="Bins a decade.", min=1, max=100)] = 8,
) -> None:
    """Print a trace's lengths and gaps as a file of tables."""
    prompts, outputs, gaps, last_s = [], [], [], None
    with _one_line_errors():
        for request in read_trace(path):
            prompts.append(request.prompt_tokens)
            outputs.append(request.output_tokens)
            if last_s is not None:
                gaps.append(round(1000 * (request.arrival_s - last_s)))
            last_s = request.arrival_s
        laws = RecordedLaws(
            name=path.stem,
            source=source,
            prompt_tokens=histogram(prompts, bins_per_decade=bins),
            output_tokens=histogram(outputs, bins_per_decade=bins),
            gaps_ms=histogram(gaps, bins_per_decade=bins),
        )
    sys.stdout.write(laws_text(laws))


if __name__ == "__main__":
    cli_errors.run(app, "simulator.traces")
