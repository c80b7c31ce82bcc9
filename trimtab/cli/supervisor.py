"""Keeps the processes of the local mode alive, and ends them all.

Each child runs in a session of its own, so that a Ctrl-C in the terminal reaches the supervisor alone, which then stops
the children in reverse order. A child that dies is started again within a second, with a back-off that grows while it
keeps dying. The kernel ends the children when the supervisor itself is killed (PR_SET_PDEATHSIG, Linux).

What a child prints goes to `<log folder>/<name>.log`, bounded by truncation at start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
# A child that lived this long is taken for healthy: its next death starts the back-off anew.
HEALTHY_AFTER_S = 10.0
STOP_TIMEOUT_S = 12.0
READY_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """A child did not come up; the message names it and quotes its last output."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """How to start one process, and the check that it is ready."""

    name: str
    argv: Sequence[str]
    is_ready: Callable[[], Awaitable[bool]]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0
    task: asyncio.Task[None] | None = None


def _die_with_parent() -> None:
    """Runs in the child between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Supervisor:
    """Owns the children of one `trimtab up`. Use `start`, `restarts`, and always `stop`.

    `pause` is waited for, with its seconds, before a child that died is started again.
    """

    def __init__(
        self,
        log_folder: Path,
        *,
        on_event: Callable[[str], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._log_folder = log_folder
        self._on_event = on_event
        self._pause = pause
        self._children: list[_Child] = []
        self._stopping = False

    @property
    def restarts(self) -> dict[str, int]:
        """How often each child was started again."""
        return {child.spec.name: child.restarts for child in self._children}

    def pid(self, name: str) -> int | None:
        """The process id of a running child."""
        for child in self._children:
            if child.spec.name == name and child.process is not None and child.process.returncode is None:
                return child.process.pid
        return None

    async def start(self, specs: Sequence[ChildSpec], *, timeout_s: float) -> None:
        """Starts children together and waits until each is ready. Raises ChildError."""
        started = [_Child(spec) for spec in specs]
        for child in started:
            await self._spawn(child, fresh_log=True)
            self._children.append(child)
        await asyncio.gather(*(self._wait_ready(child, timeout_s) for child in started))
        for child in started:
            child.task = asyncio.create_task(self._keep_alive(child), name=f"supervise {child.spec.name}")

    async def stop(self) -> None:
        """Stops the children in reverse order: SIGTERM, then SIGKILL for what is left of its session."""
        self._stopping = True
        for child in reversed(self._children):
            if child.task is not None:
                child.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await child.task
            await self._end(child)
        self._children.clear()

    def log_path(self, name: str) -> Path:
        """Where a child's output goes."""
        return self._log_folder / f"{name}.log"

    async def _spawn(self, child: _Child, *, fresh_log: bool) -> None:
        with self.log_path(child.spec.name).open("wb" if fresh_log else "ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(child.spec.environ),
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    async def _wait_ready(self, child: _Child, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not await child.spec.is_ready():
            process = child.process
            if process is not None and process.returncode is not None:
                raise ChildError(f"{child.spec.name} ended with status {process.returncode}: {self._last_line(child)}")
            if time.monotonic() > deadline:
                raise ChildError(f"{child.spec.name} was not ready after {timeout_s:.0f} s: {self._last_line(child)}")
            await asyncio.sleep(READY_POLL_S)

    async def _keep_alive(self, child: _Child) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            process = child.process
            if process is None:
                return
            born = time.monotonic()
            status = await process.wait()
            if self._stopping:
                return
            if time.monotonic() - born > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            child.restarts += 1
            what = f"{child.spec.name} {_how_it_ended(status)}"
            self._on_event(f"{what}: started again (restart {child.restarts}; {self.log_path(child.spec.name)})")
            await self._pause(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            await self._spawn(child, fresh_log=False)

    async def _end(self, child: _Child) -> None:
        process = child.process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self._on_event(f"{child.spec.name} did not stop within {STOP_TIMEOUT_S:.0f} s: killed")
        # The session outlives its leader: what the child itself started ends with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def _last_line(self, child: _Child) -> str:
        path = self.log_path(child.spec.name)
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1].strip()} (all of it: {path})" if lines else f"it said nothing ({path})"


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by {_signal_name(-status)} (exit code {status})"
    return f"ended with exit code {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
