"""What long searches of the state machine, and a reading of each step against each fault, have found; one test each.

Every test is named after what went wrong. The rules that they hold stand in ``docs/actuator.md``, step against fault.
"""

from dataclasses import replace

import pytest

from actuator.core.lifecycle import ForbiddenTransition, move
from actuator.core.model import (
    ActionKind,
    Goal,
    Operation,
    OperationKind,
    OperationState,
    Replica,
    State,
    Step,
    StepKind,
    Told,
)
from actuator.core.tick import fail_static, tick
from actuator.core.world import Action, Listed, Outcome, ProbeResult, RunState, World
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import LIMITS, Rig, spec
from trimtab.domain.vocabulary import LifeCycle

OVERLAY = [spec("a-0", 0), spec("a-1", 1), spec("b-0", 0), spec("b-1", 1)]


def up(awake: tuple = ("a-0", "a-1"), overlay: list = OVERLAY, **fields) -> Rig:
    rig = Rig(gateways=("g", "h"))
    rig.apply(1, overlay, list(awake), **fields)
    assert rig.until_settled()
    return rig


def until_asked(rig: Rig, name: str, kind: ActionKind) -> None:
    """Steps until the actuator acts so on the replica."""
    for _ in range(200):
        if name in rig.doing and rig.doing[name].action.kind is kind:
            return
        rig.step()
    raise AssertionError(f"{kind} of {name} was never asked for")


def change(rig: Rig, name: str, **fields) -> None:
    changed = replace(rig.memory.replicas[name], **fields)
    rig.memory = replace(rig.memory, replicas={**rig.memory.replicas, name: changed})


# A sleep that was asked for


def test_a_server_whose_slow_sleep_one_operation_gave_up_is_not_shown_by_the_next() -> None:
    rig = up()
    rig.traffic = ("a", "b")
    rig.servers["a-0"].slow_sleep_s = 200.0
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    while not rig.operation(first.operation_id).finished:
        rig.step()
    assert rig.servers["a-0"].moving is ActionKind.SLEEP, "it is still at it"
    rig.apply(3, OVERLAY, ["a-0", "a-1"])
    rig.run(300.0)
    assert rig.broken == []
    assert rig.memory.replicas["a-0"].routable


def test_a_floor_does_not_bring_back_a_server_that_may_be_falling_asleep() -> None:
    rig = up()
    rig.servers["a-0"].slow_sleep_s = 200.0
    first = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    while not rig.operation(first.operation_id).finished:
        rig.step()
    rig.traffic = ("a", "b")
    rig.servers["a-1"].exited = True
    rig.run(100.0)
    assert rig.broken == []


def test_a_second_call_that_is_refused_does_not_settle_the_first() -> None:
    rig = up()
    rig.servers["a-0"].slow_sleep_s = 8.0
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    until_asked(rig, "a-0", ActionKind.SLEEP)
    rig.lose_outcome("a-0")
    rig.traffic = ("a",)
    rig.servers["a-0"].sleep_refused = True
    rig.run(8.0)
    assert rig.broken == [], "it is still falling asleep"
    rig.servers["a-0"].sleep_refused = False
    rig.run(60.0)
    assert rig.memory.replicas["a-0"].routable, "rolled back: it slept, and was woken"
    assert rig.broken == []


@pytest.mark.parametrize(
    ("repeated", "busy", "later_s", "told"),
    [(False, True, 0.0, False), (True, True, 500.0, True), (True, False, 0.0, True), (True, False, 500.0, False)],
    ids=["the first", "one that may wait for a request", "one that may be under way", "one that timed out long ago"],
)
def test_a_failed_call_settles_only_what_it_knows_of(repeated: bool, busy: bool, later_s: float, told: bool) -> None:
    now_s = 1000.0 + later_s
    replica = Replica(
        **parts(OVERLAY[0]),
        life_cycle=LifeCycle.DRAINING,
        since_s=990.0,
        cause="",
        told_to_sleep=Told(level=1, since_s=1000.0),
    )
    action = Action(kind=ActionKind.SLEEP, replica="a-0", since_s=990.0, repeated=repeated)
    outcome = Outcome(kind=ActionKind.SLEEP, replica="a-0", ok=False, busy=busy, action=action)
    after = tick(State(replicas={"a-0": replica}), World(), [outcome], now_s=now_s, limits=LIMITS).state
    assert (after.replicas["a-0"].told_to_sleep is not None) is told


def test_a_server_that_always_refuses_to_sleep_is_shown_again_in_the_end() -> None:
    rig = up()
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.servers["a-0"].sleep_refused = True
    until_asked(rig, "a-0", ActionKind.SLEEP)
    rig.crash()
    rig.restart()
    rig.run(200.0)
    assert rig.memory.replicas["a-0"].routable
    assert rig.broken == []


