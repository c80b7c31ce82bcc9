"""A pool's cycle around its decision: the input from what other services say, and what follows from the result.

A cycle: `pool_input`, `decide_pool`; where `needs_counts` says so, `with_counts` and `decide_pool` again; then the
desired state of `next_desired` is published, and the operation of `preemption` cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from policy_engine.core.pool.decide import PoolInput, PoolResult, PoolState, UnderWay
from policy_engine.core.pool.desired import succeeding
from policy_engine.core.pool.pool_candidates import ReplicaFacts
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.operation import Operation, OperationKind, StepKind
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import LifeCycle


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPicture:
    """What is known of a pool at one moment.

    `replicas` and `operations` are the actuator's; those of other pools are passed over. `under_way` are the engine's
    own transitions that have not ended. `unreachable` says why the pool's cluster cannot be seen; empty when it can.
    """

    now_s: float
    pool: Pool
    policies: tuple[ServicePolicy, ...]
    desired: DesiredPool
    replicas: Iterable[Replica]
    operations: Iterable[Operation]
    under_way: tuple[UnderWay, ...]
    views: Mapping[MemberKey, RoleSignals]
    fronts: Mapping[str, FrontDoor]
    unreachable: str = ""


def pool_input(picture: PoolPicture, state: PoolState) -> PoolInput:
    """The input of the pool's decision."""
    pool = picture.pool
    unfinished = unfinished_of(picture.operations, pool.name)
    boots = {
        step.replica
        for item in unfinished
        if item.kind is OperationKind.PREWARM
        for step in item.steps
        if step.kind is StepKind.CREATE
    }
    members = sorted(MemberKey(member.service, member.role) for member in pool.spec.members)
    services = sorted({key.service for key in members})
    return PoolInput(
        now_s=picture.now_s,
        pool=pool,
        policies=picture.policies,
        overlay=picture.desired.overlay,
        awake=tuple(sorted(picture.desired.awake)),
        replicas=replica_facts((item for item in picture.replicas if item.pool == pool.name), yielding=boots),
        views=tuple((key, picture.views[key]) for key in members if key in picture.views),
        fronts=tuple((service, picture.fronts[service]) for service in services if service in picture.fronts),
        state=state,
        unreachable=picture.unreachable,
        operations=picture.under_way,
        busy=busy_replicas(unfinished),
    )


def unfinished_of(operations: Iterable[Operation], subject: str) -> tuple[Operation, ...]:
    """Operations under way on a pool, by id."""
    found = (item for item in operations if item.subject == subject and not item.finished)
    return tuple(sorted(found, key=lambda item: item.operation_id))


def busy_replicas(unfinished: Iterable[Operation]) -> tuple[str, ...]:
    """Replicas that operations work on, by name.

    Those of a pre-warming are not among them: the actuator takes it back when a newer state needs its GPUs.
    """
    working = (item for item in unfinished if item.kind is not OperationKind.PREWARM)
    return tuple(sorted({step.replica for item in working for step in item.steps}))


def replica_facts(replicas: Iterable[Replica], *, yielding: Collection[str] = ()) -> tuple[ReplicaFacts, ...]:
    """Replicas as the arbiter takes them, by name.

    One of `yielding` that boots is shown as one that does not run: a replica that is to wake on its GPUs gets them.
    """
    return tuple(
        ReplicaFacts(
            replica=item.replica,
            life_cycle=_as_yielding(item.life_cycle) if item.replica in yielding else item.life_cycle,
            routable=item.routable,
            in_flight=item.in_flight,
        )
        for item in sorted(replicas, key=lambda replica: replica.replica)
    )


def _as_yielding(shown: LifeCycle) -> LifeCycle:
    return LifeCycle.FAILED if shown in (LifeCycle.STARTING, LifeCycle.TERMINATING) else shown


def needs_counts(result: PoolResult) -> bool:
    """Whether to decide once more on fresh counts of requests: the decision takes capacity from a donor."""
    transition = result.draft.transition if result.draft is not None else None
    return transition is not None and bool(transition.releases)


def with_counts(given: PoolInput, counts: Mapping[str, int | None]) -> PoolInput:
    """The same input with newer counts of requests in flight; a replica without one keeps its own."""
    replicas = (replace(item, in_flight=counts.get(item.replica, item.in_flight)) for item in given.replicas)
    return replace(given, replicas=tuple(replicas))


def next_desired(given: PoolInput, result: PoolResult, desired: DesiredPool, *, decision_id: str) -> DesiredPool | None:
    """The desired state that a decision asks for, as the next revision of `desired`; None where that stays."""
    if result.draft is None or result.awake == given.awake:
        return None
    return succeeding(desired, given.pool, given.policies, result.awake, decision_id)


def preemption(result: PoolResult, *, known: Collection[str], cancelled: Collection[str]) -> str:
    """Why the operation `result.preempt_operation` is to be cancelled now; empty when none is.

    `known` are the ids of operations that the actuator has listed, `cancelled` those that were cancelled before.
    """
    operation = result.preempt_operation
    if not result.preempt or operation not in known or operation in cancelled:
        return ""
    return f"pre-empted: {result.preempt}"
