"""One vLLM server's HTTP surface, as far as the actuator needs it. Bounded in time and size, raises ``VllmError`` only.

What differs between releases (measured, see docs/actuator.md): the sleep routes answer 404 unless the server runs
with ``VLLM_SERVER_DEV_MODE=1``; releases up to 0.25 answer ``/sleep`` with an empty body and check nothing, so a sleep
is confirmed only by ``/is_sleeping``; that is true after ``/pause`` too, which ``engine_sleep_state`` distinguishes;
gauges are frozen while asleep. ``mode`` is a newer parameter of ``/sleep``: a release that does not know it ignores it.
"""

import math
import re

import aiohttp

from actuator.core.waking import LEVEL_WITHOUT_WEIGHTS
from actuator.shell.engine_client import EngineError, Gauges
from trimtab.config.dialects import shipped_dialects
from trimtab.domain.signals import Gauge

MAX_PAGE_BYTES = 4 * 2**20
_READ = frozenset({Gauge.RUNNING, Gauge.WAITING, Gauge.KV_USAGE_RATIO, Gauge.AWAKE})
_GAUGE_OF = {
    name: family.quantity
    for dialect in shipped_dialects()
    if dialect.name.startswith("vllm")
    for family in dialect.families
    if isinstance(family.quantity, Gauge) and family.quantity in _READ
    for name in family.names
}
"""Sample names of vLLM's releases, as the dialects have them, to what they measure."""
_FILTERED = "/metrics/?" + "&".join(f"name[]={name}" for name in _GAUGE_OF)
# OpenMetrics pages have `_` in the place of `:`.
_SPELLINGS = {spelling: gauge for name, gauge in _GAUGE_OF.items() for spelling in (name, name.replace(":", "_"))}
_SAMPLE = re.compile(rf"^({'|'.join(_SPELLINGS)})(?:\{{([^}}]*)\}})?[ \t]+(\S+)", re.MULTILINE)
_LEVELS = {'sleep_state="weights_offloaded"': 1, 'sleep_state="discard_all"': 2}


# Statuses of a server that does not know a route, or a parameter of it.
_UNSUPPORTED = frozenset({400, 404, 405})


class VllmError(EngineError):
    """A call failed. ``status``: the HTTP status, when there was an answer."""

    def __init__(self, message: str, *, refused: bool = False, status: int | None = None) -> None:
        super().__init__(message, refused=refused, answered=status is not None, unsupported=status in _UNSUPPORTED)
        self.status = status


def parse_gauges(page: str) -> Gauges:
    """Running and waiting added over all engines. A value that is no count makes the sum unreadable, not zero."""
    counts: dict[Gauge, float] = {}
    kv_usage: list[float] = []
    awake: bool | None = None
    level: int | None = None
    for name, labels, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        gauge = _SPELLINGS[name]
        if gauge is Gauge.KV_USAGE_RATIO:
            kv_usage.append(value)
        elif gauge is not Gauge.AWAKE:
            counts[gauge] = counts.get(gauge, 0.0) + (value if value >= 0 else math.nan)
        elif 'sleep_state="awake"' in labels:
            awake = bool(awake) or value == 1.0
        elif value == 1.0:
            level = next((number for text, number in _LEVELS.items() if text in labels), level)
    waiting = counts.get(Gauge.WAITING, math.nan)
    known = bool(kv_usage) and all(0.0 <= share <= 1.0 for share in kv_usage)
    return Gauges(
        in_flight=_whole(counts.get(Gauge.RUNNING, math.nan) + waiting),
        memory_in_use=awake,
        waiting=_whole(waiting),
        kv_usage=max(kv_usage) if known else None,
        sleep_level=level,
    )


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None


