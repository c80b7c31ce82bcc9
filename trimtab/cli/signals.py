"""Ctrl-C and SIGTERM as an event, or SIGTERM as an exception, so that a command can put its house in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Generator
from types import FrameType


def stop_on_signals() -> asyncio.Event:
    """An event of the running loop that SIGINT and SIGTERM set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


@contextlib.contextmanager
def ended_by_sigterm() -> Generator[None]:
    """For a command of the main thread: SIGTERM unwinds it as Ctrl-C does, and it ends with status 143.

    Only the first one: `timeout` and others send two, and the second would cut the putting in order short.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)
