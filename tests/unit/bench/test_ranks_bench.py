"""What the bench of ranks makes of windows: correlations by model and over all models, and the loads it asks by."""

import dataclasses

import numpy as np
import pytest

from bench import stage_ranks
from bench.ranks import DESIGNS, JUDGED, SHIPPED, among, bars, ranked, signals, told_apart
from bench.stage_ranks import own_scales, replicas
from lab.calibration.calibrating import Form
from lab.calibration.ranges import TARGETS, packaged_ranges
from lab.calibration.signals import RAW
from lab.calibration.stagesweeps import StageCapacity
from lab.calibration.sweeps import made_up
from lab.calibration.windows import Windows
from lab.suites.tre_setup import DURATION_S
from simulator.traces.model import TraceRequest
from simulator.traces.probes import MODELS, PROBES
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role


def windows(pressure: list[float]) -> Windows:
    """Windows of these pressures, and nothing else to tell them apart."""
    same = np.ones(len(pressure))
    return Windows(
        run=np.zeros(len(pressure), dtype=np.int64),
        end_s=5.0 * np.arange(1, len(pressure) + 1),
        prefill_tps=same,
        decode_tps=same,
        running=same,
        waiting=same,
        kv_usage_ratio=same,
        request_rps=same,
        pressure=np.array(pressure),
        attained=same,
        requests=same,
    )


def test_a_signal_can_rank_within_each_model_and_yet_not_across_them() -> None:
    pressures = {model: [0.5 + 0.1 * place for place in range(5)] for model in MODELS}
    judged = {model: windows(values) for model, values in pressures.items()}
    comparable = {model: 1.0 / np.array(values) for model, values in pressures.items()}
    spearman, kendall = ranked(comparable, judged)
    assert {name: pytest.approx(rank) for name, rank in spearman.items()} == dict.fromkeys([*MODELS, "all"], 1.0)
    assert kendall["all"] == pytest.approx(1.0)
    # The same order within each model, on scales that lie apart.
    apart = {model: comparable[model] + 10.0 * number for number, model in enumerate(MODELS)}
    within, _ = ranked(apart, judged)
    assert all(within[model] == pytest.approx(1.0) for model in MODELS)
    assert within["all"] is not None
    assert within["all"] < 0.5
    gaps = {model: np.where(np.arange(5) == 0, np.nan, values) for model, values in comparable.items()}
    assert ranked(gaps, judged)[0]["all"] == pytest.approx(1.0)
    constant, _ = ranked({model: np.ones(5) for model in MODELS}, judged)
    assert constant[MODELS[0]] is None


def test_shares_within_the_slo_tell_windows_apart_only_where_they_differ() -> None:
    pressure = [0.2, 0.4, 0.9, 1.1, 1.5, 3.0]
    one = windows(pressure)
    judged = {model: dataclasses.replace(one, attained=np.array([1.0, 1.0, 1.0, 0.9, 0.5, 0.1])) for model in MODELS}
    found = told_apart({model: 1.0 / np.array(pressure) for model in MODELS}, judged)
    assert found == {"healthy": pytest.approx(1.0), "lost": pytest.approx(1.0)}
    # One healthy window of three ranks below all lost ones, in each model.
    mixed = told_apart({model: np.array([9.0, 8.0, 0.0, 3.0, 2.0, 1.0]) for model in MODELS}, judged)
    assert mixed["healthy"] == pytest.approx(2 / 3)


def test_a_correlation_among_some_windows_leaves_the_others_out() -> None:
    pressure = [0.2, 0.4, 0.6, 0.8, 2.0, 4.0]
    judged = {model: windows(pressure) for model in MODELS}
    # Right among the healthy windows, wrong among the lost ones; one is not known.
    values = {model: np.array([9.0, np.nan, 8.0, 7.0, 1.0, 2.0]) for model in MODELS}
    healthy = among(values, judged, {model: judged[model].pressure <= 1.0 for model in MODELS})
    lost = among(values, judged, {model: judged[model].pressure > 1.0 for model in MODELS})
    assert healthy == {model: pytest.approx(1.0) for model in MODELS}
    assert lost == {model: pytest.approx(-1.0) for model in MODELS}
    assert among(values, judged, {model: np.zeros(6, dtype=bool) for model in MODELS}) == dict.fromkeys(MODELS)


