"""Counters, gauges and histograms of one replica over time."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics_collector.core.dialect import Quantity
from metrics_collector.core.sample import Histogram, PageSample
from metrics_collector.core.series import MAX_GAP_S, Counter, Series, extend, is_stuck
from metrics_collector.core.windows import Window, merge_histograms, next_round, replica_window


def page(
    generated: float | None = None,
    *,
    running: float | None = None,
    waiting: float | None = None,
    start_time: float | None = None,
    awake: bool | None = None,
    kv: float | None = None,
    ttft: Histogram | None = None,
    **counters: float,
) -> PageSample:
    gauges = {
        Quantity.RUNNING: running,
        Quantity.WAITING: waiting,
        Quantity.START_TIME: start_time,
        Quantity.KV_USAGE: kv,
        Quantity.AWAKE: None if awake is None else float(awake),
    }
    found = {Quantity(name): value for name, value in counters.items()}
    if generated is not None:
        found[Quantity.GENERATION_TOKENS] = generated
    return PageSample(
        gauges={quantity: value for quantity, value in gauges.items() if value is not None},
        counters=found,
        histograms={Quantity.TTFT: ttft} if ttft is not None else {},
        kv_usage_max_ratio=kv,
    )


def series_of(*samples: tuple[float, PageSample], keep_s: float = 30.0) -> Series:
    series = Series()
    for at_s, sample in samples:
        series = extend(series, sample, at_s=at_s, keep_s=keep_s)
    return series


def histogram(*cumulative: float, bounds: tuple[float, ...] = (0.1, 1.0, math.inf), sum_s: float = 0.0) -> Histogram:
    return Histogram(bounds_s=bounds, cumulative=cumulative, sum_s=sum_s)


def totals(series: Series, counter: Counter) -> list[float]:
    return [point.totals[counter] for point in series.points]


def test_case_7_a_reset_counts_what_came_since() -> None:
    series = series_of((0, page(100)), (10, page(150)), (20, page(10)), (30, page(60)))

    counted = totals(series, Counter.DECODE_TOKENS)

    assert [after - before for before, after in itertools.pairwise(counted)] == [50, 10, 50]
    assert [point.reset for point in series.points] == [False, False, True, False]
    seen = replica_window(series, Window(start_s=0, end_s=30))
    assert seen is not None
    assert seen.reset
    assert seen.rates[Counter.DECODE_TOKENS] == pytest.approx(110 / 30)


def test_a_window_behind_the_reset_is_not_flagged() -> None:
    series = series_of((0, page(100)), (10, page(10)), (20, page(60)), (30, page(110)))

    seen = replica_window(series, Window(start_s=10, end_s=30))

    assert seen is not None
    assert not seen.reset
    assert seen.rates[Counter.DECODE_TOKENS] == 5.0


def test_a_restart_is_told_by_its_start_time_even_when_the_counter_is_higher_by_then() -> None:
    series = series_of((0, page(100, start_time=1.0)), (10, page(150, start_time=5.0)))

    assert totals(series, Counter.DECODE_TOKENS) == [0, 150]
    assert series.points[-1].reset


def test_a_counter_of_a_label_that_falls_alone_is_a_reset_of_that_counter() -> None:
    series = series_of((0, page(100, finished=9, start_time=1.0)), (1, page(120, finished=2, start_time=1.0)))

    assert totals(series, Counter.DECODE_TOKENS) == [0, 20]
    assert totals(series, Counter.FINISHED) == [0, 2]
    assert series.points[-1].reset


def test_a_counter_missing_on_one_page_is_missing_there_and_nothing_is_lost() -> None:
    series = series_of((0, page(100)), (1, page(None, running=1)), (2, page(160)))

    assert Counter.DECODE_TOKENS not in series.points[1].totals
    assert series.points[2].totals[Counter.DECODE_TOKENS] == 60


def test_what_was_counted_before_the_first_scrape_is_nobodys_rate() -> None:
    series = series_of((0, page(1_000_000)), (5, page(1_000_050)))

    seen = replica_window(series, Window(start_s=0, end_s=5))

    assert seen is not None
    assert seen.rates[Counter.DECODE_TOKENS] == 10.0


def test_counters_over_a_gap_of_failed_scrapes_are_kept_and_spread_over_it() -> None:
    series = series_of((0, page(0)), (1, page(100)), (21, page(2100)), keep_s=5)

    seen = replica_window(series, Window(start_s=16, end_s=21))

    assert seen is not None
    assert seen.increases[Counter.DECODE_TOKENS] == 2000
    assert seen.rates[Counter.DECODE_TOKENS] == 100.0


def test_after_a_long_gap_the_replica_warms_anew() -> None:
    series = series_of((0, page(0)), (MAX_GAP_S + 1, page(9000)))

    seen = replica_window(series, Window(start_s=MAX_GAP_S - 4, end_s=MAX_GAP_S + 1))

    assert seen is not None
    assert seen.warming
    assert seen.rates == {}


def test_no_page_in_the_window_is_no_window() -> None:
    series = series_of((0, page(0, running=4)), (1, page(10, running=4)))

    assert replica_window(series, Window(start_s=1, end_s=6)) is None


def test_a_replica_warms_for_one_window() -> None:
    series = series_of(*((float(at_s), page(10 * at_s, running=1)) for at_s in range(1, 9)))

    early = replica_window(series, Window(start_s=-1, end_s=4))
    later = replica_window(series, Window(start_s=1, end_s=6))

    assert early is not None
    assert early.warming
    assert early.rates[Counter.DECODE_TOKENS] == 10.0, "two pages are enough for a rate, if not for trust"
    assert later is not None
    assert not later.warming


def test_a_gauge_is_averaged_over_time_not_over_pages() -> None:
    # 0 for four seconds, then 10 for one: pages came in a burst at the end.
    series = series_of(
        (1, page(0, waiting=0)),
        (4.9, page(1, waiting=0)),
        (5.0, page(2, waiting=10)),
        (5.1, page(3, waiting=10)),
        (5.2, page(4, waiting=10)),
        (5.3, page(5, waiting=10)),
    )

    seen = replica_window(series, Window(start_s=0.5, end_s=5.5))

    assert seen is not None
    assert seen.waiting == pytest.approx((0.1 * 5 + 0.3 * 10) / 4.3)


def test_a_clock_that_went_backwards_starts_the_series_anew() -> None:
    series = series_of((100, page(100)), (50, page(150)), (51, page(160)))

    assert [point.at_s for point in series.points] == [50, 51]
    assert totals(series, Counter.DECODE_TOKENS) == [0, 10]


# Sleep


def test_a_sleeping_servers_frozen_gauges_are_not_counted() -> None:
    series = series_of((0, page(5, running=2, awake=True)), (1, page(5, running=2, awake=False)))

    seen = replica_window(series, Window(start_s=-4, end_s=1))

    assert seen is not None
    assert seen.asleep
    assert seen.running is None
    assert seen.values() == ()


def test_a_woken_replicas_window_begins_at_its_wake() -> None:
    series = series_of(
        (0, page(100, running=3, awake=True)),
        (1, page(100, running=3, awake=False)),
        (2, page(100, running=3, awake=False)),
        (3, page(100, running=0, awake=True)),
        (4, page(150, running=1, awake=True)),
    )

    seen = replica_window(series, Window(start_s=-1, end_s=4))

    assert seen is not None
    assert seen.warming
    assert seen.running == 0.5
    assert seen.rates[Counter.DECODE_TOKENS] == 50.0


# Stuck


def test_case_5_a_gauge_that_stands_while_nothing_moves_is_stuck() -> None:
    series = series_of(*((float(at_s), page(700, running=7, waiting=200, kv=0.9)) for at_s in range(12)))

    assert is_stuck(series, stuck_after_s=10)
    assert not is_stuck(series, stuck_after_s=30), "its longest iteration may not be over"


def test_zero_with_still_counters_is_idle_not_stuck() -> None:
    series = series_of(*((float(at_s), page(700, running=0, waiting=0)) for at_s in range(60)))

    assert not is_stuck(series, stuck_after_s=10)


def test_a_long_prefill_moves_the_kv_usage_only_and_is_not_stuck() -> None:
    # As captured: prompt and generation counters stand still until the first token of a chunked prefill.
    series = series_of(*((float(at_s), page(0, running=1, kv=at_s / 100)) for at_s in range(60)))

    assert not is_stuck(series, stuck_after_s=10)


def test_arrivals_at_a_wedged_server_do_not_make_it_look_alive() -> None:
    series = series_of(*((float(at_s), page(5, running=8, waiting=float(at_s))) for at_s in range(12)))

    assert is_stuck(series, stuck_after_s=10)


def test_a_stuck_server_that_moves_again_is_not_stuck() -> None:
    series = series_of(*((float(at_s), page(5, running=8)) for at_s in range(12)), (12, page(6, running=8)))

    assert not is_stuck(series, stuck_after_s=10)


def test_a_sleeping_server_with_frozen_requests_is_asleep_not_stuck() -> None:
    series = series_of(*((float(at_s), page(5, running=2, awake=False)) for at_s in range(60)))

    assert not is_stuck(series, stuck_after_s=10)


# Prompt tokens


def prefill(*pages: PageSample) -> tuple[list[float], list[float]]:
    series = series_of(*((float(at_s), sample) for at_s, sample in enumerate(pages)))
    return totals(series, Counter.PREFILL_TOKENS), totals(series, Counter.PREFILL_CACHED_TOKENS)


def test_computed_prompt_tokens_come_by_source_where_the_server_tells() -> None:
    computed, cached = prefill(
        page(0, prompt_tokens=0, prompt_computed=0, prompt_cache_hit=0, prompt_cached=0),
        page(0, prompt_tokens=100, prompt_computed=30, prompt_cache_hit=20, prompt_cached=70),
    )

    assert computed == [0, 30], "50 of the 100 came from another server's cache"
    assert cached == [0, 20]


def test_computed_prompt_tokens_are_prompts_less_cached_ones_in_older_releases() -> None:
    computed, cached = prefill(
        page(0, prompt_tokens=0, prompt_cached=0, external_hit_tokens=0),
        page(0, prompt_tokens=100, prompt_cached=70, external_hit_tokens=50),
    )

    assert computed == [0, 30]
    assert cached == [0, 20]


def test_hits_counted_before_their_prompt_never_make_more_prefill_than_there_was() -> None:
    # 0.12: hits move at admission, prompts at the first token. Two prompts of 1000 tokens, 600 of each cached.
    computed, _ = prefill(
        page(0, prompt_tokens=0, prefix_hit_tokens=0),
        page(0, prompt_tokens=0, prefix_hit_tokens=600),
        page(1, prompt_tokens=1000, prefix_hit_tokens=600),
        page(1, prompt_tokens=1000, prefix_hit_tokens=1200),
        page(2, prompt_tokens=2000, prefix_hit_tokens=1200),
    )

    assert computed == [0, 0, 400, 400, 800]


def test_a_release_that_reports_no_cache_counts_every_prompt_token() -> None:
    series = series_of((0, page(0, prompt_tokens=0)), (1, page(0, prompt_tokens=100)))

    assert totals(series, Counter.PREFILL_TOKENS) == [0, 100]
    assert Counter.PREFILL_CACHED_TOKENS not in series.points[-1].totals


# Histograms


def test_a_histogram_becomes_the_increase_of_its_buckets() -> None:
    series = series_of((0, page(0, ttft=histogram(1, 2, 3, sum_s=5))), (1, page(1, ttft=histogram(2, 5, 7, sum_s=9))))

    seen = replica_window(series, Window(start_s=0, end_s=1))

    assert seen is not None
    assert seen.histograms[Quantity.TTFT] == histogram(1, 3, 4, sum_s=4)


def test_a_histogram_reset_adds_what_came_since() -> None:
    series = series_of(
        (0, page(10, ttft=histogram(1, 2, 3, sum_s=5))),
        (1, page(20, ttft=histogram(3, 4, 5, sum_s=6))),
        (2, page(1, ttft=histogram(0, 1, 1, sum_s=0.5))),
    )

    seen = replica_window(series, Window(start_s=0, end_s=2))

    assert seen is not None
    assert seen.histograms[Quantity.TTFT] == histogram(2, 3, 3, sum_s=1.5)
    assert seen.reset


def test_a_fleet_half_way_through_an_upgrade_merges_on_the_bounds_in_common() -> None:
    old = histogram(1, 4, 5, bounds=(0.1, 1.0, math.inf), sum_s=2)
    new = histogram(1, 2, 3, 5, bounds=(0.1, 0.5, 1.0, math.inf), sum_s=3)

    for histograms in ([old, new], [new, old]):
        assert merge_histograms(histograms) == histogram(2, 7, 10, bounds=(0.1, 1.0, math.inf), sum_s=5)
    assert merge_histograms([]) is None


# Rounds


@pytest.mark.parametrize(
    ("last", "now_s", "expected"),
    [(0, 10.3, 6), (6, 12.0, 7), (6, 12.1, 7), (6, 13.9, 7), (6, 19.0, 9), (6, 4.5, 3)],
    ids=["first", "on time", "a little late", "nearly too late", "rounds lost", "the clock was set back"],
)
def test_rounds_are_aligned_and_none_is_waited_for(last: int, now_s: float, expected: int) -> None:
    assert next_round(last, now_s, interval_s=2.0) == expected


# Invariants


@given(
    levels=st.lists(st.tuples(st.floats(0.1, 20), st.one_of(st.none(), st.floats(0, 1e9))), min_size=1, max_size=30),
    keep_s=st.floats(1, 20),
)
def test_no_sequence_of_pages_gives_a_negative_or_infinite_rate(
    levels: list[tuple[float, float | None]], keep_s: float
) -> None:
    series, now_s = Series(), 1000.0
    for step_s, level in levels:
        now_s += step_s
        series = extend(series, page(level, running=1), at_s=now_s, keep_s=keep_s)
        seen = replica_window(series, Window(start_s=now_s - keep_s, end_s=now_s))
        assert seen is not None
        assert all(math.isfinite(rate) and rate >= 0 for rate in seen.rates.values())
        assert len(series.points) <= 2 + keep_s / 0.1


@given(
    gains=st.lists(st.floats(0, 1000), min_size=2, max_size=12),
    resets=st.sets(st.integers(1, 11)),
    drop=st.integers(1, 10),
)
def test_nothing_is_lost_but_what_a_reset_hides(gains: list[float], resets: set[int], drop: int) -> None:
    """The total equals what was really counted, whatever pages are missed in between."""
    level, counted = 500.0, 0.0
    series = extend(Series(), page(level, start_time=0.0), at_s=0, keep_s=100)
    for index, gain in enumerate(gains, start=1):
        if index in resets:
            level = 0.0
        level += gain
        counted += gain
        if index % drop or index == len(gains) or index in resets or index + 1 in resets:
            start = float(max((reset for reset in resets if reset <= index), default=0))
            series = extend(series, page(level, start_time=start), at_s=index, keep_s=100)

    assert series.points[-1].totals[Counter.DECODE_TOKENS] == pytest.approx(counted)
