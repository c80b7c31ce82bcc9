"""Two real vLLM servers take turns on one GPU set: a release and a wake with requests in flight, and none is lost.

The actuator, the gateway and the store are the real processes of `trimtab up --targets`; the test stands in for the
policy engine and sends the pool's desired states, so that it decides the moment. On CPU a sleep stops the scheduler and
frees no memory, which changes nothing about requests.
"""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import yaml

from tests.support.stack import CALL_TIMEOUT_S, Stack, eventually, running_stack
from tests.vllm.server import MODEL_NAME, Environment, VllmServer
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SERVICES = {"server-a": "chat", "server-b": "code"}
LONG_TOKENS = 1000
# On a busy machine so many tokens take longer than the gateway holds the receiver's requests (60 s): fewer do then.
LONG_S = 20.0
FEWEST_TOKENS = 100
HELD = 4
HELD_TOKENS = 40
SWITCH_S = 180.0
# Nobody else serves what is under way on the donor, so it cannot go on elsewhere: the release has to wait for it.
DRAIN_S = 90.0


@dataclass
class Answer:
    """What a client got, and when it was whole."""

    tokens: int = 0
    finish_reason: str | None = None
    done: bool = False
    ended_s: float = 0.0
    first: threading.Event = field(default_factory=threading.Event)


