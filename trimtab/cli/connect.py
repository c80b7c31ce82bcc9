"""How commands reach the services: stubs, calls, and errors as one line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc

from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.api.policy.v1 import policy_pb2_grpc
from trimtab.api.scheduler.v1 import scheduler_pb2_grpc
from trimtab.cli.endpoints import Endpoints
from trimtab.cli_errors import CommandError
from trimtab.errors import SettingsError, StartupError
from trimtab.rpc import clients
from trimtab.rpc.errors import describe, error_reason

T = TypeVar("T")

PAGE_SIZE = 500
# gRPC's own message about the last address that it tried.
_NO_CONNECTION = re.compile(r"ipv[46]:(?P<address>\S+): (?:.*: )?(?P<cause>[^:]+)$")


class _Page(Protocol):
    """A page of a listing."""

    @property
    def next_page_token(self) -> str:
        """Empty on the last page."""


P = TypeVar("P", bound=_Page)


class Services:
    """Stubs of the four services over lazily opened channels."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._channels: dict[str, grpc.aio.Channel] = {}

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = clients.channel(address, tls=self._endpoints.tls)
        return self._channels[address]

    @property
    def policy(self) -> policy_pb2_grpc.PolicyServiceAsyncStub:
        """The policy engine."""
        return policy_pb2_grpc.PolicyServiceStub(self._channel(self._endpoints.policy))

    @property
    def collector(self) -> collector_pb2_grpc.CollectorServiceAsyncStub:
        """The metrics collector."""
        return collector_pb2_grpc.CollectorServiceStub(self._channel(self._endpoints.collector))

    @property
    def prescheduler(self) -> scheduler_pb2_grpc.PreSchedulerServiceAsyncStub:
        """The pre-scheduler."""
        return scheduler_pb2_grpc.PreSchedulerServiceStub(self._channel(self._endpoints.prescheduler))

    @property
    def actuator(self) -> actuator_pb2_grpc.ActuatorServiceAsyncStub:
        """The actuator of the local cluster."""
        return actuator_pb2_grpc.ActuatorServiceStub(self._channel(self._endpoints.actuator))

    async def close(self) -> None:
        """Closes what was opened."""
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def open_services(endpoints: Endpoints) -> AsyncIterator[Services]:
    """Stubs for the length of a block."""
    services = Services(endpoints)
    try:
        yield services
    finally:
        await services.close()


async def every_item(page: Callable[[str], Awaitable[P]], items: Callable[[P], Iterable[T]]) -> list[T]:
    """All items of a listing: ``page`` asks for the page of a token, ``items`` takes out what it holds."""
    found: list[T] = []
    token = ""
    while True:
        answer = await page(token)
        found += items(answer)
        token = answer.next_page_token
        if not token:
            return found


def call(endpoints: Endpoints, work: Callable[[Services], Awaitable[T]]) -> T:
    """Runs one command's calls. Raises CommandError with one line for whatever goes wrong on the way."""

    async def run() -> T:
        async with open_services(endpoints) as services:
            return await work(services)

    try:
        return asyncio.run(run())
    except grpc.aio.AioRpcError as error:
        raise CommandError(explain(error)) from None
    except (StartupError, SettingsError) as error:
        raise CommandError(str(error)) from None


def explain(error: grpc.aio.AioRpcError) -> str:
    """One line: what a service refused, or that there is none, with how to start one."""
    if error.code() != grpc.StatusCode.UNAVAILABLE or error_reason(error):
        return describe(error)
    text = " ".join((error.details() or "").split())
    found = _NO_CONNECTION.search(text)
    what = f"no connection to {found['address']} ({found['cause']})" if found else f"no answer: {text}"
    return (
        f"{what}: start a stack with `trimtab up`, or say where it is with --port-base, --policy-address and the like"
    )
