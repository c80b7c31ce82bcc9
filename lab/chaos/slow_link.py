"""A proxy between a client and a TCP server that delays the client's bytes on request.

What is late is still delivered after the client has hung up, as a slow network would. The server's bytes are not late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 65536


class SlowLink:
    """Listens on a port that the system chooses."""

    def __init__(self, host: str, port: int, *, delay_s: Callable[[], float]) -> None:
        """`delay_s` is called for every piece that the client sends."""
        self._host = host
        self._port = port
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self) -> None:
        """Listen; `address` is host:port from here on."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Close every connection; bytes that are still delayed are lost."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        try:
            with suppress(OSError):
                there, back = await asyncio.open_connection(self._host, self._port)
                try:
                    await self._pass(reader, back, there, writer)
                finally:
                    back.close()
        finally:
            writer.close()

    async def _pass(
        self,
        client: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
    ) -> None:
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        answers = asyncio.create_task(_copy(server, to_client))
        delivery = asyncio.create_task(_deliver(late, to_server))
        reading = asyncio.create_task(self._read(client, late))
        try:
            # The server's end ends it; the client's does when all that it has sent is delivered.
            await asyncio.wait({answers, delivery}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answers, delivery, reading):
                task.cancel()
            await asyncio.gather(answers, delivery, reading, return_exceptions=True)

    async def _read(self, client: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while piece := await client.read(_CHUNK):
                late.put_nowait((loop.time() + self._delay_s(), piece))
        late.put_nowait((loop.time(), b""))


async def _deliver(late: asyncio.Queue[tuple[float, bytes]], to_server: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while True:
            due_s, piece = await late.get()
            if not piece:
                return
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            to_server.write(piece)
            await to_server.drain()


async def _copy(server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
    # A client that has hung up is no reason to stop listening to the server.
    with suppress(OSError):
        while piece := await server.read(_CHUNK):
            with suppress(OSError):
                to_client.write(piece)
                await to_client.drain()
