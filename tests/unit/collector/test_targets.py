"""Targets from file_sd documents and from actuators, as one list."""

import pytest

from metrics_collector.core.schedule import LEAD, MOST_SPREAD, next_due, phase, phase_s, rounds_to_skip, spread_of
from metrics_collector.core.status import TargetStatus, describe_target
from metrics_collector.core.targets import Target, from_file_sd, from_replica, merge_targets
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.config.file_sd import parse_file_sd


def group(*addresses: str, **labels: str) -> dict[str, object]:
    return {"targets": list(addresses), "labels": labels}


def parse(*groups: object) -> tuple[Target, ...]:
    return tuple(from_file_sd(listed) for listed in parse_file_sd(list(groups), file="t.yaml"))


def test_labels_place_a_target() -> None:
    (target,) = parse(
        group("h:8000", service="chat", role="decode", replica="chat-d-0", cluster="east", gpus="4", team="x")
    )

    assert target == Target(
        target_id="chat-d-0",
        address="http://h:8000",
        service="chat",
        role=types_pb2.ROLE_DECODE,
        replica="chat-d-0",
        cluster="east",
        gpus=4,
        source="file_sd",
        counted=True,
    )


def test_a_gpu_exporter_belongs_to_a_node_and_is_never_counted() -> None:
    (target,) = parse(group("h:9400", exporter="dcgm", node="gpu-a", service="chat", role="decode"))

    assert (target.exporter, target.node, target.placed, target.counted) == ("dcgm", "gpu-a", False, False)


def test_labels_say_which_gpus_and_which_page() -> None:
    (target,) = parse(
        group("h:1", service="chat", role="decode", node="gpu-a", gpu_indices="3,1", __metrics_path__="/x/metrics")
    )

    assert (target.node, target.gpu_indices, target.metrics_path) == ("gpu-a", (1, 3), "/x/metrics")


def test_a_target_without_replica_goes_by_its_address() -> None:
    targets = parse(group("[::1]:8000", "h:8001", service="chat", role="colocated", __scheme__="https"))

    assert [(target.target_id, target.address) for target in targets] == [
        ("[::1]:8000", "https://[::1]:8000"),
        ("h:8001", "https://h:8001"),
    ]


def test_a_target_without_service_or_role_is_shown_not_counted() -> None:
    targets = parse(group("h:1"), group("h:2", service="chat"), group("h:3", role="decode"))

    assert [target.counted for target in targets] == [False, False, False]


@pytest.mark.parametrize(
    ("labels", "gpus"), [({}, 1), ({"gpus": "0"}, 0), ({"gpus": "4"}, 4), ({"gpu_indices": "2,5"}, 2)]
)
def test_a_target_has_one_gpu_unless_it_is_said(labels: dict[str, str], gpus: int) -> None:
    (target,) = parse(group("h:1", **labels))

    assert target.gpus == gpus


def replica(name: str, *, address: str = "http://h:1", routable: bool = True) -> actuator_pb2.Replica:
    return actuator_pb2.Replica(
        replica=name,
        service="chat",
        role=types_pb2.ROLE_COLOCATED,
        address=address,
        gpu_indices=[0, 1],
        routable=routable,
    )


def test_only_routable_replicas_count() -> None:
    awake = from_replica(replica("chat-0"), cluster="local")
    held = from_replica(replica("chat-1", routable=False), cluster="local")

    assert (awake.counted, awake.gpus, awake.source) == (True, 2, "actuator/local")
    assert held.counted is False


def test_a_file_target_that_no_actuator_lists_is_shown_not_counted() -> None:
    files = parse(group("h:9", service="chat", role="colocated", replica="stray"))

    merged = merge_targets(files, [from_replica(replica("chat-0"), cluster="local")], actuators_configured=True)

    assert {name: target.counted for name, target in merged.items()} == {"chat-0": True, "stray": False}


def test_without_actuators_every_placed_file_target_counts() -> None:
    files = parse(group("h:9", service="chat", role="colocated", replica="real"), group("h:8"))

    merged = merge_targets(files, [], actuators_configured=False)

    assert {name: target.counted for name, target in merged.items()} == {"h:8": False, "real": True}


def test_a_server_in_a_file_and_at_an_actuator_is_one_target() -> None:
    files = parse(
        group("h:1", service="chat", role="decode", replica="same-address"),
        group("h:7", service="chat", role="decode", replica="chat-0"),
    )

    merged = merge_targets(files, [from_replica(replica("chat-0"), cluster="local")], actuators_configured=True)

    assert list(merged) == ["chat-0"]
    assert merged["chat-0"].address == "http://h:1"


def test_a_routable_replica_without_an_address_still_counts() -> None:
    target = from_replica(replica("chat-0", address=""), cluster="local")

    assert target.counted
    assert describe_target(target, TargetStatus()).last_error == "it has no address yet"


def test_back_off_grows_within_its_bound_and_starts_late() -> None:
    skipped = [rounds_to_skip(failures, interval_s=1.0, max_backoff_s=5.0) for failures in range(7)]

    assert skipped == [0, 0, 1, 3, 4, 4, 4]
    assert rounds_to_skip(1000, interval_s=1.0, max_backoff_s=0.0) == 0


def test_scrapes_are_due_at_a_phase_of_aligned_intervals() -> None:
    assert next_due(100.2, phase_s=0.25, interval_s=1.0) == 100.25
    assert next_due(100.25, phase_s=0.25, interval_s=1.0) == 101.25
    assert next_due(107.0, phase_s=0.5, interval_s=5.0) == 110.5


def test_phases_spread_and_are_the_same_in_every_process() -> None:
    phases = [phase(f"chat-{number}") for number in range(1000)]

    assert phase("chat-0") == pytest.approx(0.2517, abs=1e-4)
    assert all(sum(low <= value < low + 0.1 for value in phases) > 60 for low in (0.0, 0.3, 0.6, 0.9))


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 15.0])
@pytest.mark.parametrize("targets", [1, 8, 60, 700, 20_000])
def test_scrapes_come_shortly_before_the_window_ends_and_no_faster_than_they_must(
    targets: int, interval_s: float
) -> None:
    spread = spread_of(targets, interval_s=interval_s)
    due_s = [phase_s(f"chat-{number}", spread=spread, interval_s=interval_s) for number in range(targets)]

    assert min(due_s) > 0
    assert max(due_s) <= (1 - LEAD) * interval_s + 1e-9
    # As late as their number allows: in a tenth of the interval where five hundred a second have room in it.
    few = targets / (interval_s * 500) <= MOST_SPREAD / 8
    assert (min(due_s) > 0.74 * interval_s) is few
    assert spread == MOST_SPREAD or targets / (spread * interval_s) <= 500


def test_a_fleet_that_grows_by_a_server_keeps_its_moments() -> None:
    changes = [
        number
        for number in range(1, 2000)
        if spread_of(number, interval_s=1.0) != spread_of(number + 1, interval_s=1.0)
    ]

    assert changes == [46, 93, 187]
