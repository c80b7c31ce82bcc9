"""A replica's profile: what its engine, its memory and its life cycle take, each with its source.

Profiles are YAML files (`simulator/profiles/`); unknown keys and impossible values are refused with their path.
Times are as measured. Scaling them for a demo is a setting of the fleet, never of a profile.
"""

from __future__ import annotations

import datetime

import pydantic

from simulator.core.limits import EngineLimits
from simulator.core.timing import IterationModel, KvLink


class _Frozen(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Source(_Frozen):
    """Where figures come from."""

    text: str = pydantic.Field(min_length=1)
    date: datetime.date
    """When the figures were fitted or taken over."""
    fit_error: dict[str, float] = {}
    """Relative errors of the fit by what was compared, as fractions (0.05 = 5 %)."""


class TimingProfile(_Frozen):
    """Coefficients of `IterationModel`, with their source."""

    host_s: pydantic.NonNegativeFloat
    weights_s: pydantic.NonNegativeFloat
    linear_s: pydantic.NonNegativeFloat
    token_s: pydantic.NonNegativeFloat
    seq_s: pydantic.NonNegativeFloat
    kv_token_s: pydantic.NonNegativeFloat
    attention_pair_s: pydantic.NonNegativeFloat
    experts_s: pydantic.NonNegativeFloat = 0.0
    expert_share: float = pydantic.Field(default=0.0, ge=0, le=1)
    prefill_s: pydantic.NonNegativeFloat = 0.0
    mixed_kv_token_s: pydantic.NonNegativeFloat = 0.0
    source: Source


class LimitsProfile(_Frozen):
    """vLLM's flags."""

    max_num_batched_tokens: pydantic.PositiveInt
    max_num_seqs: pydantic.PositiveInt
    block_size: pydantic.PositiveInt
    max_model_len: pydantic.PositiveInt
    max_num_queued_reqs: pydantic.PositiveInt | None = None
    enable_prefix_caching: bool = True


class MemoryProfile(_Frozen):
    """HBM of one GPU of the replica, in GiB."""

    weights_gib: pydantic.PositiveFloat
    kv_cache_gib: pydantic.PositiveFloat
    runtime_gib: pydantic.NonNegativeFloat
    """Activations, CUDA graphs and context beside weights and KV cache."""
    sleeper_gib: pydantic.NonNegativeFloat
    """What a sleeping replica still holds."""
    kv_bytes_per_token: pydantic.PositiveFloat
    """KV cache of one token over all GPUs of the replica."""
    source: Source

    @property
    def awake_gib(self) -> float:
        """What an awake replica holds of each of its GPUs."""
        return self.weights_gib + self.kv_cache_gib + self.runtime_gib


class LifecycleProfile(_Frozen):
    """Seconds of each transition, as measured."""

    start_up_s: pydantic.PositiveFloat
    first_sleep_s: pydantic.NonNegativeFloat
    sleep_s: pydantic.NonNegativeFloat
    wake_s: pydantic.NonNegativeFloat
    sleep_level2_s: pydantic.NonNegativeFloat
    """Level 2 drops the weights: quick to fall asleep, slow to wake."""
    wake_level2_s: pydantic.NonNegativeFloat
    source: Source


class KvTransferProfile(_Frozen):
    """The link KV blocks take between servers."""

    latency_s: pydantic.NonNegativeFloat
    bytes_per_s: pydantic.PositiveFloat
    source: Source


class Profile(_Frozen):
    """Everything the simulator knows about one model on one kind of GPU."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    model: str
    gpu_type: str
    """Prefix of the node's GPU type, `A100` runs on `A100-40GB`."""
    tensor_parallel: pydantic.PositiveInt
    timing: TimingProfile
    limits: LimitsProfile
    memory: MemoryProfile
    lifecycle: LifecycleProfile
    kv_transfer: KvTransferProfile

    @property
    def num_gpu_blocks(self) -> int:
        """KV blocks that fit into the replica's KV cache."""
        cache_bytes = self.memory.kv_cache_gib * 2**30 * self.tensor_parallel
        return int(cache_bytes / (self.memory.kv_bytes_per_token * self.limits.block_size))

    def engine_limits(self) -> EngineLimits:
        """The engine's limits; raises ValueError when a request of full length would not fit."""
        return EngineLimits(
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_num_seqs=self.limits.max_num_seqs,
            block_size=self.limits.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            max_model_len=self.limits.max_model_len,
            enable_prefix_caching=self.limits.enable_prefix_caching,
        )

    def iteration_model(self) -> IterationModel:
        """The engine's timing."""
        timing = self.timing
        return IterationModel(
            host_s=timing.host_s,
            weights_s=timing.weights_s,
            linear_s=timing.linear_s,
            token_s=timing.token_s,
            seq_s=timing.seq_s,
            kv_token_s=timing.kv_token_s,
            attention_pair_s=timing.attention_pair_s,
            experts_s=timing.experts_s,
            expert_share=timing.expert_share,
            prefill_s=timing.prefill_s,
            mixed_kv_token_s=timing.mixed_kv_token_s,
        )

    def kv_link(self) -> KvLink:
        """The link for KV transfers."""
        return KvLink(self.kv_transfer.latency_s, self.kv_transfer.bytes_per_s, self.memory.kv_bytes_per_token)
