"""Towards AWAKE: GPUs free, ``/wake_up``, ready, a canary token, holds lifted; and the creation of replicas.

Also the roll-back of a release: a hidden replica that was not put to sleep is simply shown again; one that was asked
to sleep has to be asleep first, since it is not known when the server will carry that out.
"""

from dataclasses import replace

from actuator.core import holds
from actuator.core.gpu_occupancy import blockers, sharing
from actuator.core.lifecycle import timeout_s
from actuator.core.model import (
    ActionKind,
    Goal,
    Operation,
    OperationKind,
    OperationState,
    Replica,
    Step,
    StepKind,
)
from actuator.core.prewarming import holder
from actuator.core.sleeping import ask_sleep, await_sleep, floor_of, level_of_sleeper, restore, wait_for_return
from actuator.core.steps import (
    asked,
    drain_timeout_s,
    drained,
    fail,
    forget_request,
    outstanding,
    phase,
    retry,
    succeed,
    told_to_sleep,
)
from actuator.core.transaction import Transaction
from actuator.core.world import Action
from trimtab.domain.vocabulary import HoldOwner, LifeCycle

LEVEL_WITHOUT_WEIGHTS = 2


def toward_awake(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """One look at a replica that is to be routable."""
    if replica.life_cycle is LifeCycle.ACTIVE:
        return show(d, step, replica)
    if replica.life_cycle is LifeCycle.DRAINING:
        return _take_back(d, operation, step, replica)
    if replica.life_cycle is LifeCycle.SLEEPING:
        return _wake(d, step, replica)
    if replica.life_cycle in (LifeCycle.STARTING, LifeCycle.REACTIVATING):
        return _prove(d, operation, step, replica)
    return wait_for_return(d, step, replica)


def show(d: Transaction, step: Step, replica: Replica) -> Step:
    """Lifts the actuator's own holds; other owners' stay."""
    for owner in (HoldOwner.START_UP, HoldOwner.RELEASE, HoldOwner.SOFT_SCALE_IN):
        replica = holds.lift(replica, owner)
    d.keep(replica)
    if replica.holds:
        return succeed(d, step, f"awake, held by {', '.join(hold.owner for hold in replica.holds)}")
    return succeed(d, step, "routable")


def _take_back(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    if not replica.told_to_sleep:
        return show(d, forget_request(step), restore(d, replica))
    # Committed: it has to be asleep before it can be woken. The step goes on from SLEEPING when it is.
    return await_sleep(d, operation, step, replica)


def _wake(d: Transaction, step: Step, replica: Replica) -> Step:
    if outstanding(d, step) or d.now_s < step.not_before_s:
        return step
    taking_back = step.state is OperationState.ROLLING_BACK
    in_the_way = blockers(replica.placed, d.replicas, d.world, d.limits, taking_back=taking_back)
    if in_the_way:
        return phase(step, f"waiting for its GPUs: {in_the_way[0]}")
    d.move(replica, LifeCycle.REACTIVATING)
    return _ask_wake(d, step, replica)


def _ask_wake(d: Transaction, step: Step, replica: Replica) -> Step:
    level = level_of_sleeper(d, replica) or 1
    d.act(Action(kind=ActionKind.WAKE, replica=replica.name, address=replica.address, sleep_level=level))
    return asked(step, ActionKind.WAKE, "waking")


def _prove(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """From a running server to a routable one."""
    if outstanding(d, step):
        return step
    if told_to_sleep(d, replica):
        return _await_first_sleep(d, operation, step, replica)
    outcome = d.outcomes.get(replica.name)
    if outcome is not None and step.asked is outcome.kind:
        return _judge(d, step, replica)
    limit_s = timeout_s(replica.life_cycle, d.limits)
    since_s = max(replica.since_s, step.start_s)
    if limit_s is not None and d.now_s - since_s > limit_s:
        return fail(d, step, f"not ready {limit_s:.0f} s after it was {replica.life_cycle}")
    if d.now_s < step.not_before_s:
        return step
    rival = _rival(d, replica)
    if rival:
        return phase(step, f"waiting for its GPUs: {rival} is awake on them")
    return _prove_running(d, operation, step, replica)


def _prove_running(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    probe = d.probe(replica.name)
    if probe is None or not probe.healthy or not replica.address:
        return phase(step, "starting" if replica.life_cycle is LifeCycle.STARTING else "waiting for /health")
    if probe.sleeping and probe.as_of_s > replica.since_s:
        # A wake that did not take: a server that started meanwhile may have the memory.
        in_the_way = blockers(replica.placed, d.replicas, d.world, d.limits)
        if in_the_way:
            return phase(step, f"waiting for its GPUs: {in_the_way[0]}")
        return _ask_wake(d, step, replica)
    if replica.sleep_level == LEVEL_WITHOUT_WEIGHTS:
        # Another client woke it, or we did and the outcome was lost: it would answer without its model's weights.
        return _ask_wake(d, step, replica)
    if _must_sleep_once(d, operation, step, replica):
        # Gateways may still route to it by a set from before it started anew.
        step, quiet = drained(d, step, replica)
        if quiet:
            return ask_sleep(d, operation, step, replica)
        if operation.pool_revision > 0 or d.now_s - replica.since_s < drain_timeout_s(d, operation):
            return step
    return _ask_canary(d, step, replica)


def _must_sleep_once(d: Transaction, operation: Operation, step: Step, replica: Replica) -> bool:
    """Whether it has to sleep once before it is shown. A first sleep takes many times longer than later ones.

    At a pool's bring-up every replica that is made sleeps once. One that was started anew later does so before it is
    shown while enough of its role serve for the floor, and at least one; else, and in a transition, it is needed at
    once. One that cannot sleep then is shown all the same.
    """
    if operation.kind is not OperationKind.OVERLAY or not replica.spec.pool or replica.slept_once:
        return False
    if operation.pool_revision > 0:
        return step.kind is StepKind.CREATE
    serving = d.routable_count(replica.spec.service, replica.spec.role)
    return step.attempts == 0 and serving >= max(1, floor_of(d, replica))


def _await_first_sleep(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    outcome = d.outcome(replica.name, ActionKind.SLEEP)
    if outcome is not None and operation.pool_revision == 0 and not outcome.busy:
        # It can serve without that, unless the sleep may be under way: then it is asked for again.
        return retry(d, forget_request(step), f"did not sleep ahead of need: {outcome.error}")
    return await_sleep(d, operation, step, replica)


def _rival(d: Transaction, replica: Replica) -> str:
    """A neighbour that is seen awake on the GPUs of a starting server and has to sleep first.

    One that waits for memory is none. A replica that was woken got its GPUs from the ledger, and has none.
    """
    if replica.life_cycle is not LifeCycle.STARTING:
        return ""
    for other in sharing(replica.placed, d.replicas):
        if other.life_cycle in (LifeCycle.ACTIVE, LifeCycle.DRAINING, LifeCycle.REACTIVATING):
            return other.name
        probe = d.probe(other.name)
        # One that falls asleep stops its scheduler first, and gives its memory up last.
        awake = probe is not None and probe.healthy and (probe.paused or not probe.sleeping)
        if other.life_cycle is LifeCycle.STARTING and awake:
            return other.name
    return ""


def _ask_canary(d: Transaction, step: Step, replica: Replica) -> Step:
    action = Action(kind=ActionKind.CANARY, replica=replica.name, address=replica.address, model=replica.spec.model)
    d.act(action)
    return asked(step, ActionKind.CANARY, "waiting for a canary token")


def _judge(d: Transaction, step: Step, replica: Replica) -> Step:
    """What a wake or a canary brought."""
    outcome = d.outcomes[replica.name]
    if not outcome.ok:
        what = "could not be woken" if outcome.kind is ActionKind.WAKE else "gave no canary token"
        return retry(d, forget_request(step), f"{what}: {outcome.error}", permanent=outcome.permanent)
    if outcome.kind is ActionKind.WAKE:
        replica = d.keep(replace(replica, sleep_level=0))
        return _ask_canary(d, step, replica)
    if not replica.spec.model and outcome.served_model:
        # A given server listed without a model: gateways must call the model by the name that the server uses.
        replica = d.keep(replace(replica, spec=replace(replica.spec, model=outcome.served_model)))
    rival = _rival(d, replica)
    if rival:
        # It was woken while the token was under way.
        return phase(forget_request(step), f"waiting for its GPUs: {rival} is awake on them")
    return show(d, forget_request(step), d.move(replica, LifeCycle.ACTIVE))


def create(d: Transaction, operation: Operation, step: Step) -> Step:
    """Create a replica that does not exist: claim its GPUs by a record, then ask the backend."""
    placed = step.placed
    if placed is None:
        return fail(d, step, "it does not exist")
    if d.now_s < step.not_before_s:
        return step
    first = _must_go_first(d, operation, step)
    if first:
        return phase(step, f"waiting for {first} to sleep once")
    prewarmed = holder(d, placed) if step.goal is Goal.ASLEEP and operation.kind is not OperationKind.PREWARM else ""
    if prewarmed:
        return phase(step, f"waiting for its GPUs: {prewarmed} is pre-warmed on them")
    in_the_way = blockers(placed, d.replicas, d.world, d.limits)
    if in_the_way:
        return phase(step, f"waiting for its GPUs: {in_the_way[0]}")
    replica = Replica(
        spec=placed.spec, placement=placed.placement, life_cycle=LifeCycle.STARTING, since_s=d.now_s, cause="created"
    )
    d.hold(replica, HoldOwner.START_UP, operation.operation_id)
    d.act(Action(kind=ActionKind.CREATE, replica=placed.replica, placed=placed))
    return asked(step, ActionKind.CREATE, "creating")


def _must_go_first(d: Transaction, operation: Operation, step: Step) -> str:
    """A replica of the same bring-up that has to sleep once on these GPUs before this one takes them for good.

    One that cannot start because another replica serves on its GPUs is not waited for.
    """
    if step.goal is not Goal.AWAKE or step.placed is None:
        return ""
    mine = set(step.placed.gpus)
    for other in operation.steps:
        unfinished_sleeper = other.goal is Goal.ASLEEP and not other.finished and other.kind is StepKind.CREATE
        if not unfinished_sleeper or other.placed is None or mine.isdisjoint(other.placed.gpus):
            continue
        if not any(replica.life_cycle is LifeCycle.ACTIVE for replica in sharing(other.placed, d.replicas)):
            return other.replica
    return ""


def await_creation(d: Transaction, step: Step, replica: Replica) -> Step:
    """Wait for the backend that was asked to create it; after a crash it is asked again, without further effect."""
    if outstanding(d, step):
        return step
    outcome = d.outcomes.get(replica.name)
    listed = d.world.listed is not None and replica.name in d.world.listed
    if outcome is not None and outcome.kind is ActionKind.CREATE:
        if outcome.ok:
            return phase(forget_request(step), "starting")
        if outcome.permanent and not listed:
            del d.replicas[replica.name]
            return fail(d, forget_request(step), f"could not be created: {outcome.error}")
        return retry(d, step, f"could not be created: {outcome.error}")
    if listed:
        return phase(forget_request(step), "starting")
    if d.now_s < step.not_before_s:
        return step
    # Asked again: in a pool a neighbour may have come up by itself meanwhile. GPUs of scaled replicas are not shared.
    neighbours = blockers(replica.placed, d.replicas, d.world, d.limits) if replica.spec.pool else []
    if neighbours:
        return phase(step, f"waiting for its GPUs: {neighbours[0]}")
    d.act(Action(kind=ActionKind.CREATE, replica=replica.name, placed=replica.placed))
    return step


def recreate(d: Transaction, step: Step, replica: Replica) -> Step:
    """A process that has ended is deleted, so that the step can create it anew."""
    if outstanding(d, step):
        return step
    outcome = d.outcomes.get(replica.name)
    if step.asked is ActionKind.DELETE and outcome is not None:
        if outcome.ok:
            del d.replicas[replica.name]
            return phase(forget_request(step), "deleted; creating again")
        return retry(d, forget_request(step), f"could not be deleted: {outcome.error}", permanent=outcome.permanent)
    if d.now_s < step.not_before_s:
        return step
    # Asked for again after a crash, which has no further effect.
    d.move(replica, LifeCycle.TERMINATING)
    d.act(Action(kind=ActionKind.DELETE, replica=replica.name))
    return replace(step, asked=ActionKind.DELETE, phase="its process is gone: deleting it")
