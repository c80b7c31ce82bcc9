"""The scaling request of a scaled service, and how many of its replicas count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policy_engine.core.scaled.decide import RoleReplicas
from policy_engine.core.scaled.units import RoleCounts, shape_of
from trimtab.config.resources import ServicePolicy
from trimtab.domain.scaling import RoleRequest, ScalingRequest
from trimtab.domain.vocabulary import LifeCycle, Role

_GONE = frozenset({LifeCycle.TERMINATING, LifeCycle.FAILED})


def exists(life_cycle: LifeCycle) -> bool:
    """Whether a replica counts as one that its role has: it is neither terminating nor failed."""
    return life_cycle not in _GONE


def count_replicas(policy: ServicePolicy, listed: Iterable[tuple[Role, LifeCycle, bool]]) -> tuple[RoleReplicas, ...]:
    """Replicas of each of the policy's roles, from the role, life cycle and routability of each that is listed."""
    ready: dict[Role, int] = {}
    existing: dict[Role, int] = {}
    for role, life_cycle, routable in listed:
        ready[role] = ready.get(role, 0) + routable
        existing[role] = existing.get(role, 0) + exists(life_cycle)
    return tuple(
        RoleReplicas(role=spec.role, ready=ready.get(spec.role, 0), existing=existing.get(spec.role, 0))
        for spec in policy.spec.roles
    )


def scaling_request(
    policy: ServicePolicy,
    counts: RoleCounts,
    *,
    decision_id: str,
    created_s: float,
    expires_s: float | None = None,
    replica_revisions: Sequence[tuple[str, int]] = (),
    writer: str = "",
    token: int = 0,
) -> ScalingRequest:
    """The request for these counts. A role of the policy without a count is requested with zero replicas.

    `created_s` is when the counts were decided: a request that is only refreshed keeps its place in the queue.
    """
    spec = policy.spec
    wanted, parts = dict(counts), shape_of(spec).parts
    return ScalingRequest(
        service=policy.name,
        decision_id=decision_id,
        roles=tuple(
            RoleRequest(
                role=role.role,
                replicas=wanted.get(role.role, 0),
                gpus_per_replica=role.gpus_per_replica,
                gpu_types=role.gpu_types,
                model=spec.model,
                profile=role.profile,
                ratio_part=parts[role.role],
            )
            for role in spec.roles
        ),
        affinity=spec.affinity,
        priority=spec.priority,
        allow_partial=spec.allow_partial,
        created_s=created_s,
        expires_s=expires_s,
        writer=writer,
        token=token,
        replica_revisions=tuple(sorted(replica_revisions)),
    )
