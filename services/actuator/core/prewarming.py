"""Pre-warming: a cold replica of a pool is booted ahead of need and put to sleep, so that its next wake is a hot one.

Off unless the pool asks for it (``Pool.prewarm``). A cold replica whose GPUs are idle is made and put to sleep by a
correction in any case. This module handles those whose GPUs serve. One operation (``PREWARM``) puts the replicas that
serve there to sleep, boots the cold one, puts it to sleep and wakes the others again; a step that fails rolls the whole
back.

Limits: it is not urgent, so it begins only in a pool in which nothing is under way, with donors whose role does without
them, and is given up as soon as their role suffers or a newer state needs the GPUs or the role. Giving up deletes
servers that still boot: that frees GPUs soonest, in a time that does not depend on the boot.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from actuator.core.gpu_occupancy import exited, in_the_way
from actuator.core.guard import suffering
from actuator.core.model import (
    Floor,
    Goal,
    Gpu,
    Operation,
    OperationKind,
    OperationState,
    PlacedSpec,
    Pool,
    Replica,
    Step,
    StepKind,
)
from actuator.core.sleeping import floor_of
from actuator.core.transaction import Transaction
from trimtab.domain.vocabulary import LifeCycle, Role

_SERVED = (LifeCycle.ACTIVE, LifeCycle.DRAINING, LifeCycle.SLEEPING)


# Beginning


def prewarm(d: Transaction) -> None:
    """Opens at most one operation in each pool that asks for it and is quiet."""
    for name in sorted(d.pools):
        pool = d.pools[name]
        if pool.prewarm and d.held.subject(name) is None and _quiet(d, pool) and _rested(d, pool):
            found = _choose(d, pool)
            if found is not None:
                _open(d, pool, *found)


def _quiet(d: Transaction, pool: Pool) -> bool:
    """Brought up, and nothing is under way or ended lately, but for sleepers that wait until their GPUs are free."""
    if pool.settled_revision == 0 or any(placed.replica in d.world.busy for placed in pool.overlay):
        return False
    for operation in d.operations.values():
        if operation.subject != pool.pool:
            continue
        if operation.finished:
            if d.now_s - operation.update_s < d.limits.prewarm_after_s:
                return False
        elif not operation.steps or not all(step.finished or _only_waits(d, step) for step in operation.steps):
            return False
    return True


def _only_waits(d: Transaction, step: Step) -> bool:
    """For GPUs to make a sleeper on, or with a deletion for such a sleeper."""
    if step.kind is StepKind.DELETE:
        return step.state is OperationState.PENDING
    return step.kind is StepKind.CREATE and step.goal is Goal.ASLEEP and step.replica not in d.replicas


def _rested(d: Transaction, pool: Pool) -> bool:
    """After attempts that came to nothing, one after the other, the next comes ever later."""
    ended = [o for o in d.operations.values() if _is_of(o, pool.pool) and o.finished]
    ended.sort(key=lambda operation: (operation.update_s, operation.operation_id))
    failures = 0
    for operation in reversed(ended):
        if operation.state is OperationState.SUCCEEDED:
            break
        failures += 1
    if failures == 0:
        return True
    wait_s = min(d.limits.max_prewarm_backoff_s, d.limits.prewarm_backoff_s * 2.0 ** min(failures - 1, 32))
    return d.now_s - ended[-1].update_s >= wait_s


def _is_of(operation: Operation, pool: str) -> bool:
    return operation.kind is OperationKind.PREWARM and operation.subject == pool


def _choose(d: Transaction, pool: Pool) -> tuple[tuple[PlacedSpec, ...], tuple[Replica, ...]] | None:
    """The replica to warm up and its donors: first what failed least often, then the fewest and least loaded donors."""
    best: tuple[tuple[int, int, int, str], tuple[PlacedSpec, ...], tuple[Replica, ...]] | None = None
    for placed in sorted(pool.overlay, key=lambda placed: placed.replica):
        if placed.replica in pool.awake or placed.replica in pool.effective_awake or not _cold(d, placed):
            continue
        found = _parts(d, pool, placed)
        if found is None:
            continue
        cold, donors = found
        failures = sum(
            1
            for operation in d.operations.values()
            if _is_of(operation, pool.pool)
            and operation.state is not OperationState.SUCCEEDED
            and any(step.replica == placed.replica for step in operation.steps)
        )
        rank = (failures, len(donors), sum(_in_flight(d, donor) for donor in donors), placed.replica)
        if best is None or rank < best[0]:
            best = (rank, cold, donors)
    return best[1:] if best is not None else None


def _cold(d: Transaction, placed: PlacedSpec) -> bool:
    """It does not exist, its process has ended, or it waits for memory; and has done so for a while."""
    replica = d.replicas.get(placed.replica)
    if replica is None:
        return d.world.listed is not None and placed.replica not in d.world.listed
    if d.now_s - replica.since_s < d.limits.prewarm_after_s:
        return False
    return _waits(d, replica) or (replica.life_cycle is LifeCycle.FAILED and exited(replica, d.world))


def _waits(d: Transaction, replica: Replica) -> bool:
    """It runs and nothing listens at its address. What cannot be seen is not taken for that."""
    probe = d.probe(replica.name)
    return replica.life_cycle is LifeCycle.STARTING and probe is not None and not probe.healthy and probe.refused


def _parts(d: Transaction, pool: Pool, placed: PlacedSpec) -> tuple[tuple[PlacedSpec, ...], tuple[Replica, ...]] | None:
    """Cold replicas that come up when room is made for one, itself first, and its donors; None when it may not begin.

    Others that wait for the same memory may get it before it, so they are warmed up too.
    """
    claimed = d.claimed()
    cold: dict[str, PlacedSpec] = {placed.replica: placed}
    donors: dict[str, Replica] = {}
    for other in in_the_way(placed, d.replicas, d.world):
        if other.spec.pool != pool.pool or other.name in claimed:
            return None
        if _waits(d, other) and other.name not in pool.awake:
            cold[other.name] = other.placed
        elif _serves(d, pool, other):
            donors[other.name] = other
        else:
            return None
    for companion in cold.values():
        if any(third.name not in {**cold, **donors} for third in in_the_way(companion, d.replicas, d.world)):
            return None
    if not donors or not _role_can_do_without(d, pool, donors) or not _within_budget(pool, cold.values(), donors):
        return None
    return tuple(cold.values()), tuple(donors[name] for name in sorted(donors))


def _serves(d: Transaction, pool: Pool, replica: Replica) -> bool:
    """It is awake as it is meant to be, and all of that is seen."""
    probe = d.probe(replica.name)
    meant = replica.name in pool.awake and replica.name in pool.effective_awake
    seen = probe is not None and probe.healthy and probe.in_flight is not None
    return meant and replica.routable and replica.told_to_sleep is None and seen


def _role_can_do_without(d: Transaction, pool: Pool, donors: Mapping[str, Replica]) -> bool:
    """Check floor, residence and load of each role that gives: one replica stays, with room for the donors' load."""
    for service, role in sorted({(donor.spec.service, donor.spec.role) for donor in donors.values()}):
        members = [r for r in d.replicas.values() if (r.spec.service, r.spec.role) == (service, role) and r.routable]
        stay = [replica for replica in members if replica.name not in donors]
        if len(stay) < _least(d, members[0]):
            return False
        if any(d.now_s - replica.since_s < pool.residence_s for replica in members):
            return False
        meant = {s.replica for s in pool.overlay if (s.service, s.role) == (service, role)}.intersection(pool.awake)
        if not meant <= {replica.name for replica in members} or not _has_room(d, members, len(stay)):
            return False
    return True


