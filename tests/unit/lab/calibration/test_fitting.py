"""Rank correlations, isotonic fits, shares over columns against the policy engine's core, and what a fit finds."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.calibration.fitting import (
    PUBLISHED_PREFILL_WEIGHTS,
    PUBLISHED_SMOOTHINGS,
    PUBLISHED_WAITING_WEIGHTS,
    CalibrationError,
    fit_by_answers,
    fit_fixed,
    fit_published,
    isotonic,
    quality,
)
from lab.calibration.ranks import kendall, ranks, spearman
from lab.calibration.shares import z_of
from lab.calibration.signals import raw_qualities
from lab.calibration.windows import Windows, joined, pressures, request_outcomes
from lab.evaluation.statistics import Slo
from policy_engine.core.pool.load import OutputMemory, remember_output
from policy_engine.core.pool.tss import ShareState, share_of, waiting_weight_of
from trimtab.config.specs import Slo as SloSpec
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.measurement import ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Role

SLO = Slo(ttft_s=2.0, tpot_s=0.075)
VALUES = st.lists(st.integers(0, 6).map(float), min_size=2, max_size=25)


def windows(**columns: list[float]) -> Windows:
    """Windows of one run, 5 s apart; columns that are not given are plausible."""
    count = len(next(iter(columns.values())))
    usual = {
        "run": [0.0] * count,
        "end_s": [5.0 * (place + 1) for place in range(count)],
        "prefill_tps": [1000.0] * count,
        "decode_tps": [500.0] * count,
        "running": [10.0] * count,
        "waiting": [0.0] * count,
        "kv_usage_ratio": [0.5] * count,
        "request_rps": [2.5] * count,
        "pressure": [0.5] * count,
        "attained": [1.0] * count,
        "requests": [10.0] * count,
    }
    found = {name: np.array(columns.get(name, values)) for name, values in usual.items()}
    return Windows(**{**found, "run": found["run"].astype(np.int64)})


def by_hand(first: list[float], second: list[float]) -> float | None:
    """Kendall's τ-b, pair by pair."""
    score = tied_first = tied_second = pairs = 0
    for (a, x), (b, y) in itertools.combinations(zip(first, second, strict=True), 2):
        pairs += 1
        tied_first += a == b
        tied_second += x == y
        score += int(np.sign((a - b) * (x - y)))
    spread = math.sqrt((pairs - tied_first) * (pairs - tied_second))
    return score / spread if spread else None


@given(VALUES, st.randoms(use_true_random=False))
def test_kendall_counts_pairs_as_one_would_by_hand(first: list[float], source: random.Random) -> None:
    second = [float(source.randint(0, 4)) for _ in first]
    expected = by_hand(first, second)
    found = kendall(np.array(first), np.array(second))
    assert found is None if expected is None else found == pytest.approx(expected)


def test_ranks_of_equal_values_are_their_mean_and_spearman_knows_order_alone() -> None:
    assert ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [2.5, 1.0, 2.5, 4.0]
    rising = np.array([1.0, 2.0, 3.0, 4.0])
    assert spearman(rising, np.exp(rising)) == pytest.approx(1.0)
    assert spearman(rising, -rising) == pytest.approx(-1.0)
    # 1 − 6·Σd²/(n·(n² − 1)) with d = (0, 1, −1, 0)
    assert spearman(rising, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)
    assert spearman(rising, np.ones(4)) is None
    assert kendall(np.ones(4), rising) is None


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=40))
def test_an_isotonic_fit_never_falls_and_keeps_the_mean(points: list[tuple[float, float, int]]) -> None:
    x, y, weight = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    ordered, fitted = isotonic(x, y, weight)
    assert (np.diff(fitted) >= -1e-12).all()
    assert (np.diff(ordered) >= 0).all()
    kept = weight[np.argsort(x, kind="stable")]
    assert fitted @ kept == pytest.approx(y @ weight)


def test_an_isotonic_fit_pools_what_falls() -> None:
    _, fitted = isotonic(np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 1.0, 0.4, 1.0]), np.array([1.0, 1.0, 2.0, 1.0]))
    assert fitted.tolist() == pytest.approx([0.0, 0.6, 0.6, 1.0])


def test_fates_are_those_of_the_requests_that_arrived_in_the_window() -> None:
    arrival_s = np.array([9.0, 1.0, 5.0, 6.0])
    pressure = pressures(
        np.array([1.0, 1.0, 6.0, 0.2]), np.array([0.15, 0.03, math.nan, 0.06]), ttft_target_s=2.0, tpot_target_s=0.075
    )
    assert pressure.tolist() == pytest.approx([2.0, 0.5, 3.0, 0.8])
    found, attained, count = request_outcomes(arrival_s, pressure, np.array([5.0, 10.0, 15.0]), window_s=5.0)
    # (0, 5] holds the arrivals at 1 and 5 s; the 95th percentile of 0.5 and 3 is 0.5 + 0.95 · 2.5.
    assert found[:2].tolist() == pytest.approx([2.875, 0.8 + 0.95 * 1.2])
    assert math.isnan(found[2])
    assert attained[:2].tolist() == [0.5, 0.5]
    assert count.tolist() == [2, 2, 0]


PROFILES = st.builds(
    lambda **scalars: TokenServiceShare(**scalars),
    prefill_weight=st.sampled_from([0.0, 0.05]),
    waiting_weight=st.sampled_from([None, 1.0, 8.0]),
    smoothing=st.sampled_from([0.3, 1.0]),
    theta_tps=st.sampled_from([5.0, 20.0]),
)
ROWS = st.tuples(
    st.sampled_from([0.0, 300.0, 4000.0]),
    st.floats(0, 2000),
    st.sampled_from([0.0, 0.4, 3.0, 60.0]),
    st.sampled_from([0.0, 0.2, 25.0]),
    st.sampled_from([0.0, 1.5, 6.0]),
)


