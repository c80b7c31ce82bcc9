"""Local guards (TRE, section IV): latencies and KV usage that veto a donor (soft) or start a rescue (hard).

They never rank services, and Z ignores them.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.signals import RoleSignals, Signal
from trimtab.config.specs import GuardLimit, Guards


@dataclass(frozen=True, slots=True)
class GuardState:
    """Which limits are passed, in words; empty where none is."""

    soft: str = ""
    hard: str = ""


def check_guards(guards: Guards | None, view: RoleSignals) -> GuardState:
    """A signal that cannot be used passes no limit: whether it may make a donor is for its quality to say."""
    if guards is None:
        return GuardState()
    checks: tuple[tuple[str, GuardLimit | None, Signal, str], ...] = (
        ("TTFT p95", guards.ttft_p95_s, view.ttft_p95_s, " s"),
        ("TPOT p95", guards.tpot_p95_s, view.tpot_p95_s, " s"),
        ("KV usage", guards.kv_usage_ratio, view.kv_usage_ratio, ""),
    )
    soft = hard = ""
    for name, limit, signal, unit in checks:
        if limit is None or not signal.usable:
            continue
        value = signal.number(0.0)
        if limit.soft is not None and value > limit.soft and not soft:
            soft = f"{name} {value:.3g}{unit} is beyond its soft limit of {limit.soft:g}{unit}"
        if limit.hard is not None and value > limit.hard and not hard:
            hard = f"{name} {value:.3g}{unit} is beyond its hard limit of {limit.hard:g}{unit}"
    return GuardState(soft=soft or hard, hard=hard)
