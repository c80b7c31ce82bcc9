"""When a target is due: once per interval at a phase of its own, made from its id.

The load is spread that way, and a restart scrapes at the same moments. Intervals are aligned to the store's clock. A
scrape that comes late is not made up for.
"""

import zlib

SPREAD = 0.75
"""Scrapes start in this part of an interval, so that what they bring is in the window that ends with it."""


PLACES = 100
"""So many moments of an interval are told apart: what is due together costs one wake-up, not one each."""


def phase(target_id: str) -> float:
    """A target's place in the interval, 0 to 1: the same in every process."""
    return zlib.crc32(target_id.encode()) / 2**32


def phase_s(target_id: str, *, interval_s: float) -> float:
    """How long behind a multiple of the interval a target is due."""
    return int(phase(target_id) * SPREAD * PLACES) * interval_s / PLACES


def next_due(now_s: float, *, phase_s: float, interval_s: float) -> float:
    """The first moment after ``now_s`` that lies ``phase_s`` behind a multiple of ``interval_s``."""
    rounds = (now_s - phase_s) // interval_s + 1
    return rounds * interval_s + phase_s


def rounds_to_skip(consecutive_failures: int, *, interval_s: float, max_backoff_s: float) -> int:
    """How many scrapes a failing target is spared: 0, 1, 3, 7, … within ``max_backoff_s``.

    The first failure costs nothing: one lost scrape is no reason to look away.
    """
    if consecutive_failures < 2:
        return 0
    most = max(0, int(max_backoff_s / interval_s) - 1)
    return int(min(most, 2 ** min(consecutive_failures - 1, 30) - 1))


def next_round(last: int, now_s: float, *, interval_s: float) -> int:
    """The round to close next, where round n ends at n intervals; ``last`` was closed last, 0 for none.

    Normally the one after it. A round that took longer than an interval skips to the one that has just ended, and a
    clock that was set back is followed, not waited for.
    """
    ended = int(now_s // interval_s)
    return min(max(last + 1, ended), ended + 1) if last else ended + 1
