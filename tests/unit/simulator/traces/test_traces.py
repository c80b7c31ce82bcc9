"""Traces: good and bad files, repeatable generators, shaping."""

import gzip
import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.traces import TraceError, TraceRequest
from simulator.traces.demo import (
    FOOTPRINT_GPUS,
    OUTPUT_TOKEN_S,
    POOL_GPUS,
    POOL_SERVICES,
    PROMPT_TOKEN_S,
    SHORT_MAX_OUTPUT_TPS,
    TURNS,
    demo_from_trace,
    demo_trace,
    stream_interval_for,
)
from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate, rotating
from simulator.traces.readers import TraceLimits, read_trace, write_trace
from simulator.traces.shaping import (
    busiest_start_s,
    clip_lengths,
    deal,
    mean_demand,
    peak_output_tps,
    scale_rate,
    static_split,
    take_slice,
    thin,
)

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
    "\r\n"
    "2023-11-16 18:16:00.0000000,12,1\r\n"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 40160, "output_length": 6, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3500, "input_length": 20, "output_length": 1, "hash_ids": []}\n'
)


LONG = "".join(f'{{"timestamp": {i}, "input_length": {i % 97 + 1}, "output_length": 1}}\n' for i in range(5000))


def written(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_azure_csv_with_seven_digits_and_windows_line_ends(tmp_path, pack):
    requests = list(read_trace(written(tmp_path, pack(AZURE.encode())), service="conv"))
    assert [(r.service, r.prompt_tokens, r.output_tokens) for r in requests] == [
        ("conv", 374, 44),
        ("conv", 396, 109),
        ("conv", 12, 1),
    ]
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 4.314579, 13.31941], abs=1e-6)


def test_azure_columns_in_another_order_with_offset_and_byte_order_mark(tmp_path):
    text = "\ufeffGeneratedTokens,TIMESTAMP,ContextTokens,Extra\n5,2024-05-10 00:00:00.009930+00:00,7,x\n"
    assert list(read_trace(written(tmp_path, text))) == [TraceRequest(0.0, "trace", 7, 5)]


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_mooncake_json_lines_in_milliseconds(tmp_path, pack):
    requests = list(read_trace(written(tmp_path, pack(MOONCAKE.encode())), service="m"))
    assert requests == [TraceRequest(0.0, "m", 40160, 6), TraceRequest(2.5, "m", 20, 1)]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_own_format_comes_back_as_it_was_written(tmp_path, name):
    requests = [TraceRequest(0.0, "a", 3, 4), TraceRequest(0.125, "b", 5, 6)]
    assert write_trace(tmp_path / name, requests) == 2
    assert list(read_trace(tmp_path / name)) == requests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ("a,b\n1,2\n", "line 1: neither a JSON object nor a header"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
        (AZURE + "2023-11-16 18:17:00,12\n", "line 6: 2 columns where the header has 3"),
        (AZURE + "yesterday,12,1\n", "line 6: TIMESTAMP 'yesterday'"),
        (AZURE + "2023-11-16 18:17:00,1.5,1\n", "line 6: ContextTokens must be a whole number"),
        (AZURE + "2023-11-16 18:17:00,12,0\n", "line 6: GeneratedTokens must be a whole number from 1"),
        (AZURE + "2023-11-16 18:15:59,12,3\n", r"line 6: arrives 1\.000 s before"),
        (MOONCAKE + "{\n", "line 3: not JSON"),
        (MOONCAKE + "[1]\n", "line 3: not a JSON object"),
        (
            MOONCAKE + '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
            "line 3: timestamp must be a finite",
        ),
        (MOONCAKE + '{"timestamp": 4000, "input_length": true, "output_length": 1}\n', "line 3: input_length"),
        (MOONCAKE + '{"timestamp": 4000, "input_length": 5}\n', "line 3: output_length is missing"),
        (MOONCAKE + '{"input_length": 5}\n', "line 3: has neither timestamp"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n', "line 1: service must be a name"),
        (MOONCAKE.encode() + b"\xff\xfe\n", "line 3 is not UTF-8"),
        (gzip.compress(LONG.encode())[:-60], r"line \d+ or later: the gzip stream is broken"),
        (gzip.compress(AZURE.encode())[:-9], "line 1 or later: the gzip stream is broken: .* ended before"),
    ],
)
def test_bad_files_give_one_line_that_says_where(tmp_path, text, message):
    with pytest.raises(TraceError, match=message) as refused:
        list(read_trace(written(tmp_path, text)))
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "trace") in str(refused.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none"))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (TraceLimits(max_rows=1), "more than 1 rows"),
        (TraceLimits(max_bytes=100), "more than 100 bytes"),
        (TraceLimits(max_line_bytes=50), "line 1 is longer than 50 bytes"),
    ],
)
def test_size_limits_hold(tmp_path, limits, message):
    with pytest.raises(TraceError, match=message):
        list(read_trace(written(tmp_path, MOONCAKE), limits=limits))


