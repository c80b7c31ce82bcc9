"""Releases and wakes of a pool on virtual time: what is done in which order, and what happens when it goes wrong."""

from dataclasses import replace
from itertools import pairwise

import pytest

from actuator.core import holds
from actuator.core.fencing import Refused
from actuator.core.gpu_occupancy import awake_gpus
from actuator.core.model import Floor, OperationKind, OperationState, State
from actuator.core.steps import drained
from actuator.core.tick import due_s
from actuator.core.transaction import Transaction
from tests.unit.actuator.actuator_fleet_model import Server, changed
from tests.unit.actuator.actuator_rig import LIMITS, Request, Rig, spec
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role

OVERLAY = [spec("a-0", 0), spec("a-1", 1), spec("b-0", 0), spec("b-1", 1)]
WITH_TWO_GPU_MODEL = [*OVERLAY, spec("big-0", 0, 1)]


def up(overlay: list = OVERLAY, awake: tuple = ("a-0", "a-1"), **fields) -> Rig:
    rig = Rig()
    operation = rig.apply(1, overlay, list(awake), **fields)
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    return rig


def test_bring_up_lets_every_replica_sleep_once_and_shows_the_awake_set() -> None:
    rig = up(WITH_TWO_GPU_MODEL)
    assert rig.life_cycles() == {
        "a-0": "active",
        "a-1": "active",
        "b-0": "sleeping",
        "b-1": "sleeping",
        "big-0": "sleeping",
    }
    assert all(server.slept_before for server in rig.servers.values()), "no rescue waits for a slow first sleep"
    assert all(replica.slept_once for replica in rig.memory.replicas.values())
    assert rig.broken == []


def test_bring_up_works_on_several_gpus_at_once() -> None:
    wide = Rig(gpus=4)
    wide.apply(1, [spec(f"a-{i}", i) for i in range(4)], [f"a-{i}" for i in range(4)])
    assert wide.until_settled()
    narrow = Rig(gpus=4)
    narrow.apply(1, [spec("a-0", 0)], ["a-0"])
    assert narrow.until_settled()
    assert wide.now_s == narrow.now_s


def test_a_transition_swaps_one_gpu() -> None:
    rig = up()
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    assert operation.kind is OperationKind.TRANSITION
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}
    assert rig.broken == []


def test_a_two_gpu_wake_waits_for_both_occupants() -> None:
    rig = up(WITH_TWO_GPU_MODEL)
    rig.send("a", 4.0)
    rig.apply(2, WITH_TWO_GPU_MODEL, ["big-0"])
    rig.run(3.0)
    assert rig.life_cycles()["big-0"] == "sleeping"
    assert rig.until_settled()
    assert rig.life_cycles() == {
        "a-0": "sleeping",
        "a-1": "sleeping",
        "b-0": "sleeping",
        "b-1": "sleeping",
        "big-0": "active",
    }
    assert rig.broken == []


def test_a_long_generation_is_waited_for_and_gets_no_company() -> None:
    """Case 21: hidden, no new traffic, waits for it."""
    rig = up()
    assert rig.send("a", 4.0)
    busy = next(name for name, server in rig.servers.items() if server.requests)
    rig.apply(2, OVERLAY, [name for name in ("a-0", "a-1") if name != busy] + [busy.replace("a", "b")])
    rig.run(3.0)
    assert rig.life_cycles()[busy] == "draining"
    assert rig.send("a", 1.0)
    assert len(rig.servers[busy].requests) == 1
    assert rig.until_settled()
    assert rig.life_cycles()[busy] == "sleeping"
    assert rig.broken == []


def test_a_pinned_request_makes_the_release_give_up_and_restore() -> None:
    rig = up(awake=("a-0", "b-1"))
    assert rig.send("a", 120.0, pinned=True)
    operation = rig.apply(2, OVERLAY, ["b-0", "b-1"])
    assert rig.until_settled()
    ended = rig.operation(operation.operation_id)
    assert ended.state is OperationState.ROLLED_BACK
    assert "given up" in ended.detail
    assert rig.life_cycles()["a-0"] == "active"
    assert rig.memory.replicas["a-0"].routable
    assert rig.servers["a-0"].requests


def test_at_the_drain_deadline_gateways_are_told_to_reissue() -> None:
    rig = up(awake=("a-0", "b-1"))
    assert rig.send("a", 120.0)
    operation = rig.apply(2, OVERLAY, ["b-0", "b-1"])
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.broken == []


def test_the_next_moment_is_the_end_of_a_drain_and_then_none() -> None:
    rig = up(awake=("a-0", "b-1"))
    assert due_s(rig.memory, rig.now_s) is None
    assert rig.send("a", 120.0)
    rig.apply(2, OVERLAY, ["b-0", "b-1"])
    rig.run(0.5)
    operation = next(item for item in rig.memory.operations.values() if not item.finished)
    deadline_s = next(step.drain_deadline_s for step in operation.steps if step.replica == "a-0")
    assert due_s(rig.memory, rig.now_s) == deadline_s > rig.now_s
    assert due_s(rig.memory, deadline_s) is None, "it has come"
    assert rig.until_settled()
    assert due_s(rig.memory, rig.now_s) is None


