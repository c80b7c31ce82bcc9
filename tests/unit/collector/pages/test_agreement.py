"""Agreement with prometheus_client's parser, and of the short way through a page with the long one."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from metrics_collector.core.page import PageError, PageReader
from metrics_collector.core.schema import Reading
from tests.support.properties import costly
from tests.unit.collector.pages.pagetexts import COMPUTED, by_reference, page_text, present, reference_samples
from trimtab.config.dialects import load_dialects
from trimtab.domain.dialects.model import Dialect

DIALECTS = {dialect.name: dialect for dialect in load_dialects()}
ANY_PAGE = st.sampled_from(sorted(DIALECTS)).flatmap(
    lambda name: page_text(DIALECTS[name]).map(lambda page: (name, page))
)
# One reader for all pages, so that the layouts that it remembers are those of other pages.
READER = PageReader(load_dialects())


def agree(dialect: Dialect, reading: Reading, page: str) -> None:
    found = {name: value for name, value in present(reading).items() if name not in COMPUTED}
    expected = {
        name: value for name, value in by_reference(dialect, reference_samples(page)).items() if name not in COMPUTED
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, tuple):
            buckets, total = found[name]  # type: ignore[misc]
            assert (buckets, total) == (value[0], pytest.approx(value[1], rel=1e-12)), name
        else:
            assert found[name] == pytest.approx(value, rel=1e-12), name


@pytest.mark.timeout(600)
@costly(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(named=ANY_PAGE)
def test_agrees_with_prometheus_clients_parser_on_any_page_that_it_accepts(named: tuple[str, str]) -> None:
    name, page = named
    reading, hint = READER.read(page.encode(), None)

    assert hint.dialect == name
    assert reading.rejected == 0
    agree(DIALECTS[name], reading, page)


def test_agrees_with_prometheus_clients_parser_on_every_recorded_page(material: Path) -> None:
    pages = [gzip.decompress(path.read_bytes()) for path in sorted((material / "vllm" / "captures").glob("*.prom.gz"))]
    pages += [path.read_bytes() for path in sorted((material / "data" / "metrics").iterdir())]

    read = 0
    for page in pages:
        if b"num_r" not in page and b"generation_tokens_total" not in page:
            continue
        reading, hint = READER.read(page, None)
        agree(DIALECTS[hint.dialect], reading, page.decode())
        read += 1
    assert read >= len(pages) - 1


def outcome(reader: PageReader, page: bytes, hint: object) -> object:
    try:
        reading, found = reader.read(page, hint)  # type: ignore[arg-type]
    except PageError as error:
        return str(error)
    return (reading.schema, tuple(map(repr, reading.values)), reading.rejected, found.dialect)


@costly(max_examples=300, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_page_reads_the_same_whatever_page_came_before(data: st.DataObject) -> None:
    _, before = data.draw(ANY_PAGE)
    lines = before.encode().split(b"\n")
    for _ in range(data.draw(st.integers(0, 3))):
        at, other = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        change = data.draw(st.sampled_from(["swap", "double", "drop", "value", "space", "label", "type"]))
        if change == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif change == "double":
            lines.insert(other, lines[at])
        elif change == "drop" and len(lines) > 2:
            del lines[at]
        else:
            old, new = {
                "value": (b" ", b" 1"), "space": (b" ", b"  "), "label": (b'="', b'="x'), "type": (b"vllm:", b"vllm_"),
            }.get(change, (b"", b""))  # fmt: skip
            lines[at] = lines[at].replace(old, new, 1) if old else lines[at]
    page = b"\n".join(lines)
    reader = PageReader(load_dialects())
    _, hint = reader.read(before.encode(), None)

    assert outcome(reader, page, hint) == outcome(PageReader(load_dialects()), page, None)


def test_a_server_without_labels_that_gets_some_is_read_by_its_labels() -> None:
    reader = PageReader(load_dialects())
    page = (
        b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 4\n# TYPE vllm:engine_sleep_state gauge\n"
    )
    bare, labelled = page + b"vllm:engine_sleep_state 1\n", page + b'vllm:engine_sleep_state {sleep_state="awake"} 1\n'
    reading, hint = reader.read(bare, None)

    again, _ = reader.read(labelled, hint)

    assert "awake" not in present(reading)
    assert present(again) == {"running": 4.0, "awake": 1.0}
