"""The replica model against recorded benchmarks: a GPU that the fit never saw, and every packaged profile."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.fitting.comparing import compare_profile
from lab.fitting.correcting import log_errors, packaged_corrections
from lab.fitting.silicon import B200, H100, read_silicon
from simulator.profiles import packaged_profiles
from trimtab.cli.main import app


@pytest.mark.parametrize(("fitted", "graded"), [(H100, B200), (B200, H100)])
def test_a_gpu_left_out_of_the_fit_is_within_the_bars(material: Path, fitted: str, graded: str) -> None:
    table = read_silicon(material / "data" / "perf", graded)
    errors = np.abs(np.expm1(log_errors(material / "data" / "perf", table, packaged_corrections()[fitted])))
    assert len(table) == {H100: 192, B200: 186}[graded]
    assert np.median(errors[:, 1]) <= 0.15
    assert np.quantile(errors[:, 1], 0.9) <= 0.35
    assert np.median(errors[:, 0]) <= 0.15
    assert np.quantile(errors[:, 0], 0.9) <= 0.35


def test_simulate_profile_compares_every_profile_with_the_loads_of_its_own(material: Path) -> None:
    shown = CliRunner().invoke(app, ["simulate", "profile", "--material", str(material), "--json"])
    measured = {one["name"]: one["measured"] for one in json.loads(shown.output)}
    assert sorted(measured) == sorted(packaged_profiles())
    assert measured["h100-70b-tp4"] == [
        dataclasses.asdict(one) for one in compare_profile(material / "data" / "perf", "h100-70b-tp4")
    ]
    assert len(measured["h100-70b-tp4"]) > 10
    assert measured["a100-8b-tp1"] == []
