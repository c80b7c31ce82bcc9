"""Cases from the field that end in the actuator, each named by its number.

Every case stands for its kind: the inputs are those of the fault that shipped, the answer is the right one. Cases 14,
17 and 20 have their other half in the policy engine's tests, 22 in those of the servers' HTTP surface.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from actuator.core.admission_placement import GroupRequest, PlacementRequest, apply_placements
from actuator.core.fencing import Refused
from actuator.core.model import Goal, Operation, OperationKind, OperationState, PlacedSpec, State
from actuator.shell.records import Records
from tests.unit.actuator.actuator_fleet_model import STEP_S, Request, changed
from tests.unit.actuator.actuator_rig import LIMITS, Rig, spec
from trimtab.domain.vocabulary import LifeCycle, Role
from trimtab.store.client import Store
from trimtab.store.errors import FencedOff
from trimtab.store.lease import StoreLease


def stage(name: str, gpu: int, role: Role) -> PlacedSpec:
    """One replica of a disaggregated service."""
    return changed(spec(name, gpu, service="svc"), role=role)


PREFILL = [stage(f"p-{gpu}", gpu, Role.PREFILL) for gpu in range(8)]
DECODE = [stage(f"d-{gpu}", gpu, Role.DECODE) for gpu in range(8)]
FOUR_AND_FOUR = [f"p-{gpu}" for gpu in range(4)] + [f"d-{gpu}" for gpu in range(4, 8)]
FIVE_AND_THREE = [f"p-{gpu}" for gpu in range(5)] + [f"d-{gpu}" for gpu in range(5, 8)]


def routable(rig: Rig) -> list[str]:
    return sorted(name for name, replica in rig.memory.replicas.items() if replica.routable)


def most_gpus_in_use(rig: Rig, seconds: float) -> int:
    """The most GPUs whose memory was in use at once by replicas that were up, over some time."""
    most = 0
    for _ in range(round(seconds / STEP_S)):
        rig.step()
        awake = [server for server in rig.servers.values() if not server.asleep and not server.exited]
        most = max(most, sum(len(server.placed.gpus) for server in awake))
    return most


@pytest.mark.parametrize(
    ("errors", "end"),
    [
        (["409 Conflict", "500 Internal Server Error"], OperationState.SUCCEEDED),
        (["409 Conflict", "500 Internal Server Error", "500 Internal Server Error"], OperationState.ROLLED_BACK),
    ],
)
def test_case_14_a_half_applied_rebalance_is_completed_or_compensated(errors: list[str], end: OperationState) -> None:
    """Budget 8, 4P4D → 5P3D: decode was released, and the wake of the fifth prefill is refused."""
    rig = Rig(gpus=8)
    rig.apply(1, [*PREFILL, *DECODE], FOUR_AND_FOUR)
    assert rig.until_settled()
    rig.fleet.wake_errors = list(errors)
    operation = rig.apply(2, [*PREFILL, *DECODE], FIVE_AND_THREE)
    assert most_gpus_in_use(rig, 60.0) <= 8
    ended = rig.operation(operation.operation_id)
    assert ended.state is end
    assert routable(rig) == sorted(FIVE_AND_THREE if end is OperationState.SUCCEEDED else FOUR_AND_FOUR)
    assert all(operation.finished for operation in rig.memory.operations.values()), "not stuck"
    assert rig.broken == []


@pytest.mark.parametrize("failures", [2, 5])
def test_case_14_a_half_placed_group_is_completed_or_compensated(failures: int) -> None:
    """The same of scaled roles: one call adds a prefill and takes a decode; the backend answers 409, then 500."""
    rig = Rig(gpus=8)

    def place(add: tuple[PlacedSpec, ...], remove: tuple[tuple[Role, int], ...]) -> None:
        rig.step()
        group = GroupRequest(group="g", service="svc", add=add, remove=remove, decision_id="d-1")
        request = PlacementRequest(
            groups=(group,),
            inventory_revision=rig.memory.meta.inventory_revision,
            expire_s=None,
            request_id="",
            validate_only=False,
            writer="prescheduler",
            token=1,
        )
        answer = apply_placements(rig.memory, request, rig.world(), now_s=rig.now_s, limits=LIMITS)
        assert answer.results[0].accepted, answer.results
        rig.stored = rig.memory = answer.state

    def scaled(item: PlacedSpec) -> PlacedSpec:
        return changed(item, pool="", group="g")

    place(tuple(scaled(item) for item in (*PREFILL[:3], *DECODE[3:7])), ())
    assert rig.until_settled()
    before = routable(rig)
    rig.fleet.backend_errors = (["409 Conflict"] + ["500 Internal Server Error"] * failures)[:failures]
    place((scaled(PREFILL[7]),), ((Role.DECODE, 1),))
    assert most_gpus_in_use(rig, 120.0) <= 8
    assert rig.until_settled()
    done = {"p-7", *before} - {"d-3"}
    assert routable(rig) == sorted(done if failures == 2 else before)
    assert rig.broken == []


@pytest.mark.parametrize("store", ["kept", "lost"])
def test_case_17_a_restart_at_a_steady_seven_leaves_seven(store: str) -> None:
    rig = Rig(gpus=7)
    overlay = [spec(f"a-{gpu}", gpu) for gpu in range(7)] + [spec(f"b-{gpu}", gpu) for gpu in range(7)]
    seven = [f"a-{gpu}" for gpu in range(4)] + [f"b-{gpu}" for gpu in range(4, 7)]
    rig.apply(1, overlay, seven)
    assert rig.until_settled()
    assert len(routable(rig)) == 7
    rig.crash()
    if store == "lost":
        rig.stored = State()
    rig.restart()
    least = most = 7
    for _ in range(60):
        rig.step()
        least, most = min(least, len(routable(rig))), max(most, len(routable(rig)))
    assert (least, most) == (7, 7)
    assert not any(o.kind is OperationKind.TRANSITION for o in rig.memory.operations.values())


async def test_case_18_the_actuator_that_stood_still_for_twenty_seconds_writes_nothing(store: Store) -> None:
    """Its lease ran out and was taken, its clock jumped; when it goes on it still believes that it leads."""
    records = Records(store, "local")
    mono = {"old": 100.0, "new": 100.0}
    old = StoreLease(store, records.owner, "old", 0.4, monotonic=lambda: mono["old"])
    new = StoreLease(store, records.owner, "new", 5.0, monotonic=lambda: mono["new"])
    first = await old.acquire_or_renew()
    assert first is not None
    before = State(operations={"o-1": operation("o-1")})
    await records.save(State(), before, first)
    # The process is stopped here: its own clock stands still, the store's goes on.
    second = None
    while second is None:
        second = await new.acquire_or_renew()
    assert second > first
    after = State(operations={"o-1": replace(operation("o-1"), detail="by the new one")})
    await records.save(before, after, second)
    with pytest.raises(FencedOff):
        await records.save(before, State(operations={"o-1": replace(operation("o-1"), detail="by the old one")}), first)
    assert (await records.load()).state.operations["o-1"].detail == "by the new one"
    for jump_s in (-3600.0, 20.0, 3600.0):
        mono["old"] += jump_s
        assert await old.acquire_or_renew() is None, "the lease is the other's, whatever its clock says"


def operation(operation_id: str) -> Operation:
    return Operation(
        operation_id=operation_id,
        kind=OperationKind.TRANSITION,
        subject="p",
        create_s=1.0,
        update_s=1.0,
        deadline_s=2.0,
    )


def test_case_18_a_pool_state_of_the_old_leader_is_refused_also_after_a_restart() -> None:
    rig = Rig()
    overlay = [spec("a-0", 0), spec("b-0", 0)]
    rig.apply(1, overlay, ["a-0"], token=7)
    rig.apply(2, overlay, ["a-0"], token=8)
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            rig.apply(3, overlay, ["b-0"], token=7)
        assert caught.value.reason == "FENCED_OFF"
        rig.crash()
        rig.run(20.0)
        rig.restart()
    rig.until_settled()
    assert routable(rig) == ["a-0"]


def test_case_20_a_pool_with_nobody_awake_wakes_who_is_asked_for() -> None:
    """Sleepers' gauges are frozen or not there: nothing of a wake may depend on them."""
    rig = Rig()
    overlay = [spec("a-0", 0), spec("b-0", 0)]
    rig.apply(1, overlay, [])
    assert rig.until_settled()
    assert rig.life_cycles() == {"a-0": "sleeping", "b-0": "sleeping"}
    for server in rig.servers.values():
        server.waiting = server.kv_usage = None
    assert not rig.send("a", 1.0), "the gateway holds it"
    rig.apply(2, overlay, ["a-0"])
    assert rig.until_settled()
    assert rig.send("a", 1.0)
    assert rig.broken == []


