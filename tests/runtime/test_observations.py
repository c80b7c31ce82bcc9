"""The merge of collectors' partials: golden figures, qualities, and what must hold for any input."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.store.observations import age_s, histogram_quantile, merge, signal, window_end_s

TPS = pb.SIGNAL_DECODE_TPS
KV = pb.SIGNAL_KV_USAGE_RATIO
INF = math.inf


def partial(
    collector: str = "c1",
    *,
    end_s: float = 105.0,
    reported: tuple[str, ...] = ("a", "b"),
    missing: tuple[str, ...] = (),
    signals: tuple[pb.SignalPartial, ...] = (),
    latencies: tuple[pb.LatencyPartial, ...] = (),
    revisions: dict[str, int] | None = None,
    service: str = "chat",
) -> pb.RolePartial:
    made = pb.RolePartial(
        collector=collector,
        service=service,
        role=types_pb2.ROLE_DECODE,
        reported_replicas=reported,
        missing_replicas=missing,
        signals=signals,
        latencies=latencies,
        replica_revisions=revisions or {},
    )
    made.window_start.FromMicroseconds(round((end_s - 5) * 1e6))
    made.window_end.FromMicroseconds(round(end_s * 1e6))
    return made


def tps(total: float, reported: int = 2, **states: Any) -> pb.SignalPartial:
    return pb.SignalPartial(signal=TPS, sum=total, reported=reported, **states)


def ttft(
    increases: list[float], bounds: tuple[float, ...] = (0.1, 0.5, 1.0, INF), sum_s: float = 1.0
) -> pb.LatencyPartial:
    return pb.LatencyPartial(
        latency=pb.LATENCY_TTFT, upper_bounds_s=bounds, increases=increases, sum_s=sum_s, count=sum(increases)
    )


def shown(measurement: types_pb2.Measurement) -> tuple[float | None, str, int, int]:
    value = measurement.value if measurement.HasField("value") else None
    quality = types_pb2.Quality.Name(measurement.quality).removeprefix("QUALITY_").lower()
    return value, quality, measurement.reported, measurement.expected


# What Prometheus 2.42 answers for the same buckets.
@pytest.mark.parametrize(
    ("quantile", "bounds", "cumulative", "value", "overflow"),
    [
        (0.5, (0.1, 0.2, INF), (2, 4, 4), 0.1, False),
        (0.95, (0.1, 0.2, INF), (2, 4, 4), 0.19, False),
        (0.0, (0.1, 0.2, INF), (2, 4, 4), 0.0, False),
        (1.0, (0.1, 0.2, INF), (2, 4, 4), 0.2, False),
        (0.25, (1.0, 2.0, INF), (4, 4, 4), 0.25, False),
        (0.5, (1.0, 2.0, INF), (0, 0, 4), 2.0, True),
        (0.9, (1.0, 2.0, INF), (1, 2, 10), 2.0, True),
        (0.5, (-1.0, 1.0, INF), (3, 4, 4), -1.0, False),
        (0.0, (1.0, 2.0, INF), (0, 4, 4), 1.0, False),
    ],
)
def test_quantiles_are_prometheus(
    quantile: float, bounds: tuple[float, ...], cumulative: tuple[float, ...], value: float, overflow: bool
) -> None:
    found = histogram_quantile(quantile, bounds, cumulative)
    assert found is not None
    assert found[0] == pytest.approx(value)
    assert found[1] is overflow


@pytest.mark.parametrize(("bounds", "cumulative"), [((INF,), (5,)), ((1.0, INF), (0, 0)), ((), ()), ((1.0, INF), (1,))])
def test_no_quantile_without_samples_or_finite_bounds(bounds: tuple[float, ...], cumulative: tuple[float, ...]) -> None:
    assert histogram_quantile(0.5, bounds, cumulative) is None


def test_a_quantile_is_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="quantile"):
        histogram_quantile(95, (1.0, INF), (1, 1))


def test_sums_add_and_maxima_are_kept() -> None:
    merged = merge(
        [
            partial("c1", reported=("a", "b"), signals=(tps(100.0, maximum=70.0),), revisions={"eu": 9, "us": 3}),
            partial("c2", reported=("c",), signals=(tps(50.0, 1, maximum=50.0),), revisions={"eu": 7}),
        ],
        expected=["a", "b", "c"],
    )
    assert shown(signal(merged, TPS)) == (150.0, "ok", 3, 3)
    assert merged.signals[0].maximum == 70.0
    assert list(merged.reported_replicas) == ["a", "b", "c"]
    assert list(merged.missing_replicas) == []
    assert dict(merged.replica_revisions) == {"eu": 7, "us": 3}, "the oldest that any part rests on"
    assert (merged.service, merged.role) == ("chat", types_pb2.ROLE_DECODE)
    assert window_end_s(merged) == 105.0
    assert (age_s(merged, 107.5), age_s(merged, 100.0)) == (2.5, 0.0)


def test_ratios_are_weighted() -> None:
    merged = merge(
        [
            partial("c1", signals=(pb.SignalPartial(signal=KV, sum=1.8, weight=2, reported=2, maximum=0.95),)),
            partial(
                "c2",
                reported=("c",),
                signals=(pb.SignalPartial(signal=KV, sum=0.3, weight=1, reported=1, maximum=0.3),),
            ),
        ]
    )
    assert shown(signal(merged, KV)) == (pytest.approx(0.7), "ok", 3, 3)
    assert merged.signals[0].maximum == 0.95


def test_a_share_of_nothing_is_missing_and_says_why() -> None:
    hit = pb.SignalPartial(signal=pb.SIGNAL_PREFIX_HIT_RATIO, sum=0, weight=0, reported=2)
    measurement = signal(merge([partial(signals=(hit,))]), pb.SIGNAL_PREFIX_HIT_RATIO)
    assert shown(measurement)[:2] == (None, "missing")
    assert "nothing to take a share of" in measurement.detail


@pytest.mark.parametrize(
    ("signal_partial", "expected", "result"),
    [
        (tps(10.0), None, (10.0, "ok", 2, 2)),
        (tps(0.0), None, (0.0, "ok", 2, 2)),
        (tps(10.0), ["a", "b", "c"], (10.0, "partial", 2, 3)),
        (tps(10.0, 1, stale=1), None, (10.0, "partial", 1, 2)),
        (tps(10.0, 1, warming=1), None, (10.0, "partial", 1, 2)),
        (tps(10.0, 2, warming=1), None, (10.0, "warming", 2, 2)),
        (tps(10.0, 2, reset=1), None, (10.0, "reset", 2, 2)),
        (tps(10.0, 1, reset=1), None, (10.0, "reset", 1, 2)),
        (tps(0.0, 0, stale=2), None, (None, "stale", 0, 2)),
        (tps(0.0, 0, warming=2), None, (None, "warming", 0, 2)),
        (tps(0.0, 0), None, (None, "missing", 0, 2)),
        (tps(10.0), [], (None, "missing", 0, 0)),
        (tps(10.0), ["c", "d"], (None, "missing", 0, 2)),
        (tps(10.0), ["b", "c"], (10.0, "partial", 1, 2)),
        (tps(math.nan), None, (None, "missing", 0, 2)),
        (tps(-1.0), None, (None, "missing", 0, 2)),
        (tps(INF), None, (None, "missing", 0, 2)),
    ],
)
def test_quality(
    signal_partial: pb.SignalPartial, expected: list[str] | None, result: tuple[float | None, str, int, int]
) -> None:
    assert shown(signal(merge([partial(signals=(signal_partial,))], expected=expected), TPS)) == result


def test_what_is_missing_is_told_in_words() -> None:
    measurement = signal(
        merge([partial(reported=("a", "b", "c"), missing=("d",), signals=(tps(5.0, 1, stale=1, warming=1),))]), TPS
    )
    assert shown(measurement) == (5.0, "partial", 1, 4)
    assert measurement.detail == "1 stale; 1 warming"


def test_an_absent_signal_is_missing() -> None:
    assert shown(signal(merge([partial()]), TPS))[:2] == (None, "missing")


def test_a_poisoned_partial_does_not_poison_the_role() -> None:
    merged = merge(
        [partial("c1", signals=(tps(10.0),)), partial("c2", reported=("c",), signals=(tps(math.nan, 1),))],
    )
    measurement = signal(merged, TPS)
    assert shown(measurement) == (10.0, "partial", 2, 3)
    assert measurement.detail == "1 refused"


def test_only_the_newest_partial_of_a_collector_counts() -> None:
    merged = merge([partial(end_s=105, signals=(tps(1.0),)), partial(end_s=106, signals=(tps(2.0),))])
    assert shown(signal(merged, TPS)) == (2.0, "ok", 2, 2)


def test_two_collectors_on_the_same_replicas_are_not_counted_twice() -> None:
    merged = merge(
        [
            partial("c1", end_s=106, reported=("a", "b"), signals=(tps(20.0),)),
            partial("c2", end_s=105, reported=("b", "c"), signals=(tps(20.0),)),
        ]
    )
    assert shown(signal(merged, TPS)) == (20.0, "partial", 2, 3)
    assert list(merged.missing_replicas) == ["c"]


@pytest.mark.parametrize(("silent_for_s", "result"), [(10, (10.0, "partial", 2, 3)), (80, (10.0, "ok", 2, 2))])
def test_a_collector_that_fell_silent_is_missed_then_forgotten(
    silent_for_s: float, result: tuple[float | None, str, int, int]
) -> None:
    merged = merge(
        [
            partial("c1", end_s=200, signals=(tps(10.0),)),
            partial("c2", end_s=200 - silent_for_s, reported=("c",), signals=(tps(99.0, 1),)),
        ]
    )
    assert shown(signal(merged, TPS)) == result


def test_buckets_are_merged_before_the_quantile_is_taken() -> None:
    """Nine fast requests on one replica, one slow on another: the P95 is the slow one's, not a mean of two P95s."""
    merged = merge(
        [
            partial("c1", reported=("a",), latencies=(ttft([9, 0, 0, 0], sum_s=0.45),)),
            partial("c2", reported=("b",), latencies=(ttft([0, 0, 1, 0], sum_s=0.8),)),
        ]
    )
    latency = merged.latencies[0]
    assert shown(latency.p50_s) == (pytest.approx(0.1 * 5 / 9), "ok", 2, 2)
    assert shown(latency.p95_s) == (pytest.approx(0.75), "ok", 2, 2)
    assert shown(latency.mean_s) == (pytest.approx(0.125), "ok", 2, 2)
    assert latency.count == 10


