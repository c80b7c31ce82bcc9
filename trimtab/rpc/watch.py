"""One list-and-watch loop, and its server half.

Server: a ``WatchHub`` sends each reader a snapshot, then every change published since, in order, and a bookmark
whenever nothing else was sent for a while. A reader that falls too far behind is cut off with RESOURCE_EXHAUSTED
and lists again: memory stays bounded, and no reader uses a stale state without knowing it.

Client: ``follow`` reads such a stream without end. It connects again with back-off and jitter, and every connection
starts with a snapshot, so ``apply`` must replace its state when a snapshot comes. Bookmarks distinguish a quiet server
from a dead connection: after ``bookmark_timeout_s`` of silence, ``on_lost`` is called once.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import grpc
import structlog

from trimtab.rpc.errors import ResourceExhausted, describe

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_BOOKMARK_INTERVAL_S = 1.0
DEFAULT_BOOKMARK_TIMEOUT_S = 5.0
DEFAULT_QUEUE_LENGTH = 1024
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class _Reader(Generic[T]):
    """The queue of one reader; ``overflowed`` once it could not take a message."""

    def __init__(self, keep: Callable[[T], bool] | None, queue_length: int) -> None:
        self.keep = keep
        self.queue: asyncio.Queue[T] = asyncio.Queue(queue_length)
        self.overflowed = False


class WatchHub(Generic[T]):
    """Fans messages out to the streams of one watch method.

    ``snapshot`` makes the first messages of a stream and ``bookmark`` the keep-alive; both run in the event loop and
    must not await. Publishing is synchronous too, so that state changed and published in one step is seen by a new
    reader either in its snapshot or as a change, never twice and never not at all.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Iterable[T]],
        bookmark: Callable[[], T],
        stopping: asyncio.Event,
        bookmark_interval_s: float = DEFAULT_BOOKMARK_INTERVAL_S,
        queue_length: int = DEFAULT_QUEUE_LENGTH,
    ) -> None:
        self._snapshot = snapshot
        self._bookmark = bookmark
        self._stopping = stopping
        self._bookmark_interval_s = bookmark_interval_s
        self._queue_length = queue_length
        self._readers: set[_Reader[T]] = set()

    @property
    def readers(self) -> int:
        """How many streams are open."""
        return len(self._readers)

    def publish(self, message: T) -> None:
        """Queue ``message`` for every reader that keeps it; never blocks."""
        for reader in self._readers:
            if reader.overflowed or (reader.keep is not None and not reader.keep(message)):
                continue
            try:
                reader.queue.put_nowait(message)
            except asyncio.QueueFull:
                reader.overflowed = True

    async def watch(
        self,
        *,
        snapshot: Callable[[], Iterable[T]] | None = None,
        keep: Callable[[T], bool] | None = None,
    ) -> AsyncIterator[T]:
        """The stream of one reader: ``async for message in hub.watch(): yield message``.

        ``snapshot`` replaces the hub's for a reader that wants a part only, and ``keep`` filters its changes.
        Ends when the server stops. Raises ``ResourceExhausted`` for a reader that is too slow.
        """
        reader: _Reader[T] = _Reader(keep, self._queue_length)
        first = list((snapshot or self._snapshot)())
        self._readers.add(reader)
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            for message in first:
                yield message
            while not self._stopping.is_set():
                if reader.overflowed:
                    raise ResourceExhausted(
                        "WATCH_TOO_SLOW", f"more than {self._queue_length} changes were waiting; watch again"
                    )
                message_or_none = await self._next(reader, stop)
                if message_or_none is not None:
                    yield message_or_none
                elif not self._stopping.is_set():
                    yield self._bookmark()
        finally:
            self._readers.discard(reader)
            stop.cancel()

    async def _next(self, reader: _Reader[T], stop: "asyncio.Future[Any]") -> T | None:
        """The next change, or None after ``bookmark_interval_s`` or at the stop."""
        with suppress(asyncio.QueueEmpty):
            return reader.queue.get_nowait()
        get = asyncio.ensure_future(reader.queue.get())
        try:
            await asyncio.wait({get, stop}, timeout=self._bookmark_interval_s, return_when=asyncio.FIRST_COMPLETED)
            return get.result() if get.done() else None
        finally:
            get.cancel()


