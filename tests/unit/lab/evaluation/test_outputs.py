"""What is written and printed: repeatable, escaped, whole, and never over somebody else's file."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from rich.console import Console

from lab.evaluation.bars import at_least, at_most
from lab.evaluation.documents import Finding, csv_text, document, json_text
from lab.evaluation.drawing import Plot, to_file
from lab.evaluation.evaluating import evaluate
from lab.evaluation.outputs import Folder
from lab.evaluation.plots import plots
from lab.evaluation.report import report
from lab.evaluation.suite import SuiteError
from lab.evaluation.summaries import Case
from lab.evaluation.tables import tables
from tests.unit.lab.evaluation.made_up import drawn, suite

NASTY = "<script>alert('x')</script> & \"more\""


def nasty_drawn(case):
    """The made-up result under a name that is no good for HTML."""
    return drawn({}, case)


def finding(**changes) -> Finding:
    made = suite(
        bars=lambda evaluation: (
            at_most("p95_change", evaluation.change("fast", "one", "e2e_p95_s", against="slow").median, -0.4),
            at_least(
                "attainment", {trace: evaluation.confidence("fast", trace, "slo_attainment").mean for trace in "x"}, 0.9
            ),
        ),
        notes=lambda evaluation: [f"{len(evaluation.runs)} runs"],
        **changes,
    )
    return Finding.of(made, evaluate(made, jobs=1), {"cpus": 2})


@pytest.fixture(scope="module")
def found() -> Finding:
    return finding()


@pytest.fixture(scope="module")
def drawings(found: Finding) -> list[Plot]:
    return list(plots(found.evaluation, found.suite.slos))


def test_the_document_has_all_that_was_run_and_found(found):
    whole = json.loads(json_text(found))
    assert list(whole) == ["machine", "inputs", "results", "failures", "problems", "bars", "notes"]
    assert (whole["inputs"]["seeds"], whole["inputs"]["size"]) == ([1, 2, 3], 200)
    assert whole["inputs"]["slos"]["chat"] == {"ttft_s": 1.0, "tpot_s": 0.1}
    fast = whole["results"]["one"]["fast"]
    assert [run["seed"] for run in fast["runs"]] == [1, 2, 3]
    assert fast["over_seeds"]["e2e_p95_s"]["mean"] == pytest.approx(
        sum(run["all"]["e2e_p95_s"] for run in fast["runs"]) / 3
    )
    assert fast["over_seeds"]["energy_kwh"]["mean"] is None
    assert fast["over_seeds"]["energy_kwh"]["missing"] == 3
    assert fast["change"]["e2e_p95_s"]["median"] == pytest.approx(-0.5)
    assert fast["pooled"]["requests"] == 600
    assert fast["services"]["code"]["pooled"]["requests"] == 300
    assert [(bar["name"], bar["ok"]) for bar in whole["bars"]] == [("p95_change", True), ("attainment", False)]
    assert whole["bars"][1]["value"] == {"x": None}
    assert whole["notes"] == ["12 runs"]


def test_equal_runs_are_equal_to_the_last_byte(found, drawings):
    again = finding()
    assert json_text(again) == json_text(found)
    assert csv_text(again.evaluation) == csv_text(found.evaluation)
    drawn_again = list(plots(again.evaluation, again.suite.slos))
    assert drawn_again == drawings
    assert report(again, drawn_again) == report(found, drawings)


def test_the_table_has_a_line_for_every_figure(found):
    rows = list(csv.DictReader(io.StringIO(csv_text(found.evaluation))))
    keys = [(row["trace"], row["policy"], row["service"], row["metric"]) for row in rows]
    assert len(set(keys)) == len(keys)
    at = dict(zip(keys, rows, strict=True))
    p95 = at["one", "fast", "all", "e2e_p95_s"]
    confidence = found.evaluation.confidence("fast", "one", "e2e_p95_s")
    assert (float(p95["mean"]), float(p95["ci_low"]), float(p95["high"])) == (
        confidence.mean,
        confidence.ci_low,
        confidence.high,
    )
    assert float(p95["pooled"]) == pytest.approx(confidence.mean, rel=0.2)
    energy = at["one", "fast", "all", "energy_kwh"]
    assert (energy["seeds"], energy["missing"], energy["mean"]) == ("0", "3", "")
    assert at["other", "slow", "all", "counts.looks"]["median"] == "10.0"
    assert ("one", "fast", "chat", "slo_attainment") in at


class Page(HTMLParser):
    """Tags, what they point to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.targets.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_needs_nothing_from_elsewhere(found, drawings):
    page = Page(report(found, drawings))
    assert page.tags.count("svg") == 5
    assert {tag for tag in page.tags if tag in ("script", "link", "iframe", "img", "object")} == set()
    assert page.targets
    assert all(target.startswith("#") for target in page.targets)
    assert {target.removeprefix("#") for target in page.targets} <= set(page.ids)
    text = " ".join(page.texts)
    assert "@import" not in text
    said = ("✓ ok", "✗ miss", "How to read this", "What was run", "12 runs", "no figure")
    assert [words for words in said if words not in text] == []


