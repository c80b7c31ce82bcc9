"""Gauges that lie: sleeping, wedged and left standing, told from busy and idle."""

import math
from collections.abc import Callable

import pytest

from metrics_collector.core.liveness import LivenessReport, Signs, judge, liveness_report
from metrics_collector.core.schema import Reading
from tests.unit.collector.windows.fleet import Fleet, page, target
from trimtab.api.collector.v1 import collector_pb2 as pb

UP, STUCK, ASLEEP = pb.TARGET_STATE_UP, pb.TARGET_STATE_STUCK, pb.TARGET_STATE_ASLEEP


def signs(**overrides: object) -> Signs:
    given: dict[str, object] = {"asleep": False, "running": 0.0, "waiting": 0.0, "still_s": 0.0}
    return Signs(**(given | overrides))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shown", "state", "says"),
    [
        (signs(running=8.0, still_s=1), UP, ""),
        (signs(still_s=3600), UP, ""),
        (signs(still_s=3600, load=0.0, in_flight=0), UP, ""),
        (signs(running=None, waiting=None, still_s=3600), UP, ""),
        (
            signs(running=7.0, waiting=200.0, still_s=11),
            STUCK,
            "7 running and 200 waiting, but nothing has moved for 11 s",
        ),
        (signs(waiting=200.0, still_s=11), STUCK, "200 waiting"),
        (signs(running=1.0, still_s=10), UP, ""),
        (signs(waiting=5.0, still_s=11, load=0.0, in_flight=0), STUCK, "an aborted load left them standing"),
        (signs(waiting=5.0, still_s=11, in_flight=0), STUCK, "an aborted load left them standing"),
        (signs(waiting=5.0, still_s=11, load=5.0, in_flight=0), STUCK, "nothing has moved"),
        (signs(waiting=5.0, still_s=9, load=0.0, in_flight=0), UP, ""),
        (
            signs(still_s=60, load=3.0, unanswered_s=20),
            STUCK,
            "3 requests are open there, without an answer for 20 s",
        ),
        (signs(still_s=60, load=0.0, in_flight=2, unanswered_s=20), STUCK, "it is wedged"),
        (signs(still_s=60, load=3.0, unanswered_s=9), UP, ""),
        (signs(still_s=60, in_flight=3, unanswered_s=0), UP, ""),
        (signs(still_s=2, in_flight=3, unanswered_s=20), UP, ""),
        (signs(asleep=True, running=2.0, still_s=3600), ASLEEP, ""),
        (signs(asleep=True, load=0.0, still_s=3600), ASLEEP, ""),
        (signs(asleep=True, load=4.0, still_s=3600), ASLEEP, "it sleeps while 4 requests are waiting for it"),
    ],
    ids=[
        "busy",
        "idle for an hour",
        "idle, and nobody has a request there",
        "a page without gauges",
        "a standing queue",
        "waiting without running",
        "its longest iteration may not be over",
        "an aborted load",
        "an aborted load that gateways know of",
        "a standing queue with open requests",
        "a queue that emptied a moment ago",
        "wedged by its own count",
        "wedged by the gateways' count",
        "a request that has just come",
        "gateways hear answers",
        "a counter moved a moment ago",
        "asleep with frozen requests",
        "asleep and empty",
        "asleep with demand",
    ],
)
def test_what_a_server_shows_and_what_it_is(shown: Signs, state: int, says: str) -> None:
    found = judge(shown, limit_s=10)

    assert found.state == state
    assert says in found.reason
    assert bool(found.reason) == bool(says)


def test_a_request_is_unanswered_since_the_last_answer() -> None:
    said: LivenessReport | None = None
    since: list[float | None] = []
    words: list[tuple[float, float | None, int | None, int]] = [
        (1, None, 2, 0),
        (2, None, 2, 0),
        (3, None, 2, 7),
        (4, 1.0, 0, 0),
        (5, 0.0, 0, 0),
        (6, 1.0, None, 0),
    ]
    for now_s, load, in_flight, answered in words:
        said = liveness_report(said, load=load, in_flight=in_flight, answered=answered, now_s=now_s)
        since.append(said.open_since_s)

    assert since == [1, 1, 3, 3, None, 6]


