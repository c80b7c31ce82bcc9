"""An HTTP/1.1 client for scraping: one kept connection per target, at most one request in flight on it.

It calls back instead of being awaited: a scrape makes no task and no future, only its request, its answer and what is
done with the page. A connection that the server closed between two requests is opened again at once, and is no
failure; one that breaks inside an answer is. Redirects are not followed.

The filtered page is asked for first; a server that answers 404 to it is asked for the full page from then on, until
it fails otherwise: a restart may bring another release.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from metrics_collector.shell.answer import DownError, Failure, RefusedError, page_body, unpacked
from metrics_collector.shell.connection import Connection, reason
from metrics_collector.shell.request import FILTERED_PATH, LOAD_PATH, METRICS_PATH, Place, RequestHeads

_MAX_LOAD_BYTES = 4096


class Gzip(Enum):
    """When packed pages are asked for. They save network traffic and cost both ends CPU."""

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
        self._connection: Connection | None = None
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
        """Abort whatever is under way; no callback comes."""
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
        connection = Connection(self, rules.max_page_bytes)
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
            self._fail(DownError(reason(error)))
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

    def lost(self, connection: "Connection", error: Failure | None) -> None:
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

    def complete(self, connection: "Connection", body: bytes, *, keep: bool) -> None:
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

    def _load_done(self, body: bytes | None, connection: "Connection | None" = None) -> None:
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
