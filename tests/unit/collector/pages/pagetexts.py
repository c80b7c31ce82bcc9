"""Pages as tests write them, and what a reference parser makes of a page by a dialect's rules."""

import math
import re
from collections.abc import Mapping

from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, Reading
from trimtab.domain.dialects.model import Combine, Dialect, Family, Kind, counter_spellings
from trimtab.domain.signals import Counter, Latency

COLUMNS: Mapping[str, int] = {
    **{gauge.value: column for gauge, column in GAUGE_COLUMN.items()},
    **{counter.value: column for counter, column in COUNTER_COLUMN.items()},
}
COMPUTED = frozenset({"prefill_tokens", "prefill_cached_tokens"})


def series(name: str, values: Mapping[str, float | str], kind: str = "gauge") -> str:
    """A family with one series an engine."""
    lines = [f'{name}{{engine="{engine}",model_name="m"}} {value}' for engine, value in values.items()]
    return "\n".join([f"# TYPE {name} {kind}", *lines, ""])


def by_label(name: str, label: str, values: Mapping[str, float], kind: str = "counter") -> str:
    """A family with one series for each value of ``label``."""
    lines = [f'{name}{{engine="0",model_name="m",{label}="{which}"}} {value}' for which, value in values.items()]
    return "\n".join([f"# TYPE {name} {kind}", *lines, ""])


def histogram(name: str, *, low: float | str = 5, count: float | str = 7, total: float | str = 1.5) -> str:
    """A histogram of one engine with the bounds 0.1 and +Inf."""
    label = 'engine="0",model_name="m"'
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{{label},le="0.1"}} {low}\n{name}_bucket{{{label},le="+Inf"}} {count}\n'
        f"{name}_count{{{label}}} {count}\n{name}_sum{{{label}}} {total}\n"
    )


def present(reading: Reading) -> dict[str, object]:
    """A reading by names without what is absent: numbers, and of a latency (bound → count, sum)."""
    found: dict[str, object] = {
        name: reading.values[column] for name, column in COLUMNS.items() if not math.isnan(reading.values[column])
    }
    for latency, bounds in reading.schema.bounds_s:
        at = reading.schema.histograms[latency]
        if not math.isnan(reading.values[at.sum]):
            cumulative = reading.values[at.first : at.last + 1]
            found[latency.value] = (dict(zip(bounds, cumulative, strict=True)), reading.values[at.sum])
    return found


Samples = Mapping[str, list[tuple[dict[str, str], float]]]


def reference_samples(page: str) -> Samples:
    """The samples of a page by name, as prometheus_client reads it; OpenMetrics' names back in vLLM's spelling."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for metric in text_string_to_metric_families(page):
        for item in metric.samples:
            found.setdefault(re.sub("^vllm_", "vllm:", item.name), []).append((dict(item.labels), item.value))
    return found


def by_reference(dialect: Dialect, samples: Samples) -> dict[str, object]:
    """What stands on a page by the dialect's rules, reckoned plainly; computed columns left out."""
    found: dict[str, object] = {}
    for family in dialect.families:
        if family.quantity.value not in COLUMNS and family.kind is not Kind.HISTOGRAM:
            continue
        value = _histogram(family, samples) if family.kind is Kind.HISTOGRAM else _scalar(family, samples)
        if value is not None:
            found[family.quantity.value] = value
    return found


def _scalar(family: Family, samples: Samples) -> float | None:
    spellings = [other for name in family.names for other in counter_spellings(name, family.kind)]
    for name in (*family.names, *spellings):
        groups: dict[tuple[tuple[str, str], ...], float] = {}
        for labels, value in samples.get(name, []):
            if family.selects(labels):
                key = tuple(sorted(item for item in labels.items() if item[0] not in family.copies))
                groups[key] = max(groups.get(key, 0.0), value)
        if groups:
            values = list(groups.values())
            if family.combine is Combine.LEAST:
                return min(values)
            if family.combine is Combine.MAXIMUM:
                return max(values)
            total = math.fsum(values) * family.scale
            return total / len(values) if family.combine is Combine.MEAN else total
    return None


