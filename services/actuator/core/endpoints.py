"""What gateways are shown, and whether they know it.

The endpoint set is derived from the replica records alone, so it cannot disagree with them. Its revision grows with
every change; a replica that stops being routable remembers that revision (``hidden_revision``), and nothing may be
done to it before every leased gateway has acknowledged it.
"""

from collections.abc import Iterable, Mapping

from actuator.core.model import Gateway, Replica, State
from trimtab.domain.endpoint import Endpoint, EndpointSet, EndpointState
from trimtab.domain.vocabulary import HoldOwner, LifeCycle


def endpoint_of(replica: Replica, *, cluster: str = "") -> Endpoint | None:
    """How gateways see the replica; None when they do not see it at all."""
    if not replica.address:
        return None
    if replica.routable:
        state = EndpointState.ROUTABLE
    elif replica.life_cycle is LifeCycle.DRAINING:
        state = EndpointState.EVICTING if replica.evicting else EndpointState.DRAINING
    elif replica.life_cycle is LifeCycle.ACTIVE and all(hold.owner is not HoldOwner.START_UP for hold in replica.holds):
        # Held by an operator or by gating: what runs there goes on.
        state = EndpointState.DRAINING
    else:
        return None
    return Endpoint(
        cluster=cluster,
        service=replica.spec.service,
        replica=replica.name,
        address=replica.address,
        role=replica.spec.role,
        model=replica.spec.model,
        state=state,
    )


def endpoints_of(replicas: Mapping[str, Replica], *, cluster: str = "") -> tuple[Endpoint, ...]:
    """All endpoints, by service and replica."""
    shown = (endpoint_of(replica, cluster=cluster) for replica in replicas.values())
    found = [endpoint for endpoint in shown if endpoint is not None]
    return tuple(sorted(found, key=lambda endpoint: (endpoint.service, endpoint.replica)))


def services_of(state: State) -> frozenset[str]:
    """Every service of the cluster, those without an endpoint too."""
    from_replicas = {replica.spec.service for replica in state.replicas.values()}
    return frozenset(from_replicas | {placed.service for pool in state.pools.values() for placed in pool.overlay})


def endpoint_set(state: State, *, cluster: str, lease_s: float) -> EndpointSet:
    """What gateways route by while this is the state, whichever way they learn of it."""
    return EndpointSet(
        cluster=cluster,
        revision=state.meta.endpoint_revision,
        lease_s=lease_s,
        services=tuple(sorted(services_of(state))),
        endpoints=endpoints_of(state.replicas, cluster=cluster),
    )


def leased(gateways: Mapping[str, Gateway], now_s: float) -> list[Gateway]:
    """The gateways whose lease is not over, by name."""
    return [gateways[name] for name in sorted(gateways) if gateways[name].lease_until_s > now_s]


def unaware(replica: Replica, gateways: Iterable[Gateway]) -> list[str]:
    """Leased gateways that may still route to the hidden replica."""
    return [gateway.gateway for gateway in gateways if gateway.acknowledged_revision < replica.hidden_revision]


def gateway_requests(replica: str, gateways: Iterable[Gateway]) -> tuple[int, int]:
    """(requests in flight, of those pinned) that leased gateways still have on the replica."""
    total = pinned = 0
    for gateway in gateways:
        total += gateway.in_flight.get(replica, 0)
        pinned += gateway.pinned.get(replica, 0)
    return total, pinned
