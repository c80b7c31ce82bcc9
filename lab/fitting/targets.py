"""Which profiles there are: a model on some GPUs of one kind, and where its figures come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lab.fitting.architectures import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    QWEN_2_5_7B,
    QWEN_2_5_14B,
    QWEN_3_30B_A3B,
    QWEN_3_32B,
    Architecture,
)
from lab.fitting.operators import OperatorTimes


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """How a GPU without tables is estimated from one with tables."""

    text: str
    memory_ratio: float
    """Time of what memory bounds, over that of the GPU with tables."""
    compute_ratio: float
    """Time of what computing bounds, over that of the GPU with tables."""

    def scale(self, times: OperatorTimes) -> OperatorTimes:
        """The parts of an iteration on the estimated GPU; gaps and collectives within them are not separated."""
        return dataclasses.replace(
            times,
            weights_s=times.weights_s * self.memory_ratio,
            experts_s=times.experts_s * self.memory_ratio,
            kv_token_s=times.kv_token_s * self.memory_ratio,
            linear_s=times.linear_s * self.compute_ratio,
            token_s=times.token_s * self.compute_ratio,
            expert_token_s=times.expert_token_s * self.compute_ratio,
            attention_pair_s=times.attention_pair_s * self.compute_ratio,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One profile to write."""

    name: str
    model: str
    gpu_type: str
    gpu_memory_gib: float
    tensor_parallel: int
    architecture: Architecture
    system: str
    """aiconfigurator's name of the GPU system, or LLMServingSim's of card and model."""
    max_num_batched_tokens: int
    max_num_seqs: int
    runtime_gib: float
    sleeper_gib: float
    link_bytes_per_s: float
    link: str
    corrected_on: str = ""
    """System whose end-to-end rows gave the correction; empty: host share of a recorded run alone."""
    vidur_model: str = ""
    """Vidur's name of the model, whose products a layer are compared; empty: it has none."""
    estimate: Estimate | None = None
    kv_cache_of_run: bool = False
    """Whether the KV cache is that of the recorded run, not what memory would hold."""


