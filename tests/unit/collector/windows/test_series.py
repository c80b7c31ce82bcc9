"""Counters, gauges and histograms of one replica over time."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, SCALARS, Reading, schema_of
from metrics_collector.core.table import MAX_GAP_S, SeriesTable
from metrics_collector.core.window import Window, window_length_s
from tests.unit.collector.windows.fleet import BARE, PLAIN, OneServer, increase, page, value
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.signals import Counter, Gauge, Latency


def histogram(server: OneServer, start_s: float, end_s: float) -> list[float] | None:
    """Cumulative increases of the first latency, then its sum; None where there is none."""
    found = server.window(start_s, end_s).histograms
    row = found[0].increases[0] if found else np.array([math.nan])
    return None if np.isnan(row).any() else row.tolist()


# Case 7


def test_a_reset_counts_what_came_since_and_makes_no_spike() -> None:
    server = OneServer((0, page(100)), (10, page(150)), (20, page(10)), (30, page(60)))

    steps = [increase(server.window(start_s, start_s + 10), Counter.DECODE_TOKENS) for start_s in (0.0, 10.0, 20.0)]

    assert steps == [50, 10, 50]
    assert [bool(server.window(start, start + 10).reset[0]) for start in (0.0, 10.0, 20.0)] == [False, True, False]
    whole = server.window(0, 30)
    assert whole.reset[0]
    assert value(whole, pb.SIGNAL_DECODE_TPS) == pytest.approx(110 / 30)


def test_a_window_behind_the_reset_is_not_flagged() -> None:
    server = OneServer((0, page(100)), (10, page(10)), (20, page(60)), (30, page(110)))

    seen = server.window(10, 30)

    assert not seen.reset[0]
    assert value(seen, pb.SIGNAL_DECODE_TPS) == 5.0


def test_a_restart_is_told_by_its_start_time_even_when_the_counter_is_higher_by_then() -> None:
    server = OneServer((0, page(100, start_time_s=1.0)), (10, page(150, start_time_s=5.0)))

    assert server.total(Counter.DECODE_TOKENS) == 150
    assert server.window(0, 10).reset[0]


def test_a_restart_is_told_by_the_start_time_before_a_page_that_lacked_it() -> None:
    server = OneServer((0, page(100, start_time_s=1.0)), (1, page(110)), (2, page(150, start_time_s=5.0)))

    assert server.total(Counter.DECODE_TOKENS) == 10 + 150


def test_a_start_time_rounded_otherwise_is_no_restart() -> None:
    server = OneServer((0, page(100, start_time_s=1000.4)), (1, page(110, start_time_s=1000.0)))

    assert server.total(Counter.DECODE_TOKENS) == 10
    assert not server.window(0, 1).reset[0]


def test_without_a_start_time_fallen_generation_restarts_all_counters() -> None:
    server = OneServer((0, page(100, finished=9)), (1, page(20, finished=12)))

    assert server.total(Counter.FINISHED) == 12, "it had counted 12 since the restart, more than before it"
    assert server.total(Counter.DECODE_TOKENS) == 20


def test_a_counter_of_a_label_that_falls_alone_is_a_reset_of_that_counter() -> None:
    server = OneServer((0, page(100, finished=9, start_time_s=1.0)), (1, page(120, finished=2, start_time_s=1.0)))

    assert server.total(Counter.DECODE_TOKENS) == 20
    assert server.total(Counter.FINISHED) == 2
    assert server.window(0, 1).reset[0]


def test_engines_summed_in_another_order_are_no_reset() -> None:
    server = OneServer((0, page(1, prefill_seconds=0.1 + 0.2 + 0.3)), (1, page(2, prefill_seconds=0.3 + 0.2 + 0.1)))

    assert 0.3 + 0.2 + 0.1 < 0.1 + 0.2 + 0.3
    assert server.total(Counter.PREFILL_SECONDS) == 0
    assert not server.window(0, 1).reset[0]


def test_a_counter_missing_on_one_page_is_missing_there_and_nothing_is_lost() -> None:
    server = OneServer((0, page(100)), (1, page(None, running=1)), (2, page(160)))

    assert increase(server.window(0, 1), Counter.DECODE_TOKENS) is None
    seen = server.window(1, 2)
    assert increase(seen, Counter.DECODE_TOKENS) == 60
    assert value(seen, pb.SIGNAL_DECODE_TPS) == 30.0, "counted over two seconds, not over the one of the window"


def test_a_counter_missing_on_the_newest_page_is_told_by_the_one_before() -> None:
    server = OneServer((0, page(100)), (1, page(150)), (2, page(None, running=1)))

    assert value(server.window(0, 2), pb.SIGNAL_DECODE_TPS) == 50.0


def test_what_was_counted_before_the_first_scrape_is_nobodys_rate() -> None:
    server = OneServer((0, page(1_000_000)), (5, page(1_000_050)))

    assert value(server.window(0, 5), pb.SIGNAL_DECODE_TPS) == 10.0


def test_a_counter_that_appears_later_begins_with_its_first_reading() -> None:
    server = OneServer((0, page(1)), (1, page(2, preemptions=40)), (2, page(3, preemptions=45)))

    assert server.total(Counter.PREEMPTIONS) == 5


def test_counters_over_a_gap_of_failed_scrapes_are_kept_and_spread_over_it() -> None:
    server = OneServer((0, page(0)), (1, page(100)), (21, page(2100)), keep_s=5)

    seen = server.window(16, 21)

    assert increase(seen, Counter.DECODE_TOKENS) == 2000
    assert value(seen, pb.SIGNAL_DECODE_TPS) == 100.0


def test_after_a_long_gap_the_replica_warms_anew() -> None:
    server = OneServer((0, page(0)), (MAX_GAP_S + 1, page(9000)))

    seen = server.window(MAX_GAP_S - 4, MAX_GAP_S + 1)

    assert seen.warming[0]
    assert value(seen, pb.SIGNAL_DECODE_TPS) is None


def test_no_page_in_the_window_is_no_window() -> None:
    seen = OneServer((0, page(0, running=4)), (1, page(10, running=4))).window(1, 6)

    assert not seen.read[0]
    assert np.isnan(seen.values).all()


def test_a_target_that_nobody_added_has_nothing() -> None:
    seen = OneServer((1, page(0, running=4))).table.close(["stranger"], Window(start_s=0, end_s=5))

    assert not seen.read[0]
    assert np.isnan(seen.values).all()


def test_a_replica_warms_for_one_window() -> None:
    server = OneServer(*((float(at_s), page(10 * at_s, running=1)) for at_s in range(1, 9)))

    early, later = server.window(-1, 4), server.window(1, 6)

    assert early.warming[0]
    assert value(early, pb.SIGNAL_DECODE_TPS) == 10.0, "two pages are enough for a rate, if not for trust"
    assert not later.warming[0]


def test_a_clock_that_went_backwards_starts_the_stretch_anew_and_counters_go_on() -> None:
    server = OneServer((100, page(100)), (50, page(150)), (51, page(160)))

    seen = server.window(40, 51)
    assert seen.warming[0]
    assert increase(seen, Counter.DECODE_TOKENS) == 10
    assert not server.window(95, 100).read[0]
    assert server.total(Counter.DECODE_TOKENS) == 60


def test_several_pages_of_one_round_are_worked_in_order() -> None:
    server = OneServer((1, page(5)), (2, page(3)), (3, page(4)))

    assert server.total(Counter.DECODE_TOKENS) == 4


# Gauges


def test_a_gauge_is_averaged_over_time_not_over_pages() -> None:
    # 0 for four seconds, then 10 for one: pages came in a burst at the end.
    server = OneServer(
        (1, page(0, waiting=0)),
        (4.9, page(1, waiting=0)),
        (5.0, page(2, waiting=10)),
        (5.1, page(3, waiting=10)),
        (5.2, page(4, waiting=10)),
        (5.3, page(5, waiting=10)),
        keep_s=5,
    )

    assert value(server.window(0.5, 5.5), pb.SIGNAL_WAITING) == pytest.approx((0.1 * 5 + 0.3 * 10) / 4.3)


def test_a_gauge_counts_for_the_part_of_the_window_before_its_first_page_inside() -> None:
    # A straight line from 0 at 0 s to 8 at 4 s: over (2, 4] its mean is 6. Only the last page lies inside.
    server = OneServer((0, page(0, running=0)), (4, page(1, running=8)))

    assert value(server.window(2, 4), pb.SIGNAL_RUNNING) == pytest.approx(6.0)


def test_a_single_reading_stands_for_itself() -> None:
    assert value(OneServer((3, page(0, running=8))).window(0, 5), pb.SIGNAL_RUNNING) == 8.0


def test_a_gauge_absent_on_a_page_is_not_zero_there() -> None:
    server = OneServer((1, page(0, running=6)), (2, page(1)), (3, page(2, running=6)))

    assert value(server.window(0, 3), pb.SIGNAL_RUNNING) == pytest.approx(6.0)
    assert value(server.window(0, 3), pb.SIGNAL_WAITING) is None


def test_the_kv_usage_keeps_its_largest_reading() -> None:
    server = OneServer(
        *((float(at_s), page(at_s, kv_usage_ratio=0.4, kv_usage_max_ratio=top)) for at_s, top in enumerate([0.9, 0.5]))
    )

    assert server.window(-5, 1).kv_usage_max_ratio[0] == 0.9
    assert server.window(0, 1).kv_usage_max_ratio[0] == 0.5, "the window is open at its start"


# Sleep


def test_a_sleeping_servers_frozen_gauges_are_not_counted() -> None:
    seen = OneServer((0, page(5, running=2, awake=1)), (1, page(5, running=2, awake=0))).window(-4, 1)

    assert seen.asleep[0]
    assert np.isnan(seen.values).all()


def test_a_woken_replicas_window_begins_at_its_wake() -> None:
    server = OneServer(
        (0, page(100, running=3, awake=1)),
        (1, page(100, running=3, awake=0)),
        (2, page(100, running=3, awake=0)),
        (3, page(100, running=0, awake=1)),
        (4, page(150, running=1, awake=1)),
    )

    seen = server.window(-1, 4)

    assert seen.warming[0]
    assert value(seen, pb.SIGNAL_RUNNING) == 0.5
    assert value(seen, pb.SIGNAL_DECODE_TPS) == 50.0


# Prompt tokens


def test_hits_counted_before_their_prompt_never_make_more_prefill_than_there_was() -> None:
    # Two prompts of 1,000 tokens, 600 of each cached. Hits move at admission, prompts at their first token.
    server = OneServer(
        *(
            (float(at_s), page(at_s, prompt_tokens=prompt, prefill_tokens=max(0, prompt - hits)))
            for at_s, (prompt, hits) in enumerate([(0, 0), (0, 600), (1000, 600), (1000, 1200), (2000, 1200)])
        )
    )

    assert server.total(Counter.PREFILL_TOKENS) == 800
    assert not server.window(0, 4).reset[0]


def test_prefill_that_falls_with_all_prompts_is_a_reset() -> None:
    server = OneServer(
        (0, page(5, prompt_tokens=900, prefill_tokens=800)), (1, page(6, prompt_tokens=50, prefill_tokens=40))
    )

    assert server.total(Counter.PREFILL_TOKENS) == 40
    assert server.window(0, 1).reset[0]


# Histograms


def test_a_histogram_becomes_the_increase_of_its_buckets() -> None:
    server = OneServer((0, page(0, ttft=[1, 2, 3], ttft_s=5)), (1, page(1, ttft=[2, 5, 7], ttft_s=9)))

    assert histogram(server, 0, 1) == [1, 3, 4, 4]


def test_a_histogram_reset_adds_what_came_since() -> None:
    server = OneServer(
        (0, page(10, ttft=[1, 2, 3], ttft_s=5)),
        (1, page(20, ttft=[3, 4, 5], ttft_s=6)),
        (2, page(1, ttft=[0, 1, 1], ttft_s=0.5)),
    )

    assert histogram(server, 0, 2) == [2, 3, 3, 1.5]
    assert server.window(0, 2).reset[0]


def test_a_histogram_of_which_one_bucket_fell_began_anew_as_a_whole() -> None:
    server = OneServer((0, page(1, ttft=[5, 6, 6], ttft_s=1)), (1, page(2, ttft=[1, 7, 7], ttft_s=3)))

    assert histogram(server, 0, 1) == [1, 7, 7, 3]


def test_a_histogram_missing_on_one_page_catches_up() -> None:
    server = OneServer((0, page(0, ttft=[1, 2, 3])), (1, page(1)), (2, page(2, ttft=[4, 5, 6])))

    assert histogram(server, 0, 1) is None
    assert histogram(server, 1, 2) == [3, 3, 3, 0]


def test_a_page_of_another_release_carries_the_counters_over_and_begins_its_histograms_anew() -> None:
    newer = schema_of(((Latency.TTFT, (0.5, math.inf)),))
    server = OneServer(
        (0, page(100, ttft=[1, 2, 3])),
        (1, page(140, ttft=[7, 9], schema=newer)),
        (2, page(190, ttft=[8, 11], schema=newer)),
    )

    assert server.total(Counter.DECODE_TOKENS) == 90
    (found,) = server.window(0, 2).histograms
    assert found.schema is newer
    assert found.increases[0].tolist() == [1, 2, 0]


def test_a_server_that_names_other_buckets_on_every_page_does_not_fill_the_memory() -> None:
    server = OneServer((0, page(0)), keep_s=5, rows=8)
    tracemalloc.start()
    for number in range(1, 501):
        schema = schema_of(((Latency.TTFT, (float(number), math.inf)),))
        server.table.put("t", page(number, ttft=[number, number], schema=schema), at_s=number / 10)
        server.table.advance()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown < 1_000_000
    assert server.total(Counter.DECODE_TOKENS) == 500


# Places


def test_a_place_given_to_another_target_brings_nothing_of_the_one_before() -> None:
    table = SeriesTable(rows=8, capacity=1)
    table.add("old", keep_s=5)
    for at_s in range(3):
        table.put("old", page(1000 * at_s, running=9, ttft=[1, 1, at_s + 1]), at_s=float(at_s))
    table.remove("old")
    table.add("new", keep_s=5)
    table.put("new", page(7, running=1, ttft=[0, 0, 0]), at_s=2.5)

    seen = table.close(["old", "new"], Window(start_s=-1, end_s=3))

    assert seen.read.tolist() == [False, True]
    assert value(seen, pb.SIGNAL_RUNNING, 1) == 1.0
    assert increase(seen, Counter.DECODE_TOKENS, 1) is None
    assert len(table) == 1
    assert "old" not in table


def test_a_page_that_came_before_its_target_left_is_not_the_next_ones() -> None:
    table = SeriesTable(rows=8, capacity=1)
    table.add("old", keep_s=5)
    table.put("old", page(5, running=9), at_s=1.0)
    table.remove("old")
    table.remove("old")
    table.add("new", keep_s=5)

    assert not table.close(["new"], Window(start_s=0, end_s=3)).read[0]


def test_scrapes_ten_times_as_frequent_as_the_ring_has_rows_still_fill_the_window() -> None:
    server = OneServer(*((n / 10, page(n, running=1)) for n in range(1, 101)), keep_s=5, rows=8)

    seen = server.window(5, 10)

    assert value(seen, pb.SIGNAL_DECODE_TPS) == pytest.approx(10.0)
    assert increase(seen, Counter.DECODE_TOKENS) == pytest.approx(50, abs=10), "of the whole window, not its end"
    assert not seen.warming[0]


def test_a_reset_between_crowded_rows_is_not_forgotten() -> None:
    pages = [(0.0, page(100)), (0.8, page(150)), (0.9, page(200)), (1.0, page(10)), (1.1, page(20)), (1.2, page(30))]
    server = OneServer(*pages, keep_s=5, rows=4)

    assert server.window(-3, 2).reset[0]
    assert server.total(Counter.DECODE_TOKENS) == 100 + 10 + 20


def test_windows_end_to_end_hold_every_count_once_though_scrapes_are_uneven() -> None:
    moments_s = [0.9, 1.9, 2.9, 3.9, 4.4, 5.3, 5.9, 7.3, 7.9, 8.9, 9.3, 9.9, 11.2, 11.9, 12.9, 13.9, 14.9]
    pages = [(at_s, page(10 * number)) for number, at_s in enumerate(moments_s)]
    server = OneServer(keep_s=5, rows=9)
    increases = []
    for end_s in (5, 10, 15):
        for at_s, reading in pages:
            if end_s - 5 < at_s <= end_s:
                server.table.put("t", reading, at_s=at_s)
        increases.append(increase(server.window(end_s - 5, end_s), Counter.DECODE_TOKENS))

    assert increases == [40, 70, 50]


def test_a_ring_too_short_for_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        SeriesTable(rows=3)


def test_a_window_holds_two_scrapes_of_a_slow_service() -> None:
    assert [window_length_s(5, interval_s) for interval_s in (0.5, 1, 10, 60)] == [5, 5, 20, 120]


# Taking over


def test_the_first_page_of_the_next_collector_brings_what_came_since_the_last_of_the_one_before() -> None:
    first = OneServer((0, page(100, ttft=[1, 1, 1])), (1, page(150, ttft=[1, 2, 2])))
    (rows,) = first.table.levels(["t"])
    second = OneServer()

    second.table.seed("t", rows.schema, rows.levels[0], at_s=float(rows.at_s[0]))
    second.table.put("t", page(220, ttft=[1, 2, 5]), at_s=3.0)

    assert increase(second.window(-1, 4), Counter.DECODE_TOKENS) == 70
    assert value(second.window(-1, 4), pb.SIGNAL_DECODE_TPS) == 35.0
    assert histogram(second, -1, 4) == [0, 0, 3, 0]


def test_a_seed_does_not_undo_what_was_read_already() -> None:
    server = OneServer((5, page(100)), (6, page(110)))

    server.table.seed("t", PLAIN, page(90).values, at_s=4.0)

    assert server.total(Counter.DECODE_TOKENS) == 10


def test_a_seed_that_does_not_fit_its_schema_is_refused() -> None:
    server = OneServer()

    with pytest.raises(ValueError, match=f"has 3 numbers, its schema has {PLAIN.width}"):
        server.table.seed("t", PLAIN, [1.0, 2.0, 3.0], at_s=1.0)


def test_levels_are_those_of_the_page_and_nothing_is_known_before_it() -> None:
    server = OneServer()
    assert server.table.levels(["t", "stranger"]) == []

    server.table.put("t", page(100, running=2, schema=BARE), at_s=1.0)
    server.table.put("t", page(None, running=3, schema=BARE), at_s=2.0)

    (rows,) = server.table.levels(["stranger", "t"])
    assert rows.positions.tolist() == [1]
    assert rows.levels[0, COUNTER_COLUMN[Counter.DECODE_TOKENS]] == 100
    assert rows.levels[0, GAUGE_COLUMN[Gauge.RUNNING]] == 3
    assert np.isnan(rows.levels[0, COUNTER_COLUMN[Counter.FINISHED]])
    assert rows.at_s.tolist() == [2.0]


# Invariants

levels = st.one_of(st.none(), st.floats(0, 1e9))
histories = st.lists(
    st.tuples(st.floats(0.1, 20), levels, levels, levels, st.sampled_from([None, 0.0, 100.0]), st.booleans()),
    min_size=1,
    max_size=20,
)


def readings(
    history: list[tuple[float, float | None, float | None, float | None, float | None, bool]],
) -> list[Reading]:
    made: list[Reading] = []
    for _, generated, prompt, computed, start_s, bucket in history:
        given_columns = {"prompt_tokens": prompt, "prefill_tokens": computed, "start_time_s": start_s}
        present = {name: number for name, number in given_columns.items() if number is not None}
        ttft = [generated or 0.0] * 3 if bucket else None
        made.append(page(generated, running=1, ttft=ttft, ttft_s=1.0, **present))
    return made


@given(histories, st.floats(1, 20))
def test_no_sequence_of_pages_gives_a_negative_or_infinite_number(
    history: list[tuple[float, float | None, float | None, float | None, float | None, bool]], keep_s: float
) -> None:
    server, now_s = OneServer(keep_s=keep_s, rows=6), 1000.0
    for (step_s, *_), reading in zip(history, readings(history), strict=True):
        now_s += step_s
        server.table.put("t", reading, at_s=now_s)
        seen = server.window(now_s - keep_s, now_s)
        assert seen.read[0]
        for columns in (seen.values, seen.increases, *(item.increases for item in seen.histograms)):
            known = columns[~np.isnan(columns)]
            assert np.isfinite(known).all()
            assert (known >= 0).all()


@given(histories, st.integers(0, 20))
def test_two_collectors_one_after_the_other_count_what_one_would_have(
    history: list[tuple[float, float | None, float | None, float | None, float | None, bool]], split: int
) -> None:
    """Whatever is read, and wherever the second takes over from the first one's last row."""
    pages = readings(history)
    times = np.cumsum([step_s for step_s, *_ in history])
    whole, first, second = OneServer(), OneServer(), OneServer()
    for number, (at_s, reading) in enumerate(zip(times.tolist(), pages, strict=True)):
        whole.table.put("t", reading, at_s=at_s)
        if number == split:
            for rows in first.table.levels(["t"]):
                second.table.seed("t", rows.schema, rows.levels[0], at_s=float(rows.at_s[0]))
        (first if number < split else second).table.put("t", reading, at_s=at_s)

    for counter in Counter:
        parts = [one.total(counter) or 0.0 for one in (first, second)]
        assert sum(parts) == pytest.approx(whole.total(counter) or 0.0, rel=1e-9, abs=1e-6)


