"""Between protobuf and the core's types; pure, and nothing else knows both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from policy_engine.core.arena import ReplicaFacts
from policy_engine.core.overlay import OverlayReplica
from policy_engine.core.vocabulary import MemberKey
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.words import LifeCycle, Role


def role_name(role: Role) -> str:
    """The protobuf name, such as ROLE_DECODE."""
    return types_pb2.Role.Name(types_pb2.Role.ValueType(role.number))


def life_cycle(replica: actuator_pb2.Replica) -> LifeCycle:
    """A replica's life cycle; one that this version does not know is unknown."""
    try:
        return LifeCycle.from_number(replica.life_cycle)
    except ValueError:
        return LifeCycle.UNKNOWN


def replica_facts(
    replicas: Iterable[actuator_pb2.Replica], *, yielding: frozenset[str] = frozenset()
) -> tuple[ReplicaFacts, ...]:
    """Replicas as the arbiter takes them, by name.

    One of `yielding` that boots is shown as one that does not run: whoever is to wake on its GPUs gets them.
    """
    return tuple(
        ReplicaFacts(
            replica=item.replica,
            life_cycle=_as_yielding(life_cycle(item)) if item.replica in yielding else life_cycle(item),
            routable=item.routable,
            in_flight=item.in_flight if item.HasField("in_flight") else None,
        )
        for item in sorted(replicas, key=lambda replica: replica.replica)
    )


def _as_yielding(shown: LifeCycle) -> LifeCycle:
    return LifeCycle.FAILED if shown in (LifeCycle.STARTING, LifeCycle.TERMINATING) else shown


def with_in_flight(facts: Iterable[ReplicaFacts], counts: Mapping[str, int | None]) -> tuple[ReplicaFacts, ...]:
    """The same with newer counts of requests; a replica without one keeps its own."""
    return tuple(replace(item, in_flight=counts.get(item.replica, item.in_flight)) for item in facts)


def overlay_to_proto(overlay: Iterable[OverlayReplica]) -> list[actuator_pb2.OverlayReplica]:
    """An overlay on the wire."""
    return [
        actuator_pb2.OverlayReplica(
            replica=item.replica,
            service=item.member.service,
            role=types_pb2.Role.ValueType(item.member.role.number),
            model=item.model,
            profile=item.profile,
            node=item.node,
            gpu_indices=item.gpu_indices,
        )
        for item in overlay
    ]


def overlay_from_proto(overlay: Iterable[actuator_pb2.OverlayReplica]) -> tuple[OverlayReplica, ...]:
    """The other way; order is kept."""
    return tuple(
        OverlayReplica(
            replica=item.replica,
            member=MemberKey(item.service, Role.from_number(item.role)),
            model=item.model,
            profile=item.profile,
            node=item.node,
            gpu_indices=tuple(item.gpu_indices),
        )
        for item in overlay
    )
