"""Drives a whole local stack as a user does: the `trimtab` command in a process of its own, and gRPC beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml

from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2, collector_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2, policy_pb2_grpc
from trimtab.api.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from trimtab.cli.addresses import LocalAddresses

SCENARIO = Path(__file__).parent / "scenario"
MODULES = {
    "collector": "metrics_collector",
    "policy": "policy_engine",
    "prescheduler": "prescheduler",
    "actuator": "actuator",
    "gateway": "gateway",
    "fleet": "simulator.fleet",
}
CALL_TIMEOUT_S = 2.0
TRIMTAB = [sys.executable, "-m", "trimtab.cli.main"]


def policy_document(name: str, model: str, profile: str, **bounds: int) -> dict[str, Any]:
    """A pooled service of one-GPU replicas."""
    role = {"role": "colocated", "maxReplicas": 3, "gpusPerReplica": 1, "profile": profile} | bounds
    return {
        "apiVersion": "trimtab.dev/v1",
        "kind": "ServicePolicy",
        "metadata": {"name": name},
        "spec": {
            "model": model,
            "slo": {"ttftS": 2.0, "tpotS": 0.075},
            "roles": [role],
            "tokenServiceShare": {"thetaTps": 1},
        },
    }


def documents(*, chat_floor: int, code_floor: int) -> list[dict[str, Any]]:
    """Two models on a pool of four GPUs, and a disaggregated service of its own."""
    return [
        policy_document("chat", "dsllama-8b", "a100-8b-tp1", minReplicas=chat_floor),
        policy_document("code", "dsqwen-7b", "a100-7b-tp1", minReplicas=code_floor),
        {
            "apiVersion": "trimtab.dev/v1",
            "kind": "ServicePolicy",
            "metadata": {"name": "assist"},
            "spec": {
                "model": "llama-3.1-8b",
                "slo": {"ttftS": 1.0, "tpotS": 0.04},
                "roles": [
                    {"role": "prefill", "minReplicas": 1, "maxReplicas": 1, "profile": "h100-8b-tp1"},
                    {"role": "decode", "minReplicas": 1, "maxReplicas": 2, "profile": "h100-8b-tp1"},
                ],
                "ratio": {"prefill": 1, "decode": 1},
                "proportional": {"targetPerReplica": 1000},
            },
        },
        {
            "apiVersion": "trimtab.dev/v1",
            "kind": "Pool",
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "node-0", "gpuIndices": [0, 1, 2, 3]}],
                "members": [{"service": "chat"}, {"service": "code"}],
                "rescueIntervalS": 1,
                "rebalanceIntervalS": 2,
                "residenceS": 0,
                "drainTimeoutS": 2,
            },
        },
    ]


class Stack:
    """A running `trimtab up`."""

    def __init__(self, process: subprocess.Popen[bytes], addresses: LocalAddresses, folder: Path) -> None:
        self.process = process
        self.addresses = addresses
        self.folder = folder
        self.policy = policy_pb2_grpc.PolicyServiceStub(self._channel("policy"))
        self.collector = collector_pb2_grpc.CollectorServiceStub(self._channel("collector"))
        self.actuator = actuator_pb2_grpc.ActuatorServiceStub(self._channel("actuator"))
        self.prescheduler = scheduler_pb2_grpc.PreSchedulerServiceStub(self._channel("prescheduler"))

    def _channel(self, name: str) -> grpc.Channel:
        options = [("grpc.max_reconnect_backoff_ms", 300), ("grpc.initial_reconnect_backoff_ms", 100)]
        return grpc.insecure_channel(self.addresses.address(name), options=options)

    def trimtab(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """One command against this stack."""
        command = [*TRIMTAB, "--port-base", str(self.addresses.port_base), *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or not check, done.stderr
        return done

    def apply(self, *resources: dict[str, Any]) -> None:
        """`trimtab apply`."""
        path = self.folder / "applied.yaml"
        path.write_text(yaml.safe_dump_all(resources))
        self.trimtab("apply", "-f", str(path))

    def pid(self, name: str) -> int | None:
        """The living process of a part; for the store, the server itself."""
        if name == "store":
            return _find_process(f"127.0.0.1:{self.addresses.port('store')}", f"*:{self.addresses.port('store')}")
        for pid in _children(self.process.pid):
            if f" -m {MODULES[name]} " in _command_line(pid) + " ":
                return pid
        return None

    def kill(self, name: str) -> int:
        """SIGKILL; returns the process id that died."""
        pid = self.pid(name)
        assert pid is not None, f"{name} is not running"
        os.kill(pid, signal.SIGKILL)
        return pid

    def interrupt(self) -> None:
        """Ctrl-C, and its end; nothing for a stack that has ended."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)

    def fleet(self, path: str) -> Any:
        """A page of the fleet's admin API."""
        with urllib.request.urlopen(self.addresses.url("fleet") + path, timeout=5) as reply:
            return json.load(reply)

    def misrouted(self) -> int:
        """Requests that servers received while asleep."""
        return sum(service["requests_received_while_asleep"] for service in self.fleet("/stats")["services"].values())

    def replicas(self) -> dict[str, actuator_pb2.Replica]:
        """What the actuator lists."""
        reply = self.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(), timeout=CALL_TIMEOUT_S)
        return {replica.replica: replica for replica in reply.replicas}

    def routable(self, service: str) -> int:
        """Routable replicas of a service."""
        return sum(replica.routable for replica in self.replicas().values() if replica.service == service)

    def transitions(self) -> list[actuator_pb2.Operation]:
        """Every pool transition that the actuator knows of."""
        reply = self.actuator.ListOperations(actuator_pb2.ListOperationsRequest(page_size=500), timeout=CALL_TIMEOUT_S)
        return [item for item in reply.operations if item.kind == actuator_pb2.OPERATION_KIND_TRANSITION]

    def missing_for_work(self, since_s: float) -> str:
        """What keeps the stack from working on data newer than a moment; empty when nothing does."""
        status = self.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        if not status.leader:
            return "the policy engine has no lease"
        if not all(cluster.reachable for cluster in status.clusters):
            return "the engine does not reach the actuator"
        topology = self.prescheduler.GetTopology(scheduler_pb2.GetTopologyRequest(), timeout=CALL_TIMEOUT_S)
        if topology.as_of.ToNanoseconds() / 1e9 <= since_s:
            return "the pre-scheduler has no cycle since"
        key = collector_pb2.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)
        window = self.collector.GetObservation(
            collector_pb2.GetObservationRequest(key=key), timeout=CALL_TIMEOUT_S
        ).observation
        if window.window_end.ToNanoseconds() / 1e9 <= since_s:
            return "no window since"
        if window.missing_replicas:
            return f"not scraped: {list(window.missing_replicas)}"
        self.actuator.ListNodes(actuator_pb2.ListNodesRequest(), timeout=CALL_TIMEOUT_S)
        return ""