@given(
    gains=st.lists(st.floats(0, 1000), min_size=2, max_size=12),
    resets=st.sets(st.integers(1, 11)),
    drop=st.integers(1, 10),
)
def test_nothing_is_lost_but_what_a_reset_hides(gains: list[float], resets: set[int], drop: int) -> None:
    """The total equals what was really counted, whatever pages are missed in between."""
    level, counted = 500.0, 0.0
    server = OneServer((0, page(level, start_time_s=0.0)))
    for index, gain in enumerate(gains, start=1):
        if index in resets:
            level = 0.0
        level += gain
        counted += gain
        if index % drop or index == len(gains) or index in resets or index + 1 in resets:
            start_s = float(max((reset for reset in resets if reset <= index), default=0))
            server.table.put("t", page(level, start_time_s=start_s), at_s=index)

    assert server.total(Counter.DECODE_TOKENS) == pytest.approx(counted)


@given(st.permutations(range(7)), st.data())
def test_the_order_of_targets_changes_nothing(order: list[int], data: st.DataObject) -> None:
    pages = {
        name: [page(data.draw(st.floats(0, 1e6)), running=float(name), ttft=[1, name, 9]) for _ in range(3)]
        for name in range(7)
    }

    def closed(names: list[int]) -> tuple[list[list[float]], list[list[float]]]:
        table = SeriesTable(rows=8, capacity=2)
        for name in names:
            table.add(str(name), keep_s=5)
        for at_s in range(3):
            for name in names:
                table.put(str(name), pages[name][at_s], at_s=float(at_s))
        seen = table.close([str(name) for name in range(7)], Window(start_s=0, end_s=2))
        return np.nan_to_num(seen.values).tolist(), seen.histograms[0].increases.tolist()

    assert closed(list(order)) == closed(list(range(7)))