def test_nothing_sleeps_before_every_leased_gateway_has_acknowledged() -> None:
    rig = up()
    rig.gateway.lag = 1000
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(4.0)
    step = next(s for o in rig.memory.operations.values() if not o.finished for s in o.steps if s.replica == "a-0")
    assert step.phase == "hiding: waiting for gateway g"
    assert rig.life_cycles()["a-0"] == "draining"
    rig.gateway.lag = 0
    assert rig.until_settled()
    assert rig.life_cycles()["a-0"] == "sleeping"


def test_a_gateway_whose_lease_is_over_holds_nothing_up() -> None:
    rig = up()
    rig.gateway.up = False
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    assert rig.until_settled(30.0)
    assert rig.life_cycles()["b-0"] == "active"


def test_a_wake_waits_for_measured_memory() -> None:
    """Case 23: memory is free two seconds after /sleep answered."""
    rig = up()
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    waiting = []
    for _ in range(40):
        rig.step()
        operation = next(iter(reversed(rig.memory.operations.values())))
        waiting += [s.phase for s in operation.steps if s.replica == "b-0"]
    assert any("still has" in phase for phase in waiting)
    assert rig.broken == []


def test_a_request_that_only_the_gateway_knows_of_is_in_flight_too() -> None:
    """It is on its way: the server counts nothing yet."""
    rig = up()
    rig.gateway.requests["a-0"] = [Request(rig.now_s + 4.0)]
    rig.apply(2, OVERLAY, ["b-0", "a-1"], drain_s=20.0)
    rig.run(3.0)
    assert rig.life_cycles()["a-0"] == "draining"
    assert rig.servers["a-0"].moving is None
    assert rig.until_settled()
    assert rig.life_cycles()["a-0"] == "sleeping"


def test_a_look_from_before_the_last_acknowledgement_proves_no_idleness() -> None:
    rig = up()
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.step()
    draft = Transaction(rig.memory, rig.world(), LIMITS, rig.now_s)
    step = next(s for o in draft.unfinished() for s in o.steps if s.replica == "a-0")
    early = replace(step, acknowledged_s=rig.now_s)
    late = replace(step, acknowledged_s=rig.now_s - 0.1)
    draft.gateways = {}
    assert drained(draft, early, draft.replicas["a-0"])[1] is False
    assert drained(draft, late, draft.replicas["a-0"])[1] is True


def test_a_release_taken_back_while_it_falls_asleep_is_asleep_before_it_is_shown() -> None:
    rig = up()
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    while rig.servers["a-0"].moving is None:
        rig.step()
    rig.apply(3, OVERLAY, ["a-0", "a-1"])
    was_asleep = False
    while not rig.memory.replicas["a-0"].routable:
        rig.step()
        was_asleep = was_asleep or rig.servers["a-0"].asleep
    assert was_asleep, "the server would have slept under its requests"
    assert rig.until_settled()
    assert rig.operation(first.operation_id).state is OperationState.CANCELLED
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}


def test_after_a_restart_a_known_gateway_has_to_speak_or_stay_silent_for_long() -> None:
    rig = up()
    rig.gateway.lag = 1000
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(1.5)
    rig.crash()
    rig.gateway.up = False
    rig.restart()
    rig.run(LIMITS.gateway_grace_s - 1.0)
    assert rig.life_cycles()["a-0"] == "draining", "it may still route by what it was told before the restart"
    assert rig.until_settled()
    assert rig.life_cycles()["a-0"] == "sleeping"


def test_a_sleeper_that_somebody_woke_is_put_back_to_sleep() -> None:
    rig = up()
    rig.servers["b-0"].asleep = False
    rig.run(1.0)
    assert rig.until_settled()
    assert rig.servers["b-0"].asleep
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}


def test_after_a_power_cut_nobody_is_shown_beside_an_awake_neighbour() -> None:
    rig = up()
    for name in sorted(rig.servers):
        rig.reboot(name)
    rig.step()
    while not rig.memory.replicas["a-0"].routable:
        rig.step()
        assert rig.servers["b-0"].asleep or not rig.memory.replicas["a-0"].routable
    assert rig.until_settled()
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}


def test_a_refused_wake_brings_the_donor_back() -> None:
    """Case 23: on failure A comes back."""
    rig = up()
    rig.servers["b-0"].wake_refused = True
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    assert rig.until_settled()
    ended = rig.operation(operation.operation_id)
    assert ended.state is OperationState.ROLLED_BACK
    assert "b-0 could not be woken" in ended.detail
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}
    assert rig.memory.pools["p"].effective_awake == ("a-0", "a-1")
    rig.run(30.0)
    assert rig.life_cycles()["a-0"] == "active", "a rolled back transition is not tried again by itself"


