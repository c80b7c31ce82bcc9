"""Parses requests of callers and of the policy engine into the core's types, field by field."""

from google.protobuf.timestamp_pb2 import Timestamp

from prescheduler.core.tree import MAX_GPUS_PER_NODE
from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.scaling import ScalingRequest, request_from_proto
from trimtab.domain.vocabulary import MAX_ROLES
from trimtab.rpc.validate import Violations

MAX_REQUESTS = 10_000
MAX_REPLICAS = 10_000
MAX_GPU_TYPES = 32
MAX_PRIORITY = 1_000_000
_LAST_SECOND = 253_402_300_799


def parse_schedule(
    request: scheduler_pb2.ScheduleRequest,
) -> tuple[ScalingRequest, ...]:
    """The requests of one Schedule call. Raises ``InvalidRequest`` with every violation."""
    violations = Violations()
    violations.require("requests", bool(request.requests), "at least one is needed")
    violations.require("requests", len(request.requests) <= MAX_REQUESTS, f"at most {MAX_REQUESTS} are taken")
    violations.bounded_string("request_id", request.request_id, max_length=128, required=False)
    violations.raise_if_any()
    parsed: list[ScalingRequest] = []
    services: set[str] = set()
    for index, item in enumerate(request.requests):
        with violations.below(f"requests[{index}]"):
            found = parse_request(item, violations)
            violations.require("service", item.service not in services, "is asked for twice in this call")
            if not request.validate_only:
                violations.require("decision_id", bool(item.decision_id), "is required unless validate_only")
                violations.require("fencing.writer", bool(item.fencing.writer), "is required unless validate_only")
                violations.require("fencing.token", item.fencing.token > 0, "is required unless validate_only")
                violations.require("expire_time", item.HasField("expire_time"), "is required unless validate_only")
        services.add(item.service)
        if found is not None:
            parsed.append(found)
    violations.raise_if_any()
    return tuple(parsed)


def parse_request(message: scheduler_pb2.ScalingRequest, violations: Violations) -> ScalingRequest | None:
    """One request; None, with violations added, when it does not parse."""
    before = len(violations.found)
    violations.identifier("service", message.service)
    # A standing request of an engine that has decided nothing yet carries no decision.
    violations.bounded_string("decision_id", message.decision_id, max_length=128, required=False)
    violations.require("priority", abs(message.priority) <= MAX_PRIORITY, f"must be within ±{MAX_PRIORITY}")
    if message.affinity:
        violations.enum_set("affinity", message.affinity, types_pb2.TopologyLevel)
    violations.require("roles", 1 <= len(message.roles) <= MAX_ROLES, f"must be 1 to {MAX_ROLES}")
    roles: set[int] = set()
    for index, item in enumerate(message.roles[:MAX_ROLES]):
        with violations.below(f"roles[{index}]"):
            sound = len(violations.found)
            _check_role(item, violations, alone=len(message.roles) == 1, partial=message.allow_partial)
            if len(violations.found) == sound:
                violations.require("role", item.role not in roles, "is asked for twice")
                roles.add(item.role)
    for name in ("create_time", "expire_time"):
        stamp: Timestamp = getattr(message, name)
        inside = 0 <= stamp.seconds <= _LAST_SECOND and 0 <= stamp.nanos < 1_000_000_000
        violations.require(name, inside, "is not a time between 1970 and 9999")
    for cluster in sorted(message.replica_revisions):
        violations.bounded_string("replica_revisions", cluster, max_length=253)
    if len(violations.found) > before:
        return None
    return request_from_proto(message)


def _check_role(item: scheduler_pb2.RoleRequest, violations: Violations, *, alone: bool, partial: bool) -> None:
    violations.enum_set("role", item.role, types_pb2.Role)
    violations.require("replicas", item.replicas <= MAX_REPLICAS, f"is {item.replicas}, at most {MAX_REPLICAS}")
    violations.require(
        "gpus_per_replica",
        1 <= item.gpus_per_replica <= MAX_GPUS_PER_NODE,
        f"is {item.gpus_per_replica}, must be 1 to {MAX_GPUS_PER_NODE}, all on one node",
    )
    violations.require("gpu_types", len(item.gpu_types) <= MAX_GPU_TYPES, f"at most {MAX_GPU_TYPES} are taken")
    for index, name in enumerate(item.gpu_types[:MAX_GPU_TYPES]):
        violations.bounded_string(f"gpu_types[{index}]", name, max_length=63)
    violations.bounded_string("model", item.model)
    violations.bounded_string("profile", item.profile, required=False)
    violations.require("ratio_part", item.ratio_part <= MAX_REPLICAS, f"is {item.ratio_part}, at most {MAX_REPLICAS}")
    violations.require(
        "ratio_part", alone or not partial or item.ratio_part > 0, "is required with allow_partial and several roles"
    )
