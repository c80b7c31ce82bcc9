"""Rules that need more than one resource; each fault names the field of the resource that is being applied.

A role is scaled or pooled, never both; a GPU is in one pool; a member has a policy with a Token Service Share; floors
fit into the pool; a pool's cluster has an actuator. Bounds that no whole unit satisfies are refused too. A policy stays
while a pool has it as a member. `RULES` has the rules of each kind; a kind without any may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic

from policy_engine.core.pool.gpu_layout import OverlayError, first_awake, make_overlay, member_key
from policy_engine.core.scaled.units import unit_bounds
from trimtab.config.kinds import R, Resource, ResourceKind, ResourceSet
from trimtab.config.resources import POOL, SERVICE_POLICY, FieldViolation, Pool, ServicePolicy, kind_of
from trimtab.config.specs import PolicyKind


def _always_free(name: str, resources: ResourceSet) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRules(Generic[R]):
    """The rules of one kind.

    `check`: what is wrong with applying a resource beside the stored ones, where the clusters are those that have an
    actuator. `user`: what would lack a resource that is deleted, in words; empty for nothing.
    """

    check: Callable[[R, ResourceSet, Collection[str]], list[FieldViolation]]
    user: Callable[[str, ResourceSet], str] = _always_free


def check(resource: Resource, stored: ResourceSet, clusters: Collection[str]) -> list[FieldViolation]:
    """What is wrong with applying `resource` beside the stored ones; `clusters` have an actuator."""
    rules = RULES.get(kind_of(resource).name)
    return [] if rules is None else rules.check(resource, stored, clusters)


def user_of(kind: ResourceKind[Any, Any], name: str, stored: ResourceSet) -> str:
    """Why a resource cannot be deleted, in words; empty when it can."""
    rules = RULES.get(kind.name)
    return "" if rules is None else rules.user(name, stored)


def _applied_policy(policy: ServicePolicy, stored: ResourceSet, _: Collection[str]) -> list[FieldViolation]:
    return check_policy(policy, tuple(stored.of(POOL).values()), stored.of(SERVICE_POLICY))


def _pool_of_policy(name: str, stored: ResourceSet) -> str:
    for pool in stored.of(POOL).values():
        if any(member.service == name for member in pool.spec.members):
            return f"is a member of pool {pool.name}: change the pool first"
    return ""


def _applied_pool(pool: Pool, stored: ResourceSet, clusters: Collection[str]) -> list[FieldViolation]:
    pools = stored.of(POOL)
    others = [other for name, other in sorted(pools.items()) if name != pool.name]
    faults = check_pool(pool, others, stored.of(SERVICE_POLICY), born=pool.name in pools)
    return [*_unknown_cluster(pool, clusters), *faults]


def _unknown_cluster(pool: Pool, clusters: Collection[str]) -> list[FieldViolation]:
    if pool.spec.cluster in clusters:
        return []
    described = ", ".join(sorted(clusters)) or "none"
    description = f"no actuator is configured for {pool.spec.cluster!r}; there are: {described}"
    return [FieldViolation(field="spec.cluster", description=description)]


RULES: Final[Mapping[str, KindRules[Any]]] = {
    SERVICE_POLICY.name: KindRules(check=_applied_policy, user=_pool_of_policy),
    POOL.name: KindRules(check=_applied_pool),
}
"""By the kind's name."""


def check_policy(
    policy: ServicePolicy, pools: Sequence[Pool], policies: Mapping[str, ServicePolicy]
) -> list[FieldViolation]:
    """What is wrong with applying `policy` beside `pools` and the other `policies`."""
    found: list[FieldViolation] = []
    bounds = unit_bounds(policy.spec)
    if policy.spec.kind == PolicyKind.SCALED and bounds.empty:
        found.append(
            FieldViolation(
                field="spec.roles",
                description=f"no whole unit of the ratio has at least the minima ({bounds.minimum} units) and at most "
                f"the maxima ({bounds.maximum} units)",
            )
        )
    homes = [pool for pool in pools if any(member.service == policy.name for member in pool.spec.members)]
    if homes and policy.spec.kind == PolicyKind.SCALED:
        description = f"{policy.name} is a member of pool {homes[0].name}: a role is scaled or pooled, never both"
        found.append(FieldViolation(field="spec.proportional", description=description))
    previous = policies.get(policy.name)
    if homes and previous is not None:
        found += _changed_servers(policy, previous, homes[0])
    others = {**policies, policy.name: policy}
    for pool in homes:
        faults = check_pool(pool, [], others, born=True)
        found += [
            FieldViolation(
                field="spec", description=f"pool {pool.name} would not hold it: {fault.field}: {fault.description}"
            )
            for fault in faults
            if policy.spec.kind != PolicyKind.SCALED
        ]
    return found


