"""The replica model behind the fidelity bench: experts, closed loops, scaling by specification, recorded gauges."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.fidelity import bars, summary
from lab.fitting.closed_loop import Load, run_closed_loop
from lab.fitting.curves import fit_non_negative
from lab.fitting.operators import Correction, OperatorTimes, operator_times, sustained_share
from lab.fitting.overload import first_gauge_s, kv_blocks, read_gauges, series_error
from lab.fitting.silicon import B200, H100, read_silicon
from lab.fitting.tables import BenchRequest
from lab.fitting.targets import Estimate
from simulator.core.limits import EngineLimits
from simulator.core.timing import BatchWork, IterationModel
from simulator.profiles import packaged_profiles
from trimtab.cli.main import app

DENSE = IterationModel(0.001, 0.01, 0.002, 5e-5, 1e-6, 1e-7, 1e-9)
EXPERTS = IterationModel(0.001, 0.002, 0.002, 1e-5, 0.0, 0.0, 0.0, experts_s=0.008, expert_share=0.5, prefill_s=0.003)
LIMITS = EngineLimits(8192, 64, 16, 10_000, 8192, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (BatchWork(0, 1, 0, 0.0), 0.001 + 0.002 + 1e-5 + 0.008 * 0.5),
        (BatchWork(0, 2, 0, 0.0), 0.001 + 0.002 + 2e-5 + 0.008 * 0.75),
        (BatchWork(1000, 0, 0, 0.0), 0.001 + 0.003 + 0.002 + 0.01 + 0.008),
    ],
)
def test_experts_are_streamed_as_tokens_choose_them_and_prefill_costs_its_launches(
    work: BatchWork, seconds: float
) -> None:
    assert EXPERTS.iteration_s(work) == pytest.approx(seconds)


def test_a_faster_engine_chooses_the_same_experts() -> None:
    work = BatchWork(64, 3, 100, 10.0)
    assert EXPERTS.faster(4).iteration_s(work) == pytest.approx(EXPERTS.iteration_s(work) / 4)


def test_a_share_of_experts_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match="expert_share must be at most 1"):
        IterationModel(0.001, 0.002, 0.0, 0.0, 0.0, 0.0, 0.0, experts_s=0.1, expert_share=1.5)


def test_one_client_waits_for_its_prefill_and_then_gets_a_token_an_iteration() -> None:
    found = run_closed_loop(LIMITS, DENSE, Load(1, 1000, 11, rounds=3), request_s=0.5)
    prefill_s = 0.001 + 0.002 + 5e-5 * 1000 + 1e-9 * 1000**2 / 2
    decode_s = 0.001 + 0.01 + 1e-6 + 1e-7 * 1004.5
    assert found.ttft_s == pytest.approx(0.5 + prefill_s)
    assert found.tpot_s == pytest.approx(decode_s, rel=1e-3)


def test_clients_warm_up_and_then_all_begin_again_at_once() -> None:
    alone = Load(1, 1000, 11, rounds=3)
    warmed, plain = (run_closed_loop(LIMITS, DENSE, dataclasses.replace(alone, warm_up_rounds=n)) for n in (2, 0))
    assert dataclasses.astuple(warmed) == pytest.approx(dataclasses.astuple(plain))
    # Lengths vary, so that clients are spread at the end of the first round, and together again after a warm-up.
    crowd = Load(6, 1000, 101, rounds=1, least_share=0.5)
    together = 0.001 + 0.002 + 5e-5 * 4500
    assert run_closed_loop(LIMITS, DENSE, dataclasses.replace(crowd, warm_up_rounds=3)).ttft_s > together / 2
    assert run_closed_loop(LIMITS, DENSE, dataclasses.replace(crowd, rounds=4)).ttft_s < together / 2


def test_what_arrives_while_the_next_iteration_is_put_together_waits_for_one_more() -> None:
    """Two clients: the second's next prompt comes while the first one decodes."""
    load = Load(2, 100, 40, rounds=4, least_share=0.5)
    plain, ahead = (run_closed_loop(LIMITS, DENSE, load, 0.003, scheduled_ahead=flag) for flag in (False, True))
    iteration_s = 0.001 + 0.01
    assert 0.4 * iteration_s < ahead.ttft_s - plain.ttft_s < 1.1 * iteration_s
    one = Load(1, 100, 40, rounds=4)
    assert run_closed_loop(LIMITS, DENSE, one, 0.003, scheduled_ahead=True) == run_closed_loop(
        LIMITS, DENSE, one, 0.003
    )


