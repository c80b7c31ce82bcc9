"""Reports of a pool's members at a tick, for status, metrics and decision records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policy_engine.core.pool.guards import GuardState
from policy_engine.core.pool.load import Load
from policy_engine.core.pool.tss import Share
from policy_engine.core.shared.draft import CountChange, NamedSignal, Transition, named_signals
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.domain.measurement import ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.signals import ROLE_FIELDS


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A member's standing at this tick, for status and metrics."""

    key: MemberKey
    share: Share
    guard: GuardState
    awake: int
    routable: int
    load: Load | None = None


def count_changes(reports: tuple[MemberReport, ...], transition: Transition) -> tuple[CountChange, ...]:
    """Replicas of each member that `transition` moves, before and after."""
    found: list[CountChange] = []
    for item in reports:
        gained = sum(1 for change in transition.wakes if MemberKey(change.service, change.role) == item.key)
        given_up = sum(1 for change in transition.releases if MemberKey(change.service, change.role) == item.key)
        if gained or given_up:
            count = item.awake + gained - given_up
            found.append(CountChange(item.key.service, item.key.role, item.awake, count))
    return tuple(found)


_FIRST = (
    "decode_tps", "prefill_tps", "running", "waiting", "held",
    "ttft_p95_s", "tpot_p95_s", "kv_usage_ratio", "e2e_p95_s", "preemption_rps",
)  # fmt: skip
_UNSHOWN = frozenset({"request_rps", "tbt_p95_s", "prefix_hit_ratio"})
_POOL_INPUTS = (*_FIRST, *(name for name in ROLE_FIELDS if name not in _UNSHOWN and name not in _FIRST))
"""The signals of a member that a pool's decision records show: every field of `RoleSignals`, but for a few."""


def pool_inputs(
    views: Mapping[MemberKey, RoleSignals], fronts: Mapping[str, FrontDoor], reports: tuple[MemberReport, ...]
) -> tuple[NamedSignal, ...]:
    """Every member's signals, as they were observed."""
    found: list[NamedSignal] = []
    for item in reports:
        view = views.get(item.key, RoleSignals(role=item.key.role))
        front = fronts.get(item.key.service, FrontDoor())
        found += named_signals(str(item.key), _POOL_INPUTS, view, front)
        if item.load is not None:
            found += _of_load(item.key, item.load)
    return tuple(found)


def _of_load(key: MemberKey, load: Load) -> list[NamedSignal]:
    """What ρ and the steady ρ are made of, and the latency that a move is to shorten."""
    found = [
        NamedSignal(f"{key} arriving work", "replicas", ok(load.arriving)),
        NamedSignal(f"{key} change of work to come", "replicas", ok(load.rise)),
        NamedSignal(f"{key} backlog work", "replicas", ok(load.backlog)),
    ]
    if load.usual is not None:
        found.append(NamedSignal(f"{key} usual work", "replicas", ok(load.usual)))
    if load.latency_s is not None:
        found += [
            NamedSignal(f"{key} usual requests", "1/s", ok(load.request_rps)),
            NamedSignal(f"{key} usual latency", "s", ok(load.latency_s)),
        ]
    return found
