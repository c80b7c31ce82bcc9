"""`trimtab apply` of a folder that is refused midway: what came before is shown, what was refused is named."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from tests.services.cli.test_errors import POOL
from trimtab.api.policy.v1 import policy_pb2, policy_pb2_grpc
from trimtab.cli import up
from trimtab.cli.connect import open_services
from trimtab.cli.endpoints import Endpoints
from trimtab.cli.main import main

POLICY = """
apiVersion: trimtab.dev/v1
kind: ServicePolicy
metadata: {{name: {name}}}
spec:
  model: m
  slo: {{ttftS: 1, tpotS: 0.1}}
  roles: [{{role: colocated, maxReplicas: 2}}]
  tokenServiceShare: {{thetaTps: 20}}
"""


class Engine(policy_pb2_grpc.PolicyServiceServicer):
    """Stores names, has `old` already, and refuses the resource of one name."""

    def __init__(self) -> None:
        self.refused = ""
        self.stored = ["old"]

    def _judge(self, name: str, *, dry: bool, context: grpc.ServicerContext) -> bool:
        if name == self.refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "does not fit")
        changed = name not in self.stored
        if changed and not dry:
            self.stored.append(name)
        return changed

    def ApplyServicePolicy(
        self, request: policy_pb2.ApplyServicePolicyRequest, context: grpc.ServicerContext
    ) -> policy_pb2.ApplyServicePolicyResponse:
        resource = request.service_policy
        changed = self._judge(resource.metadata.name, dry=request.validate_only, context=context)
        return policy_pb2.ApplyServicePolicyResponse(service_policy=resource, changed=changed)

    def ApplyPool(
        self, request: policy_pb2.ApplyPoolRequest, context: grpc.ServicerContext
    ) -> policy_pb2.ApplyPoolResponse:
        changed = self._judge(request.pool.metadata.name, dry=request.validate_only, context=context)
        return policy_pb2.ApplyPoolResponse(pool=request.pool, changed=changed)


@pytest.fixture
def engine(free_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    made = Engine()  # type: ignore[abstract]  # the calls of `apply` alone
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(made, server)
    server.add_insecure_port(f"127.0.0.1:{free_port}")
    server.start()
    monkeypatch.setenv("TRIMTAB_POLICY_ADDRESS", f"127.0.0.1:{free_port}")
    yield made
    server.stop(None).wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(POOL)
    (tmp_path / "b.yaml").write_text(POLICY.format(name="chat") + "---" + POLICY.format(name="code"))
    (tmp_path / "c.yaml").write_text(POLICY.format(name="old"))
    return tmp_path


def apply(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    return command(monkeypatch, "apply", *argv)


def command(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["trimtab", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


CHAT, CODE, OLD = "ServicePolicy/chat {}applied", "ServicePolicy/code {}applied", "ServicePolicy/old unchanged"


@pytest.mark.parametrize("dry", [True, False], ids=["dry", "stored"])
@pytest.mark.parametrize(
    ("refused", "before", "named"),
    [
        ("chat", [], "b.yaml (document 1): ServicePolicy chat"),
        ("code", [CHAT], "b.yaml (document 2): ServicePolicy code"),
        ("shared", [CHAT, CODE, OLD], "a.yaml: Pool shared"),
    ],
)
def test_what_came_before_is_shown_and_the_refused_one_named_with_its_file(
    engine: Engine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: str,
    before: list[str],
    named: str,
    dry: bool,
) -> None:
    engine.refused = refused
    status = apply(monkeypatch, "-f", str(folder), *(["--dry-run"] if dry else []))
    shown = capsys.readouterr()
    assert status == 1
    assert shown.out.splitlines() == [line.format("would be " if dry else "") for line in before]
    assert shown.err == f"trimtab: {folder}/{named}: invalid argument: does not fit\n"
    applied = [name for name, line in (("chat", CHAT), ("code", CODE)) if line in before]
    assert engine.stored == ["old", *([] if dry else applied)]


def test_json_has_what_came_before_too(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refused = "shared"
    assert apply(monkeypatch, "-f", str(folder), "--json") == 1
    shown = capsys.readouterr()
    found = [(item["metadata"]["name"], item["changed"]) for item in json.loads(shown.out)]
    assert found == [("chat", True), ("code", True), ("old", False)]
    assert "a.yaml: Pool shared: invalid argument" in shown.err


def test_a_folder_without_a_fault_is_applied_whole(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert apply(monkeypatch, "-f", str(folder)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Pool/shared applied"
    assert engine.stored == ["old", "chat", "code", "shared"]


@pytest.mark.parametrize(
    ("refused", "named"),
    [("code", "b.yaml (document 2): ServicePolicy code"), ("shared", "a.yaml: Pool shared")],
)
def test_up_names_the_refused_one_with_its_file_too(
    engine: Engine,
    folder: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refused: str,
    named: str,
) -> None:
    @asynccontextmanager
    async def with_that_engine_alone(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        endpoints = replace(Endpoints.local(free_port), policy=f"127.0.0.1:{free_port}")
        async with open_services(endpoints) as services:
            yield SimpleNamespace(services=services)

    monkeypatch.setattr(up, "running", with_that_engine_alone)
    engine.refused = refused
    assert command(monkeypatch, "up", "--headless", "-f", str(folder)) == 1
    assert capsys.readouterr().err == f"trimtab: {folder}/{named}: invalid argument: does not fit\n"


def test_where_nobody_answers_only_that_is_said(
    folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMTAB_POLICY_ADDRESS", f"127.0.0.1:{free_port}")
    assert apply(monkeypatch, "-f", str(folder)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"trimtab: no connection to 127.0.0.1:{free_port}")
