"""Shapes of the models that profiles exist for, from their published configurations."""

from __future__ import annotations

import dataclasses

BYTES_PER_VALUE = 2
"""bfloat16, weights and KV cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer with grouped-query attention, dense or with experts."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: float
    """All weights, counted in values of two bytes where the weights are of mixed precision."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    moe_table: str = ""
    """aiconfigurator's name of the model in its table of expert layers."""
    full_attention_share: float = 1.0
    """Layers that attend to the whole context; the others see a short window only."""

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    @property
    def weights_gib(self) -> float:
        """All weights."""
        return self.parameters * BYTES_PER_VALUE / 2**30

    def layer_gemms(self, tensor_parallel: int) -> tuple[tuple[int, int], ...]:
        """(n, k) of one layer's matrix products on one of `tensor_parallel` GPUs; experts are not among them."""
        attention = self.heads * self.head_dim
        projections = (
            ((attention + 2 * self.kv_heads * self.head_dim) // tensor_parallel, self.hidden),
            (self.hidden, attention // tensor_parallel),
        )
        if self.experts:
            return projections
        return (
            *projections,
            (2 * self.intermediate // tensor_parallel, self.hidden),
            (self.hidden, self.intermediate // tensor_parallel),
        )


LLAMA_3_8B = Architecture("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, 8.03e9)
LLAMA_3_70B = Architecture("Llama-3.1-70B", 80, 8192, 28672, 64, 8, 128, 128256, 70.55e9)
QWEN_2_5_7B = Architecture("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064, 7.62e9)
QWEN_2_5_14B = Architecture("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064, 14.77e9)
QWEN_3_32B = Architecture("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936, 32.76e9)
GPT_OSS_120B = Architecture(
    "gpt-oss-120b", 36, 2880, 2880, 64, 8, 64, 201088, 31.5e9, 128, 4, "gpt-oss-120b", full_attention_share=0.5
)
QWEN_3_30B_A3B = Architecture("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 128, 151936, 30.53e9, 128, 8, "qwen3-30b-a3b")
