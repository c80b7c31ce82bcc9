"""Windows: rates and averages over a stretch of time from rows of readings, for many servers at once.

A rate is what was counted between two rows divided by the time between them. The first row is the newest one at or
before the window's start, so that scrapes need not fall on its edges; after failed scrapes it lies further back, and
the rate is the average since then. Gauges are averaged over the time inside the window by trapezoids.

Rows are (n, rows) per server in the order of time; the times of empty rows are NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Half-open: (start_s, end_s], on the store's clock."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


def window_length_s(window_s: float, interval_s: float) -> float:
    """The length for a service that is scraped every ``interval_s``: at least two scrapes fit in."""
    return max(window_s, 2 * interval_s)


class Ends(NamedTuple):
    """The rows between which something is counted, (n,) each. ``valid``: there are two, the last inside the window."""

    first: Ints
    last: Ints
    valid: Bools


def ends(at_s: Floats, present: Bools, window: Window) -> Ends:
    """The newest present row at or before the window's start (else the oldest), and the newest one of all."""
    upto_end = present & (at_s <= window.end_s)
    before = upto_end & (at_s <= window.start_s)
    rows = at_s.shape[1]
    last = rows - 1 - np.argmax(upto_end[:, ::-1], axis=1)
    newest_before = rows - 1 - np.argmax(before[:, ::-1], axis=1)
    first = np.where(before.any(axis=1), newest_before, np.argmax(upto_end, axis=1))
    inside = (upto_end & ~before).any(axis=1)
    return Ends(first, last, inside & (first < last))


def time_averages(at_s: Floats, readings: Floats, window: Window) -> Floats:
    """Averages of gauges, ``readings`` (n, rows, gauges), over the time inside the window; NaN without a reading in it.

    Between readings a gauge is taken as a straight line, also across the window's start. A first reading inside the
    window, with none before it, begins its own average; a single one stands for itself.
    """
    averages = _averages_at_once(at_s, readings, window)
    told = ~np.isnan(at_s)[:, :, None]
    absent = np.isnan(readings) & told
    # Where a page lacks a gauge its line goes on to the next page that has it.
    holed = np.logical_or.reduce(absent.any(axis=1) & (told & ~absent).any(axis=1), axis=1)
    if holed.any():
        averages[holed] = _averages_row_by_row(at_s[holed], readings[holed], window)
    return averages


def _averages_at_once(at_s: Floats, readings: Floats, window: Window) -> Floats:
    """``time_averages`` of gauges that every page has, or none."""
    now, then = readings[:, 1:], readings[:, :-1]
    now_s, then_s = at_s[:, 1:], at_s[:, :-1]
    inside = (at_s <= window.end_s) & (at_s > window.start_s)
    linked = inside[:, 1:] & ~np.isnan(then_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        width_s = np.where(linked, now_s - np.maximum(then_s, window.start_s), 0.0)
        # From the later reading back to the middle of the line's part inside the window.
        back = np.where(linked, width_s / (2.0 * (now_s - then_s)), 0.0)
    parts = np.where(linked[:, :, None], (now - (now - then) * back[:, :, None]) * width_s[:, :, None], 0.0)
    span_s = np.add.reduce(width_s, axis=1)[:, None]
    newest = readings.shape[1] - 1 - np.argmax(inside[:, ::-1], axis=1)
    some: Bools = np.logical_or.reduce(inside, axis=1)
    last = np.where(some[:, None], readings[np.arange(len(readings)), newest], np.nan)
    area = np.maximum(np.add.reduce(parts, axis=1), 0.0)
    return np.where(span_s > 0, area / np.where(span_s > 0, span_s, 1.0), last)


def _averages_row_by_row(at_s: Floats, readings: Floats, window: Window) -> Floats:
    """``time_averages``, row by row."""
    shape = (len(at_s), readings.shape[2])
    area, span_s = np.zeros(shape), np.zeros(shape)
    then_s, then, newest = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan)
    for row in np.flatnonzero((at_s <= window.end_s).any(axis=0)).tolist():
        now = readings[:, row]
        now_s = np.broadcast_to(at_s[:, row, None], shape)
        present = ~np.isnan(now) & (now_s <= window.end_s)
        inside = present & (now_s > window.start_s)
        linked = inside & ~np.isnan(then)
        from_s = np.maximum(then_s, window.start_s)
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = (now - then) / (now_s - then_s)
        width_s = np.where(linked, now_s - from_s, 0.0)
        mean = np.where(linked, now - slope * width_s / 2, 0.0)
        area += mean * width_s
        span_s += width_s
        newest = np.where(inside, now, newest)
        then, then_s = np.where(present, now, then), np.where(present, now_s, then_s)
    return np.where(span_s > 0, np.maximum(area, 0.0) / np.where(span_s > 0, span_s, 1.0), newest)


def peaks(at_s: Floats, readings: Floats, window: Window) -> Floats:
    """The largest reading inside the window, ``readings`` (n, rows); NaN without one."""
    inside = (at_s > window.start_s) & (at_s <= window.end_s)
    return np.asarray(np.fmax.reduce(np.where(inside, readings, np.nan), axis=1))
