"""Waiting that a stop cuts short, and work that nothing cuts short."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")

_going_on: set["asyncio.Task[Any]"] = set()


async def stopped_within(stopping: asyncio.Event | None, seconds: float) -> bool:
    """Sleep for ``seconds``, at most until ``stopping`` is set; True when it is."""
    if stopping is None:
        await asyncio.sleep(max(0.0, seconds))
        return False
    try:
        await asyncio.wait_for(stopping.wait(), max(0.0, seconds))
    except TimeoutError:
        return False
    return True


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """``await work`` that a cancelled caller leaves behind instead of cutting it in two.

    A handler is cancelled when its client goes or its deadline passes, be it between two writes that belong together
    or after a write and before the process has taken note of it. What ``work`` raises after that is logged.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        _going_on.add(task)
        task.add_done_callback(_note_the_end)
        raise


def _note_the_end(task: "asyncio.Task[Any]") -> None:
    _going_on.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.warning("failed after its caller had gone", error=str(error) or type(error).__name__)
