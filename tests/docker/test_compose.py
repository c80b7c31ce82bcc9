"""The compose mode on a real Docker engine: healthy, hardened, and its fleet scaled by the control plane."""

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import pytest

from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2, policy_pb2_grpc

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

# conftest's ComposeStack, which importlib mode cannot import from here.
Stack = Any
T = TypeVar("T")

# The disaggregated service of the demo's policies.
SCALED_SERVICE = "assist"
SCALED_MODEL = "llama-3.1-8b"
DECODE = types_pb2.ROLE_DECODE
PROPORTIONAL_OUT = decision_pb2.RULE_PROPORTIONAL_OUT

RPC_TIMEOUT_S = 10.0
SETTLE_TIMEOUT_S = 120.0


def _eventually(look: Callable[[], T], holds: Callable[[T], bool], what: str) -> T:
    """Looks once a second until it holds. Fails with what was seen last."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        seen = look()
        if holds(seen):
            return seen
        assert time.monotonic() < deadline, f"{what}: not within {SETTLE_TIMEOUT_S:g} s, last seen: {str(seen)[:2000]}"
        time.sleep(1.0)


def _get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def _decisions(stack: Stack) -> list[Any]:
    with grpc.insecure_channel(stack.address("policy-engine", 7002)) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        reply = stub.ListDecisions(policy_pb2.ListDecisionsRequest(page_size=500), timeout=RPC_TIMEOUT_S)
    return list(reply.decisions)


def _replicas(stack: Stack) -> dict[str, Any]:
    with grpc.insecure_channel(stack.address("actuator", 7004)) as channel:
        stub = actuator_pb2_grpc.ActuatorServiceStub(channel)
        reply = stub.ListReplicas(actuator_pb2.ListReplicasRequest(page_size=500), timeout=RPC_TIMEOUT_S)
    return {replica.replica: replica for replica in reply.replicas}


def test_every_container_is_healthy(compose_stack: Stack) -> None:
    def health() -> dict[str, str]:
        return {name: item["State"]["Health"]["Status"] for name, item in compose_stack.containers().items()}

    states = _eventually(health, lambda seen: set(seen.values()) == {"healthy"}, "health of every container")
    assert len(states) == 8


def test_containers_run_without_root_and_cannot_write_their_file_system(compose_stack: Stack) -> None:
    for name, container in compose_stack.containers().items():
        assert container["HostConfig"]["ReadonlyRootfs"], name
        assert container["HostConfig"]["CapDrop"] == ["ALL"], name
        assert container["Config"]["User"] not in ("", "root", "0"), name
    for name in ("policy-engine", "fleet"):
        who = compose_stack.compose("exec", "-T", name, "python", "-c", "import os; print(os.getuid())")
        assert who.strip() == "65532"


def test_the_control_plane_brings_the_fleet_into_being(compose_stack: Stack) -> None:
    fleet = compose_stack.address("fleet", 8090)
    listed = _eventually(
        lambda: _get_json(f"http://{fleet}/replicas")["replicas"],
        lambda replicas: any(replica["state"] == "running" for replica in replicas),
        "a running replica in the fleet",
    )
    decisions = _decisions(compose_stack)
    assert decisions
    assert all(decision.reason for decision in decisions)
    routable = _eventually(
        lambda: {name for name, replica in _replicas(compose_stack).items() if replica.routable},
        bool,
        "a routable replica",
    )
    assert routable <= {replica["replica"] for replica in _get_json(f"http://{fleet}/replicas")["replicas"]}
    assert listed


@contextmanager
def _load(gateway: str, model: str, clients: int) -> Iterator[list[str]]:
    """Clients that ask again as soon as they have their answer; yields what went wrong, one text each."""
    stop = threading.Event()
    errors: list[str] = []
    body = json.dumps({"model": model, "prompt": "word " * 200, "max_tokens": 300}).encode()

    def ask() -> None:
        while not stop.is_set():
            request = urllib.request.Request(
                f"http://{gateway}/v1/completions", body, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = json.load(response)
                if answer["usage"]["completion_tokens"] != 300:
                    errors.append(f"short answer: {answer['usage']}")
            except OSError as error:
                errors.append(str(error))
                stop.wait(1.0)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_load_on_a_service_makes_the_control_plane_add_replicas(compose_stack: Stack) -> None:
    def decode_replicas() -> set[str]:
        replicas = _replicas(compose_stack).values()
        return {r.replica for r in replicas if r.routable and r.service == SCALED_SERVICE and r.role == DECODE}

    before = _eventually(decode_replicas, bool, f"a routable decode replica of {SCALED_SERVICE}")
    with _load(compose_stack.address("gateway", 8080), SCALED_MODEL, clients=12) as errors:
        after = _eventually(decode_replicas, lambda seen: len(seen) > len(before), "more decode replicas")
    assert errors == []
    assert before < after

    scaled_out = [d for d in _decisions(compose_stack) if d.subject == SCALED_SERVICE and d.rule == PROPORTIONAL_OUT]
    assert scaled_out
    assert scaled_out[-1].inputs
    in_fleet = _get_json(f"http://{compose_stack.address('fleet', 8090)}/replicas")["replicas"]
    assert after <= {replica["replica"] for replica in in_fleet}


# Kills the service's process, not the container, so that the restart policy and not a person brings it back.
KILL_SERVICE = r"""
import os, pathlib, signal
for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdigit() and b"-m\0actuator\0" in (folder / "cmdline").read_bytes() and folder.name != "1":
        os.kill(int(folder.name), signal.SIGKILL)
