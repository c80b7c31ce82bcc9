"""Who decides over a pool on virtual time: what a controller is shown each tick, and how its wish is carried out.

`PoolDesk` stands between a controller and the actuator: it keeps the desired awake set, publishes changes of it and
says what came of them. `ShareController` runs the policy engine's core with it, exactly as its shell does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from actuator.core.fencing import Refused
from actuator.core.model import Floor, Operation, OperationState, Spec, StepKind
from lab.virtual.actuation import VirtualActuator, pool_request
from policy_engine.core.arena import ReplicaFacts
from policy_engine.core.draft import Draft, ReplicaChange, Transition
from policy_engine.core.overlay import OverlayReplica, make_overlay, member_key
from policy_engine.core.pool import PoolInput, PoolState, UnderWay, bar, decide_pool, settle
from policy_engine.core.vocabulary import MemberKey, Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.words import LifeCycle

SERVING = frozenset({LifeCycle.ACTIVE, LifeCycle.DRAINING, LifeCycle.REACTIVATING})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """What one awake server said when it was last scraped; rates are since the scrape before."""

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
    replicas: Mapping[str, ReplicaFacts]
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
        """Look, and ask the desk for what should change."""
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
        self, pool: Pool, policies: Sequence[ServicePolicy], actuator: VirtualActuator, awake: Sequence[str]
    ) -> None:
        self.pool = pool
        self.policies = tuple(policies)
        self.by_name = {policy.name: policy for policy in policies}
        self.overlay: tuple[OverlayReplica, ...] = make_overlay(pool, self.by_name)
        self.members = {item.replica: item.member for item in self.overlay}
        self.awake = tuple(sorted(awake))
        self.refused: list[str] = []
        self._actuator = actuator
        self._specs = specs_of(pool, self.overlay)
        self._revision = 0

    def publish(self, awake: Sequence[str]) -> Operation | None:
        """Make `awake` the desired set; the operation that works towards it, None when nothing has to change.

        Raises `Refused` when the actuator does not take it; the desired set is then what it was.
        """
        floors = []
        for member in self.pool.spec.members:
            key = member_key(member)
            role = self.by_name[member.service].spec.role(member.role)
            count = sum(1 for name in awake if self.members[name] == key)
            floors.append(
                Floor(
                    service=member.service,
                    role=member.role,
                    min_replicas=min(role.min_replicas if role is not None else 0, count),
                )
            )
        request = pool_request(
            pool=self.pool.name,
            state_revision=self._revision + 1,
            overlay=self._specs,
            awake=awake,
            floors=floors,
            budget_gpus=self.pool.spec.budget_gpus,
            drain_timeout_s=self.pool.spec.drain_timeout_s,
            sleep_level=self.pool.spec.sleep_level,
        )
        try:
            answer = self._actuator.apply(request)
        except Refused as error:
            self.refused.append(str(error))
            raise
        self._revision += 1
        self.awake = tuple(sorted(awake))
        return answer.operation

    def cancel(self, operation_id: str, reason: str) -> None:
        """Ask for the roll-back of an operation."""
        self._actuator.cancel(operation_id, reason)

    def busy(self) -> tuple[str, ...]:
        """Replicas that an unfinished operation has a step for, by name."""
        return tuple(sorted({step.replica for item in self._actuator.unfinished() for step in item.steps}))

    def under_way(self) -> int:
        """How many operations of this pool are not finished."""
        return sum(1 for item in self._actuator.unfinished() if item.subject == self.pool.name)


@dataclasses.dataclass(slots=True)
class _Pending:
    """A transition that the actuator works on."""

    transition: Transition
    rule: Rule
    preempted: bool = False

    def under_way(self, operation_id: str) -> UnderWay:
        """As the core takes it."""
        releases, wakes = self.transition.releases, self.transition.wakes
        return UnderWay(
            operation=operation_id,
            rule=self.rule,
            receivers=_members_of(wakes),
            donors=_members_of(releases),
            replicas=tuple(sorted(change.replica for change in (*releases, *wakes))),
        )


class ShareController:
    """The policy engine's pool core: TSS, guards and the arbiter of the pool's own resources."""

    reads_windows = True

    def __init__(self, *, period_s: float = 1.0) -> None:
        self.period_s = period_s
        self._state = PoolState()
        self._pending: dict[str, _Pending] = {}
        self._scores: dict[MemberKey, MemberScore] = {}
        self.rules: dict[str, int] = {}
        """How often each rule moved capacity."""
        self.decisions: list[tuple[float, Draft]] = []
        """Every decision worth a record, with its time."""

    def tick(self, look: PoolLook, desk: PoolDesk) -> None:
        """One turn of the engine."""
        services = sorted({key.service for key in desk.members.values()})
        given = PoolInput(
            now_s=look.now_s,
            pool=desk.pool,
            policies=desk.policies,
            overlay=desk.overlay,
            awake=desk.awake,
            replicas=tuple(look.replicas[name] for name in sorted(look.replicas)),
            views=tuple((key, look.views[key]) for key in sorted(look.views)),
            fronts=tuple((name, look.fronts[name]) for name in services if name in look.fronts),
            state=self._state,
            operations=tuple(self._pending[name].under_way(name) for name in sorted(self._pending)),
            busy=desk.busy(),
        )
        result = decide_pool(given)
        self._state = result.state
        self._scores = {report.key: MemberScore(report.share.z) for report in result.reports}
        if result.draft is not None:
            self.decisions.append((look.now_s, result.draft))
        giving_way = self._pending.get(result.preempt_operation) if result.preempt else None
        if giving_way is not None and not giving_way.preempted:
            giving_way.preempted = True
            desk.cancel(result.preempt_operation, result.preempt)
            return
        draft = result.draft
        if draft is None or draft.transition is None or result.awake == given.awake:
            return
        try:
            operation = desk.publish(result.awake)
        except Refused:
            moved = tuple(change.replica for change in (*draft.transition.releases, *draft.transition.wakes))
            self._state = bar(self._state, tuple(sorted(moved)), look.now_s)
            return
        self.rules[draft.rule.value] = self.rules.get(draft.rule.value, 0) + 1
        if operation is not None:
            self._pending[operation.operation_id] = _Pending(draft.transition, draft.rule)

    def ended(self, operation: Operation, now_s: float, desk: PoolDesk) -> None:
        """What came of the transition; a failed one is settled as the shell does."""
        pending = self._pending.pop(operation.operation_id, None)
        if pending is None:
            return
        if operation.state is OperationState.SUCCEEDED:
            return
        moved = {change.replica for change in (*pending.transition.releases, *pending.transition.wakes)}
        if not pending.preempted:
            self._state = bar(self._state, tuple(sorted(moved)), now_s)
        desk.publish(settle(desk.overlay, desk.awake, pending.transition, awake_after(operation)))

    def scores(self) -> Mapping[MemberKey, MemberScore]:
        """Z of every member."""
        return self._scores


def awake_after(operation: Operation) -> frozenset[str]:
    """Which replicas of an operation that did not succeed are awake now."""
    if operation.state is OperationState.FAILED:
        return frozenset(step.replica for step in operation.steps if step.phase == "routable")
    return frozenset(step.replica for step in operation.steps if step.kind is StepKind.RELEASE)


def _members_of(changes: Sequence[ReplicaChange]) -> tuple[MemberKey, ...]:
    return tuple(sorted({MemberKey(change.service, change.role) for change in changes}))


def specs_of(pool: Pool, overlay: Sequence[OverlayReplica]) -> tuple[Spec, ...]:
    """The overlay as the actuator takes it."""
    return tuple(
        Spec(
            replica=item.replica,
            service=item.member.service,
            role=item.member.role,
            model=item.model,
            profile=item.profile,
            node=item.node,
            gpu_indices=item.gpu_indices,
            pool=pool.name,
        )
        for item in overlay
    )