def eventually(missing: Callable[[], str], timeout_s: float) -> float:
    """Waits until nothing is missing; returns how long it took. A call that fails counts as missing."""
    start = time.monotonic()
    said = ""
    while time.monotonic() - start < timeout_s:
        try:
            said = missing()
        except (grpc.RpcError, OSError) as error:
            said = str(error)[:300]
        if not said:
            return time.monotonic() - start
        time.sleep(0.1)
    raise AssertionError(f"after {timeout_s} s: {said}")


@contextmanager
def running_stack(folder: Path, port_base: int, *flags: str) -> Iterator[Stack]:
    """`trimtab up --headless` for the length of a block; ended as by Ctrl-C."""
    command = [
        *TRIMTAB,
        "up",
        "--headless",
        "--port-base",
        str(port_base),
        "--state-dir",
        str(folder / "state"),
        *flags,
    ]
    log = (folder / "up.log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    stack = Stack(process, LocalAddresses(port_base=port_base), folder)
    try:
        eventually(lambda: _not_up(stack), 60)
        yield stack
    finally:
        stack.interrupt()
        log.close()


def _not_up(stack: Stack) -> str:
    said = (stack.folder / "up.log").read_text()
    assert stack.process.poll() is None, said
    return "" if "Ctrl-C stops everything" in " ".join(said.split()) else "it has not said that it is up"


def _children(parent: int) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _stat(int(entry.name))[:2] == [str(parent)]
    ]


def _stat(pid: int) -> list[str]:
    """[parent] of a living process; empty for a zombie or none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else [fields[1]]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _find_process(*marks: str) -> int | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _stat(int(entry.name)):
            line = _command_line(int(entry.name))
            if ("valkey-server" in line or "redis-server" in line) and any(mark in line for mark in marks):
                return int(entry.name)
    return None
