"""Towards ASLEEP: floor check, hold, acknowledgements, drain, ``/sleep``; or the hold is lifted and it waits.

The release of TRE (IV-C and V-C): routing is taken away first, the server stays awake while its requests end, and only
then is it committed to sleep, once nothing is in flight. The sleep counts only when ``/is_sleeping`` confirms it.
"""

from dataclasses import replace

from actuator.core import holds
from actuator.core.gpu_occupancy import exited
from actuator.core.guard import guard_broken, note_who_stay
from actuator.core.lifecycle import timeout_s
from actuator.core.model import ActionKind, Operation, OperationKind, Replica, Step, StepKind, Told
from actuator.core.steps import (
    asked,
    drain_timeout_s,
    drained,
    fail,
    forget_request,
    outstanding,
    past_deadline,
    phase,
    retry,
    succeed,
    told_to_sleep,
)
from actuator.core.transaction import Transaction
from actuator.core.world import Action
from trimtab.domain.vocabulary import HoldOwner, LifeCycle


def floor_of(d: Transaction, replica: Replica) -> int:
    """The least routable replicas of its role; 0 without a floor."""
    return sum(
        floor.min_replicas
        for pool in d.pools.values()
        for floor in pool.floors
        if floor.service == replica.spec.service and floor.role is replica.spec.role
    )


