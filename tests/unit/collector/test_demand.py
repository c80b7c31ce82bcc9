"""What gateways' reports amount to at the front door."""

import pytest

from metrics_collector.core.demand import DemandBoard, DemandReport, forget, front_door_windows, report
from metrics_collector.core.window import Window
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.role_window import role_window_to_proto
from trimtab.store.observations import merge, signal

WINDOW = Window(start_s=1_700_000_000.0, end_s=1_700_000_005.0)


def measurement(observation: pb.RoleObservation, name: "pb.Signal.ValueType") -> types_pb2.Measurement:
    return signal(observation, name)


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
    found = front_door_windows(board, WINDOW, collector="c-0", expiry_s=3.0)
    return merge([role_window_to_proto(window) for window in found if window.service == service])


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
