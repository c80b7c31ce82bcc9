"""A chaos run, shortened, as a user starts it: everything is broken once or twice, and Trimtab loses nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.stack import TRIMTAB

MUST_BE_ZERO = (
    "lost_by_trimtab",
    "aborted_by_sleep",
    "misrouted",
    "sent_after_acknowledgement",
    "budget_violations",
    "floor_violations",
    "undecided_transitions",
    "fallen_fencing_tokens",
    "replica_changes",
    "unsettled_at_the_end",
    "faults_not_recovered",
)


@pytest.mark.timeout(400)
def test_forty_five_seconds_of_faults_lose_nothing_that_trimtab_could_have_kept(
    tmp_path: Path, module_port_base: int
) -> None:
    command = [*TRIMTAB, "--port-base", str(module_port_base), "chaos", "--duration", "45", "--seed", "5"]
    command += ["--state-dir", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    bars = {bar["name"]: bar for bar in report["bars"]}
    results = report["results"]
    assert {name: bars[name]["value"] for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0), results
    assert done.returncode == 0, done.stderr
    assert report["inputs"]["servers"] == 8
    assert results["requests_sent"] == results["requests_complete"] + results["requests_lost"] > 80
    assert sum(kind["faults"] for kind in results["faults"].values()) >= 6
    # It did look, and there was something to see.
    assert results["looks"]["gpus"] > 90
    assert results["looks"]["list"] > 45
    assert results["process_restarts"]
    assert json.loads((tmp_path / "chaos" / "chaos.json").read_text()) == report
