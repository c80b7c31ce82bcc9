"""The eight-signal study: its measures on made signals, its fleet on virtual time, and its command on a small one."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lab.studies import runs, signals
from lab.studies.findings import Verdict
from lab.studies.measures import cliff, correlation, measure, ranks
from lab.studies.observing import ServiceFleet, Signal, Unit
from lab.studies.plots import FILES
from lab.studies.steering import Cooling, Steering, calibrated, reversals
from simulator.profiles import packaged_profiles
from simulator.traces.model import TraceRequest

PROFILE = packaged_profiles()["h100-8b-tp1"]
LOAD = [float(number) for number in range(1, 101)]


def test_a_proportional_signal_has_elasticity_one_and_a_flat_one_none() -> None:
    proportional = measure(LOAD, [3.0 * load for load in LOAD])
    assert proportional.elasticity == pytest.approx(1.0)
    assert proportional.pearson == pytest.approx(1.0)
    assert proportional.line_r2 == pytest.approx(1.0)
    assert proportional.dynamic_range == pytest.approx(np.mean(LOAD[-10:]) / np.mean(LOAD[:10]))
    flat = measure(LOAD, [0.8] * 100)
    assert (flat.pearson, flat.spearman, flat.line_r2, flat.snr_db) == (None, None, None, None)
    assert flat.elasticity == pytest.approx(0.0)
    assert flat.dynamic_range == pytest.approx(1.0)


def test_a_curve_is_no_noise_and_noise_is() -> None:
    curve = measure(LOAD, [math.exp(load / 20) for load in LOAD])
    source = np.random.default_rng(1)
    noisy = measure(LOAD, [load + 200 * source.random() for load in LOAD])
    assert curve.snr_db is not None
    assert noisy.snr_db is not None
    assert curve.snr_db > 10 > noisy.snr_db
    assert curve.spearman == pytest.approx(1.0)
    assert curve.line_r2 is not None
    assert curve.line_r2 < 0.8


def test_windows_without_a_value_are_left_out_and_too_few_are_refused() -> None:
    values: list[float | None] = [None if number % 2 else load for number, load in enumerate(LOAD)]
    assert measure(LOAD, values).windows == 50
    with pytest.raises(ValueError, match="at least 5 windows with a value, not 4"):
        measure(LOAD[:8], values[:8])


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=30))
def test_ranks_keep_the_order_and_share_ties(values: list[int]) -> None:
    found = ranks(np.array(values, dtype=np.float64))
    for one, rank in zip(values, found, strict=True):
        below, same = sum(other < one for other in values), values.count(one)
        assert rank == below + (same - 1) / 2
    assert correlation(found, found) in (None, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("values", "flat_until", "position"),
    [
        ([1.0, 1.0, 1.1, 1.2, 1.3, 9.0], 5.0, 5.0),
        ([1.0, 1.2, 1.4, 1.6, 1.8, 1.9], 6.0, None),
        ([1.0, 3.0, 3.1, 3.2, 3.3, 3.4], 1.0, 2.0),
    ],
)
def test_a_cliff_is_where_a_latency_doubles_within_two_steps(
    values: list[float], flat_until: float, position: float | None
) -> None:
    found = cliff([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], values)
    assert (found.flat_until, found.position) == (flat_until, position)


def test_a_cliff_needs_ascending_loads() -> None:
    with pytest.raises(ValueError, match="ascending loads"):
        cliff([1.0, 3.0, 2.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("signal", "value", "units", "wanted"),
    [
        (Signal.DECODE_TPS, 4000.0, 4, 4),
        (Signal.DECODE_TPS, 4390.0, 4, 4),
        (Signal.DECODE_TPS, 5000.0, 4, 5),
        (Signal.DECODE_TPS, 2000.0, 4, 2),
        (Signal.DECODE_TPS, 1.0, 4, 1),
        (Signal.PREFILL_GPU, 0.9, 4, 6),
        (Signal.PREFILL_GPU, 0.65, 4, 4),
        (Signal.TTFT, 9.0, 10, 12),
        (Signal.TTFT, 3.0, 10, 11),
        (Signal.TTFT, 1.5, 10, 10),
        (Signal.TTFT, 0.5, 10, 9),
        (Signal.TTFT, 0.5, 1, 1),
        (Signal.TBT, None, 7, 7),
    ],
)
def test_rules_of_algorithms_2_and_3(signal: Signal, value: float | None, units: int, wanted: int) -> None:
    targets = {Signal.DECODE_TPS: 1000.0, Signal.PREFILL_GPU: 0.65}
    rule = Steering(signal, targets.get(signal, 2.0), severe=8.0, moderate=3.0, relaxed=1.0)
    assert rule.units(value, units) == wanted


def test_every_signal_is_calibrated_at_the_same_loads() -> None:
    assert calibrated(Signal.DECODE_TPS, lambda load: 6000 * load, units=6).target == pytest.approx(700.0)
    assert calibrated(Signal.PREFILL_GPU, lambda load: load, units=6).target == pytest.approx(0.7)
    ttft = calibrated(Signal.TTFT, lambda load: load, units=6)
    assert (ttft.severe, ttft.moderate, ttft.relaxed) == (0.91, 0.77, 0.6)


def test_coolings_and_reversals() -> None:
    cooling = Cooling(out_s=30.0, in_s=90.0)
    asked = [(1, 0), (1, 20), (0, 25), (-1, 60), (1, 60), (-2, 160)]
    allowed = [cooling.allows(change, at_s) for change, at_s in asked]
    assert allowed == [True, False, False, False, True, True]
    assert reversals([1, 2, -1, -1, 3]) == 2
    assert reversals([]) == 0


def requests(rate_rps: float, until_s: float) -> list[TraceRequest]:
    return [TraceRequest(number / rate_rps, "s", 1500, 40) for number in range(int(rate_rps * until_s))]


def test_units_start_after_their_time_and_removed_ones_drain() -> None:
    fleet = ServiceFleet(PROFILE, Unit(2, 1), units=1, most=3)
    first = next(runs.watched(fleet, requests(20.0, 10.0), [10.0]))
    assert (first.units, first.ordered, first.load_rps) == (1, 1, 20.0)
    fleet.resize(3, 10.0, start_up_s=5.0)
    assert fleet.window(14.0).units == 1
    assert fleet.window(16.0).units == 3
    fleet.resize(2, 16.0, start_up_s=5.0)
    fleet.resize(3, 16.5, start_up_s=5.0)
    fleet.resize(1, 17.0, start_up_s=5.0)
    last = fleet.window(40.0)
    assert last.units == 1
    assert len(fleet.records) == 200
    assert fleet.actions == [(10.0, 2), (16.0, -1), (16.5, 1), (17.0, -2)]
    assert fleet.unit_seconds == pytest.approx(10 + 3 * 6 + 24)


def test_windows_add_up_to_the_run() -> None:
    trace = requests(15.0, 12.0)
    fleet = ServiceFleet(PROFILE, Unit(1, 1), units=2)
    windows = list(runs.watched(fleet, trace, [2.0, 4.0, 8.0, 60.0]))
    lengths = [window.end_s - window.start_s for window in windows]
    assert sum(w.load_rps * length for w, length in zip(windows, lengths, strict=True)) == pytest.approx(len(trace))
    assert sum(len(window.ttft_s) for window in windows) == len(trace)
    assert sum(len(window.tbt_s) for window in windows) == len(trace)
    made = sum((w.values[Signal.DECODE_TPS] or 0.0) * length for w, length in zip(windows, lengths, strict=True))
    assert made == pytest.approx(sum(one.output_tokens - 1 for one in trace))
    computed = sum((w.values[Signal.PREFILL_TPS] or 0.0) * length for w, length in zip(windows, lengths, strict=True))
    assert computed == pytest.approx(sum(one.prompt_tokens for one in trace))
    assert windows[0].values[Signal.TTFT] == pytest.approx(np.mean(windows[0].ttft_s))


def test_cached_prompts_are_not_counted_as_computed() -> None:
    fleet = ServiceFleet(PROFILE, Unit(1, 1), units=1)
    for number in range(10):
        fleet.submit(TraceRequest(float(number), "s", 1600, 4), tuple(range(1, 101)))
    window = fleet.window(20.0)
    computed, cached = (window.values[Signal.PREFILL_TPS] or 0.0) * 20, window.cached_tps * 20
    assert computed + cached == pytest.approx(16_000)
    assert cached >= 9 * 1500


def test_the_command_reports_every_finding_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit, a day in ten minutes: fast, and too noisy for most verdicts about load."""
    short = functools.partial(runs.Setting, step_s=12.0, cache_window_s=6.0, capacity_requests=300, clients=10)
    monkeypatch.setattr(signals, "Setting", short)
    arguments = ["--out", str(tmp_path), "--json", "--units", "1", "--compress", "100"]
    done = CliRunner().invoke(signals.command, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert list(document["measures"]) == [str(signal) for signal in Signal]
    verdicts = [one["verdict"] for one in document["findings"]]
    assert len(verdicts) == 15
    assert set(verdicts) <= {str(verdict) for verdict in Verdict}
    by_place = {one["where"]: one for one in document["findings"]}
    assert by_place["4.2.2, figure 6d and 6f"]["verdict"] == Verdict.REPRODUCED
    assert document["measures"]["decode GPU utilisation"]["elasticity"] == pytest.approx(0.0, abs=0.1)
    assert document["measures"]["decode TPS"]["elasticity"] > 0.4
    report = (tmp_path / "report.md").read_text()
    for name in FILES:
        assert name in report
        assert (tmp_path / name).stat().st_size > 5000
    assert json.loads((tmp_path / "signals.json").read_text()) == document


def test_an_unknown_service_is_one_line() -> None:
    done = CliRunner().invoke(signals.command, ["--service", "C"])
    assert done.exit_code == 1
    assert done.output.strip() == "signals: there is no service 'C'; there are A, B"
