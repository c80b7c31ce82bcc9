"""A pool's overlay (which replica may be awake on which GPUs), and the first awake set of a new pool.

Names and order are deterministic: nodes and GPUs sorted, members in the pool's order. A replica has the name that its
member's overlay gives it, else that of the replica which exists there already, else one made of service, node and
first GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.config.specs import PoolMember
from trimtab.domain.pool import Gpu as Gpu
from trimtab.domain.pool import OverlayReplica as OverlayReplica
from trimtab.domain.vocabulary import Role

MAX_NAME_LENGTH = 253


@dataclass(frozen=True, slots=True)
class Resident:
    """A replica that exists already on exactly these GPUs. `gpu_indices` ascend."""

    replica: str
    member: MemberKey
    node: str
    gpu_indices: tuple[int, ...]


class OverlayError(ValueError):
    """The pool cannot be laid out as asked; `field` is the path of the field that asks for too much."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


def member_key(member: PoolMember) -> MemberKey:
    """The member's key."""
    return MemberKey(member.service, member.role)


def aligned_sets(indices: Iterable[int], size: int) -> list[tuple[int, ...]]:
    """Every set of `size` consecutive GPUs that starts at a multiple of `size`: pairs and quads that share links."""
    owned = set(indices)
    starts = sorted(index for index in owned if index % size == 0)
    sets = [tuple(range(start, start + size)) for start in starts]
    return [gpu_set for gpu_set in sets if owned.issuperset(gpu_set)]


def make_overlay(
    pool: Pool, policies: Mapping[str, ServicePolicy], residents: Iterable[Resident] = ()
) -> tuple[OverlayReplica, ...]:
    """One replica per member and GPU set, by member, then node, then first GPU. Raises OverlayError.

    `residents` lend their names, at most one per member and GPU set.
    """
    living = {(item.member, item.node, item.gpu_indices): item.replica for item in residents}
    found: list[OverlayReplica] = []
    for position, member in enumerate(pool.spec.members):
        field = f"spec.members[{position}]"
        policy = policies.get(member.service)
        role = policy.spec.role(member.role) if policy is not None else None
        if policy is None or role is None:
            raise OverlayError(f"{field}.service", f"no ServicePolicy {member.service!r} with role {member.role.value}")
        sets: list[tuple[str, tuple[int, ...], str]]
        if member.overlay:
            sets = [(entry.node, tuple(sorted(entry.gpu_indices)), entry.replica) for entry in member.overlay]
            for number, (_, gpu_set, _) in enumerate(sets):
                if len(gpu_set) != role.gpus_per_replica:
                    raise OverlayError(
                        f"{field}.overlay[{number}]",
                        f"has {len(gpu_set)} GPUs; a replica of {member.service} has {role.gpus_per_replica}",
                    )
        else:
            sets = [
                (entry.node, gpu_set, "")
                for entry in pool.spec.gpus
                for gpu_set in aligned_sets(entry.gpu_indices, role.gpus_per_replica)
            ]
        if not sets:
            raise OverlayError(field, f"the pool has no {role.gpus_per_replica} aligned GPUs on one node")
        key = member_key(member)
        for node, gpu_set, given in sorted(sets):
            found.append(
                OverlayReplica(
                    replica=given or living.get((key, node, gpu_set), "") or _name(member, node, gpu_set[0]),
                    member=key,
                    model=policy.spec.model,
                    profile=role.profile,
                    node=node,
                    gpu_indices=gpu_set,
                )
            )
    _require_unique(found)
    return tuple(found)


def _name(member: PoolMember, node: str, first_gpu: int) -> str:
    role = "" if member.role == Role.COLOCATED else f"-{member.role.value}"
    return f"{member.service}{role}-{node}-{first_gpu}"


def _require_unique(overlay: list[OverlayReplica]) -> None:
    names: set[str] = set()
    for item in overlay:
        if item.replica in names:
            raise OverlayError("spec.members", f"two replicas would be called {item.replica}; give other GPU sets")
        if len(item.replica) > MAX_NAME_LENGTH:
            raise OverlayError("spec.members", f"{item.replica[:80]}… is longer than {MAX_NAME_LENGTH} characters")
        names.add(item.replica)


def renamed(before: Iterable[OverlayReplica], after: Iterable[OverlayReplica], awake: Iterable[str]) -> tuple[str, ...]:
    """`awake` of the overlay `before` by the names that the same members have on the same GPUs `after`."""
    names = {(item.member, item.gpus): item.replica for item in after}
    new = {item.replica: names.get((item.member, item.gpus), item.replica) for item in before}
    return tuple(sorted({new.get(name, name) for name in awake}))


def first_awake(
    pool: Pool, policies: Mapping[str, ServicePolicy], overlay: tuple[OverlayReplica, ...]
) -> tuple[str, ...]:
    """The first awake set of a new pool: `initialAwake` of each member, at least its floor, without overlaps.

    Raises OverlayError.

    Large replicas choose first, each taking the free set that leaves the most sets of its member's size whole
    (the lowest GPUs, since sets are aligned).
    """
    wanted: list[tuple[int, int, MemberKey, int]] = []
    for position, member in enumerate(pool.spec.members):
        role = policies[member.service].spec.role(member.role)
        if role is None:
            raise OverlayError(f"spec.members[{position}].role", "the service has no such role")
        count = max(member.initial_awake, role.min_replicas)
        if count > role.max_replicas:
            raise OverlayError(
                f"spec.members[{position}].initialAwake", f"{count} is above maxReplicas {role.max_replicas}"
            )
        wanted.append((-role.gpus_per_replica, position, member_key(member), count))
    taken: set[Gpu] = set()
    awake: list[str] = []
    for _, position, key, count in sorted(wanted, key=lambda item: item[:2]):
        free = [item for item in overlay if item.member == key]
        for number in range(count):
            choice = next((item for item in free if taken.isdisjoint(item.gpus)), None)
            if choice is None:
                raise OverlayError(
                    f"spec.members[{position}].initialAwake",
                    f"{key} should start with {count} awake, and only {number} fit into the pool's "
                    f"{pool.spec.budget_gpus} GPUs beside the other members",
                )
            taken.update(choice.gpus)
            awake.append(choice.replica)
    return tuple(sorted(awake))


def adopt_awake(
    overlay: tuple[OverlayReplica, ...], awake: Iterable[str], *, prefer: Iterable[str] = ()
) -> tuple[str, ...]:
    """`awake` reduced to replicas of the overlay of which no two share a GPU; `prefer` wins a GPU that two claim."""
    by_name = {item.replica: item for item in overlay}
    preferred = set(prefer)
    taken: set[Gpu] = set()
    kept: list[str] = []
    for name in sorted(set(awake), key=lambda replica: (replica not in preferred, replica)):
        item = by_name.get(name)
        if item is not None and taken.isdisjoint(item.gpus):
            taken.update(item.gpus)
            kept.append(name)
    return tuple(sorted(kept))
