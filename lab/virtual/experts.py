"""Prefill of a mixture of experts whose attention and FFN layers run on pools of their own.

A batch passes both stages in every layer, cut into micro-batches so that one pool computes one while the other computes
the next. An iteration takes what the slower stage takes for the whole batch, plus the faster stage's time for one
micro-batch, which nothing covers, plus what the exchange of activations between the pools costs. Balance is all: a
pool twice as large as it need be changes nothing. Limits: perfect pipelining inside a batch, experts evenly chosen.
"""

from __future__ import annotations

import dataclasses

from simulator.core.timing import BatchWork, IterationModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel(IterationModel):
    """The iteration time of one unit of attention and FFN replicas, from the model of one replica that does both."""

    ffn_share: float
    """Part of the linear layers' time that is FFN; attention's own work is all the attention pool's."""
    attention_replicas: int
    ffn_replicas: int
    micro_batches: int = 4
    exchange_s: float = 0.0
    """Activations from pool to pool and back over all layers, as far as nothing covers it."""

    def __post_init__(self) -> None:
        # The decorator makes a new class for its slots, which super() without arguments would not know.
        IterationModel.__post_init__(self)
        if not 0 < self.ffn_share < 1:
            raise ValueError(f"ffn_share must be between 0 and 1, not {self.ffn_share!r}")
        if min(self.attention_replicas, self.ffn_replicas, self.micro_batches) < 1:
            raise ValueError("attention_replicas, ffn_replicas and micro_batches must be at least 1")

    def stages_s(self, work: BatchWork) -> tuple[float, float]:
        """Seconds of the attention and of the FFN stage for a whole batch, each on all of its pool's replicas."""
        context_s = self.kv_token_s * work.kv_tokens + self.attention_pair_s * work.attention_pairs
        linear_s = IterationModel.iteration_s(self, work) - self.host_s - context_s
        attention_s = ((1 - self.ffn_share) * linear_s + context_s) / self.attention_replicas
        return attention_s, self.ffn_share * linear_s / self.ffn_replicas

    def iteration_s(self, work: BatchWork) -> float:
        """Seconds that one iteration of the unit takes."""
        attention_s, ffn_s = self.stages_s(work)
        slower_s, faster_s = max(attention_s, ffn_s), min(attention_s, ffn_s)
        return self.host_s + self.exchange_s + slower_s + faster_s / self.micro_batches


def staged(
    timing: IterationModel,
    *,
    ffn_share: float,
    attention_replicas: int,
    ffn_replicas: int,
    micro_batches: int = 4,
    exchange_s: float = 0.0,
) -> StagedModel:
    """A unit of `attention_replicas` and `ffn_replicas`, each as fast as one replica with `timing` at its part."""
    return StagedModel(
        **{field.name: getattr(timing, field.name) for field in dataclasses.fields(IterationModel)},
        ffn_share=ffn_share,
        attention_replicas=attention_replicas,
        ffn_replicas=ffn_replicas,
        micro_batches=micro_batches,
        exchange_s=exchange_s,
    )
