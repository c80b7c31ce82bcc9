"""Two servers that somebody else started take turns on one GPU, with the files of examples/ as they are."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.stack import CALL_TIMEOUT_S, Stack, eventually, running_stack
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2

EXAMPLES = Path(__file__).parents[3] / "examples"
TOPOLOGY = {
    "apiVersion": "trimtab.dev/v1",
    "kind": "Topology",
    "metadata": {"name": "own"},
    "spec": {"nodes": [{"node": "gpu-a", "s2": "s2-0", "s1": "s1-0", "gpuType": "A100-40GB", "gpus": 1}]},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, module_port_base: int) -> Iterator[dict[str, str]]:
    """Addresses of chat-0, awake, and code-0, asleep, both on GPU 0 of gpu-a."""
    topology = tmp_path_factory.mktemp("servers") / "topology.yaml"
    topology.write_text(yaml.safe_dump(TOPOLOGY))
    admin = module_port_base + 3200
    command = [sys.executable, "-m", "simulator.fleet", "--port", str(admin), "--server-port-base", str(admin + 1),
               "--topology", str(topology), "--bring-up-scale", "0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: "" if _call(f"http://127.0.0.1:{admin}/nodes") else "no nodes", 60)
        code = _start(admin, "code", "Qwen/Qwen2.5-Coder-7B-Instruct", "a100-7b-tp1")
        _call(code + "/sleep?level=1&mode=wait", b"")
        eventually(lambda: "" if _call(code + "/is_sleeping")["is_sleeping"] else "code is awake", 60)
        chat = _start(admin, "chat", "meta-llama/Llama-3.1-8B-Instruct", "a100-8b-tp1")
        yield {"chat": chat, "code": code, "admin": f"http://127.0.0.1:{admin}"}
    finally:
        process.terminate()
        process.wait(20)


def _start(admin: int, service: str, model: str, profile: str) -> str:
    body = {
        "replica": f"server-{service}",
        "service": service,
        "model": model,
        "profile": profile,
        "node": "gpu-a",
        "gpu_indices": [0],
        "labels": {"trimtab.dev/pool": "own"},
    }
    address = str(_call(f"http://127.0.0.1:{admin}/replicas", json.dumps(body).encode())["address"])
    eventually(lambda: "" if _call(address + "/health") is None else "not healthy", 60)
    return address


def _call(url: str, body: bytes | None = None) -> Any:
    """The JSON that `url` answers with, None for an empty answer; a POST when there is a body."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        text = reply.read()
    return json.loads(text) if text else None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, module_port_base: int, servers: dict[str, str]) -> Iterator[Stack]:
    """`trimtab up` with the two example files, only the addresses changed, and loops fast enough for a test."""
    folder = tmp_path_factory.mktemp("given")
    targets = yaml.safe_load((EXAMPLES / "targets.yaml").read_text())
    for group in targets:
        group["targets"] = [servers[group["labels"]["service"]].removeprefix("http://")]
    (folder / "targets.yaml").write_text(yaml.safe_dump(targets))
    resources = list(yaml.safe_load_all((EXAMPLES / "policies.yaml").read_text()))
    for resource in resources:
        if resource["kind"] == "Pool":
            resource["spec"] |= {"rescueIntervalS": 0.5, "rebalanceIntervalS": 1, "residenceS": 0}
    (folder / "policies.yaml").write_text(yaml.safe_dump_all(resources))
    files = ("--targets", str(folder / "targets.yaml"), "-f", str(folder / "policies.yaml"))
    with running_stack(folder, module_port_base, *files) as up:
        yield up


def _awake(stack: Stack) -> dict[str, bool]:
    return {name: replica.routable for name, replica in stack.replicas().items()}


def _ask(stack: Stack, service: str, answers: list[int]) -> None:
    body = json.dumps({"model": service, "prompt": "word " * 20, "max_tokens": 30, "ignore_eos": True}).encode()
    answers.append(_call(stack.addresses.url("gateway") + "/v1/completions", body)["usage"]["completion_tokens"])


def _shared(stack: Stack) -> policy_pb2.PoolStatus:
    pools = stack.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S).pools
    return pools[0] if pools else policy_pb2.PoolStatus(holding="the engine does not know of the pool")


def _decision(stack: Stack, kind: decision_pb2.DecisionKind.ValueType) -> decision_pb2.Decision:
    request = policy_pb2.ListDecisionsRequest(subject="shared", page_size=50)
    reply = stack.policy.ListDecisions(request, timeout=CALL_TIMEOUT_S)
    return next(item for item in reply.decisions if item.kind == kind)


def test_given_servers_are_taken_up_and_hand_their_gpu_over(stack: Stack, servers: dict[str, str]) -> None:
    def not_born() -> str:
        pools = {replica.pool for replica in stack.replicas().values()}
        if pools != {"shared"} or _awake(stack) != {"chat-0": True, "code-0": False}:
            return f"{stack.replicas()} {_shared(stack)}"
        record = _decision(stack, decision_pb2.DECISION_KIND_POOL_BIRTH)
        return "" if record.outcome.state == decision_pb2.OUTCOME_STATE_SUCCEEDED else str(record.outcome)

    eventually(not_born, 60)
    birth = _decision(stack, decision_pb2.DECISION_KIND_POOL_BIRTH)
    assert birth.reason == "shared is born with 1 chat, 0 code awake of 2 replicas"
    explained = stack.policy.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=birth.decision_id))
    assert explained.replay_matches
    assert b"chat-0" in explained.decision.replay

    answers: list[int] = []
    _ask(stack, "chat", answers)
    threads = [threading.Thread(target=_ask, args=(stack, "code", answers), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    eventually(lambda: "" if _awake(stack) == {"chat-0": False, "code-0": True} else f"{_shared(stack)}", 60)
    for thread in threads:
        thread.join(60)
    assert answers == [30] * 9, "every request was answered whole"
    moved = _decision(stack, decision_pb2.DECISION_KIND_TRANSITION)
    assert [change.replica for change in moved.transition.releases] == ["chat-0"]
    assert [change.replica for change in moved.transition.wakes] == ["code-0"]
    stats = _call(servers["admin"] + "/stats")["services"]
    assert sum(service["requests_received_while_asleep"] for service in stats.values()) == 0


def test_a_server_that_nobody_started_is_missed_at_once(stack: Stack) -> None:
    """A pool that names a replica which no target is: the engine says so, and serves on with what it had."""
    member = {"node": "gpu-a", "gpuIndices": [0], "replica": "code-7"}
    resources = list(yaml.safe_load_all((stack.folder / "policies.yaml").read_text()))
    pool = next(item for item in resources if item["kind"] == "Pool")
    pool["spec"]["members"][1]["overlay"] = [member]
    stack.apply(pool)

    def not_told() -> str:
        holding = _shared(stack).holding
        return "" if "code-7" in holding and "overlay[].replica" in holding else f"{_shared(stack)}"

    eventually(not_told, 60)
    assert "code-7" in stack.trimtab("status").stdout.replace("\n", "")
    running = [item for item in stack.transitions() if item.state == actuator_pb2.OPERATION_STATE_RUNNING]
    assert running == []
    assert _awake(stack) == {"chat-0": False, "code-0": True}
    member["replica"] = "code-0"
    stack.apply(pool)
    eventually(lambda: "" if "code-7" not in _shared(stack).holding else f"{_shared(stack)}", 60)
    assert sorted(stack.replicas()) == ["chat-0", "code-0"]
