"""A fixed split: what there is without an autoscaler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lab.baselines.interface import Decision, Desired, FleetView, RoleKey


@dataclasses.dataclass(frozen=True, slots=True)
class Static:
    """The same replicas at every tick; a role that is not named keeps what it has."""

    replicas: Mapping[RoleKey, int] = dataclasses.field(default_factory=dict)

    def initial(self) -> None:
        """Nothing to remember."""
        return

    def decide(self, view: FleetView, state: None) -> Decision[None]:
        """The split, within each role's bounds."""
        del state
        desired: Desired = {
            role.key: role.clamp(self.replicas.get(role.key, role.desired))
            for role in sorted(view.roles, key=lambda role: role.key)
        }
        return Decision(desired, None)
