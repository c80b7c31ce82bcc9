"""A pool's desired state: the policy engine publishes it, the actuator of its cluster works towards it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.domain.member import MemberKey
from trimtab.domain.time import optional_timestamp, seconds_of
from trimtab.domain.vocabulary import Role

Gpu = tuple[str, int]
"""A GPU: its node's name and its index there."""


@dataclass(frozen=True, slots=True)
class OverlayReplica:
    """One replica that the pool may wake, and the GPUs that it needs for itself while awake. `gpu_indices` ascend."""

    replica: str
    member: MemberKey
    model: str
    profile: str
    node: str
    gpu_indices: tuple[int, ...]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Its GPUs by name."""
        return tuple((self.node, index) for index in self.gpu_indices)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least number of routable replicas that releases leave to a role."""

    service: str
    role: Role
    min_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The settings of a pool that its cluster's actuator uses.

    A field stands under one name in `PoolSpec`, here, and in the message `PoolSettings`, in which it travels and is
    stored. `residence_s` counts with `prewarm` alone: a service that received capacity is no donor for that time.
    """

    drain_timeout_s: float
    sleep_level: int = 1
    prewarm: bool = False
    residence_s: float = 0.0


_SETTINGS = tuple(item.name for item in fields(PoolSettings))
_FLAT = frozenset(actuator_pb2.PoolState.DESCRIPTOR.fields_by_name)


def settings_in(source: object) -> dict[str, Any]:
    """The fields of `PoolSettings` by name, as a spec or another value has them."""
    return {name: getattr(source, name) for name in _SETTINGS}


def _settings_to_proto(settings: PoolSettings) -> dict[str, Any]:
    """Fields of `PoolState`: the settings, and those that older releases look for beside them."""
    known = settings_in(settings)
    flat = {name: value for name, value in known.items() if name in _FLAT}
    return {**flat, "settings": policy_pb2.PoolSettings(**known)}


def _settings_from_proto(message: actuator_pb2.PoolState) -> dict[str, Any]:
    """The settings that a message has; sleep level 0 means 1."""
    source: Any = message.settings if message.HasField("settings") else message
    known = {
        at.name: getattr(source, at.name)
        for at in source.DESCRIPTOR.fields
        if at.name in _SETTINGS and (not at.has_presence or source.HasField(at.name))
    }
    return {**known, "sleep_level": known["sleep_level"] or 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPool(PoolSettings):
    """What a pool should look like. Absolute: the awake set, not a change of it.

    `state_revision` grows with every change; 0 before it has one. `replica_revision` is the revision of the cluster's
    replicas that the state rests on. After `expires_s`, in Unix seconds, an actuator refuses it; None: never.
    """

    pool: str
    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    floors: tuple[Floor, ...]
    budget_gpus: int
    decision_id: str
    state_revision: int = 0
    replica_revision: int = 0
    expires_s: float | None = None


def desired_to_proto(desired: DesiredPool) -> actuator_pb2.PoolState:
    """The message of a desired state."""
    return actuator_pb2.PoolState(
        pool=desired.pool,
        state_revision=desired.state_revision,
        overlay=[
            actuator_pb2.OverlayReplica(
                replica=item.replica,
                service=item.member.service,
                role=types_pb2.Role.ValueType(item.member.role.number),
                model=item.model,
                profile=item.profile,
                node=item.node,
                gpu_indices=item.gpu_indices,
            )
            for item in desired.overlay
        ],
        awake=desired.awake,
        floors=[
            actuator_pb2.MemberFloor(
                service=item.service,
                role=types_pb2.Role.ValueType(item.role.number),
                min_replicas=item.min_replicas,
            )
            for item in desired.floors
        ],
        budget_gpus=desired.budget_gpus,
        decision_id=desired.decision_id,
        replica_revision=desired.replica_revision,
        expire_time=optional_timestamp(desired.expires_s),
        **_settings_to_proto(desired),
    )


def desired_from_proto(message: actuator_pb2.PoolState) -> DesiredPool:
    """The desired state in a message; sleep level 0 means 1.

    Raises ValueError for a role that this release does not know. Whether the values make sense is for the reader to
    check.
    """
    return DesiredPool(
        pool=message.pool,
        state_revision=message.state_revision,
        overlay=_overlay(message.overlay),
        awake=tuple(message.awake),
        floors=tuple(
            Floor(service=item.service, role=Role.from_number(item.role), min_replicas=item.min_replicas)
            for item in message.floors
        ),
        budget_gpus=message.budget_gpus,
        decision_id=message.decision_id,
        replica_revision=message.replica_revision,
        expires_s=seconds_of(message.expire_time) if message.HasField("expire_time") else None,
        **_settings_from_proto(message),
    )


def _overlay(overlay: Iterable[actuator_pb2.OverlayReplica]) -> tuple[OverlayReplica, ...]:
    return tuple(
        OverlayReplica(
            replica=item.replica,
            member=MemberKey(item.service, Role.from_number(item.role)),
            model=item.model,
            profile=item.profile,
            node=item.node,
            gpu_indices=tuple(sorted(item.gpu_indices)),
        )
        for item in overlay
    )
