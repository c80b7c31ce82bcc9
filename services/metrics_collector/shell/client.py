"""An HTTP/1.1 client for scraping: one kept connection per target, at most one request in flight on it.

It calls back instead of being awaited: a scrape makes no task and no future, only its request, its answer and what is
done with the page. A connection that the server closed between two requests is opened again at once, and is no
failure; one that breaks inside an answer is. Redirects are not followed.

The filtered page is asked for first; a server that answers 404 to it is asked for the full page from then on, until
it fails otherwise: a restart may bring another release.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import httptools

from metrics_collector.shell.answer import DownError, RefusedError, page_body, too_large, unpacked
from metrics_collector.shell.request import FILTERED_PATH, LOAD_PATH, METRICS_PATH, Place, RequestHeads

_MAX_HEAD_BYTES = 64 * 1024
# Chunked answers have more bytes than their body: at most this many times as many.
_FRAMING = 4
_MAX_LOAD_BYTES = 4096

Failure = DownError | RefusedError


class Gzip(Enum):
    """When packed pages are asked for. They spare the network and cost both ends CPU."""

    AUTO = "auto"
    """Full pages of other machines."""
    ALWAYS = "always"
    """Full pages."""
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class ClientRules:
    """What holds for every target of a group."""

    heads: RequestHeads
    heads_by_dialect: Mapping[str, RequestHeads] = field(default_factory=dict)
    """Where it is known which engine answers: fewer names to ask for."""
    max_page_bytes: int
    gzip: Gzip = Gzip.AUTO
    tls: ssl.SSLContext | None = None
    tls_server_name: str | None = None


class TargetClient:
    """Fetches from one target. ``answered`` gets each page, ``failed`` one error; one of the two for each ``fetch``."""

    __slots__ = (
        "_answered",
        "_ask",
        "_connecting",
        "_connection",
        "_failed",
        "_heads",
        "_on_load",
        "_place",
        "_reused",
        "_rules",
        "_without_filter",
        "busy",
    )

    def __init__(
        self,
        place: Place,
        rules: ClientRules,
        *,
        answered: Callable[[bytes], None],
        failed: Callable[[Failure], None],
    ) -> None:
        self._place = place
        self._rules = rules
        self._heads = rules.heads
        self._answered = answered
        self._failed = failed
        self._on_load: Callable[[bytes | None], None] | None = None
        self._ask = METRICS_PATH
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reused = False
        self._without_filter = False
        self.busy = False

    def speak(self, dialect: str) -> None:
        """The server's page was of this dialect: ask for its names alone, until it fails."""
        self._heads = self._rules.heads_by_dialect.get(dialect, self._rules.heads)

    def fetch(self) -> None:
        """Ask for the page. Not while ``busy``; no callback comes before this returns."""
        self._ask = METRICS_PATH if self._without_filter or self._heads.filtered is None else FILTERED_PATH
        self._begin()

    def fetch_load(self, on_load: Callable[[bytes | None], None]) -> None:
        """Ask for /load. ``on_load`` gets the answer, None for anything but 200 or when there is none."""
        self._ask = LOAD_PATH
        self._on_load = on_load
        self._begin()

    def expire(self, timeout_s: float) -> None:
        """The time is up: give up the request in flight, and the connection with it."""
        if self.busy:
            self._drop()
            self._fail(DownError(f"no page within {timeout_s:g} s"))

    def close(self) -> None:
        """Give up whatever is under way, without a word to anybody."""
        self.busy = False
        self._drop()

    def _begin(self) -> None:
        self.busy = True
        self._send()

    def _send(self) -> None:
        connection = self._connection
        if connection is None:
            self._reused = False
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._reused = True
            connection.send(self._request())

    def _request(self) -> bytes:
        heads, place = self._heads, self._place
        if self._ask == FILTERED_PATH and heads.filtered is not None:
            return heads.filtered + place.request_end
        if self._ask == LOAD_PATH:
            return heads.load + place.request_end
        gzip = self._rules.gzip
        packed = gzip is Gzip.ALWAYS or (gzip is Gzip.AUTO and not place.loopback)
        return (heads.full_packed if packed else heads.full) + place.request_end

    async def _connect(self) -> None:
        place, rules = self._place, self._rules
        connection = _Connection(self, rules.max_page_bytes)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                place.host,
                place.port,
                ssl=rules.tls if place.tls else None,
                server_hostname=(rules.tls_server_name or place.host) if place.tls else None,
            )
        except (OSError, ValueError) as error:
            self._connecting = None
            self._fail(DownError(_reason(error)))
            return
        self._connecting = None
        if connection.ended:
            self._fail(DownError("it closed the connection unanswered"))
        else:
            self._connection = connection
            connection.send(self._request())

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def lost(self, connection: "_Connection", error: Failure | None) -> None:
        """The connection has ended: between two requests without an ``error``, else inside one."""
        if self._connection is connection:
            self._connection = None
        if not self.busy or error is None:
            return
        if self._reused and connection.silent:
            # The server closed it while the request was on its way: a matter of timing, not of health.
            self._send()
        else:
            self._fail(error)

    def complete(self, connection: "_Connection", body: bytes, *, keep: bool) -> None:
        """An answer is here, whole."""
        if not keep:
            self._connection = None
            connection.abandon()
        status = connection.status
        if self._ask == LOAD_PATH:
            self._load_done(body if status == 200 and len(body) <= _MAX_LOAD_BYTES else None, connection)
            return
        # A server without the filtered page answers 404, or sends on to the full one.
        if self._ask == FILTERED_PATH and (status == 404 or 300 <= status < 400):
            self._without_filter = True
            self._ask = METRICS_PATH
            self._send()
            return
        if status != 200:
            self._fail(DownError(f"{self._ask}: HTTP {status}"))
            return
        try:
            page = page_body(
                body,
                content_type=connection.content_type,
                encoding=connection.encoding,
                max_bytes=self._rules.max_page_bytes,
            )
        except RefusedError as error:
            self._fail(error)
            return
        self.busy = False
        self._answered(page)

    def _load_done(self, body: bytes | None, connection: "_Connection | None" = None) -> None:
        on_load, self._on_load = self._on_load, None
        self.busy = False
        if body is not None and connection is not None:
            try:
                body = unpacked(body, encoding=connection.encoding, max_bytes=_MAX_LOAD_BYTES)
            except RefusedError:
                body = None
        if on_load is not None:
            on_load(body)

    def _fail(self, error: Failure) -> None:
        self.busy = False
        if isinstance(error, DownError):
            self._without_filter = False
            self._heads = self._rules.heads
        if self._ask == LOAD_PATH:
            self._load_done(None)
        else:
            self._failed(error)


