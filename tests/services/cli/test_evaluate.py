"""`trimtab evaluate` as a user runs it: files, exit statuses, and one clear line for what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.commands import evaluate
from lab.evaluation.bars import Bar, at_least, at_most
from lab.evaluation.study import Evaluation, geometric_mean
from lab.evaluation.summaries import Case
from lab.evaluation.tuning import read_tuned
from tests.unit.lab.evaluation.made_up import suite, tunable
from trimtab.cli.main import app

FAILING = Case("fast", "one", 2)


def trimtab(*argv: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab.cli.main", "evaluate", *argv],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
    )


def test_the_smoke_suite_from_command_to_files(tmp_path: Path) -> None:
    done = trimtab("smoke", "--duration", "20", "--seeds", "2", "--jobs", "2", "--trace", "burst", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "4 policies × 1 traces × 2 seeds: 8 runs; 0 of 2 bars met, 2 not judged" in done.stdout
    folder = tmp_path / "evaluation" / "smoke"
    assert {path.name for path in folder.iterdir()} == {
        ".trimtab-evaluation", "results.json", "table.csv", "report.html",
        "timeline-burst.svg", "cdf-burst.svg", "cost.svg",
    }  # fmt: skip
    whole = json.loads((folder / "results.json").read_text())
    assert whole["inputs"]["duration_s"] == 20
    assert whole["machine"]["jobs"] == 2
    assert whole["machine"]["command"].endswith("--trace burst")
    fast = whole["results"]["burst"]["static-4"]
    assert fast["pooled"]["requests"] > 200
    assert fast["pooled"]["lost"] == 0
    assert fast["over_seeds"]["energy_kwh"]["mean"] > 0
    assert "static-4" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nothing"], "there is no suite 'nothing'; there are "),
        ([], "name a suite: "),
        (["smoke", "--policy", "static-9"], "--policy static-9: suite smoke has static-1, static-2, static-4, fitted"),
        (["smoke", "--trace", "quiet"], "--trace quiet: suite smoke has steady, burst"),
        (["smoke", "--seeds", "9"], "--seeds 9: suite smoke has 3 seeds"),
        (["smoke", "--duration", "inf"], "--duration inf: give seconds, at most 604800"),
        (["smoke", "--duration", "1e12"], r"--duration 1e\+12: give seconds, at most 604800"),
        (["smoke", "--write"], "--write: only a search has settings to write; add --tune POLICY"),
    ],
)
def test_what_is_not_there_is_named_in_a_line(tmp_path: Path, argv: list[str], words: str) -> None:
    with pytest.raises(evaluate.CommandError, match=words):
        CliRunner().invoke(app, ["evaluate", *argv, "--out", str(tmp_path)], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch):
    """Makes the command find a made-up suite."""

    def use(**changes: object) -> None:
        monkeypatch.setattr(evaluate, "find_suite", lambda name, options: suite(**changes))

    return use


def run(*argv: str):
    return CliRunner().invoke(app, ["evaluate", "made-up", "--jobs", "1", "--no-plots", *argv])


def test_json_is_one_object_and_writes_no_file(made_up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_up()
    done = run("--json")
    assert done.exit_code == 0
    assert {"machine", "inputs", "results", "bars"} <= set(json.loads(done.stdout))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_case_is_named_and_the_status_is_one(made_up, tmp_path: Path) -> None:
    made_up(breaking={FAILING: "the sky"}, bars=lambda evaluation: [at_least("b", 0.0, 1.0)])
    done = run("--out", str(tmp_path), "--require-bars")
    assert done.exit_code == 1
    assert "fast on one, seed 2: RuntimeError: the sky fell on fast" in done.stdout
    whole = json.loads((tmp_path / "results.json").read_text())
    assert [failure["seed"] for failure in whole["failures"]] == [2]
    assert len(whole["results"]["one"]["slow"]["runs"]) == 3


@pytest.mark.parametrize(("argv", "status"), [([], 0), (["--require-bars"], 2)])
def test_a_missed_bar_is_shown_and_fails_only_when_asked_to(made_up, tmp_path, argv: list[str], status: int) -> None:
    made_up(bars=lambda evaluation: [at_least("fast_enough", 0.5, 1.0)])
    done = run("--out", str(tmp_path), *argv)
    assert done.exit_code == status
    assert "MISS" in done.stdout
    assert "0 of 1 bars met" in done.stdout


def test_bars_that_are_met_pass(made_up, tmp_path: Path) -> None:
    made_up(bars=lambda evaluation: [at_least("fast_enough", 1.0, 1.0)])
    assert run("--out", str(tmp_path), "--require-bars").exit_code == 0


ASKED = 4.0


def compared(evaluation: Evaluation) -> list[Bar]:
    """A bar that needs two policies, and one of any runs."""
    change = evaluation.change("fast", "one", "e2e_p95_s", against="slow").median
    return [at_most("p95_change", change, 0.0), at_least("runs", float(len(evaluation.runs)), ASKED)]


def over_traces(evaluation: Evaluation) -> list[Bar]:
    """Bars over all traces: of two policies by the mean and by trace, of one alone, and of nobody knows whom."""
    changes = {
        trace: evaluation.change("fast", trace, "e2e_p95_s", against="slow").median for trace in evaluation.traces
    }
    ratios = [None if change is None else 1 + change for change in changes.values()]
    own = [evaluation.confidence("fast", trace, "e2e_p95_s").median for trace in evaluation.traces]
    return [
        at_most("mean_ratio", geometric_mean(ratios), 1.0, policies=("fast", "slow")),
        at_most("each_change", changes, 0.0, policies=("fast", "slow")),
        at_most("own_p95", geometric_mean(own), 100.0, policies=("fast",)),
        at_most("lost", evaluation.lost_requests(), 0.0),
    ]


def not_judged(reason: str, value: object = None) -> tuple[object, object, object]:
    return (value, None, reason)


CHANGE = pytest.approx(-0.5)
MET_MEAN = (pytest.approx(0.5), True, None)
MET_EACH = ({"one": CHANGE, "other": CHANGE}, True, None)
MET_OWN = (pytest.approx(2.3, abs=0.5), True, None)
MET_LOST = (0.0, True, None)


@pytest.mark.parametrize(
    ("argv", "expected", "met"),
    [
        ([], [MET_MEAN, MET_EACH, MET_OWN, MET_LOST], 4),
        (
            ["--trace", "one"],
            [
                not_judged("needs trace other"),
                not_judged("needs trace other", {"one": CHANGE, "other": None}),
                not_judged("needs trace other"),
                not_judged("needs trace other"),
            ],
            0,
        ),
        (
            ["--policy", "fast"],
            [
                not_judged("needs policy slow"),
                not_judged("needs policy slow", {"one": None, "other": None}),
                MET_OWN,
                not_judged("needs policy slow"),
            ],
            1,
        ),
        (
            ["--policy", "slow", "--trace", "other"],
            [
                not_judged("needs policy fast and trace one"),
                not_judged("needs policy fast and trace one", {"one": None, "other": None}),
                not_judged("needs policy fast and trace one"),
                not_judged("needs policy fast and trace one"),
            ],
            0,
        ),
    ],
    ids=["all", "one trace", "one policy", "one of each"],
)
def test_a_bar_over_traces_is_judged_when_all_that_it_is_of_ran(made_up, tmp_path, argv, expected, met: int) -> None:
    made_up(bars=over_traces)
    done = run("--out", str(tmp_path), *argv)
    assert done.exit_code == 0
    bars = json.loads((tmp_path / "results.json").read_text())["bars"]
    assert [(bar["value"], bar["ok"], bar.get("reason")) for bar in bars] == expected
    assert f"; {met} of 4 bars met{'' if met == 4 else f', {4 - met} not judged'}" in done.stdout
    said = " ".join(done.stdout.split())
    assert [reason for _, _, reason in expected if reason and reason not in said] == []


def test_what_falls_short_in_a_part_falls_short_in_the_whole(made_up, tmp_path: Path) -> None:
    made_up(
        bars=lambda evaluation: [
            at_most(
                "each_p95",
                {trace: evaluation.confidence("fast", trace, "e2e_p95_s").median for trace in evaluation.traces},
                0.1,
            )
        ]
    )
    done = run("--out", str(tmp_path), "--trace", "one", "--require-bars")
    assert done.exit_code == 2
    (bar,) = json.loads((tmp_path / "results.json").read_text())["bars"]
    assert (bar["ok"], bar["value"]["other"]) == (False, None)


def test_a_bar_whose_runs_a_filter_left_out_is_neither_met_nor_missed(made_up, tmp_path: Path) -> None:
    made_up(bars=compared)
    done = run("--out", str(tmp_path), "--policy", "fast", "--require-bars")
    assert done.exit_code == 0, "what was run is met"
    assert "MISS" not in done.stdout
    assert "not judged p95_change" in " ".join(done.stdout.split())
    assert "needs policy slow" in " ".join(done.stdout.split())
    assert "1 of 2 bars met, 1 not judged" in done.stdout
    bars = json.loads((tmp_path / "results.json").read_text())["bars"]
    left_out = {"name": "p95_change", "value": None, "bar": 0.0, "ok": None, "reason": "needs policy slow"}
    assert bars[0] == left_out
    assert (bars[1]["ok"], "reason" in bars[1]) == (True, False)
    assert "– not judged" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--policy", "fast", "--seeds", "1"], 2),
        (["--trace", "other", "--policy", "slow", "--seeds", "1"], 2),
        ([], 0),
    ],
    ids=["what was run is missed", "and with two filters", "a whole suite"],
)
def test_a_filter_hides_no_bar_that_is_missed(made_up, tmp_path: Path, argv: list[str], status: int) -> None:
    made_up(bars=compared)
    assert run("--out", str(tmp_path), "--require-bars", *argv).exit_code == status


def test_bars_are_not_met_by_running_none_of_them(made_up, tmp_path: Path) -> None:
    made_up(bars=lambda evaluation: compared(evaluation)[:1])
    done = run("--out", str(tmp_path), "--policy", "fast", "--require-bars")
    assert done.exit_code == 2
    assert "--require-bars: no bar was judged; p95_change needs policy slow" in done.stderr
    assert run("--out", str(tmp_path), "--policy", "fast").exit_code == 0


def test_a_figure_that_a_failed_case_took_is_missed_though_others_were_left_out(made_up, tmp_path: Path) -> None:
    made_up(breaking={FAILING: "the sky"}, bars=compared)
    done = run("--out", str(tmp_path), "--policy", "fast")
    assert done.exit_code == 1
    assert "MISS" in done.stdout


def test_who_says_whose_runs_its_bar_is_of_is_not_blamed_for_a_case_that_failed(made_up, tmp_path: Path) -> None:
    made_up(breaking={FAILING: "the sky"}, bars=over_traces)
    done = run("--out", str(tmp_path), "--policy", "fast")
    assert done.exit_code == 1
    bars = json.loads((tmp_path / "results.json").read_text())["bars"]
    assert [bar["ok"] for bar in bars] == [None, None, True, False]


def test_somebody_elses_results_are_refused_before_anything_runs(made_up, tmp_path: Path) -> None:
    made_up(breaking=dict.fromkeys(suite().cases, "should not run"))
    (tmp_path / "report.html").write_text("mine")
    done = run("--out", str(tmp_path))
    assert "report.html is there" in str(done.exception)
    assert (tmp_path / "report.html").read_text() == "mine"


def test_suites_are_listed() -> None:
    done = CliRunner().invoke(app, ["evaluate", "--list", "--json"])
    assert "smoke" in json.loads(done.stdout)


def test_tuning_prints_every_trial_and_writes_what_the_suite_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(evaluate, "find_suite", lambda name, options: tunable())
    done = run("--tune", "fast", "--out", str(tmp_path), "--seeds", "1")
    assert done.exit_code == 0
    assert "fast: mean E2E, s; on 2 traces × 1 seeds" in done.stdout
    assert "best: high 4, low 2" in done.stdout
    found = read_tuned(tmp_path / "tuned.yaml")["fast"]
    assert (found.setting, found.seeds) == ({"low": 2.0, "high": 4.0}, (11,))
    printed = json.loads(run("--tune", "fast", "--json", "--trace", "other").stdout)
    assert printed["results"]["setting"] == {"low": 2.0, "high": 4.0}
    assert printed["results"]["traces"] == ["other"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tune", "slow"], "--tune slow: suite made-up has policies to tune: fast"),
        (["--tune", "fast", "--trace", "third"], "--trace third: fast is tuned on one, other"),
        (["--tune", "fast", "--seeds", "5"], "--seeds 5: fast is tuned on 2 seeds"),
        (["--tune", "fast", "--write"], "--write: suite made-up reads no file of settings"),
    ],
)
def test_what_cannot_be_tuned_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path, argv: list[str], words: str) -> None:
    monkeypatch.setattr(evaluate, "find_suite", lambda name, options: tunable())
    assert words in str(run(*argv, "--out", str(tmp_path)).exception)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_name_of_a_folder_is_not_the_folder_one_is_in(made_up, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    made_up()
    assert "--out: the name is empty" in str(run("--out", "").exception)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_the_workers_too(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab.cli.main", "evaluate", "smoke", "--duration", "50000", "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    try:
        _until(lambda: len(_workers(process.pid)) == 2)
        workers = _workers(process.pid)
        process.terminate()
        said = process.communicate(timeout=20)
        assert process.returncode == 143
        assert said == ("", "")
        _until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _workers(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)
