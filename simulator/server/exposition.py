"""Prometheus text pages that are cheap to serve: a family is rendered again only when one of its values changed.

The layout is prometheus_client's: HELP, TYPE, samples, then a gauge family `<name>_created`. Families know their
sample names, so a page filtered by `name[]` renders only the requested ones. Limits: no exemplars, no units.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from prometheus_client.utils import floatToGoString

F = TypeVar("F", bound="Family")
Labels = tuple[tuple[str, str], ...]
_SMALL_INTS = tuple(f"{n}.0" for n in range(4096))


def format_value(value: float) -> str:
    """A sample value as prometheus_client writes it."""
    if 0 <= value < 4096 and value == int(value):
        return _SMALL_INTS[int(value)]
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def format_labels(labels: Labels) -> str:
    """`{a="b",c="d"}` in the order of the label names; empty without labels."""
    if not labels:
        return ""
    escaped = (
        (name, value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')) for name, value in sorted(labels)
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


@dataclasses.dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples under one HELP and TYPE of the plain text format."""

    name: str
    kind: str
    samples: tuple[tuple[str, str], ...]
    """(sample name, line) pairs."""


class Family(abc.ABC):
    """One metric family with its children; subclasses define how a child is rendered."""

    kind = "untyped"
    has_created = False
    suffixes: tuple[str, ...] = ("",)

    def __init__(self, name: str, help_text: str) -> None:
        self.name = name
        self.help_text = help_text
        self._text: str | None = None
        self._created_cache = (0, "")

    @property
    @abc.abstractmethod
    def children(self) -> int:
        """How many label sets the family has."""

    @property
    def base_name(self) -> str:
        """The name that the suffixes are added to."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name

    def sample_names(self) -> tuple[str, ...]:
        """Every sample name of this family."""
        created = ("_created",) if self.has_created else ()
        return tuple(self.base_name + suffix for suffix in self.suffixes + created)

    def groups(self) -> Iterator[SampleGroup]:
        """The family's samples, then its `_created` ones."""
        yield self._main_group()
        if self.has_created:
            yield self._created_group()

    def _main_group(self) -> SampleGroup:
        return SampleGroup(self.name, self.kind, tuple(self._samples()))

    def _created_group(self) -> SampleGroup:
        name = f"{self.base_name}_created"
        lines = tuple((name, f"{name}{labels} {format_value(at)}") for labels, at in self._created())
        return SampleGroup(name, "gauge", lines)

    def samples_by_child(self) -> Iterator[tuple[str, str]]:
        """(sample name, line) pairs, each child's `_created` right behind it, as OpenMetrics wants them."""
        main, *rest = self.groups()
        last_name = self.base_name + self.suffixes[-1]
        created = {line[len(name) :].rsplit(" ", 1)[0]: (name, line) for group in rest for name, line in group.samples}
        for name, line in main.samples:
            yield name, line
            if created and name == last_name:
                yield created[line[len(name) :].rsplit(" ", 1)[0]]

    def text(self) -> str:
        """The family as text, from the cache when nothing changed."""
        if self._text is None:
            self._text = self._group_text(self._main_group()) + self._created_text()
        return self._text

    def _created_text(self) -> str:
        """The `_created` group, rendered again only when a child is new; empty while there is none."""
        children = self.children if self.has_created else 0
        if self._created_cache[0] != children:
            self._created_cache = (children, self._group_text(self._created_group()))
        return self._created_cache[1]

    def touch(self) -> None:
        """Note that a value changed."""
        self._text = None

    def filtered_text(self, names: Collection[str]) -> str:
        """The samples named in `names`, with the headers of their groups."""
        parts = []
        for group in self.groups():
            kept = tuple(sample for sample in group.samples if sample[0] in names)
            if kept:
                parts.append(self._group_text(SampleGroup(group.name, group.kind, kept)))
        return "".join(parts)

    def _group_text(self, group: SampleGroup) -> str:
        head = f"# HELP {group.name} {self.help_text}\n# TYPE {group.name} {group.kind}\n"
        return head + "".join([f"{line}\n" for _, line in group.samples])

    @abc.abstractmethod
    def _samples(self) -> Iterator[tuple[str, str]]:
        """(sample name, line) pairs of every child."""

    def _created(self) -> Iterator[tuple[str, float]]:
        """(labels, creation time) of every child, where the family has them."""
        return iter(())


class _Scalars(Family):
    """A family whose children, by label set, have one value each."""

    def __init__(self, name: str, help_text: str, children: Sequence[Labels] = ((),)) -> None:
        super().__init__(name, help_text)
        self._names = {labels: format_labels(labels) for labels in children}
        self._values = dict.fromkeys(children, 0.0)

    def value(self, labels: Labels = ()) -> float:
        """A child's value; raises KeyError when there is none."""
        return self._values[labels]

    @property
    def children(self) -> int:
        """How many label sets the family has."""
        return len(self._values)

    def _samples(self) -> Iterator[tuple[str, str]]:
        for labels, value in self._values.items():
            yield self.name, f"{self.name}{self._names[labels]} {format_value(value)}"


class Gauge(_Scalars):
    """A gauge with children by label set."""

    kind = "gauge"

    def set(self, value: float, labels: Labels = ()) -> None:
        """Set one child, adding it when it is new."""
        if self._values.get(labels) != value:
            if labels not in self._names:
                self._names[labels] = format_labels(labels)
            self._values[labels] = value
            self._text = None