def test_buckets_of_different_versions_are_merged_on_their_common_bounds() -> None:
    merged = merge(
        [
            partial("c1", reported=("a",), latencies=(ttft([1, 1, 1, 0]),)),
            partial("c2", reported=("b",), latencies=(ttft([2, 2, 0], bounds=(0.5, 2.0, INF)),)),
        ]
    )
    latency = merged.latencies[0]
    assert latency.count == 7
    assert shown(latency.p50_s) == (pytest.approx(0.5 * 3.5 / 4), "ok", 2, 2)
    assert "above the largest" in latency.p99_s.detail


def test_nothing_finished_is_missing_not_zero() -> None:
    latency = merge([partial(latencies=(ttft([0, 0, 0, 0], sum_s=0),))]).latencies[0]
    assert [shown(item)[:2] for item in (latency.p50_s, latency.p95_s, latency.p99_s, latency.mean_s)] == [
        (None, "missing")
    ] * 4
    assert latency.p95_s.detail == "nothing finished in the window"


@pytest.mark.parametrize(
    "bad",
    [
        ttft([math.nan, 0, 0, 0]),
        ttft([-1, 0, 0, 5]),
        ttft([1, 1, 1, 1], bounds=(0.5, 0.1, 1.0, INF)),
        ttft([1, 1, 1], bounds=(0.1, 0.5, 1.0)),
        ttft([1, 1]),
        ttft([1, 1, 1, 1], sum_s=INF),
    ],
)
def test_a_broken_histogram_is_refused(bad: pb.LatencyPartial) -> None:
    latency = merge([partial(latencies=(bad,))]).latencies[0]
    assert shown(latency.p95_s)[:2] == (None, "missing")