def _changed_servers(policy: ServicePolicy, previous: ServicePolicy, home: Pool) -> list[FieldViolation]:
    """A pool's servers run and sleep as they were made: what they are cannot be changed under them."""
    hint = f"{policy.name} is a member of pool {home.name}, whose servers were made with"
    remedy = "take it out of the pool first"
    found: list[FieldViolation] = []
    if policy.spec.model != previous.spec.model:
        description = f"{hint} model {previous.spec.model}: {remedy}"
        found.append(FieldViolation(field="spec.model", description=description))
    for position, role in enumerate(policy.spec.roles):
        before = previous.spec.role(role.role)
        if before is None:
            continue
        field = f"spec.roles[{position}]"
        if role.gpus_per_replica != before.gpus_per_replica:
            description = f"{hint} {before.gpus_per_replica} GPUs each: {remedy}"
            found.append(FieldViolation(field=f"{field}.gpusPerReplica", description=description))
        if role.profile != before.profile:
            description = f"{hint} profile {before.profile or 'none'}: {remedy}"
            found.append(FieldViolation(field=f"{field}.profile", description=description))
    return found


def check_pool(
    pool: Pool, others: Sequence[Pool], policies: Mapping[str, ServicePolicy], *, born: bool = False
) -> list[FieldViolation]:
    """What is wrong with applying `pool` beside the `others` and the policies of its members.

    Of a pool that is laid out already (`born`) the floors must fit; its members' `initialAwake` has no effect any more.
    """
    found = [*_members(pool, others, policies), *_gpus(pool, others)]
    if found:
        return found
    try:
        overlay = make_overlay(pool, policies)
        first_awake(_without_initial(pool) if born else pool, policies, overlay)
    except OverlayError as error:
        return [FieldViolation(field=error.field, description=error.description)]
    return []


def _without_initial(pool: Pool) -> Pool:
    members = tuple(member.model_copy(update={"initial_awake": 0}) for member in pool.spec.members)
    return pool.model_copy(update={"spec": pool.spec.model_copy(update={"members": members})})


def _members(pool: Pool, others: Sequence[Pool], policies: Mapping[str, ServicePolicy]) -> list[FieldViolation]:
    found: list[FieldViolation] = []
    homes = {
        member_key(member): other.name for other in others for member in other.spec.members if other.name != pool.name
    }
    for position, member in enumerate(pool.spec.members):
        field = f"spec.members[{position}]"
        policy = policies.get(member.service)
        if policy is None:
            found.append(FieldViolation(field=f"{field}.service", description=f"no ServicePolicy {member.service!r}"))
            continue
        if policy.spec.role(member.role) is None:
            description = f"{member.service} has no role {member.role.value}"
            found.append(FieldViolation(field=f"{field}.role", description=description))
        if policy.spec.kind == PolicyKind.SCALED:
            description = f"{member.service} is scaled by its ServicePolicy: a role is scaled or pooled, never both"
            found.append(FieldViolation(field=f"{field}.service", description=description))
        elif policy.spec.share_profile(member.role) is None:
            description = f"the ServicePolicy {member.service} has no tokenServiceShare"
            found.append(FieldViolation(field=f"{field}.service", description=description))
        home = homes.get(member_key(member))
        if home is not None:
            description = f"{member_key(member)} is a member of pool {home} already"
            found.append(FieldViolation(field=f"{field}.service", description=description))
    return found


def _gpus(pool: Pool, others: Sequence[Pool]) -> list[FieldViolation]:
    owners = {
        (other.spec.cluster, entry.node, index): other.name
        for other in others
        if other.name != pool.name
        for entry in other.spec.gpus
        for index in entry.gpu_indices
    }
    found: list[FieldViolation] = []
    for position, entry in enumerate(pool.spec.gpus):
        for index in entry.gpu_indices:
            owner = owners.get((pool.spec.cluster, entry.node, index))
            if owner is not None:
                description = f"GPU {index} of {entry.node} belongs to pool {owner}"
                found.append(FieldViolation(field=f"spec.gpus[{position}].gpuIndices", description=description))
                break
    return found
