"""How a signal follows the load: correlation, linearity, range, noise, and the place of a cliff. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_LEAST = 5
_BINS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Measures:
    """One signal against the load over many windows. None where the signal or the load did not vary."""

    windows: int
    pearson: float | None
    spearman: float | None
    line_r2: float | None
    """Share of the variance that a straight line of the load explains."""
    elasticity: float | None
    """Slope of the logarithms: 1 where the signal doubles with the load, 0 where it does not care."""
    dynamic_range: float | None
    """Mean over the tenth of windows with the highest load, over that with the lowest."""
    snr_db: float | None
    """Variance between tenths of the load over the variance inside them, in decibels; a curve counts as no noise."""
    low: float
    """Mean over the tenth of windows with the lowest load."""
    high: float


def measure(load: Sequence[float], values: Sequence[float | None]) -> Measures:
    """Windows without a value are left out. Raises ValueError when fewer than five are left, or lengths differ."""
    pairs = [(x, y) for x, y in zip(load, values, strict=True) if y is not None]
    if len(pairs) < _LEAST:
        raise ValueError(f"a signal needs at least {_LEAST} windows with a value, not {len(pairs)}")
    x = np.array([pair[0] for pair in pairs])
    y = np.array([pair[1] for pair in pairs])
    order = np.argsort(x, kind="stable")
    tenth = max(1, len(pairs) // _BINS)
    low, high = float(np.mean(y[order[:tenth]])), float(np.mean(y[order[-tenth:]]))
    pearson = correlation(x, y)
    return Measures(
        windows=len(pairs),
        pearson=pearson,
        spearman=correlation(ranks(x), ranks(y)),
        line_r2=None if pearson is None else pearson**2,
        elasticity=_elasticity(x, y),
        dynamic_range=high / low if low > 0 else None,
        snr_db=_snr_db(y[order]),
        low=low,
        high=high,
    )


def correlation(x: Floats, y: Floats) -> float | None:
    """Pearson's; None when either does not vary."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        # Differences to a rounded mean would be a pattern of their own.
        return None
    dx, dy = x - np.mean(x), y - np.mean(y)
    spread = math.sqrt(float(np.sum(dx * dx)) * float(np.sum(dy * dy)))
    return float(np.sum(dx * dy)) / spread


def ranks(values: Floats) -> Floats:
    """Ranks from 0; equals share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Floats = ends - (counts + 1) / 2
    return means[place]


def _elasticity(x: Floats, y: Floats) -> float | None:
    above = (x > 0) & (y > 0)
    if np.count_nonzero(above) < _LEAST:
        return None
    log_x, log_y = np.log(x[above]), np.log(y[above])
    spread = float(np.var(log_x))
    if spread <= 0:
        return None
    return float(np.mean((log_x - np.mean(log_x)) * (log_y - np.mean(log_y)))) / spread


def _snr_db(by_load: Floats) -> float | None:
    """Of values in order of their load."""
    if np.ptp(by_load) == 0:
        return None
    bins = [part for part in np.array_split(by_load, _BINS) if len(part)]
    inside = float(np.mean([np.var(part) for part in bins]))
    between = float(np.var([np.mean(part) for part in bins]))
    return 10 * math.log10(between / inside) if inside > 0 and between > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Cliff:
    """Where a latency leaves its plateau as load rises in steps."""

    plateau: float
    """Its value at the lowest load."""
    flat_until: float
    """The highest load up to which it stays below `FLAT` plateaus."""
    position: float | None
    """The middle of the `CLIFF_STEPS` steps with the greatest rise; None when no rise is as great as `RISE`."""
    rise: float
    """Value after over value before those steps."""


FLAT, RISE, CLIFF_STEPS = 2.0, 2.0, 2


def cliff(loads: Sequence[float], values: Sequence[float]) -> Cliff:
    """`loads` ascend and all values are positive. Raises ValueError when not, or for fewer than three steps."""
    if len(loads) != len(values) or len(loads) <= CLIFF_STEPS:
        raise ValueError(f"a cliff needs at least three loads with a value each, not {len(loads)} and {len(values)}")
    if any(after <= before for before, after in itertools.pairwise(loads)) or min(values) <= 0:
        raise ValueError("a cliff needs ascending loads and positive values")
    flat_until = loads[0]
    for load, value in zip(loads, values, strict=True):
        if value >= FLAT * values[0]:
            break
        flat_until = load
    rises = [values[index + CLIFF_STEPS] / values[index] for index in range(len(values) - CLIFF_STEPS)]
    steepest = max(range(len(rises)), key=lambda index: (rises[index], -index))
    middle = (loads[steepest] + loads[steepest + CLIFF_STEPS]) / 2
    return Cliff(values[0], flat_until, middle if rises[steepest] >= RISE else None, rises[steepest])