def test_a_server_without_a_token_is_not_shown() -> None:
    """Case 22: verified by a real token after the wake."""
    rig = up()
    rig.servers["b-0"].no_token = True
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    shown = set()
    for _ in range(200):
        rig.step()
        shown.update(name for name, replica in rig.memory.replicas.items() if replica.routable)
    assert "b-0" not in shown
    assert rig.operation(operation.operation_id).state is OperationState.ROLLED_BACK
    assert rig.life_cycles()["a-0"] == "active"


def test_a_release_waits_while_it_would_break_the_floor() -> None:
    floors = (Floor(service="a", role=Role.COLOCATED, min_replicas=1),)
    rig = up(awake=("a-0", "b-1"), floors=floors)
    rig.apply(2, OVERLAY, ["b-0", "a-1"], floors=floors)
    least = 9
    while any(not operation.finished for operation in rig.memory.operations.values()):
        rig.step()
        least = min(least, sum(r.routable for r in rig.memory.replicas.values() if r.spec.service == "a"))
    assert least == 1, "b-1 sleeps, a-1 wakes, and only then a-0 goes and b-0 wakes"
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}
    assert rig.broken == []


def test_a_floor_broken_during_the_drain_restores_the_donor() -> None:
    floors = (Floor(service="a", role=Role.COLOCATED, min_replicas=1),)
    rig = up(floors=floors)
    assert rig.send("a", 4.0)
    busy = next(name for name, server in rig.servers.items() if server.requests)
    other = "a-1" if busy == "a-0" else "a-0"
    rig.apply(2, OVERLAY, [other, busy.replace("a", "b")], floors=floors)
    rig.run(2.0)
    assert rig.life_cycles()[busy] == "draining"
    rig.servers[other].exited = True
    rig.run(1.5)
    assert rig.life_cycles()[busy] == "active"
    assert rig.memory.replicas[busy].routable


def test_an_operators_hold_survives_release_and_wake() -> None:
    """Holds: an owner lifts only its own."""
    rig = up()
    held = holds.put(rig.memory.replicas["b-0"], HoldOwner.OPERATOR, reason="benchmark", now_s=rig.now_s)
    rig.memory = replace(rig.memory, replicas={**rig.memory.replicas, "b-0": held})
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    assert rig.until_settled()
    replica = rig.memory.replicas["b-0"]
    assert (replica.life_cycle, replica.routable) == (LifeCycle.ACTIVE, False)
    assert [hold.owner for hold in replica.holds] == [HoldOwner.OPERATOR]


def test_a_newer_state_that_contradicts_takes_the_older_back_first() -> None:
    rig = up()
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(1.5)
    second = rig.apply(3, OVERLAY, ["a-0", "b-1"])
    assert second.waits_for == (first.operation_id,)
    assert rig.until_settled()
    assert rig.operation(first.operation_id).state is OperationState.CANCELLED
    assert rig.operation(second.operation_id).state is OperationState.SUCCEEDED
    assert rig.life_cycles() == {"a-0": "active", "a-1": "sleeping", "b-0": "sleeping", "b-1": "active"}
    assert rig.broken == []


def test_a_newer_state_that_agrees_lets_the_older_finish() -> None:
    rig = up()
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(1.5)
    second = rig.apply(3, OVERLAY, ["b-0", "b-1"])
    assert second.waits_for == ()
    assert {step.replica for step in second.steps} == {"a-1", "b-1"}
    assert rig.until_settled()
    assert rig.operation(first.operation_id).state is OperationState.SUCCEEDED
    assert rig.operation(second.operation_id).state is OperationState.SUCCEEDED


@pytest.mark.parametrize("after_s", [0.5 * n for n in range(1, 24)])
def test_a_kill_at_any_moment_of_a_transition_ends_in_the_same_state(after_s: float) -> None:
    rig = up()
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(after_s)
    rig.crash()
    rig.run(4.0)
    rig.restart()
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    transitions = [o for o in rig.memory.operations.values() if o.kind is OperationKind.TRANSITION]
    assert len(transitions) == 1, "no double transition"
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}
    assert rig.broken == []


def test_a_restart_of_the_actuator_changes_nothing_by_itself() -> None:
    """Case 17 and invariant 9."""
    rig = up()
    before = rig.life_cycles()
    operations = set(rig.memory.operations)
    rig.crash()
    rig.run(3.0)
    rig.restart()
    rig.run(30.0)
    assert rig.life_cycles() == before
    assert set(rig.memory.operations) == operations
    assert rig.revisions == sorted(rig.revisions), "the endpoint revision never falls"


def test_without_the_store_what_was_hidden_comes_back_and_nothing_sleeps() -> None:
    rig = up()
    rig.send("a", 6.0)
    rig.send("a", 6.0)
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(1.5)
    assert rig.life_cycles()["a-0"] == "draining"
    rig.store_away = True
    rig.run(1.0)
    assert rig.memory.replicas["a-0"].routable
    rig.run(30.0)
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}
    rig.store_away = False
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.ROLLED_BACK
    assert "the store is away" in rig.operation(operation.operation_id).detail


