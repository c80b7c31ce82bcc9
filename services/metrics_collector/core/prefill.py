"""Spreads the prompt tokens that a server counts at once over the time that their work took.

A server counts a prompt at its first token only: the work of ten seconds shows as one step of the counter, and a
window that holds the step would show a rate of several times what the hardware can do. So an increase flows out over
the time that its work took: evenly, from the scrape before it was seen. What flows is exactly what was counted: over a
long run rates times time are the tokens. The rate runs behind the work by at most that time. An increase that finds
some of the earlier ones still flowing is put to them, and the flow is set anew for all that is left.

The time that the work took is the mean prefill time of finished requests. Where the newest first tokens took longer
(mean TTFT less mean queue time), and the counter stood still for as long, it is that. It is at least the time between
two scrapes, and at most ``MAX_WORK_S``.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_WORK_S = 60.0
_SHORTEST_S = 1e-3
# Fewer requests than this are none: what is left of old ones fades, and never ends.
_NOTHING = 1e-6
# What requests took is forgotten by half in this time.
_HALF_LIFE_S = 30.0


class Evidence(NamedTuple):
    """Seconds and requests, (n,) each: increases since the last scrape, or such increases with the older fading."""

    prefill_s: Floats
    prefills: Floats
    ttft_s: Floats
    ttfts: Floats
    queue_s: Floats
    queues: Floats


class Flow(NamedTuple):
    """``left`` tokens flow at ``rate`` a second; ``total`` have flowed, never more than were counted. (n,) each."""

    left: Floats
    rate: Floats
    total: Floats


def remember(known: Floats, fresh: Evidence, gap_s: Floats) -> Floats:
    """``known`` (n, 6) in the order of ``Evidence``, faded over ``gap_s``, with ``fresh`` added."""
    fading = np.exp2(-gap_s / _HALF_LIFE_S)
    return np.asarray(known * fading[:, None] + np.array(fresh).T)


def work_time_s(known: Floats, fresh: Evidence, *, gap_s: Floats, still_s: Floats) -> Floats:
    """How long the work behind an increase took; ``still_s`` is the time since the increase before it."""
    # Evidence is pairs of seconds and requests: of prefill, TTFT and queue.
    seen = known[:, 1::2] > _NOTHING
    means_s = np.divide(known[:, ::2], known[:, 1::2], out=np.zeros(seen.shape), where=seen)
    prefill_s, ttft_s, queue_s = means_s[:, 0], means_s[:, 1], means_s[:, 2]
    fresh_s = np.divide(fresh.ttft_s, fresh.ttfts, out=np.zeros(len(known)), where=fresh.ttfts > _NOTHING)
    told_s = np.where(seen[:, 0], prefill_s, np.maximum(ttft_s - queue_s, 0.0))
    work_s = np.maximum(told_s, np.minimum(fresh_s - queue_s, still_s))
    return np.asarray(np.maximum(gap_s, np.minimum(work_s, MAX_WORK_S)))


def flow_on(flow: Flow, increase: Floats, *, gap_s: Floats, work_s: Floats) -> Flow:
    """``flow`` after ``gap_s`` more seconds, at the end of which ``increase`` was seen."""
    left = flow.left + increase
    rate = np.where(increase > 0, left / np.maximum(work_s, _SHORTEST_S), flow.rate)
    out = np.minimum(left, rate * gap_s)
    # The remainder of rounding flows too: a rate that never ends would make a server look busy for ever.
    out = np.where(left - out <= 1e-9 * left, left, out)
    return Flow(left - out, rate, flow.total + out)