def _histogram(family: Family, samples: Samples) -> tuple[dict[float, float], float] | None:
    for name in family.names:
        buckets: dict[float, float] = {}
        for labels, value in samples.get(name + "_bucket", []):
            bound = float(labels["le"]) * family.scale
            buckets[bound] = buckets.get(bound, 0.0) + value
        if buckets:
            return buckets, math.fsum(value for _, value in samples[name + "_sum"]) * family.scale
    return None


# Pages that an exporter could write

# What StringIO and str.splitlines take for the end of a line is left to the mutations.
LABEL_VALUES = st.text(
    st.characters(codec="utf-8", exclude_characters="\x00\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=8
)
NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str),
    st.integers(0, 10**6).map(lambda number: f"{number}.0"),
    st.floats(0, 1e6).map(repr),
    st.sampled_from(["0", "0.0", "1e3", "2.5E+2", "1.0 1700000000000", "+7", "8.128902e+05"]),
)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@st.composite
def family_text(draw: st.DrawFn, family: Family, *, name: str, engines: list[int], model: str) -> str:
    """One family as an exporter would write it: help, type, some engines, escaped label values, odd spaces."""
    lines = [f"# HELP {name} Help, with spaces."] if draw(st.booleans()) else []
    lines.append(f"# TYPE {name} {family.kind.value}")
    space = draw(st.sampled_from([" ", " ", " ", "  ", "\t"]))
    comma = draw(st.sampled_from(["", "", ","]))
    for engine in engines:
        labels = f'engine="{engine}",model_name="{escaped(model)}"'
        if family.kind is Kind.HISTOGRAM:
            lines += draw(_histogram_lines(name, labels, space))
            continue
        rules = [(label, values) for rule in (family.where, family.unless) for label, values in rule.items()]
        variants = [f'{labels},{label}="{value}"' for label, values in rules for value in (values[0], "other")] or [
            labels
        ]
        for variant in variants:
            number = repr(draw(st.floats(0, 1))) if family.largest < 2 else draw(NUMBERS)
            lines.append(f"{name}{{{variant}{comma}}}{space}{number}")
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(["", "# a comment", "#", "  "])))
    return "\n".join(lines) + "\n"


@st.composite
def _histogram_lines(draw: st.DrawFn, name: str, labels: str, space: str) -> list[str]:
    bounds = [0.001, 0.1, 0.5, 1.0, 2.5, 80.0][: len(name) % 5 + 1]
    counts = sorted(draw(st.lists(st.integers(0, 10**6), min_size=len(bounds) + 1, max_size=len(bounds) + 1)))
    lines = [
        f'{name}_bucket{{{labels},le="{bound}"}}{space}{count}'
        for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True)
    ]
    return [*lines, f"{name}_count{{{labels}}} {counts[-1]}", f"{name}_sum{{{labels}}} {draw(NUMBERS)}"]


@st.composite
def page_text(draw: st.DrawFn, dialect: Dialect) -> str:
    """A page of ``dialect``: some of its families, each under one or several of its names, among others' families."""
    engines = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
    model = draw(LABEL_VALUES)
    texts: dict[str, str] = {}
    needed = [family for family in dialect.families if family.quantity in dialect.required]
    optional = draw(st.lists(st.sampled_from(dialect.families), max_size=7, unique_by=lambda item: item.quantity))
    for family in [*needed, *optional]:
        if family.quantity in (Counter.PREFILL_SECONDS, Counter.PREFILL_REQUESTS):
            continue
        names = draw(st.lists(st.sampled_from(family.names), min_size=1, unique=True))
        for name in names:
            texts.setdefault(name, draw(family_text(family, name=name, engines=engines, model=model)))
    noise = ["# TYPE go_goroutines gauge\ngo_goroutines 7\n", '# TYPE up untyped\nup{a="b} 1"} 1\n', "# only words\n"]
    marks = [f"# TYPE {dialect.marks[0]} gauge\n"] if dialect.marks[0] not in texts else []
    parts = draw(st.permutations([*texts.values(), *noise, *marks]))
    return "".join(parts)


LATENCIES = frozenset(latency.value for latency in Latency)
