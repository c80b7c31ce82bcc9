"""The fast page against prometheus_client's own rendering, before and after changes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as RealCounter
from prometheus_client import Gauge as RealGauge
from prometheus_client import Histogram as RealHistogram
from prometheus_client import Summary as RealSummary
from prometheus_client.utils import floatToGoString

from simulator.server.exposition import Counter, Gauge, Histogram, Page, Summary, format_labels, format_value

LABELS = (("model", 'a"b\\c'), ("engine", "0"))
_CREATED = re.compile(r"(_created\S*) \S+")


def without_times(page: str) -> str:
    return _CREATED.sub(r"\1 T", page)


# Adding zero turns -0.0, which no family holds, into 0.0.
@given((st.floats(allow_nan=False) | st.integers(-10, 10**12).map(float)).map(lambda value: value + 0.0))
def test_values_are_written_as_prometheus_client_writes_them(value: float) -> None:
    assert format_value(value) == floatToGoString(value)


def test_labels_are_escaped_and_sorted() -> None:
    assert format_labels((("b", "x\ny"), ("a", 'q"\\'))) == '{a="q\\"\\\\",b="x\\ny"}'
    assert format_labels(()) == ""


def test_a_page_is_what_prometheus_client_renders_also_after_every_change() -> None:
    registry = CollectorRegistry()
    names = [name for name, _ in LABELS]
    page = Page(lambda: None)
    gauge, real_gauge = (
        page.add(Gauge("g", "A gauge.", (LABELS,))),
        RealGauge("g", "A gauge.", names, registry=registry),
    )
    counter = page.add(Counter("c_total", "A counter.", (LABELS,), created_s=1.0))
    real_counter = RealCounter("c", "A counter.", names, registry=registry)
    histogram = page.add(Histogram("h", "A histogram.", (0.5, 1.0), (LABELS,), created_s=1.0))
    real_histogram = RealHistogram("h", "A histogram.", names, buckets=(0.5, 1.0), registry=registry)
    summary = page.add(Summary("s", "A summary."))
    real_summary = RealSummary("s", "A summary.", names, registry=registry)
    for real in (real_gauge, real_counter, real_histogram):
        real.labels(*(value for _, value in LABELS))
    values = [value for _, value in LABELS]

    def same() -> None:
        ours = re.sub(r" (0|\d+)\.0$", r" \1.0", page.render(), flags=re.M)
        assert without_times(ours) == without_times(generate_latest(registry).decode())

    same()
    gauge.set(2.5, LABELS)
    real_gauge.labels(*values).set(2.5)
    same()
    counter.add(1234567.0, LABELS)
    real_counter.labels(*values).inc(1234567)
    same()
    for value in (0.5, 0.7, 3.0):
        histogram.observe(value, LABELS)
        real_histogram.labels(*values).observe(value)
        same()
    summary.observe(7.0, LABELS, now_s=5.0)
    real_summary.labels(*values).observe(7.0)
    same()
    gauge.set(0.25, LABELS)
    real_gauge.labels(*values).set(0.25)
    same()


def test_many_equal_observations_count_at_once() -> None:
    one, many = Histogram("h", "x", (1.0,)), Histogram("h", "x", (1.0,))
    for _ in range(3):
        one.observe(0.5)
    many.observe(0.5, times=3)
    assert one.text() == many.text()
    assert many.count() == 3


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["c_total"], ["# HELP c_total x", "# TYPE c_total counter", "c_total 0.0"]),
        (["c_created"], ["# HELP c_created x", "# TYPE c_created gauge", "c_created 9.0"]),
        (["h_sum", "nothing"], ["# HELP h y", "# TYPE h histogram", "h_sum 0.0"]),
        (["c"], []),
    ],
)
def test_a_filter_works_by_sample_name(names: list[str], lines: list[str]) -> None:
    page = Page(lambda: None)
    page.add(Counter("c_total", "x", created_s=9.0))
    page.add(Histogram("h", "y", (1.0,)))
    assert page.render_filtered(names).splitlines() == lines
