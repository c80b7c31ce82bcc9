"""Gateways in memory: what each routes by, what it has acknowledged, and the requests that it has under way."""

from dataclasses import dataclass, field

from actuator.core.model import Gateway as Statement
from tests.unit.actuator.actuator_fleet_model import Request, Server
from trimtab.domain.endpoint import Endpoint, EndpointState


@dataclass
class Gateway:
    """One gateway. It routes by its own set, whatever the actuator has published since."""

    name: str
    up: bool = True
    # It stands still: it says nothing and sends nothing, and its requests at the servers go on.
    suspended: bool = False
    # For so many rounds it renews its lease and takes no new set up.
    lag: int = 0
    # For so many rounds it cannot reach the actuator and goes on by what it knows; shorter than its lease.
    cut_off: int = 0
    revision: int = 0
    endpoints: tuple[Endpoint, ...] = ()
    requests: dict[str, list[Request]] = field(default_factory=dict)

    def take_up(self, revision: int, endpoints: tuple[Endpoint, ...], servers: dict[str, Server]) -> None:
        """One round with an actuator that answers."""
        if not self.up or self.suspended:
            return
        if self.cut_off > 0:
            self.cut_off -= 1
            return
        if self.lag > 0:
            self.lag -= 1
            return
        self.revision, self.endpoints = revision, endpoints
        for endpoint in endpoints:
            server = servers.get(endpoint.replica)
            if endpoint.state is EndpointState.EVICTING and server is not None:
                # Reissued elsewhere: cut off here. Pinned ones stay.
                self.requests[endpoint.replica] = [r for r in self.requests.get(endpoint.replica, []) if r.pinned]
                server.requests = [r for r in server.requests if r.pinned or r.gateway != self.name]

    def forget_ended(self, servers: dict[str, Server], now_s: float) -> None:
        """Requests end by themselves, and with their server."""
        for name, under_way in self.requests.items():
            server = servers.get(name)
            alive = server is not None and not server.exited
            self.requests[name] = [request for request in under_way if alive and request.end_s > now_s]

    def statement(self, lease_until_s: float) -> Statement | None:
        """What it says to the actuator; None when it says nothing."""
        if not self.up or self.suspended or self.cut_off > 0:
            return None
        left = {name: requests for name, requests in self.requests.items() if requests}
        return Statement(
            gateway=self.name,
            lease_until_s=lease_until_s,
            acknowledged_revision=self.revision,
            in_flight={name: len(requests) for name, requests in left.items()},
            pinned={name: sum(request.pinned for request in requests) for name, requests in left.items()},
        )

    def choose(self, service: str) -> Endpoint | None:
        """The routable replica with the fewest of its requests; None when it has to hold the request."""
        routable = [e for e in self.endpoints if e.service == service and e.state is EndpointState.ROUTABLE]
        if not routable or not self.up or self.suspended:
            return None
        return min(routable, key=lambda e: (len(self.requests.get(e.replica, [])), e.replica))

    def die(self, servers: dict[str, Server]) -> None:
        """Its requests die with it."""
        self.up, self.suspended, self.lag, self.cut_off = False, False, 0, 0
        self.revision, self.endpoints = 0, ()
        self.requests.clear()
        for server in servers.values():
            server.requests = [request for request in server.requests if request.gateway != self.name]

    def resume(self) -> None:
        """It goes on. What it knows may be old, so it sends nothing before it has been told anew."""
        if self.suspended:
            self.suspended, self.revision, self.endpoints = False, 0, ()
