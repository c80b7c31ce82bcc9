"""The donor-side guard of a release: the state of the replicas that stay while the hidden one drains.

The release of TRE watches the donor's latency, queue growth, KV cache and health, and restores the routing when one
is out of bounds (TRE, IV-C). Here it judges the newest look at the servers, a quarter of a second old: a drain may be
over before a window of latencies has closed. The policy engine judges latencies and cancels the operation. A value that
a server does not report breaks no guard; the floor holds in any case. From the drain deadline on no release is taken
back, since the queues grow by the very requests that were reissued.
"""

from dataclasses import replace

from actuator.core.model import Operation, OperationKind, OperationState, Replica, Step, StepKind
from actuator.core.transaction import Transaction
from trimtab.domain.vocabulary import LifeCycle

_LOST = (LifeCycle.FAILED, LifeCycle.UNKNOWN, LifeCycle.STARTING)


def note_who_stay(d: Transaction, step: Step, replica: Replica) -> Step:
    """The step as its replica is hidden: the replicas that go on serving, and how many requests wait there."""
    names = tuple(name for name in sorted(d.replicas) if _stays(d.replicas[name], replica))
    return replace(step, stay=names, waiting_before=_waiting(d, names), unaware_s=0.0)


def guard_broken(d: Transaction, operation: Operation, step: Step, replica: Replica) -> str:
    """Why the release has to be taken back; empty while it may go on. Only a transition's releases are judged."""
    judged = operation.kind is OperationKind.TRANSITION and step.kind is StepKind.RELEASE
    if not judged or step.state is OperationState.ROLLING_BACK or replica.evicting:
        return ""
    return suffering(d, step)


def suffering(d: Transaction, step: Step) -> str:
    """What has got worse for those that stay since the step's replica was hidden; empty when nothing has."""
    return _lost(d, step) or _queue_grown(d, step) or _kv_full(d, step)


def _stays(other: Replica, replica: Replica) -> bool:
    same_role = (other.spec.service, other.spec.role) == (replica.spec.service, replica.spec.role)
    return same_role and other.name != replica.name and other.routable


def _lost(d: Transaction, step: Step) -> str:
    for name in step.stay:
        other = d.replicas.get(name)
        if other is None or other.life_cycle in _LOST:
            return f"{name}, which was to stay, was lost"
    return ""


def _waiting(d: Transaction, names: tuple[str, ...]) -> int | None:
    """Requests that wait at all of them; None when one does not report it."""
    total = 0
    for name in names:
        probe = d.probe(name)
        if probe is None or probe.waiting is None:
            return None
        total += probe.waiting
    return total


def _queue_grown(d: Transaction, step: Step) -> str:
    waiting = _waiting(d, step.stay)
    if waiting is None or step.waiting_before is None:
        return ""
    if waiting - step.waiting_before <= d.limits.guard_waiting_growth * len(step.stay):
        return ""
    return f"the queue of the {len(step.stay)} that stay grew from {step.waiting_before} to {waiting}"


def _kv_full(d: Transaction, step: Step) -> str:
    for name in step.stay:
        probe = d.probe(name)
        if probe is not None and probe.kv_usage is not None and probe.kv_usage > d.limits.guard_kv_usage:
            return f"{name}, which stays, uses {probe.kv_usage:.0%} of its KV cache"
    return ""
