"""Fetches one page over HTTP: bounded in time and in bytes, packed and unpacked.

The filtered page, ``/metrics/?name[]=…``, is asked for first; a server that answers 404 to it is asked for the full
``/metrics`` from then on, until it fails otherwise (a restart may bring another release).
"""

import asyncio
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
from yarl import URL

_ACCEPT = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
_HEADERS = {"Accept": _ACCEPT, "Accept-Encoding": "gzip", "User-Agent": "trimtab-metrics-collector"}
_TEXT_TYPES = ("text/plain", "application/openmetrics-text")
_READ_BYTES = 64 * 1024


class DownError(Exception):
    """The target gave no page: it cannot be reached, is too slow, or answers with an error."""


class RefusedError(Exception):
    """The target gave something that is refused unread: too large, cut, or not a metrics page by its type."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page as read, and how long it took."""

    body: bytes
    duration_s: float


class Fetcher:
    """Fetches pages of many targets; remembers which of them have no filtered page."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        sample_names: Sequence[str],
        filter_pages: bool,
        timeout_s: float,
        max_page_bytes: int,
    ) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._max_page_bytes = max_page_bytes
        self._filter_pages = filter_pages
        self._filtered_path = "/metrics/?" + "&".join(f"name[]={quote(name)}" for name in sample_names)
        self._without_filter: set[str] = set()

    async def fetch(self, address: str) -> Page:
        """One page of ``address`` (http://host:port). Raises ``DownError`` and ``RefusedError``."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._either(address)
        except aiohttp.ClientPayloadError as error:
            raise RefusedError(f"the page is cut: {error}") from error
        except TimeoutError:
            self.forget(address)
            raise DownError(f"no page within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.forget(address)
            raise DownError(_reason(error)) from error
        except DownError:
            self.forget(address)
            raise
        return Page(body, time.monotonic() - started)

    def forget(self, address: str) -> None:
        """The server is gone, or was; the next one at this address may have the filtered page."""
        self._without_filter.discard(address)

    async def _either(self, address: str) -> bytes:
        if self._filter_pages and address not in self._without_filter:
            body = await self._get(address, self._filtered_path)
            if body is not None:
                return body
            self._without_filter.add(address)
        body = await self._get(address, "/metrics")
        if body is None:
            raise DownError("/metrics: HTTP 404")
        return body

    async def _get(self, address: str, path: str) -> bytes | None:
        """The page under ``path``; None for 404."""
        async with self._session.get(
            # The query is quoted already, and must stay as it is.
            URL(address + path, encoded=True),
            headers=_HEADERS,
            allow_redirects=False,
        ) as response:
            if response.status == 404:
                return None
            if response.status != 200:
                raise DownError(f"{path.partition('?')[0]}: HTTP {response.status}")
            if response.content_type not in _TEXT_TYPES and "Content-Type" in response.headers:
                raise RefusedError(f"content type {response.content_type[:80]!r} is no metrics page")
            return await self._body(response)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise RefusedError(f"content encoding {encoding[:40]!r} was not asked for")
        parts: list[bytes] = []
        size = 0
        unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        async for chunk in response.content.iter_chunked(_READ_BYTES):
            if unpack is None:
                part = chunk
            else:
                try:
                    part = unpack.decompress(chunk, self._max_page_bytes + 1 - size)
                except zlib.error as error:
                    raise RefusedError(f"the page does not unpack: {error}") from error
            size += len(part)
            if size > self._max_page_bytes:
                raise RefusedError(f"the page has more than {self._max_page_bytes} bytes")
            parts.append(part)
        if unpack is not None and not unpack.eof:
            raise RefusedError("the packed page is cut")
        return b"".join(parts)


def _reason(error: Exception) -> str:
    """One line for people; aiohttp wraps a refused connection in its own words and the call's arguments."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number).lower() if number else str(error.os_error)
    return str(error) or type(error).__name__
