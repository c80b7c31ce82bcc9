"""Which replica takes a request: endpoint sets, least in flight, hold queues, and what is left on hidden replicas.

A state machine without I/O or clock: every call gets `now_s` (any monotonic seconds). Choosing a replica and counting
the request on it are one step, so that no request is ever under way to a replica without being counted there.

Per service: colocated replicas answer alone; a disaggregated service answers while it has, inside one cluster, a
routable prefill and a routable decode replica. A request that finds none waits in its service's queue, first come
first served, bounded in number and in time. Ties go to the smallest (cluster, replica).

Limits: weights, prefix affinity and per-replica caps are not part of it; the least loaded replica wins.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from gateway.core.outlier_ejection import Failure, OutlierEjection, ReplicaKey
from trimtab.domain.endpoint import Endpoint, EndpointState
from trimtab.domain.vocabulary import Role

__all__ = [
    "ROLES",
    "Failure",
    "InFlight",
    "ReplicaKey",
    "Router",
    "RoutingLimits",
    "Stage",
    "Ticket",
    "TicketState",
    "to_route",
]


ROLES = frozenset({Role.COLOCATED, Role.PREFILL, Role.DECODE})
"""Roles that gateways talk to. Endpoints of others are left out by the caller, with `to_route`."""


class Stage(enum.Enum):
    """What a request needs a replica for: its start (colocated or prefill), or the decode half of a hand-over."""

    FRONT = "front"
    DECODE = "decode"


class TicketState(enum.Enum):
    """`HELD → ASSIGNED → DONE`; `REFUSED` when the queue was full, `EXPIRED` when the wait was too long."""

    HELD = "held"
    ASSIGNED = "assigned"
    DONE = "done"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLimits:
    """Bounds of the hold queues, and how long a failed replica is avoided."""

    max_held_per_service: int = 2000
    max_hold_s: float = 30.0
    avoid_s: float = 1.0
    max_avoid_s: float = 8.0


@dataclasses.dataclass(slots=True, eq=False)
class Ticket:
    """One request's place: on a replica, or in a hold queue. Compared by identity."""

    service: str
    stage: Stage
    since_s: float
    cluster: str | None = None
    """The only cluster that will do: KV does not leave the cluster of its prefill server."""
    state: TicketState = TicketState.HELD
    endpoint: Endpoint | None = None
    failed: frozenset[ReplicaKey] = frozenset()
    """Replicas that failed this very request: taken again only when no other can be."""
    movable: bool = True
    """Whether the request could still be continued on another replica; its owner keeps this up to date."""
    failures_before: int = 0
    """How many failures the router had counted when it chose the replica."""

    @property
    def target(self) -> Endpoint:
        """The replica of an assigned ticket. Raises RuntimeError for one that never had any."""
        if self.endpoint is None:
            raise RuntimeError(f"a {self.state.value} ticket of {self.service} has no replica")
        return self.endpoint


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """This gateway's requests on one replica; `pinned` of them cannot be continued elsewhere."""

    replica: str
    requests: int
    pinned: int


