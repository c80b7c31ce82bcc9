"""Rank correlations with ties: Spearman's ρ and Kendall's τ-b."""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2.0)[place])


def spearman(first: Floats, second: Floats) -> float | None:
    """Correlation of the ranks; None when one of the two does not vary. Raises ValueError for different lengths."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
    if len(first) < 2:
        return None
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / spread if spread > 0 else None


def kendall(first: Floats, second: Floats) -> float | None:
    """τ-b, by Knight's count of discordant pairs; None when one of the two does not vary.

    Raises ValueError for different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
    order = np.lexsort((second, first))
    pairs = len(first) * (len(first) - 1) / 2.0
    tied_first, tied_second = _tied_pairs(first), _tied_pairs(second)
    tied_both = _tied_pairs(np.unique(np.stack([first, second], axis=1), axis=0, return_inverse=True)[1].ravel())
    seen: list[float] = []
    discordant = 0
    for value in second[order].tolist():
        discordant += len(seen) - bisect.bisect_right(seen, value)
        bisect.insort(seen, value)
    concordant = pairs - tied_first - tied_second + tied_both - discordant
    spread = math.sqrt((pairs - tied_first) * (pairs - tied_second))
    return (concordant - discordant) / spread if spread > 0 else None


def _tied_pairs(values: NDArray[np.generic]) -> float:
    _, count = np.unique(values, return_counts=True)
    return float((count * (count - 1) / 2.0).sum())
