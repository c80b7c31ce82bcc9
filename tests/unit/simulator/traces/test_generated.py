"""Generated workloads: repeatable bit for bit, monotone, and as much as their rates say."""

import hashlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.traces import TraceError, TraceRequest
from simulator.traces.catalogue import WORKLOADS, opened, workload
from simulator.traces.describe import describe
from simulator.traces.diurnal import HOURS, WEEKEND, day_curve
from simulator.traces.generators import Curve, Lengths
from simulator.traces.lengths import Fixed
from simulator.traces.mixing import compress_time, mix, moving_popularity, scale_lengths, zipf_weights
from simulator.traces.probes import (
    BURSTS,
    CALM_GPUS,
    FOOTPRINT_GPUS,
    HOT_EXTRA_GPUS,
    MODELS,
    PROBES,
    REAL_GPUS,
    SPIKE_FRONT,
    SPIKE_GPUS,
    STEADY_GPUS,
    probe,
    probe_of_recorded,
    request_s,
)
from simulator.traces.seeding import generator
from simulator.traces.streams import GammaGaps, Stream, requests_of

DIGEST = """
import hashlib, sys
from simulator.traces.catalogue import WORKLOADS, workload
for name in sorted(WORKLOADS):
    digest = hashlib.sha256()
    for request in workload(name, seed=11, duration_s=80.0):
        digest.update(repr(request).encode())
    print(name, digest.hexdigest())
"""


def stream(curve, gaps=None, service="chat", name="requests"):
    return Stream(
        service=service, name=name, request_rps=curve, prompt=Fixed(100), output=Fixed(10), gaps=gaps or GammaGaps(1.0)
    )


def gpus_of(requests, duration_s):
    """GPUs' worth of work a model, by the probes' own reckoning."""
    work = dict.fromkeys(MODELS, 0.0)
    for r in requests:
        seconds = request_s(r.service, r.prompt_tokens, r.output_tokens)
        work[r.service] += FOOTPRINT_GPUS[r.service] * seconds / duration_s
    return work


def test_every_workload_is_the_same_under_any_hash_seed_and_differs_by_seed():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", DIGEST], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
    lines = outputs.pop().splitlines()
    assert [line.split()[0] for line in lines] == sorted(WORKLOADS)
    for line in lines:
        name, digest = line.split()
        other = hashlib.sha256()
        for request in workload(name, seed=12, duration_s=80.0):
            other.update(repr(request).encode())
        assert other.hexdigest() != digest, name


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_is_in_order_and_ends_where_it_was_told(name):
    requests = list(workload(name, seed=3, duration_s=300.0))
    assert len(requests) > 50
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(requests))
    assert requests[0].arrival_s >= 0
    assert requests[-1].arrival_s < 300
    assert min(min(r.prompt_tokens, r.output_tokens) for r in requests) >= 1
    assert all(type(r.arrival_s) is float and type(r.prompt_tokens) is int for r in requests[:10])


def test_names_and_seeds_that_could_be_confused_draw_different_numbers():
    draws = [generator(1, "ab", "c"), generator(1, "a", "bc"), generator(1, "abc"), generator(2, "ab", "c")]
    assert len({source.integers(2**60) for source in draws}) == 4
    for bad in (-1, True, 2**63):
        with pytest.raises(ValueError, match="seed"):
            generator(bad, "x")


def test_one_stream_does_not_disturb_another():
    curve = Curve(((0.0, 5.0),))
    alone = list(requests_of([stream(curve)], duration_s=100, seed=4))
    both = list(requests_of([stream(curve, service="x"), stream(curve)], duration_s=100, seed=4))
    assert [r for r in both if r.service == "chat"] == alone
    with pytest.raises(ValueError, match="two streams of chat"):
        requests_of([stream(curve), stream(curve)], duration_s=1, seed=1)


@settings(max_examples=30, deadline=None)
@given(
    points=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=6),
    cv=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_streams_of_any_rate_are_in_order_and_of_the_right_count(points, cv, seed):
    curve = Curve(tuple(sorted(points)))
    requests = list(requests_of([stream(curve, GammaGaps(cv))], duration_s=100, seed=seed))
    times = np.linspace(0, 100, 20_001)
    due = float(np.trapezoid([curve.at(float(t)) for t in times], times))
    assert all(0 <= a.arrival_s <= b.arrival_s < 100 for a, b in itertools.pairwise(requests))
    # A renewal count has about cv² times a Poisson count's variance, and a start-up of half of cv².
    assert len(requests) == pytest.approx(due, abs=6 * (max(cv, 0.1) * due**0.5) + 3 * cv * cv + 3)


