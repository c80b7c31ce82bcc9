"""From input to a block of a ServicePolicy: recorded windows with their errors, the simulator, and the command."""

import csv
import dataclasses
import datetime
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from lab.calibration.calibrating import Form, calibrate_observed
from lab.calibration.fitting import CalibrationError
from lab.calibration.fixed import run_fixed
from lab.calibration.observations import read_observations
from lab.calibration.report import document, policy_block, version_of
from lab.calibration.sweeps import by_tokens, made_up, requests_for, steps
from lab.calibration.windows import Windows
from lab.evaluation.statistics import Slo
from lab.suites.capacity import TokenCost
from simulator.profiles import packaged_profiles
from trimtab.cli.main import app
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role

SLO = Slo(ttft_s=2.0, tpot_s=0.075)
COST = TokenCost(prompt_token_s=7e-5, output_token_s=1.7e-4)
DATE = datetime.date(2026, 1, 31)
HEADER = (
    "run,window_end_s,prefill_tps,decode_tps,running,waiting,ttft_p95_s,tpot_p95_s,request_rps,slo_attainment,requests"
)


@pytest.fixture(scope="module")
def simulated() -> Windows:
    """Nine minutes of chat on one replica, in steps of load."""
    requests = requests_for(made_up()[:1], steps(540.0, 3), by_tokens(COST), replicas=1, duration_s=540.0, seed=3)
    return run_fixed(requests, profile=packaged_profiles()["a100-8b-tp1"], slo=SLO, replicas=1, duration_s=540.0)