class _Connection(asyncio.Protocol):
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

    def __init__(self, owner: TargetClient, max_bytes: int) -> None:
        self._owner: TargetClient | None = owner
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
        """Write the request; the owner hears of its end once."""
        self._reset()
        self._waiting = True
        if self._transport is not None:
            self._transport.write(request)

    def abandon(self) -> None:
        """Close at once; the owner hears nothing more."""
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
            # Nobody asked: whatever this is, the next answer must not begin with it.
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
        if self._size > self._max_bytes or self._received > _FRAMING * self._max_bytes + _MAX_HEAD_BYTES:
            self._end(owner, too_large(self._max_bytes))
        elif self._complete:
            self._finish(owner, keep=self._keep and not self._surplus)
        elif not self._head_done and self._received > _MAX_HEAD_BYTES:
            self._end(owner, RefusedError(f"the answer's head has more than {_MAX_HEAD_BYTES} bytes"))

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
            self._end(owner, DownError(_reason(exc) if exc is not None else "it closed the connection unanswered"))

    def _finish(self, owner: TargetClient, *, keep: bool) -> None:
        self._waiting = False
        parts, self._parts = self._parts, []
        owner.complete(self, parts[0] if len(parts) == 1 else b"".join(parts), keep=keep)

    def _end(self, owner: TargetClient, error: Failure | None) -> None:
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


def _reason(error: Exception) -> str:
    """One line for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, (ssl.SSLError, socket.gaierror)):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
