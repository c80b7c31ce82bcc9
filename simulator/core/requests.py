"""What goes into the engine and what comes out of it, as plain data."""

from __future__ import annotations

import dataclasses
import enum


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are vLLM's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to serve. Its output length is known beforehand, since its text is deterministic."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason = FinishReason.LENGTH
    block_hashes: tuple[int, ...] = ()
    """Hashes of the prompt's full KV blocks, first to last; empty switches prefix reuse off for this request."""
    external_kv_s: float | None = None
    """Seconds until the prompt's KV arrives from a prefill server; None when it is computed here."""
    hold_kv: bool = False
    """Keep the KV blocks after the end until `Engine.release_held`, for a decode server to fetch."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"{self.request_id}: prompt_tokens must be at least 1, not {self.prompt_tokens}")
        if self.output_tokens < 1:
            raise ValueError(f"{self.request_id}: output_tokens must be at least 1, not {self.output_tokens}")


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The life of one request, in engine seconds; times that never came are None."""

    request: EngineRequest
    reason: FinishReason
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens found in this engine's prefix cache."""
    external_tokens: int
    """Prompt tokens whose KV came from another server."""
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    preemptions: int


@dataclasses.dataclass(frozen=True, slots=True)
class FirstToken:
    """A request's first token: this is when its prompt is counted as processed."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    external_tokens: int
    time_to_first_token_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one iteration brought. `emitted` names the requests that got one token each, finished ones included."""

    started_s: float
    ended_s: float
    batch_tokens: int
    emitted: tuple[str, ...]
    first_tokens: tuple[FirstToken, ...]
    token_gaps: tuple[tuple[float, int], ...]
    """Inter-token gaps in seconds and how many sequences saw each."""
    finished: tuple[FinishedRequest, ...]


@dataclasses.dataclass(slots=True)
class EngineCounters:
    """Running totals of one engine since its start."""

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    external_queries_tokens: int = 0
    external_hits_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineGauges:
    """What an engine holds at one moment, and its running totals."""

    running: int
    waiting: int
    deferred: int
    used_blocks: int
    kv_usage_ratio: float
    steps: int
    generated_tokens: int
    computed_tokens: int
    """Tokens that went through the model: prompt tokens computed here, decoded and recomputed ones."""
    preemptions: int
    busy_s: float
    """Time with an iteration under way, the elapsed part of the present one included."""
