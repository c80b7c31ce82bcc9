"""Between the core's records and the messages of ``trimtab.actuator.v1``; requests are parsed, never trusted."""

from collections.abc import Iterable

from actuator.core.admission_placement import PlacementRequest
from actuator.core.admission_pool import PoolRequest
from actuator.core.model import Gateway, GroupOutcome
from actuator.core.placement_exchange import group_requests
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.placement import placement_from_proto
from trimtab.domain.pool import desired_from_proto
from trimtab.domain.time import seconds_of
from trimtab.domain.vocabulary import Role
from trimtab.rpc.validate import Violations

MAX_OVERLAY = 20_000
MAX_GPUS_PER_NODE = 64
MAX_GIVEN_NAME = 512

_ROLES = Role.by_number()


def outcome_to_proto(outcome: GroupOutcome) -> pb.GroupResult:
    """What came of one group."""
    return pb.GroupResult(
        group=outcome.group, accepted=outcome.accepted, detail=outcome.detail, operation_id=outcome.operation_id
    )


def parse_pool_state(request: pb.ApplyPoolStateRequest) -> PoolRequest:
    """Raises ``InvalidRequest`` with one violation per field."""
    v = Violations()
    state = request.state
    v.require("state", request.HasField("state"), "is required")
    with v.below("state"):
        v.identifier("pool", state.pool)
        v.require("state_revision", state.state_revision > 0, "must be at least 1")
        v.bounded_string("decision_id", state.decision_id, max_length=128, required=False)
        v.require("overlay", 0 < len(state.overlay) <= MAX_OVERLAY, f"must have 1 to {MAX_OVERLAY} replicas")
        for i, item in enumerate(state.overlay):
            _check_overlay_replica(v, f"overlay[{i}]", item)
        v.require("budget_gpus", state.budget_gpus > 0, "must be at least 1")
        if state.HasField("settings"):
            with v.below("settings"):
                _check_settings(v, state.settings)
        else:
            _check_settings(v, state)
        for i, floor in enumerate(state.floors):
            with v.below(f"floors[{i}]"):
                v.identifier("service", floor.service)
                _role(v, "role", floor.role)
        kinds = {(floor.service, floor.role) for floor in state.floors}
        v.require("floors", len(kinds) == len(state.floors), "names a service and role twice")
        v.require("awake", len(set(state.awake)) == len(state.awake), "names a replica twice")
    _fencing(v, request.fencing, given=request.HasField("fencing"))
    v.raise_if_any()
    return PoolRequest(desired=desired_from_proto(state), writer=request.fencing.writer, token=request.fencing.token)


def _check_settings(v: Violations, settings: policy_pb2.PoolSettings | pb.PoolState) -> None:
    v.finite_number("drain_timeout_s", settings.drain_timeout_s, minimum=0, maximum=3600)
    v.finite_number("residence_s", settings.residence_s, minimum=0, maximum=86_400)
    v.require("sleep_level", settings.sleep_level <= 2, "must be 1 or 2; 0 means 1")


def parse_gateway(request: pb.AcknowledgeEndpointsRequest, *, lease_until_s: float, newest_revision: int) -> Gateway:
    """A gateway's acknowledgement. A revision that was never published here counts as 0. Raises ``InvalidRequest``."""
    v = Violations()
    v.bounded_string("gateway", request.gateway, max_length=128)
    v.require("in_flight", len(request.in_flight) <= MAX_OVERLAY, f"may have at most {MAX_OVERLAY} replicas")
    for i, item in enumerate(request.in_flight[:MAX_OVERLAY]):
        with v.below(f"in_flight[{i}]"):
            # A given server without a name of its own goes by its address.
            v.bounded_string("replica", item.replica, max_length=MAX_GIVEN_NAME)
            v.require("pinned", item.pinned <= item.requests, f"is {item.pinned} of {item.requests} requests")
    names = {item.replica for item in request.in_flight}
    v.require("in_flight", len(names) == len(request.in_flight), "names a replica twice")
    v.raise_if_any()
    return Gateway(
        gateway=request.gateway,
        lease_until_s=lease_until_s,
        acknowledged_revision=request.revision if request.revision <= newest_revision else 0,
        in_flight={item.replica: item.requests for item in request.in_flight if item.requests},
        pinned={item.replica: item.pinned for item in request.in_flight if item.pinned},
    )