def recorded(windows: Windows, path: Path) -> Path:
    """The same windows as a file; latencies stand for the pressure, as a TTFT of so many times the target."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER.split(","))
        for row in range(len(windows)):
            known = not np.isnan(windows.pressure[row])
            writer.writerow(
                [
                    f"day-{windows.run[row]}",
                    windows.end_s[row],
                    windows.prefill_tps[row],
                    windows.decode_tps[row],
                    windows.running[row],
                    windows.waiting[row],
                    SLO.ttft_s * windows.pressure[row] if known else "",
                    SLO.tpot_s / 2 if known else "",
                    windows.request_rps[row],
                    windows.attained[row] if known else "",
                    windows.requests[row],
                ]
            )
    return path


def test_windows_of_a_run_have_the_load_that_was_given_and_the_fates_of_their_arrivals(simulated: Windows) -> None:
    assert len(simulated) == 108
    assert simulated.end_s.tolist() == [5.0 * place for place in range(1, 109)]
    chat = made_up()[0]
    request_s = chat.prompt_mean * COST.prompt_token_s + chat.output_mean * COST.output_token_s
    assert simulated.requests.sum() == pytest.approx(540 * 0.806 / request_s, rel=0.1)
    # What finishes is what arrives, once the last backlog is gone.
    assert simulated.request_rps.mean() == pytest.approx(simulated.requests.sum() / 540, rel=0.1)
    assert simulated.decode_tps.mean() == pytest.approx(chat.output_mean * simulated.request_rps.mean(), rel=0.1)
    healthy = simulated.where(simulated.pressure < 1)
    lost = simulated.where(simulated.pressure > 2)
    assert len(healthy) > 20
    assert len(lost) > 3
    assert healthy.running.mean() < lost.running.mean()
    assert (healthy.attained >= 0.9).all()


def test_a_file_of_windows_is_read_as_it_was_recorded(simulated: Windows, tmp_path: Path) -> None:
    read = read_observations(recorded(simulated, tmp_path / "windows.csv"), SLO)[Role.COLOCATED]
    for name in ("end_s", "decode_tps", "waiting", "request_rps", "requests"):
        assert getattr(read, name).tolist() == pytest.approx(getattr(simulated, name).tolist())
    judged = simulated.judged
    assert read.judged.tolist() == judged.tolist()
    expected = np.maximum(simulated.pressure[judged], 0.5)
    assert read.pressure[judged].tolist() == pytest.approx(expected.tolist())
    assert np.isnan(read.kv_usage_ratio).all()


def test_json_lines_and_interleaved_runs_are_read_run_by_run(tmp_path: Path) -> None:
    rows = [
        {"run": run, "window_end_s": end, "prefill_tps": 0, "decode_tps": end, "running": 1, "waiting": 0,
         "ttft_p95_s": ttft, "tpot_p95_s": None, "note": "left alone"}
        for end, ttft in ((5, 1.0), (10, 4.0))
        for run in ("b", "a")
    ]  # fmt: skip
    path = tmp_path / "windows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    read = read_observations(path, SLO)[Role.COLOCATED]
    assert read.run.tolist() == [0, 0, 1, 1]
    assert read.end_s.tolist() == [5, 10, 5, 10]
    assert read.pressure.tolist() == [0.5, 2.0, 0.5, 2.0]
    assert read.attained.tolist() == [1.0, 0.0, 1.0, 0.0]


ROW = "a,5,1,1,1,1,1,0.05,1,1,3"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("w.csv", f"{HEADER}\n{ROW}\na,10,1,x,1,1,1,0.05,1,1,3\n", "w.csv:3: decode_tps: 'x' is not a number"),
        ("w.csv", f"{HEADER}\na,5,1,1,-1,1,1,0.05,1,1,3\n", "w.csv:2: running: '-1' is not a number"),
        ("w.csv", f"{HEADER}\na,5,nan,1,1,1,1,0.05,1,1,3\n", "w.csv:2: prefill_tps: 'nan' is not a number"),
        ("w.csv", f"{HEADER}\na,5,,1,1,1,1,0.05,1,1,3\n", "w.csv:2: prefill_tps: is empty"),
        ("w.csv", f"{HEADER}\na,5,1,1,1,1,1,0.05,1,1.5,3\n", "w.csv:2: slo_attainment: 1.5 is not from 0 to 1"),
        ("w.csv", f"{HEADER}\na,5,1,1e308,1,1,1,0.05,1,1,3\n", "w.csv:2: decode_tps: 1e+308 is more than any"),
        ("w.csv", f"{HEADER}\n{ROW}\n{ROW}\n", "w.csv:3: window_end_s: 5 does not come after"),
        ("w.csv", f"{HEADER}\na,5,1\n", "w.csv:2: not as many fields as the header has"),
        ("w.csv", "window_end_s,running\n1,2\n", "w.csv:1: no column prefill_tps; needed are"),
        ("w.csv", "window_end_s,running,running\n1,2,3\n", "w.csv:1: column running 2 times; keep the one that"),
        ("w.csv", f"{HEADER}\n", "w.csv: no window in it"),
        ("w.jsonl", '{"window_end_s": 1}\n', "w.jsonl:1: no prefill_tps"),
        ("w.jsonl", "[1]\n", "w.jsonl:1: not a JSON object"),
        ("w.jsonl", '{"window_end_s": true, "prefill_tps": 1, "decode_tps": 1, "running": 1, "waiting": 1}\n',
         "w.jsonl:1: window_end_s: 'True' is not a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(CalibrationError) as caught:
        read_observations(path, SLO)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_recorded_windows_give_a_block_that_a_policy_takes(simulated: Windows, tmp_path: Path) -> None:
    windows = read_observations(recorded(simulated, tmp_path / "windows.csv"), SLO)[Role.COLOCATED]
    found = calibrate_observed(windows, SLO, source="windows.csv")
    assert found.forms.keys() == {Form.ANSWERS, Form.FIXED}
    block = policy_block(found, DATE)
    comments = [line for line in block.splitlines() if line.startswith("#")]
    assert comments[0].startswith("# version 2026-01-31-")
    assert "windows.csv, 72 windows of the fit and 36 others" in comments[1]
    share = TokenServiceShare.model_validate(yaml.safe_load(block)["tokenServiceShare"])
    assert share == found.chosen.share
    assert share.waiting_weight is None
    assert 10 < share.theta_tps < 40
    said = document(found, DATE)
    assert json.loads(json.dumps(said))["version"] == version_of(share, DATE)
    again = calibrate_observed(windows, SLO, source="windows.csv")
    assert policy_block(again, DATE) == block


def test_without_finished_requests_only_fixed_weights_can_be_fitted(simulated: Windows, tmp_path: Path) -> None:
    path = recorded(simulated, tmp_path / "windows.csv")
    lines = [",".join(line.split(",")[:8]) for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    windows = read_observations(path, SLO)[Role.COLOCATED]
    with pytest.raises(CalibrationError, match="without request_rps"):
        calibrate_observed(windows, SLO, source="windows.csv")
    fixed = calibrate_observed(windows, SLO, source="windows.csv", form=Form.FIXED)
    assert fixed.chosen.share.waiting_weight is not None


def test_the_command_prints_a_block_and_writes_it(simulated: Windows, tmp_path: Path) -> None:
    path, out = recorded(simulated, tmp_path / "windows.csv"), tmp_path / "share.yaml"
    arguments = ["calibrate", "--observations", str(path), "--slo-ttft", "2", "--slo-tpot", "0.075"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Z, waiting by answers (chosen)" in result.output
    assert out.read_text() in result.output
    as_json = CliRunner().invoke(app, [*arguments, "--json", "--form", "fixed"])
    assert json.loads(as_json.output)["form"] == "fixed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either --profile or --observations"),
        (["--profile", "none"], "profile 'none' is not known"),
        (["--profile", "a100-8b-tp1", "--replicas", "1,x"], "--replicas 1,x: give numbers"),
        (["--observations", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--observations", "nowhere.csv", "--slo-ttft", "inf"], "--slo-ttft inf: give seconds, at most 86400"),
        (["--profile", "a100-8b-tp1", "--slo-tpot", "1e300"], "--slo-tpot 1e+300: give seconds, at most 86400"),
        (["--profile", "a100-8b-tp1", "--profiles", "/nonexist"], "/nonexist: there is no such folder"),
        (["--profile", "a100-8b-tp1", "--out", "/nonexist/shares.yaml"], "there is no folder /nonexist; make it first"),
        (["--profile", "a100-8b-tp1", "--out", "/"], "--out /: is a folder; name a file in it"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", "--slo-ttft", "2", "--slo-tpot", "0.075", *arguments])
    assert result.exit_code == 1
    assert said in str(result.exception)


@pytest.mark.parametrize("form", list(Form))
def test_tokens_that_no_policy_takes_are_refused_in_a_line(simulated: Windows, form: Form) -> None:
    much = dataclasses.replace(simulated, decode_tps=1e9 * simulated.decode_tps, prefill_tps=0 * simulated.prefill_tps)
    with pytest.raises(CalibrationError, match=r"the fit gives theta_tps .*, which no policy takes") as caught:
        calibrate_observed(much, SLO, source="windows.csv", form=form)
    assert "\n" not in str(caught.value)
