"""Follows one cluster's endpoint registry in the store, and writes this gateway's acknowledgement (ack) there.

One exchange does both: the ack is written and the registry's head read in one transaction, at once when there is news
and otherwise at an interval, which is the lease's heartbeat and finds what news was lost. A set is read when the head
is another one than before. Nothing is routed to before the first ack is in the store, so that an actuator that hides a
replica later knows which gateways to wait for.

A store that is away, or holds nothing, leaves the last set in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.shell.metrics import GatewayMetrics
from gateway.shell.routes import ClusterRoutes
from trimtab.api.actuator.v1.registry_pb2 import RegistryHead
from trimtab.errors import StartupError
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import CorruptEntry, StoreUnavailable
from trimtab.store.news import follow_news
from trimtab.store.registry import EndpointRegistry

_WAY = "registry"


class RegistryLink:
    """This gateway's exchanges with the registry of one cluster."""

    def __init__(self, store: Store, routes: ClusterRoutes, metrics: GatewayMetrics, *, acknowledge_s: float) -> None:
        self._store = store
        self._registry = EndpointRegistry(store, routes.cluster)
        self._routes = routes
        self._up = metrics.registry_up.labels(routes.cluster)
        self._failures = metrics.acknowledge_failures.labels(f"{_WAY}/{routes.cluster}")
        self._acknowledge_s = acknowledge_s
        self._schema_checked = False
        self._told: tuple[int, bytes] | None = None
        self._head: RegistryHead | None = None
        self._news = asyncio.Event()
        self._up.set(0)
        routes.join(_WAY, self._news.set)

    def loops(self, stopping: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
        """What has to run until `stopping`."""
        channel = keys.endpoints_written(self._routes.cluster)
        return [
            follow_news(self._store, channel, self._news.set, stopping=stopping),
            self._exchange_until(stopping),
        ]

    async def _exchange_until(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self._news.clear()
            await self._exchange()
            try:
                await asyncio.wait_for(self._news.wait(), self._acknowledge_s)
            except TimeoutError:
                continue

    async def _exchange(self) -> None:
        stalls = self._routes.stalls
        try:
            await self._speak_and_read(stalls)
        except (StoreUnavailable, CorruptEntry, StartupError) as error:
            self._failures.inc()
            self._nobody(str(error), stalls)

    def _nobody(self, why: str, stalls: int) -> None:
        """The registry has no set that can be routed by."""
        self._up.set(0)
        self._routes.quiet(_WAY, why)
        self._routes.warn("the registry cannot be followed", why=why)
        self._routes.unanswered(_WAY, stalls=stalls)

    async def _speak_and_read(self, stalls: int) -> None:
        if not self._schema_checked:
            await self._store.check_schema(upgrade=False)
            self._schema_checked = True
        ack = self._routes.ack()
        told = ack.revision, b"".join(item.SerializeToString(deterministic=True) for item in ack.in_flight)
        heard = await self._registry.speak(ack, is_news=told != self._told)
        self._told = told
        if heard.head is None:
            self._nobody("the store holds no set", stalls)
            return
        # A service that comes or goes without an endpoint changes the head and not the revision.
        if heard.head != self._head or heard.head.revision < (self._routes.revision or 0):
            endpoint_set = await self._registry.read()
            if endpoint_set is not None:
                self._routes.offer(endpoint_set, has_leader=heard.has_leader)
            self._head = heard.head
        self._up.set(1)
        if not heard.has_leader:
            self._routes.quiet(_WAY, "no actuator speaks for the cluster")
        elif heard.head.revision == self._routes.revision:
            self._routes.heard(_WAY)
        if heard.head.revision <= (self._routes.revision or 0):
            self._routes.current(stalls=stalls)