def _check_overlay_replica(v: Violations, field: str, item: pb.OverlayReplica) -> None:
    with v.below(field):
        v.object_name("replica", item.replica)
        v.identifier("service", item.service)
        v.bounded_string("model", item.model)
        v.bounded_string("profile", item.profile, required=False)
        v.object_name("node", item.node)
        _role(v, "role", item.role)
        _gpus(v, "gpu_indices", item.gpu_indices)


def parse_placements(request: pb.ApplyPlacementsRequest, *, cluster: str) -> PlacementRequest:
    """Raises ``InvalidRequest`` with one violation per field."""
    v = Violations()
    v.require("groups", 0 < len(request.groups) <= MAX_OVERLAY, f"must have 1 to {MAX_OVERLAY} groups")
    v.bounded_string("request_id", request.request_id, max_length=128, required=False)
    names = [group.group for group in request.groups]
    v.require("groups", len(set(names)) == len(names), "names a group twice")
    for i, group in enumerate(request.groups):
        _check_group(v, f"groups[{i}]", group, cluster)
    _fencing(v, request.fencing, given=request.HasField("fencing"))
    v.raise_if_any()
    return PlacementRequest(
        groups=group_requests(placement_from_proto(group) for group in request.groups),
        inventory_revision=request.inventory_revision,
        expire_s=seconds_of(request.expire_time) if request.HasField("expire_time") else None,
        request_id=request.request_id,
        validate_only=request.validate_only,
        writer=request.fencing.writer,
        token=request.fencing.token,
    )


def _check_group(v: Violations, field: str, group: scheduler_pb2.GroupPlacement, cluster: str) -> None:
    with v.below(field):
        v.object_name("group", group.group)
        v.identifier("service", group.service)
        v.require("cluster", group.cluster in ("", cluster), f"is another one; this actuator speaks for {cluster}")
        v.bounded_string("decision_id", group.decision_id, max_length=128, required=False)
        if group.domain_level:
            v.enum_set("domain_level", group.domain_level, types_pb2.TopologyLevel)
        if group.subgroup_class:
            v.enum_set("subgroup_class", group.subgroup_class, scheduler_pb2.SubgroupClass)
        for i, item in enumerate(group.add):
            with v.below(f"add[{i}]"):
                v.object_name("replica", item.replica)
                v.bounded_string("model", item.model)
                v.bounded_string("profile", item.profile, required=False)
                v.bounded_string("gpu_type", item.gpu_type, required=False)
                v.object_name("node", item.node)
                _role(v, "role", item.role)
                _gpus(v, "gpu_indices", item.gpu_indices)
        for i, removal in enumerate(group.remove):
            with v.below(f"remove[{i}]"):
                v.require("count", removal.count > 0, "must be at least 1")
                _role(v, "role", removal.role)
        v.require("add", bool(group.add or group.remove), "a group adds or removes something")
        roles = {item.role for item in group.remove}
        v.require("remove", len(roles) == len(group.remove), "names a role twice")


def _role(v: Violations, field: str, value: int) -> Role:
    v.enum_set(field, value, types_pb2.Role)
    return _ROLES.get(value, Role.COLOCATED)


def _gpus(v: Violations, field: str, indices: Iterable[int]) -> tuple[int, ...]:
    found = tuple(indices)
    v.require(field, bool(found), "is required")
    v.require(field, len(set(found)) == len(found), "names a GPU twice")
    v.require(field, all(index < MAX_GPUS_PER_NODE for index in found), f"a node has at most {MAX_GPUS_PER_NODE} GPUs")
    return tuple(sorted(found))


def _fencing(v: Violations, fencing: types_pb2.Fencing, *, given: bool) -> None:
    if v.require("fencing", given, "is required"):
        v.bounded_string("fencing.writer", fencing.writer, max_length=128)
        v.require("fencing.token", fencing.token > 0, "must be at least 1")