def test_gzip_bomb_ends_at_the_limit(tmp_path):
    path = written(tmp_path, gzip.compress(b"{" + b" " * 50_000_000))
    with pytest.raises(TraceError, match="longer than"):
        list(read_trace(path))


def test_reading_stops_where_the_slice_ends(tmp_path):
    path = written(tmp_path, MOONCAKE + "not json at all\n")
    assert len(take_slice(read_trace(path), start_s=0, duration_s=2.5)) == 1


LOAD = ServiceLoad(
    service="chat",
    request_rps=Curve(((0.0, 0.0), (50.0, 40.0), (100.0, 0.0))),
    prompt=Lengths(mean_tokens=500, cv=0.6, max_tokens=4000),
    output=Lengths(mean_tokens=50, cv=0.4, max_tokens=400),
)


def test_generated_load_follows_its_rates_and_lengths():
    requests = generate([LOAD], duration_s=100, seed=3)
    assert len(requests) == pytest.approx(2000, rel=0.1)
    early = sum(request.arrival_s < 25 for request in requests)
    assert early == pytest.approx(250, rel=0.25)
    assert sum(r.prompt_tokens for r in requests) / len(requests) == pytest.approx(500, rel=0.06)
    assert sum(r.output_tokens for r in requests) / len(requests) == pytest.approx(50, rel=0.06)
    assert all(0 <= a.arrival_s <= b.arrival_s < 100 for a, b in itertools.pairwise(requests))


def test_one_service_does_not_disturb_another():
    alone = generate([LOAD], duration_s=100, seed=3)
    both = generate(
        [LOAD, ServiceLoad(service="x", request_rps=LOAD.request_rps, prompt=LOAD.prompt, output=LOAD.output)],
        duration_s=100,
        seed=3,
    )
    assert [r for r in both if r.service == "chat"] == alone
    assert [r.arrival_s for r in both if r.service == "x"] != [r.arrival_s for r in alone]


def test_equal_seeds_give_equal_traces_under_any_hash_seed():
    code = (
        "import hashlib\n"
        "from simulator.traces.demo import demo_trace\n"
        "print(hashlib.sha256(repr(demo_trace(duration_s=60, seed=7).requests).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1
    assert demo_trace(duration_s=60, seed=7) == demo_trace(duration_s=60, seed=7)
    assert demo_trace(duration_s=60, seed=8).requests != demo_trace(duration_s=60, seed=7).requests


@pytest.mark.parametrize("points", [(), ((1.0, 1.0), (0.0, 1.0)), ((0.0, -1.0),), ((0.0, float("nan")),)])
def test_impossible_curves_are_refused(points):
    with pytest.raises(ValueError, match=r"curve"):
        Curve(points)


def test_rotation_has_one_hot_name_at_a_time():
    curves = rotating(["a", "b", "c"], duration_s=90, phase_s=30, ramp_s=6, hot=5, cold=1)
    assert [[curves[name].at(t) for name in "abc"] for t in (0, 3, 27, 33, 57, 63, 87)] == [
        [1, 1, 1],
        [5, 1, 1],
        [5, 1, 1],
        [1, 5, 1],
        [1, 5, 1],
        [1, 1, 5],
        [1, 1, 5],
    ]
    assert [curves[name].at(30) for name in "abc"] == [3, 3, 1]
    assert rotating(["a", "b"], duration_s=40, phase_s=10, ramp_s=0, hot=2, cold=0)["a"].at(25) == 2
    with pytest.raises(ValueError, match="does not fit"):
        rotating(["a", "b"], duration_s=10, phase_s=5, ramp_s=6, hot=1, cold=0)


def requests_at(*arrivals, service="trace", prompt=10, output=5):
    return [TraceRequest(float(at), service, prompt, output) for at in arrivals]


def test_slice_is_half_open_and_starts_at_zero():
    assert [r.arrival_s for r in take_slice(requests_at(0, 1, 2, 3), start_s=1, duration_s=2)] == [0.0, 1.0]


def test_busiest_slice_is_found_on_its_grid():
    assert busiest_start_s(requests_at(0, 1, 31, 32, 33, 90), duration_s=20) == 20.0
    assert busiest_start_s(requests_at(0, 1), duration_s=100) == 0.0


@given(factor=st.floats(0.1, 5.0), seed=st.integers(0, 50))
def test_scaling_keeps_the_rate_curve(factor, seed):
    requests = requests_at(*range(200))
    scaled = scale_rate(requests, factor, seed=seed)
    assert len(scaled) == pytest.approx(200 * factor, abs=4 * (200 * 0.25) ** 0.5)
    assert scaled == scale_rate(requests, factor, seed=seed)
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(scaled))
    assert {r.arrival_s for r in requests} >= {r.arrival_s for r in scaled if r.arrival_s == int(r.arrival_s)}


