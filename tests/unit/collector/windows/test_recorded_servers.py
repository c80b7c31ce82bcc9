"""What the table makes of pages that a real vLLM 0.32 wrote around sleep, pause, abort and restart."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from metrics_collector.core.liveness import LivenessReport
from metrics_collector.core.page import PageReader
from metrics_collector.core.schema import COUNTER_COLUMN
from tests.unit.collector.windows.fleet import Fleet, OneServer, increase, target, value
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.config.dialects import load_dialects
from trimtab.domain.signals import Counter

Capture = Callable[[str], bytes]
READER = PageReader(load_dialects())


def watched(
    capture: Capture, names: Sequence[str], *, liveness_report: LivenessReport | None = None, still_for_s: int = 0
) -> tuple[Fleet, int, str]:
    """A page a second, the last one for ``still_for_s`` more: (fleet, state, reason) at the last."""
    fleet, hint, at_s = Fleet(target("r")), None, 0.0
    for name in (*names, *([names[-1]] * still_for_s)):
        at_s += 1
        reading, hint = READER.read(capture(name), hint)
        fleet.put("r", at_s, reading)
    _, verdicts = fleet.verdicts(at_s, witnesses={} if liveness_report is None else {"id-of-r": liveness_report})
    return fleet, int(verdicts.states[0]), verdicts.reasons.get(0, "")


@pytest.mark.parametrize(
    ("names", "state"),
    [
        (["metrics-idle-fresh"], pb.TARGET_STATE_UP),
        (["metrics-s0-awake", "metrics-s1-slept-level1"], pb.TARGET_STATE_ASLEEP),
        (["metrics-s1-slept-level1", "metrics-s2-asleep-with-queued-request"], pb.TARGET_STATE_ASLEEP),
        (["metrics-a1-inflight-before-sleep", "metrics-k1-sleep-keep-inflight"], pb.TARGET_STATE_ASLEEP),
        (["metrics-a1-inflight-before-sleep", "metrics-a2-after-abort-sleep"], pb.TARGET_STATE_ASLEEP),
        (["metrics-s5-partial-wake-weights"], pb.TARGET_STATE_ASLEEP),
        (["metrics-s7-slept-level0"], pb.TARGET_STATE_ASLEEP),
        (["metrics-s2-asleep-with-queued-request", "metrics-s3-woken"], pb.TARGET_STATE_UP),
        (["metrics-a1-inflight-before-sleep"], pb.TARGET_STATE_STUCK),
        (["metrics-p2-paused-keep"], pb.TARGET_STATE_UP),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, list) else None,
)
def test_a_minute_later_it_is_still_known_for_what_it_is(capture: Capture, names: list[str], state: int) -> None:
    assert watched(capture, names, still_for_s=60)[1] == state


def test_a_server_put_to_sleep_with_requests_shows_running_that_is_not_counted(capture: Capture) -> None:
    fleet, *_ = watched(capture, ["metrics-k1-sleep-keep-inflight"], still_for_s=5)
    reading, _ = READER.read(capture("metrics-k1-sleep-keep-inflight"), None)

    assert reading.values[0] > 0, "the frozen gauge"
    assert np.isnan(fleet.values(6.0)[0, : pb.SIGNAL_HELD]).all()


def test_a_request_queued_at_a_sleeper_shows_only_in_its_load(capture: Capture) -> None:
    _, state, reason = watched(
        capture,
        ["metrics-s2-asleep-with-queued-request"],
        liveness_report=LivenessReport(load=1.0, open_since_s=1.0),
        still_for_s=3,
    )
    reading, _ = READER.read(capture("metrics-s2-asleep-with-queued-request"), None)

    assert list(reading.values[:2]) == [0.0, 0.0]
    assert state == pb.TARGET_STATE_ASLEEP
    assert "it sleeps while 1 request is waiting for it" in reason


def test_a_paused_server_looks_idle_until_somebody_says_that_a_request_waits_there(capture: Capture) -> None:
    waiting = LivenessReport(in_flight=1, open_since_s=1.0)

    _, state, reason = watched(capture, ["metrics-p2-paused-keep"], liveness_report=waiting, still_for_s=20)

    assert state == pb.TARGET_STATE_STUCK
    assert "1 request is open there, without an answer for 20 s" in reason


def test_a_restart_between_two_pages_counts_what_came_since(capture: Capture) -> None:
    before, hint = READER.read(capture("metrics-after-load"), None)
    after, _ = READER.read(capture("metrics-after-restart"), hint)
    server = OneServer((0, before), (5, after))

    seen = server.window(0, 5)

    assert seen.reset[0]
    assert increase(seen, Counter.DECODE_TOKENS) == after.values[COUNTER_COLUMN[Counter.DECODE_TOKENS]]


def test_a_server_under_load_has_rates_and_no_doubts(capture: Capture) -> None:
    fleet, state, reason = watched(capture, [f"flags-metrics-under-load-{number}" for number in range(6)])
    windows, _ = fleet.verdicts(6.0)

    assert (state, reason) == (pb.TARGET_STATE_UP, "")
    assert not windows.reset[0]
    assert (value(windows, pb.SIGNAL_DECODE_TPS) or 0) > 0