async def follow(
    open_stream: Callable[[], AsyncIterable[R]],
    apply: Callable[[R], None],
    *,
    stopping: asyncio.Event,
    bookmark_timeout_s: float = DEFAULT_BOOKMARK_TIMEOUT_S,
    on_lost: Callable[[], None] | None = None,
    name: str = "watch",
) -> None:
    """Feed ``apply`` with every message of a stream that is opened again and again, until ``stopping``.

    ``on_lost`` is called once when nothing has come for ``bookmark_timeout_s``, be the stream silent, broken or never
    opened; and once more only after a message has come in between. What ``apply`` raises ends the loop: it is a
    defect of the caller, not of the connection.
    """
    silence = _Silence(bookmark_timeout_s, on_lost, name)
    backoff_s = _FIRST_BACKOFF_S
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while not stop.done():
            received = await _read_once(open_stream, apply, silence, stop)
            backoff_s = _FIRST_BACKOFF_S if received else min(_MAX_BACKOFF_S, backoff_s * 2)
            await _pause(backoff_s * random.uniform(0.5, 1.0), silence, stop)
    finally:
        stop.cancel()


class _Silence:
    """How long nothing has come, over any number of connections."""

    def __init__(self, timeout_s: float, on_lost: Callable[[], None] | None, name: str) -> None:
        self.timeout_s = timeout_s
        self.reported = False
        self.name = name
        self._on_lost = on_lost
        self._last = time.monotonic()

    def heard(self) -> None:
        if self.reported:
            log.info("stream is back", stream=self.name)
        self._last = time.monotonic()
        self.reported = False

    def left_s(self) -> float:
        return self.timeout_s - (time.monotonic() - self._last)

    def check(self) -> None:
        """Report a loss, once."""
        if self.reported or self.left_s() > 0:
            return
        self.reported = True
        log.warning("stream is lost", stream=self.name, silent_s=round(time.monotonic() - self._last, 3))
        if self._on_lost is not None:
            self._on_lost()


async def _pause(delay_s: float, silence: _Silence, stop: "asyncio.Future[Any]") -> None:
    """Wait between two connections; a silence that runs out meanwhile is reported on time, not after it."""
    lost_in_s = max(0.0, silence.left_s())
    if not silence.reported and lost_in_s < delay_s:
        await asyncio.wait({stop}, timeout=lost_in_s)
        if stop.done():
            return
        silence.check()
        delay_s -= lost_in_s
    await asyncio.wait({stop}, timeout=delay_s)


async def _read_once(
    open_stream: Callable[[], AsyncIterable[R]],
    apply: Callable[[R], None],
    silence: _Silence,
    stop: "asyncio.Future[Any]",
) -> bool:
    """One connection, from opening to its end; True when at least one message came."""
    received = False
    stream = open_stream()
    try:
        iterator = aiter(stream)
        while not stop.done():
            try:
                message = await _next_message(iterator, stop, silence.timeout_s)
            except (grpc.RpcError, OSError) as error:
                if not stop.done():
                    text = describe(error) if isinstance(error, grpc.RpcError) else str(error)
                    (log.info if received else log.debug)("stream broke", stream=silence.name, error=text)
                break
            if message is _END:
                break
            silence.heard()
            received = True
            apply(cast("R", message))
    finally:
        await _close(stream)
    if not stop.done():
        silence.check()
    return received


_END = object()


async def _next_message(iterator: AsyncIterator[R], stop: "asyncio.Future[Any]", timeout_s: float) -> R | object:
    """The next message, or ``_END`` when the stream ended, was silent for too long, or is to be left."""
    reading = asyncio.ensure_future(anext(iterator, _END))
    try:
        await asyncio.wait({reading, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        # grpc cancels the reader, not us, when the channel is closed under it.
        return reading.result() if reading.done() and not reading.cancelled() else _END
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})


async def _close(stream: object) -> None:
    """Give the stream up: a grpc call is cancelled, an async generator closed."""
    if isinstance(stream, grpc.aio.Call):
        stream.cancel()
    elif isinstance(stream, AsyncGenerator):
        await stream.aclose()
