"""Files of BurstGPT and ServeGen, tables of lengths, and figures against those measured on the material."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.traces import TraceError, TraceRequest
from simulator.traces.describe import describe
from simulator.traces.generators import Curve
from simulator.traces.lengths import Fixed, Table, histogram, packaged, packaged_names, read_laws
from simulator.traces.readers import TraceLimits, read_trace
from simulator.traces.servegen import (
    Client,
    ClientMix,
    Pattern,
    Window,
    client_shares,
    made_up_clients,
    requests_of_clients,
    weibull_shape,
)
from simulator.traces.servegen_files import DefaultLengths, read_clients, read_histogram, read_packed_clients

BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "1106,ChatGPT,0,0,0,Conversation log\n"
    "1278,GPT-4,17,382,399,API log\n"
)
LENGTHS = DefaultLengths(Fixed(100), Fixed(10))


def written(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_burstgpt_rows_in_seconds_without_the_failed_ones(tmp_path):
    assert list(read_trace(written(tmp_path, BURSTGPT), service="m")) == [
        TraceRequest(0.0, "m", 472, 18),
        TraceRequest(40.0, "m", 1087, 230),
        TraceRequest(1273.0, "m", 17, 382),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1300,GPT-4,1,2,3\n", "line 6: 5 columns where the header has 6"),
        ("soon,GPT-4,1,2,3,API log\n", "line 6: Timestamp must be a finite number"),
        ("nan,GPT-4,1,2,3,API log\n", "line 6: Timestamp must be a finite number"),
        ("1300,GPT-4,0,2,3,API log\n", "line 6: Request tokens must be a whole number from 1"),
        ("1300,GPT-4,3,x,3,API log\n", "line 6: Response tokens must be a whole number"),
        ("1277,GPT-4,3,1,3,API log\n", r"line 6: arrives 1\.000 s before"),
    ],
)
def test_bad_burstgpt_rows_are_named(tmp_path, row, message):
    with pytest.raises(TraceError, match=message):
        list(read_trace(written(tmp_path, BURSTGPT + row)))


@pytest.mark.parametrize(
    ("header", "twice"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens", "'ContextTokens' 2 times"),
        ('"TIMESTAMP","ContextTokens", TIMESTAMP ,GeneratedTokens,TIMESTAMP', "'TIMESTAMP' 3 times"),
        ("Timestamp,Model,Request tokens,Response tokens,Model", "'Model' 2 times"),
    ],
)
def test_a_header_with_a_column_twice_is_refused_before_any_row(tmp_path, header, twice):
    with pytest.raises(TraceError, match=rf"trace: line 1: the header has {twice}; keep the one that is meant"):
        next(read_trace(written(tmp_path, f"{header}\n1,2,3,4,5\n")))


def test_columns_without_a_name_are_left_alone(tmp_path):
    (request,) = read_trace(written(tmp_path, "Timestamp,,Request tokens,Response tokens,\n5,x,7,8,y\n"), service="m")
    assert request == TraceRequest(0.0, "m", 7, 8)


def test_failed_rows_count_towards_the_limit(tmp_path):
    with pytest.raises(TraceError, match="line 5: more than 3 rows"):
        list(read_trace(written(tmp_path, BURSTGPT), limits=TraceLimits(max_rows=3)))


def servegen_folder(tmp_path, trace, dataset=None):
    written(tmp_path, trace, "chunk-7-trace.csv")
    if dataset is not None:
        written(tmp_path, dataset, "chunk-7-dataset.json")
    return tmp_path


TRACE = "0,0,0,,0,0\n600,2.0,1.5,Gamma,0.444,0.3\n1200,0.5,3.0,Weibull,0.5,0.1\n"
DATASET = json.dumps({"0": {"input_tokens": "{10: 0.25, 30: 0.75}", "output_tokens": "{5: 1.0}"}, "600": {}})


def test_servegen_client_is_read_and_sends_at_its_rates(tmp_path):
    (client,) = read_clients(servegen_folder(tmp_path, TRACE, DATASET))
    assert (client.name, client.window_s) == ("chunk-7", 600.0)
    assert client.windows[1] == Window(600.0, 2.0, Pattern.GAMMA, 0.444)
    assert client.mean_rps == pytest.approx(2.5 / 3)
    requests = list(requests_of_clients([client], service="chat", seed=1, duration_s=1800))
    per_window = [sum(index * 600 <= r.arrival_s < (index + 1) * 600 for r in requests) for index in range(3)]
    assert per_window == [0, 1200, 300]
    assert {r.prompt_tokens for r in requests} == {10, 30}
    assert sum(r.prompt_tokens == 30 for r in requests) / len(requests) == pytest.approx(0.75, abs=0.05)


def test_a_slice_has_the_same_requests_as_the_whole(tmp_path):
    (client,) = read_clients(servegen_folder(tmp_path, TRACE, DATASET))
    whole = list(requests_of_clients([client], service="chat", seed=1, duration_s=1800))
    part = list(requests_of_clients([client], service="chat", seed=1, start_s=600, duration_s=300))
    same = [r for r in whole if 600 <= r.arrival_s < 900]
    assert [r.prompt_tokens for r in part] == [r.prompt_tokens for r in same]
    assert [r.arrival_s + 600 for r in part] == pytest.approx([r.arrival_s for r in same])
    assert len(part) > 100


@pytest.mark.parametrize(
    ("trace", "dataset", "message"),
    [
        ("0,1,1\n", DATASET, "chunk-7-trace.csv: line 1: '0,1,1' is no start_s"),
        ("0,1,1,Pareto,1,1\n", DATASET, "line 1: '0,1,1,Pareto,1,1' is no"),
        ("0,1,1,Gamma,0,1\n", DATASET, "line 1: a shape is finite and above 0"),
        ("0,-1,1,Gamma,1,1\n", DATASET, "line 1: a rate is finite"),
        ("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", DATASET, "line 2: windows go forward"),
        ("nan,1,1,Gamma,1,1\n", DATASET, "line 1: windows go forward from 0, not to nan"),
        ("", DATASET, "the file is empty"),
        (TRACE, "{", "chunk-7-dataset.json: not JSON"),
        (TRACE, '{"0": {"input_tokens": "{1: 1}"}}', "window 0: output_tokens must be a text"),
        (TRACE, '{"0": {"input_tokens": "{1: x}", "output_tokens": "{1: 1}"}}', "window 0: input_tokens: could not"),
        (TRACE, None, "is missing, and no other lengths are given"),
    ],
)
def test_bad_servegen_files_are_named(tmp_path, trace, dataset, message):
    with pytest.raises(TraceError, match=message) as refused:
        list(read_clients(servegen_folder(tmp_path, trace, dataset)))
    assert "\n" not in str(refused.value)


def test_packed_clients_and_what_is_wrong_with_them(tmp_path):
    arrays = {
        "client": np.array([3, 4]),
        "t_s": np.array([0, 600]),
        "rate_rps": np.array([[1.0, 0.0], [0.5, 0.5]]),
        "pattern": np.array([[1, 0], [2, 2]], dtype=np.uint8),
        "p1": np.array([[0.5, 0.0], [0.7, 0.7]]),
    }
    path = tmp_path / "c.npz"
    np.savez(path, **arrays)
    clients = list(read_packed_clients(path, LENGTHS))
    assert [c.name for c in clients] == ["client-3", "client-4"]
    assert clients[0].windows == (Window(0.0, 1.0, Pattern.GAMMA, 0.5), Window(600.0, 0.0, Pattern.NONE, 1.0))
    np.savez(path, **{**arrays, "p1": np.zeros((2, 3))})
    with pytest.raises(TraceError, match="do not all have 2 clients and 2 windows"):
        list(read_packed_clients(path, LENGTHS))
    np.savez(path, **{**arrays, "pattern": np.full((2, 2), 9)})
    with pytest.raises(TraceError, match="client 3: 9 is not a valid Pattern"):
        list(read_packed_clients(path, LENGTHS))
    path.write_bytes(b"not a zip file")
    with pytest.raises(TraceError, match="not a packed file"):
        list(read_packed_clients(path, LENGTHS))


def test_histogram_file(tmp_path):
    table = read_histogram(written(tmp_path, "lo,hi,prob\n0,1,0.5\n10,20,0.5\n"))
    assert table == Table((0, 10), (1, 20), (0.5, 0.5))
    for text, message in (("a,b\n", "line 1: the header"), ("lo,hi,prob\n1,2\n", "line 2: '1,2' is no lo,hi,prob")):
        with pytest.raises(TraceError, match=message):
            read_histogram(written(tmp_path, text))


@given(values=st.lists(st.integers(0, 100_000), min_size=1, max_size=60), seed=st.integers(0, 50))
def test_a_table_draws_only_what_its_bins_hold(values, seed):
    table = histogram(values)
    assert sum(table.weight) == pytest.approx(1.0)
    assert all(any(low <= v < high for low, high in zip(table.low, table.high, strict=True)) for v in values)
    drawn = table.sample(np.random.default_rng(seed), 200)
    assert all(
        v == 1 or any(lo <= v < hi for lo, hi in zip(table.low, table.high, strict=True)) for v in drawn.tolist()
    )
    assert table.low[0] <= table.quantile(0.0) <= table.quantile(1.0) <= table.high[-1] - 1
    assert table.quantile(0.2) <= table.quantile(0.9)


@pytest.mark.parametrize(
    ("name", "prompt", "output", "gap_cv"),
    # Means and 95th percentiles of the published traces, and the burstiness of their gaps.
    [("azure-conv", (1155, 4083), (211, 451), 1.09), ("azure-code", (2048, 7303), (27.9, 90), 13.2)],
)
def test_packaged_tables_have_the_published_traces_figures(name, prompt, output, gap_cv):
    laws = packaged(name)
    assert "CC-BY-4.0" in laws.source
    for table, (mean, p95) in ((laws.prompt_tokens, prompt), (laws.output_tokens, output)):
        assert table.mean == pytest.approx(mean, rel=0.06)
        assert table.quantile(0.95) == pytest.approx(p95, rel=0.15)
    gaps = laws.gaps_ms.sample_gaps(np.random.default_rng(1), 300_000)
    assert gaps.mean() == pytest.approx(1.0, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(gap_cv, rel=0.15)


def test_tables_that_are_none_are_named(tmp_path):
    assert packaged_names() == ("azure-code", "azure-conv")
    with pytest.raises(TraceError, match="there are azure-code, azure-conv"):
        packaged("nothing")
    for text, message in (
        ("prompt_tokens: [[1, 2, 1.0]]\n", "source must say"),
        ("source: x\nprompt_tokens: [[1, 2, 0.5]]\n", "the shares add up to 0.5000"),
        ("source: x\nprompt_tokens: [[1, 2]]\n", r"\[1, 2\] is no"),
        ("source: x\nprompt_tokens: [[2, 1, 1.0]]\n", "end above its beginning"),
    ):
        with pytest.raises(TraceError, match=message):
            read_laws(written(tmp_path, text, "t.yaml"))


def test_made_up_clients_have_the_rate_skew_and_lengths_that_are_asked_for():
    mix = ClientMix(clients=50, total_rps=20.0)
    clients = made_up_clients(mix, curve=Curve(((0.0, 1.0),)), duration_s=3600, seed=2)
    shares = client_shares(clients)
    assert shares[0] == pytest.approx(50 * shares[-1] * (50**0.1), rel=0.01)
    figures = describe(requests_of_clients(clients, service="chat", seed=2, duration_s=3600))
    assert figures.mean_rps == pytest.approx(20.0, rel=0.01)
    assert figures.gap_cv > 1.05
    assert figures.prompt.mean == pytest.approx(900, rel=0.1)
    assert figures.output.mean == pytest.approx(155, rel=0.1)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0, 10.0])
def test_weibull_shape_has_the_coefficient_of_variation(cv):
    from math import gamma

    shape = weibull_shape(cv)
    assert gamma(1 + 2 / shape) / gamma(1 + 1 / shape) ** 2 - 1 == pytest.approx(cv * cv, rel=1e-6)


def test_a_client_that_sends_less_than_one_request_a_window_still_sends_some():
    # 0.3 requests in each of 2,000 windows.
    windows = tuple(Window(index * 600.0, 0.0005) for index in range(2000))
    client = Client(name="c", windows=windows, prompt=Fixed(1), output=Fixed(1))
    sent = sum(1 for _ in requests_of_clients([client], service="s", seed=1, duration_s=2000 * 600.0))
    assert sent == pytest.approx(600, abs=90)


def test_a_window_with_an_absurd_rate_is_refused():
    client = Client(name="c", windows=(Window(0.0, 1e9),), prompt=Fixed(1), output=Fixed(1))
    with pytest.raises(ValueError, match="lower the rate"):
        list(requests_of_clients([client], service="s", seed=1, duration_s=10))


def test_described_figures_by_hand():
    requests = [TraceRequest(t, "b" if t > 20 else "a", int(t) + 1, 4) for t in (0.0, 1.0, 3.0, 25.0, 31.0)]
    figures = describe(requests)
    assert (figures.requests, figures.duration_s) == (5, 31.0)
    # Full windows of 10 s: 3, 0 and 1 requests.
    assert (figures.peak_rps, figures.least_rps, figures.empty_windows) == (0.3, 0.0, pytest.approx(1 / 3))
    assert figures.peak_to_least == float("inf")
    assert figures.requests_by_service == {"a": 3, "b": 2}
    assert (figures.prompt.p50, figures.prompt.max, figures.output.mean) == (4, 32, 4.0)
    gaps = np.array([1.0, 2.0, 22.0, 6.0])
    assert figures.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    with pytest.raises(TraceError, match="no requests"):
        describe([])
    with pytest.raises(TraceError, match="back in time"):
        describe(reversed(requests))


# As measured when the material was gathered: duration, mean RPS, peak 10 s, gap CV, then mean, P50 and P95 of lengths.
MEASURED = {
    "AzureLLMInferenceTrace_conv.csv": (3502, 5.53, 9.8, 1.09, (1155, 1020, 4083), (211, 129, 451)),
    "AzureLLMInferenceTrace_code.csv": (3436, 2.57, 32.7, 13.2, (2048, 1469, 7303), (27.9, 13, 90)),
    "mooncake_synthetic_trace.jsonl.gz": (1022, 3.91, 5.5, 1.01, (15326, 11587, 48905), (149, 69, 519)),
}


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_material_has_the_figures_that_were_measured(material, name):
    duration_s, rps, peak, cv, prompt, output = MEASURED[name]
    figures = describe(read_trace(material / "data" / "traces" / name))
    assert figures.duration_s == pytest.approx(duration_s, abs=1)
    assert figures.mean_rps == pytest.approx(rps, abs=0.006)
    assert figures.peak_rps == pytest.approx(peak, abs=0.051)
    assert figures.gap_cv == pytest.approx(cv, rel=0.006)
    for got, expected in ((figures.prompt, prompt), (figures.output, output)):
        assert (got.mean, got.p50, got.p95) == pytest.approx(expected, rel=0.004)


@pytest.mark.parametrize(
    ("name", "clients", "rps", "top1", "top5"),
    [("language_m-large", 162, 195.8, 0.16, 0.43), ("language_m-small", 43, 1174, 0.30, 0.77)],
)
def test_servegen_material_has_the_figures_that_were_measured(material, name, clients, rps, top1, top5):
    folder = material / "data" / "traces" / "servegen"
    lengths = DefaultLengths(
        read_histogram(folder / f"{name}_input_tokens_hist.csv"),
        read_histogram(folder / f"{name}_output_tokens_hist.csv"),
    )
    read = list(read_packed_clients(folder / f"{name}_clients.npz", lengths))
    assert len(read) == clients
    assert sum(client.mean_rps for client in read) == pytest.approx(rps, rel=0.002)
    shares = client_shares(read)
    assert (shares[0], sum(shares[:5])) == pytest.approx((top1, top5), abs=0.006)
    # Ten minutes, a tenth of the rate: the sum of the clients' rates comes out.
    due = sum(client.windows[0].rate_rps for client in read)
    made = describe(requests_of_clients(read, service="m", seed=1, duration_s=600, rate_scale=0.1))
    assert made.requests == pytest.approx(60 * due, rel=0.01)


def test_describe_command_prints_a_table_and_one_line_for_what_it_cannot_read(tmp_path):
    path = written(tmp_path, BURSTGPT, "burst.csv")
    command = [sys.executable, "-m", "simulator.traces", "describe"]
    table = subprocess.run([*command, str(path), "alternating", "--duration", "60"], capture_output=True, text=True)
    assert table.returncode == 0, table.stderr
    assert "burst.csv" in table.stdout
    assert "alternating" in table.stdout
    bad = subprocess.run([*command, "nonsense"], capture_output=True, text=True)
    assert (bad.returncode, bad.stderr.count("\n"), bad.stdout) == (1, 1, "")
    assert bad.stderr.startswith("error: nonsense is neither a file nor a workload")
