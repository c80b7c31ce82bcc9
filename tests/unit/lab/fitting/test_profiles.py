"""The packaged profiles, and the fits that made them."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lab.fit_profiles import command
from lab.fitting.architectures import LLAMA_3_8B, LLAMA_3_70B
from lab.fitting.curves import fit_line, fit_roofline, fit_slope, relative_error, thin
from lab.fitting.lifecycle import lifecycle_times
from lab.fitting.overload import HostShare, fit_host_share, grade, replay
from lab.fitting.tables import BenchRequest, GemmTable, Points, TableError, read_gemm
from lab.fitting.targets import TARGETS
from simulator.core.limits import EngineLimits
from simulator.core.timing import BatchWork, IterationModel
from simulator.profiles import ProfileError, find_profile, load_profiles, packaged_profiles, parse_profile

A100 = ("a100-7b-tp1", "a100-8b-tp1", "a100-14b-tp2")


def test_every_target_of_the_fit_is_packaged_with_source_date_and_error() -> None:
    profiles = packaged_profiles()
    assert sorted(profiles) == sorted(t.name for t in TARGETS)
    for profile in profiles.values():
        assert profile.timing.source.fit_error, profile.name
        # The L40S's large cache flatters its table of decode attention; its fits and estimates from it say so.
        most = 0.5 if profile.gpu_type in ("L40S", "L20") else 0.25
        assert all(abs(error) < most for error in profile.timing.source.fit_error.values()), profile.name
        assert profile.lifecycle.source.text
        assert profile.memory.source.text


@pytest.mark.parametrize("name", A100)
def test_a100_profiles_carry_the_measured_life_cycle_and_share_a_gpu_with_two_sleepers(name: str) -> None:
    profile = packaged_profiles()[name]
    lifecycle, memory = profile.lifecycle, profile.memory
    assert (lifecycle.sleep_s, lifecycle.first_sleep_s, lifecycle.wake_s) == (1.87, 12.19, 1.31)
    assert 1.0 <= memory.sleeper_gib <= 1.8
    assert memory.awake_gib + 2 * 1.8 <= 40
    assert 2 * memory.awake_gib > 40


@pytest.mark.parametrize(
    ("name", "least_ms", "most_ms"),
    [("a100-8b-tp1", 12, 18), ("a100-14b-tp2", 13, 20), ("h100-8b-tp1", 7, 12), ("h100-70b-tp4", 15, 25)],
)
def test_a_small_batch_decodes_at_the_pace_of_its_weights(name: str, least_ms: float, most_ms: float) -> None:
    seconds = packaged_profiles()[name].iteration_model().iteration_s(BatchWork(0, 8, 8 * 1000, 0.0))
    assert least_ms < 1e3 * seconds < most_ms


def test_the_engine_model_came_within_10_percent_of_a_recorded_run_it_was_not_fitted_to() -> None:
    errors = packaged_profiles()["rtx4090-8b-tp1"].timing.source.fit_error
    graded = {name: value for name, value in errors.items() if name.startswith("recorded run")}
    assert len(graded) == 8
    assert all(abs(value) < 0.1 for value in graded.values())
    assert abs(graded["recorded run, throughput"]) < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("wake_s: 1.31", "wake_s: -1"), r"p\.yaml: lifecycle\.wake_s: Input should be greater"),
        (("wake_s: 1.31", "wake_s: .nan"), r"p\.yaml: lifecycle\.wake_s: Input should be"),
        (("tensor_parallel: 1", "tensor_parallel: 1\ncolor: red"), r"p\.yaml: color: Extra inputs"),
        (("max_model_len: 32768", "max_model_len: 999999"), r"p\.yaml: max_model_len 999999 does not fit"),
        (("name: a100", "name: ["), r"p\.yaml: not YAML"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_with_its_key(change: tuple[str, str], message: str) -> None:
    text = (Path(parse_profile.__code__.co_filename).parent / "a100-8b-tp1.yaml").read_text()
    assert change[0] in text
    with pytest.raises(ProfileError, match=message):
        parse_profile(text.replace(*change), "p.yaml")


def test_profiles_of_a_folder_stand_beside_the_packaged_ones(tmp_path: Path) -> None:
    text = (Path(parse_profile.__code__.co_filename).parent / "a100-8b-tp1.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("name: a100-8b-tp1", "name: mine"))
    profiles = load_profiles(tmp_path)
    assert find_profile(profiles, "mine").model == "dsllama-8b"
    with pytest.raises(ProfileError, match="'none' is not known; there are a100-14b-tp2"):
        find_profile(profiles, "none")


def test_a_roofline_is_found_again_with_its_knee() -> None:
    tokens = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], float)
    fit = fit_roofline(Points(tokens, np.maximum(0.010 + 1e-6 * tokens, 0.002 + 5e-5 * tokens)))
    assert (fit.floor_s, fit.floor_slope_s) == pytest.approx((0.010, 1e-6))
    assert (fit.offset_s, fit.slope_s) == pytest.approx((0.002, 5e-5))
    assert fit.error < 1e-9


def test_lines_and_slopes_are_never_negative() -> None:
    work = np.array([1.0, 2.0, 3.0])
    assert fit_line(Points(work, np.array([2.0, 3.0, 4.0]))) == pytest.approx((1.0, 1.0))
    assert fit_line(Points(work, np.array([1.0, 3.0, 5.5]))) == pytest.approx(
        (0.0, fit_slope(Points(work, np.array([1.0, 3.0, 5.5]))))
    )
    offset, slope = fit_line(Points(work, np.array([3.0, 2.0, 1.0])))
    assert (offset > 0, slope) == (True, 0.0)
    assert relative_error(np.array([1.1, 1.8]), Points(work[:2], np.array([1.0, 2.0]))) == pytest.approx(0.1)


def test_thinning_keeps_both_ends_and_no_crowd() -> None:
    work = np.arange(1.0, 1025.0)
    kept = thin(Points(work, work), per_octave=1).work
    assert list(kept) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def gemm_table() -> GemmTable:
    grid = np.array([256.0, 1024.0, 4096.0])
    m = np.array([1.0, 64.0])
    return GemmTable(m, grid, grid, np.log(m[:, None, None] * grid[None, :, None] * grid[None, None, :] * 1e-9))


@pytest.mark.parametrize(("n", "k"), [(256, 256), (512, 1024), (3000, 700), (20_000, 4096)])
def test_products_between_and_beyond_the_measured_sizes(n: int, k: int) -> None:
    assert gemm_table().seconds(n, k) == pytest.approx(np.array([1.0, 64.0]) * n * k * 1e-9)


def test_layer_shapes_of_known_models() -> None:
    assert LLAMA_3_8B.layer_gemms(1) == ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    assert LLAMA_3_8B.kv_bytes_per_token == 131072
    assert LLAMA_3_70B.layer_gemms(4)[0] == (2560, 8192)


def recorded_with(share: HostShare, limits: EngineLimits, timing: IterationModel) -> list[BenchRequest]:
    """A run of the model itself with this host share, as if it had been recorded."""
    source = random.Random(3)
    requests, at_s = [], 0.0
    for _ in range(60):
        at_s += source.expovariate(8)
        requests.append(BenchRequest(at_s, source.randint(20, 400), source.randint(5, 120), 1.0, 1.0, 1.0))
    served = replay(requests, limits, share.on(timing)).finished
    return [
        dataclasses.replace(
            request,
            time_to_first_token_s=(done.first_token_s or 0.0) - done.arrival_s,
            time_per_output_token_s=((done.last_token_s or 0.0) - (done.first_token_s or 0.0))
            / (done.generated_tokens - 1),
            ended_s=done.finished_s,
        )
        for request, done in zip(requests, served, strict=True)
    ]


@pytest.mark.parametrize("share", [HostShare(0.004, 0.003), HostShare(0.001, 0.0)])
def test_the_hosts_share_is_found_again_in_a_run_that_the_model_made(share: HostShare) -> None:
    limits = EngineLimits(512, 16, 16, 500, 4096)
    timing = IterationModel(0.0, 0.01, 0.001, 5e-5, 1e-6, 1e-7, 1e-9)
    recorded = recorded_with(share, limits, timing)
    found = fit_host_share(recorded, limits, timing)
    assert (found.host_s, found.prefill_s) == pytest.approx((share.host_s, share.prefill_s), abs=4e-4)
    errors = grade(recorded, replay(recorded, limits, found.on(timing)).finished)
    assert all(abs(value) < 0.1 for value in dataclasses.asdict(errors).values())
    slower = grade(recorded, replay(recorded, limits, HostShare(0.02).on(timing)).finished)
    assert slower.tpot_p50 > 0.5


LIFECYCLE = """model,gpu,tp,vllm_version,sleep_level,variant,event,n,mean_s,min_s,max_s,source
Qwen3-0.6B,A100,1,0.11.0,none,,load,3,38,37,39,x
Qwen3-Coder-30B-A3B-Instruct,A100,1,0.11.0,none,,load,3,47,47,47,x
Qwen3-235B-A22B-Instruct-2507-FP8,A100,4,0.11.0,none,,load,3,98,97,98,x
Qwen3-Coder-30B-A3B-Instruct,A100,1,0.11.0,1,,sleep,2,2.8,2.8,2.8,x
Qwen3-Coder-30B-A3B-Instruct,A100,1,0.11.0,1,,wake_up,3,2.9,2.9,2.9,x
Qwen3-8B + LoRA,A100,1,,2,first sleep incl. host backup,sleep,1,0.31,0.31,0.31,x
Qwen3-8B + LoRA,A100,1,,2,,wake_up,1,6.53,6.53,6.53,x
"""


def test_life_cycle_times_grow_with_the_weights_from_the_papers_models(tmp_path: Path) -> None:
    table = tmp_path / "lifecycle.csv"
    table.write_text(LIFECYCLE)
    small = lifecycle_times(table, 14.2, 14.2)
    assert (small.sleep_s, small.first_sleep_s, small.wake_s) == (1.87, 12.19, 1.31)
    assert 37 < small.start_up_s < 42
    large = lifecycle_times(table, 56.9, 131.0)
    assert (large.sleep_s, large.wake_s) == (2.8, 2.9)
    assert large.start_up_s > 60
    table.write_text(LIFECYCLE.replace(",sleep,2,", ",nap,2,"))
    with pytest.raises(TableError, match="no sleep of Qwen3-Coder-30B"):
        lifecycle_times(table, 14.2, 14.2)


def test_missing_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"gemm\.csv\.gz: no such table"):
        read_gemm(tmp_path, "a100_sxm")
    result = CliRunner().invoke(command, [str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("fit_profiles: ")
    assert result.output.count("\n") == 1
