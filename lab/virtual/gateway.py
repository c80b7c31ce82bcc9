"""The gateway on virtual time: the routing core of the real one, in front of simulated engines.

A request goes to the least loaded routable replica, waits where there is none, and is continued once on another one
when its replica is being evicted: what it had generated is part of the new prompt. Limits: colocated services; clients
wait as long as it takes, and none goes away.
"""

from __future__ import annotations

import array
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gateway.core.routing import InFlight, Router, RoutingLimits, Stage, Ticket, TicketState
from lab.virtual.result import RequestColumns
from lab.virtual.servers import VirtualServer, VirtualServers
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.traces.model import TraceRequest
from trimtab.domain.endpoint import Endpoint

CLUSTER = "local"
_PATIENT = RoutingLimits(max_held_per_service=10_000_000, max_hold_s=math.inf)


class Demand(NamedTuple):
    """The arrivals of a service since the last call, and the requests that wait without a replica now."""

    service: str
    arrivals: int
    prompt_tokens: int
    output_tokens: int
    held: int


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """A request under way. `sent` tokens have come from replicas that it has left."""

    row: int
    request: TraceRequest
    ticket: Ticket
    sent: int = 0
    first_token_s: float = math.nan
    reissued: int = 0


class VirtualGateway:
    """Every client request of a run. `servers` must call `finished` for what ends in an engine."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = tuple(sorted(services))
        self._position = {name: number for number, name in enumerate(self._services)}
        self._router = Router(_PATIENT, services=self._services)
        self._servers: VirtualServers | None = None
        self._open: dict[str, OpenRequest] = {}
        self._held: dict[Ticket, OpenRequest] = {}
        self._arrived: dict[str, list[int]] = {name: [0, 0, 0] for name in self._services}
        self._times = array.array("d")
        self._counts = array.array("q")
        self._lost: list[int] = []
        self.revision = 0

    def connect(self, servers: VirtualServers) -> None:
        """Where requests are sent."""
        self._servers = servers

    @property
    def servers(self) -> VirtualServers:
        """The servers. Raises RuntimeError before `connect`."""
        if self._servers is None:
            raise RuntimeError("the gateway is not connected to servers")
        return self._servers

    @property
    def open_requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open) + len(self._held)

    def submit(self, request: TraceRequest, now_s: float) -> None:
        """One request arrives. Raises ValueError for a service that was not named."""
        position = self._position.get(request.service)
        if position is None:
            raise ValueError(f"request at {now_s:.3f} s is for {request.service}, which this pool does not have")
        row = len(self._counts) // 4
        self._times.extend((request.arrival_s, math.nan, math.nan))
        self._counts.extend((position, request.prompt_tokens, request.output_tokens, 0))
        tally = self._arrived[request.service]
        tally[0] += 1
        tally[1] += request.prompt_tokens
        tally[2] += request.output_tokens
        ticket = self._router.submit(request.service, Stage.FRONT, now_s=now_s)
        self._send(OpenRequest(row, request, ticket), now_s)

    def apply(self, revision: int, endpoints: Iterable[Endpoint], now_s: float) -> None:
        """Route by a new set: what waits is sent, what is evicted moves on."""
        self._router.apply(CLUSTER, revision, self._services, list(endpoints))
        self.revision = revision
        for ticket in self._router.dispatch(now_s=now_s):
            self._send(self._held.pop(ticket), now_s)
        self.move_evicted(now_s)

    def move_evicted(self, now_s: float) -> None:
        """Continue elsewhere what can be."""
        moving = {id(ticket) for ticket in self._router.evicting()}
        if not moving:
            return
        for name, item in [pair for pair in self._open.items() if id(pair[1].ticket) in moving]:
            if item.reissued:
                item.ticket.movable = False
                continue
            self._move(name, item, now_s)

    def finished(self, finished: FinishedRequest) -> bool:
        """An engine ended a request; True when that was the last one on a hidden replica."""
        item = self._open.pop(finished.request.request_id)
        self._take_first_token(item, finished)
        self._router.finish(item.ticket)
        self._times[3 * item.row + 1] = item.first_token_s
        self._times[3 * item.row + 2] = finished.finished_s
        self._counts[4 * item.row + 3] = item.reissued
        key = item.ticket.target.key
        return self._router.is_hidden(key) and not self._router.in_flight(key)

    def cut_off(self, replica: str, now_s: float) -> int:
        """A replica goes with requests on it: they are lost. How many there were."""
        server = self.servers.by_name[replica]
        engine = self.servers.clock.at(server.index, now_s)
        ended = engine.abort_all(now_s)
        self.servers.clock.touched(server.index)
        for one in ended:
            server.recorder.finished(one)
            item = self._open.pop(one.request.request_id)
            self._take_first_token(item, one)
            self._router.finish(item.ticket)
            self._record_lost(item)
        return len(ended)

    def left_behind(self) -> list[InFlight]:
        """Requests on replicas that are hidden, and pinned ones."""
        return self._router.left_behind(CLUSTER)

    def held(self, service: str) -> int:
        """Requests of a service that wait for a replica."""
        return self._router.held(service)

    def demand(self) -> list[Demand]:
        """Arrivals of every service since the last call, and what is held now, by service."""
        found = []
        for service in self._services:
            arrivals, prompt, output = self._arrived[service]
            found.append(Demand(service, arrivals, prompt, output, self._router.held(service)))
            self._arrived[service] = [0, 0, 0]
        return found

    def columns(self) -> RequestColumns:
        """Every request so far. What is not answered has no times; lost is what its replica took with it."""
        times = np.array(self._times, dtype=np.float64).reshape(-1, 3)
        counts = np.array(self._counts, dtype=np.int64).reshape(-1, 4)
        for item in self._open.values():
            times[item.row, 1] = item.first_token_s
        lost = np.zeros(len(times), dtype=np.bool_)
        lost[self._lost] = True
        return RequestColumns(
            services=self._services,
            service=counts[:, 0],
            arrival_s=times[:, 0],
            first_token_s=times[:, 1],
            finished_s=times[:, 2],
            prompt_tokens=counts[:, 1],
            output_tokens=counts[:, 2],
            lost=lost,
            reissued=counts[:, 3],
        )

    def _send(self, item: OpenRequest, now_s: float) -> None:
        ticket = item.ticket
        if ticket.state is TicketState.HELD:
            self._held[ticket] = item
            return
        name = f"{item.row}.{item.reissued}"
        request = item.request
        server = self._server_of(ticket, now_s)
        engine_request = EngineRequest(name, request.prompt_tokens + item.sent, request.output_tokens - item.sent)
        self._open[name] = item
        self.servers.clock.submit(server.index, engine_request, now_s)

    def _server_of(self, ticket: Ticket, now_s: float) -> VirtualServer:
        server = self.servers.by_name[ticket.target.replica]
        if not server.awake:
            raise RuntimeError(f"{server.name} is shown as routable at {now_s:.3f} s and is {server.state}")
        return server

    def _record_lost(self, item: OpenRequest) -> None:
        """The request will never be answered in full."""
        self._times[3 * item.row + 1] = item.first_token_s
        self._counts[4 * item.row + 3] = item.reissued
        self._lost.append(item.row)

    def _move(self, name: str, item: OpenRequest, now_s: float) -> None:
        server = self.servers.by_name[item.ticket.target.replica]
        engine = self.servers.clock.at(server.index, now_s)
        ended = engine.abort(name, now_s)
        self.servers.clock.touched(server.index)
        if ended is None:
            return
        server.recorder.finished(ended)
        del self._open[name]
        self._take_first_token(item, ended)
        self._router.finish(item.ticket)
        item.sent += ended.generated_tokens
        item.reissued += 1
        item.ticket = self._router.submit(
            item.request.service, Stage.FRONT, now_s=now_s, again=True, failed=[item.ticket.target.key]
        )
        self._send(item, now_s)

    @staticmethod
    def _take_first_token(item: OpenRequest, ended: FinishedRequest) -> None:
        if math.isnan(item.first_token_s) and ended.first_token_s is not None:
            item.first_token_s = ended.first_token_s