def test_clipping_counts_what_it_shortened():
    clipped, count = clip_lengths(requests_at(0, 1), max_prompt_tokens=10, max_output_tokens=4)
    assert (count, {(r.prompt_tokens, r.output_tokens) for r in clipped}) == (2, {(10, 4)})
    assert clip_lengths(requests_at(0), max_prompt_tokens=10, max_output_tokens=5)[1] == 0


def test_dealing_follows_shifting_shares():
    shares = {"a": Curve(((50.0, 1.0), (50.0, 0.0))), "b": Curve(((50.0, 0.0), (50.0, 1.0)))}
    dealt = deal(requests_at(*range(100)), shares, seed=1)
    assert {r.service for r in dealt[:50]} == {"a"}
    assert {r.service for r in dealt[50:]} == {"b"}
    with pytest.raises(ValueError, match="no service has a share"):
        deal(requests_at(0), {"a": Curve(((0.0, 0.0),))}, seed=1)


def test_mean_demand_and_peak():
    requests = requests_at(0, 1, 2, service="a") + requests_at(3, service="b", prompt=100, output=50)
    demand = mean_demand(requests, duration_s=10)
    assert demand["a"].request_rps == pytest.approx(0.3)
    assert demand["b"].work(prompt_token_s=0.01, output_token_s=0.02) == pytest.approx(0.2)
    assert peak_output_tps(requests, window_s=5) == pytest.approx(13.0)


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        ({"chat": 1.0, "code": 1.0, "reason": 1.0}, {"chat": 3, "code": 3, "reason": 1}),
        ({"chat": 1.0, "code": 1.0, "reason": 4.0}, {"chat": 1, "code": 1, "reason": 3}),
        ({"chat": 0.0, "code": 0.0, "reason": 0.0}, {"chat": 1, "code": 1, "reason": 1}),
        ({"chat": 9.0}, {"chat": 5, "code": 1, "reason": 1}),
    ],
)
def test_static_split_is_proportional_within_the_budget(demand, expected):
    footprint = {"chat": 1, "code": 1, "reason": 2}
    assert static_split(demand, footprint, budget_gpus=8) == expected
    with pytest.raises(TraceError, match="cannot hold"):
        static_split(demand, footprint, budget_gpus=3)


@pytest.mark.parametrize(("duration_s", "phases"), [(60, 2), (120, 3), (240, 6)])
def test_demo_load_shifts_and_no_static_split_carries_its_peaks(duration_s, phases):
    trace = demo_trace(duration_s=duration_s)
    split = trace.static_replicas()
    assert split["chat"] + split["code"] + 2 * split["reason"] <= POOL_GPUS
    assert set(trace.mean_demand) == {*POOL_SERVICES, "assist"}
    phase_s = duration_s / phases
    overloaded = 0
    for phase in range(phases):
        # The middle of a phase, between the ramps.
        start_s, end_s = (phase + 0.3) * phase_s, (phase + 0.7) * phase_s
        middle = take_slice(trace.requests, start_s=start_s, duration_s=end_s - start_s)
        replicas = {
            name: demand.work(prompt_token_s=PROMPT_TOKEN_S, output_token_s=OUTPUT_TOKEN_S)
            for name, demand in mean_demand(middle, duration_s=end_s - start_s).items()
            if name in FOOTPRINT_GPUS
        }
        gpus = {name: count * FOOTPRINT_GPUS[name] for name, count in replicas.items()}
        hot = max(gpus, key=lambda name: gpus[name])
        assert hot == TURNS[phase % len(TURNS)]
        assert sum(gpus.values()) < 0.8 * POOL_GPUS
        overloaded += replicas[hot] > split[hot]
    assert overloaded >= phases - 1
    assert trace.peak_output_tps < 4000


