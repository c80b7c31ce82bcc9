"""The rules by which a chaos run judges, each shown a case that breaks it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.chaos.load import BASE_FLOOR, RAISED_FLOOR, SERVICES, chaos_load, floor_changes
from lab.chaos.losses import GRACE_S, Failure, Trouble, judge, read_failures
from lab.chaos.plan import FIRST_S, GAPS_S, LENGTHS_S, FaultKind, choose, fewest_faults, plan_faults
from lab.chaos.report import FAULTS_PER_MINUTE, faults_asked_for_per_minute, kinds_asked_for
from lab.chaos.rules import Seen, hidden_below_floor, tokens_that_fell, two_awake, undecided
from simulator.replay.report import Outcome, RequestRecord
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2

ACTIVE, DRAINING = types_pb2.LIFE_CYCLE_ACTIVE, types_pb2.LIFE_CYCLE_DRAINING
FAILED, SLEEPING = types_pb2.LIFE_CYCLE_FAILED, types_pb2.LIFE_CYCLE_SLEEPING


# The schedule


def test_one_seed_gives_one_schedule_and_another_seed_another() -> None:
    assert plan_faults(duration_s=600, seed=3) == plan_faults(duration_s=600, seed=3)
    assert plan_faults(duration_s=600, seed=3) != plan_faults(duration_s=600, seed=4)
    assert chaos_load(duration_s=30, seed=3) == chaos_load(duration_s=30, seed=3)


@given(seed=st.integers(0, 10_000), duration_s=st.floats(60, 1200))
def test_a_fault_comes_every_few_seconds_and_each_kind_in_the_first_minute_and_a_half(
    seed: int, duration_s: float
) -> None:
    faults = plan_faults(duration_s=duration_s, seed=seed)
    times = [fault.at_s for fault in faults]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == FIRST_S
    assert all(GAPS_S[0] <= gap <= GAPS_S[1] for gap in gaps)
    assert times[-1] >= duration_s - 5 - GAPS_S[1]
    first = faults[: len(FaultKind)]
    assert len({fault.kind for fault in first}) == len(first)
    for fault in faults:
        low_s, high_s = LENGTHS_S.get(fault.kind, (0.0, 0.0))
        assert low_s <= fault.length_s <= high_s
        assert (fault.delay_s > 0) == (fault.kind is FaultKind.ACKNOWLEDGEMENT_DELAYED)


@given(seed=st.integers(0, 10_000), duration_s=st.floats(20, 300))
def test_no_schedule_is_asked_for_more_faults_or_kinds_than_it_has(seed: int, duration_s: float) -> None:
    faults = plan_faults(duration_s=duration_s, seed=seed)
    assert len(faults) >= fewest_faults(duration_s) > 0
    assert len({fault.kind for fault in faults}) >= kinds_asked_for(duration_s)
    assert len(faults) / (duration_s / 60) >= faults_asked_for_per_minute(duration_s)


@pytest.mark.parametrize(
    ("duration_s", "kinds", "per_minute"),
    [
        (20, 2, 6.0),
        (30, 4, FAULTS_PER_MINUTE),
        (45, 6, FAULTS_PER_MINUTE),
        (119, 6, 8.0),
        (120, 11, 8.0),
        (600, 11, 8.0),
    ],
)
def test_a_longer_run_is_asked_for_more(duration_s: float, kinds: int, per_minute: float) -> None:
    assert kinds_asked_for(duration_s) == kinds
    assert faults_asked_for_per_minute(duration_s) == pytest.approx(per_minute)


@pytest.mark.parametrize(
    ("candidates", "moving", "draw", "victim"),
    [
        ([], [], 0.4, None),
        ([], ["a"], 0.4, None),
        (["a", "b"], [], 0.0, "a"),
        (["a", "b"], [], 0.99, "b"),
        (["a", "b", "c"], ["c"], 0.1, "c"),
        (["a", "b", "c"], ["c"], 0.6, "b"),
        (["a", "b"], ["z"], 0.1, "a"),
    ],
)
def test_half_of_the_faults_meet_a_server_in_transition(
    candidates: list[str], moving: list[str], draw: float, victim: str | None
) -> None:
    assert choose(candidates, moving, draw) == victim


def test_floors_move_to_a_model_that_is_cold_and_never_ask_for_more_than_the_pool_has() -> None:
    changes = floor_changes(duration_s=120)
    assert len(changes) == 10
    for change in changes:
        assert sorted(change.floors) == sorted(SERVICES)
        assert sorted(change.floors.values()) == [BASE_FLOOR, BASE_FLOOR, RAISED_FLOOR]
    assert {name for change in changes for name, floor in change.floors.items() if floor == RAISED_FLOOR} == set(
        SERVICES
    )


# Whose a loss is


def record(index: int = 0, outcome: Outcome = Outcome.HTTP_ERROR) -> RequestRecord:
    return RequestRecord(
        index=index, service="chat", arrival_s=0.0, prompt_tokens=10, output_tokens=10, outcome=outcome
    )


HELD = Trouble("chat-0", "server_500", since_s=100.0, until_s=110.0)
LASTING = Trouble("chat-1", "server_hung", since_s=105.0)


@pytest.mark.parametrize(
    ("outcome", "failures", "of_fault"),
    [
        (Outcome.HTTP_ERROR, [Failure(101, "chat-0", "x"), Failure(106, "chat-1", "x")], True),
        (Outcome.STREAM_ERROR, [Failure(110 + GRACE_S, "chat-0", "x")], True),
        (Outcome.STREAM_ERROR, [Failure(110 + GRACE_S + 0.1, "chat-0", "x")], False),
        (Outcome.HTTP_ERROR, [Failure(99.9, "chat-0", "x")], False),
        (Outcome.HTTP_ERROR, [Failure(101, "chat-0", "x"), Failure(106, "chat-2", "x")], False),
        (Outcome.HTTP_ERROR, [Failure(104, "chat-1", "x")], False),
        # Trimtab moved it, and so a fault could end it.
        (Outcome.HTTP_ERROR, [Failure(101, "", "evicted"), Failure(102, "chat-0", "x")], False),
        (Outcome.HTTP_ERROR, [], False),
        (Outcome.GARBLED, [Failure(101, "chat-0", "x")], False),
        (Outcome.SHORT, [Failure(101, "chat-0", "x")], False),
        (Outcome.ABORTED, [Failure(101, "chat-0", "x")], False),
        (Outcome.TIMEOUT, [Failure(101, "chat-0", "x")], False),
        (Outcome.CONNECTION, [], False),
    ],
)
def test_a_loss_is_a_faults_only_when_every_server_that_had_it_was_held_by_one(
    outcome: Outcome, failures: list[Failure], of_fault: bool
) -> None:
    (loss,) = judge([record(outcome=outcome)], {"chaos-0": failures}, [HELD, LASTING], id_prefix="chaos-")
    assert loss.of_fault is of_fault
    assert loss.why


def test_a_complete_answer_is_no_loss_whatever_befell_it() -> None:
    failures = {"chaos-0": [Failure(101, "chat-0", "x")]}
    assert judge([record(outcome=Outcome.OK)], failures, [], id_prefix="chaos-") == []


def test_failures_are_read_from_the_gateways_log_and_other_lines_are_passed_over() -> None:
    def line(event: str, error: str, request_id: str = "chaos-7") -> str:
        said = {"event": event, "upstream_error": error, "request_id": request_id, "time": "2026-11-30T08:00:00Z"}
        return json.dumps(said)

    found = read_failures(
        [
            "no JSON: request failed",
            line("request is reissued", "chat-0: HTTP 500: broken"),
            line("request is reissued", "evicted", "chaos-8"),
            line("something else", "chat-0: x"),
            json.dumps({"event": "request failed", "time": "yesterday", "upstream_error": "a: b", "request_id": "q"}),
            line("request failed", "chat-1: reset"),
        ]
    )
    assert [(one.replica, one.cause) for one in found["chaos-7"]] == [
        ("chat-0", "HTTP 500: broken"),
        ("chat-1", "reset"),
    ]
    assert [(one.replica, one.cause) for one in found["chaos-8"]] == [("", "evicted")]
    assert len(found) == 2
    assert found["chaos-7"][0].at_s == 1796025600.0


# Invariants


def seen(
    name: str, life_cycle: int = ACTIVE, *, gpus: tuple[int, ...] = (0,), revision: int = 1, released: bool = False
) -> Seen:
    return Seen(
        replica=name,
        service="chat",
        life_cycle=life_cycle,
        routable=life_cycle == ACTIVE,
        released=released,
        gpus=tuple(("node-0", gpu) for gpu in gpus),
        address="",
        revision=revision,
    )


@pytest.mark.parametrize(
    ("before", "now", "crowded"),
    [
        ({"a": True, "b": True}, {"a": True, "b": True}, True),
        ({"a": True, "b": False}, {"a": True, "b": True}, False),
        ({"a": True, "b": True}, {"a": False, "b": True}, False),
        ({"a": True, "b": None}, {"a": True, "b": True}, False),
        ({}, {"a": True, "b": True}, False),
        ({"a": True, "c": True}, {"a": True, "c": True}, False),
    ],
)
def test_two_servers_of_one_gpu_that_both_say_twice_that_they_are_awake_break_the_budget(
    before: dict[str, bool | None], now: dict[str, bool | None], crowded: bool
) -> None:
    replicas = [seen("a", gpus=(0, 1)), seen("b", gpus=(1,)), seen("c", gpus=(2,))]
    assert two_awake(before, now, replicas) == (["node-0:1 has a, b"] if crowded else [])


HIDDEN = seen("a", DRAINING, revision=7, released=True)


@pytest.mark.parametrize(
    ("now", "broken"),
    [
        ([HIDDEN, seen("b")], False),
        ([HIDDEN, seen("b", SLEEPING)], True),
        # What a fault took after the release had begun was still there when it was decided.
        ([HIDDEN, seen("b", FAILED, revision=9)], False),
        ([HIDDEN, seen("b", FAILED, revision=6)], True),
        ([seen("a", FAILED, revision=7), seen("b", FAILED, revision=7)], False),
        ([seen("a", DRAINING, revision=7), seen("b", FAILED, revision=6)], False),
    ],
)
def test_a_release_that_hides_one_replica_too_many_breaks_the_floor(now: list[Seen], broken: bool) -> None:
    before = {"a": seen("a"), "b": seen("b")}
    found = hidden_below_floor(before, {one.replica: one for one in now}, {"chat": 1})
    assert bool(found) is broken


def operation(name: str, decision: str, kind: int = actuator_pb2.OPERATION_KIND_TRANSITION) -> actuator_pb2.Operation:
    return actuator_pb2.Operation(operation_id=name, decision_id=decision, kind=kind)  # type: ignore[arg-type]


def test_every_transition_carries_out_one_decision_that_is_on_record_and_is_its_only_one() -> None:
    known = [decision_pb2.Decision(decision_id="d-1"), decision_pb2.Decision(decision_id="d-2")]
    assert undecided([operation("op-1", "d-1"), operation("op-2", "d-2")], known) == []
    assert undecided([operation("op-1", "d-9", actuator_pb2.OPERATION_KIND_OVERLAY)], known) == []
    assert "0 records" in undecided([operation("op-1", "d-9")], known)[0]
    assert "one decision" in undecided([operation("op-1", "d-1"), operation("op-2", "d-1")], known)[0]


def test_a_decision_with_an_older_token_than_the_one_before_shows_two_leaders() -> None:
    def decisions(*tokens: int) -> list[decision_pb2.Decision]:
        found = []
        for place, token in enumerate(tokens):
            decision = decision_pb2.Decision(decision_id=f"d-{place}")
            decision.decide_time.FromSeconds(1000 + place)
            decision.fencing.token = token
            found.append(decision)
        return found

    assert tokens_that_fell(decisions(1, 1, 2)) == []
    assert tokens_that_fell(list(reversed(decisions(1, 2, 1)))) == ["d-2 has token 1 after 2"]
