"""The recent samples of one replica, with counters that never fall.

Each counter is carried as the total counted since the series began: a counter that fell, or a server that started
anew, adds what it has counted since. So the increase over any window is the difference of two points. The same holds
for histograms. A counter that one page lacks is absent from that point, not zero; the next page that has it brings
what was counted meanwhile.

A restart is told by the server's start time, else by a generation counter that fell. Where neither shows (several
API servers behind one port have no ``process_*`` series), each counter tells its own reset by falling.

Prompt tokens that were really computed come from the best source that the server has:

1. ``prompt_tokens_by_source{source="local_compute"}``
2. ``prompt_tokens − prompt_tokens_cached``
3. ``prompt_tokens − prefix_cache_hits − external_prefix_cache_hits``
4. ``prompt_tokens``, where no cache is reported in tokens

In 2 and 3 the two counters do not move at the same moment (hits count at admission, prompts at their first token), so
the difference may fall without a reset. Its running maximum is taken, which is never more than was computed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from metrics_collector.core.dialect import Quantity
from metrics_collector.core.sample import Histogram, PageSample


class Counter(StrEnum):
    """What a series counts."""

    PREFILL_TOKENS = "prefill_tokens"
    PREFILL_CACHED_TOKENS = "prefill_cached_tokens"
    DECODE_TOKENS = "decode_tokens"
    FINISHED = "finished"
    PREEMPTIONS = "preemptions"
    PREFIX_QUERIES = "prefix_queries"
    PREFIX_HITS = "prefix_hits"


_PLAIN_COUNTERS = (
    (Counter.DECODE_TOKENS, Quantity.GENERATION_TOKENS),
    (Counter.FINISHED, Quantity.FINISHED),
    (Counter.PREEMPTIONS, Quantity.PREEMPTIONS),
    (Counter.PREFIX_QUERIES, Quantity.PREFIX_QUERIES),
    (Counter.PREFIX_HITS, Quantity.PREFIX_HITS),
)
# After so long without a page, an average over the gap would say nothing about now.
MAX_GAP_S = 60.0
# Two readings of one start time may be rounded differently; a restart takes longer than this.
_SAME_START_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One sample on the series' own scale; ``reset`` when something fell between the point before and this one."""

    at_s: float
    sample: PageSample
    totals: Mapping[Counter, float]
    histograms: Mapping[Quantity, Histogram]
    reset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one replica, oldest first, of one unbroken stretch of being awake (or asleep).

    ``since_s`` is when the stretch began, ``moved_at_s`` when the engine was last seen to do anything. ``levels`` and
    ``level_histograms`` hold the last reading of each counter as it stood on its page, ``totals`` and
    ``total_histograms`` the same on the series' scale.
    """

    points: tuple[Point, ...] = ()
    since_s: float = -math.inf
    moved_at_s: float = -math.inf
    levels: Mapping[Counter, float] = field(default_factory=dict)
    totals: Mapping[Counter, float] = field(default_factory=dict)
    level_histograms: Mapping[Quantity, Histogram] = field(default_factory=dict)
    total_histograms: Mapping[Quantity, Histogram] = field(default_factory=dict)

    @property
    def latest(self) -> Point | None:
        """The newest point."""
        return self.points[-1] if self.points else None


def extend(series: Series, sample: PageSample, *, at_s: float, keep_s: float) -> Series:
    """``series`` with one more sample, read at ``at_s``; points older than ``keep_s`` before it are dropped.

    The newest of those is kept as the base of a window, so that what was counted while scrapes failed is not lost.
    A clock that went backwards, a gap of more than ``MAX_GAP_S`` and a wake from sleep start the stretch anew: frozen
    gauges say nothing about load.
    """
    last = series.latest
    if last is not None and at_s <= last.at_s:
        series, last = Series(), None
    restarted = last is not None and _restarted(series, last.sample, sample)
    levels, totals, fell = _count(series, sample, restarted=restarted)
    level_histograms, total_histograms, histogram_fell = _count_histograms(series, sample, restarted=restarted)
    point = Point(
        at_s=at_s,
        sample=sample,
        totals={counter: totals[counter] for counter in _levels(sample)},
        histograms={quantity: total_histograms[quantity] for quantity in sample.histograms},
        reset=restarted or fell or histogram_fell,
    )
    woke_or_slept = last is not None and (last.sample.awake is False) != (sample.awake is False)
    fresh = last is None or woke_or_slept or at_s - last.at_s > MAX_GAP_S
    moved = last is None or restarted or _activity(sample) != _activity(last.sample)
    points = (point,) if fresh else _trim((*series.points, point), oldest_s=at_s - keep_s)
    return Series(
        points=points,
        since_s=at_s if fresh else series.since_s,
        moved_at_s=at_s if fresh or moved else series.moved_at_s,
        levels=levels,
        totals=totals,
        level_histograms=level_histograms,
        total_histograms=total_histograms,
    )


def is_stuck(series: Series, *, stuck_after_s: float) -> bool:
    """Whether the newest sample shows requests that nothing has moved for longer than ``stuck_after_s``.

    ``stuck_after_s`` is the role's longest iteration. Zero requests with still counters are idleness, not this; a
    sleeping server is asleep, not stuck.
    """
    last = series.latest
    if last is None or last.sample.awake is False:
        return False
    gauges = last.sample.gauges
    busy = gauges.get(Quantity.RUNNING, 0.0) > 0 or gauges.get(Quantity.WAITING, 0.0) > 0
    return busy and last.at_s - series.moved_at_s > stuck_after_s


def _trim(points: tuple[Point, ...], *, oldest_s: float) -> tuple[Point, ...]:
    first = 0
    while first + 1 < len(points) and points[first + 1].at_s <= oldest_s:
        first += 1
    return points[first:]


def _activity(sample: PageSample) -> tuple[object, ...]:
    """What a living engine with requests moves in every iteration.

    The prompt counters move at a prompt's first token only, the KV usage with every chunk of it. Waiting requests are
    left out: arrivals alone do not show that the engine lives.
    """
    gauges = sample.gauges
    return (gauges.get(Quantity.RUNNING), gauges.get(Quantity.KV_USAGE), sample.counters, sample.histograms)


def _restarted(series: Series, before: PageSample, after: PageSample) -> bool:
    if before.start_time_s is not None and after.start_time_s is not None:
        return abs(after.start_time_s - before.start_time_s) > _SAME_START_S
    generated = after.counters.get(Quantity.GENERATION_TOKENS)
    return generated is not None and generated < series.levels.get(Counter.DECODE_TOKENS, 0.0)


def _levels(sample: PageSample) -> dict[Counter, float]:
    """The counters as they stand on the page."""
    counters = sample.counters
    found = {counter: counters[quantity] for counter, quantity in _PLAIN_COUNTERS if quantity in counters}
    computed, cached = _prompt_levels(counters)
    if computed is not None:
        found[Counter.PREFILL_TOKENS] = computed
    if cached is not None:
        found[Counter.PREFILL_CACHED_TOKENS] = cached
    return found


def _prompt_levels(counters: Mapping[Quantity, float]) -> tuple[float | None, float | None]:
    """(computed, served from the prefix cache) prompt tokens, in the order of the module's docstring."""
    computed = counters.get(Quantity.PROMPT_COMPUTED)
    if computed is not None:
        return computed, counters.get(Quantity.PROMPT_CACHE_HIT)
    prompt = counters.get(Quantity.PROMPT_TOKENS)
    external = counters.get(Quantity.EXTERNAL_HIT_TOKENS, 0.0)
    cached = counters.get(Quantity.PROMPT_CACHED)
    if prompt is not None and cached is not None:
        return max(0.0, prompt - cached), max(0.0, cached - external)
    hits = counters.get(Quantity.PREFIX_HIT_TOKENS)
    if prompt is not None and hits is not None:
        return max(0.0, prompt - hits - external), hits
    return prompt, None