@pytest.mark.parametrize("continuable", [True, False])
def test_case_21_a_long_generation_is_waited_for_until_the_deadline(continuable: bool) -> None:
    """A stream of 120 s runs when its replica is chosen: hidden at once, no new traffic, and it is never cut off."""
    rig = Rig()
    overlay = [spec(f"{name}-{gpu}", gpu) for name in ("a", "b") for gpu in (0, 1)]
    rig.apply(1, overlay, ["a-0", "a-1"])
    assert rig.until_settled()
    assert rig.send("a", 120.0, pinned=not continuable)
    assert rig.servers["a-0"].requests
    started = rig.apply(2, overlay, ["b-0", "a-1"], drain_s=10.0)
    rig.run(2.0)
    assert rig.life_cycles()["a-0"] == "draining"
    for _ in range(4):
        assert rig.send("a", 1.0)
    assert len(rig.servers["a-0"].requests) == 1, "no new traffic"
    rig.run(6.0)
    assert not rig.memory.replicas["a-0"].evicting
    assert rig.servers["a-0"].requests, "before the deadline nobody touches it"
    assert rig.until_settled()
    ended = rig.operation(started.operation_id)
    if continuable:
        assert ended.state is OperationState.SUCCEEDED, "at the deadline the gateway continued it elsewhere"
        assert routable(rig) == ["a-1", "b-0"]
    else:
        assert ended.state is OperationState.ROLLED_BACK, "nobody could continue it, so the release was given up"
        assert rig.servers["a-0"].requests, "and it runs on"
        assert routable(rig) == ["a-0", "a-1"]
    assert rig.broken == []


