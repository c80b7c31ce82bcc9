"""Controllers of a pool on virtual time: their input each tick, and how their decision is carried out.

`PoolDesk` is between a controller and the actuator: it keeps the desired state and publishes changes of it.
`ShareController` runs the policy engine's core with it, exactly as its shell does. Limits: the actuator always answers,
and nothing is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from actuator.core.fencing import Refused
from lab.virtual.actuation import TOKEN, VirtualActuator
from policy_engine.core.pool.cycle import (
    PoolPicture,
    busy_replicas,
    needs_counts,
    next_desired,
    pool_input,
    preemption,
    unfinished_of,
    with_counts,
)
from policy_engine.core.pool.decide import PoolResult, PoolState, decide_pool
from policy_engine.core.pool.desired import succeeding
from policy_engine.core.pool.transition_outcome import (
    Acknowledged,
    Refusal,
    awake_after,
    must_publish,
    refused,
    settled,
    under_way,
)
from policy_engine.core.shared.draft import Draft, Transition
from policy_engine.core.shared.vocabulary import MemberKey, Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.operation import Operation, OperationState
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica
from trimtab.domain.role_signals import FrontDoor, RoleSignals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """The values of one awake server at its last scrape; rates are since the scrape before."""

    running: int
    waiting: int
    kv_usage_ratio: float
    kv_blocks: int
    waiting_kv_blocks: int
    gpu_utilisation_ratio: float | None = None
    prompt_tps: float | None = None
    output_tps: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTraffic:
    """Requests of a service since the tick before. Means are None where nothing came or ended."""

    interval_s: float
    arrivals: int
    prompt_tokens: int
    output_tokens: int
    held: int
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolLook:
    """Everything that a controller may look at."""

    now_s: float
    views: Mapping[MemberKey, RoleSignals]
    fronts: Mapping[str, FrontDoor]
    replicas: Mapping[str, Replica]
    samples: Mapping[str, ReplicaSample]
    traffic: Mapping[str, ServiceTraffic]


@dataclasses.dataclass(frozen=True, slots=True)
class MemberScore:
    """How a controller ranks a member; None where it does not."""

    z: float | None = None


class Controller(Protocol):
    """Decides over one pool. Called every `period_s`, and at once when one of its operations has ended."""

    period_s: float
    reads_windows: bool
    """Whether it looks at the collector's windows; they are not closed for one that does not."""

    def tick(self, look: PoolLook, desk: PoolDesk) -> None:
        """Observe, and request changes from the desk."""
        ...

    def ended(self, operation: Operation, now_s: float, desk: PoolDesk) -> None:
        """An operation of the pool has ended, however."""
        ...

    def scores(self) -> Mapping[MemberKey, MemberScore]:
        """Of every member at the last tick, for plots."""
        ...


class PoolDesk:
    """The desired state of one pool, as its only writer keeps it."""

    def __init__(
        self, pool: Pool, policies: Sequence[ServicePolicy], desired: DesiredPool, actuator: VirtualActuator
    ) -> None:
        """`desired` is the state that the pool starts with."""
        self.pool = pool
        self.policies = tuple(policies)
        self.by_name = {policy.name: policy for policy in policies}
        self.overlay = desired.overlay
        self.members = {item.replica: item.member for item in self.overlay}
        self.desired = desired
        self.refused: list[str] = []
        self._actuator = actuator
        self._acknowledged: Acknowledged | None = None
        self._refusal: Refusal | None = None

    @property
    def awake(self) -> tuple[str, ...]:
        """The desired awake set, by name."""
        return self.desired.awake

    def ask(self, awake: Sequence[str]) -> Operation | None:
        """Make `awake` the desired set at once; the operation that works towards it, None when it is so already.

        Raises `Refused` when the actuator does not take it; the desired set is then what it was.
        """
        before = self.desired
        decision_id = f"asked-{before.state_revision + 1}"
        self.desired = succeeding(before, self.pool, self.policies, awake, decision_id)
        try:
            return self.publish()
        except Refused:
            self.desired, self._refusal = before, None
            raise

    def publish(self) -> Operation | None:
        """Send the desired state unless the actuator has it, or refused it a moment ago.

        Returns the operation that works towards it, None when nothing has to change. Raises `Refused` when the
        actuator does not take it.
        """
        now_s = self._actuator.servers.clock.now_s
        mark = Acknowledged(self.desired.state_revision, generation=1, token=TOKEN)
        if not must_publish(mark, self._acknowledged, self._refusal, now_s=now_s):
            return None
        try:
            operation = self._actuator.apply(self.desired)
        except Refused as error:
            self.refused.append(str(error))
            self._refusal = refused(self.desired, str(error), now_s=now_s)
            raise
        self._acknowledged, self._refusal = mark, None
        return operation

    def cancel(self, operation_id: str, reason: str) -> None:
        """Request the roll-back of an operation."""
        self._actuator.cancel(operation_id, reason)

    def replicas(self) -> tuple[Replica, ...]:
        """Replicas as the actuator lists them now."""
        return self._actuator.listed_replicas()

    def operations(self) -> tuple[Operation, ...]:
        """Operations under way, oldest first."""
        return self._actuator.listed_operations()

    def busy(self) -> tuple[str, ...]:
        """Replicas that an unfinished operation works on, by name."""
        return busy_replicas(unfinished_of(self.operations(), self.pool.name))

    def under_way(self) -> int:
        """How many operations of this pool are not finished."""
        return len(unfinished_of(self.operations(), self.pool.name))


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """A transition that the actuator works on, and the decision behind it."""

    transition: Transition
    rule: Rule
    decision_id: str