def test_an_idle_window_ranks_above_every_number_and_as_a_number_keeps_the_last_share() -> None:
    one = dataclasses.replace(
        windows([0.5, 0.5, 0.5]),
        decode_tps=np.array([900.0, 30.0, 400.0]),
        running=np.array([10.0, 0.3, 10.0]),
        waiting=np.zeros(3),
    )
    share = TokenServiceShare(prefill_weight=0.0, theta_tps=20.0, smoothing=1.0, surplus_above=1.3)
    found = signals(dict.fromkeys(MODELS, one), {Form.ANSWERS: dict.fromkeys(MODELS, share)})
    assert set(found) == {f"Z ({SHIPPED})", f"Z ({SHIPPED}), as a number", *RAW}
    for model in MODELS:
        assert found[f"Z ({SHIPPED})"][model].tolist() == [4.5, np.inf, 2.0]
        assert found[f"Z ({SHIPPED}), as a number"][model].tolist() == [4.5, 4.5, 2.0]


def test_the_bars_ask_for_a_lead_over_the_best_raw_signal_in_either_direction() -> None:
    names = (*MODELS, "all")
    table = {f"Z ({SHIPPED})": dict.fromkeys(names, 0.92), **{raw: dict.fromkeys(names, 0.1) for raw in RAW}}
    assert [bar["ok"] for bar in bars(table)] == [True, True, True, True]
    against = {**table, "prefill TPS": {**dict.fromkeys(names, -0.5), MODELS[2]: -0.93}}
    assert [bar["ok"] for bar in bars(against)] == [True, True, False, True]
    short = {**table, f"Z ({SHIPPED})": {**dict.fromkeys(names, 0.84), "all": None}}
    assert [bar["ok"] for bar in bars(short)] == [False, False, True, False]


def test_the_judged_design_has_loads_of_each_model_and_the_other_the_suites() -> None:
    for trace in PROBES:
        for load in TARGETS:
            for model in MODELS:
                own = DESIGNS[JUDGED](model, trace, load)
                assert own == packaged_ranges()[model][trace][load].rate_scale
            assert len({DESIGNS["joint"](model, trace, load) for model in MODELS}) == 1
            assert len({DESIGNS[JUDGED](model, trace, load) for model in MODELS}) > 1


@pytest.mark.parametrize(
    ("use", "expected"),
    [(0.5, (4, 2)), (1.0, (2, 1)), (4.0, (1, 1)), (0.24, (9, 5))],
    ids=["half", "full", "floor", "up"],
)
def test_a_stage_has_the_replicas_that_its_mean_work_needs(use: float, expected: tuple[int, int]) -> None:
    """2,000 prompt tokens and 300 of answers a second, on replicas that carry 1,000 and 300."""
    kinds = made_up()
    capacities = {
        role: StageCapacity(
            role,
            {kind.name: tps / (kind.prompt_mean if role is Role.PREFILL else kind.output_mean) for kind in kinds},
        )
        for role, tps in ((Role.PREFILL, 1000.0), (Role.DECODE, 300.0))
    }
    requests = [
        TraceRequest(DURATION_S * place / 60, "m", round(2000 * DURATION_S / 60), round(5 * DURATION_S))
        for place in range(60)
    ]
    found = replicas(requests, capacities, use)
    assert (found[Role.PREFILL], found[Role.DECODE]) == expected


def test_a_stage_is_judged_at_the_loads_that_take_it_from_health_to_trouble() -> None:
    def falling(scale: float) -> float:
        return 1.0 / (1.0 + (scale / 4.0) ** 2)

    light, heavy = own_scales(falling)
    assert falling(light) == pytest.approx(TARGETS["light"], abs=0.03)
    assert falling(heavy) == pytest.approx(TARGETS["heavy"], abs=0.03)
    assert light < heavy


def test_a_trace_that_a_stage_cannot_serve_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any load half of `decode`'s requests are lost; the rest are kept as far as the load is low."""

    def alone(role: Role, model: str, trace: str, seed: int, scale: float, capacities: object) -> Windows:
        share = 0.5 if trace == "decode" else 1.0 / (1.0 + (scale / 4.0) ** 2)
        return dataclasses.replace(windows([0.5, 2.0, np.nan]), attained=np.array([share, share, np.nan]))

    monkeypatch.setattr(stage_ranks, "alone", alone)
    found, left_out = stage_ranks.over_own_ranges({}, ["decode", "real-conv"], 2)
    # Two loads and two seeds of the trace that remains, and the window without arrivals in none.
    assert {len(one) for of_role in found.values() for one in of_role.values()} == {8}
    assert [line.split(":")[0] for line in left_out] == [
        f"{role} of {model} on decode" for role in ("prefill", "decode") for model in MODELS
    ]