def _least(d: Transaction, replica: Replica) -> int:
    """How many of its role have to go on serving: its floor, and one in any case."""
    return max(1, floor_of(d, replica))


def _has_room(d: Transaction, members: Iterable[Replica], stay: int) -> bool:
    """Whether no request waits and ``stay`` of them could hold the KV caches of all. Unknown counts as no room."""
    used = 0.0
    for replica in members:
        probe = d.probe(replica.name)
        if probe is None or probe.waiting != 0 or probe.kv_usage is None:
            return False
        used += probe.kv_usage
    return used <= stay * d.limits.prewarm_kv_usage


def _within_budget(pool: Pool, cold: Iterable[PlacedSpec], donors: Mapping[str, Replica]) -> bool:
    awake = [pool.placed(name) for name in set(pool.awake).union(pool.effective_awake)]
    used: set[Gpu] = {gpu for item in awake if item is not None and item.replica not in donors for gpu in item.gpus}
    return len(used.union(gpu for placed in cold for gpu in placed.gpus)) <= pool.budget_gpus


def _in_flight(d: Transaction, replica: Replica) -> int:
    probe = d.probe(replica.name)
    return probe.in_flight or 0 if probe is not None else 0


def _open(d: Transaction, pool: Pool, cold: tuple[PlacedSpec, ...], donors: tuple[Replica, ...]) -> None:
    releases = [
        Step(kind=StepKind.RELEASE, goal=Goal.ASLEEP, replica=donor.name, service=donor.spec.service)
        for donor in donors
    ]
    boots = [
        Step(kind=StepKind.CREATE, goal=Goal.ASLEEP, replica=placed.replica, service=placed.service, placed=placed)
        for placed in cold
    ]
    limits = d.limits
    drain_s = limits.default_drain_s + limits.release_wait_s
    boot_s = len(cold) * (limits.starting_s + limits.sleeping_s)
    operation = Operation(
        operation_id=d.next_operation_id(),
        kind=OperationKind.PREWARM,
        subject=pool.pool,
        create_s=d.now_s,
        update_s=d.now_s,
        deadline_s=d.now_s + drain_s + limits.sleeping_s + boot_s + limits.reactivating_s,
        decision_id=pool.decision_id,
        steps=(*releases, *boots),
    )
    _take_over(d, pool, {placed.replica for placed in cold})
    d.operations[operation.operation_id] = operation


