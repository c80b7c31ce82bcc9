"""Where the services of the local mode listen, and where a command finds a service."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT_BASE = 7000
# From Valkey's or the collector's first port to the last simulated server's.
_OFFSETS = {
    "collector": 1,
    "policy": 2,
    "prescheduler": 3,
    "actuator": 4,
    "store": 379,
    "gateway": 1080,
    "fleet": 1090,
    "servers": 1100,
    "collector-metrics": 2001,
    "policy-metrics": 2002,
    "prescheduler-metrics": 2003,
    "actuator-metrics": 2004,
    "gateway-metrics": 2005,
}
SERVER_PORTS = 900
MAX_PORT_BASE = 65_535 - max(_OFFSETS.values())


@dataclass(frozen=True, kw_only=True)
class LocalAddresses:
    """Every address of one local stack; `port_base` moves them all (7000: collector 7001, gateway 8080, …)."""

    port_base: int = DEFAULT_PORT_BASE

    def port(self, name: str) -> int:
        """The port of a part by its name, such as "policy" or "gateway"."""
        return self.port_base + _OFFSETS[name]

    def address(self, name: str) -> str:
        """host:port of a part."""
        return f"127.0.0.1:{self.port(name)}"

    def url(self, name: str) -> str:
        """http://host:port of a part."""
        return f"http://{self.address(name)}"

    @property
    def store_url(self) -> str:
        """The embedded store's URL."""
        return f"redis://{self.address('store')}/0"

    def single_ports(self) -> dict[str, int]:
        """Every port that one part needs for itself, by name; the simulated servers' range is not in it."""
        return {name: self.port(name) for name in _OFFSETS if name != "servers"}
