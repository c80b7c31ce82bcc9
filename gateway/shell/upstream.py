"""HTTP towards the vLLM servers: connections, and what counts as a server's failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import aiohttp

from gateway.core.openai import JsonObject, encode
from gateway.core.routing import Failure
from trimtab.domain.endpoint import Endpoint

_MAX_ERROR_CHARACTERS = 500
_TOKENIZE_TIMEOUT_S = 2.0
# aiohttp raises OSError too where a connection breaks outside its own wrappers.
TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class UpstreamFailure(Exception):
    """A replica did not answer a request as it should have; another one may be asked.

    `cause` is a metric label: unreachable, error, aborted or cut_off.
    """

    def __init__(self, message: str, *, cause: str, failure: Failure, never_sent: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.failure = failure
        self.never_sent = never_sent
        """No connection came about, so the replica has not seen the request."""

    @classmethod
    def unreachable(cls, endpoint: Endpoint, error: BaseException) -> UpstreamFailure:
        """It refused, reset or let the connection fall silent."""
        text = str(error) or type(error).__name__
        never_sent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        return cls(
            f"{endpoint.replica}: {text}", cause="unreachable", failure=Failure.UNREACHABLE, never_sent=never_sent
        )

    @classmethod
    def error(cls, endpoint: Endpoint, text: str) -> UpstreamFailure:
        """It answered with an error of its own."""
        return cls(f"{endpoint.replica}: {text[:_MAX_ERROR_CHARACTERS]}", cause="error", failure=Failure.ERROR)

    @classmethod
    def aborted(cls, endpoint: Endpoint) -> UpstreamFailure:
        """`finish_reason: abort`: vLLM ended the request, as a sleeping server does, with status 200."""
        return cls(f"{endpoint.replica}: the server aborted the request", cause="aborted", failure=Failure.ERROR)

    @classmethod
    def cut_off(cls, endpoint: Endpoint, text: str) -> UpstreamFailure:
        """The stream ended before its answer did."""
        return cls(f"{endpoint.replica}: {text}", cause="cut_off", failure=Failure.UNREACHABLE)


class Upstream:
    """One client session for all servers. `async with` it."""

    def __init__(self, *, connect_timeout_s: float, idle_timeout_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=idle_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("Upstream is used as a context manager")
        return self._session

    async def post(
        self, endpoint: Endpoint, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The answer's head. Raises `UpstreamFailure` where none comes or its status is 5xx; the caller closes it."""
        try:
            response = await self._open.post(endpoint.address + path, data=body, headers=headers, allow_redirects=False)
        except TRANSPORT_ERRORS as error:
            raise UpstreamFailure.unreachable(endpoint, error) from None
        if response.status < 500:
            return response
        try:
            text = (await response.read()).decode(errors="replace")
        except TRANSPORT_ERRORS as error:
            raise UpstreamFailure.unreachable(endpoint, error) from None
        finally:
            response.close()
        raise UpstreamFailure.error(endpoint, f"HTTP {response.status} {_message_of(text)}".strip())

    async def count_tokens(self, endpoint: Endpoint, text: str, headers: Mapping[str, str]) -> int | None:
        """How many tokens the server makes of `text`; None where it has no /tokenize."""
        body: JsonObject = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
        timeout = aiohttp.ClientTimeout(total=_TOKENIZE_TIMEOUT_S)
        try:
            async with self._open.post(
                endpoint.address + "/tokenize", data=encode(body), headers=headers, timeout=timeout
            ) as response:
                if response.status != 200:
                    return None
                count = json.loads(await response.read()).get("count")
        except (*TRANSPORT_ERRORS, ValueError, AttributeError):
            return None
        return count if isinstance(count, int) and count >= 0 else None


def _message_of(text: str) -> str:
    """The message of an OpenAI-style error, else the text itself."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text
    return str(message)
