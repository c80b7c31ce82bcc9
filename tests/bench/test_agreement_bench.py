"""Live servers and virtual time agree on a short run; the bench itself takes longer ones, for tails."""

from pathlib import Path

import pytest

from bench._demo import near_phases
from bench.agreement import BAR, bars, compared, errors, live_servers, made_trace
from simulator.profiles import packaged_profiles
from simulator.traces.shaping import clip_lengths

PROFILE = packaged_profiles()["l40s-32b-tp2"]


@pytest.mark.parametrize("case", ["colocated", "disaggregated"])
def test_live_and_offline_agree_on_a_short_run(case: str, tmp_path: Path, module_port_base: int) -> None:
    """Medians only, and four times the bar: what a busy machine adds to so few requests is no fault of the model."""
    trace, _ = clip_lengths(made_trace(4.0, 6.0, seed=5), max_prompt_tokens=2000, max_output_tokens=30)
    found = compared(case, PROFILE, trace, seconds=6.0, seed=5, folder=tmp_path, port=module_port_base)
    assert (found["requests"], found["lost"]) == (len(trace), 0)
    medians = found["quantiles"]["p50"]
    assert sorted(medians) == ["e2e", "tpot", "ttft"]
    assert {name: one["error"] for name, one in medians.items() if abs(one["error"]) > 4 * BAR} == {}


def test_names_of_live_servers_break_ties_as_indices_do_and_share_no_gpu() -> None:
    for case in ("colocated", "disaggregated"):
        servers = live_servers(case, PROFILE)
        by_role = {role: [s.name for s in servers if s.role == role] for role in {s.role for s in servers}}
        assert all(names == sorted(names) for names in by_role.values())
        gpus = [index for server in servers for index in server.gpus]
        assert gpus == list(range(len(servers) * PROFILE.tensor_parallel))


def test_a_bar_holds_the_error_of_every_case_and_latency_and_fails_by_the_worst() -> None:
    good = errors({"ttft": 1.0, "e2e": 10.0}, {"ttft": 1.05, "e2e": 9.5})
    bad = errors({"ttft": 1.0, "e2e": 10.0}, {"ttft": 0.85, "e2e": 10.0})
    assert good["ttft"]["error"] == pytest.approx(0.05)
    first, second = bars([{"case": "colocated", "quantiles": {"p50": good, "p95": bad}}])
    assert first["name"] == "live_offline_p50_error"
    assert first["value"] == {"colocated ttft": pytest.approx(0.05), "colocated e2e": pytest.approx(0.05)}
    assert (first["ok"], second["ok"]) == (True, False)


@pytest.mark.parametrize(
    ("began_s", "expected"),
    [(0.5, [0.375, 0.5, 0.625]), (0.97, [0.0, 0.875]), (0.06, [0.0, 0.125]), (0.25, [0.125, 0.25, 0.375])],
)
def test_virtual_runs_that_begin_near_the_live_one_are_compared_round_the_beat(
    began_s: float, expected: list[float]
) -> None:
    phases = [number / 8 for number in range(8)]
    assert [phases[position] for position in near_phases(phases, began_s)] == expected
    assert near_phases([0.0], began_s) == [0]
