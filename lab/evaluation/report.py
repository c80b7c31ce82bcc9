"""An evaluation as one HTML page, complete in itself and fetching nothing, for light and dark displays.

All text that comes from a suite is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from lab.evaluation.confidence import Confidence
from lab.evaluation.documents import COMPARED, Finding, count_names, inputs
from lab.evaluation.drawing import INK, Plot
from lab.evaluation.formatting import MISSING, SHOWN, change_text, with_interval, with_range
from lab.evaluation.report_style import STYLE
from lab.evaluation.study import Evaluation
from lab.evaluation.summaries import ALL, FIGURE_METRICS, LATENCIES, RUN_METRICS
from lab.evaluation.tables import OVERALL_HEADINGS, overall_cells, summary_line, value_text

_SERVICE = ("slo_attainment", "ttft_attainment", "tpot_attainment", "goodput_rps", "output_tps")
_OUTCOMES = ("requests", "lost", "unfinished", "reissued")
_COST = tuple(RUN_METRICS)
_READING = """
Every policy meets the same requests: a trace and a seed make the same arrivals and lengths for all.

In SLO: the share of all requests that were answered in full with time to first token (TTFT) and mean time per token
after it (TPOT) within the targets of their service. A request that was lost, or that the run's end cut off, is in no
SLO and in no latency: read latencies beside the counts of both. Counts of requests are of all seeds together.

Goodput is requests in SLO per second of the trace. GPU-hours are those of replicas that were not asleep. A dash stands
for what is missing, which is not zero.

