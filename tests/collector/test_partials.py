"""What a role's window amounts to when replicas fail, hang, sleep, restart or leave."""

import math

import pytest

from metrics_collector.core.demand import DemandBoard, DemandReport, forget, front_door_partials, report
from metrics_collector.core.dialect import Quantity
from metrics_collector.core.partials import CountedReplica, RoleKey, role_partial
from metrics_collector.core.sample import Histogram
from metrics_collector.core.series import Counter
from metrics_collector.core.windows import ReplicaWindow, Window
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.store.observations import merge, signal

KEY = RoleKey(service="chat", role=types_pb2.ROLE_DECODE)
WINDOW = Window(start_s=1_700_000_000.0, end_s=1_700_000_005.0)


def busy(**overrides: object) -> ReplicaWindow:
    """A replica at 100 tokens a second with two requests."""
    given: dict[str, object] = {
        "rates": {Counter.DECODE_TOKENS: 100.0},
        "running": 2.0,
        "waiting": 1.0,
        "kv_usage_ratio": 0.5,
        "kv_usage_max_ratio": 0.6,
    }
    return ReplicaWindow(**(given | overrides))  # type: ignore[arg-type]


def counted(window: ReplicaWindow | None, number: int, **overrides: bool) -> CountedReplica:
    return CountedReplica(replica=f"chat-{number}", window=window, **overrides)


def observe(*replicas: CountedReplica, expected: set[str] | None = None) -> pb.RoleObservation:
    partial = role_partial(KEY, replicas, WINDOW, collector="c-0", replica_revisions={"local": 7})
    return merge([partial], expected=expected)


def measurement(observation: pb.RoleObservation, name: "pb.Signal.ValueType") -> types_pb2.Measurement:
    return signal(observation, name)


def test_case_1_four_of_eight_scrapes_fail() -> None:
    found = observe(*(counted(busy() if number < 4 else None, number) for number in range(8)))

    decode = measurement(found, pb.SIGNAL_DECODE_TPS)
    assert (decode.value, decode.quality) == (400.0, types_pb2.QUALITY_PARTIAL)
    assert (decode.reported, decode.expected) == (4, 8)
    assert list(found.missing_replicas) == ["chat-4", "chat-5", "chat-6", "chat-7"]


def test_case_1_a_family_that_half_of_the_replicas_lack() -> None:
    found = observe(*(counted(busy() if number < 4 else busy(rates={}), number) for number in range(8)))

    decode = measurement(found, pb.SIGNAL_DECODE_TPS)
    assert (decode.value, decode.quality) == (400.0, types_pb2.QUALITY_PARTIAL)
    assert (decode.reported, decode.expected) == (4, 8)
    assert measurement(found, pb.SIGNAL_RUNNING).quality == types_pb2.QUALITY_OK
    assert list(found.missing_replicas) == []


def test_nothing_read_is_missing_not_zero() -> None:
    found = observe(*(counted(None, number) for number in range(3)))

    for item in found.signals:
        assert item.measurement.quality == types_pb2.QUALITY_MISSING
        assert not item.measurement.HasField("value")


