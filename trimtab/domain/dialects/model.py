"""What a dialect is: which families of an engine's page hold which quantity, as data.

A dialect is a table of families. The first of a family's names that is on the page is the one that is read, so a page
that has the old and the new name of a renamed family is not counted twice. Names are sample names as the text format
writes them: counters end in ``_total``. A counter that lacks the suffix is found all the same, and so is a name with
``_`` in the place of ``:``, as OpenMetrics has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trimtab.domain.signals import Counter, Gauge, Latency


class Source(StrEnum):
    """Quantities from which some columns of a reading are computed, and which are no columns themselves."""

    CACHED_PROMPT_TOKENS = "cached_prompt_tokens"
    """Of ``PROMPT_TOKENS`` those that were not computed, counted at the same moment."""
    PREFIX_HIT_TOKENS = "prefix_hit_tokens"
    """Prefix-cache hits where they are known to be tokens, not blocks."""
    EXTERNAL_HIT_TOKENS = "external_hit_tokens"
    """Tokens that came from another server's cache."""


Quantity = Gauge | Counter | Source | Latency
"""What a family measures, whatever it is called: a column of a reading, under its own name, or a source of some."""

QUANTITIES: tuple[Quantity, ...] = (*Gauge, *Counter, *Source, *Latency)


class Kind(StrEnum):
    """How a family's samples are read."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Combine(StrEnum):
    """How the series of one server (``engine`` ranks, models, reasons) become one number."""

    ADD = "add"
    MEAN = "mean"
    MAXIMUM = "maximum"
    # A server is awake when all of its engines are.
    LEAST = "least"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One quantity and where to read it.

    ``where`` keeps only series whose label has one of the given values, ``unless`` leaves those out; a label that a
    series lacks is empty. Series that differ in the labels ``copies`` alone repeat one value: the largest of them
    counts. ``largest`` is the largest plausible value, in the page's unit: anything above it is refused, as are NaN,
    infinities and negatives. ``scale`` converts the page's unit into the quantity's.
    """

    quantity: Quantity
    kind: Kind
    names: tuple[str, ...]
    combine: Combine = Combine.ADD
    where: Mapping[str, tuple[str, ...]]
    unless: Mapping[str, tuple[str, ...]]
    copies: tuple[str, ...] = ()
    scale: float = 1.0
    largest: float

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels belongs to the quantity."""
        return all(labels.get(label, "") in values for label, values in self.where.items()) and not any(
            labels.get(label, "") in values for label, values in self.unless.items()
        )


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The families of one engine.

    A page is read by the first dialect of which one of the families ``marks`` is on it. At least one of the quantities
    ``required`` must be there, else the page is refused.
    """

    name: str
    marks: tuple[str, ...]
    required: frozenset[Quantity]
    families: tuple[Family, ...]

    def sample_names(self) -> tuple[str, ...]:
        """Every sample name that is read, for ``/metrics/?name[]=…``; sorted, without duplicates."""
        names = set(self.marks)
        for family in self.families:
            suffixes = HISTOGRAM_SUFFIXES if family.kind is Kind.HISTOGRAM else ("",)
            names.update(name + suffix for name in family.names for suffix in suffixes)
        return tuple(sorted(names))


HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


def counter_spellings(name: str, kind: Kind) -> list[str]:
    """Other names of a counter's samples: exporters differ in whether ``_total`` belongs to it."""
    if kind is not Kind.COUNTER or name.endswith(("_sum", "_count", "_bucket")):
        return []
    return [name.removesuffix("_total") if name.endswith("_total") else name + "_total"]
