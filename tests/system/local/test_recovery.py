"""Any process of the control plane, the store included, may die in the middle of a transition under load."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from simulator.replay.client import ReplayOptions, replay
from simulator.replay.report import Outcome, RequestRecord
from simulator.traces.model import TraceRequest
from tests.support.stack import SCENARIO, Stack, documents, eventually, running_stack
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2

RECOVERY_S = 10.0
TRANSITION_S = 30.0
SLICE_S = 5
VICTIMS = ("collector", "policy", "prescheduler", "actuator", "store")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, module_port_base: int) -> Iterator[Stack]:
    """A stack under a light load on all three services."""
    folder = tmp_path_factory.mktemp("stack")
    resources = folder / "resources.yaml"
    resources.write_text(yaml.safe_dump_all(documents(chat_floor=3, code_floor=1)))
    flags = ["--topology", str(SCENARIO / "topology.yaml"), "--bring-up-scale", "0.02", "-f", str(resources)]
    with running_stack(folder, module_port_base, *flags) as up:
        eventually(lambda: _routable_is(up, chat=3, code=1, assist=2), 60)
        yield up


class Load:
    """A replay client that sends slice after slice of a light load until it is told to end."""

    def __init__(self, gateway_url: str) -> None:
        self._options = ReplayOptions(url=gateway_url)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), daemon=True)
        self.records: list[RequestRecord] = []
        self._thread.start()

    async def _send(self) -> None:
        trace = [
            TraceRequest(arrival_s=step / 2, service=service, prompt_tokens=600, output_tokens=60)
            for step in range(SLICE_S * 2)
            for service in ("assist", "chat", "code")
        ]
        while not self._ending.is_set():
            report = await replay(trace, self._options, duration_s=SLICE_S)
            self.records += report.records

    def end(self) -> list[RequestRecord]:
        """Waits for the answers of the slice under way; returns every request's record."""
        self._ending.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.records


@pytest.fixture(scope="module")
def load(stack: Stack) -> Iterator[Load]:
    """A load through every test of the module."""
    load = Load(stack.addresses.url("gateway"))
    yield load
    load.end()


class AwakeWatch:
    """Looks at the GPUs all the time, as DCGM would, and remembers the worst."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most_on_one_gpu = 0
        self.looks = 0

    def __enter__(self) -> AwakeWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            gpus = self._stack.fleet("/gpus")["gpus"]
            self.most_on_one_gpu = max(self.most_on_one_gpu, *(len(gpu["awake_replicas"]) for gpu in gpus))
            self.looks += 1


def _routable_is(stack: Stack, **wanted: int) -> str:
    found = {service: stack.routable(service) for service in wanted}
    return "" if found == wanted else f"routable {found}, wanted {wanted}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_process_recovers_in_time_and_the_transition_happens_once(
    stack: Stack, load: Load, victim: str
) -> None:
    before = stack.replicas()
    known = {operation.operation_id for operation in stack.transitions()}
    to_code = stack.routable("chat") == 3
    floors = {"chat_floor": 2, "code_floor": 2} if to_code else {"chat_floor": 3, "code_floor": 1}
    with AwakeWatch(stack) as watch:
        # The floor that falls goes first: both together must fit into the pool at any time.
        stack.apply(*documents(**floors)[: 2 if to_code else 0] or reversed(documents(**floors)[:2]))
        eventually(lambda: "" if _new_transitions(stack, known) else "no transition begins", 60)
        killed_at_s = time.time()
        dead = stack.kill(victim)
        recovery_s = eventually(lambda: _not_recovered(stack, victim, dead, killed_at_s), RECOVERY_S)
        eventually(
            lambda: _routable_is(stack, chat=floors["chat_floor"], code=floors["code_floor"], assist=2), TRANSITION_S
        )
        eventually(lambda: _unfinished(stack), TRANSITION_S)
    assert recovery_s < RECOVERY_S
    said = [line for line in (stack.folder / "up.log").read_text().splitlines() if "started again" in line]
    said = [line for line in said if line.split()[1] == victim]
    assert len(said) == 1, "a headless stack says in one line what it started again"
    # The store's process is the keeper of the server that was killed, and ends by itself.
    assert "exit code " in said[0] if victim == "store" else "was killed by SIGKILL (exit code -9)" in said[0]
    assert f": started again (restart 1; {stack.folder / 'state' / 'logs' / victim}.log)" in said[0]
    assert stack.replicas().keys() == before.keys()
    new = _new_transitions(stack, known)
    assert sum(operation.state == actuator_pb2.OPERATION_STATE_SUCCEEDED for operation in new) == 1, new
    assert len({operation.decision_id for operation in new}) == len(new), "one decision, one operation"
    assert watch.most_on_one_gpu == 1
    assert watch.looks > 10
    assert stack.misrouted() == 0


def _not_recovered(stack: Stack, victim: str, dead: int, killed_at_s: float) -> str:
    if stack.pid(victim) in (None, dead):
        return f"{victim} has not been started again"
    return stack.missing_for_work(killed_at_s)


def _pending(stack: Stack) -> str:
    reply = stack.policy.ListDecisions(policy_pb2.ListDecisionsRequest(page_size=200), timeout=5)
    waiting = [item for item in reply.decisions if item.outcome.state == decision_pb2.OUTCOME_STATE_PENDING]
    return f"{[item.decision_id for item in waiting]} are pending" if waiting else ""


def _new_transitions(stack: Stack, known: set[str]) -> list[actuator_pb2.Operation]:
    return [operation for operation in stack.transitions() if operation.operation_id not in known]


def _unfinished(stack: Stack) -> str:
    reply = stack.actuator.ListOperations(actuator_pb2.ListOperationsRequest(unfinished_only=True), timeout=2)
    return f"{len(reply.operations)} operations under way" if reply.operations else ""


def test_every_transition_has_a_decision_that_explains_it_and_can_be_computed_again(stack: Stack) -> None:
    transitions = stack.transitions()
    assert len(transitions) >= len(VICTIMS)
    eventually(lambda: _pending(stack), 60)
    for operation in transitions:
        reply = stack.policy.ExplainDecision(
            policy_pb2.ExplainDecisionRequest(decision_id=operation.decision_id), timeout=5
        )
        assert reply.decision.kind == decision_pb2.DECISION_KIND_TRANSITION
        assert reply.decision.inputs
        assert reply.decision.outcome.state in (
            decision_pb2.OUTCOME_STATE_SUCCEEDED,
            decision_pb2.OUTCOME_STATE_ROLLED_BACK,
        )
        assert reply.replay_matches
    shown = stack.trimtab("explain", transitions[0].decision_id).stdout
    assert "rule: " in shown
    assert "input: " in shown
    assert "outcome: " in shown


def test_no_request_was_lost_through_all_of_it(stack: Stack, load: Load) -> None:
    records = load.end()
    assert [record for record in records if record.outcome is not Outcome.OK] == []
    assert len(records) >= 3 * 2 * SLICE_S * len(VICTIMS)
    assert stack.misrouted() == 0


def test_ctrl_c_leaves_no_process_behind(stack: Stack) -> None:
    """The last of this file: it ends the stack, each of whose processes was killed and started again."""
    pids = {name: stack.pid(name) for name in (*VICTIMS, "gateway", "fleet")}
    assert None not in pids.values()
    stack.interrupt()
    left = [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]
    assert left == []
    assert stack.process.returncode == 0
