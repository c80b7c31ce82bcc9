"""The embedded store as a process: whose id it has, when it ends, what it says when it cannot start."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from trimtab.errors import StartupError
from trimtab.store import embedded
from trimtab.store.embedded import EmbeddedStore

ROOT = Path(__file__).parents[3]
ENVIRON = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def command(port: int, directory: Path) -> list[str]:
    return [sys.executable, "-m", "trimtab.store.embedded", "--port", str(port), "--data-dir", str(directory)]


def await_store(port: int) -> redis.Redis:
    client = redis.Redis(port=port, socket_timeout=2)
    give_up = time.monotonic() + 60
    while True:
        with contextlib.suppress(redis.exceptions.ConnectionError):
            client.ping()
            return client
        assert time.monotonic() < give_up, "the store did not come up"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether the process has ended; a zombie that nobody reaps has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.fixture
def process(free_port: int, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    started = subprocess.Popen(command(free_port, tmp_path / "data"), env=ENVIRON, stdout=subprocess.DEVNULL)
    yield started
    if started.poll() is None:
        started.kill()
    started.wait(10)


def test_becomes_the_server_itself_and_loses_nothing_to_a_kill(
    process: "subprocess.Popen[bytes]", free_port: int, tmp_path: Path
) -> None:
    client = await_store(free_port)
    assert client.info("server")["process_id"] == process.pid
    assert client.config_get("bind") == {b"bind": b"127.0.0.1"} or client.config_get("bind") == {"bind": "127.0.0.1"}
    client.set("k", "v")
    process.kill()
    process.wait(10)
    again = EmbeddedStore(free_port, tmp_path / "data")
    again.start()
    try:
        assert redis.Redis(port=free_port).get("k") == b"v"
    finally:
        again.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_on_a_signal(process: "subprocess.Popen[bytes]", free_port: int, number: signal.Signals) -> None:
    await_store(free_port)
    process.send_signal(number)
    assert process.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_ends_when_its_parent_is_killed(free_port: int, tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *command(free_port, tmp_path / "data")],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    await_store(free_port)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    give_up = time.monotonic() + 30
    while not gone(child):
        assert time.monotonic() < give_up, "the store outlived its parent"
        time.sleep(0.02)


def test_what_hinders_it_is_one_line(own_store: EmbeddedStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for arguments, words in [
        (
            ["--port", str(own_store.port), "--data-dir", str(tmp_path / "new")],
            f"127.0.0.1:{own_store.port}: the port is in",
        ),
        (["--port", "1", "--data-dir", str(file)], "cannot write to the store's directory"),
        (["--port", "1", "--data-dir", "/proc/nowhere"], "cannot write to the store's directory /proc/nowhere"),
    ]:
        ended = subprocess.run(
            [sys.executable, "-m", "trimtab.store.embedded", *arguments],
            env=ENVIRON,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 1
        assert len(ended.stderr.splitlines()) == 1
        assert words in ended.stderr


def test_a_server_that_does_not_start_is_told(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        embedded, "server_command", lambda _port, _directory: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    store = EmbeddedStore(free_port, tmp_path)
    with pytest.raises(StartupError, match=r"did not start; see .*valkey\.log"):
        store.start()
    store.stop()


def test_starting_twice_is_a_mistake(own_store: EmbeddedStore) -> None:
    with pytest.raises(RuntimeError, match="started already"):
        own_store.start()
    own_store.kill()
    own_store.kill()
    with pytest.raises(RuntimeError, match="not running"):
        own_store.suspend()
    own_store.start()
    assert redis.Redis(port=own_store.port).ping()
