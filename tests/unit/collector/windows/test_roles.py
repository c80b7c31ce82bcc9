"""What a role's window amounts to when replicas fail, hang, sleep, restart, stand still or leave."""

import math
import random
from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics_collector.core.gpu_table import GpuAverages
from metrics_collector.core.liveness import LivenessReport
from metrics_collector.core.replica_windows import SIGNAL_COLUMN
from metrics_collector.core.schema import COUNTERS, GAUGES, Reading, schema_of
from metrics_collector.core.targets import RoleKey, Target
from tests.unit.collector.windows.fleet import BARE, PLAIN, Fleet, page, target
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.signals import PAGE_SIGNALS, SIGNALS, Latency, Signal
from trimtab.store.observations import merge, signal

OK, PARTIAL, MISSING = types_pb2.QUALITY_OK, types_pb2.QUALITY_PARTIAL, types_pb2.QUALITY_MISSING


def chat(number: int, **overrides: bool | int) -> Target:
    return target(f"chat-{number}", **overrides)  # type: ignore[arg-type]


def busy(at_s: float, **columns: float) -> Reading:
    """A page of a replica at 100 tokens a second with two requests running and one waiting."""
    given: dict[str, float] = {"running": 2, "waiting": 1, "kv_usage_ratio": 0.5, "kv_usage_max_ratio": 0.6}
    return page(100 * at_s, **(given | columns))


def at_work(fleet: Fleet, *numbers: int, since_s: int = -2, **columns: float) -> None:
    """A page a second from ``since_s`` to 5 s: more than the window from 0 to 5 s."""
    for at_s in range(since_s, 6):
        for number in numbers:
            fleet.put(f"chat-{number}", float(at_s), busy(at_s - since_s, **columns))


def observed(fleet: Fleet, *, expected: set[str] | None = None) -> pb.RoleObservation:
    (partial,) = fleet.partials(5.0)
    return merge([partial], expected=expected)


def shown(observation: pb.RoleObservation, name: "pb.Signal.ValueType") -> tuple[float | None, int, int, int]:
    found = signal(observation, name)
    amount = round(found.value, 9) if found.HasField("value") else None
    return amount, found.quality, found.reported, found.expected


# Case 1


def test_four_of_eight_failed_scrapes_are_partial_not_half_the_load() -> None:
    fleet = Fleet(*(chat(number) for number in range(8)))
    at_work(fleet, 0, 1, 2, 3)

    found = observed(fleet)

    assert shown(found, pb.SIGNAL_DECODE_TPS) == (400.0, PARTIAL, 4, 8)
    assert list(found.missing_replicas) == ["chat-4", "chat-5", "chat-6", "chat-7"]


def test_a_family_that_half_of_the_replicas_lack_is_partial_and_the_others_are_whole() -> None:
    fleet = Fleet(*(chat(number) for number in range(8)))
    at_work(fleet, 0, 1, 2, 3)
    for number in range(4, 8):
        for at_s in range(-2, 6):
            fleet.put(f"chat-{number}", float(at_s), page(None, running=2, waiting=at_s))

    found = observed(fleet)

    assert shown(found, pb.SIGNAL_DECODE_TPS) == (400.0, PARTIAL, 4, 8)
    assert shown(found, pb.SIGNAL_RUNNING) == (16.0, OK, 8, 8)
    assert list(found.missing_replicas) == []


def test_nothing_read_is_missing_not_zero() -> None:
    found = observed(Fleet(chat(0), chat(1), chat(2)))

    for item in found.signals:
        assert item.measurement.quality == MISSING
        assert not item.measurement.HasField("value")


# Case 3