def test_a_clock_sends_when_it_should():
    ramp = Curve(((0.0, 0.0), (10.0, 2.0), (10.0, 0.0), (20.0, 0.0), (20.0, 1.0)))
    requests = list(requests_of([stream(ramp, GammaGaps(0.0))], duration_s=25, seed=1))
    # Due by t on the ramp: t²/10; ten by 10 s, so the 10th opens with the second piece, then one a second.
    assert [r.arrival_s for r in requests[:3]] == pytest.approx([10**0.5, 20**0.5, 30**0.5])
    assert [r.arrival_s for r in requests[10:]] == pytest.approx([21.0, 22.0, 23.0, 24.0])


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_are_as_bursty_as_they_say(cv):
    requests = requests_of([stream(Curve(((0.0, 50.0),)), GammaGaps(cv))], duration_s=2000, seed=5)
    figures = describe(requests)
    assert figures.gap_cv == pytest.approx(cv, rel=0.06)
    assert figures.mean_rps == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_scaled_probe_has_that_many_times_the_requests(factor):
    plain = sum(1 for _ in probe("alternating", seed=1, duration_s=300))
    scaled = sum(1 for _ in probe("alternating", seed=1, duration_s=300, rate_scale=factor))
    assert scaled == pytest.approx(factor * plain, rel=0.03)


def test_alternating_keeps_the_total_and_rotates_the_hot_model():
    requests = list(probe("alternating", seed=2, duration_s=540))
    for turn in range(6):
        part = [r for r in requests if turn * 90 + 6 <= r.arrival_s < turn * 90 + 90]
        gpus = gpus_of(part, 84)
        hot = MODELS[turn % 3]
        for model in MODELS:
            due = STEADY_GPUS[model] + (HOT_EXTRA_GPUS if model == hot else 0.0)
            assert gpus[model] == pytest.approx(due, rel=0.2), (turn, model)
        assert sum(gpus.values()) == pytest.approx(sum(STEADY_GPUS.values()) + HOT_EXTRA_GPUS, rel=0.08)


def test_spikes_come_together_and_each_time_another_is_the_largest():
    requests = list(probe("simul-spike", seed=2))
    for turn, start_s in enumerate((62, 182, 302)):
        spike = gpus_of([r for r in requests if start_s <= r.arrival_s < start_s + 28], 28)
        for index, model in enumerate(MODELS):
            due = SPIKE_GPUS[model] * (SPIKE_FRONT if index == turn else 1.0)
            assert spike[model] == pytest.approx(due, rel=0.2), (turn, model)
        assert sum(spike.values()) > 0.8 * 8
        calm = gpus_of([r for r in requests if start_s + 32 <= r.arrival_s < start_s + 116], 84)
        assert sum(calm.values()) == pytest.approx(sum(CALM_GPUS.values()), rel=0.15)


def test_recorded_probes_have_a_model_in_front_that_changes_and_differs_by_seed():
    leaders = {}
    for seed in (2, 3):
        requests = list(probe("real-conv", seed=seed))
        shares = [
            gpus_of([r for r in requests if turn * 120 + 10 <= r.arrival_s < turn * 120 + 120], 110)
            for turn in range(6)
        ]
        leaders[seed] = [max(share, key=share.get) for share in shares]
        assert all(before != after for before, after in itertools.pairwise(leaders[seed]))
        assert all(max(share.values()) > 1.25 * sorted(share.values())[1] for share in shares)
        # Popularity moves the work about, it does not make more or less of it.
        assert [sum(share.values()) for share in shares] == pytest.approx([REAL_GPUS] * 6, rel=0.12)
    assert leaders[2] != leaders[3]


def test_prefill_and_decode_probes_shift_the_mix_of_work():
    requests = list(probe("decode", seed=2))
    for model, (_, start, end) in BURSTS.items():
        burst = [r for r in requests if r.service == model and start * 720 < r.arrival_s < end * 720]
        calm = [r for r in requests if r.service == model and not start * 720 < r.arrival_s < end * 720]
        assert np.mean([r.output_tokens for r in burst]) > 1.8 * np.mean([r.output_tokens for r in calm])
        assert np.mean([r.prompt_tokens for r in burst]) < np.mean([r.prompt_tokens for r in calm])
    requests = list(probe("prefill", seed=2))
    for turn, model in enumerate(MODELS):
        part = [r for r in requests if turn * 240 + 10 < r.arrival_s < turn * 240 + 235]
        mean = {m: np.mean([r.prompt_tokens for r in part if r.service == m]) for m in MODELS}
        assert mean[model] > 1.8 * max(mean[m] for m in MODELS if m != model)


