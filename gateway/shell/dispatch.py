"""The router in the event loop: requests that wait for a replica, and those that must leave one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog

from gateway.core.routing import Failure, ReplicaKey, Router, Stage, Ticket, TicketState
from trimtab.domain.endpoint import Endpoint

log = structlog.get_logger(__name__)

DEFAULT_LEASE_S = 3.0
DEFAULT_RENEWAL_S = 0.5
_PUMP_S = 0.1


class NoReplica(Exception):
    """No routable replica came free in time, or too many requests wait already."""


class Mover(Protocol):
    """The owner of tickets, which can move its request to another replica."""

    def move(self, ticket: Ticket) -> None:
        """Leave the ticket's replica if possible; asked again while the ticket stays."""


class Dispatcher:
    """Hands out tickets. Everything runs in one event loop, so a choice and its count cannot be torn apart."""

    def __init__(
        self, router: Router, *, clock: Callable[[], float] = time.monotonic, renewal_s: float = DEFAULT_RENEWAL_S
    ) -> None:
        """`renewal_s` is the pause between two acknowledgements, which renew the lease."""
        self.router = router
        self._renewal_s = renewal_s
        self._clock = clock
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._owners: dict[Ticket, Mover] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._last_turn_s = clock()
        self.lease_s = DEFAULT_LEASE_S
        """The shortest lease that an actuator has named."""
        self.stalls = 0
        """How often this process stood still for so long that its lease may have ended."""

    def on_report(self, listener: Callable[[str], None]) -> None:
        """Call `listener(cluster)` when this gateway has to acknowledge to it at once."""
        self._listeners.append(listener)

    def _report(self, cluster: str) -> None:
        for listener in self._listeners:
            listener(cluster)

    def _notice_stall(self) -> None:
        """A process that was suspended has lost its leases; it asks before it routes on.

        The lease was renewed at the last acknowledgement, not at the moment in which the process stopped.
        """
        stood_still_s = self._clock() - self._last_turn_s
        if stood_still_s < max(self.lease_s - 2 * self._renewal_s, self.lease_s / 3):
            return
        self._last_turn_s = self._clock()
        self.stalls += 1
        log.warning("stood still, the lease may have ended: asking the actuators first", stood_still_s=stood_still_s)
        self.router.distrust()
        for cluster in self.router.clusters:
            self._report(cluster)

    def trust(self, cluster: str) -> None:
        """See `Router.trust`."""
        self.router.trust(cluster)
        self.pump()

    async def acquire(
        self,
        service: str,
        stage: Stage,
        owner: Mover,
        *,
        cluster: str | None = None,
        again: bool = False,
        failed: Iterable[ReplicaKey] = (),
    ) -> Ticket:
        """A ticket on a replica, at once or after a wait; see `Router.submit`. Raises `NoReplica`."""
        self._notice_stall()
        ticket = self.router.submit(service, stage, now_s=self._clock(), cluster=cluster, again=again, failed=failed)
        if ticket.state is TicketState.HELD:
            await self._wait(ticket)
        if ticket.state is TicketState.REFUSED:
            raise NoReplica(f"too many requests wait for a replica of {service}")
        if ticket.state is TicketState.EXPIRED:
            raise NoReplica(f"no replica of {service} was routable for too long")
        self._owners[ticket] = owner
        return ticket

    async def _wait(self, ticket: Ticket) -> None:
        self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[ticket]
        except asyncio.CancelledError:
            self.router.finish(ticket)
            raise
        finally:
            del self._waiting[ticket]

    def release(self, ticket: Ticket) -> None:
        """The request has left its replica. Safe to call twice."""
        self._owners.pop(ticket, None)
        if ticket.state is not TicketState.ASSIGNED or ticket.endpoint is None:
            return
        self.router.finish(ticket)
        key = ticket.endpoint.key
        if self.router.is_hidden(key) and not self.router.in_flight(key):
            self._report(key[0])

    def failed(self, ticket: Ticket, failure: Failure) -> None:
        """The ticket's replica failed it."""
        if ticket.endpoint is not None:
            self.router.failed(ticket.endpoint.key, failure, now_s=self._clock())

    def apply(self, cluster: str, revision: int, services: Iterable[str], endpoints: Sequence[Endpoint]) -> None:
        """Route by a new endpoint set, see `Router.apply`."""
        self.router.apply(cluster, revision, services, endpoints)
        self.pump()

    def pump(self) -> None:
        """Wake whose wait is over and move whose replica is being evicted."""
        self._notice_stall()
        self._last_turn_s = self._clock()
        for ticket in self.router.dispatch(now_s=self._clock()):
            waiter = self._waiting.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        for ticket in list(self.router.evicting()):
            owner = self._owners.get(ticket)
            if owner is not None:
                owner.move(ticket)

    async def run(self) -> None:
        """Pump at an interval, for changes that time alone brings: waits that end, replicas no longer avoided."""
        while True:
            await asyncio.sleep(_PUMP_S)
            self.pump()