"""


def _pooled(stack: Stack) -> set[str]:
    """The pool's replicas; the scaled service may grow or shrink at any moment."""
    return {name for name, replica in _replicas(stack).items() if replica.service != SCALED_SERVICE}


def test_a_killed_actuator_is_restarted_and_knows_its_replicas(compose_stack: Stack) -> None:
    before = _pooled(compose_stack)
    assert before
    compose_stack.compose("exec", "-T", "actuator", "python", "-c", KILL_SERVICE)

    def read() -> set[str]:
        try:
            return _pooled(compose_stack)
        except (grpc.RpcError, AssertionError):
            # Not up again, or its port is not.
            return set()

    _eventually(lambda: compose_stack.containers()["actuator"]["RestartCount"], bool, "a restart of the actuator")
    after = _eventually(read, bool, "replicas after the restart")
    assert after == before
    scaled = {replica.role for replica in _replicas(compose_stack).values() if replica.service == SCALED_SERVICE}
    assert len(scaled) == 2, "both stages of the scaled service"


def test_prometheus_scrapes_every_service(compose_stack: Stack) -> None:
    prometheus = compose_stack.address("prometheus", 9090)
    query = f"http://{prometheus}/api/v1/query?query=up%7Bjob%3D%22trimtab%22%7D"
    result = _eventually(
        lambda: _get_json(query)["data"]["result"],
        lambda series: len(series) == 5 and all(item["value"][1] == "1" for item in series),
        "every target up",
    )
    assert {item["metric"]["app"] for item in result} >= {
        "metrics-collector",
        "policy-engine",
        "prescheduler",
        "actuator",
        "gateway",
    }
    # What Trimtab calls a service keeps its label beside the process's own.
    replicas = f"http://{prometheus}/api/v1/query?query=trimtab_role_replicas"
    seen = _eventually(lambda: _get_json(replicas)["data"]["result"], bool, "the collector's series")
    assert SCALED_SERVICE in {item["metric"]["service"] for item in seen}


def test_decisions_outlive_a_restart_of_the_store(compose_stack: Stack) -> None:
    before = {decision.decision_id for decision in _eventually(lambda: _decisions(compose_stack), bool, "a decision")}
    names = _pooled(compose_stack)
    # The engine too, so that what it lists is what the store kept.
    compose_stack.compose("restart", "--timeout", "5", "redis", "policy-engine")

    def read() -> set[str]:
        try:
            return {decision.decision_id for decision in _decisions(compose_stack)}
        except (grpc.RpcError, AssertionError):
            return set()

    after = _eventually(read, bool, "decisions after the restart")
    assert before <= after
    assert _pooled(compose_stack) == names


def test_prometheus_accepts_its_configuration_and_the_alerts_pass_their_tests(promtool: Stack) -> None:
    deploy = f"{promtool.repository}/deploy/prometheus"
    tests = f"{promtool.repository}/tests/docker/alerts.test.yml"
    run = ["run", "--rm", "--network", "none", "-v", f"{deploy}:/etc/prometheus:ro", "--entrypoint", "promtool"]
    checked = promtool.docker(*run, promtool.prometheus_image, "check", "config", "/etc/prometheus/prometheus.yml")
    assert "SUCCESS" in checked
    mounted = [*run[:-2], "-v", f"{tests}:/etc/alerts.test.yml:ro", *run[-2:]]
    tested = promtool.docker(*mounted, promtool.prometheus_image, "test", "rules", "/etc/alerts.test.yml")
    assert "SUCCESS" in tested
