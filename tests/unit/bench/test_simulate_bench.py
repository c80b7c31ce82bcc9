"""Where ``bench.simulate`` finds its traces: in what is named, and nowhere else; without it they are generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.simulate import FleetTrace, conversation, parsed


def test_without_material_both_traces_are_generated() -> None:
    assert parsed([], {}).material is None
    trace, source = conversation(None)
    assert source == "generated: 5.53 requests/s, 1,155 in, 211 out"
    assert len(trace) / trace[-1].arrival_s == pytest.approx(5.53, rel=0.05)
    fleet = FleetTrace(None)
    assert fleet.source == "generated with lognormal lengths"
    assert len(list(fleet.requests(8, 10.0))) == 160


def test_material_is_what_the_flag_names_else_the_environment(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    named = {"TRIMTAB_TEST_MATERIAL": str(tmp_path)}
    assert parsed([], named).material == tmp_path
    assert parsed(["--material", str(tmp_path / "other")], named).material == tmp_path / "other"
    assert conversation(tmp_path)[1].startswith("generated")


def test_material_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(["--material", str(tmp_path / "no")], {})
    assert f"{tmp_path}/no: no such folder; leave --material out" in capsys.readouterr().err
