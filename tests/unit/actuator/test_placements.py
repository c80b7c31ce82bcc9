"""Placements of scaled roles on virtual time: whole groups or nothing, victims, drains, lost stores."""

from dataclasses import replace

import pytest

from actuator.core.admission_placement import (
    GroupRequest,
    PlacementAnswer,
    PlacementRequest,
    apply_placements,
    pick_victims,
)
from actuator.core.cancelling import cancel_operation
from actuator.core.fencing import MAX_WRITERS, Refused
from actuator.core.gpu_occupancy import sharing, taken_gpus
from actuator.core.model import OperationState, State
from actuator.core.transaction import Transaction
from tests.unit.actuator.actuator_rig import LIMITS, Rig, spec
from trimtab.domain.vocabulary import Role


def place(rig: Rig, *groups: GroupRequest, **fields) -> PlacementAnswer:
    """ApplyPlacements on the newest inventory."""
    rig.step()
    values = {
        "inventory_revision": rig.memory.meta.inventory_revision,
        "expire_s": None,
        "request_id": "",
        "validate_only": False,
        "writer": "prescheduler",
        "token": 1,
    }
    request = PlacementRequest(groups=groups, **(values | fields))
    answer = apply_placements(rig.memory, request, rig.world(), now_s=rig.now_s, limits=LIMITS)
    rig.stored = rig.memory = answer.state
    return answer


def group(name: str = "g", *gpus: int, remove: int = 0, prefix: str = "r") -> GroupRequest:
    add = tuple(spec(f"{prefix}-{gpu}", gpu, service="chat", pool="", group=name) for gpu in gpus)
    taken = ((Role.COLOCATED, remove),) if remove else ()
    return GroupRequest(group=name, service="chat", add=add, remove=taken, decision_id="d-1")


def placed(*gpus: int) -> Rig:
    rig = Rig(gpus=4)
    place(rig, group("g", *gpus))
    assert rig.until_settled()
    return rig


def test_new_replicas_are_shown_only_after_a_token() -> None:
    rig = Rig(gpus=4)
    answer = place(rig, group("g", 0, 1))
    assert [(r.group, r.accepted) for r in answer.results] == [("g", True)]
    rig.run(2.0)
    assert {replica.routable for replica in rig.memory.replicas.values()} == {False}
    assert rig.until_settled()
    assert {name: replica.routable for name, replica in rig.memory.replicas.items()} == {"r-0": True, "r-1": True}


def test_a_group_of_which_one_never_answers_leaves_nothing() -> None:
    """Case 14: half-applied is compensated."""
    rig = Rig(gpus=4)
    answer = place(rig, group("g", 0, 1))
    rig.run(2.0)
    rig.servers["r-1"].no_token = True
    assert rig.until_settled()
    operation = rig.operation(answer.results[0].operation_id)
    assert operation.state is OperationState.ROLLED_BACK
    assert "r-1 gave no canary token" in operation.detail
    assert rig.memory.replicas == {}
    assert rig.servers == {}


def test_a_replica_whose_gpus_have_no_index_is_placed_and_claims_none() -> None:
    """As a Kubernetes pod: its node is known, which of the node's GPUs it has is not."""
    rig = Rig(gpus=4)
    pod = spec("pod-0", service="chat", pool="", group="g")
    assert (pod.node, pod.gpus) == ("n0", ())
    answer = place(rig, GroupRequest(group="g", service="chat", add=(pod,), remove=(), decision_id="d-1"))
    assert answer.results[0].accepted
    assert rig.until_settled()
    record = rig.memory.replicas["pod-0"]
    assert (record.routable, record.placement) == (True, pod.placement)
    assert taken_gpus(rig.memory.replicas, (), rig.world()) == frozenset()
    assert place(rig, group("h", 0, 1, 2, 3)).results[0].accepted
    assert rig.until_settled()
    assert all(replica.routable for replica in rig.memory.replicas.values())
    assert sharing(record.placed, rig.memory.replicas) == []
    assert rig.broken == []


