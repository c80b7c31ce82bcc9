"""What a record that cannot be read keeps from being changed: no more than it has to, and nobody works around it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from actuator.core.admission_placement import GroupRequest, PlacementRequest, apply_placements
from actuator.core.admission_pool import PoolRequest, apply_pool_state
from actuator.core.fencing import Refused
from actuator.core.held import held
from actuator.core.model import GroupOutcome, OperationState, State
from actuator.core.refused import RefusedKind, RefusedRecord
from actuator.core.tick import fail_static, take_up
from tests.unit.actuator.actuator_fleet_model import changed
from tests.unit.actuator.actuator_rig import LIMITS, Rig, overlay_of, spec
from trimtab.domain.pool import DesiredPool
from trimtab.domain.vocabulary import LifeCycle

OVERLAY = [spec("a-0", 0), spec("a-1", 1), spec("b-0", 0), spec("b-1", 1)]
AWAKE = ["a-0", "b-1"]
MOVED = ["b-0", "b-1"]


def place(rig: Rig, name: str, *gpus: int, prefix: str = "r") -> GroupOutcome:
    """A placement of new replicas on the newest inventory."""
    rig.step()
    assert rig.memory is not None
    add = tuple(
        changed(spec(f"{prefix}-{gpu}", gpu, service="chat", pool="", group=name), decision_id="d") for gpu in gpus
    )
    request = PlacementRequest(
        groups=(GroupRequest(group=name, service="chat", add=add, remove=(), decision_id="d"),),
        inventory_revision=rig.memory.meta.inventory_revision,
        expire_s=None,
        request_id="",
        validate_only=False,
        writer="prescheduler",
        token=1,
    )
    answer = apply_placements(rig.memory, request, rig.world(), now_s=rig.now_s, limits=LIMITS)
    rig.stored = rig.memory = answer.state
    return answer.results[0]


def running() -> Rig:
    """A pool on the GPUs 0 and 1 with a-0 and b-1 awake, a group with r-2 on GPU 2; GPU 3 is free."""
    rig = Rig(gpus=4)
    rig.apply(1, OVERLAY, AWAKE)
    assert rig.until_settled()
    assert place(rig, "g", 2).accepted
    assert rig.until_settled()
    return rig


def bad(kind: RefusedKind, name: str, **known: Any) -> RefusedRecord:
    return RefusedRecord(
        kind=kind, name=name, reason="corrupt", why=f"{name} is no record", remedy="remove it", **known
    )


def refuse(rig: Rig, record: RefusedRecord) -> None:
    """The actuator starts anew, and cannot read that record any more."""
    rig.crash()
    state = rig.stored
    rig.stored = replace(
        state,
        replicas={name: item for name, item in state.replicas.items() if name != record.name},
        pools={name: item for name, item in state.pools.items() if name != record.name},
        operations={name: item for name, item in state.operations.items() if name != record.name},
        refused=(record,),
    )
    rig.restart()


def mend(rig: Rig, loaded: State) -> None:
    """An operator has seen to the record; the store holds ``loaded`` now."""
    assert rig.memory is not None
    rig.memory = rig.stored = take_up(rig.memory, loaded, rig.world(), now_s=rig.now_s, limits=LIMITS)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.reason == "RECORD_REFUSED"
    assert caught.value.detail["remedy"] == "remove it"
    return caught.value.message


def operations_of(rig: Rig, *subjects: str) -> list[str]:
    assert rig.memory is not None
    return [o.operation_id for o in rig.memory.operations.values() if o.subject in subjects and not o.finished]


# A bad replica


def test_a_bad_replica_holds_its_pool_and_nothing_else() -> None:
    rig = running()
    refuse(rig, bad(RefusedKind.REPLICA, "a-0"))
    asleep = {name for name, server in rig.servers.items() if server.asleep}
    rig.reboot("b-1")
    rig.reboot("r-2")
    rig.run(60.0)
    assert rig.memory is not None
    assert "a-0" not in rig.memory.replicas, "its server is not taken for one without a record"
    assert operations_of(rig, "p") == [], "nothing is put right in the pool"
    assert {name for name, server in rig.servers.items() if server.asleep} == asleep
    assert not rig.memory.replicas["b-1"].routable, "it came up anew, and nobody may show it"
    assert rig.memory.replicas["r-2"].routable, "another subject's replica was put right"
    assert "p is held: a-0 is no record; remove it" in refusal(lambda: rig.apply(2, OVERLAY, MOVED))
    assert rig.broken == []


def test_gpus_of_a_bad_replica_are_taken_and_others_are_not() -> None:
    rig = running()
    refuse(rig, bad(RefusedKind.REPLICA, "r-2"))
    assert place(rig, "other", 2).detail == "replica r-2 exists already"
    assert place(rig, "g", 3).detail == "the group is held: r-2 is no record; remove it"
    assert place(rig, "other", 3).accepted
    assert rig.until_settled()
    rig.apply(2, OVERLAY, MOVED)
    assert rig.until_settled()
    assert rig.life_cycles()["b-0"] == "active", "the pool is not concerned"


def test_a_bad_replica_that_the_backend_does_not_list_blocks_gpus_by_what_its_record_says() -> None:
    rig = running()
    del rig.servers["r-2"]
    refuse(rig, bad(RefusedKind.REPLICA, "r-2", gpus=(("n0", 2),), group="g"))
    assert rig.memory is not None
    assert held(rig.memory, rig.world()).gpus.keys() == {("n0", 2)}
    assert place(rig, "other", 2, prefix="s").detail == "s-2: GPU n0/2 is not free"
    assert place(rig, "other", 3).accepted


def test_a_bad_replica_of_unknown_gpus_blocks_every_placement_and_new_gpus_of_pools() -> None:
    rig = running()
    del rig.servers["r-2"]
    refuse(rig, bad(RefusedKind.REPLICA, "r-2"))
    assert "GPUs may be taken that are not known" in refusal(lambda: place(rig, "other", 3))
    larger = [*OVERLAY, spec("a-3", 3)]
    assert "GPUs of a-3 may be taken" in refusal(lambda: rig.apply(2, larger, AWAKE, budget_gpus=4))
    rig.apply(2, OVERLAY, MOVED)
    assert rig.until_settled()
    assert rig.life_cycles()["b-0"] == "active", "GPUs that the pool had are not in doubt"


def test_a_bad_replica_that_is_gone_has_the_gpus_of_its_overlay_entry() -> None:
    rig = running()
    del rig.servers["a-0"]
    refuse(rig, bad(RefusedKind.REPLICA, "a-0"))
    assert place(rig, "other", 3).accepted
    assert rig.until_settled()
    assert "a-0" not in rig.servers, "it is not made again"


def test_a_name_of_a_bad_replica_is_given_to_no_pool() -> None:
    rig = running()
    refuse(rig, bad(RefusedKind.REPLICA, "r-2"))
    assert rig.memory is not None
    desired = DesiredPool(
        pool="q",
        state_revision=1,
        overlay=overlay_of([spec("r-2", 3, pool="q")]),
        awake=(),
        floors=(),
        budget_gpus=1,
        decision_id="",
        drain_timeout_s=1.0,
    )
    request = PoolRequest(desired=desired, writer="policy-engine", token=1)
    state = rig.memory
    assert "r-2 is held" in refusal(
        lambda: apply_pool_state(state, request, rig.world(), now_s=rig.now_s, limits=LIMITS)
    )


def test_a_replica_whose_record_is_removed_is_taken_up_as_it_is_found() -> None:
    rig = running()
    refuse(rig, bad(RefusedKind.REPLICA, "a-0"))
    rig.run(10.0)
    assert rig.memory is not None
    mend(rig, replace(rig.memory, refused=()))
    rig.step()
    assert rig.memory.replicas["a-0"].life_cycle is LifeCycle.ACTIVE
    rig.apply(2, OVERLAY, MOVED)
    assert rig.until_settled()
    assert {name: rig.life_cycles()[name] for name in ("a-0", "b-0")} == {"a-0": "sleeping", "b-0": "active"}
    assert rig.broken == []


def test_a_replica_whose_record_is_restored_goes_on_with_it_and_gateways_hear() -> None:
    rig = running()
    record = rig.stored.replicas["a-0"]
    refuse(rig, bad(RefusedKind.REPLICA, "a-0"))
    rig.run(10.0)
    assert rig.memory is not None
    before = rig.memory.meta
    mend(rig, replace(rig.memory, replicas={**rig.memory.replicas, "a-0": record}, refused=()))
    assert rig.memory.replicas["a-0"].routable
    assert rig.memory.meta.endpoint_revision > before.endpoint_revision, "the set is another one"
    assert rig.memory.meta.replica_revision > before.replica_revision
    rig.apply(2, OVERLAY, MOVED)
    assert rig.until_settled()
    assert rig.life_cycles()["b-0"] == "active"
    assert rig.broken == []


def test_a_record_that_goes_bad_under_a_running_actuator_leaves_the_state() -> None:
    rig = running()
    assert rig.memory is not None
    before = rig.memory.meta
    mend(rig, replace(rig.memory, refused=(bad(RefusedKind.REPLICA, "a-0"),)))
    assert "a-0" not in rig.memory.replicas
    assert rig.memory.meta.endpoint_revision > before.endpoint_revision
    refusal(lambda: rig.apply(2, OVERLAY, MOVED))


# A bad pool


@pytest.mark.parametrize("gpus", [None, (("n0", 0), ("n0", 1))])
def test_a_bad_pool_is_held_and_its_replicas_are_left_alone(gpus: Any) -> None:
    rig = running()
    servers = set(rig.servers)
    refuse(rig, bad(RefusedKind.POOL, "p", gpus=gpus))
    rig.reboot("b-1")
    rig.run(60.0)
    assert set(rig.servers) == servers
    assert operations_of(rig, "p", "b-1") == []
    assert "p is held: p is no record; remove it" in refusal(lambda: rig.apply(2, OVERLAY, MOVED))
    if gpus is None:
        assert "GPUs may be taken" in refusal(lambda: place(rig, "other", 3))
    else:
        assert place(rig, "other", 3).accepted
    assert rig.broken == []


def test_a_pool_whose_record_is_removed_waits_for_the_next_state() -> None:
    rig = running()
    refuse(rig, bad(RefusedKind.POOL, "p"))
    rig.run(10.0)
    assert rig.memory is not None
    mend(rig, replace(rig.memory, refused=()))
    rig.run(20.0)
    assert rig.life_cycles() == {
        "a-0": "active",
        "a-1": "sleeping",
        "b-0": "sleeping",
        "b-1": "active",
        "r-2": "active",
    }
    rig.apply(2, OVERLAY, MOVED)
    assert rig.until_settled()
    assert rig.life_cycles()["b-0"] == "active"


# A bad operation


def moving() -> tuple[Rig, str]:
    """In the middle of a transition: a-0 drains."""
    rig = running()
    rig.send("a", 60.0)
    operation = rig.apply(2, OVERLAY, MOVED, drain_s=60.0)
    assert operation is not None
    rig.run(2.0)
    assert rig.life_cycles()["a-0"] == "draining"
    return rig, operation.operation_id


@pytest.mark.parametrize(
    "known",
    [
        {"subject": "p", "subject_certain": True},
        {"subject": "p", "subject_certain": False},
        {"subject": "x", "subject_certain": False},
        {},
    ],
)
def test_a_bad_operation_holds_its_subject_however_that_is_known(known: dict[str, Any]) -> None:
    rig, operation_id = moving()
    refuse(rig, bad(RefusedKind.OPERATION, operation_id, **known))
    rig.run(100.0)
    assert rig.life_cycles()["a-0"] == "draining", "neither given back nor put to sleep"
    assert rig.life_cycles()["b-0"] == "sleeping"
    assert operations_of(rig, "p") == []
    refusal(lambda: rig.apply(3, OVERLAY, AWAKE))
    assert "cannot be read" in refusal(lambda: rig.cancel(operation_id))
    assert place(rig, "other", 3).accepted, "other subjects go on"


def test_a_bad_operation_of_which_nothing_is_known_holds_every_subject() -> None:
    rig = running()
    refuse(rig, bad(RefusedKind.OPERATION, "o-77"))
    rig.reboot("r-2")
    rig.run(30.0)
    assert operations_of(rig, "p", "g") == []
    refusal(lambda: rig.apply(2, OVERLAY, MOVED))
    assert "o-77 is no record" in refusal(lambda: place(rig, "other", 3))


def test_an_operation_that_is_restored_goes_on() -> None:
    rig, operation_id = moving()
    operation = rig.stored.operations[operation_id]
    refuse(rig, bad(RefusedKind.OPERATION, operation_id, subject="p", subject_certain=True))
    rig.run(5.0)
    assert rig.memory is not None
    mend(rig, replace(rig.memory, operations={**rig.memory.operations, operation_id: operation}, refused=()))
    assert rig.until_settled()
    assert rig.operation(operation_id).state in (OperationState.SUCCEEDED, OperationState.ROLLED_BACK)
    assert rig.broken == []


def test_an_operation_that_is_removed_leaves_awake_what_is_and_the_next_state_goes_on_from_there() -> None:
    rig, operation_id = moving()
    refuse(rig, bad(RefusedKind.OPERATION, operation_id, subject="p", subject_certain=True))
    rig.run(5.0)
    assert rig.memory is not None
    mend(rig, replace(rig.memory, refused=()))
    assert rig.until_settled()
    assert rig.memory.pools["p"].effective_awake == ("b-1",)
    assert rig.life_cycles()["b-1"] == "active"
    rig.apply(3, OVERLAY, AWAKE)
    assert rig.until_settled()
    assert {name: rig.life_cycles()[name] for name in ("a-0", "b-0")} == {"a-0": "active", "b-0": "sleeping"}
    assert rig.broken == []


def test_an_operation_that_is_removed_while_no_actuator_runs_is_the_same() -> None:
    rig, operation_id = moving()
    rig.crash()
    left = {name: item for name, item in rig.stored.operations.items() if name != operation_id}
    rig.stored = replace(rig.stored, operations=left)
    rig.restart()
    assert rig.memory is not None
    assert rig.memory.pools["p"].effective_awake == ("b-1",)
    assert rig.until_settled()
    assert rig.broken == []


def test_without_the_store_what_is_held_stays_as_it_is() -> None:
    rig, operation_id = moving()
    refuse(rig, bad(RefusedKind.OPERATION, operation_id, subject="p", subject_certain=True))
    rig.run(2.0)
    assert rig.memory is not None
    result = fail_static(rig.memory, rig.world(), now_s=rig.now_s, limits=LIMITS)
    assert result.state.replicas["a-0"].life_cycle is LifeCycle.DRAINING


def test_a_creation_under_way_keeps_its_gpus_while_its_operation_cannot_be_read() -> None:
    rig = running()
    assert place(rig, "g", 3).accepted
    assert rig.memory is not None
    [operation_id] = operations_of(rig, "g")
    # The backend was never asked, and lists no such server.
    refuse(rig, bad(RefusedKind.OPERATION, operation_id))
    rig.servers.pop("r-3", None)
    rig.run(120.0)
    assert rig.life_cycles()["r-3"] == "starting"
    assert "r-3 exists already" in place(rig, "other", 3).detail
    assert "the group is held" in place(rig, "g").detail
