"""An offline oracle: it knows the trace, so what is due within its horizon, and what a replica carries.

It is a yardstick, not a policy that could run. It does not know how the engine will batch, nor what it owes already, so
it is no upper bound in the strict sense.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from lab.baselines.interface import Decision, FleetView, RoleKey, RoleView
from simulator.traces.model import TraceRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Work of a role by window from the trace's start, in replicas that would do nothing else."""

    window_s: float
    replicas: tuple[float, ...]

    def peak(self, start_s: float, end_s: float) -> float:
        """The busiest window that touches `[start_s, end_s)`; 0 beyond the trace."""
        first = max(0, math.floor(start_s / self.window_s))
        last = max(first + 1, math.ceil(end_s / self.window_s))
        return max(self.replicas[first:last], default=0.0)


def demand_of(
    requests: Iterable[TraceRequest],
    cost_s: Mapping[RoleKey, Callable[[TraceRequest], float]],
    *,
    window_s: float = 10.0,
) -> dict[RoleKey, Demand]:
    """Demand of each role, given the seconds of one replica that a request costs it.

    Raises ValueError for a window without length.
    """
    if not window_s > 0:
        raise ValueError(f"window_s must be above 0, not {window_s}")
    by_service: dict[str, list[RoleKey]] = {}
    for key in sorted(cost_s):
        by_service.setdefault(key.service, []).append(key)
    work: dict[RoleKey, dict[int, float]] = {key: {} for key in sorted(cost_s)}
    windows = 0
    for request in requests:
        index = int(request.arrival_s // window_s)
        windows = max(windows, index + 1)
        for key in by_service.get(request.service, ()):
            work[key][index] = work[key].get(index, 0.0) + cost_s[key](request)
    return {
        key: Demand(window_s, tuple(sums.get(index, 0.0) / window_s for index in range(windows)))
        for key, sums in work.items()
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Replicas for the busiest moment of the next `horizon_s`, at `load` of what they carry.

    Within a budget that does not reach, the next replica goes each time to the role that is farthest below what it
    needs. GPUs that are left over go where they relieve most, if `spend_all`.
    """

    demand: Mapping[RoleKey, Demand]
    horizon_s: float = 10.0
    load: float = 0.8
    spend_all: bool = False

    def __post_init__(self) -> None:
        if not (self.horizon_s > 0 and 0 < self.load <= 1):
            raise ValueError(f"horizon_s must be above 0 and load from 0 to 1: {self.horizon_s}, {self.load}")

    def initial(self) -> None:
        """Nothing to remember."""
        return

    def decide(self, view: FleetView, state: None) -> Decision[None]:
        """Replicas for every role."""
        del state
        roles = sorted(view.roles, key=lambda role: role.key)
        need = {
            role.key: self.demand[role.key].peak(view.now_s, view.now_s + self.horizon_s) / self.load
            if role.key in self.demand
            else float(role.desired)
            for role in roles
        }
        if view.budget_gpus is None:
            return Decision({role.key: role.clamp(math.ceil(need[role.key] - 1e-9)) for role in roles}, None)
        granted = {role.key: role.min_replicas for role in roles}
        left = view.budget_gpus - sum(role.min_replicas * role.gpus_per_replica for role in roles)
        while True:
            open_to = [
                role
                for role in roles
                if role.gpus_per_replica <= left
                and granted[role.key] < role.max_replicas
                and (granted[role.key] < need[role.key] - 1e-9 or (self.spend_all and need[role.key] > 0))
            ]
            if not open_to:
                return Decision(granted, None)
            chosen = min(open_to, key=lambda role: (_covered(role, granted, need), role.key))
            granted[chosen.key] += 1
            left -= chosen.gpus_per_replica


def _covered(role: RoleView, granted: Mapping[RoleKey, int], need: Mapping[RoleKey, float]) -> float:
    return granted[role.key] / need[role.key]