def test_no_requests_give_zero_rates_and_no_ratio_or_quantile_made_of_nothing() -> None:
    fleet = Fleet(chat(0))
    for at_s in range(-2, 6):
        idle = page(500, running=0, waiting=0, prefix_hits=10, prefix_queries=20, ttft=[5, 5, 5], ttft_s=1)
        fleet.put("chat-0", float(at_s), idle)

    found = observed(fleet)

    assert shown(found, pb.SIGNAL_DECODE_TPS) == (0.0, OK, 1, 1)
    assert shown(found, pb.SIGNAL_WAITING) == (0.0, OK, 1, 1)
    assert not signal(found, pb.SIGNAL_PREFIX_HIT_RATIO).HasField("value")
    (ttft,) = found.latencies
    assert ttft.count == 0
    assert not ttft.p95_s.HasField("value")
    assert "nothing finished" in ttft.p95_s.detail


# Case 4


def test_replicas_that_are_gone_leave_the_sums_in_the_same_window() -> None:
    everyone = [chat(number) for number in range(4)]
    fleet = Fleet(*everyone)
    at_work(fleet, 0, 1, 2, 3)
    assert shown(observed(fleet), pb.SIGNAL_DECODE_TPS) == (400.0, OK, 4, 4)

    left = Fleet(*everyone[:2])
    left.table = fleet.table
    for gone in everyone[2:]:
        left.table.remove(gone.target_id)

    assert shown(observed(left), pb.SIGNAL_DECODE_TPS) == (200.0, OK, 2, 2)
    assert list(observed(left).missing_replicas) == []


# Case 5


def test_six_of_seven_replicas_that_stand_still_at_200_waiting_are_no_load() -> None:
    fleet = Fleet(*(chat(number) for number in range(7)))
    for at_s in range(-10, 6):
        for number in range(6):
            fleet.put(f"chat-{number}", float(at_s), page(700, running=7, waiting=200, kv_usage_ratio=0.9))
    at_work(fleet, 6)

    found = observed(fleet)

    assert shown(found, pb.SIGNAL_WAITING) == (1.0, PARTIAL, 1, 7)
    assert "6 stale" in signal(found, pb.SIGNAL_WAITING).detail


def test_when_all_stand_still_the_role_is_stale_and_has_no_value() -> None:
    fleet = Fleet(chat(0))
    for at_s in range(-10, 6):
        fleet.put("chat-0", float(at_s), page(700, running=7, waiting=200))

    assert shown(observed(fleet), pb.SIGNAL_WAITING) == (None, types_pb2.QUALITY_STALE, 0, 1)


# Quality