Changes are taken seed by seed against the same requests, then the median over seeds; less is better for latencies,
GPU-hours and energy. Quantiles of all seeds taken together come from buckets 1 % wide; those of a run are exact.
"""
_VERDICTS = {
    True: '<span class="ok">✓ ok</span>',
    False: '<span class="miss">✗ miss</span>',
    None: '<span class="unjudged">– not judged</span>',
}
"""By `Bar.ok`."""
_ONE_SEED = "One seed was run, so there are no intervals: differences may be chance."
_INTERVALS = """x ± y: the mean of {seeds} seeds and half the width of its 95 % confidence interval, Student's t over
the seeds' values. It tells what other seeds would change, not other traces. A share's interval may reach past 0 or
100 %."""
_LATENCY = tuple(f"{name}_{field}" for name in LATENCIES for field in ("mean_s", "p50_s", "p95_s", "p99_s"))


def report(finding: Finding, plots: Sequence[Plot]) -> str:
    """The page."""
    suite, evaluation = finding.suite, finding.evaluation
    sections = [
        ("verdict", "Bars", "".join(_bars(finding))),
        ("failures", "What failed", "".join(_failures(finding))),
        ("overall", "All traces", "".join(_overall(evaluation, plots))),
        *(
            (f"trace-{index}", trace, "".join(_trace(finding, trace, plots)))
            for index, trace in enumerate(suite.traces)
        ),
        ("reading", "How to read this", "".join(_reading(evaluation))),
        ("inputs", "What was run", "".join(_what_was_run(finding))),
    ]
    shown = [section for section in sections if section[2]]
    links = " · ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in shown)
    body = "".join(
        f'<section id="{key}"><h2>{escape(title)}</h2>{content}</section>\n' for key, title, content in shown
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(suite.title)} – trimtab evaluate {escape(suite.name)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(suite.title)}</h1>\n<p>{escape(suite.description)}</p>\n"
        f"{''.join(_paragraphs(finding.notes))}<p><strong>{escape(summary_line(finding))}</strong></p>\n"
        f"<nav>{links}</nav>\n{body}</body>\n</html>\n"
    )


# Sections


def _bars(finding: Finding) -> Iterator[str]:
    if finding.bars:
        rows = [(escape(bar.name), _VERDICTS[bar.ok], f"{bar.bar:g}", escape(value_text(bar))) for bar in finding.bars]
        yield _table(("bar", "", "asked", "value"), rows, plain=True)


def _failures(finding: Finding) -> Iterator[str]:
    yield from _paragraphs(finding.problems)
    if finding.evaluation.failures:
        rows = [(escape(str(case)), escape(error)) for case, error in finding.evaluation.failures.items()]
        yield _table(("case", "error"), rows, plain=True)


def _overall(evaluation: Evaluation, plots: Sequence[Plot]) -> Iterator[str]:
    rows = [(_policy(evaluation, policy), *overall_cells(evaluation, policy)) for policy in evaluation.policies]
    yield _table(("policy", *(heading.replace("-\n", "").replace("\n", " ") for heading in OVERALL_HEADINGS)), rows)
    yield from _paragraphs(
        [f"Changes are against {evaluation.baseline}: the geometric mean over traces of medians over seeds."]
    )
    yield from _figures(plots, "cost")


def _trace(finding: Finding, trace: str, plots: Sequence[Plot]) -> Iterator[str]:
    evaluation = finding.evaluation
    yield f"<p>{escape(finding.suite.traces[trace])}</p>"

    def spreads(
        metrics: Sequence[str], service: str, text: Callable[[str, Confidence], str], *, outcomes: bool = False
    ) -> str:
        counted = _OUTCOMES if outcomes else ()
        rows = [
            (
                _policy(evaluation, policy, trace),
                *(text(metric, evaluation.confidence(policy, trace, metric, service)) for metric in metrics),
                *_counts(evaluation, policy, trace, service, counted),
            )
            for policy in evaluation.policies
        ]
        return _table(("policy", *(SHOWN[metric].heading for metric in (*metrics, *counted))), rows)

    yield spreads(_SERVICE, ALL, with_interval, outcomes=True)
    yield spreads(_LATENCY[:8], ALL, with_interval)
    yield spreads((*_LATENCY[8:], *_COST), ALL, with_interval)
    yield from _figures(plots, *(plot.name for plot in plots if plot.trace == trace))
    yield _details("Change against " + evaluation.baseline, _changes(evaluation, trace))
    medians = spreads(("slo_attainment", *_LATENCY), ALL, with_range) + spreads(_COST, ALL, with_range)
    yield _details("Medians over seeds, and least and most", medians)
    yield _details("All seeds taken together", _together(evaluation, trace))
    for service in evaluation.services():
        yield _details(
            f"Service {service}",
            spreads(_SERVICE, service, with_interval, outcomes=True) + spreads(_LATENCY, service, with_interval),
        )
    counts = count_names(evaluation)
    if counts:
        rows = [
            (_policy(evaluation, policy, trace), *(_mean(evaluation, policy, trace, name) for name in counts))
            for policy in evaluation.policies
        ]
        headings = ("policy", *(name.removeprefix("counts.") for name in counts))
        yield _details("What policies counted (means over seeds)", _table(headings, rows))


def _counts(evaluation: Evaluation, policy: str, trace: str, service: str, metrics: Sequence[str]) -> Iterator[str]:
    together = evaluation.pooled(policy, trace, service)
    for metric in metrics:
        yield SHOWN[metric].text(FIGURE_METRICS[metric](together) if together else None)


def _changes(evaluation: Evaluation, trace: str) -> str:
    rows = []
    for policy in evaluation.policies:
        cells = [_policy(evaluation, policy, trace)]
        for metric in COMPARED:
            change = evaluation.change(policy, trace, metric, against=evaluation.baseline)
            some = f" ({change_text(change.low)} to {change_text(change.high)})" if change.seeds > 1 else ""
            cells.append(change_text(change.median) + some)
        rows.append(cells)
    return _table(("policy", *(SHOWN[metric].title for metric in COMPARED)), rows)


def _together(evaluation: Evaluation, trace: str) -> str:
    metrics = tuple(FIGURE_METRICS)
    rows = []
    for policy in evaluation.policies:
        together = evaluation.pooled(policy, trace)
        figures = (FIGURE_METRICS[metric](together) if together else None for metric in metrics)
        cells = (SHOWN[metric].text(figure) for metric, figure in zip(metrics, figures, strict=True))
        rows.append((_policy(evaluation, policy, trace), *cells))
    return _table(("policy", *(SHOWN[metric].heading for metric in metrics)), rows)


def _reading(evaluation: Evaluation) -> Iterator[str]:
    seeds = len(evaluation.seeds)
    yield from _paragraphs(_READING.strip().split("\n\n"))
    yield from _paragraphs([_ONE_SEED if seeds == 1 else _INTERVALS.format(seeds=seeds)])


def _what_was_run(finding: Finding) -> Iterator[str]:
    suite = finding.suite
    named = [(_policy(finding.evaluation, name), escape(line)) for name, line in suite.policies.items()]
    yield _table(("policy", "what it is"), named, plain=True)
    yield _table(
        ("trace", "what it is"), [(escape(name), escape(line)) for name, line in suite.traces.items()], plain=True
    )
    slos = [(escape(name), f"{slo.ttft_s:g} s", f"{1000 * slo.tpot_s:g} ms") for name, slo in suite.slos.items()]
    yield _table(("service", "TTFT", "TPOT"), slos)
    yield f"<p>Seeds: {', '.join(map(str, suite.seeds))}.</p>"
    machine = [(escape(name), escape(str(value))) for name, value in finding.machine.items()]
    if machine:
        yield _table(("machine", ""), machine, plain=True)
    yield _details("All inputs", f"<pre>{escape(json.dumps(inputs(suite), indent=2, ensure_ascii=False))}</pre>")


# Parts


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield f"<p>{escape(text)}</p>\n"


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, plain: bool = False) -> str:
    """Cells are HTML, headings are text. `plain`: text, to the left; else figures."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>\n' for row in rows
    )
    kind = "words" if plain else "figures"
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{lines}</tbody></table></div>\n"
    )


def _policy(evaluation: Evaluation, policy: str, trace: str | None = None) -> str:
    """A policy's name, marked when others are compared with it or some of its runs on the trace failed."""
    marks = " <small>baseline</small>" if policy == evaluation.baseline else ""
    there = len(evaluation.seeds) if trace is None else len(evaluation.of(policy, trace))
    if there < len(evaluation.seeds):
        marks += f" <small>{there} of {len(evaluation.seeds)} seeds</small>"
    return escape(policy) + marks


def _mean(evaluation: Evaluation, policy: str, trace: str, metric: str) -> str:
    mean = evaluation.confidence(policy, trace, metric).mean
    return MISSING if mean is None else f"{mean:.4g}"


def _figures(plots: Sequence[Plot], *names: str) -> Iterator[str]:
    for plot in plots:
        if plot.name in names:
            yield (
                f'<figure role="img" aria-label="{escape(plot.title)}">{inline(plot)}'
                f"<figcaption>{escape(plot.title)}</figcaption></figure>\n"
            )


def inline(plot: Plot) -> str:
    """A plot as part of a page: its ids are its own, and its ink is the page's text colour."""
    svg = plot.svg[plot.svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{plot.name}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{plot.name}-", svg)
