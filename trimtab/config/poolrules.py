"""The rules of a pool's arbiter that go beyond the plain ones of TRE, each switchable, and their defaults.

The defaults are what is shipped; `PoolRules.plain()` are the paper's rules and nothing else, to compare with.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab.config.fields import SMALLEST, Seconds, Spec, enum_word

AllocationWord = Annotated[Literal["share", "level", "load"], enum_word("ALLOCATION_")]
PredictionWord = Annotated[Literal["power", "elasticity", "capacity", "none"], enum_word("PREDICTION_")]
OverloadWord = Annotated[Literal["rescue", "level"], enum_word("OVERLOAD_")]

MAX_RATIO = 1000.0


class LoadRule(Spec):
    """The leading measure ρ = (arriving work + backlog) / capacity beside Z.

    It needs gateways that report what arrives, and the member's capacities in its `tokenServiceShare`; a member without
    either has no ρ and goes by Z alone. A member is rescued when ρ passes `rescue_above`. A donor's ρ after the release
    must be at most `donor_below`, or below the receiver's by `margin`. A backlog is to be gone after
    `backlog_horizon_s`. To level loads, a member gains from `level_above` on, and a donor stays below it by
    `level_margin`; `allocation: level` does so by arrivals smoothed over `memory_s`.

    Arrivals are measured over a window, so a rise shows late: its excess over `rise_above` (in the capacity of replicas
    per second, beyond noise) is extrapolated by `lead_s`; 0 for never. Their long trend is extrapolated by `trend_s`,
    at most twice `memory_s`. A member whose needs were brief of late is rescued once one has lasted for up to
    `patience_s`; 0 for at once. One with settled arrivals whose Z is in surplus is rescued only above
    `surplus_rescue_above`. Where loads are level and settled, `allocation: level` also moves what makes requests
    quicker by at least `latency_gain`, a share of the sum of their cubed latencies; 0 for never.
    """

    enabled: bool = True
    rescue_above: float = Field(0.9, ge=SMALLEST, le=MAX_RATIO)
    donor_below: float = Field(0.8, ge=0, le=MAX_RATIO)
    margin: float = Field(0.3, ge=0, le=MAX_RATIO)
    backlog_horizon_s: Seconds = 5.0
    level_above: float = Field(0.5, ge=0, le=MAX_RATIO)
    level_margin: float = Field(0.3, ge=0, le=MAX_RATIO)
    memory_s: float = Field(12.0, ge=0, le=86_400)
    max_wakes: int = Field(2, ge=1, le=64)
    lead_s: float = Field(3.0, ge=0, le=60)
    rise_above: float = Field(0.15, ge=0, le=MAX_RATIO)
    trend_s: float = Field(8.0, ge=0, le=600)
    patience_s: float = Field(10.0, ge=0, le=3600)
    surplus_rescue_above: float = Field(1.2, ge=0, le=MAX_RATIO)
    latency_gain: float = Field(0.05, ge=0, le=1)

    @model_validator(mode="after")
    def _thresholds_are_in_order(self) -> Self:
        for name, threshold in (("donorBelow", self.donor_below), ("levelAbove", self.level_above)):
            if threshold > self.rescue_above:
                raise ValueError(
                    f"{name} {threshold:g} is above rescueAbove {self.rescue_above:g}, from which a member is itself "
                    f"in need: lower {name}, or raise rescueAbove"
                )
        return self


class PoolRules(Spec):
    """How a pool's arbiter decides.

    - `allocation`: `share` goes by Z (with ρ beside it); `level` does too, and lets the slow loop level the members'
      steady loads; `load` re-solves the pool by ρ at every tick and moves one bounded transition towards that.
    - `prediction`: how Z after a transfer is predicted: `power` Z·(n'/n)^1.5, `elasticity` with an exponent learnt from
      the member's own transfers, `capacity` from the load and the profile's capacities, `none` not at all: a donor is
      judged by the Z that it has.
    - `stage_guard`: a stage of a disaggregated service does not give while the other stage is in need.
    - `settle_s`: a member that just gained or gave is not judged by its Z until its window covers the change.
    - `priority_base`: Z is divided, and ρ multiplied, by this to the power of the priority; 1 for ranking alone.
    - `overload`: with every Z below 1, `rescue` moves capacity to critical members only, `level` also from a better to
      a worse served one.
    - `donor_margin`: in a rescue a donor's Z stays above the receiver's by this share of it, so that a move is worth
      its drain.
    - `max_transitions`: under way at a time, disjoint in services; 0 for one per 32 GPUs, at least one.
    - `rebalance_waits`: while a rescue is pending the slow loop takes from no donor, also when nothing can serve the
      rescue.
    """

    allocation: AllocationWord = "level"
    load: LoadRule = LoadRule()
    prediction: PredictionWord = "capacity"
    stage_guard: bool = True
    settle_s: float = Field(2.0, ge=0, le=86_400)
    priority_base: float = Field(1.0, ge=1, le=10)
    overload: OverloadWord = "rescue"
    donor_margin: float = Field(0.0, ge=0, le=10)
    max_transitions: int = Field(0, ge=0, le=256)
    rebalance_waits: bool = False

    @model_validator(mode="after")
    def _allocation_by_load_has_loads(self) -> Self:
        if self.allocation == "load" and not self.load.enabled:
            raise ValueError("allocation load goes by ρ, which load.enabled turns off: enable it, or allocate by share")
        return self

    @model_validator(mode="after")
    def _latency_gain_has_an_effect(self) -> Self:
        """A gain other than the default needs `allocation: level`; the default is always let through."""
        gain = self.load.latency_gain
        if gain in (0, LoadRule.model_fields["latency_gain"].default):
            return self
        if self.allocation != "level":
            raise ValueError(
                f"load.latencyGain {gain:g} does nothing with allocation {self.allocation}: set allocation to level, "
                "or leave latencyGain out"
            )
        if not self.load.enabled:
            raise ValueError(
                f"load.latencyGain {gain:g} goes by ρ, which load.enabled turns off: enable it, or leave latencyGain "
                "out"
            )
        return self

    @classmethod
    def plain(cls) -> Self:
        """TRE's own rules (section IV): the Z of now alone, one transition at a time, no rebalance beside a rescue."""
        return cls(
            allocation="share",
            load=LoadRule(enabled=False),
            prediction="none",
            stage_guard=False,
            settle_s=0.0,
            max_transitions=1,
            rebalance_waits=True,
        )