def test_stream_interval_keeps_chunks_within_the_machine():
    assert [stream_interval_for(tps) for tps in (100, 1500, 1501, 6000)] == [1, 1, 2, 4]


def test_recorded_trace_becomes_a_demo_load(tmp_path):
    rows = "".join(
        json.dumps({"timestamp": 100 * i, "input_length": 1000 + i % 7, "output_length": 200}) + "\n"
        for i in range(3000)
    )
    path = written(tmp_path, rows)
    trace = demo_from_trace(path, duration_s=60, seed=2)
    assert trace == demo_from_trace(path, duration_s=60, seed=2)
    assert set(trace.mean_demand) == {*POOL_SERVICES, "assist"}
    assert all(request.arrival_s < 60 for request in trace.requests)
    assert trace.peak_output_tps < 1.2 * SHORT_MAX_OUTPUT_TPS
    assert "rates ×" in trace.notes[0]
    pinned = demo_from_trace(path, duration_s=60, start_s=30, scale=1.0)
    assert sum(r.service != "assist" for r in pinned.requests) == pytest.approx(600, abs=1)
    with pytest.raises(TraceError, match="no request from"):
        demo_from_trace(path, duration_s=60, start_s=100_000)


@pytest.mark.parametrize(("duration_s", "turns"), [(60, TURNS[:2]), (80, TURNS[:2]), (90, TURNS), (120, TURNS)])
def test_recorded_load_turns_and_the_static_split_does_not_carry_its_peaks(tmp_path, duration_s, turns):
    rows = "".join(
        json.dumps({"timestamp": 100 * i, "input_length": 1500 + i % 7, "output_length": 100}) + "\n"
        for i in range(3000)
    )
    trace = demo_from_trace(written(tmp_path, rows), duration_s=duration_s)
    split = trace.static_replicas()
    phase_s = duration_s / len(turns)
    load = {}
    for phase, name in enumerate(turns):
        middle = take_slice(trace.requests, start_s=(phase + 0.3) * phase_s, duration_s=0.4 * phase_s)
        demands = mean_demand(middle, duration_s=0.4 * phase_s)
        work = {
            service: demands[service].work(prompt_token_s=PROMPT_TOKEN_S, output_token_s=OUTPUT_TOKEN_S)
            for service in POOL_SERVICES
        }
        assert max(POOL_SERVICES, key=lambda service: work[service] * FOOTPRINT_GPUS[service]) == name
        assert sum(work[service] * FOOTPRINT_GPUS[service] for service in POOL_SERVICES) < POOL_GPUS
        load[name] = work[name]
    assert any(load[name] > 1.2 * split[name] for name in turns)
    assert any("two turns" in note for note in trace.notes) == (len(turns) == 2)


def test_short_recorded_load_does_not_begin_a_turn_that_it_cannot_finish(tmp_path):
    rows = "".join(f'{{"timestamp": {100 * i}, "input_length": 1500, "output_length": 100}}\n' for i in range(3000))
    trace = demo_from_trace(written(tmp_path, rows), duration_s=60)
    end = take_slice(trace.requests, start_s=54, duration_s=6)
    assert sum(r.service == "reason" for r in end) > 2 * sum(r.service == "chat" for r in end)


def test_thinned_rate_follows_the_level():
    requests = [TraceRequest(i / 100, "x", 1, 1) for i in range(2000)]
    level = [Curve(((0.0, 1.0), (10.0, 1.0), (10.0, 0.0))), Curve(((0.0, 1.0),))]
    kept = thin(requests, level, seed=1)
    early = [request for request in kept if request.arrival_s < 10]
    assert len(early) == 1000
    assert len(kept) - len(early) == pytest.approx(500, abs=60)
    assert thin(requests, [], seed=1) == requests
    with pytest.raises(ValueError, match="zero throughout"):
        thin(requests, [Curve(((0.0, 0.0),))], seed=1)
