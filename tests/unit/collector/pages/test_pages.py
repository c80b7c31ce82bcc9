"""Pages of servers in several states, of several releases and engines, and of nobody's."""

import math
import re
import time

import pytest

from metrics_collector.core.page import MAX_LAYOUTS, MAX_PAGE_BYTES, Hint, PageError, PageReader
from metrics_collector.core.schema import Reading
from tests.unit.collector.pages.pagetexts import by_label, histogram, present, series
from trimtab.config.dialects import load_dialects
from trimtab.domain.signals import Latency

READER = PageReader(load_dialects())
GOOD = series("vllm:num_requests_running", {"0": 2})
OLD_TBT, NEW_TBT = "vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
OLD = series("vllm:gpu_cache_usage_perc", {"0": 0.4})
NEW = series("vllm:kv_cache_usage_perc", {"0": 0.4})
TBT_OF_7 = ({0.1: 5.0, math.inf: 7.0}, 1.5)


def read(page: str | bytes, hint: Hint | None = None) -> Reading:
    return READER.read(page.encode() if isinstance(page, str) else page, hint)[0]


def counters(**values: float) -> str:
    return "".join(series(f"vllm:{name}_total", {"0": value}, "counter") for name, value in values.items())


def sleep_states(**states: float) -> str:
    return by_label("vllm:engine_sleep_state", "sleep_state", states, "gauge")


