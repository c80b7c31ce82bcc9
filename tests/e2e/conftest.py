"""A range of ports for whole stacks."""

from __future__ import annotations

import os
import socket

import pytest

from trimtab.cli.addresses import LocalAddresses


@pytest.fixture(scope="module")
def module_port_base() -> int:
    """A port base whose ports, and those 3,000 further up, are free."""
    first = 20_000 + os.getpid() % 200 * 50
    for base in range(first, first + 8_000, 37):
        if all(_is_free(port) for shift in (0, 3000) for port in _ports(base + shift)):
            return base
    raise AssertionError("no free range of ports")


def _ports(base: int) -> list[int]:
    return list(LocalAddresses(port_base=base).single_ports().values())


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
