"""The merge of collectors' partials: golden figures, qualities, and what must hold for any input."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.vocabulary import Role
from trimtab.store.observations import age_s, merge, merge_service, signal, window_end_s

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
    role: "types_pb2.Role.ValueType" = types_pb2.ROLE_DECODE,
) -> pb.RolePartial:
    made = pb.RolePartial(
        collector=collector,
        service=service,
        role=role,
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
    with pytest.raises(ValueError, match="no window"):
        merge([])
    with pytest.raises(ValueError, match="different"):
        merge([partial("c1"), partial("c2", service="other")])


# Several collectors: each gives its two newest partials


def two(
    collector: str, end_s: float, *names: str, each: float = 10.0, before: tuple[str, ...] | None = None
) -> list[pb.RolePartial]:
    """The partials of ``end_s``, at ``each`` a replica, and of the second before, where a replica did half of that."""
    earlier = names if before is None else before
    return [
        partial(collector, end_s=end_s, reported=names, signals=(tps(each * len(names), len(names)),)),
        partial(collector, end_s=end_s - 1, reported=earlier, signals=(tps(each / 2 * len(earlier), len(earlier)),)),
    ]


def test_a_reader_between_two_collectors_writes_sums_one_moment() -> None:
    merged = merge([*two("c1", 106, "a", "b"), *two("c2", 105, "c")])

    assert window_end_s(merged) == 105
    assert shown(signal(merged, TPS)) == (20.0, "ok", 3, 3), "5 each of c1 at 105, and 10 of c2"


def test_when_all_have_written_the_newest_window_counts() -> None:
    merged = merge([*two("c1", 106, "a", "b"), *two("c2", 106, "c")])

    assert window_end_s(merged) == 106
    assert shown(signal(merged, TPS)) == (30.0, "ok", 3, 3)


def test_a_collector_two_rounds_late_is_missing_not_mixed_in() -> None:
    merged = merge([*two("c1", 107, "a", "b"), *two("c2", 105, "c")])

    assert window_end_s(merged) == 107
    assert shown(signal(merged, TPS)) == (20.0, "partial", 2, 3)
    assert list(merged.missing_replicas) == ["c"]


def test_a_collector_that_begins_does_not_hide_the_others() -> None:
    merged = merge([*two("c1", 106, "a", "b"), two("c2", 106, "c")[0]])

    assert (window_end_s(merged), shown(signal(merged, TPS))) == (106, (30.0, "ok", 3, 3))


def test_a_replica_handed_over_is_counted_once_and_no_other_is_lost() -> None:
    """c2 takes b from c1: at 106 both report it, at 105 only c1 did."""
    merged = merge([*two("c1", 106, "a", "b"), *two("c2", 106, "b", "c", before=("c",))])

    assert window_end_s(merged) == 105
    assert shown(signal(merged, TPS)) == (15.0, "ok", 3, 3)


def test_a_replica_that_two_collectors_keep_reporting_is_counted_once_still() -> None:
    merged = merge([*two("c1", 106, "a", "b"), *two("c2", 106, "b", "c", "d")])

    assert window_end_s(merged) == 106
    assert shown(signal(merged, TPS)) == (30.0, "partial", 3, 4)
    assert list(merged.missing_replicas) == ["a"]


def test_what_a_dead_collectors_heir_reports_is_whole_at_once() -> None:
    merged = merge([*two("c1", 108, "a", "b", "c", before=("a", "b")), *two("c2", 105, "c")])

    assert (window_end_s(merged), shown(signal(merged, TPS))) == (108, (30.0, "ok", 3, 3))


def test_requests_at_sleepers_are_measured_by_the_sleepers() -> None:
    asleep = pb.SignalPartial(signal=pb.SIGNAL_ASLEEP_LOAD, sum=4, reported=2, weight=3)

    merged = merge([partial(signals=(asleep, tps(10.0)))], expected=["a", "b"])

    assert shown(signal(merged, pb.SIGNAL_ASLEEP_LOAD)) == (4.0, "partial", 2, 3)
    assert shown(signal(merged, TPS)) == (10.0, "ok", 2, 2)


def test_gpu_ratios_are_weighted_and_power_is_not() -> None:
    gpu = (
        pb.SignalPartial(signal=pb.SIGNAL_GPU_UTILISATION_RATIO, sum=2.0, weight=4, reported=2),
        pb.SignalPartial(signal=pb.SIGNAL_GPU_POWER_W, sum=900.0, reported=2),
    )

    merged = merge([partial(signals=gpu)])

    assert signal(merged, pb.SIGNAL_GPU_UTILISATION_RATIO).value == 0.5
    assert signal(merged, pb.SIGNAL_GPU_POWER_W).value == 900.0


# A service over its roles

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


def rps(total: float, reported: int) -> pb.SignalPartial:
    return pb.SignalPartial(signal=pb.SIGNAL_REQUEST_RPS, sum=total, reported=reported)


def served() -> list[pb.RolePartial]:
    """A prefill replica and two for decode: every request passes both roles, and is finished in each."""
    quick, slow = ttft([8, 2, 0, 0]), ttft([0, 0, 10, 0])
    waited = pb.SignalPartial(signal=pb.SIGNAL_WAITING, sum=3, reported=1)
    return [
        partial(role=PREFILL, reported=("p",), signals=(tps(1.0, 1), rps(5, 1), waited), latencies=(quick,)),
        partial(role=DECODE, reported=("d1", "d2"), signals=(tps(200.0), rps(5, 2)), latencies=(slow,)),
        partial(role=types_pb2.ROLE_UNSPECIFIED, reported=("gateway",), signals=(tps(77.0, 1),)),
    ]


def test_a_service_adds_its_roles_and_counts_no_request_twice() -> None:
    merged = merge_service(served())

    assert (merged.service, merged.role) == ("chat", types_pb2.ROLE_UNSPECIFIED)
    assert shown(signal(merged, TPS)) == (201.0, "ok", 3, 3)
    assert shown(signal(merged, pb.SIGNAL_REQUEST_RPS)) == (5.0, "ok", 2, 2)
    assert list(merged.reported_replicas) == ["d1", "d2", "p"]
    (latency,) = merged.latencies
    assert latency.count == 10, "the first token is the prefill role's"
    assert latency.p95_s.value == pytest.approx(0.1 + 0.4 * 1.5 / 2)


def test_a_service_of_which_a_role_lacks_a_replica_is_partial() -> None:
    merged = merge_service(served(), expected={Role.PREFILL: ["p", "p2"], Role.DECODE: ["d1", "d2"]})

    assert shown(signal(merged, TPS)) == (201.0, "partial", 3, 4)
    assert list(merged.missing_replicas) == ["p2"]


def test_a_signal_of_one_role_is_partial_for_the_service() -> None:
    assert shown(signal(merge_service(served()), pb.SIGNAL_WAITING)) == (3.0, "partial", 1, 3)


def test_a_colocated_service_is_its_one_role() -> None:
    made = partial(role=types_pb2.ROLE_COLOCATED, signals=(tps(10.0), rps(4, 2)), latencies=(ttft([9, 0, 1, 0]),))

    whole, role = merge_service([made]), merge([made])

    assert list(whole.signals) == list(role.signals)
    assert list(whole.latencies) == list(role.latencies)


def test_a_service_is_merged_with_itself_only() -> None:
    with pytest.raises(ValueError, match="no window"):
        merge_service([partial(role=types_pb2.ROLE_UNSPECIFIED)])
    with pytest.raises(ValueError, match="different services"):
        merge_service([partial(), partial(service="other")])


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


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 3), replica_names), min_size=1, max_size=6))
def test_no_replica_is_ever_counted_twice(words: list[tuple[str, int, tuple[str, ...]]]) -> None:
    made = [
        partial(name, end_s=100.0 + end_s, reported=names, signals=(tps(float(len(names)), len(names)),))
        for name, end_s, names in words
    ]

    for merged in (merge(made), merge_service(made)):
        assert signal(merged, TPS).value <= len(merged.reported_replicas)


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
