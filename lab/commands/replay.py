"""`trimtab replay`: sends a trace to a gateway or another OpenAI-compatible server; reports what clients saw."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from simulator.replay.client import ReplayOptions, replay
from simulator.replay.report import ReplayProgress, ReplayReport
from simulator.traces.model import TraceError, TraceRequest
from simulator.traces.readers import read_trace
from simulator.traces.shaping import scale_rate, take_slice
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.output import console, print_json
from trimtab.cli.signals import stop_on_signals
from trimtab.cli_errors import CommandError

_PROGRESS_EVERY_S = 10.0


def replay_command(
    context: typer.Context,
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="Azure CSV, Mooncake JSONL or Trimtab JSONL; .gz too.")
    ],
    url: Annotated[str, typer.Option("--url", help="Where requests go; default: the local stack's gateway.")] = "",
    service: Annotated[
        str, typer.Option("--service", help="Service for the requests of a trace that names none.")
    ] = "chat",
    start_s: Annotated[float, typer.Option("--trace-start", min=0, help="Skip this much of the trace.")] = 0.0,
    duration_s: Annotated[float, typer.Option("--duration", min=1, help="Length of the slice, seconds.")] = 120.0,
    scale: Annotated[float, typer.Option("--trace-scale", min=0.001, max=10_000, help="Multiply the rate.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts and of the scaling.")] = 1,
    real: Annotated[
        bool, typer.Option("--real", help="The servers are real: do not compare answers with the simulator's text.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="One record a request, JSON; .gz too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, without the records.")] = False,
) -> None:
    """Replay a trace through a gateway; exit 1 when a request was lost."""
    requests = load_slice(trace, service=service, start_s=start_s, duration_s=duration_s, scale=scale, seed=seed)
    options = ReplayOptions(
        url=url.rstrip("/") or LocalAddresses(port_base=endpoints_of(context).port_base).url("gateway"),
        seed=seed,
        check_text=not real,
        token_ids=False,
    )
    report = asyncio.run(_replay(requests, options, quiet=as_json))
    if out is not None:
        try:
            report.write(out)
        except OSError as error:
            raise CommandError(f"{out}: {error.strerror}") from None
    document = {key: value for key, value in report.to_json().items() if key != "records"}
    if as_json:
        print_json(document)
    else:
        for key, value in document.items():
            console.print(f"{key}: {value}", highlight=False)
    if report.lost:
        raise CommandError(
            f"{len(report.lost)} of {len(report.records)} requests lost; the first: {_first_loss(report)}"
        )


def load_slice(
    trace: Path, *, service: str, start_s: float, duration_s: float, scale: float, seed: int
) -> list[TraceRequest]:
    """A slice of a trace, scaled, every request with a service. Raises CommandError."""
    try:
        sliced = take_slice(read_trace(trace), start_s=start_s, duration_s=duration_s)
    except (TraceError, OSError) as error:
        raise CommandError(str(error)) from None
    if not sliced:
        raise CommandError(f"{trace}: no request from {start_s:g} s to {start_s + duration_s:g} s")
    if all(request.service == "trace" for request in sliced):
        sliced = [dataclasses.replace(request, service=service) for request in sliced]
    return scale_rate(sliced, scale, seed=seed)


async def _replay(requests: list[TraceRequest], options: ReplayOptions, *, quiet: bool) -> ReplayReport:
    last_s = 0.0

    def say(progress: ReplayProgress) -> None:
        nonlocal last_s
        if not quiet and progress.elapsed_s - last_s >= _PROGRESS_EVERY_S:
            last_s = progress.elapsed_s
            console.print(
                f"{progress.elapsed_s:.0f} s: sent {progress.sent} of {progress.planned}, "
                f"finished {progress.finished}, lost {progress.lost}",
                highlight=False,
            )

    return await replay(requests, options, on_progress=say, stopping=stop_on_signals())


def _first_loss(report: ReplayReport) -> str:
    first = report.lost[0]
    return f"{first.service} at {first.arrival_s:.1f} s, {first.outcome} {first.detail}".strip()