def test_one_replica_that_counts_anew_flags_the_sum() -> None:
    fleet = Fleet(chat(0), chat(1))
    at_work(fleet, 0)
    for at_s in range(-2, 6):
        fleet.put("chat-1", float(at_s), page(1000 + at_s if at_s < 3 else at_s, running=1))

    assert signal(observed(fleet), pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_RESET


def test_a_warming_replica_is_counted_and_said_to_be_one() -> None:
    fleet = Fleet(chat(0), chat(1))
    at_work(fleet, 0)
    at_work(fleet, 1, since_s=2)

    assert shown(observed(fleet), pb.SIGNAL_DECODE_TPS) == (200.0, types_pb2.QUALITY_WARMING, 2, 2)


def test_a_replica_too_new_for_a_rate_makes_the_sum_partial() -> None:
    fleet = Fleet(chat(0), chat(1))
    at_work(fleet, 0)
    at_work(fleet, 1, since_s=5)

    found = observed(fleet)

    assert shown(found, pb.SIGNAL_DECODE_TPS) == (100.0, PARTIAL, 1, 2)
    assert "1 warming" in signal(found, pb.SIGNAL_DECODE_TPS).detail


def test_a_sleeper_is_no_capacity_where_nobody_says_that_it_is_routable() -> None:
    fleet = Fleet(chat(0), chat(1))
    at_work(fleet, 0)
    at_work(fleet, 1, awake=0)

    found = observed(fleet)

    assert list(found.reported_replicas) == ["chat-0"]
    assert list(found.missing_replicas) == []
    assert shown(found, pb.SIGNAL_RUNNING) == (2.0, OK, 1, 1)


def test_a_sleeper_that_its_actuator_lists_as_routable_is_missing() -> None:
    fleet = Fleet(chat(0), chat(1, routable=True))
    at_work(fleet, 0)
    at_work(fleet, 1, awake=0)

    found = observed(fleet)

    assert shown(found, pb.SIGNAL_RUNNING) == (2.0, PARTIAL, 1, 2)
    assert list(found.missing_replicas) == ["chat-1"]


def test_requests_at_sleepers_are_demand_though_no_sleeper_counts() -> None:
    fleet = Fleet(*(chat(number, counted=number < 1) for number in range(4)))
    at_work(fleet, 0)
    at_work(fleet, 1, 2, 3, awake=0)
    heard = {
        "id-of-chat-1": LivenessReport(load=3.0),
        "id-of-chat-2": LivenessReport(load=0.0),
        "id-of-chat-0": LivenessReport(load=9.0),
    }

    (partial,) = fleet.partials(5.0, witnesses=heard)
    found = merge([partial], expected=["chat-0"])

    assert shown(found, pb.SIGNAL_ASLEEP_LOAD) == (3.0, PARTIAL, 2, 3)
    assert shown(found, pb.SIGNAL_RUNNING) == (2.0, OK, 1, 1)


def test_where_nobody_counts_a_sleepers_requests_there_is_no_such_signal() -> None:
    fleet = Fleet(chat(0))
    at_work(fleet, 0, awake=0)

    assert pb.SIGNAL_ASLEEP_LOAD not in {item.signal for item in fleet.partials(5.0)[0].signals}


def test_replicas_that_do_not_count_are_in_no_sum() -> None:
    fleet = Fleet(chat(0), chat(1, counted=False))
    at_work(fleet, 0, 1)

    assert shown(observed(fleet), pb.SIGNAL_DECODE_TPS) == (100.0, OK, 1, 1)


def test_a_role_without_counted_replicas_says_so() -> None:
    found = observed(Fleet(chat(0, counted=False)))

    assert signal(found, pb.SIGNAL_DECODE_TPS).quality == MISSING
    assert "no replica is expected" in signal(found, pb.SIGNAL_DECODE_TPS).detail


def test_a_fleet_without_targets_has_no_partials() -> None:
    assert Fleet().partials(5.0) == []


# Values


def test_kv_usage_is_a_mean_that_keeps_the_maximum() -> None:
    fleet = Fleet(chat(0), chat(1))
    at_work(fleet, 0, kv_usage_ratio=0.2)
    at_work(fleet, 1, kv_usage_ratio=0.6, kv_usage_max_ratio=0.95)

    found = next(item for item in observed(fleet).signals if item.signal == pb.SIGNAL_KV_USAGE_RATIO)

    assert found.measurement.value == pytest.approx(0.4)
    assert found.maximum == 0.95


def test_the_hit_ratio_weighs_replicas_by_their_queries() -> None:
    fleet = Fleet(chat(0), chat(1), chat(2))
    for at_s in (0, 5):
        fleet.put("chat-0", float(at_s), page(at_s, prefix_hits=180 * at_s, prefix_queries=200 * at_s))
        fleet.put("chat-1", float(at_s), page(at_s, prefix_hits=0, prefix_queries=40 * at_s))
        fleet.put("chat-2", float(at_s), page(at_s, prefix_hits=7, prefix_queries=9))

    assert signal(observed(fleet), pb.SIGNAL_PREFIX_HIT_RATIO).value == pytest.approx(0.75)


def test_quantiles_come_from_the_buckets_of_all_replicas() -> None:
    # 90 quick requests on one replica, 10 slow ones on the other: the mean of two p95s would say 2.8 s.
    schema = schema_of(((Latency.TTFT, (0.1, 1.0, 5.0, math.inf)),))
    fleet = Fleet(chat(0), chat(1))
    for number, buckets, seconds in ((0, [90.0] * 4, 4.5), (1, [0.0, 0.0, 10.0, 10.0], 30.0)):
        fleet.put(f"chat-{number}", 0.0, page(0, ttft=[0] * 4, schema=schema))
        fleet.put(f"chat-{number}", 5.0, page(1, ttft=buckets, ttft_s=seconds, schema=schema))

    (ttft,) = observed(fleet).latencies

    assert ttft.count == 100
    assert ttft.p50_s.value == pytest.approx(0.1 * 50 / 90)
    assert ttft.p95_s.value == pytest.approx(1 + 4 * 5 / 10)
    assert ttft.mean_s.value == pytest.approx(0.345)


def test_a_role_half_way_through_an_upgrade_merges_on_the_bounds_in_common() -> None:
    newer = schema_of(((Latency.TTFT, (0.1, 0.5, 1.0, math.inf)),))
    fleet = Fleet(chat(0), chat(1))
    for at_s, counts in ((0, (0.0, 0.0, 0.0)), (5, (1.0, 4.0, 5.0))):
        fleet.put("chat-0", float(at_s), page(at_s, ttft=counts, ttft_s=2 * at_s / 5))
    for at_s, four in ((0, (0.0, 0.0, 0.0, 0.0)), (5, (1.0, 2.0, 3.0, 5.0))):
        fleet.put("chat-1", float(at_s), page(at_s, ttft=four, ttft_s=3 * at_s / 5, schema=newer))

    (partial,) = fleet.partials(5.0)
    (ttft,) = partial.latencies

    assert list(ttft.upper_bounds_s) == [0.1, 1.0, math.inf]
    assert list(ttft.increases) == [2.0, 5.0, 3.0]
    assert (ttft.sum_s, ttft.count) == (5.0, 10.0)


def test_gpus_weigh_ratios_and_their_power_adds_up() -> None:
    fleet = Fleet(chat(0, gpus=1), chat(1, gpus=3), chat(2))
    at_work(fleet, 0, 1, 2)
    seen = {"id-of-chat-0": GpuAverages(1.0, 0.5, 300.0, 0.8), "id-of-chat-1": GpuAverages(0.2, None, 900.0, 0.4)}

    (partial,) = fleet.partials(5.0, gpus=seen)
    found = merge([partial])

    assert shown(found, pb.SIGNAL_GPU_UTILISATION_RATIO) == (0.4, PARTIAL, 2, 3)
    assert shown(found, pb.SIGNAL_SM_ACTIVITY_RATIO) == (0.5, PARTIAL, 1, 3)
    assert shown(found, pb.SIGNAL_GPU_POWER_W) == (1200.0, PARTIAL, 2, 3)
    assert shown(found, pb.SIGNAL_GPU_MEMORY_RATIO) == (0.5, PARTIAL, 2, 3)


def test_what_the_gpu_exporter_says_of_a_stuck_server_is_true_all_the_same() -> None:
    fleet = Fleet(chat(0))
    for at_s in range(-10, 6):
        fleet.put("chat-0", float(at_s), page(700, running=7))

    found = merge(fleet.partials(5.0, gpus={"id-of-chat-0": GpuAverages(1.0, 0.0, 90.0, 0.8)}))

    assert shown(found, pb.SIGNAL_SM_ACTIVITY_RATIO) == (0.0, OK, 1, 1)
    assert shown(found, pb.SIGNAL_RUNNING) == (None, types_pb2.QUALITY_STALE, 0, 1)


def test_without_a_gpu_exporter_there_are_no_gpu_signals() -> None:
    fleet = Fleet(chat(0))
    at_work(fleet, 0)

    assert {SIGNALS[item.signal] for item in fleet.partials(5.0)[0].signals} == set(PAGE_SIGNALS)


def test_each_role_of_each_service_has_its_own_partial() -> None:
    prefill, other = types_pb2.ROLE_PREFILL, types_pb2.ROLE_COLOCATED
    fleet = Fleet(chat(1), target("p", role=prefill), chat(0), target("b", service="batch", role=other))
    at_work(fleet, 0, 1)

    partials = fleet.partials(5.0, collector="c-7", replica_revisions={"b": 2, "a": 1})

    assert [(item.service, item.role) for item in partials] == [
        ("batch", other),
        ("chat", prefill),
        ("chat", types_pb2.ROLE_DECODE),
    ]
    assert [list(item.reported_replicas) for item in partials] == [[], [], ["chat-0", "chat-1"]]
    assert partials[0].collector == "c-7"
    assert dict(partials[0].replica_revisions) == {"a": 1, "b": 2}
    assert (partials[0].window_start.seconds, partials[0].window_end.seconds) == (0, 5)


def test_a_roster_leaves_out_targets_without_a_role() -> None:
    fleet = Fleet(chat(0), target("lost", role=types_pb2.ROLE_UNSPECIFIED))

    assert fleet.expected_replicas.target_ids == ("id-of-chat-0",)
    assert fleet.expected_replicas.keys == (RoleKey(service="chat", role=types_pb2.ROLE_DECODE),)


def test_a_replicas_own_values_have_a_quality() -> None:
    fleet = Fleet(chat(0), chat(1), chat(2), chat(3), chat(4))
    at_work(fleet, 0)
    at_work(fleet, 1, awake=0)
    for at_s in range(-10, 6):
        fleet.put("chat-2", float(at_s), page(700, running=7))
    at_work(fleet, 3, since_s=4)

    windows, verdicts = fleet.verdicts(5.0)

    assert windows.qualities(verdicts.stuck).tolist() == [
        OK,
        MISSING,
        types_pb2.QUALITY_STALE,
        types_pb2.QUALITY_WARMING,
        MISSING,
    ]
    assert fleet.values(5.0)[0, SIGNAL_COLUMN[Signal.DECODE_TPS]] == 100.0


# Invariants


def numbers_of(message: Message) -> Iterator[float]:
    for field, content in message.ListFields():
        for item in content if field.is_repeated else [content]:
            if isinstance(item, float):
                yield item
            elif isinstance(item, Message):
                yield from numbers_of(item)


cells = st.one_of(st.just(math.nan), st.just(0.0), st.floats(0, 1e12))
rows = st.lists(cells, min_size=len(GAUGES) + len(COUNTERS), max_size=len(GAUGES) + len(COUNTERS))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(rows, min_size=2, max_size=3), min_size=4, max_size=4), st.randoms(use_true_random=False))
def test_any_split_of_replicas_over_collectors_merges_to_the_same(
    pages: list[list[list[float]]], dice: random.Random
) -> None:
    """And no NaN, infinity or negative stands in any message, bounds apart."""
    everyone = [chat(number, gpus=number + 1) for number in range(4)]
    homes = [dice.randrange(3) for _ in everyone]

    def collect(mine: list[int], collector: str) -> list[pb.RolePartial]:
        order = list(mine)
        dice.shuffle(order)
        fleet = Fleet(*(everyone[number] for number in order))
        for number in order:
            for place, values in enumerate(pages[number]):
                schema = PLAIN if number % 2 else BARE
                filled = [*values, *([float(place)] * (schema.width - len(values)))]
                fleet.put(f"chat-{number}", 2.0 + place, Reading(schema, filled))
        gpus = {f"id-of-chat-{number}": GpuAverages(0.5, None, 100.0, 0.25) for number in mine if number != 2}
        return fleet.partials(5.0, collector=collector, gpus=gpus)

    split = [
        partial
        for home in range(3)
        for partial in collect([number for number in range(4) if homes[number] == home], f"c-{home}")
    ]
    dice.shuffle(split)
    parts, whole = merge(split), merge(collect([0, 1, 2, 3], "c-0"))

    for message in (*split, parts, whole):
        numbers = [number for number in numbers_of(message) if number != math.inf]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert list(parts.reported_replicas) == list(whole.reported_replicas)
    assert list(parts.missing_replicas) == list(whole.missing_replicas)
    for name in {item.signal for item in whole.signals}:
        one, other = signal(parts, name), signal(whole, name)
        assert (one.quality, one.reported, one.expected) == (other.quality, other.reported, other.expected)
        assert one.HasField("value") == other.HasField("value")
        assert one.value == pytest.approx(other.value, rel=1e-9)
    for one_latency, other_latency in zip(parts.latencies, whole.latencies, strict=True):
        assert one_latency.count == pytest.approx(other_latency.count)
        assert one_latency.p95_s.value == pytest.approx(other_latency.p95_s.value)