class Counter(_Scalars):
    """A counter with children by label set; its name ends in `_total`."""

    kind = "counter"
    suffixes = ("_total",)

    def __init__(
        self, name: str, help_text: str, children: Sequence[Labels] = ((),), *, created_s: float | None = None
    ) -> None:
        super().__init__(name, help_text, children)
        self.has_created = created_s is not None
        self._created_s = dict.fromkeys(children, created_s or 0.0)

    def add(self, amount: float, labels: Labels = (), *, now_s: float = 0.0) -> None:
        """Count; a new child is created at `now_s`."""
        if labels not in self._names:
            self._names[labels] = format_labels(labels)
            self._values[labels] = 0.0
            self._created_s[labels] = now_s
        self._values[labels] += amount
        self._text = None

    def set_total(self, total: float, labels: Labels = ()) -> None:
        """Take over a total that is counted elsewhere."""
        if self._values[labels] != total:
            self._values[labels] = total
            self._text = None

    def _created(self) -> Iterator[tuple[str, float]]:
        for labels, at_s in self._created_s.items():
            yield self._names[labels], at_s


@dataclasses.dataclass(slots=True)
class _Buckets:
    counts: list[int]
    total: float
    created_s: float
    prefixes: list[str]
    labels_text: str


class Histogram(Family):
    """A histogram with children by label set, cumulative on the page."""

    kind = "histogram"
    suffixes = ("_bucket", "_count", "_sum")
    has_created = True

    def __init__(
        self,
        name: str,
        help_text: str,
        edges: Sequence[float],
        children: Sequence[Labels] = ((),),
        *,
        created_s: float = 0.0,
    ) -> None:
        super().__init__(name, help_text)
        self.edges = tuple(edges)
        self._children: dict[Labels, _Buckets] = {}
        for labels in children:
            self._add_child(labels, created_s)

    def observe(self, value: float, labels: Labels = (), *, times: int = 1, now_s: float = 0.0) -> None:
        """Record `times` observations of `value`; a new child is created at `now_s`."""
        child = self._children.get(labels)
        if child is None:
            child = self._add_child(labels, now_s)
        child.counts[bisect.bisect_left(self.edges, value)] += times
        child.total += value * times
        self._text = None

    def count(self, labels: Labels = ()) -> int:
        """Observations of a child; raises KeyError when there is none."""
        return sum(self._children[labels].counts)

    def _add_child(self, labels: Labels, created_s: float) -> _Buckets:
        les = [*(format_value(edge) for edge in self.edges), "+Inf"]
        prefixes = [f"{self.name}_bucket{format_labels((*labels, ('le', le)))} " for le in les]
        child = _Buckets([0] * len(les), 0.0, created_s, prefixes, format_labels(labels))
        self._children[labels] = child
        return child

    @property
    def children(self) -> int:
        """How many label sets the family has."""
        return len(self._children)

    def _samples(self) -> Iterator[tuple[str, str]]:
        bucket_name = f"{self.name}_bucket"
        for child in self._children.values():
            cumulative = 0
            for prefix, count in zip(child.prefixes, child.counts, strict=True):
                cumulative += count
                yield bucket_name, prefix + format_value(float(cumulative))
            yield f"{self.name}_count", f"{self.name}_count{child.labels_text} {format_value(float(cumulative))}"
            yield f"{self.name}_sum", f"{self.name}_sum{child.labels_text} {format_value(float(child.total))}"

    def _created(self) -> Iterator[tuple[str, float]]:
        for child in self._children.values():
            yield child.labels_text, child.created_s


class Summary(Family):
    """A summary without quantiles: count and sum."""

    kind = "summary"
    suffixes = ("_count", "_sum")
    has_created = True

    def __init__(self, name: str, help_text: str) -> None:
        super().__init__(name, help_text)
        self._children: dict[Labels, tuple[str, float, float, float]] = {}

    def observe(self, value: float, labels: Labels, *, now_s: float) -> None:
        """Record one observation."""
        text, count, total, created_s = self._children.get(labels, (format_labels(labels), 0.0, 0.0, now_s))
        self._children[labels] = (text, count + 1, total + value, created_s)
        self._text = None

    @property
    def children(self) -> int:
        """How many label sets the family has."""
        return len(self._children)

    def _samples(self) -> Iterator[tuple[str, str]]:
        for text, count, total, _ in self._children.values():
            yield f"{self.name}_count", f"{self.name}_count{text} {format_value(count)}"
            yield f"{self.name}_sum", f"{self.name}_sum{text} {format_value(total)}"

    def _created(self) -> Iterator[tuple[str, float]]:
        for text, _, _, created_s in self._children.values():
            yield text, created_s


class Page:
    """Families in the order of the page; `refresh` is called before each rendering."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._families: list[Family] = []
        self._refresh = refresh

    def add(self, family: F) -> F:
        """Put a family at the end of the page and give it back."""
        self._families.append(family)
        return family

    def render(self) -> str:
        """The whole page in the plain text format 0.0.4."""
        self._refresh()
        return "".join([family.text() for family in self._families])

    def render_filtered(self, names: Collection[str]) -> str:
        """Only the samples whose names are given."""
        self._refresh()
        wanted = frozenset(names)
        return "".join([f.filtered_text(wanted) for f in self._families if not wanted.isdisjoint(f.sample_names())])

    def render_openmetrics(self, names: Collection[str] | None = None) -> str:
        """The page in OpenMetrics 1.0: samples get `_` for `:`, `_created` joins its family, `# EOF` ends it."""
        self._refresh()
        parts = []
        for family in self._families:
            samples = [s for s in family.samples_by_child() if names is None or s[0] in names]
            if names is not None and not samples:
                continue
            base = family.base_name
            parts.append(f"# HELP {base} {family.help_text}\n# TYPE {base} {family.kind}\n")
            parts.extend(f"{line.replace(':', '_', 1) if ':' in name else line}\n" for name, line in samples)
        parts.append("# EOF\n")
        return "".join(parts)