def test_case_4_a_replica_that_is_gone_is_in_no_sum() -> None:
    four = observe(*(counted(busy(), number) for number in range(4)))
    two = observe(*(counted(busy(), number) for number in range(2)))

    assert measurement(four, pb.SIGNAL_DECODE_TPS).value == 400.0
    assert measurement(two, pb.SIGNAL_DECODE_TPS).value == 200.0
    assert measurement(two, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_OK


def test_case_5_six_of_seven_stuck_replicas_are_no_load() -> None:
    stuck = [counted(busy(waiting=200.0), number, stuck=True) for number in range(6)]

    found = observe(*stuck, counted(busy(), 6))
    none_left = observe(*stuck)

    waiting = measurement(found, pb.SIGNAL_WAITING)
    assert (waiting.value, waiting.quality) == (1.0, types_pb2.QUALITY_PARTIAL)
    assert "6 stale" in waiting.detail
    assert measurement(none_left, pb.SIGNAL_WAITING).quality == types_pb2.QUALITY_STALE
    assert not measurement(none_left, pb.SIGNAL_WAITING).HasField("value")


def test_case_8_one_pending_and_one_hanging_pod_leave_six_of_eight() -> None:
    # Neither the pod without an address nor the one that hangs gives a page inside the window.
    found = observe(*(counted(busy(), number) for number in range(6)), counted(None, 6), counted(None, 7))

    decode = measurement(found, pb.SIGNAL_DECODE_TPS)
    assert (decode.value, decode.quality) == (600.0, types_pb2.QUALITY_PARTIAL)
    assert (decode.reported, decode.expected) == (6, 8)


def test_a_reset_flags_the_window() -> None:
    found = observe(counted(busy(), 0), counted(busy(reset=True), 1))

    assert measurement(found, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_RESET


def test_a_warming_replica_is_counted_and_said_to_be_one() -> None:
    found = observe(counted(busy(), 0), counted(busy(warming=True), 1))

    assert measurement(found, pb.SIGNAL_DECODE_TPS).value == 200.0
    assert measurement(found, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_WARMING


def test_a_replica_too_new_for_a_rate_makes_the_sum_partial() -> None:
    found = observe(counted(busy(), 0), counted(busy(warming=True, rates={}), 1))

    decode = measurement(found, pb.SIGNAL_DECODE_TPS)
    assert (decode.quality, decode.reported, decode.expected) == (types_pb2.QUALITY_PARTIAL, 1, 2)
    assert "1 warming" in decode.detail


def test_a_sleeper_is_no_capacity_where_nobody_says_that_it_is_routable() -> None:
    found = observe(counted(busy(), 0), counted(ReplicaWindow(asleep=True), 1))

    assert measurement(found, pb.SIGNAL_RUNNING).quality == types_pb2.QUALITY_OK
    assert list(found.reported_replicas) == ["chat-0"]
    assert list(found.missing_replicas) == []


def test_a_sleeper_that_its_actuator_lists_as_routable_is_missing() -> None:
    found = observe(counted(busy(), 0), counted(ReplicaWindow(asleep=True), 1, routable_by_actuator=True))

    assert measurement(found, pb.SIGNAL_RUNNING).quality == types_pb2.QUALITY_PARTIAL
    assert list(found.missing_replicas) == ["chat-1"]


def test_a_role_without_counted_replicas_says_so() -> None:
    found = observe()

    assert measurement(found, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_MISSING
    assert "no replica is expected" in measurement(found, pb.SIGNAL_DECODE_TPS).detail


def test_kv_usage_is_a_mean_that_keeps_the_maximum() -> None:
    found = observe(counted(busy(kv_usage_ratio=0.2), 0), counted(busy(kv_usage_ratio=0.6, kv_usage_max_ratio=0.95), 1))

    value = next(item for item in found.signals if item.signal == pb.SIGNAL_KV_USAGE_RATIO)
    assert value.measurement.value == pytest.approx(0.4)
    assert value.maximum == 0.95


def test_the_hit_ratio_weighs_replicas_by_their_queries() -> None:
    heavy = busy(increases={Counter.PREFIX_HITS: 900.0, Counter.PREFIX_QUERIES: 1000.0})
    light = busy(increases={Counter.PREFIX_HITS: 0.0, Counter.PREFIX_QUERIES: 200.0})

    found = observe(counted(heavy, 0), counted(light, 1))

    assert measurement(found, pb.SIGNAL_PREFIX_HIT_RATIO).value == pytest.approx(0.75)


def test_case_3_no_queries_give_no_ratio_and_no_nan() -> None:
    idle = busy(
        rates={Counter.DECODE_TOKENS: 0.0},
        running=0.0,
        increases={Counter.PREFIX_HITS: 0.0, Counter.PREFIX_QUERIES: 0.0},
        histograms={Quantity.TTFT: Histogram(bounds_s=(1.0, math.inf), cumulative=(0.0, 0.0), sum_s=0.0)},
    )

    found = observe(counted(idle, 0))

    assert measurement(found, pb.SIGNAL_DECODE_TPS).value == 0.0
    assert measurement(found, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_OK
    assert not measurement(found, pb.SIGNAL_PREFIX_HIT_RATIO).HasField("value")
    (ttft,) = found.latencies
    assert ttft.count == 0
    assert not ttft.p95_s.HasField("value")
    assert "nothing finished" in ttft.p95_s.detail


def test_quantiles_come_from_the_buckets_of_all_replicas() -> None:
    # 90 quick requests on one replica, 10 slow ones on the other: the mean of two p95s would say 1.2 s.
    quick = busy(
        histograms={Quantity.TTFT: Histogram(bounds_s=(0.1, 1.0, 5.0, math.inf), cumulative=(90.0,) * 4, sum_s=4.5)}
    )
    slow = busy(
        histograms={
            Quantity.TTFT: Histogram(bounds_s=(0.1, 1.0, 5.0, math.inf), cumulative=(0.0, 0.0, 10.0, 10.0), sum_s=30.0)
        }
    )

    found = observe(counted(quick, 0), counted(slow, 1))

    (ttft,) = found.latencies
    assert ttft.count == 100
    assert ttft.p50_s.value == pytest.approx(0.1 * 50 / 90)
    assert ttft.p95_s.value == pytest.approx(1 + 4 * 5 / 10)
    assert ttft.mean_s.value == pytest.approx(0.345)


def test_the_partial_says_what_it_rests_on() -> None:
    partial = role_partial(KEY, [counted(busy(), 0)], WINDOW, collector="c-0", replica_revisions={"b": 2, "a": 1})

    assert (partial.collector, partial.service, partial.role) == ("c-0", "chat", types_pb2.ROLE_DECODE)
    assert dict(partial.replica_revisions) == {"a": 1, "b": 2}
    assert partial.window_end.ToMilliseconds() == 1_700_000_005_000


# The front door


def said(at_s: float, *, arrivals: int = 0, held: int = 0, interval_s: float = 1.0) -> DemandReport:
    return DemandReport(
        at_s=WINDOW.start_s + at_s,
        interval_s=interval_s,
        arrivals=arrivals,
        prompt_tokens=10 * arrivals,
        requested_output_tokens=100 * arrivals,
        held=held,
    )


def door(board: DemandBoard, service: str = "chat") -> pb.RoleObservation:
    partials = front_door_partials(board, WINDOW, collector="c-0", expiry_s=3.0)
    return merge([partial for partial in partials if partial.service == service])


def board_of(*reports: tuple[str, DemandReport]) -> DemandBoard:
    board = DemandBoard()
    for gateway, demand in reports:
        board = report(board, gateway, {"chat": demand}, keep_s=10.0)
    return board


def test_arrivals_are_a_rate_over_the_time_that_reports_cover() -> None:
    board = board_of(*(("gw-0", said(at_s, arrivals=20)) for at_s in (1.0, 2.0, 3.0, 4.0, 4.8)))

    found = door(board)

    assert signal(found, pb.SIGNAL_ARRIVAL_RPS).value == pytest.approx(20.0)
    assert signal(found, pb.SIGNAL_ARRIVAL_PROMPT_TPS).value == pytest.approx(200.0)
    assert signal(found, pb.SIGNAL_ARRIVAL_OUTPUT_TPS).value == pytest.approx(2000.0)
    assert found.role == types_pb2.ROLE_UNSPECIFIED


def test_a_report_that_reaches_before_the_window_counts_in_part() -> None:
    found = door(
        board_of(("gw-0", said(1.0, arrivals=40, interval_s=4.0)), ("gw-0", said(4.0, arrivals=0, interval_s=3.0)))
    )

    assert signal(found, pb.SIGNAL_ARRIVAL_RPS).value == pytest.approx(40 * (1 / 4) / 4)


def test_gateways_add_up() -> None:
    found = door(board_of(("gw-0", said(4.5, arrivals=10, held=3)), ("gw-1", said(4.6, arrivals=5, held=4))))

    assert signal(found, pb.SIGNAL_ARRIVAL_RPS).value == pytest.approx(15.0)
    assert signal(found, pb.SIGNAL_HELD).value == 7.0
    assert list(found.reported_replicas) == ["gw-0", "gw-1"]


def test_what_is_held_is_the_last_word_not_the_sum_of_words() -> None:
    found = door(board_of(("gw-0", said(3.0, held=9)), ("gw-0", said(4.0, held=2))))

    assert signal(found, pb.SIGNAL_HELD).value == 2.0


def test_a_silent_gateway_holds_nothing_any_more() -> None:
    found = door(board_of(("gw-0", said(1.9, held=50)), ("gw-1", said(4.0, held=1))))

    assert signal(found, pb.SIGNAL_HELD).value == 1.0
    assert list(found.missing_replicas) == []


def test_when_every_gateway_is_silent_demand_is_missing_not_zero() -> None:
    found = door(board_of(("gw-0", said(1.9, arrivals=10, held=50))))

    for name in (pb.SIGNAL_HELD, pb.SIGNAL_ARRIVAL_RPS):
        assert signal(found, name).quality == types_pb2.QUALITY_MISSING
        assert not signal(found, name).HasField("value")
    assert list(found.missing_replicas) == ["gw-0"]


def test_a_gateway_that_reports_nothing_is_known_to_have_nothing() -> None:
    found = door(board_of(("gw-0", said(4.0))))

    assert signal(found, pb.SIGNAL_ARRIVAL_RPS).value == 0.0
    assert signal(found, pb.SIGNAL_ARRIVAL_RPS).quality == types_pb2.QUALITY_OK


def test_when_the_clock_was_set_back_reports_go_on_at_once() -> None:
    found = door(board_of(("gw-0", said(3600.0, arrivals=7, held=2)), ("gw-0", said(4.0, arrivals=5, held=9))))

    assert signal(found, pb.SIGNAL_HELD).value == 9.0
    assert signal(found, pb.SIGNAL_ARRIVAL_RPS).value == 5.0


def test_a_gateway_that_spoke_last_before_the_clock_was_set_back_is_silent() -> None:
    board = board_of(("gw-0", said(3600.0, held=2)))

    assert not signal(door(board), pb.SIGNAL_HELD).HasField("value")
    assert forget(board, now_s=WINDOW.end_s).services == {}


def test_a_service_without_gateways_is_forgotten() -> None:
    board = board_of(("gw-0", said(0.0)))

    assert forget(board, now_s=WINDOW.start_s + 59).services.keys() == {"chat"}
    assert forget(board, now_s=WINDOW.start_s + 61).services == {}