REFUSALS = {
    "taken": (group("h", 0, prefix="s"), "s-0: GPU n0/0 is not free"),
    "name taken": (group("h", 0), "replica r-0 exists already"),
    "no such GPU": (group("h", 7, prefix="s"), "s-7: node n0 has 4 GPUs, no GPU 7"),
    "too many to remove": (group("g", remove=3), "the group has 2 colocated replicas to remove, not 3"),
}


@pytest.mark.parametrize("what", sorted(REFUSALS))
def test_a_group_that_does_not_fit_is_refused_alone(what: str) -> None:
    rig = placed(0, 1)
    request, reason = REFUSALS[what]
    answer = place(rig, request, group("fine", 3, prefix="f"))
    assert (answer.results[0].accepted, answer.results[0].detail) == (False, reason)
    assert answer.results[1].accepted
    assert rig.until_settled()
    assert sorted(rig.memory.replicas) == ["f-3", "r-0", "r-1"]


def test_two_groups_of_one_call_never_get_one_gpu() -> None:
    rig = Rig(gpus=4)
    answer = place(rig, group("g", 0), group("h", 0, prefix="s"))
    assert [result.accepted for result in answer.results] == [True, False]


def test_an_old_inventory_is_refused() -> None:
    rig = placed(0)
    with pytest.raises(Refused) as caught:
        place(rig, group("h", 1, prefix="s"), inventory_revision=rig.memory.meta.inventory_revision - 1)
    assert caught.value.reason == "OUTDATED_INVENTORY"


def test_the_same_request_is_answered_the_same_after_a_crash() -> None:
    rig = Rig(gpus=4)
    first = place(rig, group("g", 0), request_id="r")
    rig.crash()
    rig.restart()
    again = place(rig, group("g", 0), request_id="r", inventory_revision=0)
    assert again.results == first.results
    assert rig.until_settled()
    assert len(rig.memory.operations) == 1


def test_a_request_id_does_not_answer_for_another_request() -> None:
    rig = Rig(gpus=4)
    place(rig, group("g", 0), request_id="r")
    with pytest.raises(Refused) as caught:
        place(rig, group("h", 1, prefix="s"), request_id="r")
    assert caught.value.reason == "REQUEST_ID_REUSED"


def test_writers_are_bounded_and_those_known_go_on() -> None:
    rig = Rig(gpus=4)
    for number in range(MAX_WRITERS):
        place(rig, group("g", 0), writer=f"w-{number}")
    with pytest.raises(Refused) as caught:
        place(rig, group("g", 0), writer="one-more")
    assert caught.value.reason == "TOO_MANY_WRITERS"
    assert place(rig, group("g", 0), writer="w-0", token=2).results[0].accepted


def test_a_dry_run_changes_nothing() -> None:
    rig = Rig(gpus=4)
    answer = place(rig, group("g", 0), validate_only=True)
    assert (answer.results[0].accepted, answer.results[0].detail) == (True, "would be placed")
    assert answer.results[0].operation_id == "", "there is no such operation"
    rig.run(5.0)
    assert (rig.memory.replicas, rig.memory.operations, rig.servers) == ({}, {}, {})


def test_the_least_loaded_replica_leaves_and_is_drained_first() -> None:
    """Case 21."""
    rig = placed(0, 1, 2)
    for _ in range(2):
        assert rig.send("chat", 60.0)
    busy = {name for name, server in rig.servers.items() if server.requests}
    assert busy == {"r-0", "r-1"}
    place(rig, group("g", remove=1))
    assert rig.until_settled()
    assert sorted(rig.memory.replicas) == ["r-0", "r-1"]
    assert rig.broken == []


def test_a_scale_in_that_pinned_requests_hold_up_is_taken_back() -> None:
    rig = placed(0)
    assert rig.send("chat", 500.0, pinned=True)
    answer = place(rig, group("g", remove=1))
    assert rig.until_settled()
    assert rig.operation(answer.results[0].operation_id).state is OperationState.ROLLED_BACK
    assert rig.memory.replicas["r-0"].routable
    assert rig.servers["r-0"].requests


def test_a_scale_in_can_be_cancelled_while_it_drains() -> None:
    rig = placed(0)
    assert rig.send("chat", 20.0)
    answer = place(rig, group("g", remove=1))
    rig.run(2.0)
    assert rig.life_cycles() == {"r-0": "draining"}
    operation_id = answer.results[0].operation_id
    rig.memory, _ = cancel_operation(rig.memory, operation_id, "latency", rig.world(), now_s=rig.now_s, limits=LIMITS)
    assert rig.until_settled()
    assert rig.operation(operation_id).state is OperationState.CANCELLED
    assert rig.memory.replicas["r-0"].routable


