"""One pure step of the actuator: (state, world, outcomes, now) → (state, actions).

The shell stores the new state *before* it carries the actions out, so that a crash in between repeats an action but
never forgets one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actuator.core.model import Gateway, Limits, Operation, OperationState, State
from actuator.core.observe import apply_outcomes, observe
from actuator.core.operations import advance, begin_rollback, keep
from actuator.core.prewarming import prewarm
from actuator.core.reconcile import conclude_pools, correct, start_waiting, without_lost_operation
from actuator.core.refused import RefusedKind
from actuator.core.sleeping import restore
from actuator.core.transaction import Transaction
from actuator.core.world import Action, Outcome, World
from trimtab.domain.vocabulary import LifeCycle

UNKNOWN_GATEWAY = "(any not heard of yet)"
"""Represents, after a start, gateways that no record names."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """The result of one step. ``notes`` are life cycle changes as text, for the log."""

    state: State
    actions: tuple[Action, ...] = ()
    notes: tuple[str, ...] = ()


def tick(state: State, world: World, outcomes: Iterable[Outcome], *, now_s: float, limits: Limits) -> Tick:
    """Takes in what was seen, takes every operation one look further, opens corrections."""
    d = Transaction(state, world, limits, now_s)
    observe(d)
    apply_outcomes(d, outcomes)
    start_waiting(d)
    for operation in list(d.unfinished()):
        if not operation.waits_for and d.held.operation(operation) is None:
            advance(d, operation)
    conclude_pools(d)
    correct(d)
    prewarm(d)
    return Tick(state=d.commit(), actions=tuple(d.actions), notes=tuple(d.notes))


def due_s(state: State, now_s: float) -> float | None:
    """The next moment at which a step goes on by time alone: the end of its drain, or of a pause before it tries again.

    None when no such moment lies ahead.
    """
    steps = (step for operation in state.operations.values() if not operation.finished for step in operation.steps)
    moments_s = (at_s for step in steps if not step.finished for at_s in (step.drain_deadline_s, step.not_before_s))
    return min((at_s for at_s in moments_s if at_s > now_s), default=None)


def fail_static(state: State, world: World, *, now_s: float, limits: Limits) -> Tick:
    """Without the store: no action, nothing is taken away, what a release hid and did not put to sleep comes back.

    A dead server is still withdrawn. An operation that had hidden something is rolled back when the store returns, with
    that reason.
    """
    d = Transaction(state, world, limits, now_s)
    observe(d)
    hidden = {
        name
        for name, replica in d.replicas.items()
        if replica.life_cycle is LifeCycle.DRAINING and not replica.told_to_sleep and d.held.replica(replica) is None
    }
    for name in sorted(hidden):
        restore(d, d.replicas[name])
    for operation in list(d.unfinished()):
        concerned = not hidden.isdisjoint(step.replica for step in operation.steps)
        if concerned and operation.atomic and operation.state is OperationState.RUNNING:
            keep(d, begin_rollback(d, operation, "rolled back: the store is away, so what was hidden came back"))
    return Tick(state=d.commit(), notes=tuple(d.notes))


def resume(state: State, *, now_s: float, limits: Limits) -> State:
    """The stored state as a new process takes it up.

    Every known gateway counts as leased for a while: it may still route by an earlier set, so it has to acknowledge, or
    stay silent for longer than its lease, before a hidden replica may sleep. Revisions leap ahead of any that were
    shown and not stored; they are Unix milliseconds at every start, so that they do not fall even when the store was
    lost. A hidden replica may have been shown again by such a revision, so it counts as hidden by the new one: a
    gateway that has not acknowledged that may still route to it. So may gateways whose name was not stored yet, or was
    lost with the store: ``UNKNOWN_GATEWAY`` represents all of them, and is leased for as long.
    """
    floor = int(now_s * 1000)
    meta = replace(
        state.meta,
        endpoint_revision=max(state.meta.endpoint_revision + 1, floor),
        replica_revision=max(state.meta.replica_revision + 1, floor),
        inventory_revision=max(state.meta.inventory_revision + 1, floor),
    )
    gateways = {
        name: Gateway(gateway=name, lease_until_s=now_s + limits.gateway_grace_s)
        for name in (UNKNOWN_GATEWAY, *sorted(state.gateways))
    }
    replicas = {
        name: replica if replica.routable else replace(replica, hidden_revision=meta.endpoint_revision)
        for name, replica in state.replicas.items()
    }
    operations = {name: _unheard(operation) for name, operation in state.operations.items()}
    pools = {name: without_lost_operation(state, pool) for name, pool in state.pools.items()}
    return replace(state, meta=meta, gateways=gateways, replicas=replicas, operations=operations, pools=pools)


def take_up(state: State, loaded: State, world: World, *, now_s: float, limits: Limits) -> State:
    """The state with the refused records that the store holds now, ``loaded``, in place of those it had.

    What has become readable is taken from ``loaded``; what was removed is forgotten, and what cannot be read any more
    leaves the state. Everything else stays as it is in memory.
    """
    d = Transaction(state, world, limits, now_s)
    for record in state.refused:
        if record.kind is RefusedKind.REPLICA and record.name in loaded.replicas:
            d.replicas[record.name] = loaded.replicas[record.name]
        elif record.kind is RefusedKind.POOL and record.name in loaded.pools:
            d.pools[record.name] = loaded.pools[record.name]
        elif record.kind is RefusedKind.OPERATION and record.name in loaded.operations:
            d.operations[record.name] = _unheard(loaded.operations[record.name])
    d.refuse(loaded.refused)
    seen = replace(state, replicas=d.replicas, operations=d.operations, refused=d.refused)
    for name, pool in d.pools.items():
        d.pools[name] = without_lost_operation(seen, pool)
    return d.commit()


def _unheard(operation: Operation) -> Operation:
    """The operation without what followed from acknowledgements: each gateway has its time again to acknowledge."""
    if operation.finished:
        return operation
    steps = tuple(replace(step, unaware_s=0.0, acknowledged_s=0.0) for step in operation.steps)
    return replace(operation, steps=steps)
