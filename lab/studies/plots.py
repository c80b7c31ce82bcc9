"""The study's figures as SVG. Signals differ in dashes as well as in colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.figures import Figure, styled
from lab.studies.findings import Study
from lab.studies.observing import LATENCIES, Signal, Window
from lab.studies.runs import HOUR_S, MORNING_HOURS, STEPS

FILES = ("signals-by-load.svg", "signals-over-the-day.svg", "signals-as-rules.svg")
_LINES: dict[Signal, tuple[str, Any]] = {
    Signal.PREFILL_TPS: ("#3b7dd8", "-"),
    Signal.DECODE_TPS: ("#d1495b", (0, (5, 1.5))),
    Signal.PREFILL_GPU: ("#2a9d62", "-"),
    Signal.DECODE_GPU: ("#c8741c", (0, (5, 1.5))),
    Signal.PREFILL_SM: ("#1792a0", (0, (1.5, 1.2))),
    Signal.DECODE_SM: ("#8e6bbf", (0, (6, 1.5, 1.5, 1.5))),
    Signal.TTFT: ("#3b7dd8", "-"),
    Signal.TBT: ("#d1495b", (0, (5, 1.5))),
}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",
    # No random ids: the same study gives the same files.
    "svg.hashsalt": "signals",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def draw(study: Study, folder: Path) -> list[Path]:
    """Write the figures of `FILES`."""
    paths = [folder / name for name in FILES]
    with styled(_STYLE):
        for path, drawn in zip(paths, (_by_load, _over_the_day, _as_rules), strict=True):
            drawn(study).savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _by_load(study: Study) -> Figure:
    """Signals over their value at full load; latencies in plateaus, on a logarithmic axis."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = STEPS.index(1.0)
    for signal in Signal:
        if signal in LATENCIES:
            windows = study.curve if signal is Signal.TTFT else study.decode_curve
            values = _values(windows, signal)
            name = f"{signal}, prefill to spare" if signal is Signal.TBT else str(signal)
            _line(right, signal, STEPS, [value / values[0] for value in values], name)
        else:
            values = _values(study.curve, signal)
            _line(left, signal, STEPS, [value / values[full] for value in values], str(signal))
    left.set(ylabel="over its value at a load of 1", title="Throughput and hardware", ylim=(0, 1.6))
    right.set(ylabel="over its value at the lowest load", title="Latencies", yscale="log")
    for axes in (left, right):
        axes.set_xlabel("load, over what is served within the limits")
        axes.axvline(1.0, color="#bbbbbb", linewidth=0.8)
        axes.legend(loc="upper left")
    return figure


def _over_the_day(study: Study) -> Figure:
    """As the seed's figure 2: normalised to the day's maximum."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    rows = figure.subplots(3, 1, sharex=True)
    hours = [window.end_s * study.setting.compress / HOUR_S for window in study.day]
    load = [window.load_rps for window in study.day]
    groups = (
        ("Throughput", (Signal.PREFILL_TPS, Signal.DECODE_TPS)),
        ("Hardware", (Signal.PREFILL_GPU, Signal.DECODE_GPU, Signal.PREFILL_SM, Signal.DECODE_SM)),
        ("Latencies", LATENCIES),
    )
    for axes, (title, signals) in zip(rows, groups, strict=True):
        axes.fill_between(hours, [one / max(load) for one in load], color="#eeeeee", label="requests")
        for signal in signals:
            values = _values(study.day, signal)
            top = 1.0 if title == "Hardware" else max(values)
            _line(axes, signal, hours, [value / top for value in values], str(signal))
        axes.set(
            title=title,
            ylim=(0, 1.3),
            yticks=(0, 0.5, 1),
            ylabel="share" if title == "Hardware" else "over its maximum",
        )
        axes.legend(loc="upper left", ncols=5)
    rows[-1].set(xlabel="hour of the day", xlim=(0, 24), xticks=range(0, 25, 2))
    return figure


def _as_rules(study: Study) -> Figure:
    """As the seed's figure 6: units under each signal's rule against those that the load needs."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    grid = figure.subplots(4, 2, sharex=True, sharey=True)
    for axes, signal in zip(grid.flat, Signal, strict=True):
        run = study.scaled[signal]
        hours = [MORNING_HOURS[0] + window.end_s * study.setting.compress / HOUR_S for window in run.windows]
        axes.fill_between(hours, run.needed, step="pre", color="#dddddd", label="needed at 70 % load")
        axes.step(hours, [window.units for window in run.windows], where="pre", color=_LINES[signal][0], label="serve")
        axes.set_title(f"{signal}: {run.actions} actions, {run.attainment:.0%} within limits")
    top = math.ceil(study.setting.most_units * 1.1)
    grid[0][0].set(ylim=(0, top), xlim=(MORNING_HOURS[0], sum(MORNING_HOURS)))
    grid[0][0].legend(loc="upper left")
    for axes in grid[-1]:
        axes.set_xlabel("hour of the day")
    for axes in grid[:, 0]:
        axes.set_ylabel("units")
    return figure


def _line(axes: Any, signal: Signal, x: Sequence[float], y: Sequence[float], label: str) -> None:
    colour, dashes = _LINES[signal]
    axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.2, label=label)


def _values(windows: Sequence[Window], signal: Signal) -> list[float]:
    return [math.nan if (value := window.values[signal]) is None else value for window in windows]