def test_nothing_leads_from_told_to_sleep_to_active() -> None:
    told = Replica(
        **parts(OVERLAY[0]),
        life_cycle=LifeCycle.DRAINING,
        since_s=0.0,
        cause="",
        told_to_sleep=Told(level=2, since_s=0.0),
    )
    with pytest.raises(ForbiddenTransition, match="told to sleep"):
        move(told, LifeCycle.ACTIVE, now_s=1.0)
    assert not move(told, LifeCycle.SLEEPING, now_s=1.0).told_to_sleep


def test_a_slow_gateway_does_not_cost_a_replica_whose_sleep_is_taken_back() -> None:
    rig = up()
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"], drain_s=1.0)
    until_asked(rig, "a-0", ActionKind.SLEEP)
    rig.servers["a-0"].sleep_refused = True
    rig.servers["a-0"].moving = None
    rig.crash()
    rig.gateways["h"].lag = 40
    rig.restart()
    rig.servers["a-0"].sleep_refused = False
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.ROLLED_BACK
    assert rig.memory.replicas["a-0"].routable
    assert rig.broken == []


# What an outcome proves


def test_a_token_of_the_process_before_proves_nothing_about_the_one_after() -> None:
    rig = up()
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    until_asked(rig, "b-0", ActionKind.CANARY)
    rig.doing["b-0"].late_s = 6.0
    rig.reboot("b-0")
    rig.servers["b-0"].no_token = True
    rig.run(12.0)
    assert not rig.memory.replicas["b-0"].routable
    assert rig.broken == []


def test_a_token_that_comes_late_does_not_show_two_on_one_gpu() -> None:
    rig = up()
    rig.fleet.wake_by_hand("b-0")
    change(rig, "b-0", life_cycle=LifeCycle.STARTING)
    change(rig, "a-0", life_cycle=LifeCycle.REACTIVATING, ready=False)
    step = Step(
        kind=StepKind.WAKE,
        goal=Goal.AWAKE,
        replica="b-0",
        service="b",
        state=OperationState.RUNNING,
        asked=ActionKind.CANARY,
        start_s=rig.now_s,
    )
    operation = Operation(
        operation_id="o-1",
        kind=OperationKind.OVERLAY,
        subject="p",
        create_s=rig.now_s,
        update_s=rig.now_s,
        deadline_s=rig.now_s + 60,
        decision_id="d-1",
        steps=(step,),
    )
    state = replace(rig.memory, operations={"o-1": operation})
    token = Outcome(kind=ActionKind.CANARY, replica="b-0", ok=True)
    after = tick(state, rig.world(), [token], now_s=rig.now_s, limits=LIMITS).state
    assert after.replicas["b-0"].life_cycle is LifeCycle.STARTING


def test_a_sleep_that_is_taken_back_waits_for_the_memory_of_who_was_awake_beside_it() -> None:
    rig = up()
    rig.run(20.0)
    rig.fleet.wake_by_hand("b-0")
    rig.step()
    rig.servers["a-1"].slow_sleep_s = 20.0
    operation = rig.apply(2, OVERLAY, ["b-1"])
    until_asked(rig, "a-0", ActionKind.SLEEP)
    while not rig.servers["a-0"].asleep:
        rig.step()
    rig.cancel(operation.operation_id)
    rig.run(60.0)
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}
    assert rig.broken == [], "b-0 had not let go of its memory"


def test_a_wake_that_took_too_long_does_not_forget_that_the_weights_are_gone() -> None:
    rig = up(sleep_level=2)
    pool = rig.memory.pools["p"]
    rig.memory = replace(rig.memory, pools={"p": replace(pool, awake=("a-1", "b-0"), effective_awake=("a-1", "b-0"))})
    change(rig, "a-0", life_cycle=LifeCycle.SLEEPING)
    rig.fleet.sleep_by_hand("a-0")
    change(rig, "b-0", life_cycle=LifeCycle.REACTIVATING, since_s=rig.now_s - LIMITS.reactivating_s - 1.0)
    rig.fleet.wake_by_hand("b-0")
    rig.run(30.0)
    assert rig.memory.replicas["b-0"].routable
    assert rig.broken == [], "no token before the weights are back"


def test_a_sleeper_whose_record_was_lost_is_woken_as_deep_as_its_pool_says() -> None:
    rig = up(sleep_level=2)
    rig.crash()
    rig.stored = State()
    rig.restart()
    rig.run(2.0)
    rig.apply(2, OVERLAY, ["b-0", "a-1"], sleep_level=2)
    rig.run(30.0)
    assert rig.memory.replicas["b-0"].routable
    assert rig.broken == [], "no token before the weights are back"


