"""One HTTP/1.1 connection for scraping, and the answer that comes over it, bounded in bytes.

Its owner is called once for every request: at its answer, or at the connection's end.
"""

import asyncio
import os
import socket
import ssl
from typing import Protocol, cast

import httptools

from metrics_collector.shell.answer import DownError, Failure, RefusedError, too_large

MAX_HEAD_BYTES = 64 * 1024
# Chunked answers have more bytes than their body: at most this many times as many.
_FRAMING = 4


class Owner(Protocol):
    """The owner of a connection, which is called back."""

    def complete(self, connection: "Connection", body: bytes, *, keep: bool) -> None:
        """An answer is here, whole; ``keep``: the connection can take another request."""

    def lost(self, connection: "Connection", error: Failure | None) -> None:
        """The connection has ended: between two requests without an ``error``, else inside one."""


class Connection(asyncio.Protocol):
    """One connection and the answer that comes over it."""

    __slots__ = (
        "_complete",
        "_delimited",
        "_head_done",
        "_keep",
        "_max_bytes",
        "_owner",
        "_parser",
        "_parts",
        "_received",
        "_size",
        "_surplus",
        "_transport",
        "_waiting",
        "content_type",
        "encoding",
        "status",
    )

    def __init__(self, owner: Owner, max_bytes: int) -> None:
        self._owner: Owner | None = owner
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.content_type: bytes | None = None
        self.encoding: bytes | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._received = 0
        self._head_done = False
        self._delimited = False
        self._complete = False
        self._keep = False
        self._surplus = False

    @property
    def ended(self) -> bool:
        """Whether it is of no more use."""
        return self._owner is None

    @property
    def silent(self) -> bool:
        """Whether nothing of an answer has come since the request."""
        return self._received == 0

    def send(self, request: bytes) -> None:
        """Write the request; the owner is called back once."""
        self._reset()
        self._waiting = True
        if self._transport is not None:
            self._transport.write(request)

    def abandon(self) -> None:
        """Close at once; no callback comes any more."""
        self._owner = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast("asyncio.Transport", transport)
        if self._owner is None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        owner = self._owner
        if owner is None:
            return
        if not self._waiting:
            # No request is open: the next answer must not begin with these bytes.
            self._end(owner, None)
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._end(owner, DownError(f"no HTTP answer: {error}"))
                return
            self._surplus = True
        if self._size > self._max_bytes or self._received > _FRAMING * self._max_bytes + MAX_HEAD_BYTES:
            self._end(owner, too_large(self._max_bytes))
        elif self._complete:
            self._finish(owner, keep=self._keep and not self._surplus)
        elif not self._head_done and self._received > MAX_HEAD_BYTES:
            self._end(owner, RefusedError(f"the answer's head has more than {MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> None:
        """Called by the loop: where the answer has no length, this is its end."""
        if self._owner is not None and self._waiting and self._head_done and not self._delimited:
            self._finish(self._owner, keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        owner = self._owner
        if owner is None:
            return
        if not self._waiting:
            self._end(owner, None)
        elif self._head_done:
            self._end(owner, RefusedError(f"the page is cut after {self._size} bytes"))
        else:
            self._end(owner, DownError(reason(exc) if exc is not None else "it closed the connection unanswered"))

    def _finish(self, owner: Owner, *, keep: bool) -> None:
        self._waiting = False
        parts, self._parts = self._parts, []
        owner.complete(self, parts[0] if len(parts) == 1 else b"".join(parts), keep=keep)

    def _end(self, owner: Owner, error: Failure | None) -> None:
        self._waiting = False
        self._parts = []
        self.abandon()
        owner.lost(self, error)

    # httptools

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        length = len(name)
        if self._surplus or length < 12 or length > 17:
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.lower()
        elif name == b"content-encoding":
            self.encoding = value
        elif name in (b"content-length", b"transfer-encoding"):
            self._delimited = True

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        if not self._surplus:
            self.status = self._parser.get_status_code()
            self._head_done = True

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        # What exceeds the limit is dropped at once: one read may hold several chunks.
        if not self._surplus:
            self._size += len(body)
            if self._size <= self._max_bytes:
                self._parts.append(body)

    def on_message_complete(self) -> None:
        """Called by the parser, which forgets right after it whether the connection may be kept."""
        if not self._surplus:
            self._complete = True
            self._keep = self._parser.should_keep_alive()


def reason(error: Exception) -> str:
    """One line for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, (ssl.SSLError, socket.gaierror)):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
