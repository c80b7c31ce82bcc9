"""Typed measurements as the engine's cores take them: a value with a quality, never a bare number.

A missing read is not zero: a core that needs a value asks for it with a rule for its absence in hand. What may
justify taking capacity away is decided here alone (`fit_for_release`), for scaled and pooled services alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from trimtab.words import Quality, Role

V = TypeVar("V", "RoleSignals", "FrontDoor")

MIN_REPORTED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Signal:
    """One measurement. `value` is finite, never negative, and None exactly when nothing was read.

    `reported` of `expected` replicas contributed; both are 0 where that is not known or does not apply.
    """

    value: float | None
    quality: Quality
    reported: int = 0
    expected: int = 0
    detail: str = ""

    @property
    def usable(self) -> bool:
        """Whether the value may be reckoned with at all: a stale gauge is reported as stuck, not as load."""
        return self.value is not None and self.quality not in (Quality.MISSING, Quality.STALE)

    @property
    def fit_for_release(self) -> bool:
        """Whether capacity may be taken away on it: ok, or partial with at least 95 % of the replicas."""
        if self.value is None:
            return False
        if self.quality == Quality.OK:
            return True
        return (
            self.quality == Quality.PARTIAL
            and self.expected > 0
            and self.reported >= MIN_REPORTED_SHARE * self.expected - 1e-9
        )

    @property
    def unread_replicas(self) -> int:
        """Replicas that should have contributed and did not."""
        return max(0, self.expected - self.reported) if self.quality == Quality.PARTIAL else 0

    def number(self, default: float) -> float:
        """The value where it is usable, else `default`."""
        return self.value if self.value is not None and self.usable else default

    def said(self) -> str:
        """The quality as people read it, such as `partial 4 of 8`."""
        text = f"partial {self.reported} of {self.expected}" if self.quality == Quality.PARTIAL else self.quality.value
        return f"{text} ({self.detail})" if self.detail else text


def ok(value: float) -> Signal:
    """A value that was read in full."""
    return Signal(value=value, quality=Quality.OK)


def missing(detail: str = "") -> Signal:
    """Nothing was read."""
    return Signal(value=None, quality=Quality.MISSING, detail=detail)


NEVER_READ = missing("never observed")


@dataclass(frozen=True, slots=True)
class RoleSignals:
    """One role's newest window. Rates are sums over the role's routable replicas; latencies in seconds."""

    role: Role
    window_end_s: float | None = None
    prefill_tps: Signal = NEVER_READ
    decode_tps: Signal = NEVER_READ
    request_rps: Signal = NEVER_READ
    running: Signal = NEVER_READ
    waiting: Signal = NEVER_READ
    kv_usage_ratio: Signal = NEVER_READ
    ttft_p95_s: Signal = NEVER_READ
    tpot_p95_s: Signal = NEVER_READ
    tbt_p95_s: Signal = NEVER_READ
    e2e_p95_s: Signal = NEVER_READ
    preemption_rps: Signal = NEVER_READ
    prefix_hit_ratio: Signal = NEVER_READ


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """What the gateways of a service report: what they hold, and what arrives (per second)."""

    window_end_s: float | None = None
    held: Signal = NEVER_READ
    arrival_rps: Signal = NEVER_READ
    arrival_prompt_tps: Signal = NEVER_READ
    arrival_output_tps: Signal = NEVER_READ


def fresh_role(view: RoleSignals, *, now_s: float, staleness_s: float) -> RoleSignals:
    """`view`, with every signal missing once its window ended more than `staleness_s` ago."""
    age_s = _age_s(view.window_end_s, now_s)
    return view if age_s is None or age_s <= staleness_s else _aged(view, age_s)


def fresh_front_door(view: FrontDoor, *, now_s: float, staleness_s: float) -> FrontDoor:
    """The same for the front door: a gateway that fell silent says nothing about demand."""
    age_s = _age_s(view.window_end_s, now_s)
    return view if age_s is None or age_s <= staleness_s else _aged(view, age_s)


def _age_s(window_end_s: float | None, now_s: float) -> float | None:
    return None if window_end_s is None else max(0.0, now_s - window_end_s)


def _aged(view: V, age_s: float) -> V:
    gone = missing(f"last window ended {age_s:.0f} s ago")
    changes = {item.name: gone for item in fields(view) if isinstance(getattr(view, item.name), Signal)}
    return replace(view, **changes)  # type: ignore[arg-type]  # every changed field is a Signal