def test_a_sleeper_whose_record_was_lost_sleeps_as_deep_as_its_pool_said_first() -> None:
    rig = up(sleep_level=2)
    rig.crash()
    rig.stored = State()
    rig.restart()
    rig.run(2.0)
    rig.apply(2, OVERLAY, ["a-0", "a-1"], sleep_level=2)
    rig.run(2.0)
    rig.apply(3, OVERLAY, ["b-0", "a-1"], sleep_level=1)
    rig.run(30.0)
    assert rig.memory.replicas["b-0"].routable
    assert rig.broken == [], "no token before the weights are back"


def test_a_pool_whose_level_changes_while_a_server_falls_asleep_knows_how_deep_that_one_sleeps() -> None:
    rig = up(sleep_level=2)
    rig.apply(2, OVERLAY, ["b-0", "a-1"], sleep_level=2)
    until_asked(rig, "a-0", ActionKind.SLEEP)
    rig.apply(3, OVERLAY, ["b-0", "a-1"], sleep_level=1)
    rig.run(20.0)
    assert rig.memory.replicas["a-0"].sleep_level == 2
    rig.apply(4, OVERLAY, ["a-0", "a-1"], sleep_level=1)
    rig.run(20.0)
    assert rig.memory.replicas["a-0"].routable
    assert rig.broken == []


# Who may still route


def test_a_gateway_that_has_not_heard_of_the_death_keeps_the_successor_awake() -> None:
    rig = up()
    rig.traffic = ("a",)
    rig.gateways["h"].lag = 60
    rig.servers["a-0"].exited = True
    rig.run(30.0)
    assert rig.broken == []


def test_a_gateway_that_nobody_wrote_down_counts_after_a_crash() -> None:
    rig = up()
    rig.traffic = ("a",)
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    new = rig.add_gateway("new")
    rig.crash()
    new.cut_off = 4
    rig.restart()
    rig.run(20.0)
    assert rig.broken == []


def test_the_time_in_which_no_actuator_was_there_is_not_the_gateways_fault() -> None:
    rig = up()
    operation = rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.gateways["h"].lag = 4
    rig.run(1.0)
    rig.crash()
    rig.run(6.0)
    rig.restart()
    assert rig.until_settled()
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert rig.broken == []


# Operations


def test_a_cancelled_transition_that_still_waited_is_not_carried_out() -> None:
    rig = up()
    rig.send("a", 4.0)
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    rig.run(1.0)
    waiting = rig.apply(3, OVERLAY, ["a-0", "b-1"])
    assert waiting.waits_for
    assert rig.cancel(waiting.operation_id).state is OperationState.CANCELLED
    assert rig.until_settled()
    rig.run(10.0)
    assert rig.life_cycles() == {"a-0": "active", "a-1": "active", "b-0": "sleeping", "b-1": "sleeping"}
    assert rig.operation(waiting.operation_id).steps == ()
    assert rig.memory.pools["p"].settled_revision == 3
    assert rig.broken == []


def test_a_step_of_a_bring_up_that_failed_long_ago_does_not_show_what_a_transition_hides() -> None:
    overlay = [*OVERLAY, spec("big-0", 0, 1)]
    rig = up(awake=("a-1", "b-0"))
    rig.gateways["h"].lag = 60
    operation = rig.apply(2, overlay, ["a-1", "b-0"])
    assert operation.kind is OperationKind.OVERLAY
    failed = Step(
        kind=StepKind.RELEASE,
        goal=Goal.ASLEEP,
        replica="b-0",
        service="b",
        state=OperationState.FAILED,
        end_s=rig.now_s,
    )
    rig.run(1.0)
    still = rig.operation(operation.operation_id)
    assert not still.finished, "big-0 waits for its GPUs"
    still = replace(still, steps=(failed, *still.steps))
    rig.memory = replace(rig.memory, operations={**rig.memory.operations, still.operation_id: still})
    rig.gateways["h"].lag = 0
    rig.apply(3, overlay, ["a-0", "a-1"])
    rig.run(20.0)
    assert rig.memory.replicas["a-0"].routable
    assert rig.broken == []


@pytest.mark.parametrize("failures", [1, 5])
def test_a_deletion_that_the_backend_refused_for_a_while_strands_nobody(failures: int) -> None:
    rig = up()
    rig.servers["a-1"].exited = True
    rig.run(4.0)
    rig.fleet.backend_errors = ["the backend is away"] * failures
    rig.run(120.0)
    assert rig.memory.replicas["a-1"].routable
    assert rig.broken == []