WRITTEN: dict[str, tuple[str, dict[str, object]]] = {
    # Kept requests stay on the gauges of a server that sleeps; what queues at its door is not on them.
    "asleep, gauges frozen": (
        series("vllm:num_requests_running", {"0": 2})
        + series("vllm:num_requests_waiting", {"0": 0})
        + sleep_states(awake=0, weights_offloaded=1, discard_all=0),
        {"awake": 0, "running": 2, "waiting": 0},
    ),
    "asleep at level 0": (GOOD + sleep_states(awake=0, weights_offloaded=0, discard_all=0), {"awake": 0, "running": 2}),
    "paused, which is no sleep": (GOOD + sleep_states(awake=1), {"awake": 1, "running": 2}),
    "one engine of two asleep": (
        GOOD
        + "# TYPE vllm:engine_sleep_state gauge\n"
        + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1\n'
        + 'vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0\n',
        {"awake": 0, "running": 2},
    ),
    "aborted requests are not finished ones": (
        GOOD + by_label("vllm:request_success_total", "finished_reason", {"stop": 40, "length": 11, "abort": 16}),
        {"running": 2, "finished": 51},
    ),
    "prompt tokens by where they came from": (
        GOOD
        + by_label(
            "vllm:prompt_tokens_by_source_total",
            "source",
            {"local_compute": 700, "local_cache_hit": 300, "external_kv_transfer": 20},
        )
        + counters(prompt_tokens=1020, prompt_tokens_cached=320),
        {"running": 2, "prefill_tokens": 700, "prefill_cached_tokens": 300, "prompt_tokens": 1020},
    ),
    "prompt tokens less cached ones": (
        GOOD + counters(prompt_tokens=1000, prompt_tokens_cached=320, external_prefix_cache_hits=20),
        {"running": 2, "prefill_tokens": 680, "prefill_cached_tokens": 300, "prompt_tokens": 1000},
    ),
    "prompt tokens less hits": (
        GOOD + counters(prompt_tokens=1000, prefix_cache_hits=300, external_prefix_cache_hits=20),
        {
            "running": 2,
            "prefill_tokens": 680,
            "prefill_cached_tokens": 300,
            "prompt_tokens": 1000,
            "prefix_hits": 300,
        },
    ),
    "hits move before prompts do": (
        GOOD + counters(prompt_tokens=100, prefix_cache_hits=300),
        {"running": 2, "prefill_tokens": 0, "prefill_cached_tokens": 300, "prompt_tokens": 100, "prefix_hits": 300},
    ),
    # Of 0.8, in blocks: a ratio, but no tokens.
    "hits in blocks": (
        GOOD + counters(prompt_tokens=100, gpu_prefix_cache_hits=3, gpu_prefix_cache_queries=6),
        {"running": 2, "prefill_tokens": 100, "prompt_tokens": 100, "prefix_hits": 3, "prefix_queries": 6},
    ),
    "time in prefill": (
        GOOD + histogram("vllm:request_prefill_time_seconds"),
        {"running": 2, "prefill_seconds": 1.5, "prefill_requests": 7},
    ),
    "two engines, idle": (
        "# TYPE vllm:time_to_first_token_seconds histogram\n"
        + "".join(
            f'vllm:time_to_first_token_seconds_bucket{{engine="{engine}",le="+Inf",model_name="m"}} 0\n'
            f'vllm:time_to_first_token_seconds_count{{engine="{engine}",model_name="m"}} 0\n'
            f'vllm:time_to_first_token_seconds_sum{{engine="{engine}",model_name="m"}} 0\n'
            for engine in (0, 1)
        )
        + series("vllm:generation_tokens_total", {"0": 0, "1": 0}, "counter"),
        {"decode_tokens": 0, "ttft": ({math.inf: 0}, 0)},
    ),
    "two models on one server": (
        (
            '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="a"} 3\n'
            'vllm:num_requests_running{model_name="b"} 4\n'
        ),
        {"running": 7},
    ),
    "a counter without its suffix": (
        "# TYPE vllm:generation_tokens counter\nvllm:generation_tokens 12\n",
        {"decode_tokens": 12},
    ),
    "OpenMetrics": (
        (
            '# TYPE vllm:num_requests_running gauge\nvllm_num_requests_running{engine="0"} 4.0\n'
            '# TYPE vllm:generation_tokens counter\nvllm_generation_tokens_total{engine="0"} 12 # {trace_id="x"} 1\n'
            'vllm_generation_tokens_created{engine="0"} 1.7e+09\n# EOF\n'
        ),
        {"running": 4, "decode_tokens": 12},
    ),
    "lines that end as on Windows": (
        GOOD.replace("\n", "\r\n") + histogram(NEW_TBT).replace("\n", "\r\n"),
        {"running": 2, "tbt": TBT_OF_7},
    ),
    "V0": (
        series("vllm:num_requests_swapped", {"0": 0}) + GOOD + counters(prompt_tokens=90) + histogram(OLD_TBT),
        {"running": 2, "prefill_tokens": 90, "prompt_tokens": 90, "tbt": TBT_OF_7},
    ),
    "SGLang with the names of 2024": (
        series("sglang:num_requests_running", {"0": 3})
        + series("sglang:num_requests_waiting", {"0": 1})
        + series("sglang:cache_hit_rate", {"0": 10.61}),
        {"running": 3, "waiting": 1},
    ),
    "SGLang with both names": (
        series("sglang:num_requests_running", {"0": 3}) + series("sglang:num_running_reqs", {"0": 4}),
        {"running": 4},
    ),
    "SGLang whose names have an underscore": (
        series("sglang_num_running_reqs", {"0": 4}) + series("sglang_generation_tokens_total", {"0": 9}, "counter"),
        {"running": 4, "decode_tokens": 9},
    ),
    # Ranks of one engine repeat it, ranks of data parallelism add; a total beside its parts by priority.
    "SGLang ranks and priorities": (
        (
            "# TYPE sglang:num_running_reqs gauge\n"
            'sglang:num_running_reqs{dp_rank="0",tp_rank="0",priority=""} 5\n'
            'sglang:num_running_reqs{dp_rank="0",tp_rank="0",priority="1"} 5\n'
            'sglang:num_running_reqs{dp_rank="0",tp_rank="1",priority=""} 5\n'
            'sglang:num_running_reqs{dp_rank="1",tp_rank="2",priority=""} 3\n'
        ),
        {"running": 8},
    ),
    "SGLang's cached tokens by source": (
        series("sglang:num_running_reqs", {"0": 0})
        + series("sglang:prompt_tokens_total", {"0": 1000}, "counter")
        + by_label("sglang:cached_tokens_total", "cache_source", {"device": 200, "host": 100}),
        {
            "running": 0,
            "prefill_tokens": 700,
            "prefill_cached_tokens": 300,
            "prompt_tokens": 1000,
            "prefix_queries": 1000,
            "prefix_hits": 300,
        },
    ),
    "SGLang's tokens as they come": (
        series("sglang:generation_tokens_total", {"0": 10}, "counter")
        + by_label("sglang:realtime_tokens_total", "mode", {"prefill_compute": 90, "prefill_cache": 60, "decode": 40}),
        {
            "prefill_tokens": 90,
            "prefill_cached_tokens": 60,
            "decode_tokens": 40,
            "prefix_queries": 150,
            "prefix_hits": 60,
        },
    ),
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_page_says_what_stands_on_it(name: str) -> None:
    page, expected = WRITTEN[name]

    reading = read(page)

    assert present(reading) == expected
    assert reading.rejected == 0


def test_a_server_without_statistics_is_no_idle_server() -> None:
    page = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7e+09\n"
    page += '# TYPE http_requests_total counter\nhttp_requests_total{handler="none",method="GET",status="4xx"} 2.0\n'
    with pytest.raises(PageError, match="statistics off"):
        read(page)


@pytest.mark.parametrize("order", [("0", "1", "2", "3"), ("3", "1", "0", "2"), ("1", "2", "3", "0")])
def test_case_9_data_parallel_engines_add_up(order: tuple[str, ...]) -> None:
    running = {"0": 10.0, "1": 0.0, "2": 0.0, "3": 0.0}
    kv = {"0": 0.8, "1": 0.2, "2": 0.0, "3": 0.0}
    page = series("vllm:num_requests_running", {engine: running[engine] for engine in order})
    page += series("vllm:kv_cache_usage_perc", {engine: kv[engine] for engine in order})

    found = present(read(page))

    assert found == {"running": 10.0, "kv_usage_ratio": pytest.approx(0.25), "kv_usage_max_ratio": 0.8}


@pytest.mark.parametrize(
    "families",
    [
        OLD + histogram(OLD_TBT),
        NEW + histogram(NEW_TBT),
        # Were the two read a moment apart, they could differ; then the newer one counts, in either order.
        OLD.replace("0.4", "0.5") + NEW + histogram(OLD_TBT, count=9) + histogram(NEW_TBT),
        NEW + OLD.replace("0.4", "0.5") + histogram(NEW_TBT) + histogram(OLD_TBT, count=9),
    ],
    ids=["old names only", "new names only", "both, old first", "both, new first"],
)
def test_case_10_a_renamed_family_is_one_signal_in_any_release(families: str) -> None:
    found = present(read(GOOD + families))

    assert found == {"running": 2.0, "kv_usage_ratio": 0.4, "kv_usage_max_ratio": 0.4, "tbt": TBT_OF_7}


def test_case_10_a_fleet_half_way_through_an_upgrade_shows_one_signal() -> None:
    reader = PageReader(load_dialects())
    old, both, new = (
        (GOOD + families).encode()
        for families in (
            OLD + histogram(OLD_TBT),
            OLD + NEW + histogram(OLD_TBT) + histogram(NEW_TBT),
            NEW + histogram(NEW_TBT),
        )
    )
    hints: list[Hint | None] = [None] * 4
    total = 0.0
    # Four servers, upgraded one after another, over the release that has both names.
    for pages in ([old] * 4, [both, old, old, old], [new, both, old, old], [new, new, both, both], [new] * 4):
        readings = []
        for place, page in enumerate(pages):
            reading, hints[place] = reader.read(page, hints[place])
            readings.append(reading)
        total = sum(reading.values[2] for reading in readings)
        assert total == pytest.approx(1.6)
        assert {reading.schema for reading in readings} == {read(new).schema}
        assert [present(reading)["tbt"] for reading in readings] == [TBT_OF_7] * 4


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e308", "-1", "", "1_000", "0x10", "abc", "١", "nan(7)"])
def test_case_6_an_absurd_value_is_refused_and_counted(value: str) -> None:
    page = GOOD + series("vllm:num_requests_waiting", {"0": 1, "1": value})
    page += series("vllm:generation_tokens_total", {"0": value}, "counter")
    _, hint = READER.read(page.replace(f" {value}\n", " 1\n").encode(), None)

    for reading in (read(page), read(page, hint)):
        assert present(reading) == {"running": 2.0}, "a part of a sum must not stand for the sum"
        assert reading.rejected == 2


@pytest.mark.parametrize("value", ["NaN", "-1", "1e308"])
def test_case_6_a_computed_column_goes_with_what_it_comes_from(value: str) -> None:
    page = GOOD + counters(prompt_tokens=1000, prompt_tokens_cached=300, prefix_cache_hits=300).replace(
        " 300", f" {value}", 1
    )

    assert present(read(page)) == {"running": 2.0, "prompt_tokens": 1000, "prefix_hits": 300}


@pytest.mark.parametrize("value", ["NaN", "Inf", "-3", "1e300", ""])
@pytest.mark.parametrize("part", ["low", "count", "total"])
def test_case_6_a_histogram_with_one_absurd_number_is_refused_whole(part: str, value: str) -> None:
    whole = read(GOOD + histogram(NEW_TBT))
    reading = read(GOOD + histogram(NEW_TBT, **{part: value}))

    assert present(reading) == {"running": 2.0}
    assert reading.rejected == 1
    assert reading.schema is whole.schema, "the row keeps its columns"


def test_a_ratio_that_a_rounding_takes_above_one_is_one() -> None:
    assert present(read(GOOD + NEW.replace("0.4", "1.0000000002")))["kv_usage_max_ratio"] == 1.0
    assert read(GOOD + NEW.replace("0.4", "1.01")).rejected == 1


ODD = {
    "no +Inf bucket": histogram(NEW_TBT).replace('le="+Inf"', 'le="5"'),
    "falling buckets": histogram(NEW_TBT, low=9),
    "another count than the last bucket": re.sub("(_count.*) 7", r"\1 8", histogram(NEW_TBT)),
    "no count": histogram(NEW_TBT).replace("_count", "_number"),
    "no sum": histogram(NEW_TBT).replace("_sum", "_number"),
    "no bound": histogram(NEW_TBT).replace('le="0.1"', 'le="x"'),
    "a bound twice": histogram(NEW_TBT).replace('le="+Inf"', 'le="0.10"'),
    "a count of another series": histogram(NEW_TBT).replace("seconds_count{engine", 'seconds_count{a="b",engine'),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ODD))
