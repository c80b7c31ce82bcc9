"""Mappings that people write: what they give, and what is said of a bad one."""

import re
from pathlib import Path

import pytest

from metrics_collector.core.page import PageReader
from metrics_collector.core.parser.row import COLUMN
from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, SCALARS
from tests.unit.collector.pages.pagetexts import histogram, present, series
from trimtab.config.dialects import DialectError, load_dialects, parse_dialects, shipped_dialects
from trimtab.domain.dialects.model import QUANTITIES
from trimtab.domain.signals import Latency

DOCS = Path(__file__).parents[4] / "docs" / "dialects.md"
GOOD = """
name: mine
marks: ["my_running"]
required: [running]
families:
  running: {names: ["my_running"]}
"""
MY_PAGE = series("my_running", {"0": 3})


def reader_of(text: str, folder: Path) -> PageReader:
    path = folder / "mine.yaml"
    path.write_text(text)
    return PageReader(load_dialects([path]))


@pytest.fixture(scope="module")
def example() -> str:
    found = re.search("```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_example_in_the_docs_reads_an_engine_of_ones_own(example: str, tmp_path: Path) -> None:
    page = (
        series("myengine_active", {"0": 3})
        + '# TYPE myengine_requests_queued gauge\nmyengine_requests_queued{queue="live"} 2\n'
        + 'myengine_requests_queued{queue="batch"} 90\n'
        + series("myengine_cache_percent", {"0": 50, "1": 60})
        + "# TYPE myengine_output_tokens_total counter\n"
        + 'myengine_output_tokens_total{tp_rank="0"} 700\nmyengine_output_tokens_total{tp_rank="1"} 699\n'
        + histogram("myengine_first_token_milliseconds", total=1500).replace('le="0.1"', 'le="250"')
    )
    page = "# TYPE myengine_requests_active gauge\n" + page

    reading, hint = reader_of(example, tmp_path).read(page.encode(), None)
    found = present(reading)
    buckets, total_s = found.pop("ttft")  # type: ignore[misc]

    assert found == {"running": 3, "waiting": 2, "kv_usage_ratio": pytest.approx(0.55), "decode_tokens": 700}
    assert buckets == {0.25: 5, float("inf"): 7}
    assert total_s == pytest.approx(1.5)
    assert hint.dialect == "my-engine"


def test_the_example_in_the_docs_extends_a_shipped_dialect(example: str, tmp_path: Path) -> None:
    page = series("vllm:num_requests_running", {"0": 2}) + series("vllm:num_requests_waiting", {"0": 5})
    page += series("vllm:num_preemptions_total", {"0": 5}, "counter")
    reader = reader_of(example, tmp_path)

    proxied, hint = reader.read((page + series("proxy_queue_length", {"0": 8})).encode(), None)
    plain, _ = reader.read(page.encode(), hint)

    assert present(proxied) == {"running": 2, "waiting": 8}
    assert present(plain) == {"running": 2, "waiting": 5, "preemptions": 5}


def test_the_docs_name_every_shipped_dialect_and_its_marks() -> None:
    text = DOCS.read_text()

    for dialect in shipped_dialects():
        assert f"| `{dialect.name}` |" in text
        assert all(f"`{mark}`" in text for mark in dialect.marks)


BAD = {
    "an unknown key": (GOOD + "  waiting: {nmes: [x]}\n", "families.waiting.nmes: unknown key"),
    "a key too many": (GOOD.replace("names:", "unit: s, names:"), "families.running.unit: unknown key"),
    "an unknown key at the top": (GOOD + "family: {}\n", "family: unknown key"),
    "an unknown quantity": (GOOD + "  runing: {names: [x]}\n", "families.runing: must be one of running, waiting, "),
    "a bad sample name": (GOOD.replace('["my_running"]}', '["my running"]}'), "families.running.names.0: "),
    "no names": (GOOD.replace('["my_running"]}', "[]}"), "families.running.names: "),
    "a name that is a number": (GOOD.replace('["my_running"]}', "[7]}"), "families.running.names.0: "),
    "a combine that there is not": (GOOD.replace("names:", "combine: sum, names:"), "families.running.combine: "),
    "a histogram's mean": (
        GOOD + "  ttft: {names: [x], combine: mean}\n",
        "families.ttft.combine: histograms only add",
    ),
    "a scale of nothing": (GOOD.replace("names:", "scale: 0, names:"), "families.running.scale: "),
    "an infinite limit": (GOOD.replace("names:", "largest: .inf, names:"), "families.running.largest: "),
    "a ratio above one": (GOOD + "  awake: {names: [x], largest: 5}\n", "families.awake.largest: "),
    "no marks": (GOOD.replace('marks: ["my_running"]', ""), "marks: missing"),
    "nothing required": (GOOD.replace("required: [running]", ""), "required: "),
    "required and not read": (GOOD.replace("required: [running]", "required: [waiting]"), "required: "),
    "a name in capitals": (GOOD.replace("name: mine", "name: Mine"), "name: "),
    "a stranger extended": (GOOD + "extends: vllm-v7\n", "extends: there is no dialect vllm-v7"),
    "a list": ("- 1\n", "document: "),
    "nothing": ("\n", "no dialect in it"),
    "no YAML": ("name: [", "m.yaml:"),
    "a key twice": (GOOD + "name: again\n", "given twice"),
    "a dialect twice": (GOOD + "---" + GOOD, "name: mine is there twice"),
    "a large file": ("#" * 300_000, "larger than"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_mapping_is_refused_in_one_line_that_names_file_and_field(name: str) -> None:
    text, message = BAD[name]
    with pytest.raises(DialectError) as refused:
        parse_dialects(text, source="m.yaml", known=shipped_dialects())

    assert str(refused.value).startswith("m.yaml")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DialectError, match=r"absent\.yaml"):
        load_dialects([tmp_path / "absent.yaml"])


def test_a_dialect_of_a_shipped_name_takes_its_place(tmp_path: Path) -> None:
    reader = reader_of(GOOD.replace("name: mine", "name: vllm-v1"), tmp_path)

    reading, hint = reader.read(MY_PAGE.encode(), None)

    assert (hint.dialect, present(reading)) == ("vllm-v1", {"running": 3})
    assert reader.sample_names("vllm-v1") == ("my_running",)


def test_a_file_may_extend_what_the_one_before_it_defines(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(GOOD)
    second.write_text("{name: more, extends: mine, marks: [more], families: {waiting: {names: [more]}}}")

    dialects = load_dialects([first, second])

    assert [dialect.name for dialect in dialects] == ["more", "mine", "vllm-v0", "vllm-v1", "sglang"]
    assert dialects[0].sample_names() == ("more", "my_running")


def test_aliases_of_one_model_count_once_where_a_mapping_says_so(tmp_path: Path) -> None:
    text = GOOD.replace("names:", "copies: [model_name], names:") + "  ttft: {names: [t], copies: [model_name]}\n"
    page = '# TYPE my_running gauge\nmy_running{model_name="a"} 3\nmy_running{model_name="b"} 3\n'
    one = histogram("t").splitlines(keepends=True)
    page += "".join(one) + "".join(one[1:]).replace('model_name="m"', 'model_name="n"')

    found = present(reader_of(text, tmp_path).read(page.encode(), None)[0])

    assert found == {"running": 3, "ttft": ({0.1: 5.0, float("inf"): 7.0}, 1.5)}


# vLLM release → of the families read, the names that it has, by the source of each release.
RELEASES = {
    "0.8.5": "gpu_cache_usage_perc gpu_prefix_cache_hits_total time_per_output_token_seconds generation_tokens_total",
    "0.10.2": "kv_cache_usage_perc gpu_cache_usage_perc prefix_cache_hits_total gpu_prefix_cache_hits_total "
    "inter_token_latency_seconds time_per_output_token_seconds generation_tokens_total",
    "0.12.0": "kv_cache_usage_perc prefix_cache_hits_total inter_token_latency_seconds time_per_output_token_seconds "
    "request_time_per_output_token_seconds external_prefix_cache_hits_total engine_sleep_state generation_tokens_total",
    "0.32.0": "kv_cache_usage_perc prefix_cache_hits_total inter_token_latency_seconds engine_sleep_state "
    "request_time_per_output_token_seconds prompt_tokens_by_source_total prompt_tokens_cached_total",
}


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_every_name_of_a_release_is_asked_for(release: str) -> None:
    names = set(PageReader(shipped_dialects()).sample_names("vllm-v1"))
    wanted = [f"vllm:{name}" for name in RELEASES[release].split()]

    assert [name for name in wanted if name not in names and f"{name}_bucket" not in names] == []


def test_no_family_of_the_table_of_releases_is_read_under_a_name_that_no_release_has(material: Path) -> None:
    table = (material / "vllm" / "metric-names-by-version.txt").read_text()
    known = {line.split()[0].removesuffix("_total") for line in table.splitlines() if line.startswith("vllm:")}
    vllm_v1 = next(dialect for dialect in shipped_dialects() if dialect.name == "vllm-v1")

    read = {name for family in vllm_v1.families for name in family.names if name.startswith("vllm:")}

    assert len(read) == 24
    assert {re.sub("_(total|sum|count)$", "", name) for name in read} <= known


def test_a_quantity_stands_in_the_column_of_its_name_and_no_name_is_given_twice() -> None:
    assert len(set(QUANTITIES)) == len(QUANTITIES), "equal names are one key"
    assert {name: COLUMN[name] for name in (*GAUGE_COLUMN, *COUNTER_COLUMN)} == {**GAUGE_COLUMN, **COUNTER_COLUMN}
    assert sorted(COLUMN.values())[SCALARS:] == [COLUMN[name] for name in QUANTITIES if name not in Latency][SCALARS:]