def test_the_page_escapes_what_a_suite_says():
    made = suite(
        name=NASTY,
        title=NASTY,
        description=NASTY,
        policies={NASTY: NASTY},
        baseline=NASTY,
        traces={NASTY: NASTY},
        inputs={NASTY: NASTY},
        run=nasty_drawn,
        bars=lambda evaluation: [at_least(NASTY, {NASTY: 1.0}, 0.0)],
        notes=lambda evaluation: [NASTY],
    )
    whole = evaluate(made, jobs=1)
    whole = type(whole)(
        policies=whole.policies,
        traces=whole.traces,
        seeds=whole.seeds,
        baseline=NASTY,
        runs=whole.runs,
        failures={Case(NASTY, NASTY, 9): NASTY},
    )
    text = report(Finding.of(made, whole, {NASTY: NASTY}), list(plots(whole, made.slos)))
    assert "<script" not in text
    page = Page(text)
    assert "script" not in page.tags
    assert " ".join(page.texts).count(NASTY) >= 10


def test_a_page_of_failures_says_so_and_goes_without_the_rest():
    made = suite()
    broken = evaluate(suite(breaking=dict.fromkeys(made.cases, "the sky")), jobs=1)
    nothing = Finding.of(made, broken, {})
    assert list(plots(broken, made.slos)) == []
    assert not nothing.complete
    text = report(nothing, [])
    assert "12 failed" in text
    assert "the sky fell on fast" in text
    assert printed(nothing).count("the sky fell on") == 12
    assert json.loads(json_text(nothing))["results"]["one"]["fast"]["runs"] == []


def printed(finding: Finding, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    for table in tables(finding):
        console.print(table)
    return console.file.getvalue()


def test_eighty_columns_are_enough_for_the_terminal(found):
    text = printed(found)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.strip().startswith("fast"))
    assert "-50%" in line
    assert text.count("±") >= 8
    assert "MISS" in text
    assert "Student's t" in text


def test_one_seed_is_shown_without_intervals():
    made = suite().only(seeds=1)
    alone = Finding.of(made, evaluate(made, jobs=1), {})
    assert "±" not in printed(alone)
    assert "one seed, so no intervals" in printed(alone)
    assert "One seed was run" in report(alone, [])
    assert document(alone)["results"]["one"]["fast"]["over_seeds"]["e2e_p95_s"]["ci_low"] is None


def test_missing_seeds_are_said_beside_the_policy():
    made = suite(breaking={Case("fast", "one", 2): "the sky"})
    some = Finding.of(made, evaluate(made, jobs=1), {})
    assert "(2/3" in printed(some)
    assert "2 of 3 seeds" in report(some, [])


def test_bars_that_cannot_be_told_cost_no_results():
    some = finding_with(bars=lambda evaluation: 1 / 0, notes=lambda evaluation: ["still here"])
    assert not some.complete
    assert "ZeroDivisionError" in some.problems[0]
    assert "still here" in report(some, [])
    assert "ZeroDivisionError" in report(some, [])
    assert "ZeroDivisionError" in printed(some)
    bad = finding_with(bars=lambda evaluation: [type(at_least("b", 1, 1))("b", float("nan"), 1, ok=False)])
    assert "not JSON compliant" in bad.problems[0]
    json_text(bad)


def finding_with(**changes) -> Finding:
    made = suite(**changes).only(seeds=1, traces=["one"])
    return Finding.of(made, evaluate(made, jobs=1), {})


def test_plots_are_whole_and_differ_in_more_than_colour(drawings):
    assert [plot.name for plot in drawings] == ["timeline-one", "cdf-one", "timeline-other", "cdf-other", "cost"]
    for plot in drawings:
        ET.fromstring(to_file(plot.svg))
        assert "#010203" not in to_file(plot.svg)
    texts = "".join(ET.fromstring(drawings[1].svg).itertext())
    assert "slow (baseline)" in texts
    dashes = drawings[1].svg.count("stroke-dasharray")
    assert dashes > 0
    assert "has none" in drawings[0].svg


def test_a_folder_is_written_and_written_again(tmp_path):
    Folder.claimed(tmp_path / "new" / "out").write({"results.json": "1", "timeline-a.svg": "2"})
    again = Folder.claimed(tmp_path / "new" / "out")
    (again.path / "notes.txt").write_text("mine")
    again.write({"results.json": "3"})
    assert (again.path / "results.json").read_text() == "3"
    assert not (again.path / "timeline-a.svg").exists()
    assert (again.path / "notes.txt").read_text() == "mine"


def test_a_file_of_somebody_else_is_not_written_over(tmp_path):
    (tmp_path / "results.json").write_text("mine")
    folder = Folder.claimed(tmp_path)
    with pytest.raises(SuiteError, match=r"results\.json is there and was not written by trimtab evaluate"):
        folder.write({"results.json": "yours", "table.csv": ""})
    assert (tmp_path / "results.json").read_text() == "mine"
    assert not (tmp_path / "table.csv").exists()


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SuiteError, match="name another folder"):
        Folder.claimed(tmp_path / "file")


@pytest.mark.parametrize("name", ["../precious.txt", "..", ".", "sub/file", "{precious}", "a\\b", "a\0b"])
def test_a_list_that_names_what_is_elsewhere_is_refused_and_nothing_is_lost(tmp_path, name):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    listed = f"results.json\n{name.format(precious=precious)}\n"
    (out / ".trimtab-evaluation").write_text(listed)
    with pytest.raises(SuiteError, match="is no file of this folder; remove that list or name another") as caught:
        Folder.claimed(out).write({"results.json": "1"})
    assert "\n" not in str(caught.value)
    assert precious.read_text() == "mine"
    assert (out / ".trimtab-evaluation").read_text() == listed
