"""The codec of endpoint sets: what goes out comes back, and what a later release says does no harm."""

from __future__ import annotations

from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.endpoint import (
    Endpoint,
    EndpointSet,
    EndpointState,
    endpoint_set_from_proto,
    endpoint_set_to_proto,
)
from trimtab.domain.vocabulary import Role


def test_a_set_comes_back_as_it_was_with_services_that_have_no_endpoint() -> None:
    endpoints = tuple(
        Endpoint(
            cluster="east", replica=f"r-{role}", service="chat", model="m", address="http://h:1", role=role, state=state
        )
        for role in sorted(Role)
        for state in EndpointState
    )
    shown = EndpointSet(cluster="east", revision=7, lease_s=3.0, services=("chat", "idle"), endpoints=endpoints)
    assert endpoint_set_from_proto(endpoint_set_to_proto(shown)) == shown


def test_of_a_later_release_a_role_is_left_out_and_a_state_gets_nothing_new() -> None:
    message = pb.WatchEndpointsResponse(
        cluster="east",
        services=[
            pb.ServiceEndpoints(
                service="chat",
                endpoints=[
                    pb.Endpoint(replica="new-role", address="http://h:1", role=99, state=pb.ENDPOINT_STATE_ROUTABLE),
                    pb.Endpoint(replica="new-state", address="http://h:2/", role=types_pb2.ROLE_COLOCATED, state=99),
                ],
            )
        ],
    )
    (only,) = endpoint_set_from_proto(message).endpoints
    assert (only.replica, only.state, only.address) == ("new-state", EndpointState.DRAINING, "http://h:2")
    assert only.model == "chat", "a model without a name is called as its service"
