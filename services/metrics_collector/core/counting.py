"""What counters have counted since their last reading, for many servers at once.

A counter that fell, or a server that started anew, adds what it has counted since. A first reading adds nothing, since
what was counted before belongs to no window. An absent reading adds nothing either; the next one adds what came
meanwhile, since the last known level is kept.

A restart is recognised by the server's start time, else by a generation counter that fell. Where neither shows (several
API servers behind one port have no start time), each counter shows its own reset by falling. Prompt tokens computed as
a difference of two counters may fall without a reset, because the two do not move at the same moment: as long as all
prompt tokens do not fall, the running maximum is taken, which is never more than was computed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics_collector.core.schema import COUNTER_COLUMN, COUNTERS, GAUGE_COLUMN, SCALARS, Schema
from trimtab.domain.signals import Counter, Gauge

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

FIRST_COUNTER = COUNTER_COLUMN[COUNTERS[0]]
COUNTER_COLUMNS = slice(FIRST_COUNTER, SCALARS)
# Two readings of one start time may be rounded differently; a restart takes longer than this.
_SAME_START_S = 0.5
# Sums over engines are rounded by the order of the engines on the page: such a fall is no reset.
_SAME_LEVEL = 1.0 - 1e-9
_PREFILL = COUNTER_COLUMN[Counter.PREFILL_TOKENS] - FIRST_COUNTER
_PROMPT = COUNTER_COLUMN[Counter.PROMPT_TOKENS] - FIRST_COUNTER


class Counted(NamedTuple):
    """``increases`` (n, columns), never negative nor NaN; new ``levels``; which servers ``fell`` without a restart."""

    increases: Floats
    levels: Floats
    fell: Bools


def restarted(levels: Floats, now: Floats) -> Bools:
    """Which servers started anew between two rows of scalar columns."""
    start = GAUGE_COLUMN[Gauge.START_TIME_S]
    moved_s = np.abs(now[:, start] - levels[:, start])
    generated = COUNTER_COLUMN[Counter.DECODE_TOKENS]
    fell = now[:, generated] < levels[:, generated] * _SAME_LEVEL
    return np.where(np.isnan(moved_s), fell, moved_s > _SAME_START_S)


def count_scalars(levels: Floats, now: Floats, anew: Bools) -> Counted:
    """The increases of the counters of ``COUNTERS``; both arrays (n, counters), NaN where never seen or absent."""
    base = _base(levels, anew)
    fell = now < base * _SAME_LEVEL
    fell[:, _PREFILL] &= ~(now[:, _PROMPT] >= base[:, _PROMPT] * _SAME_LEVEL)
    return _counted(base, now, fell)


def count_histograms(levels: Floats, now: Floats, anew: Bools, schema: Schema) -> Counted:
    """The increases of the buckets and sums of ``schema``. Where one bucket falls its whole histogram began anew."""
    base = _base(levels, anew)
    fell = now < base * _SAME_LEVEL
    if not fell.any():
        return _counted(base, now, fell)
    for columns in schema.histograms.values():
        own = slice(columns.first - SCALARS, columns.sum + 1 - SCALARS)
        fell[:, own] = fell[:, own].any(axis=1, keepdims=True)
    return _counted(base, now, fell)


def _base(levels: Floats, anew: Bools) -> Floats:
    """The levels to count from: zero after a restart, NaN where nothing was seen yet."""
    return np.where(anew[:, None], levels * 0.0, levels) if anew.any() else levels


def _counted(base: Floats, now: Floats, fell: Bools) -> Counted:
    fell_rows: Bools = np.logical_or.reduce(fell, axis=1)
    increases = now - base
    levels = np.fmax(base, now)
    if fell_rows.any():
        increases[fell] = now[fell]
        levels[fell] = now[fell]
    # fmax takes the zero for a NaN and for the little that rounding left below zero.
    return Counted(np.fmax(increases, 0.0), levels, fell_rows)
