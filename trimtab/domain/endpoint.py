"""What an actuator shows gateways of its replicas: endpoints, and the whole set of a cluster under its revision."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.vocabulary import Role


class EndpointState(StrEnum):
    """What a gateway may do with an endpoint; the states that it may still have requests on."""

    ROUTABLE = "routable"
    DRAINING = "draining"
    EVICTING = "evicting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One visible server. `cluster` is empty inside the cluster's own actuator."""

    replica: str
    service: str
    model: str
    address: str
    role: Role
    state: EndpointState = EndpointState.ROUTABLE
    cluster: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Cluster and replica: unique over clusters."""
        return (self.cluster, self.replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSet:
    """Every endpoint of a cluster. It replaces the sets of earlier revisions whole.

    `services` ascend and have those without an endpoint too, so that gateways hold their requests. `endpoints` ascend
    by service and replica. A gateway's lease lasts `lease_s` after each of its acknowledgements.
    """

    cluster: str
    revision: int
    lease_s: float
    services: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]


_ROLES = Role.by_number()
_STATE_NUMBERS = {
    EndpointState.ROUTABLE: actuator_pb2.ENDPOINT_STATE_ROUTABLE,
    EndpointState.DRAINING: actuator_pb2.ENDPOINT_STATE_DRAINING,
    EndpointState.EVICTING: actuator_pb2.ENDPOINT_STATE_EVICTING,
}
_STATES: dict[int, EndpointState] = {number: state for state, number in _STATE_NUMBERS.items()}


def endpoint_set_to_proto(shown: EndpointSet) -> actuator_pb2.WatchEndpointsResponse:
    """The message of a set."""
    by_service: dict[str, list[actuator_pb2.Endpoint]] = {service: [] for service in shown.services}
    for endpoint in shown.endpoints:
        by_service.setdefault(endpoint.service, []).append(
            actuator_pb2.Endpoint(
                replica=endpoint.replica,
                address=endpoint.address,
                role=types_pb2.Role.ValueType(endpoint.role.number),
                state=_STATE_NUMBERS[endpoint.state],
                model=endpoint.model,
            )
        )
    return actuator_pb2.WatchEndpointsResponse(
        services=[
            actuator_pb2.ServiceEndpoints(service=service, endpoints=found) for service, found in by_service.items()
        ],
        revision=shown.revision,
        cluster=shown.cluster,
        lease_s=shown.lease_s,
    )


def endpoint_set_from_proto(message: actuator_pb2.WatchEndpointsResponse) -> EndpointSet:
    """The set in a message.

    An endpoint whose role this release does not know is left out. A state that it does not know counts as draining:
    nothing new goes there. A model without a name is called as its service.
    """
    return EndpointSet(
        cluster=message.cluster,
        revision=message.revision,
        lease_s=message.lease_s,
        services=tuple(service.service for service in message.services),
        endpoints=tuple(
            Endpoint(
                cluster=message.cluster,
                replica=endpoint.replica,
                service=service.service,
                model=endpoint.model or service.service,
                address=endpoint.address.rstrip("/"),
                role=_ROLES[endpoint.role],
                state=_STATES.get(endpoint.state, EndpointState.DRAINING),
            )
            for service in message.services
            for endpoint in service.endpoints
            if endpoint.role in _ROLES
        ),
    )