def test_what_was_about_to_be_shown_again_is_shown_without_the_store_too() -> None:
    rig = up()
    rig.send("a", 30.0)
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"], drain_s=20.0)
    rig.run(2.0)
    assert rig.life_cycles()["a-0"] == "draining"
    rig.cancel(operation.operation_id)
    rig.store_away = True
    rig.step()
    assert rig.memory.replicas["a-0"].routable
    rig.store_away = False
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.CANCELLED


def test_a_server_that_restarts_awake_is_put_to_sleep_before_anything_else() -> None:
    rig = up()
    rig.reboot("b-0")
    rig.run(1.0)
    assert rig.until_settled()
    rig.run(10.0)
    assert rig.until_settled()
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}
    assert rig.servers["b-0"].asleep


def after_fleet_restart(overlay: list, awake: tuple) -> Rig:
    """The awake set has the memory again; whoever did not get it before waits for it."""
    rig = up(overlay, awake)
    for name in sorted(rig.servers):
        if name not in awake:
            rig.restart_server(name)
    rig.run(90.0)
    assert all(rig.memory.replicas[name].routable for name in awake)
    return rig


def test_after_a_fleet_restart_the_awake_set_serves_whoever_was_up_first() -> None:
    rig = up(WITH_TWO_GPU_MODEL, ("b-0", "b-1"))
    rig.restart_fleet()
    rig.run(60.0)
    assert rig.until_settled()
    states = rig.life_cycles()
    assert (states["b-0"], states["b-1"]) == ("active", "active")
    assert {states["a-0"], states["a-1"], states["big-0"]} <= {"sleeping", "starting"}
    assert rig.broken == []


def test_a_waiting_server_is_started_by_a_transition_that_makes_room() -> None:
    rig = after_fleet_restart(OVERLAY, ("a-0", "a-1"))
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "starting", "b-1": "starting"}
    assert awake_gpus(rig.memory.replicas.values(), rig.world()) == {("n0", 0): ["a-0"], ("n0", 1): ["a-1"]}
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    assert operation.kind is OperationKind.TRANSITION
    assert operation.deadline_s - rig.now_s > LIMITS.starting_s + LIMITS.sleeping_s
    rig.run(30.0)
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "starting"}
    assert rig.broken == []


def test_a_wake_waits_until_the_server_that_got_the_memory_first_sleeps() -> None:
    rig = up([*OVERLAY, spec("c-0", 0)])
    rig.restart_server("b-0")
    rig.run(90.0)
    assert rig.life_cycles()["b-0"] == "starting"
    operation = rig.apply(2, [*OVERLAY, spec("c-0", 0)], ["c-0", "a-1"])
    rig.run(40.0)
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.life_cycles()["b-0"] == "sleeping", "it came up in between and was put to sleep"
    assert rig.life_cycles()["c-0"] == "active"
    assert rig.broken == []


def test_a_server_that_waits_for_another_gpu_too_keeps_nobody_waiting() -> None:
    rig = up(WITH_TWO_GPU_MODEL)
    rig.restart_server("big-0")
    rig.run(90.0)
    operation = rig.apply(2, WITH_TWO_GPU_MODEL, ["b-0", "a-1"])
    rig.run(30.0)
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.life_cycles()["big-0"] == "starting", "a-1 has half of its memory"
    assert rig.broken == []


def test_a_two_gpu_server_that_waits_is_started_when_both_occupants_go() -> None:
    rig = after_fleet_restart(WITH_TWO_GPU_MODEL, ("a-0", "a-1"))
    operation = rig.apply(2, WITH_TWO_GPU_MODEL, ["big-0"])
    rig.run(60.0)
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.memory.replicas["big-0"].routable
    assert rig.broken == []


def test_a_dead_server_is_withdrawn_at_once_and_shown_again_after_a_token() -> None:
    rig = up()
    rig.reboot("a-0")
    rig.step()
    assert not rig.memory.replicas["a-0"].routable
    rig.run(2.0)
    assert not rig.memory.replicas["a-0"].routable
    rig.run(10.0)
    assert rig.memory.replicas["a-0"].routable


def test_a_server_found_asleep_is_woken() -> None:
    rig = up()
    rig.servers["a-0"].asleep = True
    rig.step()
    assert not rig.memory.replicas["a-0"].routable
    rig.run(10.0)
    assert rig.memory.replicas["a-0"].routable


def test_a_paused_server_is_withdrawn_and_neither_asleep_nor_woken() -> None:
    rig = up()
    rig.servers["a-0"].paused = True
    rig.run(10.0)
    assert rig.life_cycles()["a-0"] == "unknown"
    assert rig.memory.replicas["a-0"].detail == "paused by another hand"
    rig.servers["a-0"].paused = False
    rig.run(10.0)
    assert rig.memory.replicas["a-0"].routable


