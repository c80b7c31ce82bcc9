"""Histograms of latencies: counts of values by bucket, their merging and their quantiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts by bucket.

    `upper_bounds` ascend and end with +Inf. `cumulative` has the count of values up to each bound and never falls.
    `total` is the sum of the values themselves.
    """

    upper_bounds: Sequence[float]
    cumulative: Sequence[float]
    total: float

    @property
    def count(self) -> float:
        """How many values are in it."""
        return self.cumulative[-1] if self.cumulative else 0.0

    def quantile(self, share: float) -> tuple[float, bool] | None:
        """Prometheus's `histogram_quantile`: linear inside the bucket that holds the rank, the lowest starting at 0.

        Gives the value and whether the rank lies in the +Inf bucket, where the value is the largest finite bound and
        the truth may be any larger one. None without a count, or without a finite bound. Raises ValueError for a share
        that is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"the quantile's share is {share:g}, must be from 0 to 1")
        bounds, cumulative = self.upper_bounds, self.cumulative
        if len(bounds) < 2 or len(bounds) != len(cumulative) or cumulative[-1] <= 0:
            return None
        last = len(bounds) - 1
        rank = share * cumulative[-1]
        index = bisect_left(cumulative, rank, 0, last)
        if index == last:
            return bounds[last - 1], True
        end = bounds[index]
        if index == 0 and end <= 0:
            return end, False
        start = bounds[index - 1] if index else 0.0
        below = cumulative[index - 1] if index else 0.0
        inside = cumulative[index] - below
        return (start + (end - start) * (rank - below) / inside if inside > 0 else end), False


EMPTY = Histogram(upper_bounds=(), cumulative=(), total=0.0)


def merge_histograms(several: Sequence[Histogram]) -> Histogram:
    """The sum of histograms, on the bounds that all of them have, where cumulative counts add exactly.

    So a fleet half-way through an upgrade that moves bounds loses resolution, not counts. Empty for no histogram.
    """
    if not several:
        return EMPTY
    if len(several) == 1:
        return several[0]
    common = sorted(set(several[0].upper_bounds).intersection(*(item.upper_bounds for item in several[1:])))
    totals = dict.fromkeys(common, 0.0)
    for item in several:
        for bound, count in zip(item.upper_bounds, item.cumulative, strict=True):
            if bound in totals:
                totals[bound] += count
    return Histogram(
        upper_bounds=tuple(common), cumulative=list(totals.values()), total=sum(item.total for item in several)
    )
