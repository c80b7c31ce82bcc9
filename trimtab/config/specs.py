"""The parts of resources as frozen domain types: each field with its bounds and default.

Field names are the protos', aliases the camelCase names of protobuf's JSON mapping. `trimtab.config.resources` puts
them together; nothing here knows of YAML, gRPC or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from trimtab.config.fields import (
    SMALLEST,
    LevelWord,
    Name,
    RoleWord,
    Seconds,
    Spec,
    Text,
    Tolerance,
    WholeNumber,
    enum_word,
)
from trimtab.config.poolrules import PoolRules
from trimtab.domain.vocabulary import MAX_ROLES, Role, TopologyLevel

MAX_POOL_GPUS = 4096
MAX_GPUS_PER_NODE = 64


class Slo(Spec):
    """Latency targets of the service's SLO class, in seconds, at the 95th percentile."""

    ttft_s: Seconds
    tpot_s: Seconds


class TokenServiceShare(Spec):
    """TRE section III: the six scalars of a (model, SLO class) profile, and the hysteresis of its regions.

    The defaults of the weights and of `smoothing` are the ones that ranked best in the fixed-capacity sweeps. A
    `waiting_weight` that is not given follows the length of answers, by the policy engine's `waiting_weight_of`. The
    capacities are what one replica sustains within the SLO: prompt tokens per second when it computes nothing else, and
    generated tokens per second. `base_tpot_s` is the time per token of a request that is alone. They serve the
    leading measure ρ and predictions, which are off without them.
    """

    prefill_weight: float = Field(0.0, ge=0, le=10)
    waiting_weight: float | None = Field(None, ge=0, le=1000)
    smoothing: float = Field(1.0, gt=0, le=1)
    theta_tps: float = Field(ge=SMALLEST, le=1e6)
    critical_below: float = Field(0.8, gt=0, lt=1)
    surplus_above: float = Field(1.3, gt=1, le=100)
    hysteresis: float = Field(0.05, ge=0, lt=1)
    capacity_prefill_tps: float | None = Field(None, ge=SMALLEST, le=1e9)
    capacity_decode_tps: float | None = Field(None, ge=SMALLEST, le=1e9)
    base_tpot_s: Seconds | None = None

    @model_validator(mode="after")
    def _regions_stay_apart(self) -> Self:
        if self.critical_below + self.hysteresis >= self.surplus_above - self.hysteresis:
            raise ValueError(
                f"the regions overlap: criticalBelow {self.critical_below:g} + hysteresis {self.hysteresis:g} must "
                f"stay below surplusAbove {self.surplus_above:g} − hysteresis"
            )
        return self


class RoleSpec(Spec):
    """Bounds and shape of one role. Bounds are given here alone; pools only list members.

    `token_service_share` is the stage's own profile, in place of the service's.
    """

    role: RoleWord
    min_replicas: int = Field(0, ge=0, le=100_000)
    max_replicas: int = Field(ge=1, le=100_000)
    gpus_per_replica: int = Field(1, ge=1, le=MAX_GPUS_PER_NODE)
    gpu_types: tuple[Annotated[Text, Field(min_length=1, max_length=63)], ...] = Field((), max_length=16)
    profile: Text = Field("", max_length=128)
    token_service_share: TokenServiceShare | None = None

    @model_validator(mode="after")
    def _bounds_are_alive(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"minReplicas {self.min_replicas} is above maxReplicas {self.max_replicas}: "
                "lower one, or raise the other"
            )
        return self


MetricWord = Annotated[Literal["decode-tps", "prefill-tps"], enum_word("PROPORTIONAL_METRIC_")]


class Proportional(Spec):
    """HeteroScale's proportional policy: `metric` per replica should be `target_per_replica` tokens per second."""

    metric: MetricWord = "decode-tps"
    target_per_replica: float = Field(ge=SMALLEST, le=1e9)
    scale_out_tolerance: Tolerance = 0.1
    scale_in_tolerance: Tolerance = 0.1
    scale_out_cooling_s: float = Field(15.0, ge=0, le=86_400)
    scale_in_cooling_s: float = Field(60.0, ge=0, le=86_400)
    stabilization_window_s: float = Field(60.0, ge=0, le=86_400)
    max_step_units: int = Field(0, ge=0, le=100_000)
    drain_horizon_s: Seconds = 30.0