def test_a_correction_that_keeps_failing_comes_ever_later() -> None:
    rig = up()
    rig.servers["a-0"].no_token = True
    rig.servers["a-0"].silent = True
    rig.run(3.0)
    rig.servers["a-0"].silent = False
    before = set(rig.memory.operations)
    rig.run(120.0)
    tries = sorted((o for name, o in rig.memory.operations.items() if name not in before), key=lambda o: o.create_s)
    gaps = [later.create_s - earlier.update_s for earlier, later in pairwise(tries)]
    assert len(tries) >= 4
    assert gaps == sorted(gaps)
    assert gaps[-1] > 10.0
    assert not rig.memory.replicas["a-0"].routable


def test_a_replica_whose_process_has_ended_is_made_again() -> None:
    rig = up()
    rig.servers["a-0"].exited = True
    rig.run(1.0)
    assert rig.life_cycles()["a-0"] == "failed"
    rig.run(40.0)
    assert rig.life_cycles()["a-0"] == "active"


def test_a_deleted_sleeper_is_made_again_only_when_its_gpu_is_free() -> None:
    rig = up()
    del rig.servers["b-0"]
    rig.run(20.0)
    assert "b-0" not in rig.servers, "a-0 serves on that GPU, and a new server would come up awake"
    assert rig.life_cycles()["a-0"] == "active"
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(60.0)
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}
    assert rig.broken == []


def test_a_creation_that_is_asked_for_again_looks_at_its_neighbours_again() -> None:
    rig = Rig()
    rig.apply(1, [spec("a-0", 0), spec("b-0", 0)], ["a-0"])
    assert rig.until_settled()
    del rig.servers["b-0"]
    rig.run(5.0)
    rig.apply(2, [spec("a-0", 0), spec("b-0", 0)], ["b-0"])
    rig.fleet.backend_errors = ["500"]
    while rig.memory.replicas.get("b-0") is None:
        rig.step()
    rig.fleet.wake_by_hand("a-0")
    rig.run(10.0)
    assert "b-0" not in rig.servers or rig.servers["a-0"].asleep
    assert rig.until_settled()
    assert rig.memory.replicas["b-0"].routable
    assert rig.broken == []


def test_a_server_that_cannot_come_up_does_not_keep_a_dead_one_dead() -> None:
    rig = up(WITH_TWO_GPU_MODEL, ("a-0", "b-1"))
    rig.restart_server("big-0")
    rig.run(2.0)
    rig.servers["b-1"].exited = True
    rig.run(60.0)
    assert rig.life_cycles()["big-0"] == "starting", "a-0 has half of its memory"
    assert rig.memory.replicas["b-1"].routable
    assert rig.broken == []


def test_a_donor_that_is_gone_keeps_nobody_waiting() -> None:
    rig = up(awake=("b-0", "a-1"))
    del rig.servers["b-0"]
    rig.memory = replace(rig.memory, replicas={n: r for n, r in rig.memory.replicas.items() if n != "b-0"})
    operation = rig.apply(2, OVERLAY, ["a-0", "a-1"])
    rig.run(10.0)
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.memory.replicas["a-0"].routable
    assert "b-0" not in rig.servers, "it is made again when it can sleep there"


def test_a_lost_store_changes_no_replica() -> None:
    rig = up()
    before = rig.life_cycles()
    rig.crash()
    rig.stored = State()
    rig.restart()
    rig.step()
    assert rig.life_cycles() == before, "adopted as they are, from the servers and their labels"
    assert rig.apply(7, OVERLAY, ["a-0", "a-1"]) is None, "nothing has to change"
    assert rig.revisions == sorted(rig.revisions)


def test_a_state_that_rests_on_a_revision_nobody_was_shown_is_refused() -> None:
    rig = up()
    seen = rig.memory.meta.replica_revision
    assert rig.apply(2, OVERLAY, ["b-0", "a-1"], replica_revision=seen) is not None
    with pytest.raises(Refused) as caught:
        rig.apply(3, OVERLAY, ["a-0", "a-1"], replica_revision=rig.memory.meta.replica_revision + 1)
    assert caught.value.reason == "UNKNOWN_REVISION"


REFUSED = {
    "GPU_TWICE": (["a-0", "b-0"], {}),
    "INVALID_POOL": (["nobody-0"], {}),
    "BELOW_FLOOR": (["b-0"], {"floors": (Floor(service="a", role=Role.COLOCATED, min_replicas=1),)}),
    "FENCED_OFF": (["a-0"], {"token": 4}),
}


@pytest.mark.parametrize("reason", sorted(REFUSED))
def test_a_state_that_breaks_a_rule_is_refused(reason: str) -> None:
    rig = up(token=5)
    awake, fields = REFUSED[reason]
    with pytest.raises(Refused) as caught:
        rig.apply(2, OVERLAY, awake, **({"token": 5} | fields))
    assert caught.value.reason == reason


