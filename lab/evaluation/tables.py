"""An evaluation for a terminal of 80 columns: a table a trace, one over all traces, the bars, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lab.evaluation.bars import Bar, Value
from lab.evaluation.documents import Finding
from lab.evaluation.formatting import MISSING, SHOWN, change_text, with_interval
from lab.evaluation.study import Evaluation, geometric_mean

OVERALL_HEADINGS = (
    "in SLO %\nmean", "in SLO %\nworst", "E2E P95\nchange", "E2E P99\nchange",
    "GPU-h\nsum", "kWh\nsum", "transi-\ntions", "lost",
)  # fmt: skip
"""Of `overall_cells`."""


class Mark(NamedTuple):
    """How a bar's verdict is shown."""

    text: str
    style: str


MARKS: Mapping[bool | None, Mark] = {
    True: Mark("ok", "green"),
    False: Mark("MISS", "bold red"),
    None: Mark("not judged", "dim"),
}
"""By `Bar.ok`."""


def tables(finding: Finding) -> Iterator[RenderableType]:
    """Everything, in the order in which it is printed."""
    evaluation = finding.evaluation
    for trace in evaluation.traces:
        yield trace_table(evaluation, trace)
    yield Text(reading(evaluation), style="dim")
    if len(evaluation.traces) > 1:
        yield overall_table(evaluation)
    if finding.bars:
        yield bars_table(finding.bars)
    if evaluation.failures:
        yield failures_text(evaluation)
    for problem in finding.problems:
        yield Text(problem, style="bold red")


def summary_line(finding: Finding) -> str:
    """What ran and what came of it, in a line."""
    evaluation, bars = finding.evaluation, finding.bars
    size = (
        f"{len(evaluation.policies)} policies × {len(evaluation.traces)} traces × {len(evaluation.seeds)} seeds: "
        f"{len(evaluation.runs)} runs"
    )
    failed = f", {len(evaluation.failures)} failed" if evaluation.failures else ""
    met = f"; {sum(bar.ok is True for bar in bars)} of {len(bars)} bars met" if bars else ""
    not_judged = f", {finding.bars_not_judged} not judged" if finding.bars_not_judged else ""
    return size + failed + met + not_judged


def reading(evaluation: Evaluation) -> str:
    """How the tables are to be read."""
    seeds = len(evaluation.seeds)
    mean = "one seed, so no intervals" if seeds == 1 else f"means of {seeds} seeds ± half a 95 % interval (Student's t)"
    return (
        f"{mean}; change: of E2E P95 and P99 against {evaluation.baseline}, seed by seed, the median. Latencies are of "
        "complete answers, lost and cut off ones count as missed SLOs."
    )