class Router:
    """Routing state of one gateway."""

    def __init__(self, limits: RoutingLimits, *, services: Iterable[str] = ()) -> None:
        """`services` are held for even before any actuator lists them."""
        self._limits = limits
        self._always = frozenset(services)
        self._sets: dict[str, tuple[Endpoint, ...]] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self._revisions: dict[str, int] = {}
        self._endpoints: dict[ReplicaKey, Endpoint] = {}
        self._routable: dict[str, tuple[Endpoint, ...]] = {}
        self._tickets: dict[ReplicaKey, dict[Ticket, None]] = {}
        self._queues: dict[str, deque[Ticket]] = {}
        self._ejected = OutlierEjection(first_s=limits.avoid_s, longest_s=limits.max_avoid_s)
        self._answers: dict[ReplicaKey, int] = {}
        self._names: dict[str, str] = {}
        self._distrusted: set[str] = set()
        self._index()

    # Endpoint sets

    def apply(self, cluster: str, revision: int, services: Iterable[str], endpoints: Sequence[Endpoint]) -> None:
        """Replace all that is known of `cluster`. From here on nothing goes to what is not routable in it.

        Raises ValueError for a replica named twice or of another cluster; the old set then stays.
        """
        names = [endpoint.replica for endpoint in endpoints]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"cluster {cluster}, revision {revision}: replica {twice[0]!r} is listed twice")
        if any(endpoint.cluster != cluster for endpoint in endpoints):
            raise ValueError(f"cluster {cluster}, revision {revision}: an endpoint is of another cluster")
        self._sets[cluster] = tuple(sorted(endpoints, key=lambda endpoint: endpoint.replica))
        self._listed[cluster] = frozenset(services) | {endpoint.service for endpoint in endpoints}
        self._revisions[cluster] = revision
        self._index()

    def distrust(self) -> None:
        """This gateway stood still for longer than its leases: its sets may be outdated.

        Nothing is sent to a cluster until it is trusted again; requests wait. A set that arrives is no reason to trust:
        it may have been unread during the stall, with one behind it that hides what it shows.
        """
        self._distrusted.update(self._sets)

    def trust(self, cluster: str) -> None:
        """The set of `cluster` is current, or nothing is left that could replace it."""
        self._distrusted.discard(cluster)

    def _index(self) -> None:
        everything = [endpoint for cluster in sorted(self._sets) for endpoint in self._sets[cluster]]
        self._endpoints = {endpoint.key: endpoint for endpoint in everything}
        routable: dict[str, list[Endpoint]] = {}
        for endpoint in everything:
            if endpoint.state is EndpointState.ROUTABLE:
                routable.setdefault(endpoint.service, []).append(endpoint)
        self._routable = {service: tuple(found) for service, found in routable.items()}
        services = sorted(self._always.union(*self._listed.values()))
        # A model served by several services goes to the first of them; its other services are asked for by name.
        self._names = {
            endpoint.model: endpoint.service for endpoint in sorted(everything, key=_by_service, reverse=True)
        }
        self._names |= {service: service for service in services}
        self._ejected.keep(self._endpoints.keys())
        self._answers = {key: value for key, value in self._answers.items() if key in self._endpoints}

    def revision(self, cluster: str) -> int:
        """The revision applied for `cluster`; 0 before the first."""
        return self._revisions.get(cluster, 0)

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters with a set, sorted."""
        return tuple(sorted(self._sets))

    @property
    def services(self) -> tuple[str, ...]:
        """Every known service, sorted."""
        return tuple(sorted(self._always.union(*self._listed.values())))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Every endpoint in every state, by cluster and replica."""
        return tuple(self._endpoints.values())

    def named_by(self, cluster: str) -> frozenset[str] | None:
        """Services that the cluster's set names, with a replica or without; None while it is not trusted."""
        return None if cluster in self._distrusted else self._listed.get(cluster, frozenset())

    def resolve(self, model: str) -> str | None:
        """The service behind a request's `model`: a service's name, or the name of a model it serves."""
        return self._names.get(model)

    # Requests

    def submit(
        self,
        service: str,
        stage: Stage,
        *,
        now_s: float,
        cluster: str | None = None,
        again: bool = False,
        failed: Iterable[ReplicaKey] = (),
    ) -> Ticket:
        """Choose a replica and count the request on it, or hold it, or refuse it when the queue is full.

        One that was under way already (`again`, or its decode half) waits before the new ones and is never refused.
        `failed` are the replicas that failed it before.
        """
        ticket = Ticket(service, stage, now_s, cluster, failed=frozenset(failed))
        chosen = self._choose(ticket, now_s)
        if chosen is not None:
            self._assign(ticket, chosen)
            return ticket
        queue = self._queues.setdefault(service, deque())
        if again or stage is Stage.DECODE:
            queue.appendleft(ticket)
        elif len(queue) >= self._limits.max_held_per_service:
            ticket.state = TicketState.REFUSED
        else:
            queue.append(ticket)
        return ticket

    def finish(self, ticket: Ticket) -> None:
        """The request is over on its replica, or its owner waits no longer. Safe to call twice."""
        if ticket.state is TicketState.ASSIGNED and ticket.endpoint is not None:
            remaining = self._tickets[ticket.endpoint.key]
            del remaining[ticket]
            if not remaining:
                del self._tickets[ticket.endpoint.key]
        elif ticket.state is TicketState.HELD:
            self._dequeue(ticket)
        if ticket.state in (TicketState.ASSIGNED, TicketState.HELD):
            ticket.state = TicketState.DONE

    def failed(self, key: ReplicaKey, failure: Failure, *, now_s: float) -> None:
        """Avoid a replica for a moment, see `OutlierEjection.failed`."""
        self._ejected.failed(key, failure, now_s=now_s)

    def answered(self, ticket: Ticket) -> None:
        """A piece of an answer has come. If it was requested after the replica's last failure, that is forgotten."""
        key = ticket.target.key
        self._answers[key] = self._answers.get(key, 0) + 1
        self._ejected.answered(key, failures_before=ticket.failures_before)

    def dispatch(self, *, now_s: float) -> list[Ticket]:
        """Serve the hold queues after a change or a while: tickets that are now `ASSIGNED` or `EXPIRED`."""
        settled: list[Ticket] = []
        for service in sorted(self._queues):
            queue = self._queues[service]
            kept: deque[Ticket] = deque()
            for ticket in queue:
                if now_s - ticket.since_s >= self._limits.max_hold_s:
                    ticket.state = TicketState.EXPIRED
                    settled.append(ticket)
                elif (chosen := self._choose(ticket, now_s)) is not None:
                    self._assign(ticket, chosen)
                    settled.append(ticket)
                else:
                    kept.append(ticket)
            if kept:
                self._queues[service] = kept
            else:
                del self._queues[service]
        return settled

    def _dequeue(self, ticket: Ticket) -> None:
        queue = self._queues[ticket.service]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.service]

    def _assign(self, ticket: Ticket, endpoint: Endpoint) -> None:
        ticket.endpoint = endpoint
        ticket.state = TicketState.ASSIGNED
        ticket.failures_before = self._ejected.failures
        self._tickets.setdefault(endpoint.key, {})[ticket] = None

    def _trusted(self, service: str) -> tuple[Endpoint, ...]:
        routable = self._routable.get(service, ())
        if self._distrusted:
            routable = tuple(endpoint for endpoint in routable if endpoint.cluster not in self._distrusted)
        return routable

    def _choose(self, ticket: Ticket, now_s: float) -> Endpoint | None:
        routable = self._trusted(ticket.service)
        # A second replica is the better bet even if the first answers others; where there is none, waiting is no gain.
        rounds = [routable]
        if ticket.failed:
            rounds.insert(0, tuple(endpoint for endpoint in routable if endpoint.key not in ticket.failed))
        for endpoints in rounds:
            candidates = _fitting(ticket, endpoints)
            if self._ejected:
                candidates = self._ejected.without(candidates, failed_it=ticket.failed, now_s=now_s)
            if candidates:
                return min(candidates, key=self._load)
        return None

    def _load(self, endpoint: Endpoint) -> tuple[int, ReplicaKey]:
        key = endpoint.key
        return (len(self._tickets.get(key, ())), key)

    # What is where

    def held(self, service: str) -> int:
        """Requests of `service` that wait for a replica."""
        return len(self._queues.get(service, ()))

    def in_flight(self, key: ReplicaKey) -> int:
        """Requests on one replica."""
        return len(self._tickets.get(key, ()))

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Replica → its requests right now, and the pieces of answers that have come from it since it was listed."""
        found: dict[str, tuple[int, int]] = {}
        for key in sorted(self._tickets.keys() | self._answers.keys()):
            requests, answers = found.get(key[1], (0, 0))
            found[key[1]] = (requests + self.in_flight(key), answers + self._answers.get(key, 0))
        return found

    @property
    def total_in_flight(self) -> int:
        """Requests on all replicas."""
        return sum(len(tickets) for tickets in self._tickets.values())

    def is_hidden(self, key: ReplicaKey) -> bool:
        """Whether nothing may be sent to the replica any more."""
        endpoint = self._endpoints.get(key)
        return endpoint is None or endpoint.state is not EndpointState.ROUTABLE

    def has_other(self, ticket: Ticket) -> bool:
        """Whether a replica is there, right now, that could take over what `ticket`'s replica does."""
        front = ticket if ticket.stage is Stage.FRONT else dataclasses.replace(ticket, stage=Stage.FRONT, cluster=None)
        current = ticket.endpoint.key if ticket.endpoint is not None else None
        return any(endpoint.key != current for endpoint in _fitting(front, self._trusted(front.service)))

    def evicting(self) -> Iterator[Ticket]:
        """Requests that should be, and can be, continued on another replica."""
        for key, tickets in sorted(self._tickets.items(), key=lambda item: item[0]):
            endpoint = self._endpoints.get(key)
            if endpoint is not None and endpoint.state is EndpointState.EVICTING:
                yield from [ticket for ticket in tickets if ticket.movable and self.has_other(ticket)]

    def left_behind(self, cluster: str) -> list[InFlight]:
        """Requests on replicas of `cluster` that are not routable any more, and pinned ones wherever they are."""
        result = []
        for key in sorted(key for key in self._tickets if key[0] == cluster):
            tickets = self._tickets[key]
            hidden = self.is_hidden(key)
            pinned = sum(1 for ticket in tickets if not ticket.movable or (hidden and not self.has_other(ticket)))
            if hidden or pinned:
                result.append(InFlight(key[1], len(tickets), pinned))
        return result


def to_route(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """The endpoints of a set that gateways talk to."""
    return [endpoint for endpoint in endpoints if endpoint.role in ROLES and endpoint.replica and endpoint.address]


def _fitting(ticket: Ticket, routable: Sequence[Endpoint]) -> list[Endpoint]:
    """Which of its service's routable replicas can do what the ticket is for."""
    if ticket.stage is Stage.DECODE:
        return [e for e in routable if e.role is Role.DECODE and ticket.cluster in (None, e.cluster)]
    decoding = {e.cluster for e in routable if e.role is Role.DECODE}
    return [e for e in routable if e.role is Role.COLOCATED or (e.role is Role.PREFILL and e.cluster in decoding)]


def _by_service(endpoint: Endpoint) -> tuple[str, str]:
    return (endpoint.service, endpoint.replica)
