"""Live servers and virtual time agree on a short run; the bench itself takes longer ones, for tails."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench._demo import FLEET, Sample, compare, pool_trace, sample_of, together, virtual_run
from bench._pool_live import LiveRun
from bench.agreement import BAR, bars, compared, demo_bars, errors, live_servers, made_trace
from simulator.profiles import packaged_profiles
from simulator.traces.demo import FOOTPRINT_GPUS
from simulator.traces.shaping import clip_lengths

PROFILE = packaged_profiles()["l40s-32b-tp2"]


@pytest.mark.parametrize(("case", "longer"), [("colocated", 3), ("disaggregated", 1)])
def test_live_and_offline_agree_on_a_short_run(case: str, longer: int, tmp_path: Path, module_port_base: int) -> None:
    """Medians only, and four times the bar: what a busy machine adds to so few requests is no fault of the model.

    Answers last several seconds, so that a machine that stands still for a part of one adds little to them; so it is
    with prompts, but where two replicas do all of prefill: longer ones would queue there, and a queue turns a small
    delay into another order.
    """
    trace, _ = clip_lengths(made_trace(4.0, 6.0, seed=5), max_prompt_tokens=2000, max_output_tokens=100)
    trace = [dataclasses.replace(one, prompt_tokens=longer * one.prompt_tokens) for one in trace]
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


def sample(**services: list[float]) -> Sample:
    """Answers whose first token came after so many seconds; the rest follows from that."""
    return {
        name: {"ttft": np.array(ttft_s), "tpot": np.array(ttft_s) / 10, "e2e": np.array(ttft_s) + 1.0}
        for name, ttft_s in services.items()
    }


def test_requests_of_all_runs_are_one_sample_and_all_services_are_the_fleet() -> None:
    pooled = together([sample(chat=[1.0, 2.0], code=[5.0]), sample(chat=[3.0], code=[7.0, 9.0])])
    assert {name: own["ttft"].tolist() for name, own in pooled.items()} == {
        "chat": [1.0, 2.0, 3.0],
        "code": [5.0, 7.0, 9.0],
        FLEET: [1.0, 2.0, 3.0, 5.0, 7.0, 9.0],
    }


def test_the_error_is_of_pooled_quantiles_and_chance_is_what_single_virtual_runs_differ_by() -> None:
    """A live run that is one of two virtual ones is off from both together; that is what chance says, too."""
    low, high = sample(chat=[1.0] * 11), sample(chat=[2.0] * 10)
    found = compare([high], [[low, high]])["chat"]["p50"]["ttft"]
    assert (found["live_s"], found["virtual_s"]) == (2.0, 1.0)
    assert found["error"] == pytest.approx(-0.5)
    assert (found["least_s"], found["most_s"]) == (1.0, 2.0)
    assert found["sampling"] == pytest.approx(0.5)
    same = compare([low], [[low, low]])["chat"]["p95"]["e2e"]
    assert (same["error"], same["sampling"]) == (0.0, 0.0)


def test_bars_of_the_demo_are_over_all_requests_and_fail_by_the_worst_latency() -> None:
    live, model = sample(chat=[1.0] * 90, code=[2.0] * 10), sample(chat=[1.02] * 90, code=[3.0] * 10)
    half, tail = demo_bars({"services": compare([live], [[model]])})
    assert (half["name"], tail["name"]) == ("demo_policy_p50_error", "demo_policy_p95_error")
    assert half["value"] == {
        name: pytest.approx(error) for name, error in (("ttft", 0.02), ("tpot", 0.02), ("e2e", 0.01))
    }
    assert tail["value"]["ttft"] == pytest.approx(0.5)
    assert (half["ok"], tail["ok"]) == (True, False)


def test_virtual_runs_of_one_trace_differ_by_when_it_begins_and_by_chance_that_is_repeated() -> None:
    first, again, other = (virtual_run(seconds=20.0, seed=3, number=number) for number in (1, 1, 2))
    asked = {name: sum(one.service == name for one in pool_trace(20.0, 3)[1]) for name in FOOTPRINT_GPUS}
    assert {name: len(own["e2e"]) for name, own in first.sample.items()} == asked
    assert first.sample["chat"]["ttft"].tolist() == again.sample["chat"]["ttft"].tolist()
    assert first.sample["chat"]["ttft"].tolist() != other.sample["chat"]["ttft"].tolist()
    assert all(
        bool((own["ttft"] > 0.0).all()) and bool((own["e2e"] >= own["ttft"]).all()) for own in first.sample.values()
    )


def test_a_live_run_is_read_as_it_was_written_and_a_request_without_an_answer_is_no_latency(tmp_path: Path) -> None:
    rows = [
        {"service": "chat", "arrival_s": 0.0, "ttft_s": 0.5, "tpot_s": None, "e2e_s": 0.5},
        {"service": "chat", "arrival_s": 1.0, "ttft_s": 0.7, "tpot_s": None, "e2e_s": None},
    ]
    run = LiveRun(
        began_s=0.25,
        requests=rows,
        sent_late_max_s=0.01,
        transition_s=[3.25],
        decisions=[],
        operations=[],
        started_unix_s=1.0,
        load_average=(0.5, 0.75),
    )
    run.write(tmp_path / "run.json")
    read = LiveRun.read(tmp_path / "run.json")
    assert (read.requests, read.transition_s, tuple(read.load_average)) == (rows, [3.25], (0.5, 0.75))
    assert {name: own.tolist() for name, own in sample_of(read)["chat"].items()} == {
        "ttft": [0.5],
        "tpot": [],
        "e2e": [0.5],
    }