class VllmClient:
    """The `EngineClient` of vLLM servers."""

    def __init__(self, *, probe_timeout_s: float, canary_timeout_s: float) -> None:
        self._probe_timeout_s = probe_timeout_s
        self._canary_timeout_s = canary_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._unfiltered: set[str] = set()

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def health(self, address: str) -> None:
        """Raises unless /health answers 200."""
        status, _ = await self._call("GET", address, "/health", timeout_s=self._probe_timeout_s)
        if status != 200:
            raise VllmError(f"/health answers {status}", status=status)

    async def is_sleeping(self, address: str) -> bool | None:
        """The answer of /is_sleeping; None when the server has no such route. Raises ``VllmError``."""
        status, page = await self._call("GET", address, "/is_sleeping", timeout_s=self._probe_timeout_s)
        if status == 404:
            return None
        if status != 200:
            raise VllmError(f"/is_sleeping answers {status}", status=status)
        found = re.search(r'"is_sleeping"\s*:\s*(true|false)', page)
        if found is None:
            raise VllmError(f"/is_sleeping answers {page[:80]!r}")
        return found[1] == "true"

    async def gauges(self, address: str) -> Gauges:
        """In-flight count and sleep state; the small filtered page where the server has it. Raises ``VllmError``."""
        if address not in self._unfiltered:
            status, page = await self._call("GET", address, _FILTERED, timeout_s=self._probe_timeout_s)
            gauges = parse_gauges(page) if status == 200 else None
            if gauges is not None and gauges.in_flight is not None:
                return gauges
            if status == 404:
                self._unfiltered.add(address)
        status, page = await self._call("GET", address, "/metrics", timeout_s=self._probe_timeout_s)
        if status != 200:
            raise VllmError(f"/metrics answers {status}", status=status)
        return parse_gauges(page)

    async def sleep(self, address: str, *, level: int, timeout_s: float) -> None:
        """Request sleep; only for a server with nothing in flight.

        ``mode=wait`` lets a request end that came after the count. Releases without a mode abort it, with status 200.
        """
        await self._post(address, f"/sleep?level={level}&mode=wait", timeout_s=timeout_s)

    async def wake_up(self, address: str, *, level: int, timeout_s: float) -> None:
        """Wake the server from sleep of that level; also resumes a pause.

        Level 2 has discarded the weights: their memory comes first, then they are loaded in place, then the KV cache,
        whose blocks were computed with other memory. A call that was cut short may be repeated: until its last part the
        server reports that it sleeps. Requests that other clients sent while it had no weights are computed again, and
        their blocks are dropped: releases from about 0.12 on know `reset_running_requests` and report its success.
        Raises ``VllmError``.
        """
        if level < LEVEL_WITHOUT_WEIGHTS:
            await self._post(address, "/wake_up", timeout_s=timeout_s)
            return
        await self._post(address, "/wake_up?tags=weights", timeout_s=timeout_s)
        await self._post(address, "/collective_rpc", timeout_s=timeout_s, body={"method": "reload_weights"})
        await self._post(address, "/wake_up?tags=kv_cache", timeout_s=timeout_s)
        page = await self._post(address, "/reset_prefix_cache?reset_running_requests=true", timeout_s=timeout_s)
        if re.search(r'"success"\s*:\s*false', page):
            raise VllmError("/reset_prefix_cache did not drop blocks that were computed with other weights")

    async def canary(self, address: str, model: str) -> str:
        """Raises unless a real token comes: /health is 200 also with a wedged engine. Returns the model's name."""
        name = model or await self._served_model(address)
        body = {"model": name, "prompt": "ok", "max_tokens": 1, "temperature": 0}
        status, page = await self._call("POST", address, "/v1/completions", timeout_s=self._canary_timeout_s, body=body)
        if status != 200:
            raise VllmError(f"/v1/completions answers {status}: {page[:200]}", status=status)
        reason = re.search(r'"finish_reason"\s*:\s*"([a-z_]+)"', page)
        tokens = re.search(r'"completion_tokens"\s*:\s*(\d+)', page)
        if reason is None or reason[1] == "abort" or tokens is None or int(tokens[1]) < 1:
            raise VllmError(f"/v1/completions gives no token: {page[:200]}")
        return name

    async def _served_model(self, address: str) -> str:
        status, page = await self._call("GET", address, "/v1/models", timeout_s=self._probe_timeout_s)
        found = re.search(r'"id"\s*:\s*"([^"]+)"', page) if status == 200 else None
        if found is None:
            raise VllmError(f"/v1/models answers {status} and names no model", status=status)
        return found[1]

    async def _post(self, address: str, path: str, *, timeout_s: float, body: dict[str, object] | None = None) -> str:
        status, page = await self._call("POST", address, path, timeout_s=timeout_s, body=body)
        if status == 404:
            raise VllmError(
                f"{path.partition('?')[0]} answers 404: the server cannot sleep; start it with "
                "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode",
                status=404,
            )
        if status != 200:
            raise VllmError(f"{path.partition('?')[0]} answers {status}: {page[:200]}", status=status)
        return page

    async def _call(
        self, method: str, address: str, path: str, *, timeout_s: float, body: dict[str, object] | None = None
    ) -> tuple[int, str]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=8))
        try:
            async with self._session.request(
                method, address + path, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                raw = bytearray()
                async for chunk in response.content.iter_any():
                    raw += chunk
                    if len(raw) > MAX_PAGE_BYTES:
                        raise VllmError(f"{path.partition('?')[0]} answers more than {MAX_PAGE_BYTES} bytes")
                return response.status, raw.decode("utf-8", "replace")
        except TimeoutError as error:
            raise VllmError(f"{path.partition('?')[0]} did not answer within {timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise VllmError(f"cannot connect: {error.os_error}", refused=refused) from error
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise VllmError(f"{path.partition('?')[0]}: {type(error).__name__}: {error}") from error