def test_a_starting_server_is_not_deleted_under_requests() -> None:
    rig = up()
    rig.gateways["h"].lag = 40
    rig.reboot("a-0")
    rig.run(4.0)
    rig.send("a", 20.0, gateway="h")
    rig.send("a", 20.0, gateway="h")
    without = [item for item in OVERLAY if item.replica != "a-0"]
    rig.apply(2, without, ["a-1", "b-0"], drain_s=5.0)
    rig.run(60.0)
    assert "a-0" not in rig.servers
    assert rig.broken == []


def test_without_the_store_a_hidden_replica_that_nobody_works_on_comes_back_too() -> None:
    rig = up()
    change(rig, "a-0", life_cycle=LifeCycle.DRAINING)
    after = fail_static(rig.memory, rig.world(), now_s=rig.now_s, limits=LIMITS).state
    assert after.replicas["a-0"].routable


def test_a_server_that_could_not_be_read_is_not_shown_unproved() -> None:
    rig = Rig()
    listed = Listed(**parts(OVERLAY[0]), address="http://a-0", run_state=RunState.RUNNING, start_time_s=1.0)
    for error, expected in (("timed out", LifeCycle.STARTING), ("", LifeCycle.ACTIVE)):
        probe = ProbeResult(as_of_s=rig.now_s, healthy=True, error=error)
        world = World(listed={"a-0": listed}, listed_as_of_s=rig.now_s, probes={"a-0": probe})
        state = tick(State(), world, [], now_s=rig.now_s, limits=LIMITS).state
        assert state.replicas["a-0"].life_cycle is expected, error


def test_a_server_that_falls_asleep_while_the_records_are_lost_is_not_taken_for_serving() -> None:
    rig = up()
    rig.servers["a-0"].slow_sleep_s = 5.0
    rig.apply(2, OVERLAY, ["b-0", "a-1"])
    until_asked(rig, "a-0", ActionKind.SLEEP)
    rig.traffic = ("a",)
    rig.crash()
    rig.stored = State()
    rig.restart()
    rig.run(1.0)
    assert rig.life_cycles()["a-0"] == "unknown"
    rig.apply(1, OVERLAY, ["a-1", "b-0"])
    rig.run(60.0)
    assert rig.broken == [], "no request was sent there"
    assert rig.life_cycles() == {"a-0": "sleeping", "a-1": "active", "b-0": "active", "b-1": "sleeping"}


@pytest.mark.parametrize(("paused", "expected"), [(True, LifeCycle.UNKNOWN), (False, LifeCycle.ACTIVE)])
def test_a_paused_server_without_a_record_is_left_alone(paused: bool, expected: LifeCycle) -> None:
    """Woken while it falls asleep to level 2, it would answer without its weights."""
    rig = Rig()
    listed = Listed(**parts(OVERLAY[0]), address="http://a-0", run_state=RunState.RUNNING, start_time_s=1.0)
    probe = ProbeResult(as_of_s=rig.now_s, healthy=True, sleeping=paused, paused=paused)
    world = World(listed={"a-0": listed}, listed_as_of_s=rig.now_s, probes={"a-0": probe})
    after = tick(State(), world, [], now_s=rig.now_s, limits=LIMITS)
    assert after.state.replicas["a-0"].life_cycle is expected
    assert after.actions == ()


def lose_the_records_while_it_waits(rig: Rig, replica: str, overlay: list) -> None:
    """`replica` starts anew on a taken GPU, then actuator and records are lost; b-1 is to take over from a-1."""
    rig.restart_server(replica)
    rig.run(5.0)
    rig.crash()
    rig.stored = State()
    rig.restart()
    rig.run(2.0)
    rig.apply(2, overlay, ["a-0", "a-1"])
    rig.apply(3, overlay, ["a-0", "b-1"])


def test_a_server_that_waits_for_memory_is_started_by_a_transition_after_the_records_were_lost_too() -> None:
    rig = up()
    lose_the_records_while_it_waits(rig, "b-1", OVERLAY)
    rig.run(60.0)
    assert rig.memory.replicas["b-1"].routable
    assert rig.broken == []


def test_a_server_that_waits_for_memory_keeps_nobody_waiting_after_the_records_were_lost() -> None:
    overlay = [*OVERLAY, spec("big-0", 0, 1)]
    rig = up(overlay=overlay)
    lose_the_records_while_it_waits(rig, "big-0", overlay)
    rig.run(40.0)
    assert rig.memory.replicas["b-1"].routable
    assert rig.broken == []