def _take_over(d: Transaction, pool: Pool, cold: set[str]) -> None:
    """Steps of a bring-up that waited for the same GPUs."""
    for operation in list(d.unfinished()):
        if operation.subject != pool.pool:
            continue
        steps = tuple(
            replace(step, state=OperationState.CANCELLED, phase="left to pre-warming", end_s=d.now_s)
            if step.replica in cold and not step.finished
            else step
            for step in operation.steps
        )
        if steps != operation.steps:
            d.operations[operation.operation_id] = replace(operation, steps=steps, update_s=d.now_s)


# Under way


def awaited_donor(d: Transaction, operation: Operation, step: Step) -> str:
    """The replicas that a boot waits for. One that comes up by itself meanwhile is put to sleep at once."""
    if operation.kind is not OperationKind.PREWARM or step.kind is not StepKind.CREATE:
        return ""
    probe = d.probe(step.replica)
    if step.replica in d.replicas and probe is not None and probe.healthy:
        return ""
    awake = (other.replica for other in _donors(operation) if other.state is not OperationState.SUCCEEDED)
    return next(awake, "")


def broken(d: Transaction, operation: Operation) -> str:
    """Why a pre-warming is to be given up while its donors are away; empty while it may go on."""
    rolling_back = operation.state is OperationState.ROLLING_BACK
    if operation.kind is not OperationKind.PREWARM or rolling_back or _returning(operation):
        return ""
    pool = d.pools.get(operation.subject)
    if pool is None or not pool.prewarm:
        return "pre-warming was turned off"
    for step in _donors(operation):
        donor = d.replicas.get(step.replica)
        if donor is None or donor.life_cycle not in _SERVED:
            return f"{step.replica}, which made room, is {donor.life_cycle if donor is not None else 'gone'}"
        leaving = sum(1 for other in _donors(operation) if _serves_beside(d, other, donor))
        left = d.routable_count(donor.spec.service, donor.spec.role) - leaving
        if left < _least(d, donor):
            return f"{left} {donor.spec.service} would be left routable without {donor.name}"
        worse = suffering(d, step) if not donor.routable else ""
        if worse:
            return worse
    return ""


