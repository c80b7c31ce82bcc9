"""Controllers of the number of replicas of a scaled service on virtual time, and their input.

`ProportionalController` runs the policy engine's core for scaled services as its shell does. `ScaledCounts` calls a
baseline. Both answer with absolute counts; the pre-scheduler and the actuator do the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from lab.baselines.interface import Desired, FleetView, Replica, RoleKey, RoleView, Traffic
from lab.virtual.control import ReplicaSample, ServiceTraffic
from lab.virtual.counts import ready_replica
from policy_engine.core.scaled.decide import ScaledInput, ScaledState, decide_scaled
from policy_engine.core.scaled.scaling_request import count_replicas
from policy_engine.core.scaled.units import RoleCounts
from policy_engine.core.shared.draft import Draft
from policy_engine.core.shared.vocabulary import DecisionKind
from trimtab.config.resources import ServicePolicy
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import LifeCycle, Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLook:
    """Everything that a controller may look at. `names` has every replica of a role that is not on its way out."""

    now_s: float
    views: Mapping[Role, RoleSignals]
    front: FrontDoor
    names: Mapping[Role, Sequence[str]]
    routable: frozenset[str]
    samples: Mapping[str, ReplicaSample]
    traffic: ServiceTraffic


class ScaledController(Protocol):
    """Decides for one service; called after every scrape."""

    reads_windows: bool

    def tick(self, look: ScaledLook) -> Mapping[Role, int]:
        """Replicas that the service should have."""
        ...


class ProportionalController:
    """The policy engine on one service. It takes over what exists at its first turn, as the engine does."""

    reads_windows = True

    def __init__(self, policy: ServicePolicy) -> None:
        self.policy = policy
        self.decisions: list[tuple[float, Draft]] = []
        """Every decision that changed counts, with its time."""
        self._state = ScaledState()

    def tick(self, look: ScaledLook) -> Mapping[Role, int]:
        """One turn of the engine."""
        given = ScaledInput(
            now_s=look.now_s,
            policy=self.policy,
            views=tuple(look.views[spec.role] for spec in self.policy.spec.roles if spec.role in look.views),
            front=look.front,
            replicas=count_replicas(
                self.policy,
                (
                    (role, LifeCycle.ACTIVE, name in look.routable)
                    for role, names in look.names.items()
                    for name in names
                ),
            ),
            state=self._state,
        )
        result = decide_scaled(given)
        self._state = result.state
        if result.draft is not None and result.draft.kind is DecisionKind.SCALE:
            self.decisions.append((look.now_s, result.draft))
        return dict(result.state.desired or ())


class ScaledCounts:
    """A baseline on the roles of one service. `tick` is called after every scrape and keeps its own period."""

    reads_windows = False

    def __init__(self, policy: ServicePolicy, tick: Callable[[FleetView], Desired], first: RoleCounts) -> None:
        """`first` are the counts that the service starts with."""
        self.policy = policy
        self._ask = tick
        self._wanted = dict(first)

    def tick(self, look: ScaledLook) -> Mapping[Role, int]:
        """Request counts."""
        roles = tuple(self._role(look, spec.role) for spec in self.policy.spec.roles)
        desired = self._ask(FleetView(now_s=look.now_s, roles=roles))
        self._wanted = {key.role: count for key, count in desired.items()}
        return self._wanted

    def _role(self, look: ScaledLook, role: Role) -> RoleView:
        spec = next(one for one in self.policy.spec.roles if one.role is role)
        traffic = look.traffic
        return RoleView(
            key=RoleKey(self.policy.name, role),
            replicas=tuple(_replica(name, look) for name in look.names.get(role, ())),
            desired=self._wanted.get(role, 0),
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            gpus_per_replica=spec.gpus_per_replica,
            traffic=Traffic(
                interval_s=traffic.interval_s,
                requests=float(traffic.arrivals),
                prompt_tokens=_mean(traffic.prompt_tokens, traffic.arrivals),
                output_tokens=_mean(traffic.output_tokens, traffic.arrivals),
                ttft_s=traffic.ttft_s,
                itl_s=traffic.itl_s,
            ),
        )


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _replica(name: str, look: ScaledLook) -> Replica:
    sample = look.samples.get(name)
    if sample is None or name not in look.routable:
        return Replica(name=name, ready=False)
    return ready_replica(name, sample)
