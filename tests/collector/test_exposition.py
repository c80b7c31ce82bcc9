"""Pages of servers in several states, of several releases, and of nobody's; of real ones in test_recorded_pages."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from metrics_collector.core.dialect import VLLM_V1, Family, Kind, Quantity
from metrics_collector.core.exposition import MAX_PAGE_BYTES, PageError, PageReader

READER = PageReader(VLLM_V1)


def series(name: str, values: dict[str, float | str], kind: str = "gauge") -> str:
    lines = [f'{name}{{engine="{engine}",model_name="m"}} {value}' for engine, value in values.items()]
    return "\n".join([f"# TYPE {name} {kind}", *lines, ""])


def by_label(name: str, label: str, values: dict[str, float], kind: str = "counter") -> str:
    lines = [f'{name}{{engine="0",model_name="m",{label}="{which}"}} {value}' for which, value in values.items()]
    return "\n".join([f"# TYPE {name} {kind}", *lines, ""])


def sleep_states(**states: float) -> str:
    return by_label("vllm:engine_sleep_state", "sleep_state", states, "gauge")


OPENMETRICS = """\
# TYPE vllm:num_requests_running gauge
vllm_num_requests_running{engine="0",model_name="m"} 4.0
# TYPE vllm:generation_tokens counter
vllm_generation_tokens_total{engine="0",model_name="m"} 12.0
vllm_generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# EOF
"""

# Pages as servers of several kinds and in several states write them, in short.
WRITTEN: dict[str, tuple[str, dict[Quantity, float | None]]] = {
    # Kept requests stay on the gauges of a server that sleeps; what queues at its door is not on them.
    "asleep, gauges frozen": (
        series("vllm:num_requests_running", {"0": 2})
        + series("vllm:num_requests_waiting", {"0": 0})
        + sleep_states(awake=0, weights_offloaded=1, discard_all=0),
        {Quantity.AWAKE: 0, Quantity.RUNNING: 2, Quantity.WAITING: 0},
    ),
    "asleep at level 0": (
        series("vllm:num_requests_running", {"0": 0}) + sleep_states(awake=0, weights_offloaded=0, discard_all=0),
        {Quantity.AWAKE: 0},
    ),
    # A pause is no sleep.
    "paused": (
        series("vllm:num_requests_running", {"0": 1}) + sleep_states(awake=1, weights_offloaded=0, discard_all=0),
        {Quantity.AWAKE: 1, Quantity.RUNNING: 1},
    ),
    "aborted requests are not finished ones": (
        series("vllm:generation_tokens_total", {"0": 9}, "counter")
        + by_label("vllm:request_success_total", "finished_reason", {"stop": 40, "length": 11, "abort": 16}),
        {Quantity.FINISHED: 51},
    ),
    "prompt tokens by where they came from": (
        series("vllm:generation_tokens_total", {"0": 9}, "counter")
        + by_label(
            "vllm:prompt_tokens_by_source_total",
            "source",
            {"local_compute": 700, "local_cache_hit": 300, "external_kv_transfer": 20},
        ),
        {Quantity.PROMPT_COMPUTED: 700, Quantity.PROMPT_CACHE_HIT: 300},
    ),
    # Two API servers before their first request: histograms, no gauges, nothing of a process.
    "two engines, idle": (
        "".join(
            [
                "# TYPE vllm:time_to_first_token_seconds histogram\n",
                *(
                    f'vllm:time_to_first_token_seconds_bucket{{engine="{engine}",le="+Inf",model_name="m"}} 0\n'
                    f'vllm:time_to_first_token_seconds_count{{engine="{engine}",model_name="m"}} 0\n'
                    f'vllm:time_to_first_token_seconds_sum{{engine="{engine}",model_name="m"}} 0\n'
                    for engine in (0, 1)
                ),
                series("vllm:generation_tokens_total", {"0": 0, "1": 0}, "counter"),
            ]
        ),
        {Quantity.RUNNING: None, Quantity.START_TIME: None, Quantity.GENERATION_TOKENS: 0},
    ),
    "two engines under load": (
        series("vllm:generation_tokens_total", {"0": 7800, "1": 6600}, "counter")
        + series("vllm:num_requests_running", {"0": 3, "1": 2}),
        {Quantity.GENERATION_TOKENS: 14400, Quantity.RUNNING: 5},
    ),
    # OpenMetrics names a counter's family without its suffix and has underscores on its samples.
    "OpenMetrics": (
        OPENMETRICS,
        {Quantity.RUNNING: 4, Quantity.GENERATION_TOKENS: 12},
    ),
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_page_says_what_stands_on_it(name: str) -> None:
    page, expected = WRITTEN[name]

    sample = READER.read(page.encode())

    found: dict[Quantity, float] = {**sample.gauges, **sample.counters}
    assert {quantity: found.get(quantity) for quantity in expected} == expected
    assert sample.rejected == 0


def test_a_server_without_statistics_is_no_idle_server() -> None:
    page = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7e+09\n"
    page += '# TYPE http_requests_total counter\nhttp_requests_total{handler="none",method="GET",status="4xx"} 2.0\n'
    with pytest.raises(PageError, match="statistics off"):
        READER.read(page.encode())


@pytest.mark.parametrize("order", [("0", "1", "2", "3"), ("3", "1", "0", "2"), ("1", "2", "3", "0")])
def test_case_9_data_parallel_engines_add_up(order: tuple[str, ...]) -> None:
    running = {"0": 10.0, "1": 0.0, "2": 0.0, "3": 0.0}
    kv = {"0": 0.8, "1": 0.2, "2": 0.0, "3": 0.0}
    page = series("vllm:num_requests_running", {engine: running[engine] for engine in order})
    page += series("vllm:kv_cache_usage_perc", {engine: kv[engine] for engine in order})

    sample = READER.read(page.encode())

    assert sample.gauges[Quantity.RUNNING] == 10.0
    assert sample.gauges[Quantity.KV_USAGE] == pytest.approx(0.25)
    assert sample.kv_usage_max_ratio == 0.8


OLD = series("vllm:gpu_cache_usage_perc", {"0": 0.4})
NEW = series("vllm:kv_cache_usage_perc", {"0": 0.4})
OLD_TBT = "time_per_output_token_seconds"
NEW_TBT = "inter_token_latency_seconds"


def tbt(name: str) -> str:
    label = 'engine="0",model_name="m"'
    return (
        f"# TYPE vllm:{name} histogram\n"
        f'vllm:{name}_bucket{{{label},le="0.1"}} 5\nvllm:{name}_bucket{{{label},le="+Inf"}} 7\n'
        f"vllm:{name}_count{{{label}}} 7\nvllm:{name}_sum{{{label}}} 1.5\n"
    )


@pytest.mark.parametrize(
    "families",
    [
        OLD + tbt(OLD_TBT),
        NEW + tbt(NEW_TBT),
        # Were the two read a moment apart, they could differ; then the newer one counts, in either order.
        OLD.replace("0.4", "0.5") + NEW + tbt(OLD_TBT).replace(" 7\n", " 9\n") + tbt(NEW_TBT),
        NEW + OLD.replace("0.4", "0.5") + tbt(NEW_TBT) + tbt(OLD_TBT).replace(" 7\n", " 9\n"),
    ],
    ids=["old names only", "new names only", "both, old first", "both, new first"],
)
def test_case_10_a_renamed_family_is_one_signal_in_any_release(families: str) -> None:
    sample = READER.read((series("vllm:num_requests_running", {"0": 1}) + families).encode())

    assert sample.gauges == {Quantity.RUNNING: 1.0, Quantity.KV_USAGE: 0.4}
    assert {quantity: item.count for quantity, item in sample.histograms.items()} == {Quantity.TBT: 7}


def test_case_10_an_upgraded_server_goes_on_with_the_same_signal() -> None:
    before = READER.read((GOOD + OLD + tbt(OLD_TBT)).encode())
    after = READER.read((GOOD + NEW + tbt(NEW_TBT)).encode())

    assert before == after


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "-1", "", "1_000", "0x10", "abc", "١"])
def test_case_6_an_absurd_value_is_refused_and_counted(value: str) -> None:
    page = series("vllm:num_requests_running", {"0": 2}) + series("vllm:num_requests_waiting", {"0": 1, "1": value})
    page += series("vllm:generation_tokens_total", {"0": value}, "counter")

    sample = READER.read(page.encode())

    assert sample.gauges == {Quantity.RUNNING: 2.0}, "a part of a sum must not stand for the sum"
    assert sample.counters == {}
    assert sample.rejected == 2


def test_case_6_a_histogram_with_one_absurd_bucket_is_refused_whole() -> None:
    page = series("vllm:num_requests_running", {"0": 2}) + tbt(NEW_TBT).replace("} 5\n", "} NaN\n")

    sample = READER.read(page.encode())

    assert sample.histograms == {}
    assert sample.rejected == 1


@pytest.mark.parametrize(
    "broken",
    [
        tbt(NEW_TBT).replace('le="+Inf"', 'le="5"'),
        tbt(NEW_TBT).replace("} 5\n", "} 9\n"),
        tbt(NEW_TBT).replace("_count", "_number"),
        tbt(NEW_TBT).replace('le="0.1"', 'le="x"'),
        tbt(NEW_TBT).replace("seconds_count{engine", 'seconds_count{a="b",engine'),
    ],
    ids=["no +Inf bucket", "falling buckets", "no count", "no bound", "odd labels"],
)
def test_a_histogram_that_does_not_add_up_is_refused_or_whole(broken: str) -> None:
    sample = READER.read((series("vllm:num_requests_running", {"0": 2}) + broken).encode())

    if "seconds_count{a=" in broken:
        assert sample.histograms[Quantity.TBT].count == 7
    else:
        assert sample.histograms == {}
        assert sample.rejected == 1


GOOD = series("vllm:num_requests_running", {"0": 2})
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty body": (b"", "empty"),
    "blank body": (b" \n\n ", "empty"),
    "HTML": (b"<!DOCTYPE html><html><body>login</body></html>\n", "text format"),
    "JSON": (b'{"error": "not found"}\n', "text format"),
    "binary": (GOOD.encode() + b"\0\n", "text format"),
    "cut in a line": (GOOD.encode() + b"vllm:num_requests_wai", "cut"),
    "too large": (GOOD.encode() + b"# " + b"x" * MAX_PAGE_BYTES + b"\n", "bytes"),
    "a family twice": ((GOOD + GOOD.replace(" 2", " 3")).encode(), "twice"),
    "a series twice": (GOOD.encode() + b'vllm:num_requests_running{engine="0",model_name="m"} 2\n', "twice"),
    "labels without end": (b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0 2\n', "malf"),
    "somebody else's page": (b"# TYPE go_goroutines gauge\ngo_goroutines 7\n", "no vllm-v1 series"),
    "too many series": (
        b"# TYPE vllm:num_requests_running gauge\n"
        + b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % number for number in range(25_000)),
        "more than",
    ),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_case_11_a_hostile_page_is_refused_with_a_reason(name: str) -> None:
    page, reason = HOSTILE[name]
    with pytest.raises(PageError, match=reason):
        READER.read(page)


def test_case_11_a_5_mb_line_takes_no_time() -> None:
    page = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="' + b"\\" * 5_000_000 + b'"} 1\n'
    with pytest.raises(PageError, match="bytes"):
        READER.read(page)
    # The longest line that a page may have, of what a careless pattern would take minutes for.
    line = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="' + b'\\"' * 2_000_000 + b"\n"
    with pytest.raises(PageError, match="a line of"):
        READER.read(line)


def test_a_label_value_may_hold_anything() -> None:
    name = 'a b} "q" {le="9"},\\'
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    page = tbt(NEW_TBT).replace('model_name="m"', f'model_name="{escaped}"') + GOOD

    histogram = READER.read(page.encode()).histograms[Quantity.TBT]

    assert histogram.bounds_s == (0.1, math.inf)
    assert histogram.cumulative == (5, 7)


@pytest.fixture(scope="session", params=["written", "recorded"])
def loaded_page(request: pytest.FixtureRequest, vllm_page: Callable[..., bytes]) -> bytes:
    """The page of a server under load: as these tests write it, and as a real one did."""
    if request.param == "recorded":
        page: bytes = request.getfixturevalue("capture")("flags-metrics-under-load-5")
        return page
    ttft = {"0.1": 3.0, "0.5": 9.0, "2.5": 15.0, "+Inf": 16.0}
    return vllm_page(running=4, waiting=14, kv=0.9, generated=9969, computed=4616, cached=5184, finished=8, ttft=ttft)


def test_a_page_without_type_lines_reads_the_same(loaded_page: bytes) -> None:
    page = loaded_page
    bare = b"".join(line for line in page.splitlines(keepends=True) if not line.startswith(b"#"))

    assert READER.read(bare) == READER.read(page)


def test_the_filtered_page_is_asked_for_by_sample_names() -> None:
    names = VLLM_V1.sample_names()

    assert "vllm:generation_tokens_total" in names
    assert {f"vllm:time_to_first_token_seconds_{suffix}" for suffix in ("bucket", "sum", "count")} < set(names)
    assert "vllm:time_to_first_token_seconds" not in names


# Agreement with prometheus_client's parser

_LABEL_VALUES = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=8
)
_NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.floats(0, 1e6).map(repr),
    st.sampled_from(["0", "0.0", "1e3", "2.5E+2", "1.0 1700000000000"]),
)


@st.composite
def family_text(draw: st.DrawFn, family: Family) -> str:
    """One family as an exporter would write it: help, type, one to three engines, escaped label values."""
    name = draw(st.sampled_from(family.names))
    engines = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    model = draw(_LABEL_VALUES).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = [f"# HELP {name} Help, with spaces.", f"# TYPE {name} {family.kind.value}"]
    space = draw(st.sampled_from([" ", "  ", "\t"]))
    bounds = sorted(draw(st.lists(st.sampled_from([0.001, 0.1, 0.5, 1.0, 2.5, 80.0]), min_size=1, unique=True)))
    for engine in engines:
        labels = f'engine="{engine}",model_name="{model}"'
        if family.where is not None:
            for value in (family.where[1], "other"):
                lines.append(f'{name}{{{labels},{family.where[0]}="{value}"}}{space}{draw(st.integers(0, 1))}')
        elif family.kind is Kind.HISTOGRAM:
            counts = sorted(draw(st.lists(st.integers(0, 10**6), min_size=len(bounds) + 1, max_size=len(bounds) + 1)))
            for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
                lines.append(f'{name}_bucket{{{labels},le="{bound}"}}{space}{count}')
            lines += [f"{name}_count{{{labels}}} {counts[-1]}", f"{name}_sum{{{labels}}} {draw(_NUMBERS)}"]
        else:
            number = repr(draw(st.floats(0, 1))) if family.largest < 2 else draw(_NUMBERS)
            lines.append(f"{name}{{{labels}}}{space}{number}")
    return "\n".join(lines) + "\n"


_READ = {family.quantity: family for family in VLLM_V1.families if family.quantity is not Quantity.PREFIX_HIT_TOKENS}
_BY_NAMES = {family.names: family for family in _READ.values() if family.quantity is not Quantity.PROMPT_CACHE_HIT}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_agrees_with_prometheus_clients_parser(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(sorted(_BY_NAMES)), min_size=1, max_size=6, unique=True))
    texts = [data.draw(family_text(_BY_NAMES[names])) for names in chosen]
    noise = "# TYPE go_goroutines gauge\ngo_goroutines 7\n"
    page = "".join(
        [
            series("vllm:num_requests_running", {"0": 1}) if VLLM_V1.families[0].names not in chosen else "",
            noise,
            *texts,
        ]
    )

    sample = READER.read(page.encode())

    parsed = {
        (item.name, tuple(sorted(item.labels.items()))): item.value
        for metric in text_string_to_metric_families(page)
        for item in metric.samples
    }
    assert sample.rejected == 0
    for names in chosen:
        family = _BY_NAMES[names]
        expected = expected_value(family, parsed)
        if family.kind is Kind.HISTOGRAM:
            histogram = sample.histograms[family.quantity]
            assert (dict(zip(histogram.bounds_s, histogram.cumulative, strict=True)), histogram.sum_s) == expected
        else:
            assert {**sample.gauges, **sample.counters}[family.quantity] == expected


def expected_value(family: Family, parsed: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> object:
    """What the reference parser's samples amount to by the dialect's rules."""

    def values(suffix: str = "") -> list[tuple[dict[str, str], float]]:
        wanted = {name + suffix for name in family.names}
        return [(dict(labels), value) for (name, labels), value in parsed.items() if name in wanted]

    if family.kind is Kind.HISTOGRAM:
        buckets: dict[float, float] = {}
        for labels, value in values("_bucket"):
            bound = float(labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        return buckets, pytest.approx(math.fsum(value for _, value in values("_sum")))
    selected = [value for labels, value in values() if family.selects(labels)]
    if family.combine.value == "least":
        return min(selected)
    total = math.fsum(selected)
    return pytest.approx(total / len(selected) if family.combine.value == "mean" else total)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_mutation_of_a_page_gets_anything_absurd_in(data: st.DataObject, loaded_page: bytes) -> None:
    page = bytearray(loaded_page)
    start = page.find(b"# HELP vllm:num_requests_running")
    page = page[start : start + 12_000]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(page) - 1))
        piece = data.draw(st.sampled_from([b"", b"\n", b"}", b'"', b"NaN", b"-", b"e99", b"{", b"\xff", b" ", b"\\"]))
        page[at : at + data.draw(st.integers(0, 3))] = piece

    try:
        sample = READER.read(bytes(page))
    except PageError:
        return

    for value in (*sample.gauges.values(), *sample.counters.values()):
        assert math.isfinite(value)
        assert value >= 0
    for histogram in sample.histograms.values():
        assert list(histogram.cumulative) == sorted(histogram.cumulative)
        assert math.isfinite(histogram.sum_s)