class Ratio(Spec):
    """The P/D ratio, such as 1:5. `strict`: whole units only; else decode is counted singly."""

    prefill: int = Field(ge=1, le=64)
    decode: int = Field(ge=1, le=64)
    strict: bool = False

    @property
    def parts(self) -> dict[Role, int]:
        """The ratio as replicas by role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}


class LatencyBrake(Spec):
    """Floors from latency: at `alpha` × target 1.2 × the replicas, at `beta` × target 1.1 ×, and no scale-in.

    The defaults are HeteroScale's (Algorithm 3); with an `alpha` alone, `beta` is 0.8 of it, as of the default.
    """

    ttft_target_s: Seconds | None = None
    tbt_target_s: Seconds | None = None
    alpha: float = Field(1.5, gt=0, le=10)
    beta: float = Field(1.2, gt=0, le=10)

    @model_validator(mode="before")
    @classmethod
    def _beta_follows_alpha(cls, data: object) -> object:
        if not isinstance(data, Mapping) or "beta" in data:
            return data
        alpha = data.get("alpha")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            return data
        return {**data, "beta": round(0.8 * alpha, 9)}

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if self.ttft_target_s is None and self.tbt_target_s is None:
            raise ValueError("give ttftTargetS, tbtTargetS or both")
        if self.beta > self.alpha:
            raise ValueError(f"beta {self.beta:g} is above alpha {self.alpha:g}: lower beta, or raise alpha")
        return self


class GuardLimit(Spec):
    """`soft`: no donor beyond it; `hard`: rescued beyond it."""

    soft: float | None = Field(None, gt=0, le=86_400)
    hard: float | None = Field(None, gt=0, le=86_400)

    @model_validator(mode="after")
    def _soft_before_hard(self) -> Self:
        if self.soft is not None and self.hard is not None and self.soft > self.hard:
            raise ValueError(f"soft {self.soft:g} is above hard {self.hard:g}: lower soft, or raise hard")
        if self.soft is None and self.hard is None:
            raise ValueError("is a guard without a limit: give soft, hard or both, or leave it out")
        return self


class ShareLimit(GuardLimit):
    """A limit on a share, which is never above 1."""

    soft: float | None = Field(None, gt=0, le=1)
    hard: float | None = Field(None, gt=0, le=1)


class Guards(Spec):
    """Limits on latencies (seconds), KV-cache usage (0 to 1), preemptions per second, the growth of the queue in
    requests per second, and the share of the awake replicas that do not serve (0 to 1).
    """

    ttft_p95_s: GuardLimit | None = None
    tpot_p95_s: GuardLimit | None = None
    kv_usage_ratio: ShareLimit | None = None
    # The alias is protobuf's: pydantic would capitalise the letter after a digit.
    e2e_p95_s: GuardLimit | None = Field(None, alias="e2eP95S")
    preemption_rps: GuardLimit | None = None
    queue_growth_rps: GuardLimit | None = None
    lost_ratio: ShareLimit | None = None


class PolicyKind(StrEnum):
    """How a service's number of replicas is decided, as `ServicePolicySpec.kind` derives it from the blocks given."""

    SCALED = "scaled"
    """The engine publishes a count for each role; replicas come and go."""
    POOLED = "pooled"
    """Replicas belong to a pool, whose arbiter wakes and releases them."""
    OBSERVED = "observed"
    """No block with rules is given. ServicePolicySpec refuses it."""


class ServicePolicySpec(Spec):
    """What the policy engine has to know about one service."""

    model: Text = Field(min_length=1, max_length=256)
    slo: Slo
    roles: tuple[RoleSpec, ...] = Field(min_length=1, max_length=MAX_ROLES)
    priority: int = Field(0, ge=-1000, le=1000)
    token_service_share: TokenServiceShare | None = None
    proportional: Proportional | None = None
    ratio: Ratio | None = None
    latency_brake: LatencyBrake | None = None
    guards: Guards | None = None
    affinity: LevelWord = TopologyLevel.CLUSTER
    staleness_s: Seconds = 15.0
    allow_partial: bool = False

    @field_validator("affinity", mode="before")
    @classmethod
    def _unset_affinity(cls, value: object) -> object:
        return TopologyLevel.CLUSTER if value in (None, "TOPOLOGY_LEVEL_UNSPECIFIED") else value

    @model_validator(mode="after")
    def _roles_belong_together(self) -> Self:
        words = [role.role for role in self.roles]
        if sorted(words) not in ([Role.COLOCATED], [Role.DECODE, Role.PREFILL]):
            raise ValueError("roles are one colocated role, or prefill and decode")
        kind, disaggregated = self.kind, Role.DECODE in words
        if self.ratio is not None and not disaggregated:
            raise ValueError("ratio needs the roles prefill and decode")
        if kind == PolicyKind.SCALED and disaggregated and self.ratio is None:
            raise ValueError("a scaled service with prefill and decode needs a ratio")
        if self.latency_brake is not None and kind != PolicyKind.SCALED:
            raise ValueError("latencyBrake works beside proportional, which is not given")
        if kind == PolicyKind.OBSERVED:
            raise ValueError("give proportional (a scaled service) or tokenServiceShare (a pooled one)")
        return self

    @property
    def kind(self) -> PolicyKind:
        """What decides the service's replicas. The only place that derives it from which blocks are given."""
        if self.proportional is not None:
            return PolicyKind.SCALED
        every_stage = all(role.token_service_share is not None for role in self.roles)
        return PolicyKind.POOLED if self.token_service_share is not None or every_stage else PolicyKind.OBSERVED

    @property
    def scaling(self) -> Proportional:
        """The proportional policy of a scaled service. Raises ValueError for a service of another kind."""
        if self.proportional is None:
            raise ValueError(f"a {self.kind} service has no proportional policy")
        return self.proportional

    def role(self, role: Role) -> RoleSpec | None:
        """The role's spec, or None when the service has no such role."""
        return next((spec for spec in self.roles if spec.role == role), None)

    def share_profile(self, role: Role) -> TokenServiceShare | None:
        """The role's Token Service Share profile: its own, else the service's."""
        spec = self.role(role)
        own = spec.token_service_share if spec is not None else None
        return own or self.token_service_share


