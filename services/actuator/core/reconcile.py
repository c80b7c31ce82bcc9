"""From desired state to operations: the steps of a pool's replicas, and corrections of deviations.

Level-triggered: steps follow from the records as they are, never from what was asked before, and a replica that an
unfinished operation has a step for is left to that operation.
"""

from dataclasses import replace

from actuator.core.gpu_occupancy import exited, in_the_way, sharing
from actuator.core.model import (
    Goal,
    Operation,
    OperationKind,
    OperationState,
    PlacedSpec,
    Pool,
    Replica,
    State,
    Step,
    StepKind,
)
from actuator.core.operations import advance, keep
from actuator.core.prewarming import holder
from actuator.core.transaction import Transaction
from trimtab.domain.vocabulary import HoldOwner, LifeCycle

_OWN_HOLDS = frozenset({HoldOwner.START_UP, HoldOwner.RELEASE, HoldOwner.SOFT_SCALE_IN})
_CORRECTION_MEMORY_S = 600.0


def plan_pool(d: Transaction, pool: Pool, awake: frozenset[str]) -> list[Step]:
    """The steps that bring the pool's unclaimed replicas to ``awake``, by name."""
    claimed = d.claimed()
    steps = []
    for placed in sorted(pool.overlay, key=lambda placed: placed.replica):
        if placed.replica not in claimed:
            step = _step_for(d, placed, d.replicas.get(placed.replica), wanted=placed.replica in awake, pool=pool)
            if step is not None:
                steps.append(step)
    overlay = {placed.replica for placed in pool.overlay}
    for name in sorted(d.replicas):
        replica = d.replicas[name]
        if replica.spec.pool == pool.pool and name not in overlay and name not in claimed:
            steps.append(_delete(replica))
    return steps


def _delete(replica: Replica) -> Step:
    return Step(kind=StepKind.DELETE, goal=Goal.ABSENT, replica=replica.name, service=replica.spec.service)


def _step_for(d: Transaction, placed: PlacedSpec, replica: Replica | None, *, wanted: bool, pool: Pool) -> Step | None:
    goal = Goal.AWAKE if wanted else Goal.ASLEEP
    if replica is None or (replica.life_cycle is LifeCycle.FAILED and exited(replica, d.world)):
        if _brought_up(pool) and placed.replica in pool.effective_awake and not wanted:
            # A donor that is dead or gone gives its GPUs at once; it is created again as a sleeper later.
            return Step(kind=StepKind.RELEASE, goal=goal, replica=placed.replica, service=placed.service)
        return Step(kind=StepKind.CREATE, goal=goal, replica=placed.replica, service=placed.service, placed=placed)
    if replica.life_cycle is LifeCycle.TERMINATING:
        # The operation that deleted it gave up. It keeps its GPUs until it is gone; then it is made again.
        return _delete(replica)
    changed = wanted != (placed.replica in pool.effective_awake)
    if replica.life_cycle in (LifeCycle.FAILED, LifeCycle.UNKNOWN) and not changed:
        return None
    if wanted and not _shown(replica):
        return Step(kind=StepKind.WAKE, goal=goal, replica=placed.replica, service=placed.service)
    if not wanted and replica.life_cycle is not LifeCycle.SLEEPING and not _only_starting(d, replica):
        return Step(kind=StepKind.RELEASE, goal=goal, replica=placed.replica, service=placed.service)
    return None


def _only_starting(d: Transaction, replica: Replica) -> bool:
    """Not up yet, so it cannot be put to sleep; it may be waiting for the memory that its neighbour uses."""
    probe = d.probe(replica.name)
    return replica.life_cycle is LifeCycle.STARTING and (probe is None or not probe.healthy)


def _shown(replica: Replica) -> bool:
    return replica.life_cycle is LifeCycle.ACTIVE and not any(hold.owner in _OWN_HOLDS for hold in replica.holds)


def open_pool_operation(d: Transaction, pool: Pool, waits_for: tuple[str, ...]) -> Operation | None:
    """The operation for the pool's newest state; None when nothing has to change."""
    steps = () if waits_for else _steps_of_newest(d, pool)
    if not steps and not waits_for:
        settle_pool(d, pool, pool.awake)
        return None
    kind = _kind_of(pool, steps)
    operation = Operation(
        operation_id=d.next_operation_id(),
        kind=kind,
        subject=pool.pool,
        create_s=d.now_s,
        update_s=d.now_s,
        deadline_s=_deadline_s(d, pool, kind, steps),
        decision_id=pool.decision_id,
        pool_revision=pool.state_revision,
        steps=steps,
        waits_for=waits_for,
    )
    d.pools[pool.pool] = replace(pool, operation_id=operation.operation_id)
    d.operations[operation.operation_id] = operation
    return operation


