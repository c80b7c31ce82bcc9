"""What a collector writes of a role is read back as it was; what is not known or no number stays apart."""

import math

import pytest

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.histogram import Histogram
from trimtab.domain.role_merge import merge, merge_service
from trimtab.domain.role_window import LatencySums, RoleWindow, SignalSums, role_window_from_proto, role_window_to_proto
from trimtab.domain.signals import Latency, Signal
from trimtab.domain.vocabulary import Quality, Role

END_US = 1_700_000_000_123_456


def window(role: Role | None = Role.DECODE) -> RoleWindow:
    return RoleWindow(
        collector="c-0",
        service="chat",
        role=role,
        start_us=END_US - 5_000_000,
        end_us=END_US,
        reported_replicas=("a", "b"),
        missing_replicas=("c",),
        replica_revisions={"eu": 7},
        signals=[
            SignalSums(Signal.DECODE_TPS, 100.0, 2, 60.0, 0.0, 1, 2, 1),
            SignalSums(Signal.PREFIX_HIT_RATIO, 3.0, 2, weight=4.0),
        ],
        latencies=[
            LatencySums(
                Latency.TTFT, Histogram(upper_bounds=(0.1, 1.0, math.inf), cumulative=[1.0, 1.0, 4.0], total=2.5)
            )
        ],
    )


@pytest.mark.parametrize("role", [None, *Role])
def test_a_window_comes_back_as_it_was_written(role: Role | None) -> None:
    data = role_window_to_proto(window(role)).SerializeToString()
    assert role_window_from_proto(pb.RolePartial.FromString(data)) == window(role)


def test_a_role_of_a_later_release_is_refused_with_its_number() -> None:
    message = role_window_to_proto(window())
    message.role = types_pb2.Role.ValueType(99)
    with pytest.raises(ValueError, match="role 99 of service 'chat'"):
        role_window_from_proto(message)


def test_signals_and_latencies_of_a_later_release_are_left_out() -> None:
    message = role_window_to_proto(window())
    message.signals.add(signal=pb.Signal.ValueType(99), sum=1.0)
    message.latencies.add(latency=pb.Latency.ValueType(99))
    assert role_window_from_proto(message) == window()


def test_a_histogram_that_is_none_is_told_from_none_at_all() -> None:
    message = role_window_to_proto(window())
    message.latencies[0].increases[0] = math.nan
    read = role_window_from_proto(message)
    assert read.latencies == [LatencySums(Latency.TTFT, None)]
    found = merge([read]).latency(Latency.TTFT)
    assert (found.count, found.p95_s.value, found.p95_s.quality) == (0.0, None, Quality.MISSING)


def test_a_signal_that_no_window_has_was_never_observed() -> None:
    observation = merge([window()])
    assert observation.measurement(Signal.RUNNING).detail == "never observed"
    assert observation.quantile(Latency.E2E, 0.95).detail == "never observed"


def test_a_latency_that_only_another_role_has_counts_the_replicas_of_the_role_that_should() -> None:
    """Prefill tells the first token: decode's histogram does not stand in for it."""
    prefill = RoleWindow(
        collector="c-0", service="chat", role=Role.PREFILL, start_us=0, end_us=END_US, reported_replicas=("p",)
    )
    found = merge_service([window(), prefill]).quantile(Latency.TTFT, 0.95)
    assert (found.value, found.quality, found.expected) == (None, Quality.MISSING, 1)
