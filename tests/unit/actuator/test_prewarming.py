"""Pre-warming: a cold replica is booted ahead of need while who serves on its GPUs sleeps, as one operation.

Three replicas of service ``a`` serve, one on each GPU; two share theirs with a sleeper of ``b``, the first with a ``c``
too.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from actuator.core import holds
from actuator.core.admission_pool import PoolRequest, apply_pool_state
from actuator.core.fencing import Refused
from actuator.core.model import ActionKind, Floor, Operation, OperationKind, OperationState, State, StepKind
from actuator.core.tick import tick
from actuator.core.world import World
from tests.unit.actuator.actuator_fleet_model import START_S, WAKE_S
from tests.unit.actuator.actuator_rig import LIMITS, STEP_S, Rig, overlay_of, spec
from trimtab.domain.pool import DesiredPool
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role

OVERLAY = [spec("a-0", 0), spec("a-1", 1), spec("a-2", 2), spec("b-0", 0), spec("b-1", 1), spec("c-0", 0)]
SERVING = ["a-0", "a-1", "a-2"]


def floor(count: int) -> tuple[Floor, ...]:
    return (Floor(service="a", role=Role.COLOCATED, min_replicas=count),)


def up(*, prewarm: bool = True, overlay: list = OVERLAY, **fields) -> Rig:
    rig = Rig(gpus=3, gateways=("g", "h"))
    rig.traffic = ("a",)
    rig.apply(1, overlay, SERVING, prewarm=prewarm, **fields)
    assert rig.until_settled()
    assert all(rig.memory.replicas[name].routable for name in SERVING)
    return rig


def prewarms(rig: Rig) -> list[Operation]:
    """Oldest first."""
    found = [o for o in rig.memory.operations.values() if o.kind is OperationKind.PREWARM]
    return sorted(found, key=lambda operation: operation.create_s)


def cold(rig: Rig, name: str = "b-0", how: str = "restarts") -> None:
    """The sleeper loses its process while its neighbour serves."""
    if how == "restarts":
        rig.restart_server(name)
    elif how == "ends":
        rig.servers[name].exited = True
    else:
        del rig.servers[name]


def until(rig: Rig, what: Callable[[], object], limit_s: float = 60.0) -> float:
    """Steps until it is so; how long that took."""
    begin_s = rig.now_s
    while not what():
        assert rig.now_s - begin_s < limit_s, (rig.life_cycles(), prewarms(rig))
        rig.step()
    return rig.now_s - begin_s


def serve(rig: Rig, names: list[str]) -> bool:
    return all(name in rig.memory.replicas and rig.memory.replicas[name].routable for name in names)


def begun(rig: Rig) -> Operation:
    """Steps until a pre-warming is under way."""
    until(rig, lambda: any(not operation.finished for operation in prewarms(rig)))
    return prewarms(rig)[-1]


def booting(rig: Rig) -> Operation:
    """Steps until the donor sleeps and the cold one boots."""
    operation = begun(rig)
    until(rig, lambda: rig.servers["a-0"].asleep and "b-0" in rig.servers and not rig.servers["b-0"].waits)
    return operation


def ended(rig: Rig, operation: Operation) -> Operation:
    until(rig, lambda: rig.operation(operation.operation_id).finished)
    return rig.operation(operation.operation_id)


def at_rest(rig: Rig) -> None:
    """Everybody serves who is meant to, everybody else sleeps, and nothing was broken on the way."""
    assert rig.broken == []
    awake = set(rig.memory.pools["p"].awake)
    cycles = rig.life_cycles()
    assert cycles == {name: "active" if name in awake else "sleeping" for name in cycles}
    assert {name for name, server in rig.servers.items() if not server.asleep} == awake
    assert all(rig.memory.replicas[name].routable for name in awake)


# What it does, and what happens without it


@pytest.mark.parametrize("how", ["restarts", "ends", "vanishes"])
def test_a_cold_replica_is_warmed_up_while_its_neighbour_sleeps(how: str) -> None:
    rig = up()
    cold(rig, how=how)
    operation = ended(rig, booting(rig))
    assert (operation.state, operation.detail) == (OperationState.SUCCEEDED, "pre-warmed b-0; a-0 serves again")
    rig.run(5.0)
    at_rest(rig)
    assert rig.servers["b-0"].slept_before
    rig.run(100.0)
    assert len(prewarms(rig)) == 1, "there is nothing else to warm up"


@pytest.mark.parametrize("how", ["restarts", "ends", "vanishes"])
def test_without_the_switch_a_cold_replica_stays_cold_beside_one_that_serves(how: str) -> None:
    rig = up(prewarm=False)
    cold(rig, how=how)
    before = set(rig.memory.operations)
    rig.run(300.0)
    assert set(rig.memory.operations) == before
    assert "b-0" not in rig.servers or rig.servers["b-0"].waits or rig.servers["b-0"].exited
    assert all(rig.memory.replicas[name].routable for name in SERVING)


@pytest.mark.parametrize("prewarm", [False, True])
def test_a_cold_replica_whose_gpu_nobody_uses_is_warmed_up_in_any_case(prewarm: bool) -> None:
    rig = Rig(gpus=3)
    rig.apply(1, OVERLAY, ["a-1", "a-2"], prewarm=prewarm)
    assert rig.until_settled()
    for how, name in (("vanishes", "a-0"), ("ends", "b-0"), ("restarts", "c-0")):
        cold(rig, name, how)
    rig.run(60.0)
    at_rest(rig)
    assert prewarms(rig) == []


def test_a_member_that_joins_a_living_pool_is_warmed_up() -> None:
    rig = up(overlay=[item for item in OVERLAY if item.service != "b"])
    bring_up = rig.apply(2, OVERLAY, SERVING, prewarm=True)
    rig.run(200.0)
    at_rest(rig)
    assert [o.state for o in prewarms(rig)] == [OperationState.SUCCEEDED] * 2
    assert rig.operation(bring_up.operation_id).state is OperationState.SUCCEEDED
    assert rig.operation(bring_up.operation_id).detail == "left b-0 to pre-warming; left b-1 to pre-warming"
    assert rig.memory.pools["p"].settled_revision == 2


def test_members_that_join_on_one_gpu_are_warmed_up_one_after_the_other() -> None:
    """Though the bring-up that waits for the same GPU is older than the pre-warming."""
    rig = up(overlay=[item for item in OVERLAY if item.service == "a"])
    rig.apply(2, OVERLAY, SERVING, prewarm=True)
    for name in ("b-0", "b-1", "c-0"):
        operation = begun(rig)
        while not rig.operation(operation.operation_id).finished:
            booting_now = {other for other, server in rig.servers.items() if server.ready_s > rig.now_s}
            assert booting_now <= {name}
            rig.step()
    rig.run(5.0)
    at_rest(rig)


def test_a_wake_of_what_was_warmed_up_is_a_hot_one() -> None:
    took_s = {}
    for prewarm in (False, True):
        rig = up(prewarm=prewarm)
        cold(rig)
        rig.run(60.0)
        rig.apply(2, OVERLAY, ["b-0", "a-1", "a-2"], prewarm=prewarm)
        took_s[prewarm] = until(rig, lambda rig=rig: serve(rig, ["b-0"]))
    assert took_s[False] - took_s[True] >= START_S - WAKE_S


def test_all_that_wait_for_one_gpu_are_warmed_up_by_one_operation() -> None:
    rig = up()
    cold(rig, "b-0")
    cold(rig, "c-0")
    operation = ended(rig, booting(rig))
    assert operation.state is OperationState.SUCCEEDED
    assert sorted(step.replica for step in operation.steps) == ["a-0", "b-0", "c-0"]
    rig.run(5.0)
    at_rest(rig)


def test_a_replica_of_two_gpus_is_warmed_up_when_both_its_neighbours_can_go() -> None:
    rig = Rig(gpus=4)
    names = [f"a-{index}" for index in range(4)]
    rig.apply(1, [*(spec(name, i) for i, name in enumerate(names)), spec("big-0", 0, 1)], names, prewarm=True)
    assert rig.until_settled()
    cold(rig, "big-0", "vanishes")
    operation = ended(rig, begun(rig))
    assert operation.detail == "pre-warmed big-0; a-0, a-1 serves again"
    rig.run(5.0)
    at_rest(rig)


def test_one_at_a_time_and_with_a_pause_between() -> None:
    rig = up()
    cold(rig, "b-0")
    cold(rig, "b-1")
    most = 0
    for _ in range(round(120.0 / STEP_S)):
        rig.step()
        most = max(most, sum(not operation.finished for operation in prewarms(rig)))
    assert most == 1
    first, second = prewarms(rig)
    assert second.create_s - first.update_s >= LIMITS.prewarm_after_s
    at_rest(rig)


def test_the_cold_replica_with_the_least_loaded_neighbour_comes_first() -> None:
    rig = up()
    rig.traffic = ()
    cold(rig, "b-0")
    cold(rig, "b-1")
    busy = {}
    while len(busy) < 2:
        assert rig.send("a", 30.0)
        busy = {name: server for name, server in rig.servers.items() if server.requests}
    rig.servers["a-1"].requests.clear()
    assert [step.replica for step in begun(rig).steps] == ["a-1", "b-1"]


# What it does not begin


NOT_BEGUN = {
    "the floor needs them all": lambda rig: rig.apply(
        2, OVERLAY, SERVING, prewarm=True, floors=floor(3), decision_id="d-1"
    ),
    "one of the role received capacity lately": lambda rig: rig.apply(
        2, OVERLAY, SERVING, prewarm=True, residence_s=1e6, decision_id="d-1"
    ),
    "requests wait at one that would stay": lambda rig: setattr(rig.servers["a-1"], "waiting", 1),
    "the donor's requests wait": lambda rig: setattr(rig.servers["a-0"], "waiting", 1),
    "those that stay could not hold the caches": lambda rig: [
        setattr(rig.servers[name], "kv_usage", 0.4) for name in SERVING
    ],
    "one that would stay does not say how it is": lambda rig: setattr(rig.servers["a-2"], "kv_usage", None),
    "one that would stay is lost": lambda rig: rig.restart_server("a-1") or setattr(rig.servers["a-1"], "silent", True),
    "its GPU is somebody's whose state is not known": lambda rig: setattr(rig.servers["c-0"], "silent", True),
    "an operator holds the donor": lambda rig: hold(rig, "a-0"),
}


def hold(rig: Rig, name: str) -> None:
    held = holds.put(rig.memory.replicas[name], HoldOwner.OPERATOR, reason="tests", now_s=rig.now_s)
    rig.memory = replace(rig.memory, replicas={**rig.memory.replicas, name: held})


@pytest.mark.parametrize("case", sorted(NOT_BEGUN))
def test_it_does_not_begin_where_it_could_hurt(case: str) -> None:
    rig = up()
    NOT_BEGUN[case](rig)
    cold(rig)
    rig.run(60.0)
    assert prewarms(rig) == []
    assert rig.memory.replicas["a-0"].life_cycle is LifeCycle.ACTIVE
    assert rig.broken == []


def test_the_last_replica_of_a_service_is_not_taken_away_though_it_has_no_floor() -> None:
    rig = Rig(gpus=1)
    rig.apply(1, [spec("a-0", 0), spec("b-0", 0)], ["a-0"], prewarm=True)
    assert rig.until_settled()
    cold(rig, "b-0", "vanishes")
    rig.run(100.0)
    assert prewarms(rig) == []


def test_it_does_not_begin_during_a_transition_or_shortly_after_one() -> None:
    rig = up()
    cold(rig, "b-0")
    rig.servers["a-1"].slow_sleep_s = 10.0
    swap = rig.apply(2, OVERLAY, ["a-0", "b-1", "a-2"], prewarm=True)
    until(rig, lambda: rig.operation(swap.operation_id).finished)
    assert prewarms(rig) == []
    operation = begun(rig)
    assert operation.create_s - rig.operation(swap.operation_id).update_s >= LIMITS.prewarm_after_s
    assert ended(rig, operation).state is OperationState.SUCCEEDED


def test_it_does_not_wake_more_gpus_than_the_budget() -> None:
    rig = Rig(gpus=4)
    names = ["a-0", "a-2", "a-3"]
    overlay = [spec("a-0", 0), spec("a-2", 2), spec("a-3", 3), spec("big-0", 0, 1)]
    for budget, count in ((3, 0), (4, 1)):
        rig = Rig(gpus=4)
        rig.apply(1, overlay, names, prewarm=True, budget_gpus=budget)
        assert rig.until_settled()
        cold(rig, "big-0", "vanishes")
        rig.run(60.0)
        assert len(prewarms(rig)) == count


def test_a_server_that_would_come_up_on_more_gpus_than_are_made_free_keeps_the_others_cold() -> None:
    """Where memory is measured it is known not to come up; elsewhere it may."""
    overlay = [*OVERLAY, spec("big-0", 0, 1)]
    rig = up(overlay=overlay, floors=floor(2))
    rig.traffic = ()
    cold(rig, "big-0")
    cold(rig, "b-0")
    rig.run(LIMITS.prewarm_after_s - STEP_S)
    state, later_s = rig.memory, rig.now_s + LIMITS.prewarm_after_s
    for measured in (True, False):
        world = replace(rig.world(), measures_gpus=measured)
        seen = {name: replace(probe, as_of_s=later_s) for name, probe in world.probes.items()}
        opened = tick(state, replace(world, probes=seen), [], now_s=later_s, limits=LIMITS).state.operations
        assert any(o.kind is OperationKind.PREWARM for o in opened.values()) is measured


def test_where_nothing_can_be_made_or_deleted_the_switch_is_refused() -> None:
    desired = DesiredPool(
        pool="p",
        state_revision=1,
        overlay=overlay_of(OVERLAY),
        awake=(),
        floors=(),
        budget_gpus=3,
        decision_id="d",
        drain_timeout_s=1.0,
        prewarm=True,
    )
    request = PoolRequest(desired=desired, writer="policy-engine", token=1)
    with pytest.raises(Refused, match=r"pool p: .* spec\.prewarm to false") as refused:
        apply_pool_state(State(), request, World(), now_s=1.0, limits=LIMITS, can_create=False)
    assert refused.value.reason == "PREWARM_UNSUPPORTED"


# Nobody wakes the donor in the middle; a crash, an outage at any step


def test_no_correction_touches_its_replicas_while_it_is_under_way() -> None:
    rig = up()
    cold(rig)
    operation = begun(rig)
    names = {step.replica for step in operation.steps}
    while not rig.operation(operation.operation_id).finished:
        others = [o for o in rig.memory.operations.values() if o.kind is not OperationKind.PREWARM and not o.finished]
        assert not any(step.replica in names for other in others for step in other.steps)
        rig.step()
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED


def test_no_other_sleeper_is_made_on_the_gpus_meanwhile() -> None:
    rig = up()
    cold(rig, "b-0")
    operation = booting(rig)
    cold(rig, "c-0", "vanishes")
    rig.run(2.0)
    assert ended(rig, operation).state is OperationState.SUCCEEDED
    assert [step.replica for step in operation.steps] == ["a-0", "b-0"]
    assert rig.memory.replicas["a-0"].routable
    assert "c-0" not in rig.servers


def test_no_correction_waits_for_the_gpus_meanwhile() -> None:
    rig = up()
    cold(rig, "b-0", "vanishes")
    cold(rig, "c-0", "vanishes")
    operation = begun(rig)
    before = set(rig.memory.operations)
    ended(rig, operation)
    assert set(rig.memory.operations) == before
    rig.run(60.0)
    at_rest(rig)


@pytest.mark.parametrize("how", ["restarts", "vanishes"])
def test_a_kill_at_any_moment_ends_as_without_it(how: str) -> None:
    for rounds in range(0, 44, 2):
        rig = up()
        cold(rig, how=how)
        begun(rig)
        rig.run(rounds * STEP_S)
        rig.dies_after = (-1, 0, 1)[rounds // 2 % 3]
        rig.later(2.0, rig.restart)
        rig.run(100.0)
        at_rest(rig)
        assert prewarms(rig)[-1].state is OperationState.SUCCEEDED, rounds


@pytest.mark.parametrize("landed", [True, False])
def test_a_store_that_goes_away_at_any_moment_leaves_nobody_asleep(landed: bool) -> None:
    for rounds in range(0, 40, 3):
        rig = up()
        cold(rig)
        begun(rig)
        rig.run(rounds * STEP_S)
        rig.store_breaks = landed
        rig.later(6.0, lambda rig=rig: setattr(rig, "store_breaks", None) or setattr(rig, "store_away", False))
        rig.run(200.0)
        at_rest(rig)
        awake = {name for name, server in rig.servers.items() if not server.asleep}
        assert awake == set(rig.memory.pools["p"].awake), rounds


# It gives way


def test_a_rescue_that_wants_its_gpus_gets_them_at_once() -> None:
    rig = up()
    cold(rig)
    operation = booting(rig)
    rescue = rig.apply(2, OVERLAY, ["c-0", "a-1", "a-2"], prewarm=True)
    took_s = until(rig, lambda: rig.memory.replicas["c-0"].routable)
    assert took_s <= 6.0, "a deletion, a look, a wake and a token; not a boot"
    assert rig.operation(rescue.operation_id).state is OperationState.SUCCEEDED
    given_up = ended(rig, operation)
    assert (given_up.state, given_up.detail) == (OperationState.CANCELLED, "gave way to state revision 2")
    assert "b-0" not in rig.servers, "what still booted was deleted"
    rig.run(100.0)
    assert rig.broken == []
    assert rig.life_cycles()["a-0"] == "sleeping"


@pytest.mark.parametrize("rounds", range(0, 40, 3))
def test_a_newer_state_at_any_moment_is_carried_out(rounds: int) -> None:
    for awake in (["c-0", "a-1", "a-2"], ["b-0", "a-1", "a-2"], ["a-1", "a-2"], ["a-0", "b-1", "a-2"]):
        rig = up()
        cold(rig)
        begun(rig)
        rig.run(rounds * STEP_S)
        rig.apply(2, OVERLAY, awake, prewarm=False)
        until(rig, lambda rig=rig, awake=awake: serve(rig, awake))
        rig.run(30.0)
        assert rig.broken == []
        assert {name for name, replica in rig.memory.replicas.items() if replica.routable} == set(awake)
        assert all(operation.finished for operation in prewarms(rig))


def test_a_newer_state_moves_the_replicas_of_a_pre_warming_by_its_own_operation() -> None:
    rig = up()
    cold(rig)
    operation = booting(rig)
    wanted = rig.apply(2, OVERLAY, ["b-0", "a-1", "a-2"], prewarm=True)
    assert [(step.replica, step.kind) for step in wanted.steps] == [("b-0", StepKind.WAKE)]
    assert ended(rig, wanted).state is OperationState.SUCCEEDED
    assert ended(rig, operation).state is OperationState.CANCELLED
    rig.run(5.0)
    at_rest(rig)


def test_the_donors_own_service_gets_its_replica_back_when_it_is_given_more() -> None:
    overlay = [*OVERLAY, spec("b-2", 2)]
    rig = up(overlay=overlay)
    rig.apply(2, overlay, ["a-0", "a-1", "b-2"], prewarm=True)
    assert rig.until_settled()
    rig.servers.pop("b-0")
    operation = booting(rig)
    rig.apply(3, overlay, SERVING, prewarm=True)
    assert until(rig, lambda: rig.memory.replicas["a-0"].routable) <= 6.0
    assert ended(rig, operation).state is OperationState.CANCELLED


def test_a_wake_beside_the_donor_on_a_gpu_of_the_cold_one_gets_it() -> None:
    overlay = [spec("a-0", 0), spec("a-2", 2), spec("a-3", 3), spec("x-1", 1), spec("big-0", 0, 1)]
    rig = Rig(gpus=4)
    rig.apply(1, overlay, ["a-0", "a-2", "a-3"], prewarm=True)
    assert rig.until_settled()
    cold(rig, "big-0", "vanishes")
    operation = begun(rig)
    until(rig, lambda: "big-0" in rig.servers)
    rig.apply(2, overlay, ["a-0", "a-2", "a-3", "x-1"], prewarm=True)
    assert until(rig, lambda: serve(rig, ["x-1"])) <= 6.0
    assert ended(rig, operation).state is OperationState.CANCELLED


def test_a_cold_replica_that_leaves_the_pool_is_not_warmed_up_to_its_end() -> None:
    rig = up()
    cold(rig)
    operation = booting(rig)
    rig.apply(2, [item for item in OVERLAY if item.replica != "b-0"], SERVING, prewarm=True)
    assert until(rig, lambda: serve(rig, SERVING)) <= 6.0
    assert ended(rig, operation).state is OperationState.CANCELLED
    until(rig, lambda: "b-0" not in rig.servers)
    assert rig.broken == []


def test_what_it_never_began_is_not_taken_up_by_its_roll_back() -> None:
    rig = up()
    cold(rig)
    rig.servers["a-0"].slow_sleep_s = 15.0
    operation = begun(rig)
    until(rig, lambda: rig.memory.replicas["a-0"].told_to_sleep is not None)
    rig.cancel(operation.operation_id, "not now")
    rig.servers["b-0"].waits, rig.servers["b-0"].ready_s = False, rig.now_s
    rounds = 0
    while not rig.operation(operation.operation_id).finished:
        assert rig.operation(operation.operation_id).steps[1].state is OperationState.CANCELLED
        rig.step()
        rounds += 1
    assert rounds * STEP_S >= 10.0, "it waited until the donor slept"
    assert rig.life_cycles()["b-0"] == "sleeping", "a correction's work"
    until(rig, lambda: serve(rig, SERVING))
    assert rig.broken == []


def test_a_transition_elsewhere_goes_on_beside_it() -> None:
    overlay = [*OVERLAY, spec("d-0", 3), spec("e-0", 3)]
    rig = Rig(gpus=4)
    rig.apply(1, overlay, [*SERVING, "d-0"], prewarm=True)
    assert rig.until_settled()
    cold(rig)
    operation = booting(rig)
    swap = rig.apply(2, overlay, [*SERVING, "e-0"], prewarm=True)
    until(rig, lambda: rig.operation(swap.operation_id).finished)
    assert rig.operation(swap.operation_id).state is OperationState.SUCCEEDED
    assert not rig.operation(operation.operation_id).finished
    assert ended(rig, operation).state is OperationState.SUCCEEDED
    rig.run(5.0)
    at_rest(rig)


STOPS = {
    "its floor is raised": (
        lambda rig: rig.apply(2, OVERLAY, SERVING, prewarm=True, floors=floor(3), decision_id="d-1"),
        "2 a would be left routable without a-0",
    ),
    "it is turned off": (lambda rig: rig.apply(2, OVERLAY, SERVING, decision_id="d-1"), "pre-warming was turned off"),
    "the queue of those that stay grows": (lambda rig: setattr(rig.servers["a-1"], "waiting", 40), "the queue of"),
    "a cache fills": (lambda rig: setattr(rig.servers["a-2"], "kv_usage", 0.99), "a-2, which stays, uses 99%"),
    "one that stays is lost": (lambda rig: rig.reboot("a-1"), "a-1, which was to stay, was lost"),
    "the donor's process ends": (lambda rig: setattr(rig.servers["a-0"], "exited", True), "a-0, which made room, is"),
    "the donor starts anew": (lambda rig: rig.restart_server("a-0"), "a-0, which made room, is"),
}


@pytest.mark.parametrize("case", sorted(STOPS))
def test_it_is_taken_back_as_one_when(case: str) -> None:
    rig = up()
    cold(rig)
    operation = booting(rig)
    happens, words = STOPS[case]
    happens(rig)
    given_up = ended(rig, operation)
    assert given_up.state in (OperationState.ROLLED_BACK, OperationState.FAILED)
    assert words in given_up.detail
    for server in rig.servers.values():
        server.waiting, server.kv_usage = 0, 0.0
    until(rig, lambda: serve(rig, SERVING))
    assert rig.broken == []


def test_a_floor_that_is_raised_in_time_keeps_two_donors_in_sight() -> None:
    rig = Rig(gpus=4)
    names = [f"a-{index}" for index in range(4)]
    overlay = [*(spec(name, index) for index, name in enumerate(names)), spec("big-0", 0, 1)]
    rig.apply(1, overlay, names, prewarm=True)
    assert rig.until_settled()
    cold(rig, "big-0", "vanishes")
    operation = begun(rig)
    rig.apply(2, overlay, names, prewarm=True, floors=floor(3), decision_id="d-1")
    rig.step()
    assert rig.operation(operation.operation_id).state is OperationState.ROLLED_BACK
    assert serve(rig, names)


def test_somebody_takes_it_back_by_hand() -> None:
    rig = up()
    cold(rig)
    operation = booting(rig)
    rig.cancel(operation.operation_id, "not now")
    assert until(rig, lambda: rig.memory.replicas["a-0"].routable) <= 6.0
    assert ended(rig, operation).detail == "cancelled: not now"


def test_what_waits_is_left_waiting_when_the_donor_was_never_put_to_sleep() -> None:
    rig = up()
    cold(rig)
    server = rig.servers["b-0"]
    for _ in SERVING:
        rig.send("a", 100.0)
    operation = begun(rig)
    rig.run(1.0)
    rig.cancel(operation.operation_id, "not now")
    ended(rig, operation)
    assert rig.servers["b-0"] is server, "the same process"
    assert rig.servers["b-0"].waits


# It fails


def fails(rig: Rig) -> list[Operation]:
    """Lets it try five times while the backend makes nothing."""
    cold(rig, how="vanishes")
    while sum(operation.finished for operation in prewarms(rig)) < 5:
        undone = any(operation.state is OperationState.ROLLING_BACK for operation in prewarms(rig))
        rig.fleet.backend_errors = [] if undone else ["no such image"]
        rig.step()
    return prewarms(rig)


def test_failures_come_ever_later_and_each_brings_the_donor_back() -> None:
    rig = up()
    tried = fails(rig)
    assert {operation.state for operation in tried} == {OperationState.ROLLED_BACK}
    pauses_s = [b.create_s - a.update_s for a, b in pairwise(tried)]
    assert pauses_s == pytest.approx([10.0, 20.0, 40.0, LIMITS.max_prewarm_backoff_s], abs=2 * STEP_S)
    assert rig.memory.replicas["a-0"].routable
    rig.fleet.backend_errors.clear()
    rig.run(200.0)
    at_rest(rig)


def test_the_pause_after_a_failure_outlives_the_actuator() -> None:
    rig = up()
    tried = fails(rig)
    rig.crash()
    rig.restart()
    rig.run(20.0)
    assert len(prewarms(rig)) == len(tried)


def test_one_that_cannot_be_made_keeps_no_other_cold() -> None:
    rig = up()
    cold(rig, "b-1", "vanishes")
    rig.servers["a-0"].requests.clear()
    rig.fleet.backend_errors = ["no such image"] * 3
    ended(rig, begun(rig))
    cold(rig, "b-0", "vanishes")
    operation = begun(rig)
    assert [step.replica for step in operation.steps] == ["a-0", "b-0"]


def test_a_server_that_dies_while_it_boots_is_no_success() -> None:
    rig = up()
    cold(rig, how="vanishes")
    operation = booting(rig)
    rig.servers["b-0"].exited = True
    given_up = ended(rig, operation)
    assert given_up.state is OperationState.ROLLED_BACK
    assert "b-0 its process ended before it slept" in given_up.detail
    assert rig.memory.replicas["a-0"].routable
    assert rig.broken == []


def test_a_server_that_never_gets_ready_gives_the_gpu_back() -> None:
    rig = up()
    cold(rig, how="vanishes")
    operation = booting(rig)
    rig.servers["b-0"].ready_s = float("inf")
    until(rig, lambda: rig.operation(operation.operation_id).finished, LIMITS.starting_s + 30.0)
    assert "not ready 60 s after its start" in rig.operation(operation.operation_id).detail
    assert rig.memory.replicas["a-0"].routable


def test_a_server_that_refuses_to_sleep_gives_the_gpu_back() -> None:
    rig = up()
    cold(rig, how="vanishes")
    operation = booting(rig)
    rig.servers["b-0"].sleep_refused = True
    given_up = ended(rig, operation)
    assert "b-0 could not be put to sleep" in given_up.detail
    assert "b-0" not in rig.servers
    assert rig.memory.replicas["a-0"].routable


def test_a_donor_that_will_not_wake_is_brought_back_by_corrections() -> None:
    rig = up()
    cold(rig)
    operation = booting(rig)
    rig.servers["a-0"].wake_refused = True
    given_up = ended(rig, operation)
    assert given_up.state is OperationState.FAILED
    assert "a-0 could not be woken" in given_up.detail
    assert rig.life_cycles()["b-0"] == "sleeping", "what was warmed up stays warm"
    rig.servers["a-0"].wake_refused = False
    until(rig, lambda: rig.memory.replicas["a-0"].routable, 120.0)
    assert rig.broken == []


def test_a_donor_with_a_request_that_does_not_end_is_shown_again() -> None:
    rig = up()
    cold(rig)
    for _ in range(3):
        rig.send("a", 500.0, pinned=True)
    operation = begun(rig)
    given_up = ended(rig, operation)
    assert given_up.state is OperationState.ROLLED_BACK
    assert "given up: draining" in given_up.detail
    assert all(rig.memory.replicas[name].routable for name in SERVING)


def test_the_donors_requests_have_time_to_end() -> None:
    rig = up(drain_s=0.5)
    cold(rig)
    for _ in range(3):
        rig.send("a", LIMITS.default_drain_s - 1.0)
    operation = begun(rig)
    seen = []
    while not rig.operation(operation.operation_id).finished:
        rig.step()
        seen.append(rig.memory.replicas["a-0"].evicting)
    assert rig.operation(operation.operation_id).state is OperationState.SUCCEEDED
    assert not any(seen), "a pool's short drain is for those who wait for GPUs"


def test_its_actions_are_written_before_they_are_done() -> None:
    rig = up()
    cold(rig, how="vanishes")
    operation = begun(rig)
    kinds = []
    while not rig.operation(operation.operation_id).finished:
        rig.step()
        kinds += [(name, doing.action.kind) for name, doing in sorted(rig.doing.items()) if doing.begin_s == rig.now_s]
        for name, doing in rig.doing.items():
            if doing.action.kind is ActionKind.SLEEP:
                assert rig.stored.replicas[name].told_to_sleep is not None
    assert kinds == [
        ("a-0", ActionKind.SLEEP),
        ("b-0", ActionKind.CREATE),
        ("b-0", ActionKind.SLEEP),
        ("a-0", ActionKind.WAKE),
        ("a-0", ActionKind.CANARY),
    ]
