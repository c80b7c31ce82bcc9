"""One figure over several seeds: median, range, mean, and how far the mean can be trusted.

The confidence interval is Student's t over the seeds' values: two-sided, 95 %, n - 1 degrees of freedom. It is how
far the mean would move with other seeds of the same trace, not with other traces or another simulator, and it takes
the values of seeds to be about normal. Of one seed there is none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Confidence:
    """A figure over seeds. None where no seed has it; the interval also where fewer than two have."""

    seeds: int
    """Seeds that have the figure."""
    missing: int
    """Seeds that have it not: nothing was complete, or it was not measured."""
    mean: float | None
    median: float | None
    low: float | None
    """The least of the seeds."""
    high: float | None
    ci_low: float | None
    ci_high: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Confidence:
        """Mean, interval and range of one value a seed; what is None or not finite counts as missing."""
        known = [float(value) for value in values if value is not None and math.isfinite(value)]
        missing = len(values) - len(known)
        if not known:
            return cls(0, missing, None, None, None, None, None, None)
        mean = math.fsum(known) / len(known)
        half = _half_width(known)
        return cls(
            seeds=len(known),
            missing=missing,
            mean=mean,
            median=statistics.median(known),
            low=min(known),
            high=max(known),
            ci_low=None if half is None else mean - half,
            ci_high=None if half is None else mean + half,
        )


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1, CONFIDENCE) * statistics.stdev(values) / math.sqrt(len(values))


@functools.lru_cache(maxsize=256)
def t_quantile(degrees: int, confidence: float) -> float:
    """The t that a Student variable stays within, on both sides, with probability `confidence`.

    Raises ValueError for less than one degree of freedom or a confidence outside (0, 1).
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(f"degrees must be at least 1 and confidence within (0, 1), not {degrees} and {confidence}")
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _within(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, degrees: int) -> float:
    """Probability of [-t, t]; Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    odd = degrees % 2 == 1
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for step in range(2 if odd else 1, degrees - 2, 2):
        term *= square * step / (step + 1)
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