def test_a_state_over_the_budget_is_refused() -> None:
    rig = Rig(gpus=1)
    with pytest.raises(Refused) as caught:
        rig.apply(1, [spec("a-0", 0), spec("a-1", 0)], ["a-0", "a-1"])
    assert caught.value.reason == "GPU_TWICE"
    rig.fleet.gpus = 2
    rig.world()
    request_over = [spec("a-0", 0), spec("a-1", 1)]
    rig.fleet.gpus = 1
    with pytest.raises(Refused) as caught:
        rig.apply(1, request_over, ["a-0", "a-1"])
    assert caught.value.reason in ("OVER_BUDGET", "UNKNOWN_GPU")


def test_an_old_revision_is_refused_and_the_same_one_is_the_same_answer() -> None:
    rig = up()
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    again = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    assert again.operation_id == first.operation_id
    with pytest.raises(Refused) as caught:
        rig.apply(1, OVERLAY, ["a-0", "a-1"])
    assert (caught.value.reason, caught.value.detail) == ("OUTDATED", {"state_revision": "2"})
    with pytest.raises(Refused) as caught:
        rig.apply(2, OVERLAY, ["a-0", "a-1"])
    assert caught.value.reason == "REVISION_REUSED"


def test_a_store_outage_while_a_dead_server_is_deleted_does_not_strand_its_successor() -> None:
    rig = up()
    rig.servers["a-1"].exited = True
    while rig.life_cycles().get("a-1") != "terminating":
        rig.step()
    rig.store_away = True
    rig.run(2.0)
    rig.store_away = False
    rig.run(15.0)
    assert rig.life_cycles()["a-1"] == "active"


def test_a_correction_does_not_show_what_the_newest_state_puts_to_sleep() -> None:
    rig = up()
    rig.reboot("a-0")
    rig.run(1.0)
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    shown = False
    for _ in range(60):
        rig.step()
        shown = shown or rig.memory.replicas["a-0"].routable
    assert not shown
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}


STARTED_ANEW = {
    "another of its role serves": (("a-0", "a-1"), (), True),
    "nobody else of its role serves": (("a-0", "b-1"), (), False),
    "too few would serve": (("a-0", "a-1"), (Floor(service="a", role=Role.COLOCATED, min_replicas=2),), False),
}


@pytest.mark.parametrize("how", ["ended", "restarted"])
@pytest.mark.parametrize("case", sorted(STARTED_ANEW))
def test_a_server_that_was_started_anew_sleeps_once_before_it_is_needed(case: str, how: str) -> None:
    """Its slow first sleep falls into nobody's rescue, unless it is itself wanted at once."""
    awake, floors, sleeps_first = STARTED_ANEW[case]
    rig = up(awake=awake, floors=floors)
    if how == "ended":
        rig.servers["a-0"].exited = True
    else:
        rig.reboot("a-0")
    rig.run(1.0)
    assert not rig.memory.replicas["a-0"].routable
    rig.run(40.0)
    replica = rig.memory.replicas["a-0"]
    assert (replica.routable, replica.slept_once) == (True, sleeps_first)
    assert rig.servers["a-0"].slept_before is sleeps_first
    assert rig.broken == []


def test_a_server_that_cannot_sleep_ahead_of_need_is_shown_all_the_same() -> None:
    rig = up()
    rig.reboot("a-0")
    rig.servers["a-0"].sleep_refused = True
    rig.run(20.0)
    replica = rig.memory.replicas["a-0"]
    assert (replica.routable, replica.slept_once) == (True, False)


def test_a_rescue_does_not_wait_for_a_first_sleep_of_its_own_receiver() -> None:
    rig = up(awake=("a-0", "b-1"))
    rig.reboot("a-1")
    rig.servers["a-1"].silent = True
    rig.step()
    rig.apply(2, OVERLAY, ["a-0", "a-1"])
    rig.servers["a-1"].silent = False
    assert rig.until_settled()
    assert rig.memory.replicas["a-1"].routable
    assert not rig.servers["a-1"].slept_before


def draining(rig: Rig, **fields) -> str:
    """a-0 or a-1 is hidden for b-0 or b-1, and has a request that goes on; the operation's id."""
    assert rig.send("a", 60.0)
    busy = next(name for name, server in rig.servers.items() if server.requests)
    other = {"a-0": "a-1", "a-1": "a-0"}[busy]
    operation = rig.apply(2, OVERLAY, [other, busy.replace("a", "b")], drain_s=20.0, **fields)
    rig.run(2.0)
    assert rig.life_cycles()[busy] == "draining"
    return operation.operation_id


