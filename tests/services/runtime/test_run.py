"""Service processes: exit status, the one line on stderr, signals, ports, health from outside."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from trimtab.config.settings import ServiceSettings
from trimtab.rpc import healthcheck, run
from trimtab.rpc.run import ServiceContext, run_until_stopped
from trimtab.store import keys

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("demo_service.py")
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def ports(free_ports: Callable[[int], list[int]]) -> list[int]:
    return free_ports(2)


@pytest.fixture
def spawn(ports: list[int]) -> Iterator[Spawn]:
    """Start the demo service on ``ports`` (gRPC, metrics); killed at the end if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, **environ: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [
                sys.executable,
                str(PROGRAM),
                f"--listen=127.0.0.1:{ports[0]}",
                f"--metrics-listen=127.0.0.1:{ports[1]}",
                *flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TRIMTAB_DRAIN_GRACE_S": "0.2", **environ},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def ended(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    """(exit status, lines on stderr that are no log)."""
    _, text = process.communicate(timeout=60)
    return process.returncode, [line for line in text.splitlines() if not line.startswith("{")]


def await_health(port: int) -> None:
    give_up = time.monotonic() + 60
    while healthcheck.main([f"127.0.0.1:{port}"], {}) != 0:
        assert time.monotonic() < give_up, "the service did not come up"
        time.sleep(0.05)


def await_metrics(port: int) -> None:
    give_up = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30).close()
        except OSError:
            assert time.monotonic() < give_up, "the service did not come up"
            time.sleep(0.05)
        else:
            return


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_is_asked_for_is_a_success(spawn: Spawn, ports: list[int], number: signal.Signals) -> None:
    process = spawn()
    await_health(ports[0])
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/metrics", timeout=30) as response:
        page = response.read().decode()
    assert "trimtab_build_info{" in page
    assert "trimtab_rpc_server_handled_total{" in page
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/healthz", timeout=30) as response:
        assert response.read() == b"ok\n"
    process.send_signal(number)
    assert ended(process) == (0, [])
    assert healthcheck.main([f"127.0.0.1:{ports[0]}"], {}) == 1


@pytest.mark.parametrize(
    ("flags", "status", "line"),
    [
        (["--mode=startup-error"], 1, "demo: no such thing"),
        (["--mode=grouped-error"], 1, "demo: from a task"),
        (["--mode=dying-loop"], 1, "demo: from a task"),
        (["--mode=return"], 1, "demo: ended without being asked to"),
        (["--mode=nonsense"], 2, "demo: --mode: must be 'serve'"),
        (["--nonsense"], 2, "demo: unknown flag --nonsense"),
        (
            ["--mode=store", "--store-url=redis://u:pw@127.0.0.1:1/0"],
            1,
            "demo: the store does not answer: redis://u:***@",
        ),
        (["--mode=write", "--state-file=/proc/nowhere/state"], 1, "demo: /proc/nowhere/state: No such file"),
        (["--mode=write", "--state-file=/"], 1, "demo: /: Is a directory"),
        (["--tls-cert-file=/no/cert.pem", "--tls-key-file=/no/key.pem"], 1, "demo: TLS file /no/cert.pem"),
    ],
)
def test_an_error_is_one_clear_line(spawn: Spawn, flags: list[str], status: int, line: str) -> None:
    returned, lines = ended(spawn(*flags))
    assert returned == status
    assert len(lines) == 1
    assert lines[0].startswith(line)


def test_a_defect_leaves_its_traceback_in_the_log_and_one_line_for_people(spawn: Spawn) -> None:
    process = spawn("--mode=defect")
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" in text
    assert text.splitlines()[-1] == "demo: failed: KeyError: 'a defect'"


def test_an_old_store_schema_is_refused(spawn: Spawn, store_url: str) -> None:
    client = redis.Redis.from_url(store_url)
    client.set(keys.SCHEMA, "0")
    client.close()
    status, lines = ended(spawn("--mode=store", f"--store-url={store_url}"))
    assert status == 1
    assert len(lines) == 1
    assert "older schema 0" in lines[0]


@pytest.mark.parametrize(("which", "what"), [(0, "gRPC"), (1, "metrics")])
def test_a_busy_port_is_named(
    spawn: Spawn, ports: list[int], free_ports: Callable[[int], list[int]], which: int, what: str
) -> None:
    spawn()
    await_health(ports[0])
    busy = ports[which]
    flags = [f"--listen=127.0.0.1:{busy}"] if which == 0 else [f"--metrics-listen=127.0.0.1:{busy}"]
    other = free_ports(1)[0]
    rest = [f"--metrics-listen=127.0.0.1:{other}"] if which == 0 else [f"--listen=127.0.0.1:{other}"]
    process = subprocess.run(
        [sys.executable, str(PROGRAM), *flags, *rest],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        check=False,
    )
    lines = [line for line in process.stderr.splitlines() if not line.startswith("{")]
    assert process.returncode == 1
    assert lines == [
        f"demo: cannot listen for {what} on 127.0.0.1:{busy}: the port is in use; stop its owner or choose another"
    ]


def test_a_second_signal_stops_a_service_that_is_stuck(spawn: Spawn, ports: list[int]) -> None:
    process = spawn("--mode=stuck", "--drain-grace-s=60")
    await_metrics(ports[1])
    process.send_signal(signal.SIGTERM)
    # Two signals that come before the first is heard are one.
    assert process.stderr is not None
    assert any('"stopping"' in line for line in process.stderr)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 1, "not an orderly stop"


async def test_a_service_that_does_not_stop_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = asyncio.Event()

    async def serve(_settings: ServiceSettings, context: ServiceContext) -> None:
        context.stopping.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    monkeypatch.setattr(run, "_STOP_MARGIN_S", 0.1)
    settings = ServiceSettings(metrics_listen="127.0.0.1:0", drain_grace_s=0.1)
    assert await asyncio.wait_for(run._run("x", settings, serve), 30) == 1
    assert cancelled.is_set()


def test_a_stop_while_it_waits_for_the_store_is_a_success(spawn: Spawn, ports: list[int]) -> None:
    process = spawn("--mode=store", "--store-url=redis://127.0.0.1:1/0", "--store-wait-s=60")
    await_metrics(ports[1])
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, [])


def test_usage_of_the_healthcheck(capsys: pytest.CaptureFixture[str]) -> None:
    assert healthcheck.main([], {}) == 2
    assert healthcheck.main(["nonsense"], {}) == 2
    assert healthcheck.main(["127.0.0.1:1"], {}) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("usage:")
    assert "not host:port" in lines[1]
    assert lines[2].startswith("127.0.0.1:1: unavailable:")


async def test_background_loops_end_with_the_stop() -> None:
    context = ServiceContext("x")
    ended_loops: list[str] = []

    async def loop(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended_loops.append(name)

    asyncio.get_running_loop().call_later(0.05, context.stopping.set)
    await asyncio.wait_for(run_until_stopped(context, loop("a"), loop("b")), 30)
    assert sorted(ended_loops) == ["a", "b"]


async def test_one_failing_loop_ends_the_others_and_is_told() -> None:
    cancelled = asyncio.Event()

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def failing() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("broken loop")

    with pytest.raises(ValueError, match="broken loop"):
        await asyncio.wait_for(run_until_stopped(ServiceContext("x"), other(), failing()), 30)
    assert cancelled.is_set()


async def test_a_loop_that_returns_does_not_stop_the_service() -> None:
    context = ServiceContext("x")

    async def brief() -> None:
        await asyncio.sleep(0)

    running = asyncio.create_task(run_until_stopped(context, brief()))
    await asyncio.sleep(0.05)
    assert not running.done()
    context.stopping.set()
    await asyncio.wait_for(running, 30)


async def test_pause_is_cut_short_by_the_stop() -> None:
    context = ServiceContext("x")
    assert await context.pause(0.01) is False
    asyncio.get_running_loop().call_later(0.02, context.stopping.set)
    assert await asyncio.wait_for(context.pause(60), 30) is True