@settings(max_examples=80, deadline=None)
@given(PROFILES, st.lists(ROWS, min_size=1, max_size=12), st.integers(0, 12))
def test_shares_over_columns_are_those_of_the_policy_engine(
    profile: TokenServiceShare, rows: list[tuple[float, ...]], break_at: int
) -> None:
    columns = dict(
        zip(
            ("prefill_tps", "decode_tps", "running", "waiting", "request_rps"),
            map(list, zip(*rows, strict=True)),
            strict=True,
        )
    )
    run = [float(place >= break_at) for place in range(len(rows))]
    found = z_of(windows(**columns, run=run), profile, SLO)
    state, memory = ShareState(), OutputMemory()
    for place, (prefill, decode, running, waiting, requests) in enumerate(rows):
        if place == break_at:
            state, memory = ShareState(), OutputMemory()
        view = RoleSignals(
            role=Role.COLOCATED,
            window_end_s=5.0 * (place + 1),
            prefill_tps=ok(prefill),
            decode_tps=ok(decode),
            request_rps=ok(requests),
            running=ok(running),
            waiting=ok(waiting),
        )
        memory = remember_output(memory, view)
        weight = waiting_weight_of(
            profile.waiting_weight, SloSpec(ttft_s=2.0, tpot_s=0.075), Role.COLOCATED, memory.tokens
        )
        share, state = share_of(profile, view, FrontDoor(), routable=1, previous=state, waiting_weight=weight)
        assert found[place] == pytest.approx(share.z), place


def made_up(seed: int, *, theta_tps: float, count: int = 400) -> Windows:
    """Windows whose requests keep their SLO as far as the plain share reaches θ, with some noise; no prompt matters."""
    source = random.Random(seed)
    running = [source.uniform(2, 80) for _ in range(count)]
    waiting = [source.choice([0.0, 0.0, source.uniform(0, 20)]) for _ in range(count)]
    decode = [source.uniform(400, 1200) for _ in range(count)]
    share = [d / max(1.0, r + 8 * w) for d, r, w in zip(decode, running, waiting, strict=True)]
    pressure = [theta_tps / value * source.uniform(0.95, 1.05) for value in share]
    return windows(
        prefill_tps=[source.uniform(0, 8000) for _ in range(count)],
        decode_tps=decode,
        running=running,
        waiting=waiting,
        request_rps=[value / 213.3333 for value in decode],
        pressure=pressure,
        attained=[1.0 if value <= 1 else max(0.0, 1.6 - value) for value in pressure],
    )


@pytest.mark.parametrize("theta_tps", [12.0, 30.0])
def test_a_fit_finds_the_boundary_and_the_weights_that_made_the_windows(theta_tps: float) -> None:
    fit, other = made_up(1, theta_tps=theta_tps), made_up(2, theta_tps=theta_tps)
    fixed = fit_fixed(fit, SLO)
    assert (fixed.prefill_weight, fixed.waiting_weight, fixed.smoothing) == (0.0, 8.0, 1.0)
    assert fixed.theta_tps == pytest.approx(theta_tps, rel=0.08)
    # 213 tokens an answer at 75 ms, over 2 s, are 8 as well.
    answers = fit_by_answers(fit, SLO)
    assert answers.waiting_weight is None
    assert answers.theta_tps == pytest.approx(theta_tps, rel=0.08)
    for share in (fixed, answers):
        found = quality(other, share, SLO)
        assert found.spearman is not None
        assert found.spearman > 0.98
        assert found.spearman > max(raw.spearman or 0 for raw in raw_qualities(other).values())
        assert found.attained_above is not None
        assert found.attained_below is not None
        assert found.attained_above > 0.95 > found.attained_below
    assert fit_fixed(fit, SLO) == fixed


def test_a_fit_in_the_papers_form_stays_within_what_the_paper_says() -> None:
    """The windows were made without prompt tokens and without smoothing, which the paper's form does not offer."""
    assert all(0 < weight < 1 for weight in (*PUBLISHED_PREFILL_WEIGHTS, *PUBLISHED_SMOOTHINGS))
    assert all(weight > 1 for weight in PUBLISHED_WAITING_WEIGHTS)
    found = fit_published(made_up(1, theta_tps=20.0), SLO)
    assert found.prefill_weight == min(PUBLISHED_PREFILL_WEIGHTS)
    assert found.waiting_weight == 8.0
    assert found.smoothing == max(PUBLISHED_SMOOTHINGS)


@pytest.mark.parametrize(
    ("attained", "said"),
    [(1.0, "record heavier load"), (0.2, "record lighter load")],
)
def test_load_that_never_crosses_the_boundary_is_refused(attained: float, said: str) -> None:
    flat = made_up(1, theta_tps=20.0)
    everywhere = Windows(
        **{name: getattr(flat, name) for name in Windows.__dataclass_fields__ if name != "attained"},
        attained=np.full(len(flat), attained),
    )
    with pytest.raises(CalibrationError, match=said):
        fit_fixed(everywhere, SLO)


def test_too_few_windows_are_refused_and_runs_stay_apart_when_joined() -> None:
    few = made_up(1, theta_tps=20.0, count=10)
    with pytest.raises(CalibrationError, match="only 10 windows"):
        fit_fixed(few, SLO)
    both = joined([few, few])
    assert both.run.tolist() == [0] * 10 + [1] * 10
    first, rest = both.split_in_time(0.7)
    assert (first.run.tolist(), len(rest)) == ([0] * 7 + [1] * 7, 6)