def _count(
    series: Series, sample: PageSample, *, restarted: bool
) -> tuple[dict[Counter, float], dict[Counter, float], bool]:
    """(levels, totals, whether a counter fell by itself)."""
    levels, totals, fell = dict(series.levels), dict(series.totals), False
    may_fall = {Counter.PREFILL_TOKENS} if Quantity.PROMPT_COMPUTED not in sample.counters else set()
    if restarted:
        levels = dict.fromkeys(levels, 0.0)
    for counter, level in _levels(sample).items():
        before = levels.get(counter)
        if before is None:
            # Its first reading: what it counted before the series began is nobody's increase.
            levels[counter], totals[counter] = level, 0.0
            continue
        if level < before:
            if counter in may_fall:
                continue
            fell = True
            before = 0.0
        levels[counter] = level
        totals[counter] += level - before
    return levels, totals, fell


def _count_histograms(
    series: Series, sample: PageSample, *, restarted: bool
) -> tuple[dict[Quantity, Histogram], dict[Quantity, Histogram], bool]:
    """(levels, totals, whether a histogram fell by itself). Other bounds than before are a reset too."""
    levels, totals, fell = dict(series.level_histograms), dict(series.total_histograms), False
    for quantity, histogram in sample.histograms.items():
        before = levels.get(quantity)
        total = totals.get(quantity)
        levels[quantity] = histogram
        if before is None or total is None:
            totals[quantity] = _zero(histogram.bounds_s)
            continue
        same_bounds = before.bounds_s == histogram.bounds_s
        fallen = any(now < then for now, then in zip(histogram.cumulative, before.cumulative, strict=False))
        if restarted or fallen or not same_bounds or histogram.sum_s < before.sum_s:
            fell = fell or not restarted
            before = _zero(histogram.bounds_s)
            total = total if same_bounds else _zero(histogram.bounds_s)
        totals[quantity] = _add_increase(total, before, histogram)
    return levels, totals, fell


def _zero(bounds_s: tuple[float, ...]) -> Histogram:
    return Histogram(bounds_s=bounds_s, cumulative=(0.0,) * len(bounds_s), sum_s=0.0)


def _add_increase(total: Histogram, before: Histogram, now: Histogram) -> Histogram:
    return Histogram(
        bounds_s=total.bounds_s,
        cumulative=tuple(
            counted + later - earlier
            for counted, earlier, later in zip(total.cumulative, before.cumulative, now.cumulative, strict=True)
        ),
        sum_s=total.sum_s + now.sum_s - before.sum_s,
    )
