"""Replicas and operations as other services see them."""

from __future__ import annotations

from actuator.core.model import Operation, Replica
from trimtab.domain.operation import Operation as ListedOperation
from trimtab.domain.operation import Step as ListedStep
from trimtab.domain.replica import Replica as ListedReplica


def listed_replica(replica: Replica, *, cluster: str, in_flight: int | None) -> ListedReplica:
    """A record as it is listed. `in_flight` are its server's requests at the last look, None when unread."""
    spec = replica.spec
    return ListedReplica(
        replica=replica.name,
        service=spec.service,
        role=spec.role,
        cluster=cluster,
        model=spec.model,
        address=replica.address,
        node=replica.placement.node,
        gpu_indices=replica.placement.gpu_indices,
        gpu_type=spec.gpu_type,
        life_cycle=replica.life_cycle,
        holds=replica.holds,
        routable=replica.routable,
        pool=spec.pool,
        deployment_group=spec.group,
        ready=replica.ready,
        life_cycle_since_s=replica.since_s,
        start_s=replica.start_time_s,
        revision=replica.revision,
        detail=replica.detail,
        slept_once=replica.slept_once,
        in_flight=in_flight,
    )


def listed_operation(operation: Operation, *, cluster: str) -> ListedOperation:
    """An operation as it is listed."""
    return ListedOperation(
        operation_id=operation.operation_id,
        kind=operation.kind,
        state=operation.state,
        decision_id=operation.decision_id,
        cluster=cluster,
        subject=operation.subject,
        steps=tuple(
            ListedStep(
                kind=step.kind,
                replica=step.replica,
                service=step.service,
                state=step.state,
                phase=step.phase,
                detail=step.detail,
                start_s=step.start_s,
                end_s=step.end_s,
            )
            for step in operation.steps
        ),
        create_s=operation.create_s,
        update_s=operation.update_s,
        deadline_s=operation.deadline_s,
        detail=operation.detail,
    )