def test_a_clock_set_back_does_not_make_a_request_wait_for_ever() -> None:
    before = liveness_report(None, load=1.0, in_flight=None, answered=0, now_s=1000.0)

    assert liveness_report(before, load=1.0, in_flight=None, answered=0, now_s=50.0).open_since_s == 50.0


# On pages


def watch(
    pages: Callable[[float], Reading],
    *,
    seconds: int,
    witnesses: dict[str, LivenessReport] | None = None,
    limit_s: float = 10,
) -> tuple[int, str, float]:
    """(state, reason, requests waiting at it asleep) after a page a second."""
    fleet = Fleet(target("r"), stuck_after_s=limit_s)
    for at_s in range(seconds):
        fleet.put("r", float(at_s), pages(float(at_s)))
    _, found = fleet.verdicts(
        seconds - 1.0, witnesses={f"id-of-{name}": item for name, item in (witnesses or {}).items()}
    )
    return int(found.states[0]), found.reasons.get(0, ""), float(found.asleep_load[0])


def test_a_gauge_that_stands_while_nothing_moves_is_stuck_not_load() -> None:
    def standing(_at_s: float) -> Reading:
        return page(700, running=7, waiting=200, kv_usage_ratio=0.9)

    assert watch(standing, seconds=12)[0] == STUCK
    assert watch(standing, seconds=12, limit_s=30)[0] == UP, "its longest iteration may not be over"


def test_zero_with_still_counters_is_idle_not_stuck() -> None:
    assert watch(lambda _: page(700, running=0, waiting=0), seconds=60)[0] == UP


def test_a_long_prefill_moves_the_kv_usage_only_and_is_not_stuck() -> None:
    # As captured: prompt and generation counters stand still until the first token of a chunked prefill.
    assert watch(lambda at_s: page(0, running=1, kv_usage_ratio=at_s / 100), seconds=60)[0] == UP


def test_a_computed_difference_below_its_maximum_is_no_movement() -> None:
    def after_the_hits(at_s: float) -> Reading:
        return page(5, running=1, prompt_tokens=1000, prefill_tokens=400 if at_s == 0 else 0)

    assert watch(after_the_hits, seconds=13)[0] == STUCK


def test_arrivals_at_a_wedged_server_do_not_make_it_look_alive() -> None:
    assert watch(lambda at_s: page(5, running=8, waiting=at_s), seconds=12)[0] == STUCK


def test_a_stuck_server_that_moves_again_is_not_stuck() -> None:
    assert watch(lambda at_s: page(5 if at_s < 12 else 6, running=8), seconds=13)[0] == UP


def test_a_sleeping_server_with_frozen_requests_is_asleep_not_stuck() -> None:
    state, reason, load = watch(lambda _: page(5, running=2, awake=0), seconds=60)

    assert (state, reason) == (ASLEEP, "")
    assert math.isnan(load), "nobody knows what waits there"


def test_a_server_wedged_while_idle_is_told_by_who_waits_for_it() -> None:
    waiting = LivenessReport(load=2.0, open_since_s=40.0)

    state, reason, _ = watch(lambda _: page(5, running=0, waiting=0), seconds=60, witnesses={"r": waiting})

    assert state == STUCK
    assert "2 requests are open there, without an answer for 19 s" in reason


def test_requests_at_a_sleeper_are_demand() -> None:
    waiting = {"r": LivenessReport(load=3.0, open_since_s=1.0)}

    state, reason, load = watch(lambda _: page(5, running=0, awake=0), seconds=12, witnesses=waiting)

    assert (state, load) == (ASLEEP, 3.0)
    assert "3 requests are waiting for it" in reason


def test_gateways_words_stand_in_where_a_server_does_not_count_its_requests() -> None:
    asleep = {"r": LivenessReport(in_flight=2, open_since_s=1.0)}

    assert watch(lambda _: page(5, awake=0), seconds=3, witnesses=asleep)[2] == 2.0
