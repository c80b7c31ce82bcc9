"""Servers that somebody else started: some answer, some wrongly, slowly or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

from tests.support.stack import SCENARIO, Stack, eventually, policy_document, running_stack
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2


class _Wrong(BaseHTTPRequestHandler):
    """Answers every path with a page that is no vLLM page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>It works!</html>")

    def log_message(self, *_: object) -> None:
        return


class _Hanging(_Wrong):
    def do_GET(self) -> None:
        time.sleep(30)


class _Failing(_Wrong):
    def do_GET(self) -> None:
        self.send_error(500, "engine dead")


@pytest.fixture(scope="module")
def bad_servers() -> Iterator[dict[str, str]]:
    """Addresses of servers with one fault each, and one where nobody listens."""
    servers = {
        name: ThreadingHTTPServer(("127.0.0.1", 0), handler)
        for name, handler in (("wrong", _Wrong), ("hanging", _Hanging), ("failing", _Failing), ("gone", _Wrong))
    }
    for name, server in servers.items():
        server.daemon_threads = True
        if name == "gone":
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {name: f"127.0.0.1:{server.server_address[1]}" for name, server in servers.items()}
    for name, server in servers.items():
        if name != "gone":
            server.shutdown()
            server.server_close()


@pytest.fixture(scope="module")
def good_server(tmp_path_factory: pytest.TempPathFactory, module_port_base: int) -> Iterator[str]:
    """One simulated vLLM server that no actuator of the stack made."""
    admin = module_port_base + 3200
    command = [sys.executable, "-m", "simulator.fleet", "--port", str(admin), "--server-port-base", str(admin + 1),
               "--topology", str(SCENARIO / "topology.yaml"), "--bring-up-scale", "0"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: "" if _get(f"http://127.0.0.1:{admin}/nodes") else "no nodes", 60)
        body = {"replica": "own-0", "service": "chat", "model": "dsllama-8b", "node": "node-0", "gpu_indices": [0]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{admin}/replicas", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as reply:
            address = str(json.load(reply)["address"])
        eventually(lambda: "" if _status(address + "/health") == 200 else "not healthy", 60)
        yield address.removeprefix("http://")
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, module_port_base: int, good_server: str, bad_servers: dict[str, str]
) -> Iterator[Stack]:
    """`trimtab up --targets` with one good server and four bad ones."""
    folder = tmp_path_factory.mktemp("targets")
    targets = folder / "targets.yaml"
    groups = [{"targets": [good_server], "labels": {"service": "chat", "replica": "chat-0"}}]
    groups += [
        {"targets": [address], "labels": {"service": "code", "replica": f"code-{name}"}}
        for name, address in bad_servers.items()
    ]
    targets.write_text(yaml.safe_dump(groups))
    resources = folder / "resources.yaml"
    resources.write_text(yaml.safe_dump_all([_scaled("chat", "dsllama-8b"), _scaled("code", "dsqwen-7b")]))
    with running_stack(folder, module_port_base, "--targets", str(targets), "-f", str(resources)) as up:
        yield up


def _scaled(name: str, model: str) -> dict[str, Any]:
    document = policy_document(name, model, "", minReplicas=1)
    del document["spec"]["tokenServiceShare"]
    document["spec"]["proportional"] = {"targetPerReplica": 20, "scaleOutCoolingS": 1}
    return document


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return json.load(reply)


def _status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=5) as reply:
        return int(reply.status)


def _states(stack: Stack) -> dict[str, collector_pb2.Target]:
    reply = stack.collector.ListTargets(collector_pb2.ListTargetsRequest(), timeout=5)
    return {target.replica: target for target in reply.targets}


def _service(stack: Stack, name: str) -> policy_pb2.ServiceStatus:
    status = stack.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=5)
    return next(service for service in status.services if service.service == name)


def test_each_bad_server_is_named_with_its_own_reason(stack: Stack) -> None:
    wanted = {
        "chat-0": collector_pb2.TARGET_STATE_UP,
        "code-wrong": collector_pb2.TARGET_STATE_BAD_PAGE,
        "code-hanging": collector_pb2.TARGET_STATE_DOWN,
        "code-failing": collector_pb2.TARGET_STATE_DOWN,
        "code-gone": collector_pb2.TARGET_STATE_DOWN,
    }

    def missing() -> str:
        found = {name: target.state for name, target in _states(stack).items()}
        return "" if found == wanted else f"{found}"

    eventually(missing, 60)
    errors = {name: target.last_error for name, target in _states(stack).items()}
    assert errors["chat-0"] == ""
    assert "500" in errors["code-failing"]
    assert len({errors[name] for name in wanted}) == len(wanted), errors
    bad = sorted(set(wanted) - {"chat-0"})

    def not_shown() -> str:
        shown = stack.trimtab("status").stdout
        return ", ".join(name for name in bad if name not in shown)

    # A server that hangs counts as starting until it has been silent for a few looks.
    eventually(not_shown, 60)
    assert "chat-0 (" not in stack.trimtab("status").stdout


def test_the_good_service_is_decided_for_while_the_other_holds(stack: Stack) -> None:
    gateway = stack.addresses.url("gateway")
    body = json.dumps({"model": "chat", "prompt": "word " * 100, "max_tokens": 400, "ignore_eos": True}).encode()
    ending = threading.Event()

    def load() -> None:
        while not ending.is_set():
            request = urllib.request.Request(gateway + "/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as reply:
                reply.read()

    eventually(lambda: "" if stack.routable("chat") == 1 else "chat is not routable", 60)
    thread = threading.Thread(target=load, daemon=True)
    thread.start()

    def no_scale_out() -> str:
        reply = stack.policy.ListDecisions(policy_pb2.ListDecisionsRequest(subject="chat", page_size=100), timeout=5)
        denied = [item.rule for item in reply.decisions if item.outcome.state == decision_pb2.OUTCOME_STATE_DENIED]
        if decision_pb2.RULE_PROPORTIONAL_OUT in denied:
            return ""
        found = "; ".join(f"{item.reason} → {item.outcome.detail}" for item in reply.decisions)
        return found or "no decision yet"

    try:
        eventually(no_scale_out, 60)
    finally:
        ending.set()
        thread.join(30)
    eventually(lambda: "" if _service(stack, "code").holding else "code does not say that it holds", 60)
    services = {name: _service(stack, name) for name in ("chat", "code")}
    assert services["chat"].roles[0].decode_tps.quality == types_pb2.QUALITY_OK
    assert services["code"].roles[0].decode_tps.quality == types_pb2.QUALITY_MISSING
    assert services["code"].holding == "no replica is ready yet"
    assert stack.pid("fleet") is None, "servers were given, so none is simulated"
