"""Reads the newest windows of roles and front doors from the store, and merges what several collectors wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.api.collector.v1 import collector_pb2
from trimtab.domain.observation import RoleObservation
from trimtab.domain.role_merge import merge
from trimtab.domain.role_signals import FrontDoor, RoleSignals, front_door, role_signals
from trimtab.domain.role_window import RoleWindow, role_window_from_proto
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry

log = structlog.get_logger(__name__)

FRONT_DOOR_ROLE = "ROLE_UNSPECIFIED"


@dataclass(frozen=True)
class Observed:
    """The newest observation of every role and front door that was wanted; absent where there is none."""

    roles: Mapping[MemberKey, RoleSignals] = field(default_factory=dict)
    fronts: Mapping[str, FrontDoor] = field(default_factory=dict)


async def observe(store: Store, wanted: Mapping[MemberKey, Sequence[str]]) -> Observed:
    """One round trip for all. `wanted` maps each role to the names of its routable replicas, the m of "n of m"."""
    members = sorted(wanted)
    services = sorted({key.service for key in members})
    if not members:
        return Observed()
    pipeline = store.redis.pipeline(transaction=False)
    for key in members:
        pipeline.hgetall(keys.latest_partials(key.service, key.role.proto_name))
    for service in services:
        pipeline.hgetall(keys.latest_partials(service, FRONT_DOOR_ROLE))
    answers = await pipeline.execute()
    roles: dict[MemberKey, RoleSignals] = {}
    for key, answer in zip(members, answers, strict=False):
        merged = _merged(answer, str(key), wanted[key])
        if merged is not None:
            roles[key] = role_signals(key.role, merged)
    fronts: dict[str, FrontDoor] = {}
    for service, answer in zip(services, answers[len(members) :], strict=True):
        merged = _merged(answer, f"{service} front door", None)
        if merged is not None:
            fronts[service] = front_door(merged)
    return Observed(roles, fronts)


def _merged(answer: Mapping[bytes, bytes], place: str, expected: Sequence[str] | None) -> RoleObservation | None:
    windows: list[RoleWindow] = []
    for collector in sorted(answer):
        try:
            windows.append(role_window_from_proto(decode(collector_pb2.RolePartial, answer[collector], place=place)))
        except (CorruptEntry, ValueError) as error:
            log.warning("a window was left out", error=str(error))
    if not windows:
        return None
    try:
        return merge(windows, expected=expected)
    except ValueError as error:
        log.warning("windows could not be merged", role=place, error=str(error))
        return None
