"""One live stack, from load to capacity: servers are scraped, windows decided on, servers woken, requests routed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from simulator.replay.client import ReplayOptions, replay
from simulator.replay.report import Outcome, ReplayReport, RequestRecord
from simulator.traces.model import TraceRequest
from tests.support.stack import CALL_TIMEOUT_S, SCENARIO, Stack, documents, eventually, running_stack
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.store.observations import signal

# Not how long it takes, which is a few seconds, but when a busy machine has had its chance.
UP_S = 120.0
MOVE_S = 90.0
SLICE_S = 2.0
PARTS = ("store", "fleet", "collector", "policy", "prescheduler", "actuator", "gateway")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, module_port_base: int) -> Iterator[Stack]:
    """Two models on a pool of four GPUs, and a disaggregated service on the other node."""
    folder = tmp_path_factory.mktemp("stack")
    resources = folder / "resources.yaml"
    resources.write_text(yaml.safe_dump_all(documents(chat_floor=1, code_floor=1)))
    flags = ["--topology", str(SCENARIO / "topology.yaml"), "--bring-up-scale", "0.02", "-f", str(resources)]
    with running_stack(folder, module_port_base, *flags) as up:
        eventually(lambda: "" if _routable(up) and up.routable("assist") == 2 else str(up.replicas()), UP_S)
        yield up


class Load:
    """Requests to one service at an even pace, one slice of two seconds at least, until it is ended."""

    def __init__(self, stack: Stack, service: str, *, rps: int, prompt_tokens: int, output_tokens: int) -> None:
        self._url = stack.addresses.url("gateway")
        self._trace = [
            TraceRequest(
                arrival_s=index / rps, service=service, prompt_tokens=prompt_tokens, output_tokens=output_tokens
            )
            for index in range(int(rps * SLICE_S))
        ]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), daemon=True)
        self._records: list[RequestRecord] = []
        self._thread.start()

    async def _send(self) -> None:
        slices: list[asyncio.Task[ReplayReport]] = []
        while not slices or not self._ending.is_set():
            # Prompts of their own in each slice: none is found in a prefix cache.
            options = ReplayOptions(url=self._url, seed=1 + len(slices))
            slices.append(asyncio.create_task(replay(self._trace, options, duration_s=SLICE_S)))
            await asyncio.sleep(SLICE_S)
        self._records = [record for report in await asyncio.gather(*slices) for record in report.records]

    def end(self) -> list[RequestRecord]:
        """Waits for every answer; returns every request's record."""
        self._ending.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self._records


def _routable(stack: Stack) -> bool:
    return stack.routable("chat") > 0 and stack.routable("code") > 0


def _settled(stack: Stack) -> str:
    """What operations are under way; empty when none is."""
    request = actuator_pb2.ListOperationsRequest(unfinished_only=True)
    found = stack.actuator.ListOperations(request, timeout=CALL_TIMEOUT_S).operations
    return f"{len(found)} operations under way" if found else ""


def test_every_part_is_up_and_the_status_has_every_service(stack: Stack) -> None:
    pids = {name: stack.pid(name) for name in PARTS}
    assert None not in pids.values()
    shown = stack.trimtab("status").stdout
    assert all(service in shown for service in ("chat", "code", "assist"))


def test_a_request_is_answered_and_counted_once_by_server_and_collector(stack: Stack) -> None:
    load = Load(stack, "chat", rps=2, prompt_tokens=200, output_tokens=40)
    key = collector_pb2.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)

    def seen() -> str:
        reply = stack.collector.GetObservation(collector_pb2.GetObservationRequest(key=key), timeout=CALL_TIMEOUT_S)
        tokens = signal(reply.observation, collector_pb2.SIGNAL_DECODE_TPS)
        return "" if tokens.value > 0 else f"no tokens: {tokens}"

    try:
        eventually(seen, MOVE_S)
    finally:
        records = load.end()
    assert {record.outcome for record in records} == {Outcome.OK}
    assert stack.misrouted() == 0


def test_load_wakes_replicas_on_idle_gpus(stack: Stack) -> None:
    known = {operation.operation_id for operation in stack.transitions()}
    assert _routable_is(stack, {"chat": 1, "code": 1}) == ""
    load = Load(stack, "code", rps=12, prompt_tokens=3000, output_tokens=60)
    try:
        eventually(lambda: _routable_is(stack, {"chat": 1, "code": 3}), MOVE_S)
    finally:
        records = load.end()
    assert {record.outcome for record in records} == {Outcome.OK}
    _explained_since(stack, known)


def test_a_floor_that_is_raised_wakes_a_replica_on_the_gpu_of_one_that_gives_it_up(stack: Stack) -> None:
    known = {operation.operation_id for operation in stack.transitions()}
    loads = [Load(stack, service, rps=2, prompt_tokens=200, output_tokens=100) for service in ("chat", "code")]
    try:
        stack.apply(*documents(chat_floor=2, code_floor=1)[:2])
        eventually(lambda: _routable_is(stack, {"chat": 2, "code": 2}), MOVE_S)
    finally:
        records = [record for load in loads for record in load.end()]
    assert {record.outcome for record in records} == {Outcome.OK}
    _explained_since(stack, known)


def _explained_since(stack: Stack, known: set[str]) -> None:
    """Each new transition has ended well, is explained by a decision, and that computes to the same again."""
    eventually(lambda: _settled(stack), MOVE_S)
    new = [operation for operation in stack.transitions() if operation.operation_id not in known]
    assert new
    for operation in new:
        assert operation.state == actuator_pb2.OPERATION_STATE_SUCCEEDED, operation
        request = policy_pb2.ExplainDecisionRequest(decision_id=operation.decision_id)
        reply = stack.policy.ExplainDecision(request, timeout=30)
        assert reply.decision.kind == decision_pb2.DECISION_KIND_TRANSITION
        assert reply.decision.inputs
        assert reply.replay_matches
    assert stack.misrouted() == 0
    assert all(len(gpu["awake_replicas"]) <= 1 for gpu in stack.fleet("/gpus")["gpus"])


def _routable_is(stack: Stack, wanted: dict[str, int]) -> str:
    found = {name: stack.routable(name) for name in wanted}
    return "" if found == wanted else f"routable {found}, wanted {wanted}"


def test_a_disaggregated_service_is_placed_in_one_domain_and_answers(stack: Stack) -> None:
    reply = stack.prescheduler.GetTopology(scheduler_pb2.GetTopologyRequest(), timeout=CALL_TIMEOUT_S)
    assert not reply.unreachable_clusters
    members = [replica for replica in stack.replicas().values() if replica.service == "assist"]
    assert {replica.role for replica in members} == {types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE}
    assert len({replica.deployment_group for replica in members}) == 1
    load = Load(stack, "assist", rps=2, prompt_tokens=200, output_tokens=20)
    records = load.end()
    assert {record.outcome for record in records} == {Outcome.OK}


def test_ctrl_c_leaves_no_process_behind(stack: Stack) -> None:
    """The last of this file: it ends the stack."""
    pids = {name: stack.pid(name) for name in PARTS}
    assert None not in pids.values()
    stack.interrupt()
    assert [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()] == []
    assert stack.process.returncode == 0