def test_a_histogram_that_does_not_add_up_is_refused(name: str) -> None:
    reading = read(GOOD + ODD[name])

    assert present(reading) == {"running": 2.0}
    assert reading.rejected == 1


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
    "a series twice in another order": (
        GOOD.encode() + b'vllm:num_requests_running{model_name="m",engine="0"} 2\n',
        "twice",
    ),
    "labels without end": (b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0 2\n', "malf"),
    "no line of a sample": (GOOD.encode() + b"!?\n", "malformed"),
    "somebody else's page": (b"# TYPE go_goroutines gauge\ngo_goroutines 7\n", "no series of vllm-v0, vllm-v1, sglang"),
    "a family without a series": (b"# TYPE vllm:num_requests_running gauge\n", "no vllm-v1 series"),
    "too many series": (
        b"# TYPE vllm:num_requests_running gauge\n"
        + b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % number for number in range(25_000)),
        "more than",
    ),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_case_11_a_hostile_page_is_refused_with_a_reason_in_one_line(name: str) -> None:
    page, reason = HOSTILE[name]
    with pytest.raises(PageError, match=reason) as refused:
        read(page)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("piece", [b"\\", b'\\"', b"a", b'x",a="', b"{"])
def test_case_11_a_5_mb_line_takes_no_time(piece: bytes) -> None:
    start = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="'
    began = time.process_time()
    for count, reason in ((5_000_000, "bytes"), (3_900_000, "a line of"), (60_000, "malformed")):
        with pytest.raises(PageError, match=reason):
            read(start + piece * (count // len(piece)) + b"\n")
    assert time.process_time() - began < 1.0


def test_case_11_a_value_that_is_a_5_mb_line_is_no_value_on_a_known_page() -> None:
    _, hint = READER.read(GOOD.encode(), None)
    with pytest.raises(PageError, match="a line of"):
        read(GOOD.replace(" 2", " 2" + " 1" * 100_000), hint)


def test_a_label_value_may_hold_anything() -> None:
    name = 'a b} "q" {le="9"},\\'
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')

    found = present(read(histogram(NEW_TBT).replace('model_name="m"', f'model_name="{escaped}"') + GOOD))

    assert found["tbt"] == TBT_OF_7


def test_a_page_without_type_lines_reads_the_same() -> None:
    page = GOOD + NEW + histogram(NEW_TBT) + counters(generation_tokens=9, prompt_tokens=4)
    bare = re.sub("# TYPE .*\n", "", page)

    assert present(read(bare)) == present(read(page))
    assert len(present(read(bare))) == 7


def test_servers_whose_pages_are_alike_share_one_layout() -> None:
    reader = PageReader(load_dialects())
    hints = {reader.read(GOOD.replace(" 2", f" {number}").encode(), None)[1] for number in range(100)}

    assert len(hints) == reader.layouts_kept == 1


def test_case_11_ever_new_layouts_do_not_fill_the_memory() -> None:
    reader = PageReader(load_dialects())
    for number in range(MAX_LAYOUTS + 500):
        reading, hint = reader.read(GOOD.replace('"m"', f'"{number}"').encode(), None)
        assert reading.values[0] == 2.0
    again, _ = reader.read(GOOD.replace('"m"', '"0"').encode(), Hint("vllm-v1", b"long forgotten"))

    assert reader.layouts_kept == MAX_LAYOUTS
    assert reader.layouts_bytes < 16 * 1024 * 1024
    assert again.values[0] == 2.0
    assert hint.dialect == "vllm-v1"


def test_the_filtered_page_is_asked_for_by_sample_names() -> None:
    names = READER.sample_names("vllm-v1")

    assert "vllm:generation_tokens_total" in names
    assert {f"vllm:time_to_first_token_seconds_{suffix}" for suffix in ("bucket", "sum", "count")} < set(names)
    # Of the time in prefill no bucket is read.
    assert {"vllm:request_prefill_time_seconds_sum", "vllm:request_prefill_time_seconds_count"} < set(names)
    assert "vllm:request_prefill_time_seconds_bucket" not in names
    assert "vllm:time_to_first_token_seconds" not in names
    assert not any(name.startswith("sglang") for name in names)


def test_a_server_of_an_unknown_engine_is_asked_for_every_dialects_names() -> None:
    names = set(READER.sample_names())

    for dialect in load_dialects():
        assert set(dialect.sample_names()) <= names
        assert set(dialect.marks) <= names


def test_latencies_stand_in_their_order_whatever_the_pages_is() -> None:
    page = GOOD + histogram(NEW_TBT) + histogram("vllm:time_to_first_token_seconds", count=8)

    assert [latency for latency, _ in read(page).schema.bounds_s] == [Latency.TTFT, Latency.TBT]