def trace_table(evaluation: Evaluation, trace: str) -> Table:
    """One trace: a row a policy."""
    table = _table(f"\n{trace}")
    table.add_column("policy", overflow="fold")
    headings = (
        "in SLO\n%",
        "E2E P95\ns",
        "change",
        "E2E\nP99 s",
        "change",
        "TTFT\nP95 s",
        "TPOT\nP95 ms",
        "GPU-h",
        "lost",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for policy in evaluation.policies:
        p95, p99 = (_change(evaluation, policy, trace, f"e2e_{name}_s") for name in ("p95", "p99"))
        table.add_row(
            _name(evaluation, policy, trace),
            _with_half(evaluation, policy, trace, "slo_attainment"),
            _with_half(evaluation, policy, trace, "e2e_p95_s"),
            p95,
            *(_mean(evaluation, policy, trace, "e2e_p99_s"), p99),
            *(_mean(evaluation, policy, trace, metric) for metric in ("ttft_p95_s", "tpot_p95_s", "gpu_hours")),
            _lost(evaluation, policy, trace),
            style="bold" if policy == evaluation.baseline else "",
        )
    return table


def overall_table(evaluation: Evaluation) -> Table:
    """All traces together: a row a policy."""
    table = _table("\nall traces")
    table.add_column("policy", overflow="fold")
    for heading in OVERALL_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for policy in evaluation.policies:
        table.add_row(policy, *overall_cells(evaluation, policy), style="bold" if policy == evaluation.baseline else "")
    table.caption = "changes: geometric mean over traces of the medians over seeds"
    table.caption_justify = "left"
    return table


def overall_cells(evaluation: Evaluation, policy: str) -> list[str]:
    """A policy over all traces: means over seeds, put together over traces; a dash where a trace has none."""
    attainment = _over_traces(evaluation, policy, "slo_attainment")
    known = [value for value in attainment if value is not None]
    whole = len(known) == len(attainment)
    shown = SHOWN["slo_attainment"]
    cells = [shown.text(sum(known) / len(known)) if whole else MISSING, shown.text(min(known)) if whole else MISSING]
    for metric in ("e2e_p95_s", "e2e_p99_s"):
        medians = [
            evaluation.change(policy, trace, metric, against=evaluation.baseline).median for trace in evaluation.traces
        ]
        ratio = geometric_mean(None if median is None else 1 + median for median in medians)
        ours = policy == evaluation.baseline
        cells.append("" if ours else change_text(None if ratio is None else ratio - 1))
    for metric in ("gpu_hours", "energy_kwh", "transitions"):
        sums = _over_traces(evaluation, policy, metric)
        total = sum(value for value in sums if value is not None)
        cells.append(MISSING if None in sums else SHOWN[metric].text(total))
    lost = [run.total.lost for trace in evaluation.traces for run in evaluation.of(policy, trace)]
    return [*cells, str(sum(lost)) if lost else MISSING]


def bars_table(bars: Sequence[Bar]) -> Table:
    """The bars, and whether each is met."""
    table = _table("\nbars", gap=1)
    table.add_column("")
    table.add_column("bar", overflow="fold")
    table.add_column("asked", justify="right")
    table.add_column("value", overflow="fold")
    for bar in bars:
        mark = MARKS[bar.ok]
        table.add_row(Text(mark.text, style=mark.style), bar.name, f"{bar.bar:g}", value_text(bar))
    return table


def value_text(bar: Bar) -> str:
    """A bar's value, or each of several; where it is not judged, those that there are and what it needs."""
    if bar.ok is not None:
        return _figures_text(bar.value)
    figures = bar.value.items() if isinstance(bar.value, Mapping) else ()
    known = {name: figure for name, figure in figures if figure is not None}
    return f"{_figures_text(known)}; {bar.reason}" if known else bar.reason


def _figures_text(value: Value) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_figures_text(one)}" for name, one in value.items())
    return "no figure" if value is None else f"{value:.4g}"


def failures_text(evaluation: Evaluation) -> Text:
    """Every case that failed, and why."""
    text = Text()
    text.append(f"\n{len(evaluation.failures)} of {len(evaluation.failures) + len(evaluation.runs)} cases failed\n")
    for case, error in evaluation.failures.items():
        text.append(f"{case}: ", style="bold red")
        text.append(f"{error}\n")
    return text


def _table(title: str, *, gap: int = 0) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, gap))


def _name(evaluation: Evaluation, policy: str, trace: str) -> str:
    """The policy, and of how many seeds the figures are where some failed."""
    there = len(evaluation.of(policy, trace))
    return policy if there == len(evaluation.seeds) else f"{policy} ({there}/{len(evaluation.seeds)} seeds)"


def _with_half(evaluation: Evaluation, policy: str, trace: str, metric: str) -> str:
    return with_interval(metric, evaluation.confidence(policy, trace, metric), "±")


def _mean(evaluation: Evaluation, policy: str, trace: str, metric: str) -> str:
    return SHOWN[metric].text(evaluation.confidence(policy, trace, metric).mean)


def _change(evaluation: Evaluation, policy: str, trace: str, metric: str) -> str:
    if policy == evaluation.baseline:
        return ""
    return change_text(evaluation.change(policy, trace, metric, against=evaluation.baseline).median)


def _lost(evaluation: Evaluation, policy: str, trace: str) -> str:
    """Of all seeds together: a mean would hide a single one."""
    together = evaluation.pooled(policy, trace)
    return MISSING if together is None else str(together.lost)


def _over_traces(evaluation: Evaluation, policy: str, metric: str) -> list[float | None]:
    return [evaluation.confidence(policy, trace, metric).mean for trace in evaluation.traces]
