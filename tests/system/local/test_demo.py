"""The demo, shortened, as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.stack import TRIMTAB


@pytest.mark.timeout(400)
def test_the_demo_moves_capacity_and_loses_nothing(tmp_path: Path, module_port_base: int) -> None:
    command = [*TRIMTAB, "demo", "--duration", "30", "--port-base", str(module_port_base), "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    bars = {bar["name"]: bar for bar in summary["bars"]}
    assert set(bars) == {"slo_gain_points", "wakes", "releases", "lost_requests", "misrouted_requests"}
    # How much it gains depends on the machine that plays all the servers; that nothing is lost does not.
    for name in ("wakes", "releases", "lost_requests", "misrouted_requests"):
        assert bars[name]["ok"], bars
    assert summary["results"]["static"]["wakes"] == 0
    assert summary["results"]["static"]["misrouted_requests"] == 0
    decisions = json.loads((tmp_path / "decisions.json").read_text())
    moved = [decision for decision in decisions if decision.get("transition", {}).get("wakes")]
    assert moved
    assert all(decision["inputs"] and decision["reason"] for decision in moved)
    for words in ("trimtab explain", "rule: ", "candidate: ", "outcome: ", "points of SLO attainment"):
        assert words in done.stdout
