"""The supervisor: dead children come back, stopped ones end in reverse order, nothing outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.cli.supervisor import ChildError, ChildSpec, Supervisor

SLEEPER = "import sys, time; open(sys.argv[1], 'a').write('started\\n'); time.sleep(600)"
WAIT_S = 10.0


def spec(name: str, folder: Path, code: str = SLEEPER) -> ChildSpec:
    """A child that notes each start in `<name>.starts`."""
    mark = folder / f"{name}.starts"

    async def is_ready() -> bool:
        return mark.exists()

    return ChildSpec(name=name, argv=[sys.executable, "-c", code, str(mark)], is_ready=is_ready)


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for a condition; fails the test when it does not come."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_killed_child_is_back_within_a_second(tmp_path: Path) -> None:
    """Its end is told at once; what the supervisor itself waits is counted, not how long the machine takes."""
    events: list[str] = []
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    supervisor = Supervisor(tmp_path, on_event=events.append, pause=pause)
    try:
        await supervisor.start([spec("engine", tmp_path)], timeout_s=WAIT_S)
        first = supervisor.pid("engine")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: supervisor.pid("engine") not in (None, first))
        assert 0.0 < sum(pauses) < 1.0
        assert supervisor.restarts == {"engine": 1}
        log = tmp_path / "engine.log"
        assert events == [f"engine was killed by SIGKILL (exit code -9): started again (restart 1; {log})"]
    finally:
        await supervisor.stop()


async def test_a_child_that_ends_is_told_with_its_exit_code(tmp_path: Path) -> None:
    events: list[str] = []
    supervisor = Supervisor(tmp_path, on_event=events.append)
    may_end = tmp_path / "may-end"
    code = (
        "import sys, pathlib, time\n"
        f"mark, may_end = pathlib.Path(sys.argv[1]), pathlib.Path({str(may_end)!r})\n"
        "known = mark.exists()\n"
        "mark.touch()\n"
        "while known or not may_end.exists():\n"
        "    time.sleep(0.02)\n"
        "sys.exit(7)\n"
    )
    try:
        await supervisor.start([spec("engine", tmp_path, code)], timeout_s=WAIT_S)
        may_end.touch()
        await eventually(lambda: bool(events))
        assert events[0].startswith("engine ended with exit code 7: started again (restart 1; ")
    finally:
        await supervisor.stop()


async def test_children_stop_in_reverse_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n"
        f"    open({str(order)!r}, 'a').write(sys.argv[1].rsplit('/', 1)[1] + ' ')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "open(sys.argv[1], 'a').write('started')\n"
        "time.sleep(600)\n"
    )
    supervisor = Supervisor(tmp_path, on_event=lambda _: None)
    await supervisor.start([spec("store", tmp_path, code)], timeout_s=WAIT_S)
    await supervisor.start([spec("engine", tmp_path, code), spec("gateway", tmp_path, code)], timeout_s=WAIT_S)
    await supervisor.stop()
    assert order.read_text().split() == ["gateway.starts", "engine.starts", "store.starts"]


async def test_a_child_that_cannot_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, on_event=lambda _: None)
    try:
        with pytest.raises(ChildError, match="engine ended with status 3: port 7002 is in use"):
            await supervisor.start(
                [spec("engine", tmp_path, "import sys; print('port 7002 is in use'); sys.exit(3)")], timeout_s=WAIT_S
            )
    finally:
        await supervisor.stop()


async def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from trimtab.cli.supervisor import ChildSpec, Supervisor\n"
        "folder = Path(sys.argv[1])\n"
        "async def ready(): return (folder / 'mark').exists()\n"
        "async def main():\n"
        "    supervisor = Supervisor(folder, on_event=print)\n"
        f"    argv = [sys.executable, '-c', {SLEEPER!r}, str(folder / 'mark')]\n"
        "    await supervisor.start([ChildSpec(name='child', argv=argv, is_ready=ready)], timeout_s=10)\n"
        "    (folder / 'pid').write_text(str(supervisor.pid('child')))\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])  # noqa: ASYNC220 - starting is quick
    pid_file = tmp_path / "pid"
    try:
        await eventually(lambda: pid_file.exists() and pid_file.read_text() != "")
    finally:
        parent.kill()
        parent.wait()
    child = int(pid_file.read_text())
    await eventually(lambda: not is_alive(child))
    assert not is_alive(child)
