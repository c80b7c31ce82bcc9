"""Targets from Prometheus ``http_sd`` servers: one JSON document by URL, read at an interval.

After an answer that cannot be used the targets of the last good one stay, and each reason is logged once: a server that
is away removes no target. Each URL has its own task, so that a slow one delays no other.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import structlog

from metrics_collector.core.targets import HTTP_SD, Target, from_file_sd
from trimtab.config.file_sd import FileSdError, parse_http_sd
from trimtab.errors import StartupError
from trimtab.rpc.run import ServiceContext

log = structlog.get_logger(__name__)

MAX_ANSWER_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 65536
_MAX_TOKEN_BYTES = 65536
_MAX_ERROR_CHARACTERS = 300


class HttpTargets:
    """The targets of several URLs; ``errors``: URL → what is wrong with its newest answer, for those with a fault."""

    def __init__(
        self,
        urls: Sequence[str],
        on_change: Callable[[], None],
        *,
        interval_s: float,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
        ca_file: Path | None = None,
        token_file: Path | None = None,
    ) -> None:
        """Raises ``StartupError`` for a CA file that cannot be used."""
        self._urls = tuple(urls)
        self._on_change = on_change
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._token_file = token_file
        self._targets: dict[str, tuple[Target, ...]] = {}
        self.errors: dict[str, str] = {}
        try:
            self._tls = ssl.create_default_context(cafile=str(ca_file)) if ca_file is not None else None
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"http_sd_ca_file {ca_file}: {error}") from error

    @property
    def targets(self) -> list[Target]:
        """Everything that the last good answer of each URL lists."""
        return [target for url in self._urls for target in self._targets.get(url, ())]

    async def run(self, context: ServiceContext) -> None:
        """Ask every URL, at once and then at every interval, until the service stops."""
        if not self._urls:
            await context.stopping.wait()
            return
        connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=self._timeout) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for url in self._urls:
                tasks.create_task(self._follow(session, url, context))

    async def _follow(self, session: aiohttp.ClientSession, url: str, context: ServiceContext) -> None:
        while True:
            await self.ask(session, url)
            # Collectors that started together need not ask together.
            if await context.pause(self._interval_s * random.uniform(0.9, 1.1)):
                return

    async def ask(self, session: aiohttp.ClientSession, url: str) -> None:
        """Ask one URL once. Raises nothing."""
        try:
            listed = parse_http_sd(await self._fetch(session, url), url=shown(url))
        except FileSdError as error:
            self._refuse(url, str(error))
        except TimeoutError:
            self._refuse(url, f"{shown(url)}: no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self._refuse(url, f"{shown(url)}: {error or type(error).__name__}")
        else:
            if self.errors.pop(url, None) is not None:
                log.info("targets URL answers again", url=shown(url))
            targets = tuple(from_file_sd(one, source=HTTP_SD) for one in listed)
            if targets != self._targets.get(url):
                self._targets[url] = targets
                log.info("targets URL read", url=shown(url), targets=len(targets))
                self._on_change()

    def _refuse(self, url: str, error: str) -> None:
        line = " ".join(error.split())[:_MAX_ERROR_CHARACTERS]
        if self.errors.get(url) != line:
            kept = len(self._targets.get(url, ()))
            log.warning("targets URL refused, the last good answer stays", error=line, targets=kept)
        self.errors[url] = line

    async def _fetch(self, session: aiohttp.ClientSession, url: str) -> bytes:
        headers = {
            "Accept": "application/json",
            "X-Prometheus-Refresh-Interval-Seconds": f"{self._interval_s:g}",
        }
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {_read_token(self._token_file)}"
        async with session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raise FileSdError(f"{shown(url)}: HTTP {response.status}")
            if response.content_type != "application/json":
                raise FileSdError(f"{shown(url)}: content type {response.content_type!r}, must be application/json")
            body = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                body += chunk
                if len(body) > self._max_bytes:
                    raise FileSdError(f"{shown(url)}: more than {self._max_bytes} bytes")
            return bytes(body)


def shown(url: str) -> str:
    """``url`` without what may be secret in it: user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _read_token(path: Path) -> str:
    """Read anew with every request: tokens are rotated. Raises ``FileSdError``."""
    try:
        with path.open("rb") as file:
            token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, ValueError) as error:
        raise FileSdError(f"http_sd_token_file {path}: {error}") from error
    if not token or not token.isprintable():
        raise FileSdError(f"http_sd_token_file {path}: holds no token")
    return token
