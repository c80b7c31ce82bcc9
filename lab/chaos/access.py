"""A chaos run's access to the stack: its services, its fleet, and its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.api.policy.v1 import policy_pb2_grpc


class Stubs(Protocol):
    """The services over channels that connect again by themselves."""

    @property
    def policy(self) -> policy_pb2_grpc.PolicyServiceAsyncStub:
        """The policy engine."""

    @property
    def collector(self) -> collector_pb2_grpc.CollectorServiceAsyncStub:
        """The collector."""

    @property
    def actuator(self) -> actuator_pb2_grpc.ActuatorServiceAsyncStub:
        """The actuator."""


class Processes(Protocol):
    """The supervised processes of the stack."""

    def pid(self, name: str) -> int | None:
        """The process id of a part that runs."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """One running stack. `http` has no time-out of its own."""

    stubs: Stubs
    processes: Processes
    http: aiohttp.ClientSession
    fleet_url: str
    gateway_url: str
    gateway_log: Path

    async def fleet(self, path: str, *, timeout_s: float = 5.0) -> Any:
        """A page of the fleet's admin API. Raises aiohttp.ClientError or TimeoutError."""
        async with self.http.get(self.fleet_url + path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def trouble(self, replica: str, fault: str, seconds: float) -> bool:
        """Puts a fault on a server, for a time where it heals; False when no server runs there."""
        body: dict[str, object] = {"fault": fault}
        if seconds > 0:
            body["seconds"] = seconds
        url = f"{self.fleet_url}/replicas/{replica}/fault"
        async with self.http.post(url, json=body, timeout=aiohttp.ClientTimeout(total=5.0)) as reply:
            return reply.status == 200
