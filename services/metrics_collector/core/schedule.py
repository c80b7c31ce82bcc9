"""When a target is due: once per interval at a phase of its own, made from its id.

Windows end at multiples of the interval on the store's clock, and are as old as the scrapes in them. So scrapes come
shortly before those ends, spread over as much time as their number needs: a few targets over a tenth of the interval,
thousands over three quarters. The same targets are scraped at the same moments by every process. A scrape that was late
is not repeated.
"""

import zlib

LEAD = 0.15
"""The last scrapes are due this part of an interval before a window's end, so that what they bring is in it."""
MOST_SPREAD = 0.75
"""The largest part of an interval over which scrapes are spread; in the rest the last windows are worked."""
SPREADS = (MOST_SPREAD / 8, MOST_SPREAD / 4, MOST_SPREAD / 2, MOST_SPREAD)
"""Far apart, so that a fleet that grows by a server keeps its moments."""
SCRAPES_PER_S = 500.0
"""So many are begun in a second, where the interval has room for it."""
PLACES = 100
"""The number of distinct moments in an interval: scrapes that are due together cost one wake-up, not one each."""


def phase(target_id: str) -> float:
    """A target's place in the interval, 0 to 1: the same in every process."""
    return zlib.crc32(target_id.encode()) / 2**32


def spread_of(targets: int, *, interval_s: float) -> float:
    """The part of an interval over which the scrapes of so many targets are spread."""
    needed = targets / SCRAPES_PER_S / interval_s
    return next((spread for spread in SPREADS if needed <= spread), MOST_SPREAD)


def phase_s(target_id: str, *, spread: float, interval_s: float) -> float:
    """How long behind a multiple of the interval a target is due, where scrapes take ``spread`` of it."""
    return round((1.0 - LEAD - spread * phase(target_id)) * PLACES) * interval_s / PLACES


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