def test_a_group_gets_its_new_replica_before_it_loses_an_old_one() -> None:
    rig = placed(0)
    place(rig, group("g", 1, remove=1))
    least = 9
    while any(not operation.finished for operation in rig.memory.operations.values()):
        rig.step()
        least = min(least, sum(replica.routable for replica in rig.memory.replicas.values()))
    assert (least, sorted(rig.memory.replicas)) == (1, ["r-1"])


def test_a_scale_in_takes_a_creation_back_that_nobody_wants_any_more() -> None:
    rig = placed(0)
    created = place(rig, group("g", 1, 2)).results[0].operation_id
    rig.run(1.0)
    answer = place(rig, group("g", remove=2))
    assert (answer.results[0].accepted, answer.results[0].operation_id) == (True, created)
    assert rig.until_settled()
    assert rig.operation(created).state is OperationState.CANCELLED
    assert sorted(rig.memory.replicas) == sorted(rig.servers) == ["r-0"]
    assert rig.memory.replicas["r-0"].routable


def test_a_creation_that_is_wanted_in_part_ends_before_more_leaves() -> None:
    rig = Rig(gpus=4)
    created = place(rig, group("g", 0, 1)).results[0].operation_id
    rig.run(1.0)
    refused = place(rig, group("g", remove=1)).results[0]
    expected = f"the group has 0 colocated replicas to remove, not 1; {created} must end first"
    assert (refused.accepted, refused.detail) == (False, expected)
    assert rig.until_settled()
    assert place(rig, group("g", remove=1)).results[0].accepted
    assert rig.until_settled()
    assert sorted(rig.memory.replicas) == ["r-1"]


def test_what_does_not_serve_leaves_first() -> None:
    rig = placed(0, 1, 2)
    rig.servers["r-1"].silent = True
    rig.run(3.0)
    draft = Transaction(rig.memory, rig.world(), LIMITS, rig.now_s)
    assert [victim.name for victim in pick_victims(draft, "g", Role.COLOCATED, 2)] == ["r-1", "r-0"]


@pytest.mark.parametrize("after_s", [0.5, 1.0, 2.0, 3.5, 4.5])
def test_a_kill_while_a_group_is_made_ends_in_the_whole_group(after_s: float) -> None:
    rig = Rig(gpus=4)
    answer = place(rig, group("g", 0, 1))
    rig.run(after_s)
    rig.crash()
    rig.run(3.0)
    rig.restart()
    assert rig.until_settled()
    assert rig.operation(answer.results[0].operation_id).state is OperationState.SUCCEEDED
    assert sorted(rig.servers) == ["r-0", "r-1"]


def test_a_group_survives_a_lost_store() -> None:
    rig = placed(0, 1)
    rig.crash()
    rig.stored = State()
    rig.restart()
    rig.step()
    found = {name: (r.spec.group, r.routable) for name, r in rig.memory.replicas.items()}
    assert found == {"r-0": ("g", True), "r-1": ("g", True)}


def test_a_replica_that_vanishes_is_withdrawn_and_then_forgotten() -> None:
    rig = placed(0, 1)
    del rig.servers["r-0"]
    rig.step()
    assert not rig.memory.replicas["r-0"].routable
    rig.run(5.0)
    assert sorted(rig.memory.replicas) == ["r-1"]


def test_pool_gpus_are_not_for_scaled_replicas() -> None:
    rig = Rig(gpus=4)
    rig.apply(1, [spec("a-0", 0)], ["a-0"])
    answer = place(rig, group("g", 0))
    assert answer.results[0].detail == "r-0: GPU n0/0 is not free"
    other = replace(group("h", 1, prefix="s"))
    assert place(rig, other).results[0].accepted
    with pytest.raises(Refused) as caught:
        rig.apply(2, [spec("a-0", 0), spec("a-1", 1)], ["a-0"])
    assert caught.value.reason == "GPU_TAKEN"
