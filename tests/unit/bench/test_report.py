"""What every bench prints and ends with."""

import json
import sys

import pytest

from bench import place, windows
from bench._report import machine, main_of, put_out


def report(*values: float) -> dict[str, object]:
    bars = [{"name": f"b{number}", "value": value, "bar": 1.0, "ok": value <= 1} for number, value in enumerate(values)]
    return {"machine": machine(), "bars": bars}


@pytest.mark.parametrize(("values", "status"), [((0.5, 1.0), 0), ((0.5, 1.5), 1)])
def test_a_missed_bar_ends_a_bench_with_one_in_either_form(
    values: tuple[float, ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert put_out(report(*values), as_json=False) == status
    assert capsys.readouterr().out.splitlines() == [
        "b0: 0.500 (bar 1) ok",
        f"b1: {values[1]:.3f} (bar 1) {'MISSED' if status else 'ok'}",
    ]
    assert put_out(report(*values), as_json=True) == status
    assert json.loads(capsys.readouterr().out) == report(*values)


def test_a_bench_says_what_it_has_to_show_in_words_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert put_out(report(2.0), as_json=False, show=lambda _: print("a table")) == 1
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize("bench", [place, windows])
def test_benches_without_options_share_one_command(
    bench: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run", lambda: report(0.25))
    monkeypatch.setattr(sys, "argv", ["bench", "--json"])
    assert bench.main() == 0  # type: ignore[attr-defined]
    assert json.loads(capsys.readouterr().out)["bars"][0]["value"] == 0.25
    assert bench.main_of is main_of  # type: ignore[attr-defined]