def test_case_22_a_server_is_hidden_and_drained_before_it_sleeps_and_proved_before_it_is_shown() -> None:
    """Eight are running when it is to sleep; one more comes while it sleeps; its first token after the wake is late."""
    rig = Rig()
    overlay = [spec(f"{name}-{gpu}", gpu) for name in ("a", "b") for gpu in (0, 1)]
    rig.apply(1, overlay, ["a-0", "b-1"])
    assert rig.until_settled()
    for _ in range(8):
        assert rig.send("a", 3.0)
    rig.apply(2, overlay, ["b-0", "b-1"], drain_s=20.0)
    seen: list[tuple[LifeCycle, int, bool]] = []
    while not rig.servers["a-0"].asleep:
        rig.step()
        server = rig.servers["a-0"]
        seen.append((rig.memory.replicas["a-0"].life_cycle, len(server.requests), server.moving is not None))
        if server.requests:
            assert server.moving is None, "not asked to sleep with work in flight"
            assert rig.memory.replicas["a-0"].life_cycle is LifeCycle.DRAINING
    assert max(count for _, count, _ in seen) == 8
    assert not rig.send("a", 1.0), "a request meanwhile is held at the gateway, not sent to a sleeper"
    assert rig.until_settled()
    rig.servers["a-0"].no_token = True
    rig.apply(3, overlay, ["a-0", "b-1"])
    rig.run(10.0)
    assert not rig.servers["a-0"].asleep
    assert not rig.memory.replicas["a-0"].routable, "awake by /is_sleeping, and no token came"
    rig.servers["a-0"].no_token = False
    assert rig.until_settled()
    assert routable(rig) == ["a-0", "b-1"]
    assert rig.broken == []


def test_case_22_a_request_that_no_gateway_sent_is_waited_for_too() -> None:
    rig = Rig()
    overlay = [spec("a-0", 0), spec("b-0", 0)]
    rig.apply(1, overlay, ["a-0"])
    assert rig.until_settled()
    rig.apply(2, overlay, ["b-0"], drain_s=10.0)
    rig.run(0.5)
    rig.servers["a-0"].requests.append(Request(rig.now_s + 4.0))
    while rig.servers["a-0"].requests:
        assert rig.servers["a-0"].moving is None
        rig.step()
    assert rig.until_settled()
    assert routable(rig) == ["b-0"]


@pytest.mark.parametrize("let_go_s", [8.0, 10_000.0])
def test_case_23_a_wake_waits_for_measured_memory_and_the_donor_comes_back_if_it_never_frees(
    let_go_s: float, memory_lag: Callable[[float], None]
) -> None:
    """/sleep has answered, and the memory of A is free 8 s later, or never."""
    rig = Rig()
    overlay = [spec("a-0", 0), spec("b-0", 0)]
    rig.apply(1, overlay, ["a-0"])
    assert rig.until_settled()
    memory_lag(let_go_s)
    started = rig.apply(2, overlay, ["b-0"])
    woken_s = asleep_s = 0.0
    while not rig.operation(started.operation_id).finished:
        rig.step()
        if rig.servers["a-0"].asleep and not asleep_s:
            asleep_s = rig.now_s
            memory_lag(0.0)
        if not rig.servers["b-0"].asleep and not woken_s:
            woken_s = rig.now_s
    assert rig.until_settled()
    ended = rig.operation(started.operation_id)
    if let_go_s < 1000:
        assert ended.state is OperationState.SUCCEEDED
        assert woken_s >= asleep_s + let_go_s
        assert routable(rig) == ["b-0"]
    else:
        assert ended.state is OperationState.ROLLED_BACK
        assert "still has" in ended.detail
        assert ended.update_s - ended.create_s < 200.0, "bounded"
        assert woken_s == 0.0
        assert routable(rig) == ["a-0"], "A comes back: what is in use there is its own"
    assert all(step.goal is not Goal.ABSENT for step in ended.steps)
    assert rig.broken == []


@pytest.fixture
def memory_lag(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """How long a server keeps its memory after it says that it sleeps."""
    return lambda seconds: monkeypatch.setattr("tests.unit.actuator.actuator_fleet_model.MEMORY_LAG_S", seconds)