GUARDS = {
    "the queue of those that stay grows": ({"waiting": 9}, "the queue of the 1 that stay grew from 0 to 9"),
    "the queue grows a little": ({"waiting": 8}, ""),
    "the KV cache is full": ({"kv_usage": 0.99}, "uses 99% of its KV cache"),
    "the KV cache is well used": ({"kv_usage": 0.9}, ""),
    "nothing can be read": ({"waiting": None, "kv_usage": None}, ""),
    "one that was to stay is silent": ({"silent": True}, "a-1, which was to stay, was lost"),
    "one that was to stay dies": ({"exited": True}, "a-1, which was to stay, was lost"),
}


@pytest.mark.parametrize("case", sorted(GUARDS))
def test_a_release_is_taken_back_when_the_donor_suffers(case: str) -> None:
    rig = up()
    operation_id = draining(rig)
    fields, words = GUARDS[case]
    for name, value in fields.items():
        setattr(rig.servers["a-1"], name, value)
    rig.run(4.0)
    operation = rig.operation(operation_id)
    if words:
        assert operation.state is OperationState.ROLLED_BACK
        assert words in operation.detail
        assert rig.memory.replicas["a-0"].routable
    else:
        assert not operation.finished
        assert rig.life_cycles()["a-0"] == "draining"


def test_requests_that_were_reissued_do_not_take_the_release_back() -> None:
    rig = up()
    assert rig.send("a", 60.0, pinned=True)
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"], drain_s=1.0)
    rig.run(3.0)
    assert rig.memory.replicas["a-0"].evicting
    rig.servers["a-1"].waiting = 50
    rig.run(3.0)
    assert not rig.operation(operation.operation_id).finished


def test_a_gateway_that_does_not_confirm_blocks_the_sleep_and_not_the_fleet() -> None:
    rig = Rig(gpus=3, gateways=("g", "h"))
    overlay = [*OVERLAY, spec("a-2", 2), spec("b-2", 2)]
    rig.apply(1, overlay, ["a-0", "a-1", "a-2"])
    assert rig.until_settled()
    rig.gateways["h"].lag = 1000
    first = rig.apply(2, overlay, ["b-0", "a-1", "a-2"])
    rig.run(LIMITS.acknowledge_s - 2.0)
    assert rig.life_cycles()["a-0"] == "draining"
    assert not rig.servers["a-0"].asleep
    assert rig.send("a", 1.0), "the others serve"
    rig.run(4.0)
    ended = rig.operation(first.operation_id)
    assert ended.state is OperationState.ROLLED_BACK
    assert ended.detail == "rolled back: a-0 given up: gateway h did not confirm for 10 s that it is hidden"
    assert rig.memory.replicas["a-0"].routable, "nobody is left hidden"
    rig.gateways["h"].lag = 0
    rig.run(1.0)
    rig.apply(3, overlay, ["a-0", "b-1", "a-2"])
    assert rig.until_settled()
    assert rig.life_cycles()["b-1"] == "active"
    assert rig.broken == []


def test_after_a_restart_a_gateway_has_its_time_again_to_confirm() -> None:
    rig = up(awake=("a-0", "b-1"))
    rig.send("a", 60.0, pinned=True)
    rig.apply(2, OVERLAY, ["b-0", "b-1"], drain_s=30.0)
    rig.run(20.0)
    rig.crash()
    rig.restart()
    rig.step()
    assert rig.life_cycles()["a-0"] == "draining", "it had confirmed, and is only asked again"
    rig.run(3.0)
    assert rig.life_cycles()["a-0"] == "draining"


def test_a_pinned_request_holds_a_rescue_up_for_a_short_while_only() -> None:
    """Somebody waits for the GPU: the donor is given up, and another can be looked for."""
    rig = up(awake=("a-0", "b-1"))
    rig.send("a", 300.0, pinned=True)
    operation = rig.apply(2, OVERLAY, ["b-0", "b-1"], drain_s=2.0)
    begin_s = rig.now_s
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.ROLLED_BACK
    assert rig.operation(operation.operation_id).update_s - begin_s <= 2.0 + LIMITS.release_wait_s + 2.0


def test_a_server_that_sleeps_without_its_weights_is_woken_as_such() -> None:
    rig = Rig()
    rig.apply(1, OVERLAY, ["a-0", "a-1"], sleep_level=2)
    assert rig.until_settled()
    assert rig.servers["b-0"].level == 2
    rig.apply(2, OVERLAY, ["b-0", "a-1"], sleep_level=2)
    assert rig.until_settled()
    assert rig.memory.replicas["b-0"].routable
    assert rig.servers["b-0"].has_weights
    assert rig.broken == []


def test_a_server_that_somebody_woke_without_its_weights_is_not_shown_before_it_has_them() -> None:
    rig = Rig()
    rig.apply(1, OVERLAY, ["a-0", "a-1"], sleep_level=2)
    assert rig.until_settled()
    rig.apply(2, OVERLAY, ["b-0", "a-1"], sleep_level=2)
    while rig.life_cycles()["b-0"] != "reactivating":
        rig.step()
    # The wake is done, and nobody hears of it: the actuator dies, and a hand resumes the server meanwhile.
    rig.crash()
    rig.run(1.0)
    rig.fleet.wake_by_hand("b-0")
    rig.servers["b-0"].has_weights = False
    rig.restart()
    assert rig.until_settled()
    assert rig.memory.replicas["b-0"].routable
    assert rig.servers["b-0"].has_weights


