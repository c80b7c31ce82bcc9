"""Child of ``bench.scrape``: answers as thousands of vLLM servers would, at next to no cost.

One port, many loopback addresses: each is a server. Answers are made beforehand. ``/served`` counts them by client.
Every ``hang_every``-th address takes requests and never answers.
"""

import argparse
import asyncio
import gc
import json
import resource
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import uvloop

ADDRESSES_PER_BLOCK = 250


def address_of(index: int) -> str:
    """The loopback address of a server."""
    block, last = divmod(index, ADDRESSES_PER_BLOCK)
    first, second = divmod(block, ADDRESSES_PER_BLOCK)
    return f"127.{1 + first}.{second}.{1 + last}"


def index_of(address: str) -> int:
    """The other way round."""
    _, first, second, third = (int(part) for part in address.split("."))
    return ((first - 1) * ADDRESSES_PER_BLOCK + second) * ADDRESSES_PER_BLOCK + third - 1


def response(body: bytes) -> bytes:
    """As uvicorn writes it."""
    head = (
        "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-length: {len(body)}\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n\r\n"
    )
    return head.encode() + body


class Server(asyncio.Protocol):
    """One connection."""

    full = b""
    filtered = b""
    hang_every = 0
    served: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = transport
        index = index_of(transport.get_extra_info("sockname")[0])
        self._hangs = self.hang_every > 0 and index >= 0 and index % self.hang_every == 0

    def data_received(self, data: bytes) -> None:
        """Called by the loop. No client pipelines here: a request ends where the data ends."""
        data = self._rest + data
        if not data.endswith(b"\r\n\r\n"):
            self._rest = data
            return
        self._rest = b""
        if self._hangs:
            return
        if data.startswith(b"GET /served"):
            answer = response(json.dumps(self.served).encode())
        elif data.startswith(b"GET /metrics"):
            self.served["prometheus" if b"Prometheus" in data else "collector"] += 1
            answer = self.filtered if data.startswith(b"GET /metrics/") else self.full
        else:
            answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        self._transport.write(answer)


async def serve(port: int) -> None:
    """Until it is ended."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("0.0.0.0", port))
    server = await asyncio.get_running_loop().create_server(Server, sock=listening, backlog=4096)
    gc.freeze()
    await server.serve_forever()


def main() -> int:
    """Started by ``bench.scrape``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("full", type=Path)
    parser.add_argument("filtered", type=Path)
    parser.add_argument("--hang-every", type=int, default=0)
    arguments = parser.parse_args()
    Server.full = response(arguments.full.read_bytes())
    Server.filtered = response(arguments.filtered.read_bytes())
    Server.hang_every = arguments.hang_every
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
