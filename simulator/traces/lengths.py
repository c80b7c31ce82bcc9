"""Lengths of requests and gaps between them: distributions to draw from, in arrays.

A `Table` is a histogram of whole numbers, of tokens or of milliseconds between arrivals. Packaged ones are in
`tables/`, small files that name their source; `python -m simulator.traces lengths FILE` makes such a file of a trace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simulator.traces.model import TraceError
from trimtab.config.yamlfile import YamlError, read_yaml_documents

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TABLES = Path(__file__).parent / "tables"
# A histogram's rounded probabilities still have to add up to about one.
_SUM_TOLERANCE = 1e-3


class LengthLaw(Protocol):
    """A distribution of token counts."""

    def sample(self, source: np.random.Generator, count: int) -> Ints:
        """`count` lengths, each at least 1."""
        ...


class GapLaw(Protocol):
    """A distribution of the gaps between arrivals, with mean 1."""

    def sample_gaps(self, source: np.random.Generator, count: int) -> Floats:
        """`count` gaps, each at least 0."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same length, for theory and sweeps."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a length is at least 1 token, not {self.tokens}")

    def sample(self, source: np.random.Generator, count: int) -> Ints:
        """`count` equal lengths."""
        del source
        return np.full(count, self.tokens, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A histogram of whole numbers: bin i holds `low[i]` to `high[i] - 1`, evenly, with weight `weight[i]`."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    weight: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.weight) or not self.low:
            raise ValueError("a table needs as many lower ends as upper ends and weights, and at least one")
        if any(low < 0 or high <= low for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError("each bin of a table must begin at 0 or above and end above its beginning")
        if any(before > after for before, after in zip(self.high, self.low[1:], strict=False)):
            raise ValueError("the bins of a table must be in order and not overlap")
        if any(not math.isfinite(weight) or weight < 0 for weight in self.weight) or sum(self.weight) <= 0:
            raise ValueError("the weights of a table must be finite, not negative and not all zero")

    @property
    def mean(self) -> float:
        """The mean of what is drawn, before lengths of 0 become 1."""
        middles = ((low + high - 1) / 2 for low, high in zip(self.low, self.high, strict=True))
        return sum(m * w for m, w in zip(middles, self.weight, strict=True)) / sum(self.weight)

    def quantile(self, share: float) -> float:
        """The quantile of the weight at this share, linear within a bin.

        Raises ValueError for a share beyond 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {share}")
        left = share * sum(self.weight)
        for low, high, weight in zip(self.low, self.high, self.weight, strict=True):
            if left <= weight and weight > 0:
                return low + (high - 1 - low) * left / weight
            left -= weight
        return float(self.high[-1] - 1)

    def _draw(self, source: np.random.Generator, count: int) -> Ints:
        cumulative = np.cumsum(np.asarray(self.weight, dtype=np.float64))
        marks = source.random(count) * cumulative[-1]
        bins = np.minimum(np.searchsorted(cumulative, marks, side="right"), len(self.weight) - 1)
        low = np.asarray(self.low, dtype=np.int64)[bins]
        width = np.asarray(self.high, dtype=np.int64)[bins] - low
        drawn: Ints = low + (source.random(count) * width).astype(np.int64)
        return drawn

    def sample(self, source: np.random.Generator, count: int) -> Ints:
        """`count` lengths; a length of 0 becomes 1."""
        return np.maximum(self._draw(source, count), 1)

    def sample_gaps(self, source: np.random.Generator, count: int) -> Floats:
        """`count` gaps with mean 1: the table's shape, not its scale. Raises ValueError for a table with mean 0."""
        mean = self.mean
        if mean <= 0:
            raise ValueError("a table of gaps needs a mean above zero")
        return self._draw(source, count) / mean


def histogram(values: Iterable[int], *, bins_per_decade: int = 8) -> Table:
    """A table of whole numbers, one bin a value at first and then in equal ratios. Raises ValueError without values."""
    if not 1 <= bins_per_decade <= 100:
        raise ValueError(f"bins_per_decade must be from 1 to 100, not {bins_per_decade}")
    counts: dict[int, int] = {}
    edges = [0, 1]
    total = 0
    for value in values:
        if value < 0:
            raise ValueError(f"a table holds numbers from 0, not {value}")
        while edges[-1] <= value:
            edges.append(max(edges[-1] + 1, round(edges[-1] * 10 ** (1 / bins_per_decade))))
        # Edges only grow, so a bin keeps its index.
        index = int(np.searchsorted(edges, value, side="right")) - 1
        counts[index] = counts.get(index, 0) + 1
        total += 1
    if not total:
        raise ValueError("there is nothing to make a table of")
    used = sorted(counts)
    return Table(
        tuple(edges[i] for i in used), tuple(edges[i + 1] for i in used), tuple(counts[i] / total for i in used)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLaws:
    """What a recorded trace's requests look like: lengths and gaps, each by itself."""

    name: str
    source: str
    prompt_tokens: Table
    output_tokens: Table
    gaps_ms: Table


def packaged_names() -> tuple[str, ...]:
    """Names of the packaged tables."""
    return tuple(sorted(path.stem for path in _TABLES.glob("*.yaml")))


def packaged(name: str) -> RecordedLaws:
    """A packaged set of tables. Raises `TraceError` for a name that is none."""
    if name not in packaged_names():
        raise TraceError(f"there are no tables {name!r}; there are {', '.join(packaged_names())}")
    return read_laws(_TABLES / f"{name}.yaml")


def read_laws(path: Path) -> RecordedLaws:
    """The tables of a file. Raises `TraceError`."""
    try:
        documents = read_yaml_documents(path)
    except (YamlError, OSError) as error:
        raise TraceError(f"{path}: {error}") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise TraceError(f"{path}: must hold one mapping with source, prompt_tokens, output_tokens and gaps_ms")
    document = documents[0]
    source = document.get("source")
    if not isinstance(source, str) or not source:
        raise TraceError(f"{path}: source must say where the figures are from")
    return RecordedLaws(
        name=path.stem,
        source=source,
        prompt_tokens=_table(path, "prompt_tokens", document.get("prompt_tokens")),
        output_tokens=_table(path, "output_tokens", document.get("output_tokens")),
        gaps_ms=_table(path, "gaps_ms", document.get("gaps_ms")),
    )


def _table(path: Path, field: str, rows: object) -> Table:
    if not isinstance(rows, list) or not rows:
        raise TraceError(f"{path}: {field} must be a list of [low, high, share]")
    low, high, weight = [], [], []
    for row in rows:
        if not _is_row(row):
            raise TraceError(
                f"{path}: {field}: {str(row)[:60]} is no [low, high, share] of two whole numbers and a share"
            )
        low.append(row[0])
        high.append(row[1])
        weight.append(float(row[2]))
    if abs(sum(weight) - 1) > _SUM_TOLERANCE:
        raise TraceError(f"{path}: {field}: the shares add up to {sum(weight):.4f}, not 1")
    try:
        return Table(tuple(low), tuple(high), tuple(weight))
    except ValueError as error:
        raise TraceError(f"{path}: {field}: {error}") from None


def _is_row(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and all(isinstance(cell, int) and not isinstance(cell, bool) for cell in row[:2])
        and isinstance(row[2], int | float)
    )


def laws_text(laws: RecordedLaws) -> str:
    """The file of a set of tables, as `read_laws` takes it."""
    parts = [f"source: >-\n  {laws.source}\n"]
    for field, table in (
        ("prompt_tokens", laws.prompt_tokens),
        ("output_tokens", laws.output_tokens),
        ("gaps_ms", laws.gaps_ms),
    ):
        parts.append(f"{field}:\n" + "".join(_row_text(row) for row in _rows(table)))
    return "".join(parts)


def _rows(table: Table) -> Sequence[tuple[int, int, float]]:
    return list(zip(table.low, table.high, table.weight, strict=True))


def _row_text(row: tuple[int, int, float]) -> str:
    return f"  - [{row[0]}, {row[1]}, {row[2]:.5f}]\n"
