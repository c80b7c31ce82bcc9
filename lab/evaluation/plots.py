"""Plots of an evaluation: replicas and Z over time, latencies as distributions, cost against attainment.

Lines differ in dashes and points in shape, never in colour alone. Colours are of middle brightness and everything else
is drawn in `INK`, so that a page can put its own text colour there and be read in light and in dark.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

from lab.evaluation.confidence import Confidence
from lab.evaluation.drawing import INK, Plot
from lab.evaluation.statistics import Slo
from lab.evaluation.study import Evaluation
from lab.evaluation.summaries import RunSummary
from lab.figures import Axes, Figure, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter, styled
from lab.virtual.result import TimelinePoint

P = ParamSpec("P")
_COLOURS = ("#3b7dd8", "#c8741c", "#2a9d62", "#d1495b", "#8e6bbf", "#1792a0", "#9c6b3f", "#7c838c")
_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (9, 2)), (0, (3, 1, 1, 1, 1, 1)),
)  # fmt: skip
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
_WIDTH_IN = 10.0
_LEGEND_IN = 2.2
_CDF_POINTS = 150
_Z_SHOWN = 5.0
"""An idle service has a Z without bound; what matters happens around 1."""
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "svg.hashsalt": "trimtab",
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#7f7f7f",
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def plots(evaluation: Evaluation, slos: Mapping[str, Slo]) -> Iterator[Plot]:
    """Every plot for which there is something to draw, trace by trace; the cost of all traces at the end."""
    for trace in evaluation.traces:
        drawn = [run for policy in evaluation.policies for run in evaluation.of(policy, trace) if run.timeline]
        if drawn:
            shown = "replicas, waiting requests and Z" if _with_z(drawn) else "replicas and waiting requests"
            title = f"{trace}: {shown} over time, seed {drawn[0].case.seed}"
            yield Plot(f"timeline-{_file_name(trace)}", title, trace, _svg(_timelines, drawn))
        if any(evaluation.of(policy, trace) for policy in evaluation.policies):
            title = f"{trace}: distributions of latencies over all seeds"
            yield Plot(f"cdf-{_file_name(trace)}", title, trace, _svg(_distributions, evaluation, trace, slos))
    if evaluation.runs:
        yield Plot("cost", "GPU-hours against SLO attainment", None, _svg(_costs, evaluation))


def _svg(draw: Callable[P, Figure], *args: P.args, **kwargs: P.kwargs) -> str:
    text = io.StringIO()
    with styled(_STYLE):
        draw(*args, **kwargs).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _margins(
    figure: Figure,
    shape: tuple[int, int],
    *,
    left: float,
    right: float,
    top: float,
    bottom: float,
    between: tuple[float, float],
) -> None:
    """Places a grid's axes by inches, rows and columns `between` apart; a constrained layout takes twice as long."""
    width, height = figure.get_size_inches()
    rows, columns = shape
    panel_height = (height - top - bottom - between[0] * (rows - 1)) / rows
    panel_width = (width - left - right - between[1] * (columns - 1)) / columns
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        top=1 - top / height,
        bottom=bottom / height,
        hspace=between[0] / panel_height,
        wspace=between[1] / panel_width,
    )


def _file_name(trace: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in trace)


# Over time


def _timelines(runs: Sequence[RunSummary]) -> Figure:
    """A row a policy: replicas, waiting requests, and Z where any policy has one."""
    with_z = _with_z(runs)
    columns = 3 if with_z else 2
    figure = Figure(figsize=(_WIDTH_IN, 1.0 + 1.7 * len(runs)))
    grid = figure.subplots(len(runs), columns, squeeze=False, sharex=True, sharey="col")
    _margins(figure, (len(runs), columns), left=0.45, right=0.1, top=0.6, bottom=0.45, between=(0.45, 0.35))
    roles = sorted({(point.service, point.role) for run in runs for point in run.timeline})
    titles = ("replicas (thin: asked for)", "waiting requests", f"Z, up to {_Z_SHOWN:g} (dotted: 1)")
    for row, run in zip(grid, runs, strict=True):
        for index, role in enumerate(roles):
            points = [point for point in run.timeline if (point.service, point.role) == role]
            _timeline(row, points, _role_name(role, roles), index)
        for axes, title in zip(row, titles, strict=False):
            axes.set_title(f"{run.case.policy}: {title}" if axes is row[0] else title)
        if with_z and all(point.z is None for point in run.timeline):
            row[2].text(0.5, 0.5, "has none", ha="center", va="center", transform=row[2].transAxes)
    for axes in grid[-1]:
        axes.set_xlabel("time, s")
    # Rows share their limits: these are set when all is drawn.
    for axes in grid[0][:2]:
        axes.set_ylim(bottom=0)
    if with_z:
        highest = max(point.z or 0.0 for run in runs for point in run.timeline)
        grid[0][2].set_ylim(0, min(_Z_SHOWN, 1.05 * max(1.0, highest)))
        for row in grid:
            row[2].axhline(1.0, color=INK, linewidth=0.6, linestyle=":")
    grid[0][0].yaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=min(4, len(labels)), handlelength=3.5)
    return figure


def _with_z(runs: Sequence[RunSummary]) -> bool:
    return any(point.z is not None for run in runs for point in run.timeline)