_CX6 = "25 GB/s a GPU between nodes (200 Gb/s, aiconfigurator's A100 system)"
_CX7 = "50 GB/s a GPU between nodes (400 Gb/s, aiconfigurator's H100 system)"
_PCIE = "25 GB/s, PCIe 4.0 x16 less its overhead"
_LLAMA3_8B_VIDUR = "meta-llama/Meta-Llama-3-8B"
_H100, _B200 = "h100_sxm", "b200_sxm"
_NAMED = (
    Target("a100-8b-tp1", "dsllama-8b", "A100", 40, 1, LLAMA_3_8B, "a100_sxm", 2048, 256, 2.0, 1.4, 25e9, _CX6, _H100,
           _LLAMA3_8B_VIDUR),
    Target("a100-7b-tp1", "dsqwen-7b", "A100", 40, 1, QWEN_2_5_7B, "a100_sxm", 2048, 256, 2.0, 1.0, 25e9, _CX6, _H100),
    Target("a100-14b-tp2", "dsqwen-14b", "A100", 40, 2, QWEN_2_5_14B, "a100_sxm", 2048, 256, 2.0, 1.8, 50e9, _CX6,
           _H100),
    Target("h100-8b-tp1", "llama-3.1-8b", "H100", 80, 1, LLAMA_3_8B, "h100_sxm", 8192, 256, 4.0, 1.4, 50e9, _CX7,
           _H100),
    Target("h100-70b-tp4", "llama-3.1-70b", "H100", 80, 4, LLAMA_3_70B, "h100_sxm", 8192, 256, 4.0, 1.8, 200e9, _CX7,
           _H100, "meta-llama/Llama-2-70b-hf"),
    Target("rtxpro6000-8b-tp1", "llama-3.1-8b", "RTXPRO6000", 96, 1, LLAMA_3_8B, "RTXPRO6000_Llama-3.1-8B_tp1", 2048,
           128, 4.0, 1.4, 25e9, _PCIE),
    Target("rtx4090-8b-tp1", "llama-3.1-8b", "RTX4090", 24, 1, LLAMA_3_8B, "RTX4090_Llama-3.1-8B_tp1", 2048, 256, 1.5,
           1.4, 25e9, _PCIE, kv_cache_of_run=True),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Card:
    """A kind of GPU and which models it serves with how many of them."""

    prefix: str
    gpu_type: str
    memory_gib: float
    system: str
    corrected_on: str
    bytes_per_s: float
    """Between nodes, each GPU."""
    models: tuple[tuple[str, int], ...]
    budget: int = 8192
    runtime_gib: float = 4.0
    estimate: Estimate | None = None


_BY_CLASS = {
    "8b": ("llama-3.1-8b", LLAMA_3_8B, 1.4),
    "14b": ("qwen2.5-14b", QWEN_2_5_14B, 1.8),
    "32b": ("qwen3-32b", QWEN_3_32B, 1.8),
    "70b": ("llama-3.1-70b", LLAMA_3_70B, 1.8),
    "30b-a3b": ("qwen3-30b-a3b", QWEN_3_30B_A3B, 1.8),
}
_L20 = Estimate("864 over 864 GB/s, 119.5 over 362 TFLOPS of the L40S", 1.0, 362.05 / 119.5)
_H20 = Estimate("4,000 over 3,350 GB/s, 148 over 989 TFLOPS of the H100", 3350 / 4000, 989 / 148)
_LARGE = (("8b", 1), ("14b", 1), ("32b", 1), ("70b", 2), ("30b-a3b", 1))
_SMALL = (("8b", 1), ("14b", 2), ("32b", 2), ("30b-a3b", 2))
"""Nothing on more than two GPUs: the tables of all-reduces over PCIe do not carry that far."""
_CARDS = (
    _Card("a100-80gb", "A100-80GB", 80, "a100_sxm", _H100, 25e9, (("32b", 2), ("70b", 4), ("30b-a3b", 2))),
    _Card("h100", "H100", 80, _H100, _H100, 50e9, (("14b", 1), ("32b", 2), ("30b-a3b", 2))),
    _Card("h200", "H200", 141, "h200_sxm", _H100, 50e9, _LARGE),
    _Card("b200", "B200", 180, _B200, _B200, 100e9, _LARGE),
    _Card("gb200", "GB200", 185, "gb200", _B200, 900e9, _LARGE),
    _Card("l40s", "L40S", 45, "l40s", _H100, 50e9, _SMALL, 2048, 2.0),
    _Card("l20", "L20", 48, "l40s", _H100, 25e9, _SMALL, 2048, 2.0, _L20),
    _Card("h20", "H20", 96, _H100, _H100, 50e9, (("8b", 1), ("14b", 1), ("32b", 2), ("70b", 4), ("30b-a3b", 2)),
          estimate=_H20),
)  # fmt: skip


def _tabled() -> Iterator[Target]:
    for card in _CARDS:
        for model_class, tensor_parallel in card.models:
            model, architecture, sleeper_gib = _BY_CLASS[model_class]
            speed = card.bytes_per_s * tensor_parallel
            yield Target(
                name=f"{card.prefix}-{model_class}-tp{tensor_parallel}",
                model=model,
                gpu_type=card.gpu_type,
                gpu_memory_gib=card.memory_gib,
                tensor_parallel=tensor_parallel,
                architecture=architecture,
                system=card.system,
                max_num_batched_tokens=card.budget,
                max_num_seqs=256,
                runtime_gib=card.runtime_gib,
                sleeper_gib=sleeper_gib,
                link_bytes_per_s=speed,
                link=f"{card.bytes_per_s / 1e9:g} GB/s a GPU between nodes",
                corrected_on=card.corrected_on,
                estimate=card.estimate,
            )


TARGETS = (*_NAMED, *_tabled())
