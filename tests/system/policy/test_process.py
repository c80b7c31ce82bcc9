"""`python -m policy_engine` as a process: one clear line and a status for what is wrong, a clean end for a signal."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from trimtab.rpc import healthcheck
from trimtab.store import keys


async def run_engine(*flags: str, timeout_s: float = 20) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "policy_engine", *flags, stderr=asyncio.subprocess.PIPE, env=os.environ
    )
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, stderr.decode()


def last_line(stderr: str) -> str:
    return stderr.strip().splitlines()[-1]


@pytest.fixture
def addresses(free_ports, store_url):
    grpc_port, metrics_port = free_ports(2)
    return [
        "--listen",
        f"127.0.0.1:{grpc_port}",
        "--metrics-listen",
        f"127.0.0.1:{metrics_port}",
        "--store-url",
        store_url,
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--actuator", "local=127.0.0.1:7004"], "did you mean --actuators?"),
        (["--actuators", "127.0.0.1:7004"], "not key=value"),
        (["--actuators", "local=nowhere"], "not host:port"),
        (["--tick-interval-s", "0"], "--tick-interval-s"),
    ],
)
async def test_a_wrong_setting_is_one_line_and_status_2(flags, words):
    status, stderr = await run_engine(*flags)
    assert status == 2
    assert len(stderr.strip().splitlines()) == 1
    assert words in stderr


async def test_a_busy_port_is_named(addresses):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, stderr = await run_engine(*addresses[2:], "--listen", f"127.0.0.1:{port}")
    assert status == 1
    assert str(port) in last_line(stderr)


async def test_an_old_store_is_refused(addresses, store):
    await store.redis.set(keys.SCHEMA, "0")
    status, stderr = await run_engine(*addresses)
    assert status == 1
    assert "older schema 0" in last_line(stderr)


async def test_a_bad_bootstrap_file_is_named_with_its_field(addresses, tmp_path: Path):
    (tmp_path / "chat.yaml").write_text(
        "apiVersion: trimtab.dev/v1\nkind: ServicePolicy\nmetadata: {name: chat}\nspec: {modle: x}\n"
    )
    status, stderr = await run_engine(*addresses, "--bootstrap-dir", str(tmp_path))
    assert status == 1
    assert "chat.yaml" in last_line(stderr)
    assert "spec.modle: unknown field" in last_line(stderr)


async def test_it_serves_until_it_is_told_to_stop(addresses):
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "policy_engine", *addresses)
    try:
        serving = ""
        for _ in range(200):
            try:
                serving = await asyncio.to_thread(healthcheck.check, addresses[1], timeout_s=1.0)
                break
            except Exception:
                await asyncio.sleep(0.05)
        assert serving == "SERVING"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
