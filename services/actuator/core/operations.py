"""Operations: steps side by side, one outcome. A failed step takes an atomic operation back as a whole.

A roll-back is no second machinery: every step that had begun gets its goal turned round, so it is as careful and as
resumable as the way forward. An OVERLAY is not atomic: one broken server does not undo a pool.
"""

from collections.abc import Mapping
from dataclasses import replace

from actuator.core import prewarming
from actuator.core.gpu_occupancy import exited
from actuator.core.model import ActionKind, Goal, Operation, OperationKind, OperationState, Replica, Step, StepKind
from actuator.core.removal import toward_absent
from actuator.core.sleeping import restore, toward_asleep
from actuator.core.steps import fail, phase, succeed
from actuator.core.transaction import Transaction
from actuator.core.waking import await_creation, create, recreate, toward_awake
from trimtab.domain.vocabulary import LifeCycle

INVERSE: Mapping[StepKind, Goal] = {
    StepKind.RELEASE: Goal.AWAKE,
    StepKind.WAKE: Goal.ASLEEP,
    StepKind.CREATE: Goal.ABSENT,
    StepKind.DELETE: Goal.AWAKE,
}
"""Where a roll-back takes the replica of a step of that kind."""


def advance(d: Transaction, operation: Operation) -> Operation:
    """One look at an operation whose steps are known; the result is kept in the draft."""
    broken = prewarming.broken(d, operation)
    if broken:
        operation = begin_rollback(d, operation, f"rolled back: {broken}")
    for index, step in enumerate(operation.steps):
        advanced = _advance_step(d, operation, step)
        if advanced is not step:
            steps = (*operation.steps[:index], advanced, *operation.steps[index + 1 :])
            operation = replace(operation, steps=steps)
    if operation.state is OperationState.PENDING:
        operation = replace(operation, state=OperationState.RUNNING)
    operation = _conclude(d, operation)
    return keep(d, operation)


def keep(d: Transaction, operation: Operation) -> Operation:
    """Stores it with its time when something changed."""
    before = d.operations.get(operation.operation_id)
    if before != operation:
        operation = replace(operation, update_s=d.now_s)
        d.operations[operation.operation_id] = operation
    return operation


def begin_rollback(d: Transaction, operation: Operation, reason: str, *, cancelled: bool = False) -> Operation:
    """Turns every step round that had begun. One that still waited for others has none and ends at once."""
    if operation.waits_for:
        state = OperationState.CANCELLED if cancelled else OperationState.ROLLED_BACK
        return replace(operation, state=state, waits_for=(), detail=reason, cancelled=cancelled)
    steps = tuple(_turn_round(d, step) for step in operation.steps)
    return replace(
        operation,
        state=OperationState.ROLLING_BACK,
        steps=steps,
        detail=reason,
        cancelled=cancelled,
        deadline_s=d.now_s + d.limits.rollback_s,
    )


def _turn_round(d: Transaction, step: Step) -> Step:
    if step.state is OperationState.PENDING:
        return replace(step, state=OperationState.CANCELLED, phase="never begun", end_s=d.now_s)
    if step.kind is StepKind.CREATE and step.goal is Goal.ASLEEP and step.state is OperationState.SUCCEEDED:
        # Pre-warmed: it keeps no GPU from another replica, and a boot is expensive.
        return step
    return step.turned(INVERSE[step.kind], OperationState.ROLLING_BACK, "rolling back")


def _came_up_again(d: Transaction, operation: Operation, step: Step) -> bool:
    """Whether a server that an atomic operation has put to sleep, or seen dead, has started anew and is awake.

    The operation answers for it until it ends, and another step of it may be waiting for its GPUs.
    """
    if not operation.atomic or not operation.answers_for(step) or not step.finished:
        return False
    never_woken = operation.state is OperationState.ROLLING_BACK and step.kind is StepKind.WAKE
    replica, probe = d.replicas.get(step.replica), d.probe(step.replica)
    return (
        (step.goal is Goal.ASLEEP or never_woken)
        and step.state is not OperationState.FAILED
        and replica is not None
        and replica.life_cycle is LifeCycle.STARTING
        and probe is not None
        and probe.healthy
        and not probe.sleeping
    )


def _taken_up_again(operation: Operation, step: Step) -> Step:
    rolling_back = operation.state is OperationState.ROLLING_BACK
    state = OperationState.ROLLING_BACK if rolling_back else OperationState.RUNNING
    return replace(step.turned(Goal.ASLEEP, state, "it came up again"), asked=None)


def _advance_step(d: Transaction, operation: Operation, step: Step) -> Step:
    if _came_up_again(d, operation, step):
        step = _taken_up_again(operation, step)
    if step.finished:
        return step
    if step.state is OperationState.PENDING:
        if step.kind is StepKind.DELETE and _creates_pending(operation):
            return phase(step, "waiting for the new replicas")
        donor = prewarming.awaited_donor(d, operation, step)
        if donor:
            return phase(step, f"waiting for {donor} to sleep")
        step = replace(step, state=OperationState.RUNNING, start_s=d.now_s)
    replica = d.replicas.get(step.replica)
    if replica is None:
        return _without_replica(d, operation, step)
    if step.goal is not Goal.ABSENT and step.kind is StepKind.CREATE:
        if step.asked is ActionKind.CREATE:
            return await_creation(d, step, replica)
        if replica.life_cycle is LifeCycle.TERMINATING or _long_exited(d, replica):
            return recreate(d, step, replica)
    if step.goal is Goal.ASLEEP:
        return toward_asleep(d, operation, step, replica)
    if step.goal is Goal.AWAKE:
        return toward_awake(d, operation, step, replica)
    return toward_absent(d, operation, step, replica)


