"""Memory of the GPUs of a node as its DCGM exporter shows it: the measurement that a wake waits for.

A GPU whose memory a page lacks is left out: memory that was not measured does not count as free. Values of a page are
as old as the exporter's own interval, thirty seconds unless ``gpu_exporter_interval_s`` is set otherwise.
"""

import asyncio
from collections.abc import Mapping

import aiohttp
import structlog

from trimtab.domain.dialects.dcgm import GpuMemory, read_gpu_memory

log = structlog.get_logger(__name__)

MAX_PAGE_BYTES = 4 * 2**20
_TIMEOUT_S = 3.0


class GpuExporters:
    """Exporters by node. One that does not answer leaves its node without a measurement."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._failing: dict[str, str] = {}

    async def memory(self, pages: Mapping[str, str]) -> Mapping[tuple[str, int], GpuMemory]:
        """By (node, index); ``pages`` are the URLs by node."""
        nodes = sorted(pages)
        answers = await asyncio.gather(*(self._page(node, pages[node]) for node in nodes))
        return {
            (node, index): memory
            for node, page in zip(nodes, answers, strict=True)
            for index, memory in read_gpu_memory(page).items()
        }

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _page(self, node: str, url: str) -> bytes:
        try:
            page = await self._get(url)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if self._failing.get(node) != str(error):
                log.warning("a GPU exporter does not answer: nothing wakes there", node=node, url=url, error=str(error))
            self._failing[node] = str(error)
            return b""
        self._failing.pop(node, None)
        return page

    async def _get(self, url: str) -> bytes:
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
            return bytes(raw)
