"""Memory of the GPUs of a node as its DCGM exporter shows it: the measurement that a wake waits for.

Of a page three families are read, in MiB. A GPU without a number for used and free is not there, and one with two
different numbers neither: what was not measured is not free. A series of an instance of a partitioned GPU (MIG) says
nothing of the whole. What a page shows is as old as the exporter's own interval, thirty seconds unless it is told
otherwise (``gpu_exporter_interval_s``).
"""

import asyncio
import math
import re
from collections.abc import Mapping

import aiohttp
import structlog

log = structlog.get_logger(__name__)

MAX_PAGE_BYTES = 4 * 2**20
_TIMEOUT_S = 3.0
_MAX_MIB = 16 * 2**20
_SAMPLE = re.compile(r"^DCGM_FI_DEV_FB_(USED|FREE|RESERVED)\{([^}]*)\}[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(gpu|GPU_I_ID)="([^"]*)"')


def read_memory(page: str) -> Mapping[int, tuple[float, float]]:
    """(used, total) GiB by GPU index."""
    found: dict[tuple[str, int], float] = {}
    for family, labels, text in _SAMPLE.findall(page):
        named = dict(_LABEL.findall(labels))
        index = named.get("gpu", "")
        if named.get("GPU_I_ID") or not re.fullmatch(r"[0-9]{1,4}", index):
            continue
        key = (family, int(index))
        value = _mib(text)
        found[key] = value if found.get(key, value) == value else math.nan
    memory = {}
    for family, index in sorted(found):
        used, free = found[family, index], found.get(("FREE", index), math.nan)
        total = used + free + found.get(("RESERVED", index), 0.0)
        if family == "USED" and math.isfinite(total):
            memory[index] = (used / 1024, total / 1024)
    return memory


def _mib(text: str) -> float:
    """NaN for what is no number, and for the very large one that DCGM writes for a field that it could not read."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0.0 <= value <= _MAX_MIB else math.nan


class GpuExporters:
    """Exporters by node. One that does not answer leaves its node without a measurement."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._failing: dict[str, str] = {}

    async def memory(self, pages: Mapping[str, str]) -> Mapping[tuple[str, int], tuple[float, float]]:
        """(used, total) GiB by (node, index); ``pages`` are the URLs by node."""
        nodes = sorted(pages)
        answers = await asyncio.gather(*(self._page(node, pages[node]) for node in nodes))
        return {
            (node, index): gib
            for node, page in zip(nodes, answers, strict=True)
            for index, gib in read_memory(page).items()
        }

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _page(self, node: str, url: str) -> str:
        try:
            page = await self._get(url)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if self._failing.get(node) != str(error):
                log.warning("a GPU exporter does not answer: nothing wakes there", node=node, url=url, error=str(error))
            self._failing[node] = str(error)
            return ""
        self._failing.pop(node, None)
        return page

    async def _get(self, url: str) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as response:
            raw = bytearray()
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > MAX_PAGE_BYTES:
                    raise ValueError(f"the page is larger than {MAX_PAGE_BYTES} bytes")
            if response.status != 200:
                raise ValueError(f"it answers {response.status}")
            return raw.decode("utf-8", "replace")