def _timeline(row: Sequence[Axes], points: Sequence[TimelinePoint], label: str, index: int) -> None:
    times = [point.at_s for point in points]
    colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    # A little apart, so that services with as many replicas do not hide one another.
    shift = 0.05 * index
    replicas = [point.routable + shift for point in points]
    row[0].step(times, replicas, where="post", color=colour, linestyle=dash, linewidth=1.8, label=label)
    desired = [point.desired + shift for point in points]
    row[0].step(times, desired, where="post", color=colour, linewidth=0.6, alpha=0.8)
    row[1].plot(times, [point.waiting for point in points], color=colour, linestyle=dash, linewidth=1.2)
    if len(row) > 2:
        z = [math.nan if point.z is None else point.z for point in points]
        row[2].plot(times, z, color=colour, linestyle=dash, linewidth=1.2)


def _role_name(role: tuple[str, str], roles: Sequence[tuple[str, str]]) -> str:
    """The service, with its role where it has several."""
    return role[0] if sum(service == role[0] for service, _ in roles) == 1 else f"{role[0]} {role[1]}"


# Distributions


def _distributions(evaluation: Evaluation, trace: str, slos: Mapping[str, Slo]) -> Figure:
    """E2E and TTFT: above the share of complete answers within a time, below the share that took longer, for tails."""
    figure = Figure(figsize=(_WIDTH_IN, 5.4))
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    _margins(figure, (2, 2), left=1.0, right=_LEGEND_IN, top=0.3, bottom=0.5, between=(0.15, 0.15))
    for column, latency, title in zip(zip(*grid, strict=True), ("e2e", "ttft"), ("E2E", "TTFT"), strict=True):
        for index, policy in enumerate(evaluation.policies):
            _distribution(column, evaluation, policy, trace, latency, index)
        if latency == "ttft":
            for axes, limit_s in itertools.product(column, sorted({slo.ttft_s for slo in slos.values()})):
                axes.axvline(limit_s, color=INK, linewidth=0.8, linestyle=":")
        column[0].set_xscale("log")
        column[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        column[0].set_title(f"{trace}: {title}" + (" (dotted: SLOs)" if latency == "ttft" else ""))
        column[1].set_xlabel(f"{title}, s")
    above, below = grid[0][0], grid[1][0]
    above.set_ylim(0, 1.01)
    above.set_ylabel("share within the time")
    below.set_yscale("log")
    below.set_ylim(1e-3, 1)
    below.set_yticks([0.5, 0.1, 0.05, 0.01, 0.001], ["0.5 (P50)", "0.1", "0.05 (P95)", "0.01 (P99)", "0.001"])
    below.yaxis.set_minor_locator(NullLocator())
    below.set_ylabel("share that took longer")
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", handlelength=3.5)
    return figure


def _distribution(
    column: Sequence[Axes], evaluation: Evaluation, policy: str, trace: str, latency: str, index: int
) -> None:
    together = evaluation.pooled(policy, trace)
    steps = together.histograms[latency].cdf() if together else []
    if not steps:
        return
    every = math.ceil(len(steps) / _CDF_POINTS)
    seconds, shares = zip(*steps[:-1:every], steps[-1], strict=True)
    longer = [1 - share if share < 1 else math.nan for share in shares]
    for axes, values in zip(column, (shares, longer), strict=True):
        axes.plot(
            seconds,
            values,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_DASHES[(index + index // len(_COLOURS)) % len(_DASHES)],
            linewidth=2.0 if policy == evaluation.baseline else 1.4,
            label=f"{policy} (baseline)" if policy == evaluation.baseline else policy,
        )


# Cost


def _costs(evaluation: Evaluation) -> Figure:
    """A panel a trace: GPU-hours against the share within the SLOs, with intervals where there are several seeds."""
    columns = min(3, len(evaluation.traces))
    rows = math.ceil(len(evaluation.traces) / columns)
    figure = Figure(figsize=(_WIDTH_IN, 0.4 + 2.6 * rows))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    _margins(figure, (rows, columns), left=0.7, right=_LEGEND_IN, top=0.3, bottom=0.5, between=(0.7, 0.2))
    panels = [axes for row in grid for axes in row]
    for axes, trace in zip(panels, evaluation.traces, strict=False):
        for index, policy in enumerate(evaluation.policies):
            _cost(axes, evaluation, policy, trace, index)
        axes.set_title(trace)
        axes.set_xlabel("GPU-hours")
        axes.margins(0.12)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in panels[len(evaluation.traces) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set_ylabel("within SLO")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right")
    return figure


def _cost(axes: Axes, evaluation: Evaluation, policy: str, trace: str, index: int) -> None:
    hours, share = (evaluation.confidence(policy, trace, metric) for metric in ("gpu_hours", "slo_attainment"))
    if hours.mean is None or share.mean is None:
        return
    axes.errorbar(
        [hours.mean],
        [share.mean],
        xerr=_halves(hours),
        yerr=_halves(share),
        fmt=_MARKERS[index % len(_MARKERS)],
        color=_COLOURS[index % len(_COLOURS)],
        markeredgecolor=INK,
        markeredgewidth=0.5,
        elinewidth=0.9,
        label=policy,
    )


def _halves(confidence: Confidence) -> list[float] | None:
    return None if confidence.mean is None or confidence.ci_high is None else [confidence.ci_high - confidence.mean]
