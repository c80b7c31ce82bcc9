"""The input of an autoscaler each tick and its answer: the one interface of all baselines.

A policy is a pure function of a view and of its own earlier state, so that a run can be repeated and a decision
replayed. What a server did not report is None, never zero. Policies here are model-local: they do not know of each
other's demand. Where a pool has too few GPUs for all requests, `within_budget` grants replicas one at a time in turn,
as a scheduler without preferences does.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from trimtab.domain.vocabulary import Role

S = TypeVar("S")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class RoleKey:
    """One role of one service."""

    service: str
    role: Role = Role.COLOCATED


class Signal(enum.Enum):
    """What a replica reports about itself."""

    KV_USAGE = "kv_usage_ratio"
    RUNNING = "running"
    WAITING = "waiting"
    GPU_UTILIZATION = "gpu_utilization_ratio"
    PROMPT_TPS = "prompt_tps"
    OUTPUT_TPS = "output_tps"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica that exists and is awake or on its way; sleeping ones are left out. None: not reported."""

    name: str
    ready: bool = True
    kv_usage_ratio: float | None = None
    running: float | None = None
    waiting: float | None = None
    gpu_utilization_ratio: float | None = None
    prompt_tps: float | None = None
    output_tps: float | None = None
    kv_blocks: int | None = None
    """Blocks of the whole KV cache."""
    waiting_kv_blocks: float | None = None
    """Blocks that the prompts of waiting requests will take."""

    def value(self, signal: Signal) -> float | None:
        """A signal, or None where it is missing or not finite."""
        found: float | None = getattr(self, signal.value)
        return None if found is None or not math.isfinite(found) else found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A service's requests since the tick before. Means are None where nothing was measured."""

    interval_s: float
    requests: float
    prompt_tokens: float | None = None
    """Mean of a request."""
    output_tokens: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """A role at a tick."""

    key: RoleKey
    replicas: tuple[Replica, ...]
    desired: int
    """The last requested count; a baseline's "current replicas"."""
    min_replicas: int = 1
    max_replicas: int = 1_000
    gpus_per_replica: int = 1
    traffic: Traffic | None = None

    @property
    def ready(self) -> tuple[Replica, ...]:
        """Replicas that serve."""
        return tuple(replica for replica in self.replicas if replica.ready)

    @property
    def starting(self) -> int:
        """Replicas that exist and do not serve yet."""
        return len(self.replicas) - len(self.ready)

    def clamp(self, replicas: int) -> int:
        """Within the role's bounds."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Everything at a tick."""

    now_s: float
    roles: tuple[RoleView, ...]
    budget_gpus: int | None = None
    """GPUs that all roles share; None where each role may grow on its own."""


Desired = Mapping[RoleKey, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision(Generic[S]):
    """Replicas for every role of the view, and what the policy remembers."""

    desired: Desired
    state: S


class Policy(Protocol[S]):
    """An autoscaler for a whole fleet."""

    def initial(self) -> S:
        """The state before the first tick."""
        ...

    def decide(self, view: FleetView, state: S) -> Decision[S]:
        """Replicas for every role."""
        ...


class RolePolicy(Protocol[S]):
    """An autoscaler that looks at one role at a time."""

    @property
    def period_s(self) -> float:
        """How often it decides; between, its last answer is kept."""
        ...

    def initial(self) -> S:
        """The state of a role that was never seen."""
        ...

    def observe(self, view: RoleView, now_s: float, state: S) -> S:
        """Take in a tick; called at each, decision or not."""
        ...

    def decide(self, view: RoleView, now_s: float, state: S) -> tuple[int, S]:
        """Replicas, before the role's bounds, and the new state."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Remembered(Generic[S]):
    """A role's state under `EachRole`."""

    inner: S
    decided_at_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EachRole(Generic[S]):
    """A role policy for a fleet: every role by itself, at its period, within its bounds and what GPUs there are."""

    policy: RolePolicy[S]

    def initial(self) -> Mapping[RoleKey, Remembered[S]]:
        """No role seen."""
        return {}

    def decide(
        self, view: FleetView, state: Mapping[RoleKey, Remembered[S]]
    ) -> Decision[Mapping[RoleKey, Remembered[S]]]:
        """Replicas for every role; roles that are gone are forgotten."""
        desired: dict[RoleKey, int] = {}
        after: dict[RoleKey, Remembered[S]] = {}
        for role in sorted(view.roles, key=lambda role: role.key):
            before = state.get(role.key) or Remembered(self.policy.initial())
            inner = self.policy.observe(role, view.now_s, before.inner)
            wanted, at_s = role.desired, before.decided_at_s
            if at_s is None or view.now_s - at_s >= self.policy.period_s:
                wanted, inner = self.policy.decide(role, view.now_s, inner)
                at_s = view.now_s
            desired[role.key] = role.clamp(wanted)
            after[role.key] = Remembered(inner, at_s)
        return Decision(within_budget(view, desired), after)


def within_budget(view: FleetView, desired: Desired) -> dict[RoleKey, int]:
    """What of `desired` the GPUs reach for: decreases at once, increases one replica a role in turn, by key.

    Without a budget that is all of it. What is held already is never taken away, also above the budget.
    """
    if view.budget_gpus is None:
        return dict(desired)
    roles = sorted(view.roles, key=lambda role: role.key)
    granted = {role.key: min(desired[role.key], role.desired) for role in roles}
    left = view.budget_gpus - sum(granted[role.key] * role.gpus_per_replica for role in roles)
    while True:
        before = left
        for role in roles:
            if granted[role.key] < desired[role.key] and role.gpus_per_replica <= left:
                granted[role.key] += 1
                left -= role.gpus_per_replica
        if left == before:
            return granted


def started(policy: Policy[S]) -> Callable[[FleetView], Desired]:
    """A policy as a function that remembers its own state between calls."""
    state = policy.initial()

    def tick(view: FleetView) -> Desired:
        nonlocal state
        decision = policy.decide(view, state)
        state = decision.state
        return decision.desired

    return tick


def mean_of(replicas: tuple[Replica, ...], signal: Signal) -> float | None:
    """The mean of a signal over replicas; None without any, or where one did not report it."""
    values = [replica.value(signal) for replica in replicas]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
