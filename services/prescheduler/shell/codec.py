"""Between the core's types and the messages of ``trimtab.scheduler.v1`` and ``trimtab.actuator.v1``."""

from prescheduler.core.domains import DomainRow
from prescheduler.core.model import Constraint, DeploymentGroup, Outcome, ServiceResult
from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.placement import (
    SubgroupClass,
    placement_from_proto,
    placement_to_proto,
)
from trimtab.domain.vocabulary import Role, TopologyLevel


def result_to_wire(result: ServiceResult) -> scheduler_pb2.ScalingResult:
    """One request's result."""
    return scheduler_pb2.ScalingResult(
        service=result.service,
        decision_id=result.decision_id,
        outcome=scheduler_pb2.SchedulingOutcome.ValueType(int(result.outcome)),
        groups=[placement_to_proto(group) for group in result.groups],
        binding_constraint=scheduler_pb2.BindingConstraint.ValueType(int(result.constraint)),
        detail=result.detail,
    )


def result_from_wire(message: scheduler_pb2.ScalingResult) -> ServiceResult:
    """A result as this service stored it. Raises ``ValueError`` for what another release wrote."""
    return ServiceResult(
        service=message.service,
        decision_id=message.decision_id,
        outcome=Outcome(message.outcome),
        constraint=Constraint(message.binding_constraint),
        detail=message.detail,
        groups=tuple(placement_from_proto(group) for group in message.groups),
    )


def deployment_group_to_wire(group: DeploymentGroup) -> scheduler_pb2.DeploymentGroup:
    """One group as it is."""
    return scheduler_pb2.DeploymentGroup(
        group=group.group,
        service=group.service,
        cluster=group.cluster,
        domain=group.domain,
        domain_level=_level(group.level),
        subgroup_class=_class(group.subgroup_class),
        roles=[scheduler_pb2.RoleReplicas(role=_role(role), replicas=names) for role, names in group.replicas.items()],
    )


def domain_to_wire(row: DomainRow) -> scheduler_pb2.Domain:
    """One row of the tree."""
    return scheduler_pb2.Domain(
        name=row.name,
        level=_level(row.level),
        parent=row.parent,
        cluster=row.cluster,
        subgroup_class=_class(row.subgroup_class),
        gpus=[scheduler_pb2.GpuCount(gpu_type=name, total=total, free=free) for name, total, free in row.gpus],
        nodes=row.nodes,
    )


def _role(role: Role) -> types_pb2.Role.ValueType:
    return types_pb2.Role.ValueType(role.number)


def _level(level: TopologyLevel) -> types_pb2.TopologyLevel.ValueType:
    return types_pb2.TopologyLevel.ValueType(level.number)


def _class(subgroup_class: SubgroupClass) -> scheduler_pb2.SubgroupClass.ValueType:
    return scheduler_pb2.SubgroupClass.ValueType(int(subgroup_class))