def test_beside_a_prefill_chunk_a_kv_token_costs_more() -> None:
    mixed = dataclasses.replace(DENSE, mixed_kv_token_s=2e-7)
    alone, beside = BatchWork(0, 2, 1000, 0.0), BatchWork(100, 2, 1000, 0.0)
    assert mixed.iteration_s(alone) == DENSE.iteration_s(alone)
    assert mixed.iteration_s(beside) - DENSE.iteration_s(beside) == pytest.approx(2e-4)


@given(clients=st.integers(1, 24), prompt=st.integers(1, 600), output=st.integers(2, 40))
def test_no_token_comes_faster_than_an_empty_engine_gives_it(clients: int, prompt: int, output: int) -> None:
    found = run_closed_loop(LIMITS, DENSE, Load(clients, prompt, output, rounds=2, least_share=0.8))
    assert found.tpot_s >= 0.011
    assert found.ttft_s >= 0.001
    assert run_closed_loop(LIMITS, DENSE, Load(clients, prompt, output, rounds=2, least_share=0.8)) == found


def test_coefficients_that_would_be_negative_become_zero() -> None:
    columns = np.stack([np.ones(5), np.arange(1.0, 6.0)], axis=1)
    assert fit_non_negative(columns, 3 * np.arange(1.0, 6.0) - 0.5)[0] == 0.0
    assert fit_non_negative(columns, 2 + 3 * np.arange(1.0, 6.0)) == pytest.approx((2.0, 3.0))


def test_an_estimate_scales_memory_and_computing_apart() -> None:
    times = OperatorTimes(10, 0.0, False, 0.01, 0.0, 0.0, 0.002, 1e-5, 2e-6, 0.001, 1e-6, 1e-7, 1e-9, ())
    scaled = Estimate("twice the memory, a third of the FLOPS", 0.5, 3.0).scale(times)
    assert (scaled.weights_s, scaled.kv_token_s) == pytest.approx((0.005, 5e-8))
    assert (scaled.token_s, scaled.expert_token_s, scaled.attention_pair_s) == pytest.approx((3e-5, 6e-6, 3e-9))
    assert scaled.constant_s == times.constant_s
    assert times.model(Correction(host_s=0.002, layer_s=1e-4)).host_s == pytest.approx(0.002 + 0.001 + 10 * 1e-4)


def test_a_server_that_schedules_ahead_hides_the_host_and_one_without_graphs_launches_longer() -> None:
    times = OperatorTimes(10, 0.0003, True, 0.01, 0.0, 0.0, 0.002, 1e-5, 2e-6, 0.001, 1e-6, 1e-7, 1e-9, ())
    correction = Correction(host_s=0.002, seq_s=1e-5, prefill_layer_s=1e-4)
    hidden, shown = times.model(correction), dataclasses.replace(times, scheduled_ahead=False).model(correction)
    assert (hidden.host_s, hidden.seq_s) == pytest.approx((0.001, 3e-6))
    assert (shown.host_s, shown.seq_s) == pytest.approx((0.003, 1.3e-5))
    assert hidden.prefill_s == pytest.approx(10 * 4e-4)


def test_the_part_of_the_flops_that_lasts_grows_with_the_power_for_them(material: Path) -> None:
    perf = material / "data" / "perf"
    assert sustained_share(perf, H100, 0.8) == 0.8
    assert sustained_share(perf, B200, 0.8) == pytest.approx(0.8 * (1000 / 2250) / (700 / 989))
    assert sustained_share(perf, "a100_sxm", 0.6) == 1.0


def test_marlin_is_slower_than_the_kernel_of_the_table_and_told_by_the_gpu_that_runs_it(material: Path) -> None:
    perf = material / "data" / "perf"
    row = next(row for row in read_silicon(perf, H100) if row.deployment.moe_kernel == "marlin")
    table = operator_times(perf, dataclasses.replace(row.deployment, moe_kernel=""))
    assert 1.2 < operator_times(perf, row.deployment).expert_token_s / table.expert_token_s < 2.6


def test_every_estimated_profile_says_that_it_is_one() -> None:
    profiles = packaged_profiles().values()
    estimated = {p.gpu_type for p in profiles if p.timing.source.text.startswith("ESTIMATE")}
    assert estimated == {"L20", "H20"}
    kinds = {p.gpu_type for p in profiles}
    assert {"A100", "H100", "H200", "B200", "GB200", "L40S", "L20", "H20"} <= kinds