def test_a_table_of_many_targets_is_the_same_as_many_tables() -> None:
    """Growing, moving between schemas and sharing arrays mixes nothing up."""
    dice = np.random.default_rng(5)
    newer = schema_of(((Latency.TTFT, (0.5, math.inf)), (Latency.E2E, (1.0, math.inf))))
    table, alone = SeriesTable(rows=6, capacity=1), [OneServer(keep_s=4, rows=6) for _ in range(40)]
    for number in range(40):
        table.add(str(number), keep_s=4)
    for round_number in range(12):
        for number, server in enumerate(alone):
            if dice.random() < 0.2:
                continue
            schema = newer if number % 3 == 0 and round_number > 5 else PLAIN
            values = dice.uniform(0, 100, schema.width) * (1 + round_number)
            values[SCALARS:] = np.sort(values[SCALARS:])
            values[GAUGE_COLUMN[Gauge.AWAKE]] = float(dice.random() < 0.9)
            values[GAUGE_COLUMN[Gauge.START_TIME_S]] = 1.0
            values[dice.random(schema.width) < 0.1] = math.nan
            at_s = round_number + dice.random() / 2
            for one, name in ((table, str(number)), (server.table, "t")):
                one.put(name, Reading(schema, values.tolist()), at_s=at_s)
        window = Window(start_s=round_number - 3, end_s=round_number + 1)
        together = table.close([str(number) for number in range(40)], window)
        for number, server in enumerate(alone):
            own = server.table.close(["t"], window)
            np.testing.assert_array_equal(together.values[number], own.values[0])
            np.testing.assert_array_equal(together.increases[number], own.increases[0])
            mine = [item.increases[item.positions == number] for item in together.histograms]
            np.testing.assert_array_equal(
                np.concatenate([rows.ravel() for rows in mine] or [[]]),
                np.concatenate([item.increases.ravel() for item in own.histograms] or [[]]),
            )
