"""What may never be in the actuator's records, whatever happened. Numbers are those of the design's list."""

from actuator.core.model import Gpu, OperationKind, Replica, State
from trimtab.domain.vocabulary import LifeCycle


def broken_by(old: State, new: State) -> list[str]:
    """What a step from ``old`` to ``new`` breaks, in words."""
    broken = [*_two_on_a_gpu(new), *_below_floor(old, new), *_falling(old, new), *_without_decision(new)]
    return [*broken, *_prewarmed_unasked(old, new), *_silenced_by_prewarming(old, new)]


def _two_on_a_gpu(state: State) -> list[str]:
    """1: no GPU serves two replicas, and a pool never more GPUs than its budget."""
    found = []
    users: dict[Gpu, str] = {}
    for name in sorted(state.replicas):
        replica = state.replicas[name]
        for gpu in replica.gpus if replica.routable else ():
            if gpu in users:
                found.append(f"{users[gpu]} and {name} are both shown on {gpu}")
            users[gpu] = name
    for pool in state.pools.values():
        shown = sum(1 for gpu, name in users.items() if state.replicas[name].spec.pool == pool.pool and gpu)
        if shown > pool.budget_gpus:
            found.append(f"{pool.pool} serves on {shown} GPUs, its budget is {pool.budget_gpus}")
    return found


def _below_floor(old: State, new: State) -> list[str]:
    """2: a replica is hidden only if the floor's number stays."""
    found = []
    for pool in new.pools.values():
        for floor in pool.floors:
            role = [r for r in new.replicas.values() if (r.spec.service, r.spec.role) == (floor.service, floor.role)]
            hidden = [
                r.name for r in role if r.life_cycle is LifeCycle.DRAINING and _was_active(old.replicas.get(r.name))
            ]
            left = sum(1 for r in role if r.routable)
            if hidden and left < floor.min_replicas:
                found.append(f"{hidden} hidden, {left} left, floor {floor.min_replicas}")
    return found


def _was_active(replica: Replica | None) -> bool:
    return replica is not None and replica.life_cycle is LifeCycle.ACTIVE


def _falling(old: State, new: State) -> list[str]:
    """7: what others compare with never falls: revisions and the highest token of each writer."""
    found = []
    for name in ("endpoint_revision", "replica_revision", "inventory_revision", "operation_counter"):
        if getattr(new.meta, name) < getattr(old.meta, name):
            found.append(f"{name} fell from {getattr(old.meta, name)} to {getattr(new.meta, name)}")
    found += [f"the token of {w} fell" for w, token in old.meta.fencing.items() if new.meta.fencing.get(w, 0) < token]
    found += [
        f"pool {name} fell to state revision {new.pools[name].state_revision}"
        for name in old.pools.keys() & new.pools.keys()
        if new.pools[name].state_revision < old.pools[name].state_revision
    ]
    return found


def _without_decision(state: State) -> list[str]:
    """10: every operation has its decision, and no pool state has two transitions."""
    found = [f"{o.operation_id} has no decision" for o in state.operations.values() if not o.decision_id]
    revisions = [
        o.pool_revision for o in state.operations.values() if o.kind is OperationKind.TRANSITION and o.pool_revision
    ]
    found += [f"two transitions for state revision {r}" for r in sorted(set(revisions)) if revisions.count(r) > 1]
    return found


def _prewarmed_unasked(old: State, new: State) -> list[str]:
    """A pool that does not ask for it has no pre-warming, one that does has one at a time."""
    prewarms = [o for o in new.operations.values() if o.kind is OperationKind.PREWARM and not o.finished]
    found = [
        f"{o.operation_id} warms up for a pool that did not ask"
        for o in prewarms
        if o.operation_id not in old.operations and not new.pools[o.subject].prewarm
    ]
    subjects = [operation.subject for operation in prewarms]
    found += [f"two pre-warmings in {name}" for name in sorted(set(subjects)) if subjects.count(name) > 1]
    return found


def _silenced_by_prewarming(old: State, new: State) -> list[str]:
    """Who makes room for a pre-warming leaves somebody of its role who serves."""
    prewarms = {o.operation_id for o in new.operations.values() if o.kind is OperationKind.PREWARM}
    found = []
    for name, replica in new.replicas.items():
        hidden = replica.life_cycle is LifeCycle.DRAINING and _was_active(old.replicas.get(name))
        if not hidden or prewarms.isdisjoint(hold.reason for hold in replica.holds):
            continue
        role = (replica.spec.service, replica.spec.role)
        if not any(r.routable for r in new.replicas.values() if (r.spec.service, r.spec.role) == role):
            found.append(f"{name} is hidden for a pre-warming, and nobody else of {role[0]} serves")
    return found
