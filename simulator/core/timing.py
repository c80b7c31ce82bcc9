"""How long one engine iteration takes, from what is in its batch.

The model is a roofline on the linear layers plus the work that depends on context:

    t = host + [prefill, if any prefill tokens] + max(weights, linear + per_token · (prefill tokens + decode sequences))
             + experts · active + per_seq · decode sequences + kv · KV tokens read [+ mixed, if any prefill tokens]
             + attention · Σ chunk · (context + chunk / 2)

`weights` is the floor that streaming the weights costs, whatever the batch; below it, more tokens are free. Reading
the KV cache and prefill attention come on top, since they use the same memory and cores after the linear layers.
With experts, the weights that are streamed grow with the tokens: `active` = 1 - (1 - share)^tokens is the part of a
layer's experts that some token chose. With prefill in the batch one attention kernel serves both, and reads the KV of
the decoding sequences less efficiently: `mixed` is what a KV token then costs more. For a fixed batch the time is
linear in KV tokens, so that runs of decode iterations have a closed form. Limits: no overlap of host work with the GPU
beyond what `host` was fitted to.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class BatchWork:
    """What one iteration computes: tokens, sequences and the context they attend to."""

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    """KV entries the decoding sequences read."""
    attention_pairs: float
    """Query-key pairs of prefill chunks: Σ chunk · (context before it + chunk / 2)."""

    @property
    def tokens(self) -> int:
        """Tokens in the batch; every decoding sequence adds one."""
        return self.prefill_tokens + self.decode_seqs


@dataclasses.dataclass(frozen=True, slots=True)
class IterationModel:
    """Coefficients of the iteration time, in seconds and seconds per unit; all non-negative."""

    host_s: float
    weights_s: float
    linear_s: float
    token_s: float
    seq_s: float
    kv_token_s: float
    attention_pair_s: float
    experts_s: float = 0.0
    """Streaming all experts of all layers; 0 for a dense model."""
    expert_share: float = 0.0
    """Chance that a token chooses a given expert; at most 1."""
    prefill_s: float = 0.0
    """Extra of every iteration with prefill tokens: it does not run as one CUDA graph."""
    mixed_kv_token_s: float = 0.0
    """Extra of a KV token that a decoding sequence reads in an iteration with prefill tokens."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} must be a finite number >= 0, not {value!r}")
        if self.expert_share > 1:
            raise ValueError(f"expert_share must be at most 1, not {self.expert_share!r}")
        if self.host_s + self.weights_s <= 0:
            raise ValueError("host_s + weights_s must be positive: an iteration cannot take no time")

    def iteration_s(self, work: BatchWork) -> float:
        """Seconds that one iteration with this work takes."""
        tokens = work.prefill_tokens + work.decode_seqs
        linear_s = self.linear_s + self.token_s * tokens
        if linear_s < self.weights_s:
            linear_s = self.weights_s
        if self.experts_s:
            linear_s += self.experts_s * (1 - (1 - self.expert_share) ** tokens)
        if work.prefill_tokens:
            linear_s += self.prefill_s + self.mixed_kv_token_s * work.kv_tokens
        return (
            self.host_s
            + linear_s
            + self.seq_s * work.decode_seqs
            + self.kv_token_s * work.kv_tokens
            + self.attention_pair_s * work.attention_pairs
        )

    def faster(self, factor: float) -> IterationModel:
        """The same engine with every iteration `factor` times shorter. Raises ValueError unless it is positive."""
        if factor <= 0:
            raise ValueError(f"factor must be positive, not {factor!r}")
        seconds = {f.name: getattr(self, f.name) / factor for f in dataclasses.fields(self) if f.name.endswith("_s")}
        return IterationModel(**seconds, expert_share=self.expert_share)


@dataclasses.dataclass(frozen=True, slots=True)
class KvLink:
    """The link that carries KV blocks from a prefill to a decode server."""

    latency_s: float
    bytes_per_s: float
    kv_bytes_per_token: float

    def transfer_s(self, tokens: int) -> float:
        """Seconds until the KV of `tokens` has arrived."""
        return self.latency_s + tokens * self.kv_bytes_per_token / self.bytes_per_s

    def faster(self, factor: float) -> KvLink:
        """The same link with every transfer `factor` times shorter."""
        return KvLink(self.latency_s / factor, self.bytes_per_s * factor, self.kv_bytes_per_token)