class NodeGpus(Spec):
    """GPUs of one node."""

    node: Text = Field(min_length=1, max_length=253)
    gpu_indices: tuple[Annotated[WholeNumber, Field(ge=0, lt=MAX_GPUS_PER_NODE)], ...] = Field(
        min_length=1, max_length=MAX_GPUS_PER_NODE
    )

    @field_validator("gpu_indices")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("a GPU is named twice")
        return value


class GpuSet(NodeGpus):
    """The GPUs of one replica of a pool, and its name where it exists already; empty to find or make one."""

    replica: Text = Field("", max_length=253)


class PoolMember(Spec):
    """A service whose replicas belong to the pool; floors and ceilings are its ServicePolicy's."""

    service: Name
    role: RoleWord = Role.COLOCATED
    initial_awake: int = Field(0, ge=0, le=MAX_POOL_GPUS)
    overlay: tuple[GpuSet, ...] = Field((), max_length=MAX_POOL_GPUS)


class PoolSpec(Spec):
    """A fixed set of GPUs of one cluster shared by hot-switched services."""

    cluster: Name
    gpus: tuple[NodeGpus, ...] = Field(min_length=1, max_length=MAX_POOL_GPUS)
    members: tuple[PoolMember, ...] = Field(min_length=1, max_length=256)
    rescue_interval_s: Seconds = 1.0
    rebalance_interval_s: Seconds = 2.0
    residence_s: float = Field(8.0, ge=0, le=86_400)
    drain_timeout_s: Seconds = 0.5
    sleep_level: Literal[1, 2] = 1
    prewarm: bool = False
    rules: PoolRules = PoolRules()

    @model_validator(mode="before")
    @classmethod
    def _slow_is_twice_the_fast(cls, data: object) -> object:
        """Derive the slow loop's interval from the fast one's where only the latter is given."""
        if not isinstance(data, Mapping) or "rebalanceIntervalS" in data or "rebalance_interval_s" in data:
            return data
        rescue_s = data.get("rescueIntervalS", data.get("rescue_interval_s"))
        known = isinstance(rescue_s, int | float) and not isinstance(rescue_s, bool) and rescue_s > 0
        return {**data, "rebalanceIntervalS": 2.0 * rescue_s} if known else data

    @property
    def budget_gpus(self) -> int:
        """The pool's size: its GPUs, counted."""
        return sum(len(entry.gpu_indices) for entry in self.gpus)

    @model_validator(mode="after")
    def _sets_are_consistent(self) -> Self:
        nodes = [entry.node for entry in self.gpus]
        if len(set(nodes)) != len(nodes):
            raise ValueError("gpus names a node twice")
        if self.budget_gpus > MAX_POOL_GPUS:
            raise ValueError(f"a pool has at most {MAX_POOL_GPUS} GPUs")
        keys = [(member.service, member.role) for member in self.members]
        if len(set(keys)) != len(keys):
            raise ValueError("members names a service and role twice")
        if self.rebalance_interval_s < self.rescue_interval_s:
            raise ValueError(
                f"rebalanceIntervalS {self.rebalance_interval_s:g} is below rescueIntervalS "
                f"{self.rescue_interval_s:g}: the slow loop cannot be the faster one; raise it, or leave it out for "
                "twice the other"
            )
        owned = {(entry.node, index) for entry in self.gpus for index in entry.gpu_indices}
        for member in self.members:
            for gpu_set in member.overlay:
                outside = [index for index in gpu_set.gpu_indices if (gpu_set.node, index) not in owned]
                if outside:
                    raise ValueError(
                        f"the overlay of {member.service} uses GPU {outside[0]} of {gpu_set.node}, not in gpus"
                    )
        return self