@pytest.fixture(scope="module")
def servers(vllm_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    """Both run, awake; they come up one after the other, since each start-up takes a core."""
    running: dict[str, VllmServer] = {}
    try:
        for name in SERVICES:
            running[name] = VllmServer(vllm_environment, folder=tmp_path_factory.mktemp(name))
            running[name].start()
        yield running
    finally:
        for server in running.values():
            server.stop()


@pytest.fixture(scope="module")
def stack(
    servers: dict[str, VllmServer], tmp_path_factory: pytest.TempPathFactory, module_port_base: int
) -> Iterator[Stack]:
    """`trimtab up` over the two servers, without any resource: nobody but the test moves them."""
    folder = tmp_path_factory.mktemp("stack")
    targets = [
        {
            "targets": [servers[name].address],
            "labels": {
                "service": service,
                "role": "colocated",
                "replica": name,
                "node": "node-0",
                "gpu_indices": "0",
                "cluster": "local",
            },
        }
        for name, service in SERVICES.items()
    ]
    (folder / "targets.yaml").write_text(yaml.safe_dump(targets))
    with running_stack(folder, module_port_base, "--targets", str(folder / "targets.yaml")) as up:
        eventually(lambda: "" if set(up.replicas()) == set(SERVICES) else f"{up.replicas()}", 60)
        yield up


def switch_to(stack: Stack, revision: int, awake: str) -> str:
    """The pool's desired state with one of the two awake; returns the operation's id."""
    state = actuator_pb2.PoolState(
        pool="shared",
        state_revision=revision,
        overlay=[
            actuator_pb2.OverlayReplica(
                replica=name,
                service=service,
                role=types_pb2.ROLE_COLOCATED,
                model=MODEL_NAME,
                node="node-0",
                gpu_indices=[0],
            )
            for name, service in SERVICES.items()
        ],
        awake=[awake],
        budget_gpus=1,
        decision_id=f"switch-{revision}",
        drain_timeout_s=DRAIN_S,
        sleep_level=1,
    )
    fencing = types_pb2.Fencing(writer="switch-test", token=1)
    request = actuator_pb2.ApplyPoolStateRequest(state=state, fencing=fencing)
    return stack.actuator.ApplyPoolState(request, timeout=10).operation.operation_id


def stream(stack: Stack, service: str, tokens: int, answer: Answer) -> None:
    """One streamed completion through the gateway."""
    body = {
        "model": service,
        "prompt": f"seven ships of {service}",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        stack.addresses.url("gateway") + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            data = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: "):
                continue
            if data == b"[DONE]":
                answer.done = True
                continue
            event = json.loads(data)
            assert "error" not in event, event
            answer.first.set()
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.ended_s = time.monotonic()


def long_answer(stack: Stack, service: str) -> int:
    """Tokens that the service makes in about LONG_S at its present pace, at most LONG_TOKENS."""
    started_s, answer = time.monotonic(), Answer()
    stream(stack, service, HELD_TOKENS, answer)
    each_s = (time.monotonic() - started_s) / HELD_TOKENS
    return max(FEWEST_TOKENS, min(LONG_TOKENS, int(LONG_S / each_s)))


class Looks:
    """Asks both servers all the time whether they are asleep: when each fell asleep, and whether both were awake."""

    def __init__(self, servers: dict[str, VllmServer]) -> None:
        self._servers = servers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.asleep_s: dict[str, float] = {}
        self.both_awake = 0
        self.rounds = 0

    def __enter__(self) -> "Looks":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _look(self) -> None:
        while not self._over.wait(0.05):
            first, second, again = (self._awake(name) for name in ("server-a", "server-b", "server-a"))
            # The first was awake before and after the second one was asked.
            self.both_awake += first and second and again
            for name, awake in (("server-a", again), ("server-b", second)):
                if not awake:
                    self.asleep_s.setdefault(name, time.monotonic())
            self.rounds += 1

    def _awake(self, name: str) -> bool:
        with urllib.request.urlopen(self._servers[name].url + "/is_sleeping", timeout=30) as reply:
            return not json.load(reply)["is_sleeping"]


def awake_is(stack: Stack, awake: str) -> str:
    found = {name: replica.routable for name, replica in stack.replicas().items()}
    return "" if found == {name: name == awake for name in SERVICES} else f"{found}"


def ended(stack: Stack, operation_id: str) -> str:
    request = actuator_pb2.GetOperationRequest(operation_id=operation_id)
    operation = stack.actuator.GetOperation(request, timeout=CALL_TIMEOUT_S).operation
    return "" if operation.state == actuator_pb2.OPERATION_STATE_SUCCEEDED else str(operation)


def test_bring_up_leaves_one_of_two_real_servers_awake(stack: Stack) -> None:
    switch_to(stack, 1, "server-a")
    eventually(lambda: awake_is(stack, "server-a"), SWITCH_S)
    answer = Answer()
    stream(stack, "chat", 20, answer)
    assert (answer.tokens, answer.finish_reason, answer.done) == (20, "length", True)


@pytest.mark.parametrize(("revision", "donor", "receiver"), [(2, "server-a", "server-b"), (3, "server-b", "server-a")])
def test_a_release_and_a_wake_with_requests_in_flight_lose_none(
    stack: Stack, servers: dict[str, VllmServer], revision: int, donor: str, receiver: str
) -> None:
    """One long answer is under way on the donor, and requests for the receiver wait before it is awake."""
    assert awake_is(stack, donor) == "", "the test before left the donor awake"
    sleeps_before = servers[donor].log().count("POST /sleep")
    tokens = long_answer(stack, SERVICES[donor])
    running, held = Answer(), [Answer() for _ in range(HELD)]
    threads = [threading.Thread(target=stream, args=(stack, SERVICES[donor], tokens, running), daemon=True)]
    threads[0].start()
    assert running.first.wait(60), "the long answer never began"
    with Looks(servers) as looks:
        operation_id = switch_to(stack, revision, receiver)
        for answer in held:
            thread = threading.Thread(target=stream, args=(stack, SERVICES[receiver], HELD_TOKENS, answer), daemon=True)
            thread.start()
            threads.append(thread)
        assert not running.done, "the long answer was over before the release began: give it more tokens"
        eventually(lambda: awake_is(stack, receiver), SWITCH_S)
        for thread in threads:
            thread.join(SWITCH_S)
    assert (running.tokens, running.finish_reason, running.done) == (tokens, "length", True)
    assert [(one.tokens, one.finish_reason, one.done) for one in held] == [(HELD_TOKENS, "length", True)] * HELD
    assert running.ended_s < looks.asleep_s[donor] + 0.5, "it fell asleep only after its answer was whole"
    assert looks.both_awake == 0
    assert looks.rounds > 10
    assert servers[donor].log().count("POST /sleep") == sleeps_before + 1
    eventually(lambda: ended(stack, operation_id), 10)
    print(
        f"\n{donor} → {receiver}: {tokens} tokens under way and {HELD} requests held, none lost; "
        f"asleep {looks.asleep_s[donor] - running.ended_s:.2f} s after the answer's end; {looks.rounds} looks"
    )