def test_sums_that_leave_the_range_of_numbers_are_missing() -> None:
    huge = 1.7e308
    merged = merge(
        [
            partial("c1", reported=("a",), signals=(tps(huge, 1),), latencies=(ttft([huge, 0, 0, 0]),)),
            partial("c2", reported=("b",), signals=(tps(huge, 1),), latencies=(ttft([huge, 0, 0, 0]),)),
        ]
    )
    assert shown(signal(merged, TPS))[:2] == (None, "missing")
    assert signal(merged, TPS).detail == "out of range"
    assert shown(merged.latencies[0].p95_s)[:2] == (None, "missing")
    assert merged.latencies[0].count == 0


def test_a_role_is_merged_with_itself_only() -> None:
    with pytest.raises(ValueError, match="no partial"):
        merge([])
    with pytest.raises(ValueError, match="different"):
        merge([partial("c1"), partial("c2", service="other")])


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(min_value=0, max_value=1e9))
counts = st.integers(min_value=0, max_value=5)
signal_partials = st.builds(
    pb.SignalPartial,
    signal=st.sampled_from([TPS, KV, pb.SIGNAL_WAITING]),
    sum=numbers,
    maximum=st.none() | numbers,
    weight=numbers,
    reported=counts,
    stale=counts,
    reset=counts,
    warming=counts,
)
latency_partials = st.builds(
    lambda increases, sum_s: ttft(increases, sum_s=sum_s), st.lists(numbers, min_size=3, max_size=4), numbers
)
replica_names = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=4).map(tuple)
partials = st.lists(
    st.builds(
        partial,
        st.sampled_from(["c1", "c2", "c3"]),
        end_s=st.sampled_from([100.0, 104.0, 105.0, 300.0]),
        reported=replica_names,
        missing=replica_names,
        signals=st.lists(signal_partials, max_size=4).map(tuple),
        latencies=st.lists(latency_partials, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


@given(partials, st.none() | st.lists(st.sampled_from("abcdefgh"), unique=True), st.randoms())
def test_whatever_comes_in(made: list[pb.RolePartial], expected: list[str] | None, random: Any) -> None:
    """No NaN, infinity or negative comes out; absent exactly when unusable; the order of partials does not matter."""
    merged = merge(made, expected=expected)
    measurements = [item.measurement for item in merged.signals]
    for latency in merged.latencies:
        measurements += [latency.p50_s, latency.p95_s, latency.p99_s, latency.mean_s]
    for measurement in measurements:
        value, quality, reported, m = shown(measurement)
        assert value is None or (math.isfinite(value) and value >= 0)
        assert (value is None) <= (quality in ("missing", "stale", "warming"))
        assert quality != "missing" or value is None
        assert 0 <= reported <= m
        assert quality not in ("ok", "warming") or value is None or reported == m > 0
    assert set(merged.reported_replicas).isdisjoint(merged.missing_replicas)
    shuffled = list(made)
    random.shuffle(shuffled)
    if len({(item.collector, window_end_s(item)) for item in made}) == len(made):  # type: ignore[arg-type]
        again = merge(shuffled, expected=expected)
        assert [item.signal for item in again.signals] == [item.signal for item in merged.signals]
        assert list(again.reported_replicas) == list(merged.reported_replicas)
