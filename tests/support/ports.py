"""Ports of this test process: ranges that no other test process takes from, below the kernel's ephemeral ports.

A server inside the test process binds port 0 and is asked for its port. These ranges are for child processes, which
need their port as an argument, and for ports on which nobody listens.

Each pytest process claims one block of single ports, and for a local stack a slot of all its ports, by a socket that is
bound to the first port of it and held. The workers of xdist begin with the block of their own number; a block that
another run holds is passed over. Everything stays below 32768, where Linux starts to hand out the ports of outgoing
connections.
"""

import os
import socket
from collections.abc import Iterator

from trimtab.cli.addresses import LocalAddresses

SINGLES = range(18_000, 32_700)
BLOCK_PORTS = 300
STACKS = range(10_000, 18_000)
STACK_SERVERS = 60
"""Simulated servers of one stack for which a slot has ports."""
BESIDE = 3_200
"""How far above the port base ten ports lie for servers that a test starts beside the stack."""


def worker_index() -> int:
    """The number of this xdist worker; 0 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


class PortBlock:
    """A run of ports that this process alone hands out."""

    def __init__(self, guard: socket.socket, first: int, size: int) -> None:
        self._guard = guard
        self._ports = range(first + 1, first + size)
        self._next = 0

    def take(self, count: int = 1) -> list[int]:
        """``count`` ports next to each other on which nobody listens. None comes again before the block is through."""
        for _ in self._ports:
            if self._next + count > len(self._ports):
                self._next = 0
            found = list(self._ports[self._next : self._next + count])
            self._next += count
            if all(is_free(port) for port in found):
                return found
        raise AssertionError(f"no {count} free ports between {self._ports[0]} and {self._ports[-1]}")


def claim_block() -> PortBlock:
    """The block of this worker, or the next that no other process holds."""
    firsts = range(SINGLES.start, SINGLES.stop - BLOCK_PORTS + 1, BLOCK_PORTS)
    first, guard = _claim(list(firsts))
    return PortBlock(guard, first, BLOCK_PORTS)


def claim_stack() -> tuple[int, socket.socket]:
    """The port base of a whole local stack, and the socket that keeps it for this process.

    The stack's ports, those of its servers and the ten at ``BESIDE`` are free.
    """
    return _claim([base for base in _stack_bases() if all(is_free(port) for port in _stack_ports(base))])


def is_free(port: int) -> bool:
    """Whether a server could bind this port of the loopback now; a port whose last connection ended just now is not."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(firsts: list[int]) -> tuple[int, socket.socket]:
    for turn in range(len(firsts)):
        first = firsts[(worker_index() + turn) % len(firsts)]
        guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            guard.bind(("127.0.0.1", first))
        except OSError:
            guard.close()
        else:
            return first, guard
    raise AssertionError("every range of ports is held by another process")


def _stack_bases() -> Iterator[int]:
    """Port bases whose stacks share no port."""
    taken: set[int] = set()
    for base in range(STACKS.start, STACKS.stop - BESIDE - 10, 10):
        ports = _stack_ports(base)
        if taken.isdisjoint(ports):
            taken.update(ports)
            yield base


def _stack_ports(base: int) -> list[int]:
    addresses = LocalAddresses(port_base=base)
    servers = addresses.port("servers")
    return [
        base,
        *addresses.single_ports().values(),
        *range(servers, servers + STACK_SERVERS),
        *range(base + BESIDE, base + BESIDE + 10),
    ]