def test_a_floor_that_changes_during_a_transition_neither_ends_nor_repeats_it() -> None:
    rig = up()
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"], decision_id="d")
    rig.run(0.3)
    again = rig.apply(
        3, OVERLAY, ["b-0", "a-1"], decision_id="d", floors=(Floor(service="a", role=Role.COLOCATED, min_replicas=1),)
    )
    assert again.operation_id == first.operation_id, "whoever asks hears that it is still under way"
    assert not again.finished
    repeated = rig.apply(
        3, OVERLAY, ["b-0", "a-1"], decision_id="d", floors=(Floor(service="a", role=Role.COLOCATED, min_replicas=1),)
    )
    assert repeated.operation_id == first.operation_id
    assert rig.until_settled()
    assert rig.operation(first.operation_id).state is OperationState.SUCCEEDED
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}
    pool = rig.memory.pools["p"]
    assert (pool.settled_revision, pool.effective_awake) == (3, ("a-1", "b-0"))
    assert pool.floors
    assert rig.broken == []


@pytest.mark.parametrize("waited_s", [1.0, 600.0])
def test_a_floor_that_changes_while_or_after_a_transition_is_rolled_back_does_not_begin_it_anew(
    waited_s: float,
) -> None:
    rig = up()
    rig.servers["b-0"].wake_refused = True
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"], decision_id="d")
    while rig.operation(first.operation_id).state is not OperationState.ROLLING_BACK:
        rig.step()
    rig.run(waited_s)
    again = rig.apply(
        3, OVERLAY, ["b-0", "a-1"], decision_id="d", floors=(Floor(service="a", role=Role.COLOCATED, min_replicas=1),)
    )
    assert again.operation_id == first.operation_id
    assert rig.until_settled()
    assert rig.operation(first.operation_id).state is OperationState.ROLLED_BACK
    transitions = [one for one in rig.memory.operations.values() if one.kind is OperationKind.TRANSITION]
    assert [one.operation_id for one in transitions] == [first.operation_id]
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}
    assert rig.memory.pools["p"].settled_revision == 3


def test_a_donor_that_dies_and_comes_up_again_during_a_transition_is_put_to_sleep_by_it() -> None:
    """Its memory is what the wake waits for: nobody else may touch it before the transition has ended."""
    rig = up(WITH_TWO_GPU_MODEL)
    rig.send("a", 4.0)
    rig.send("a", 4.0)
    operation = rig.apply(2, WITH_TWO_GPU_MODEL, ["big-0"])
    rig.run(0.5)
    rig.servers["a-0"].exited = True
    while rig.operation(operation.operation_id).steps[0].state is not OperationState.SUCCEEDED:
        rig.step()
    assert rig.operation(operation.operation_id).steps[0].replica == "a-0"
    rig.reboot("a-0")
    began_s = rig.now_s
    assert rig.until_settled()
    ended = rig.operation(operation.operation_id)
    assert ended.state is OperationState.SUCCEEDED
    assert ended.update_s - began_s < 30.0, "not at the deadline of the whole transition"
    assert rig.life_cycles()["big-0"] == "active"
    assert rig.life_cycles()["a-0"] == "sleeping"
    assert rig.broken == []


def test_a_receiver_that_comes_up_anew_during_a_roll_back_gives_its_gpus_back() -> None:
    rig = up()
    rig.servers["b-0"].wake_refused = True
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    while not (
        rig.operation(operation.operation_id).state is OperationState.ROLLING_BACK
        and rig.life_cycles()["b-0"] == "sleeping"
    ):
        rig.step()
    rig.reboot("b-0")
    began_s = rig.now_s
    assert rig.until_settled()
    ended = rig.operation(operation.operation_id)
    assert ended.state is OperationState.ROLLED_BACK
    assert ended.update_s - began_s < 30.0
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}


def test_two_servers_found_awake_on_one_gpu_do_not_keep_a_pool_from_coming_up() -> None:
    """Each was to be shown before there was a pool, and waits for the other; the pool says which of them sleeps."""
    rig = Rig()
    overlay = [spec("a-0", 0), spec("b-0", 0)]
    for item in overlay:
        rig.servers[item.replica] = Server(changed(item, pool=""), rig.now_s, rig.now_s)
    rig.run(3.0)
    assert rig.life_cycles() == {"a-0": "starting", "b-0": "starting"}
    rig.apply(1, overlay, ["a-0"])
    assert rig.until_settled(60.0)
    assert rig.life_cycles() == {"a-0": "active", "b-0": "sleeping"}
    ended = [one for one in rig.memory.operations.values() if one.detail == "taken over by pool p"]
    assert [one.state for one in ended] == [OperationState.CANCELLED] * 2