def _steps_of_newest(d: Transaction, pool: Pool) -> tuple[Step, ...]:
    """After the bring-up a new state is a transition of what changed in the awake set, or a change of the overlay.

    What else is out of order is put right by corrections of its own, so that no transition waits for it.
    """
    steps = plan_pool(d, pool, frozenset(pool.awake))
    if not _brought_up(pool):
        return tuple(steps)
    moves = tuple(step for step in steps if _moves(pool, step))
    return moves or tuple(step for step in steps if step.kind in (StepKind.CREATE, StepKind.DELETE))


def _moves(pool: Pool, step: Step) -> bool:
    """Whether the step changes the awake set. A replica that is to be awake and does not exist is made for it."""
    return step.goal is not Goal.ABSENT and (step.goal is Goal.AWAKE) != (step.replica in pool.effective_awake)


def _brought_up(pool: Pool) -> bool:
    return pool.settled_revision > 0


def _kind_of(pool: Pool, steps: tuple[Step, ...]) -> OperationKind:
    transition = _brought_up(pool) and all(_moves(pool, step) for step in steps)
    return OperationKind.TRANSITION if transition else OperationKind.OVERLAY


def _deadline_s(d: Transaction, pool: Pool, kind: OperationKind, steps: tuple[Step, ...]) -> float:
    limits = d.limits
    if kind is OperationKind.OVERLAY:
        return d.now_s + limits.overlay_s
    drain_s = pool.drain_timeout_s or limits.default_drain_s
    start_ups_s = _start_ups_s(d, pool, steps)
    return d.now_s + drain_s + limits.pinned_wait_s + limits.sleeping_s + limits.reactivating_s + start_ups_s


def _start_ups_s(d: Transaction, pool: Pool, steps: tuple[Step, ...]) -> float:
    """Time for servers that have to come up before the steps are done.

    One that is to be awake and is made, or starts; and before it those that wait for the same memory: they may get it
    first, and have to be up before they can be put to sleep.
    """
    starts_s = sleeps_s = 0.0
    for step in steps:
        replica = d.replicas.get(step.replica)
        starting = replica is not None and replica.life_cycle is LifeCycle.STARTING
        if step.kind is StepKind.CREATE or (step.goal is Goal.AWAKE and starting):
            starts_s = d.limits.starting_s
        placed = step.placed or pool.placed(step.replica)
        if step.goal is Goal.AWAKE and placed is not None:
            ahead = sum(other.life_cycle is LifeCycle.STARTING for other in sharing(placed, d.replicas))
            sleeps_s = max(sleeps_s, ahead * (d.limits.starting_s + d.limits.sleeping_s))
    return starts_s + sleeps_s


def settle_pool(d: Transaction, pool: Pool, awake: tuple[str, ...]) -> None:
    """The pool's newest state is carried out, or given up: ``awake`` is kept up from now on."""
    d.pools[pool.pool] = replace(pool, settled_revision=pool.state_revision, effective_awake=tuple(sorted(set(awake))))


def conclude_pools(d: Transaction) -> None:
    """What operations that ended in this step mean for the awake set that is kept up."""
    for operation_id in sorted(d.operations):
        operation = d.operations[operation_id]
        before = d.base.operations.get(operation_id)
        ended = operation.finished and (before is None or not before.finished)
        pool = d.pools.get(operation.subject)
        # A bring-up that ends after a newer state was settled was turned by that one, and says nothing of its own.
        overtaken = pool is not None and not operation.atomic and operation.pool_revision < pool.settled_revision
        if ended and pool is not None and operation.pool_revision > 0 and not overtaken:
            d.pools[pool.pool] = replace(
                pool,
                settled_revision=max(pool.settled_revision, operation.pool_revision),
                effective_awake=tuple(sorted(_awake_after(d, pool, operation))),
            )


def _awake_after(d: Transaction, pool: Pool, operation: Operation) -> set[str]:
    awake = set(pool.effective_awake)
    newest = operation.pool_revision == pool.state_revision
    if newest and (operation.state is OperationState.SUCCEEDED or not operation.atomic):
        return set(pool.awake)
    for step in operation.steps:
        if operation.state is OperationState.FAILED and operation.atomic:
            # Neither done nor undone: what is awake now stays so until the next state comes.
            replica = d.replicas.get(step.replica)
            is_awake = replica is not None and _shown(replica)
        elif operation.state is OperationState.SUCCEEDED or not operation.atomic:
            is_awake = step.goal is Goal.AWAKE
        else:
            is_awake = step.kind is StepKind.RELEASE
        (awake.add if is_awake else awake.discard)(step.replica)
    return awake


def without_lost_operation(state: State, pool: Pool) -> Pool:
    """The pool, when an operator has removed the record of the operation that it waits for, as after a failed one.

    Neither done nor undone: what is awake now stays so until the next state comes.
    """
    settled = pool.settled_revision == pool.state_revision
    refused = any(record.name == pool.operation_id for record in state.refused)
    if settled or not pool.operation_id or pool.operation_id in state.operations or refused:
        return pool
    found = (state.replicas.get(placed.replica) for placed in pool.overlay)
    awake = sorted(replica.name for replica in found if replica is not None and _shown(replica))
    return replace(pool, settled_revision=pool.state_revision, effective_awake=tuple(awake))


