"""What the bench of ranks makes of windows: correlations by model and over all models."""

import dataclasses

import numpy as np
import pytest

from bench.ranks import ranked, told_apart
from bench.stage_ranks import replicas
from simulator.calibration.stagesweeps import StageCapacity
from simulator.calibration.sweeps import made_up
from simulator.calibration.windows import Windows
from simulator.suites.tre_setup import DURATION_S
from simulator.traces.model import TraceRequest
from simulator.traces.probes import MODELS
from trimtab.words import Role


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
