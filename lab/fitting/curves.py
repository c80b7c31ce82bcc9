"""Small fits with errors: a roofline over tokens and non-negative slopes, all by relative error."""

from __future__ import annotations

import dataclasses

import numpy as np

from lab.fitting.tables import Array, Points


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """seconds = max(floor + floor slope · tokens, offset + slope · tokens)."""

    floor_s: float
    floor_slope_s: float
    offset_s: float
    slope_s: float
    error: float
    """Mean absolute relative error over the fitted points."""

    def seconds(self, tokens: Array) -> Array:
        """The roofline at these tokens."""
        floor = self.floor_s + self.floor_slope_s * tokens
        result: Array = np.maximum(floor, self.offset_s + self.slope_s * tokens)
        return result


def fit_line(points: Points) -> tuple[float, float]:
    """Non-negative (offset, slope) of least relative squares."""
    weights = 1 / points.seconds
    matrix = np.stack([weights, points.work * weights], axis=1)
    (offset, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(weights)), rcond=None)
    if offset < 0:
        return 0.0, fit_slope(points)
    if slope < 0:
        return float(1 / np.mean(weights)), 0.0
    return float(offset), float(slope)


def fit_non_negative(columns: Array, seconds: Array) -> tuple[float, ...]:
    """Non-negative coefficients of the columns, of least relative squares; what would be negative becomes zero."""
    kept = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(columns[:, kept] / seconds[:, None], np.ones(len(seconds)), rcond=None)
        if len(kept) == 1 or (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    coefficients = np.zeros(columns.shape[1])
    coefficients[kept] = np.maximum(found, 0.0)
    return tuple(float(c) for c in coefficients)


def fit_slope(points: Points) -> float:
    """Slope through the origin of least relative squares."""
    ratio = points.work / points.seconds
    return float(ratio.sum() / (ratio**2).sum())


def relative_error(predicted: Array, points: Points) -> float:
    """Mean absolute relative error."""
    return float(np.mean(np.abs(predicted / points.seconds - 1)))


def fit_roofline(points: Points) -> Roofline:
    """The roofline of least mean relative error; the knee is searched among the points.

    Raises ValueError for fewer than three points.
    """
    best: Roofline | None = None
    for knee in range(1, len(points.work) - 1):
        floor, floor_slope = fit_line(Points(points.work[:knee], points.seconds[:knee]))
        offset, slope = fit_line(Points(points.work[knee:], points.seconds[knee:]))
        candidate = Roofline(floor, floor_slope, offset, slope, 0.0)
        error = relative_error(candidate.seconds(points.work), points)
        if best is None or error < best.error:
            best = dataclasses.replace(candidate, error=error)
    if best is None:
        raise ValueError("a roofline needs at least three points")
    return best


def thin(points: Points, per_octave: int = 4) -> Points:
    """Points spread evenly over the logarithm of the work, so that dense ends do not rule a fit."""
    bins = np.floor(np.log2(points.work) * per_octave).astype(int)
    keep = sorted({int(np.flatnonzero(bins == value)[0]) for value in np.unique(bins)})
    return Points(points.work[keep], points.seconds[keep])
