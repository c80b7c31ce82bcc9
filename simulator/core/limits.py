"""What bounds an engine's batch and its KV cache."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds a batch; the names are vLLM's flags."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for field in ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_gpu_blocks", "max_model_len"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.max_model_len > self.kv_capacity_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} does not fit into {self.kv_capacity_tokens} tokens of KV cache"
            )

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.block_size * self.num_gpu_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one sequence occupy."""
        return -(-tokens // self.block_size)