def start_waiting(d: Transaction) -> None:
    """Compute the steps of operations whose predecessors have ended."""
    for operation in list(d.unfinished()):
        if not operation.waits_for or d.held.operation(operation) is not None:
            continue
        others = [d.operations.get(other) for other in operation.waits_for]
        if any(other is not None and not other.finished for other in others):
            continue
        pool = d.pools.get(operation.subject)
        if pool is None:
            # An operator removed the record of its pool, which could not be read: nothing says what it was to reach.
            detail = "cancelled: the record of its pool was removed while it waited"
            keep(d, replace(operation, waits_for=(), steps=(), state=OperationState.CANCELLED, detail=detail))
            continue
        steps = _steps_of_newest(d, pool)
        kind = _kind_of(pool, steps)
        ready = replace(
            operation,
            waits_for=(),
            steps=steps,
            kind=kind,
            deadline_s=_deadline_s(d, pool, kind, steps),
            detail="" if steps else "nothing had to change",
        )
        keep(d, ready)


def correct(d: Transaction) -> None:
    """Opens operations for what is out of order and belongs to none: restarted, lost, woken or slept by others.

    One operation a replica: none waits for another's trouble.
    """
    for name in sorted(d.pools):
        pool = d.pools[name]
        touched = _brought_up(pool) and d.held.subject(name) is None
        steps = plan_pool(d, pool, _kept_up(pool)) if touched else []
        # Capacity first: what is to be awake comes before what is to sleep.
        for step in sorted(steps, key=lambda step: (step.goal is not Goal.AWAKE, step.replica)):
            if _can_begin(d, step) and _may_correct(d, step.replica):
                _open_correction(d, name, step, pool.decision_id)
    claimed = d.claimed()
    for name in sorted(d.replicas):
        replica = d.replicas[name]
        free = not replica.spec.pool and name not in claimed and d.held.replica(replica) is None
        if free and _may_correct(d, name):
            for step in _scaled_steps(d, replica):
                _open_correction(d, replica.spec.group or name, step, replica.spec.decision_id)


def _kept_up(pool: Pool) -> frozenset[str]:
    """What corrections keep awake; while a newer state is carried out, only what stays awake in it."""
    kept = frozenset(pool.effective_awake)
    return kept if pool.settled_revision == pool.state_revision else kept & frozenset(pool.awake)


def _can_begin(d: Transaction, step: Step) -> bool:
    """Whether a server can be made: it comes up awake, so its GPUs must be idle."""
    if step.placed is None:
        return True
    return not in_the_way(step.placed, d.replicas, d.world) and not holder(d, step.placed)


def _scaled_steps(d: Transaction, replica: Replica) -> list[Step]:
    spec = replica.spec
    if replica.life_cycle is LifeCycle.TERMINATING:
        return [_delete(replica)]
    if replica.life_cycle is LifeCycle.FAILED and exited(replica, d.world) and spec.group:
        made = Step(
            kind=StepKind.CREATE, goal=Goal.AWAKE, replica=spec.replica, service=spec.service, placed=replica.placed
        )
        return [made]
    probe = d.probe(replica.name)
    running = replica.life_cycle is LifeCycle.STARTING and probe is not None and probe.healthy
    asleep_by_others = replica.life_cycle in (LifeCycle.SLEEPING, LifeCycle.REACTIVATING) and bool(spec.group)
    if running or asleep_by_others or replica.life_cycle is LifeCycle.DRAINING:
        return [Step(kind=StepKind.WAKE, goal=Goal.AWAKE, replica=spec.replica, service=spec.service)]
    return []


def _may_correct(d: Transaction, replica: str) -> bool:
    """Corrections of a replica that keep failing come ever later."""
    failures = [
        operation.update_s
        for operation in d.operations.values()
        if operation.pool_revision == 0
        and operation.state is OperationState.FAILED
        and d.now_s - operation.update_s < _CORRECTION_MEMORY_S
        and any(step.replica == replica for step in operation.steps)
    ]
    if not failures:
        return True
    wait_s = min(d.limits.max_backoff_s, d.limits.backoff_s * 2.0 ** len(failures))
    return d.now_s - max(failures) >= wait_s


def _open_correction(d: Transaction, subject: str, step: Step, decision_id: str) -> None:
    operation = Operation(
        operation_id=d.next_operation_id(),
        kind=OperationKind.OVERLAY,
        subject=subject,
        create_s=d.now_s,
        update_s=d.now_s,
        deadline_s=d.now_s + d.limits.overlay_s,
        decision_id=decision_id,
        steps=(step,),
    )
    d.operations[operation.operation_id] = operation
    advance(d, operation)
