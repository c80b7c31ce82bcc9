"""Pre-warmings beside decisions: in the status, in `trimtab decisions`, and in full by `trimtab explain`."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, RenderableType

from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.policy.v1 import decision_pb2, policy_pb2, policy_pb2_grpc
from trimtab.api.store.v1 import engine_pb2
from trimtab.cli import decisions as decisions_module
from trimtab.cli.main import main
from trimtab.cli.records import table_of
from trimtab.cli.status import render
from trimtab.views.decisions import newest_rows, operation_lines, pre_warming_row, pre_warmings
from trimtab.views.status import Answers

RUNNING, SUCCEEDED = actuator_pb2.OPERATION_STATE_RUNNING, actuator_pb2.OPERATION_STATE_SUCCEEDED
CANCELLED, ROLLED_BACK = actuator_pb2.OPERATION_STATE_CANCELLED, actuator_pb2.OPERATION_STATE_ROLLED_BACK
BEGUN_S = 1_790_000_000


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def prewarm(
    state: actuator_pb2.OperationState.ValueType = RUNNING,
    *,
    cold: tuple[str, ...] = ("code-0",),
    donors: tuple[str, ...] = ("chat-0",),
    at_s: int = BEGUN_S,
    detail: str = "",
    pool: str = "shared",
    identity: str = "o-1",
) -> actuator_pb2.Operation:
    """One that begins at `at_s`, and has changed for the last time 20 s later."""
    kinds = [(actuator_pb2.STEP_KIND_RELEASE, name) for name in donors]
    kinds += [(actuator_pb2.STEP_KIND_CREATE, name) for name in cold]
    steps = [
        actuator_pb2.OperationStep(kind=kind, replica=name, service=name.rpartition("-")[0], state=RUNNING)
        for kind, name in kinds
    ]
    return actuator_pb2.Operation(
        operation_id=identity,
        kind=actuator_pb2.OPERATION_KIND_PREWARM,
        state=state,
        subject=pool,
        decision_id="d-7",
        steps=steps,
        create_time=Timestamp(seconds=at_s),
        update_time=Timestamp(seconds=at_s + 20),
        deadline=Timestamp(seconds=at_s + 300),
        detail=detail,
    )


def transition(at_s: int, identity: str = "d-7") -> decision_pb2.Decision:
    return decision_pb2.Decision(
        decision_id=identity,
        decide_time=Timestamp(seconds=at_s),
        subject="shared",
        rule=decision_pb2.RULE_REBALANCE,
        reason="chat: Z = 0.9 is below 1",
        outcome=decision_pb2.Outcome(state=decision_pb2.OUTCOME_STATE_SUCCEEDED),
    )


def text_of(item: RenderableType, width: int = 200) -> str:
    shown = Console(file=io.StringIO(), width=width, record=True)
    shown.print(item)
    return shown.export_text()


@pytest.mark.parametrize(
    ("operation", "reason", "outcome"),
    [
        (
            prewarm(),
            "code-0 boots ahead of need, to be asleep when it is wanted; chat-0 makes room; under way",
            "running",
        ),
        (
            prewarm(cold=("reason-0", "code-0"), donors=("chat-0", "chat-1")),
            (
                "reason-0 and code-0 boot ahead of need, to be asleep when they are wanted; "
                "chat-0 and chat-1 make room; under way"
            ),
            "running",
        ),
        (
            prewarm(SUCCEEDED, detail="pre-warmed code-0; chat-0 serves again"),
            (
                "code-0 boots ahead of need, to be asleep when it is wanted; chat-0 makes room; "
                "ended 14:13:40: pre-warmed code-0; chat-0 serves again"
            ),
            "succeeded",
        ),
        (
            prewarm(CANCELLED, detail="gave way to state revision 9"),
            (
                "code-0 boots ahead of need, to be asleep when it is wanted; chat-0 makes room; "
                "ended 14:13:40: gave way to state revision 9"
            ),
            "cancelled",
        ),
    ],
)
def test_a_row_says_which_replica_why_since_when_and_how_it_ended(
    operation: actuator_pb2.Operation, reason: str, outcome: str
) -> None:
    row = pre_warming_row(operation)
    assert (row.time, row.identity, row.subject, row.rule) == ("14:13:20", "o-1", "shared", "pre-warming")
    assert (row.reason, row.outcome) == (reason, outcome)


def test_a_row_says_where_its_steps_stand() -> None:
    operation = prewarm()
    operation.steps[0].phase = "draining: 3 in flight"
    operation.steps[1].phase = "waiting for chat-0"
    reason = pre_warming_row(operation).reason
    assert reason.endswith("; under way: chat-0 draining: 3 in flight, code-0 waiting for chat-0")


def test_only_pre_warmings_of_the_subject_are_taken() -> None:
    other = actuator_pb2.Operation(kind=actuator_pb2.OPERATION_KIND_TRANSITION, subject="shared")
    mine, theirs = prewarm(identity="o-1"), prewarm(identity="o-2", pool="far", cold=("x-0",), donors=("y-0",))
    listed = [other, mine, theirs]
    found = {subject: [item.operation_id for item in pre_warmings(listed, subject)] for subject in ("", "shared", "y")}
    assert found == {"": ["o-1", "o-2"], "shared": ["o-1"], "y": ["o-2"]}


def test_the_table_is_by_time_and_no_longer_than_asked_for() -> None:
    decisions = [transition(BEGUN_S + 60, "d-new"), transition(BEGUN_S - 60, "d-old")]
    shown = text_of(table_of(newest_rows(decisions, [prewarm(SUCCEEDED)], limit=2), width=200)).splitlines()
    assert [line.split()[1] for line in shown[1:]] == ["d-new", "o-1"]


def test_in_a_narrow_terminal_the_reason_has_lines_of_its_own() -> None:
    decision = transition(BEGUN_S, "d-01a22dbc5cfc-0")
    decision.reason = "chat: Z = 0.07 is critical; wakes chat-node-0-0, releases code-node-0-0"
    lines = text_of(table_of(newest_rows([decision], limit=5), width=80), 80).splitlines()
    assert [line.rstrip() for line in lines[1:]] == [
        "14:13:20  d-01a22dbc5cfc-0  shared  rebalance  succeeded",
        "          chat: Z = 0.07 is critical; wakes chat-node-0-0, releases",
        "          code-node-0-0",
    ]


@pytest.mark.parametrize("width", [80, 140])
def test_the_status_shows_it_with_its_pool_while_it_is_under_way(width: int) -> None:
    pools = [policy_pb2.PoolStatus(pool="shared"), policy_pb2.PoolStatus(pool="far")]
    status = policy_pb2.GetStatusResponse(leader=True, pools=pools)
    running = "pre-warming o-1 since 14:13:20: code-0 boots ahead of need"
    assert running in text_of(render(Answers(status=status, decisions=(), warmed=[prewarm()]), width=width), width)
    ended = Answers(status=status, decisions=(), warmed=[prewarm(ROLLED_BACK, detail="chat suffers")])
    shown = text_of(render(ended, width=width), width)
    assert "since" not in shown
    assert "rolled-back" in shown


def test_an_operation_is_told_in_full() -> None:
    operation = prewarm(SUCCEEDED, detail="pre-warmed code-0; chat-0 serves again")
    operation.steps[0].state = SUCCEEDED
    operation.steps[0].start_time.seconds = BEGUN_S
    operation.steps[0].end_time.seconds = BEGUN_S + 3
    operation.steps[1].phase = "booting"
    assert operation_lines(operation) == [
        "o-1 pre-warming of shared: succeeded",
        "reason: code-0 boots ahead of need, to be asleep when it is wanted; chat-0 makes room",
        "the pool's state is that of d-7",
        "began 14:13:20, ended 14:13:40; deadline 14:18:20",
        "step: release chat-0: succeeded, 14:13:20 to 14:13:23",
        "step: create code-0: running (booting)",
        "outcome: pre-warmed code-0; chat-0 serves again",
    ]


class Engine(policy_pb2_grpc.PolicyServiceServicer):
    """Has one decision."""

    def ListDecisions(
        self, request: policy_pb2.ListDecisionsRequest, context: grpc.ServicerContext
    ) -> policy_pb2.ListDecisionsResponse:
        return policy_pb2.ListDecisionsResponse(decisions=[transition(BEGUN_S - 60)])

    def ExplainDecision(
        self, request: policy_pb2.ExplainDecisionRequest, context: grpc.ServicerContext
    ) -> policy_pb2.ExplainDecisionResponse:
        """`d-old` has an input from before schema numbers, `d-new` one of this release, `d-bad` a broken one."""
        reply = policy_pb2.ExplainDecisionResponse(lines=["reason: why"])
        if request.decision_id == "d-old":
            reply.decision.replay_input = '{"format":1}'
            reply.not_replayed = "the input is of schema 0"
        elif request.decision_id == "d-new":
            given = engine_pb2.PoolInput(now_s=1.5, awake=["chat-0"])
            reply.decision.replay = engine_pb2.ReplayRecord(schema=1, pool=given).SerializeToString()
        else:
            reply.decision.replay = b"\xff"
        return reply


class Actuator(actuator_pb2_grpc.ActuatorServiceServicer):
    """Has one pre-warming."""

    def ListOperations(
        self, request: actuator_pb2.ListOperationsRequest, context: grpc.ServicerContext
    ) -> actuator_pb2.ListOperationsResponse:
        return actuator_pb2.ListOperationsResponse(operations=[prewarm()])

    def GetOperation(
        self, request: actuator_pb2.GetOperationRequest, context: grpc.ServicerContext
    ) -> actuator_pb2.GetOperationResponse:
        if request.operation_id != "o-1":
            context.abort(grpc.StatusCode.NOT_FOUND, f"no operation {request.operation_id}")
        return actuator_pb2.GetOperationResponse(operation=prewarm())


@pytest.fixture
def stack(free_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Engine(), server)  # type: ignore[abstract]
    actuator_pb2_grpc.add_ActuatorServiceServicer_to_server(Actuator(), server)  # type: ignore[abstract]
    server.add_insecure_port(f"127.0.0.1:{free_port}")
    server.start()
    for part in ("POLICY", "ACTUATOR"):
        monkeypatch.setenv(f"TRIMTAB_{part}_ADDRESS", f"127.0.0.1:{free_port}")
    yield
    server.stop(None).wait()


def command(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["trimtab", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("stack")
def test_decisions_and_explain_know_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert command(monkeypatch, "decisions") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["o-1", "d-7"]
    assert command(monkeypatch, "decisions", "--json") == 0
    assert [item["decision_id"] for item in json.loads(capsys.readouterr().out)] == ["d-7"]
    assert command(monkeypatch, "explain", "o-1") == 0
    assert capsys.readouterr().out.startswith("o-1 pre-warming of shared: running\n")
    assert command(monkeypatch, "explain", "o-1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "OPERATION_KIND_PREWARM"
    assert command(monkeypatch, "explain", "o-2") == 1
    assert "no operation o-2" in capsys.readouterr().err
    monkeypatch.setenv("TRIMTAB_ACTUATOR_ADDRESS", f"127.0.0.1:{free_port - 1}")
    assert command(monkeypatch, "decisions") == 0, "without an actuator there are the decisions alone"
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["d-7"]


@pytest.mark.usefixtures("stack")
def test_explain_shows_the_input_and_asks_for_a_report_only_of_one_that_was_computed_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "explain", "d-old") == 0
    assert capsys.readouterr().out == "reason: why\n"
    assert command(monkeypatch, "explain", "d-new") == 0
    assert "report this" in capsys.readouterr().out
    shown = {}
    for identity in ("d-old", "d-new", "d-bad"):
        assert command(monkeypatch, "explain", identity, "--json") == 0
        shown[identity] = json.loads(capsys.readouterr().out)["decision"]
    assert shown["d-old"]["replay_input"] == '{"format":1}'
    assert shown["d-new"]["replay"]["pool"]["awake"] == ["chat-0"]
    assert shown["d-bad"]["replay"] == "/w=="


async def test_a_watch_tells_when_one_begins_and_how_it_ends_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(decisions_module, "_print_line", lambda row: said.append(f"{row.identity} {row.outcome}"))
    running, ended = prewarm(identity="o-2"), prewarm(SUCCEEDED, identity="o-2")

    def snapshot(*operations: actuator_pb2.Operation) -> actuator_pb2.WatchOperationsResponse:
        return actuator_pb2.WatchOperationsResponse(snapshot=actuator_pb2.OperationSnapshot(operations=operations))

    streams = [
        [
            snapshot(prewarm(SUCCEEDED, identity="o-0"), prewarm(SUCCEEDED, identity="o-1"), running),
            actuator_pb2.WatchOperationsResponse(bookmark=actuator_pb2.ReplicaBookmark()),
            actuator_pb2.WatchOperationsResponse(operation=running),
            actuator_pb2.WatchOperationsResponse(operation=ended),
        ],
        [snapshot(ended, prewarm(CANCELLED, identity="o-3"))],
    ]

    async def watch(_: object) -> object:
        if not streams:
            await asyncio.Event().wait()
        for event in streams.pop(0):
            yield event
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    monkeypatch.setattr(decisions_module, "AGAIN_S", 0.0)
    services = SimpleNamespace(actuator=SimpleNamespace(WatchOperations=watch))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(decisions_module._watch_pre_warmings(services, ""), 0.5)  # type: ignore[arg-type]
    assert said == ["o-2 running", "o-2 succeeded", "o-3 cancelled"]
