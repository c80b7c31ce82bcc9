"""Latencies in buckets whose bounds grow by 1 %: small, exact to add up, and never off by more than 0.5 %.

What is kept of a run is bounded however many requests it had, and runs of several seeds are pooled by adding counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_GROWTH = 1.01
_LEAST_S = 1e-6
"""Everything up to a microsecond is one bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of consecutive buckets; bucket `i` ends at `1e-6 * 1.01**i` seconds, where the next one begins."""

    total_s: float = 0.0
    """Sum of the values themselves."""
    first: int = 0
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Histogram:
        """Of finite values that are not negative; raises ValueError for others."""
        if not len(seconds):
            return cls()
        if not np.isfinite(seconds).all() or seconds.min() < 0:
            raise ValueError("a latency is negative or not finite")
        index = np.ceil(np.log(np.maximum(seconds, _LEAST_S) / _LEAST_S) / math.log(_GROWTH)).astype(np.int64)
        first = int(index.min())
        return cls(math.fsum(seconds.tolist()), first, tuple(np.bincount(index - first).tolist()))

    @classmethod
    def merged(cls, parts: Iterable[Histogram]) -> Histogram:
        """All values of the parts together."""
        filled = [part for part in parts if part.counts]
        if not filled:
            return cls()
        first = min(part.first for part in filled)
        counts = np.zeros(max(part.first + len(part.counts) for part in filled) - first, dtype=np.int64)
        for part in filled:
            start = part.first - first
            counts[start : start + len(part.counts)] += part.counts
        return cls(math.fsum(part.total_s for part in filled), first, tuple(counts.tolist()))

    @property
    def count(self) -> int:
        """Values in it."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float | None:
        """The exact mean; None of nothing."""
        count = self.count
        return self.total_s / count if count else None

    def quantile_s(self, q: float) -> float | None:
        """The least value with a share `q` of all at or below it, within 0.5 %; None of nothing."""
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for offset, count in enumerate(self.counts):
            seen += count
            if seen >= rank:
                return _middle_s(self.first + offset)
        return None

    def cdf(self) -> list[tuple[float, float]]:
        """Upper bound of each bucket in seconds, and the share of values up to it; ascending, empty of nothing."""
        total = self.count
        upto = np.cumsum(np.array(self.counts, dtype=np.int64)).tolist()
        return [
            (_LEAST_S * _GROWTH ** (self.first + offset), seen / total)
            for offset, (seen, count) in enumerate(zip(upto, self.counts, strict=True))
            if count
        ]


def _middle_s(index: int) -> float:
    """The value that is off by the same share, half a growth step, from both bounds of a bucket."""
    return _LEAST_S * _GROWTH**index * 2 / (1 + _GROWTH)
