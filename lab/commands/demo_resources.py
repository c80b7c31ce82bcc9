"""The demo's resources for each pass: the same start for both, and no freedom for the static one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.traces.model import MeanDemand
from trimtab.config.resources import Pool, Resource, ServicePolicy
from trimtab.domain.vocabulary import Role


def resources_of_pass(
    resources: Sequence[Resource], split: Mapping[str, int], demand: Mapping[str, MeanDemand], *, static: bool
) -> list[Resource]:
    """Pools start from the split; in the static pass every scaled service is held at what its mean demand needs."""
    found: list[Resource] = []
    for resource in resources:
        if isinstance(resource, Pool):
            found.append(_with_split(resource, split))
        elif isinstance(resource, ServicePolicy) and static:
            found.append(_held_at_mean(resource, demand))
        else:
            found.append(resource)
    return found


def expected_replicas(resources: Sequence[Resource]) -> dict[tuple[str, Role], int]:
    """Routable replicas that each service must have before the load begins."""
    pooled = {
        (member.service, member.role): member.initial_awake
        for pool in resources
        if isinstance(pool, Pool)
        for member in pool.spec.members
    }
    floors = {
        (policy.name, role.role): role.min_replicas
        for policy in resources
        if isinstance(policy, ServicePolicy)
        for role in policy.spec.roles
    }
    return floors | pooled


def _with_split(pool: Pool, split: Mapping[str, int]) -> Pool:
    members = tuple(
        member.model_copy(update={"initial_awake": split.get(member.service, member.initial_awake)})
        for member in pool.spec.members
    )
    return pool.model_copy(update={"spec": pool.spec.model_copy(update={"members": members})})


def _held_at_mean(policy: ServicePolicy, demand: Mapping[str, MeanDemand]) -> ServicePolicy:
    proportional, ratio = policy.spec.proportional, policy.spec.ratio
    mean = demand.get(policy.name)
    if proportional is None or ratio is None or mean is None:
        return policy
    decode = max(1, round(mean.output_tps / proportional.target_per_replica))
    counts = {Role.DECODE: decode, Role.PREFILL: -(-decode * ratio.prefill // ratio.decode)}
    roles = tuple(
        role.model_copy(update={"min_replicas": counts[role.role], "max_replicas": counts[role.role]})
        for role in policy.spec.roles
    )
    return policy.model_copy(update={"spec": policy.spec.model_copy(update={"roles": roles})})