def _without_replica(d: Transaction, operation: Operation, step: Step) -> Step:
    if step.goal is Goal.ABSENT:
        return succeed(d, step, "gone")
    if step.kind is StepKind.CREATE:
        return create(d, operation, step)
    if step.goal is Goal.ASLEEP:
        return succeed(d, step, "it does not exist any more")
    return fail(d, step, "it does not exist any more")


def _creates_pending(operation: Operation) -> bool:
    return any(step.kind is StepKind.CREATE and not step.finished for step in operation.steps)


def _long_exited(d: Transaction, replica: Replica) -> bool:
    return (
        replica.life_cycle is LifeCycle.FAILED
        and exited(replica, d.world)
        and d.now_s - replica.since_s >= d.limits.exited_grace_s
    )


def _conclude(d: Transaction, operation: Operation) -> Operation:
    failed = [step for step in operation.steps if step.state is OperationState.FAILED]
    unfinished = [step for step in operation.steps if not step.finished]
    late = d.now_s >= operation.deadline_s
    if operation.state is OperationState.ROLLING_BACK:
        return _conclude_rollback(d, operation, late=late)
    if not operation.atomic:
        return _conclude_overlay(d, operation, late=late)
    if failed:
        return begin_rollback(d, operation, f"rolled back: {failed[0].replica} {failed[0].detail}")
    if unfinished and late:
        first = unfinished[0]
        return begin_rollback(d, operation, f"rolled back: not done in time, {first.replica} {first.phase}")
    if prewarming.donors_may_return(operation):
        return prewarming.send_back(operation)
    if unfinished:
        return operation
    return replace(operation, state=OperationState.SUCCEEDED, detail=_summary(operation))


def _conclude_rollback(d: Transaction, operation: Operation, *, late: bool) -> Operation:
    steps = operation.steps
    if late:
        steps = tuple(
            step if step.finished else fail(d, step, f"not rolled back in time: {step.phase}") for step in steps
        )
        operation = replace(operation, steps=steps)
    if any(not step.finished for step in steps):
        return operation
    failed = [step for step in steps if step.state is OperationState.FAILED]
    if failed:
        text = "; ".join(f"{step.replica} {step.detail}" for step in failed)
        return replace(operation, state=OperationState.FAILED, detail=f"{operation.detail}; not undone: {text}")
    state = OperationState.CANCELLED if operation.cancelled else OperationState.ROLLED_BACK
    return replace(operation, state=state)


def _conclude_overlay(d: Transaction, operation: Operation, *, late: bool) -> Operation:
    before = d.operations[operation.operation_id].steps
    steps = tuple(
        # What had ended before answers for its replica no longer; another operation may be at work there.
        step if known.finished and step.finished else _overlay_step(d, step, late=late)
        for known, step in zip(before, operation.steps, strict=True)
    )
    if steps != operation.steps:
        operation = replace(operation, steps=steps)
    if any(not step.finished for step in steps):
        return operation
    bad = [step for step in steps if step.state not in (OperationState.SUCCEEDED, OperationState.CANCELLED)]
    if not bad:
        return replace(operation, state=OperationState.SUCCEEDED, detail=_summary(operation))
    text = "; ".join(f"{step.replica} {step.detail or step.phase}" for step in bad)
    return replace(operation, state=OperationState.FAILED, detail=text)


def _overlay_step(d: Transaction, step: Step, *, late: bool) -> Step:
    """What a step leaves behind that fails now is cleared away, so that it does not keep a GPU from the others."""
    if late and not step.finished:
        step = fail(d, step, f"not done in time: {step.phase}")
    if step.state is not OperationState.FAILED or step.goal is Goal.ABSENT:
        return step
    replica = d.replicas.get(step.replica)
    if replica is None:
        return step
    if replica.life_cycle is LifeCycle.DRAINING and not replica.told_to_sleep:
        restore(d, replica)
    elif step.kind is StepKind.CREATE and replica.life_cycle is not LifeCycle.TERMINATING and not late:
        return replace(
            step,
            goal=Goal.ABSENT,
            state=OperationState.ROLLING_BACK,
            phase="clearing away",
            attempts=0,
            not_before_s=0.0,
        )
    return step


def _summary(operation: Operation) -> str:
    if operation.kind is OperationKind.PREWARM:
        return prewarming.summary(operation)
    words = {
        StepKind.RELEASE: "released",
        StepKind.WAKE: "woke",
        StepKind.CREATE: "created",
        StepKind.DELETE: "deleted",
    }
    parts = []
    for kind in (StepKind.RELEASE, StepKind.WAKE, StepKind.CREATE, StepKind.DELETE):
        names = [
            step.replica for step in operation.steps if step.kind is kind and step.state is OperationState.SUCCEEDED
        ]
        if names:
            shown = ", ".join(names) if len(names) <= 4 else f"{len(names)} replicas"
            parts.append(f"{words[kind]} {shown}")
    left = [f"left {step.replica} to pre-warming" for step in operation.steps if step.state is OperationState.CANCELLED]
    return "; ".join([*parts, *left])