def test_sinusoidal_pressure_is_a_third_of_a_period_apart():
    requests = list(probe("sinusoidal", seed=2))
    # 240 s a period; the first model is highest at 60 s, the second at 140 s, the third at 220 s.
    for model, peak_s in zip(MODELS, (60, 140, 220), strict=True):
        mine = [r for r in requests if r.service == model]
        high = sum(peak_s - 20 <= r.arrival_s < peak_s + 20 for r in mine)
        low = sum((peak_s + 120) - 20 <= r.arrival_s < (peak_s + 120) + 20 for r in mine)
        assert high / low == pytest.approx(1.6 / 0.4, rel=0.2)


def test_unknown_names_are_answered_with_those_that_are():
    with pytest.raises(TraceError, match="workloads are alternating, client-mix"):
        opened("nonsense")
    with pytest.raises(TraceError, match="there are sinusoidal, decode"):
        probe("nonsense", seed=1)
    assert set(PROBES) < set(WORKLOADS)


def test_a_day_has_its_peak_in_the_afternoon_and_a_quieter_weekend():
    assert sum(HOURS) / 24 == pytest.approx(1.0, abs=0.005)
    curve = day_curve(7 * 86_400.0)
    assert curve.at(16 * 3600) == curve.maximum == max(HOURS)
    assert curve.at(5 * 86_400 + 16 * 3600) == pytest.approx(max(HOURS) * WEEKEND)
    assert curve.at(3 * 3600) == min(HOURS)


def test_compressed_time_multiplies_the_rate_and_keeps_the_burstiness():
    requests = list(requests_of([stream(Curve(((0.0, 5.0),)), GammaGaps(3.0))], duration_s=500, seed=1))
    before, after = describe(requests), describe(compress_time(requests, 4.0))
    assert after.mean_rps == pytest.approx(4 * before.mean_rps)
    assert after.gap_cv == pytest.approx(before.gap_cv)


@given(prompt=st.floats(0.01, 20), output=st.floats(0.01, 20))
def test_scaled_lengths_are_whole_and_never_zero(prompt, output):
    scaled = list(scale_lengths([TraceRequest(1.0, "a", 100, 7)], prompt=prompt, output=output))
    assert scaled == [TraceRequest(1.0, "a", max(1, round(100 * prompt)), max(1, round(7 * output)))]


def test_mixed_traces_are_in_order_under_their_names():
    one = [TraceRequest(float(t), "trace", 1, 1) for t in (0, 2, 4)]
    other = [TraceRequest(float(t), "trace", 2, 2) for t in (1, 2, 3)]
    assert [(r.arrival_s, r.service) for r in mix({"b": other, "a": one})] == [
        (0.0, "a"),
        (1.0, "b"),
        (2.0, "a"),
        (2.0, "b"),
        (3.0, "b"),
        (4.0, "a"),
    ]


def test_zipf_weights():
    assert zipf_weights(3, 1.0) == pytest.approx((6 / 11, 3 / 11, 2 / 11))
    assert zipf_weights(4, 0.0) == (0.25,) * 4


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 6), exponent=st.floats(0, 3), seed=st.integers(0, 99), at_s=st.floats(0, 400))
def test_moving_shares_always_add_up_to_one(count, exponent, seed, at_s):
    names = [f"m{i}" for i in range(count)]
    curves = moving_popularity(names, exponent=exponent, duration_s=400, hold_s=60, shift_s=15, seed=seed)
    assert sum(curves[name].at(at_s) for name in names) == pytest.approx(1.0)


def test_popularity_moves_to_another_model_each_time():
    names = ["a", "b", "c"]
    curves = moving_popularity(names, exponent=1.0, duration_s=600, hold_s=60, shift_s=10, seed=3)
    tops = [max(names, key=lambda name: curves[name].at(turn * 60 + 30.0)) for turn in range(10)]
    assert all(before != after for before, after in itertools.pairwise(tops))
    assert set(tops) == set(names)
    backwards = moving_popularity(names[::-1], exponent=1.0, duration_s=600, hold_s=60, shift_s=10, seed=3)
    assert backwards == curves


def test_recorded_trace_is_dealt_and_sized_to_the_pool():
    source = np.random.default_rng(1)
    lengths = Lengths(mean_tokens=500, cv=1.0, max_tokens=5000)
    times = np.cumsum(source.exponential(0.2, 8000)).tolist()
    recorded = [
        TraceRequest(t, "trace", n, 50) for t, n in zip(times, lengths.sample(source, 8000).tolist(), strict=True)
    ]
    made = probe_of_recorded(recorded, seed=5)
    assert made == probe_of_recorded(recorded, seed=5)
    assert {r.service for r in made} == set(MODELS)
    assert sum(gpus_of(made, 720).values()) == pytest.approx(REAL_GPUS, rel=0.03)
    with pytest.raises(TraceError, match="no requests"):
        probe_of_recorded([], seed=1)
