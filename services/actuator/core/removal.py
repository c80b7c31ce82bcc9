"""Towards ABSENT: hidden, drained like a release, deleted."""

from dataclasses import replace

from actuator.core.endpoints import gateway_requests, unaware
from actuator.core.model import ActionKind, Operation, Replica, Step
from actuator.core.sleeping import begin_drain, hide
from actuator.core.steps import asked, drain_timeout_s, drained, outstanding, past_deadline, phase, retry, succeed
from actuator.core.transaction import Transaction
from actuator.core.world import Action
from trimtab.domain.vocabulary import HoldOwner, LifeCycle


def toward_absent(d: Transaction, operation: Operation, step: Step, replica: Replica) -> Step:
    """One look at a replica that is to be deleted."""
    if replica.life_cycle is LifeCycle.TERMINATING:
        return _await_deletion(d, step, replica)
    if outstanding(d, step) or d.now_s < step.not_before_s:
        return step
    if replica.life_cycle is LifeCycle.ACTIVE:
        return hide(d, operation, step, replica, HoldOwner.SOFT_SCALE_IN)
    if replica.life_cycle is LifeCycle.DRAINING:
        if step.drain_deadline_s == 0.0:
            step = begin_drain(d, operation, step, replica)
        step, quiet = drained(d, step, replica)
        return _delete(d, step, replica) if quiet else past_deadline(d, step, replica) or step
    if _may_be_serving(d, replica):
        if step.drain_deadline_s == 0.0:
            step = replace(step, drain_deadline_s=d.now_s + drain_timeout_s(d, operation))
        if d.now_s < step.drain_deadline_s:
            return phase(step, f"waiting: it is {replica.life_cycle}, and gateways may have requests on it")
    return _delete(d, step, replica)


def _may_be_serving(d: Transaction, replica: Replica) -> bool:
    """It is up or may be, and gateways have requests on it or may send some: it restarted, or is silent."""
    if replica.life_cycle in (LifeCycle.SLEEPING, LifeCycle.FAILED) or not replica.address:
        return False
    gateways = d.leased_gateways()
    return bool(unaware(replica, gateways)) or gateway_requests(replica.name, gateways)[0] > 0


def _delete(d: Transaction, step: Step, replica: Replica) -> Step:
    d.move(replica, LifeCycle.TERMINATING)
    d.act(Action(kind=ActionKind.DELETE, replica=replica.name))
    return asked(step, ActionKind.DELETE, "deleting")


def _await_deletion(d: Transaction, step: Step, replica: Replica) -> Step:
    if outstanding(d, step):
        return step
    outcome = d.outcomes.get(replica.name)
    if outcome is not None and outcome.kind is ActionKind.DELETE:
        if outcome.ok:
            del d.replicas[replica.name]
            return succeed(d, step, "deleted")
        return retry(d, step, f"could not be deleted: {outcome.error}", permanent=outcome.permanent)
    if d.now_s >= step.not_before_s:
        d.act(Action(kind=ActionKind.DELETE, replica=replica.name))
    return replace(step, asked=ActionKind.DELETE)
