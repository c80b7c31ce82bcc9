"""Addresses that a process listens on: parsing them, and saying in one line why one cannot be had.

Imports nothing heavy: health checks and the embedded store start with it.
"""

import errno
import ipaddress
import os
import socket

from trimtab.errors import StartupError


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` → (host, port). Raises ``ValueError`` that says what is wrong."""
    if "://" in address:
        raise ValueError(f"{address!r} is a URL; give host:port")
    host, separator, port_text = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: an IPv6 address is written [address]:port")
    if not separator or not host:
        raise ValueError(f"{address!r} is not host:port")
    if not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise ValueError(f"{address!r}: the port is a number from 0 to 65535")
    return host, int(port_text)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bindable(what: str, address: str) -> None:
    """Bind ``address`` once and close the socket. Raises ``StartupError`` with ``describe_bind_error``'s line.

    For servers that tell the reason of a failed bind badly. Blocks for as long as a name takes to resolve.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except socket.gaierror as error:
        raise StartupError(f"cannot listen for {what} on {address}: {error.strerror or error}") from error
    except OSError as error:
        raise StartupError(describe_bind_error(what, address, error)) from error


def describe_bind_error(what: str, address: str, error: OSError) -> str:
    """One line: which listener, which address, why, and what to do."""
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen for {what} on {address}: the port is in use; stop its owner or choose another"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot listen for {what} on {address}: {reason}"