def recorded(arrivals_s: list[float], prompt: int, output: int, tpot_s: float) -> list[BenchRequest]:
    return [BenchRequest(at, prompt, output, 0.1, tpot_s, at + 0.1 + tpot_s * (output - 1)) for at in arrivals_s]


def test_the_clock_of_recorded_gauges_is_found_from_arrivals_and_ends() -> None:
    requests = recorded([0.0, 0.5, 1.1, 2.3, 3.3], 16, 21, 0.1)
    at_s = 0.3 + np.arange(6)
    inside = [sum(r.arrival_s <= t < r.ended_s for r in requests) for t in at_s]
    assert 0.2 < first_gauge_s(requests, np.array(inside, float)) < 0.5


@pytest.mark.parametrize("blocks", [97, 2587, 4801])
def test_the_kv_blocks_of_a_server_are_read_off_the_usages_it_showed(blocks: int) -> None:
    used = np.random.default_rng(blocks).integers(0, blocks + 1, 180)
    assert kv_blocks(np.round(used / blocks, 4)) == blocks


def test_usages_that_no_number_of_blocks_shows_are_refused() -> None:
    with pytest.raises(ValueError, match="no number of KV blocks below 5000 shows these 500 usages"):
        kv_blocks(np.round(np.random.default_rng(1).uniform(0.1, 0.9, 500), 4))
    with pytest.raises(ValueError, match="these 0 usages"):
        kv_blocks(np.array([0.0, 1.0]))


def test_a_queue_that_is_over_too_early_counts_as_empty() -> None:
    assert series_error(np.array([2.0, 2.0]), np.array([2.0, 2.0, 4.0])) == pytest.approx(0.5)
    assert series_error(np.array([1.0, 3.0]), np.array([1.0, 3.0])) == 0.0


def test_a_bar_fails_when_one_direction_misses_its_median_or_p90() -> None:
    good, bad = summary(np.log([1.1, 0.9])), summary(np.log([1.1, 2.0, 1.1]))
    overload = dict.fromkeys(("throughput", "ttft_p50", "ttft_p95", "e2e_p50", "e2e_p95", "running", "waiting"), 0.04)
    found = {
        b["name"]: b["ok"]
        for b in bars(
            {"a": {"ttft": good, "tpot": good}, "b": {"ttft": bad, "tpot": good}}, {**overload, "e2e_p95": -0.2}
        )
    }
    assert found == {
        "ttft_median_error": False,
        "tpot_median_error": True,
        "overload_throughput_error": True,
        "overload_latency_error": False,
        "overload_queue_error": True,
    }


def test_rows_whose_concurrency_was_written_down_wrongly_are_known_and_graded(material: Path) -> None:
    table = read_silicon(material / "data" / "perf", H100)
    wrong = [row for row in table if row.misrecorded]
    assert len(wrong) == 9
    assert {row.date for row in wrong} == {"2025-12-05", "2025-12-08"}
    assert not [row for row in read_silicon(material / "data" / "perf", B200) if row.misrecorded]


def test_servers_as_documented_differ_in_two_facts_on_the_h100_only(material: Path) -> None:
    perf = material / "data" / "perf"
    assert read_silicon(perf, B200) == read_silicon(perf, B200, as_documented=True)
    pairs = list(zip(read_silicon(perf, H100), read_silicon(perf, H100, as_documented=True), strict=True))
    changed = [(read, documented) for read, documented in pairs if read != documented]
    kv = [d for r, d in changed if r.deployment != d.deployment]
    budget = [(r, d) for r, d in changed if r.batched_tokens != d.batched_tokens]
    assert (len(kv), len(budget), len(changed)) == (45, 90, 135)
    assert {d.deployment.architecture.name for d in kv} == {"Llama-3.1-70B"}
    assert {d.batched_tokens - r.batched_tokens for r, d in budget} == {1500}


def test_the_recorded_server_had_2587_blocks(material: Path) -> None:
    gauges = read_gauges(material / "data" / "perf", "RTX4090_Llama-3.1-8B")
    assert kv_blocks(gauges.kv_usage) == 2587


def test_simulate_profile_prints_estimates_as_such_and_refuses_unknown_names() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["simulate", "profile", "l20-8b-tp1", "--json"])
    assert shown.exit_code == 0
    assert '"estimate": true' in shown.output
    table = runner.invoke(app, ["simulate", "profile"])
    assert "h100-8b-tp1" in table.output
    unknown = runner.invoke(app, ["simulate", "profile", "nope"])
    assert unknown.exit_code == 1
    assert "'nope' is not known" in str(unknown.exception)