def toward_asleep(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """One look at a replica that is to sleep."""
    if replica.life_cycle is LifeCycle.SLEEPING:
        return succeed(d, step, "asleep")
    if replica.life_cycle is LifeCycle.ACTIVE:
        return hide(d, operation, step, replica, HoldOwner.RELEASE)
    if replica.life_cycle is LifeCycle.FAILED and exited(replica, d.world):
        if operation.kind is OperationKind.PREWARM and step.kind is StepKind.CREATE:
            return fail(d, step, "its process ended before it slept")
        return succeed(d, step, "its process is gone")
    if replica.life_cycle in (LifeCycle.FAILED, LifeCycle.UNKNOWN, LifeCycle.TERMINATING):
        return wait_for_return(d, step, replica)
    return settle(d, operation, step, replica)


def hide(d: Transaction, operation: Operation, step: Step, replica: Replica, owner: HoldOwner) -> Step:
    """Takes an active replica out of sight when its floor allows that."""
    if d.now_s < step.not_before_s:
        return step
    floor = floor_of(d, replica)
    remaining = d.routable_count(replica.spec.service, replica.spec.role) - (1 if replica.routable else 0)
    if remaining < floor:
        return phase(step, f"waiting: {remaining} routable would be left, the floor is {floor}")
    replica = d.hold(replica, owner, operation.operation_id)
    d.move(replica, LifeCycle.DRAINING)
    return phase(begin_drain(d, operation, step, replica), "hiding")


def begin_drain(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """The step with its drain deadlines, which do not depend on what hid the replica."""
    deadline_s = d.now_s + drain_timeout_s(d, operation)
    short = operation.kind in (OperationKind.TRANSITION, OperationKind.PREWARM)
    wait_s = d.limits.release_wait_s if short else d.limits.pinned_wait_s
    step = note_who_stay(d, step, replica)
    return replace(step, acknowledged_s=0.0, drain_deadline_s=deadline_s, give_up_s=deadline_s + wait_s)


def restore(d: Transaction, replica: Replica) -> Replica:
    """Show a hidden replica again that was not asked to sleep: lifts the actuator's own holds only."""
    replica = d.move(replica, LifeCycle.ACTIVE)
    replica = holds.lift(holds.lift(replica, HoldOwner.RELEASE), HoldOwner.SOFT_SCALE_IN)
    return d.keep(replica)


def floor_broken(d: Transaction, replica: Replica) -> bool:
    """Its role has fallen below the floor, by other causes, while it is being released."""
    return d.routable_count(replica.spec.service, replica.spec.role) < floor_of(d, replica)


def settle(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """Drains an awake, hidden replica and puts it to sleep."""
    if told_to_sleep(d, replica):
        return await_sleep(d, operation, step, replica)
    if outstanding(d, step) or d.now_s < step.not_before_s:
        return step
    if replica.life_cycle is LifeCycle.DRAINING and floor_broken(d, replica):
        restore(d, replica)
        return retry(d, step, "deferred: its role fell below the floor")
    broken = guard_broken(d, operation, step, replica)
    if replica.life_cycle is LifeCycle.DRAINING and broken:
        restore(d, replica)
        return fail(d, step, f"taken back: {broken}")
    probe = d.probe(replica.name)
    if replica.life_cycle is LifeCycle.STARTING and (probe is None or not probe.healthy):
        return _still_starting(d, step, replica)
    return _sleep_when_drained(d, operation, step, replica)


def _sleep_when_drained(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    if replica.life_cycle is LifeCycle.DRAINING and step.drain_deadline_s == 0.0:
        step = begin_drain(d, operation, step, replica)
    step, quiet = drained(d, step, replica)
    if quiet:
        return ask_sleep(d, operation, step, replica)
    if replica.life_cycle is LifeCycle.DRAINING:
        return past_deadline(d, step, replica) or step
    return step


def ask_sleep(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """Commits: written down before the shell does it, in the record, where it outlives the operation."""
    level, before = sleep_level_of(d, replica) or 1, replica.told_to_sleep
    if before is None or before.level < level:
        told = Told(level=level, since_s=d.now_s if before is None else before.since_s)
        d.keep(replace(replica, told_to_sleep=told))
    d.act(
        Action(
            kind=ActionKind.SLEEP,
            replica=replica.name,
            address=replica.address,
            sleep_level=level,
            repeated=before is not None,
        )
    )
    return asked(step, ActionKind.SLEEP, "falling asleep")


def sleep_level_of(d: Transaction, replica: Replica) -> int:
    """How deep its pool lets it sleep; 1 without a pool, 0 while its pool is not known, since the records were lost."""
    if not replica.spec.pool:
        return 1
    pool = d.pools.get(replica.spec.pool)
    return pool.sleep_level if pool is not None else 0


def level_of_sleeper(d: Transaction, replica: Replica) -> int:
    """At which level it sleeps, for all that is known now."""
    return replica.sleep_level or sleep_level_of(d, replica)


def await_sleep(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """A sleep is under way, or was when a crash came: then it is asked for again, once the server is idle.

    The request to sleep may have been stored and never sent, and meanwhile, without the store, the server was shown
    again: so it is hidden and drained as at first. One that did fall asleep is found so by the next look.
    """
    if outstanding(d, step):
        return step
    outcome = d.outcome(replica.name, ActionKind.SLEEP)
    if outcome is None:
        return _sleep_when_drained(d, operation, step, replica) if d.now_s >= step.not_before_s else step
    if outcome.busy:
        # A request came that no gateway sent; the server was left alone.
        return replace(forget_request(step), acknowledged_s=0.0, phase="draining: a request came in between")
    error = f"could not be put to sleep: {outcome.error}"
    return retry(d, forget_request(step), error, permanent=outcome.permanent)


def fall_asleep(d: Transaction, replica: Replica, reason: str) -> Replica:
    """Confirmed asleep: the start-up hold becomes a release hold, lifted by the next wake.

    What it lost in a deeper sleep stays lost until we wake it.
    """
    probe = d.probe(replica.name)
    said = probe.sleep_level if probe is not None else None
    told = replica.told_to_sleep.level if replica.told_to_sleep is not None else sleep_level_of(d, replica)
    level = max(said or told, replica.sleep_level)
    replica = d.move(replica, LifeCycle.SLEEPING)
    replica = holds.lift(holds.lift(replica, HoldOwner.START_UP), HoldOwner.SOFT_SCALE_IN)
    replica = holds.put(replica, HoldOwner.RELEASE, reason=reason, now_s=d.now_s)
    return d.keep(replace(replica, slept_once=True, sleep_level=level))


def wait_for_return(d: Transaction, step: Step, replica: Replica) -> Step:
    """A silent or dead server may come back; for a bounded time that is waited for."""
    if d.now_s - replica.since_s > d.limits.stuck_s:
        return fail(d, step, f"it is {replica.life_cycle}: {replica.detail or replica.cause}")
    return phase(step, f"waiting: it is {replica.life_cycle}")


def _still_starting(d: Transaction, step: Step, replica: Replica) -> Step:
    limit_s = timeout_s(LifeCycle.STARTING, d.limits)
    if limit_s is not None and d.now_s - max(replica.since_s, step.start_s) > limit_s:
        return fail(d, step, f"not ready {limit_s:.0f} s after its start")
    return phase(step, "starting")