class ShareController:
    """The policy engine's pool core: TSS, guards and the arbiter of the pool's own resources."""

    reads_windows = True

    def __init__(self, *, period_s: float = 1.0, polls: bool = False) -> None:
        """With `polls` it looks each `period_s` alone; else, as the engine does, at every window and when an operation
        of its own has ended.
        """
        self.period_s = period_s
        self._polls = polls
        self._polled_s: float | None = None
        self._state = PoolState()
        self._pending: dict[str, _Pending] = {}
        self._cancelled: set[str] = set()
        self._scores: dict[MemberKey, MemberScore] = {}
        self.rules: dict[str, int] = {}
        """How often each rule moved capacity."""
        self.decisions: list[tuple[float, Draft]] = []
        """Every recorded decision, with its time."""

    def tick(self, look: PoolLook, desk: PoolDesk) -> None:
        """One cycle of the engine."""
        if self._polls:
            if self._polled_s is not None and look.now_s - self._polled_s < self.period_s - 1e-6:
                return
            self._polled_s = look.now_s
        given = pool_input(self._picture(look, desk), self._state)
        result = decide_pool(given)
        if needs_counts(result):
            given = with_counts(given, {item.replica: item.in_flight for item in desk.replicas()})
            result = decide_pool(given)
        self._state = result.state
        self._scores = {report.key: MemberScore(report.share.z) for report in result.reports}
        decision_id = f"d-{len(self.decisions)}"
        if result.draft is not None:
            self.decisions.append((look.now_s, result.draft))
        wish = next_desired(given, result, desk.desired, decision_id=decision_id)
        if wish is not None:
            desk.desired = wish
        self._publish(desk, result, look.now_s)
        reason = preemption(result, known=self._pending, cancelled=self._cancelled)
        if reason:
            self._cancelled.add(result.preempt_operation)
            desk.cancel(result.preempt_operation, reason)

    def ended(self, operation: Operation, now_s: float, desk: PoolDesk) -> None:
        """What came of the transition; the desired state of one that failed is settled, to be published next."""
        pending = self._pending.pop(operation.operation_id, None)
        if pending is not None and operation.state is not OperationState.SUCCEEDED:
            preempted = operation.operation_id in self._cancelled
            self._settle(pending, operation.state, desk, now_s, preempted=preempted)
        self._cancelled.discard(operation.operation_id)

    def scores(self) -> Mapping[MemberKey, MemberScore]:
        """Z of every member."""
        return self._scores

    def _picture(self, look: PoolLook, desk: PoolDesk) -> PoolPicture:
        """What the engine knows at this moment. The actuator always answers."""
        return PoolPicture(
            now_s=look.now_s,
            pool=desk.pool,
            policies=desk.policies,
            desired=desk.desired,
            replicas=look.replicas.values(),
            operations=desk.operations(),
            under_way=tuple(
                under_way(item.transition, item.rule, decision_id=item.decision_id, operation_id=name)
                for name, item in sorted(self._pending.items())
            ),
            views=look.views,
            fronts=look.fronts,
        )

    def _publish(self, desk: PoolDesk, result: PoolResult, now_s: float) -> None:
        draft = result.draft
        transition = draft.transition if draft is not None else None
        try:
            operation = desk.publish()
        except Refused:
            if draft is not None and transition is not None:
                pending = _Pending(transition, draft.rule, desk.desired.decision_id)
                self._settle(pending, OperationState.ROLLED_BACK, desk, now_s, preempted=False)
            return
        if draft is None or transition is None:
            return
        self.rules[draft.rule.value] = self.rules.get(draft.rule.value, 0) + 1
        if operation is not None:
            self._pending[operation.operation_id] = _Pending(transition, draft.rule, desk.desired.decision_id)

    def _settle(
        self, pending: _Pending, state: OperationState, desk: PoolDesk, now_s: float, *, preempted: bool
    ) -> None:
        released = [change.replica for change in pending.transition.releases]
        after = settled(
            self._state,
            desk.desired,
            desk.pool,
            desk.policies,
            pending.transition,
            awake_after(state, released=released, replicas=desk.replicas()),
            decision_id=pending.decision_id,
            preempted=preempted,
            now_s=now_s,
        )
        self._state, desk.desired = after.state, after.desired