def _serves_beside(d: Transaction, step: Step, donor: Replica) -> bool:
    """A donor of the same role that is not hidden yet."""
    other = d.replicas.get(step.replica)
    same = other is not None and (other.spec.service, other.spec.role) == (donor.spec.service, donor.spec.role)
    return other is not None and same and other.routable


def donors_may_return(operation: Operation) -> bool:
    """Every cold replica sleeps, and the donors are not on their way back yet."""
    if operation.kind is not OperationKind.PREWARM or _returning(operation):
        return False
    return all(step.state is OperationState.SUCCEEDED for step in operation.steps if step.kind is StepKind.CREATE)


def send_back(operation: Operation) -> Operation:
    """The second half: the donors are woken."""
    steps = tuple(
        step.turned(Goal.AWAKE, OperationState.RUNNING, "coming back") if step.kind is StepKind.RELEASE else step
        for step in operation.steps
    )
    return replace(operation, steps=steps)


def summary(operation: Operation) -> str:
    """One sentence for an operation that succeeded."""
    cold = ", ".join(step.replica for step in operation.steps if step.kind is StepKind.CREATE)
    return f"pre-warmed {cold}; {', '.join(step.replica for step in _donors(operation))} serves again"


def _donors(operation: Operation) -> list[Step]:
    return [step for step in operation.steps if step.kind is StepKind.RELEASE]


def _returning(operation: Operation) -> bool:
    return any(step.goal is Goal.AWAKE for step in _donors(operation))


# Beside others


def holder(d: Transaction, placed: PlacedSpec) -> str:
    """The replica that is pre-warmed on GPUs of ``placed``, or empty. No other sleeper is made there meanwhile."""
    mine = set(placed.gpus)
    for operation in d.unfinished():
        if operation.kind is not OperationKind.PREWARM:
            continue
        pool = d.pools.get(operation.subject)
        for step in operation.steps:
            where = step.placed or (pool.placed(step.replica) if pool is not None else None)
            if operation.answers_for(step) and where is not None and not mine.isdisjoint(where.gpus):
                return next(other.replica for other in operation.steps if other.kind is StepKind.CREATE)
    return ""


def in_its_way(operation: Operation, before: Pool, pool: Pool) -> bool:
    """Whether an unfinished pre-warming has to give way to the pool's newer state.

    It goes on beside changes elsewhere: its replicas and its donors' roles are as they were, and no other replica gets
    its GPUs.
    """
    awake, donors = set(pool.awake), {step.replica for step in _donors(operation)}
    cold = [step for step in operation.steps if step.kind is StepKind.CREATE]
    if not pool.prewarm or not donors <= awake or any(step.replica in awake for step in cold):
        return True
    if any(pool.placed(step.replica) != step.placed for step in cold):
        return True
    gpus = {gpu for step in cold if step.placed is not None for gpu in step.placed.gpus}
    if any(not gpus.isdisjoint(s.gpus) for s in pool.overlay if s.replica in awake - donors):
        return True
    roles = {(s.service, s.role) for s in pool.overlay if s.replica in donors}
    return _awake_of(before, roles) != _awake_of(pool, roles) or _floors_of(before, roles) != _floors_of(pool, roles)


def _awake_of(pool: Pool, roles: set[tuple[str, Role]]) -> set[str]:
    return {s.replica for s in pool.overlay if s.replica in pool.awake and (s.service, s.role) in roles}


def _floors_of(pool: Pool, roles: set[tuple[str, Role]]) -> set[Floor]:
    return {floor for floor in pool.floors if (floor.service, floor.role) in roles}


def leave_to(operation: Operation, pool: Pool, now_s: float) -> Operation:
    """A roll-back without the steps that the newer state makes itself: donors that are to sleep, replicas to wake."""
    steps = []
    for step in operation.steps:
        awake = step.replica in pool.awake
        theirs = not awake if step.kind is StepKind.RELEASE else awake or pool.placed(step.replica) is None
        left = replace(step, state=OperationState.CANCELLED, phase="left to the newer state", asked=None, end_s=now_s)
        steps.append(left if theirs else step)
    return replace(operation, steps=tuple(steps))
