"""Continuous batching as vLLM's V1 scheduler does it, on virtual time.

Each iteration spends a token budget: running sequences first, in order of admission (one token when decoding, a chunk
when still prefilling), then waiting ones, first come first served, up to `max_num_seqs`. Blocks are allocated as
sequences grow; when none is left the most recently admitted sequence is preempted: it loses its KV, goes back to
the head of the queue and is recomputed. Requests whose KV comes from another server wait as `deferred` until it is
there and then compute their last prompt token only.

Drive it with `submit`, `begin_step` and `end_step`; `abort` may come at any time. Whether the engine may run at all
(asleep, paused) is the caller's business. Limits: no speculative decoding, no priorities, no LoRA, no beam search.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from simulator.core.blocks import BlockPool
from simulator.core.limits import EngineLimits
from simulator.core.requests import (
    EngineCounters,
    EngineRequest,
    FinishedRequest,
    FinishReason,
    FirstToken,
    StepOutcome,
)
from simulator.core.timing import BatchWork, IterationModel


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    """Book-keeping of one request inside the engine."""

    request: EngineRequest
    arrival_s: float
    total_tokens: int
    computed_tokens: int = 0
    generated_tokens: int = 0
    private_blocks: int = 0
    shared: list[int] = dataclasses.field(default_factory=list)
    published_blocks: int = 0
    cached_tokens: int = 0
    external_tokens: int = 0
    external_ready_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    preemptions: int = 0
    gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    started_s: float
    ended_s: float
    work: BatchWork
    scheduled: list[tuple[_Sequence, int]]


class Engine:
    """One engine core: a queue, a batch and a KV cache."""

    def __init__(self, limits: EngineLimits, timing: IterationModel) -> None:
        self.limits = limits
        self.timing = timing
        self.pool = BlockPool(limits.num_gpu_blocks)
        self.counters = EngineCounters()
        self._waiting: deque[_Sequence] = deque()
        self._deferred: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._by_id: dict[str, _Sequence] = {}
        self._held: dict[str, tuple[int, list[int]]] = {}
        self._step: _Step | None = None

    @property
    def num_running(self) -> int:
        """Requests in the execution batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests queued for capacity."""
        return len(self._waiting)

    @property
    def num_deferred(self) -> int:
        """Requests that wait for their KV to arrive."""
        return len(self._deferred)

    @property
    def unfinished(self) -> int:
        """Requests that are in the engine in any state."""
        return len(self._by_id)

    @property
    def in_step(self) -> bool:
        """Whether an iteration is under way."""
        return self._step is not None

    @property
    def held_requests(self) -> tuple[str, ...]:
        """Finished requests whose KV still waits to be fetched, sorted."""
        return tuple(sorted(self._held))

    def is_held(self, request_id: str) -> bool:
        """Whether a finished request's KV still waits to be fetched."""
        return request_id in self._held

    def next_deferred_s(self) -> float | None:
        """When the next deferred request's KV arrives; None when none is deferred."""
        return min((s.external_ready_s for s in self._deferred if s.external_ready_s is not None), default=None)

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request.

        Raises ValueError when its id is in use or it is longer than the model takes.
        """
        if request.request_id in self._by_id or request.request_id in self._held:
            raise ValueError(f"request id {request.request_id!r} is in use")
        length = request.prompt_tokens + request.output_tokens
        if length > self.limits.max_model_len:
            raise ValueError(f"{length} tokens are more than max_model_len {self.limits.max_model_len}")
        sequence = _Sequence(request, now_s, request.prompt_tokens)
        self._by_id[request.request_id] = sequence
        if request.external_kv_s is None:
            self._waiting.append(sequence)
        else:
            sequence.external_ready_s = now_s + request.external_kv_s
            self._deferred.append(sequence)

    def abort(self, request_id: str, now_s: float, reason: FinishReason = FinishReason.ABORT) -> FinishedRequest | None:
        """End a request now and free its blocks; None when the engine does not have it."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._deferred.remove(sequence)
        return self._finish(sequence, reason, now_s)

    def abort_all(self, now_s: float) -> tuple[FinishedRequest, ...]:
        """End every request, in order of arrival at the engine."""
        finished = [self.abort(request_id, now_s) for request_id in list(self._by_id)]
        return tuple(f for f in finished if f is not None)

    def release_held(self, request_id: str) -> bool:
        """Free the KV that a finished request kept for a decode server; False when nothing is held under that id."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self.pool.release(*held)
        return True

    def reset_cache(self) -> None:
        """Forget the prefix cache and everything held for decode servers, as a sleep does."""
        for request_id in self.held_requests:
            self.release_held(request_id)
        self.pool.drop_idle()

    def begin_step(self, now_s: float) -> float | None:
        """Put the next batch together.

        Returns the time at which the iteration ends, or None when nothing can run now. Raises ValueError when an
        iteration is under way.
        """
        if self._step is not None:
            raise ValueError("an iteration is under way")
        self._accept_arrived_kv(now_s)
        scheduled: list[tuple[_Sequence, int]] = []
        budget, preempted = self._schedule_running(scheduled)
        if not preempted:
            self._schedule_waiting(scheduled, budget, now_s)
        if not scheduled:
            return None
        work = _work_of(scheduled)
        ended_s = now_s + self.timing.iteration_s(work)
        self._step = _Step(now_s, ended_s, work, scheduled)
        return ended_s

    def end_step(self, ended_s: float | None = None) -> StepOutcome:
        """Finish the iteration under way and say what it brought; raises ValueError when there is none.

        It ends when `begin_step` said, or at `ended_s` when something held it up.
        """
        step = self._step
        if step is None:
            raise ValueError("no iteration is under way")
        self._step = None
        self.counters.steps += 1
        if ended_s is None:
            ended_s = step.ended_s
        emitted: list[str] = []
        first_tokens: list[FirstToken] = []
        gaps: dict[float, int] = {}
        done: list[_Sequence] = []
        for sequence, tokens in step.scheduled:
            if sequence.gone:
                continue
            sequence.computed_tokens += tokens
            if sequence.published_blocks < len(sequence.request.block_hashes):
                self._publish(sequence)
            if sequence.computed_tokens < sequence.total_tokens:
                continue
            sequence.generated_tokens += 1
            sequence.total_tokens += 1
            emitted.append(sequence.request.request_id)
            if sequence.last_token_s is None:
                first_tokens.append(_first_token(sequence, ended_s))
                sequence.first_token_s = ended_s
            else:
                gap_s = ended_s - sequence.last_token_s
                gaps[gap_s] = gaps.get(gap_s, 0) + 1
            sequence.last_token_s = ended_s
            if sequence.generated_tokens >= sequence.request.output_tokens:
                done.append(sequence)
        finished = tuple(self._finish(s, s.request.finish_reason, ended_s) for s in done)
        if done:
            self._running = [s for s in self._running if not s.gone]
        return StepOutcome(
            started_s=step.started_s,
            ended_s=ended_s,
            batch_tokens=step.work.tokens,
            emitted=tuple(emitted),
            first_tokens=tuple(first_tokens),
            token_gaps=tuple(gaps.items()),
            finished=finished,
        )

    def _accept_arrived_kv(self, now_s: float) -> None:
        if not self._deferred:
            return
        arrived = [s for s in self._deferred if s.external_ready_s is not None and s.external_ready_s <= now_s]
        if arrived:
            self._deferred = [s for s in self._deferred if s not in arrived]
            # They arrived before whatever still waits for capacity, so they go in front, oldest first.
            self._waiting.extendleft(sorted(arrived, key=lambda s: s.arrival_s, reverse=True))

    def _schedule_running(self, scheduled: list[tuple[_Sequence, int]]) -> tuple[int, bool]:
        budget = self.limits.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
            if not self._grow(sequence, tokens):
                victim = self._running.pop()
                self._preempt(victim)
                preempted = True
                continue
            budget -= tokens
            scheduled.append((sequence, tokens))
            index += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: list[tuple[_Sequence, int]], budget: int, now_s: float) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            tokens = self._admit(sequence, budget)
            if tokens is None:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            if sequence.scheduled_s is None:
                # A late wake-up of the driver may start a step a little before a request's arrival.
                sequence.scheduled_s = max(now_s, sequence.arrival_s)
            budget -= tokens
            scheduled.append((sequence, tokens))

    def _admit(self, sequence: _Sequence, budget: int) -> int | None:
        """Claim what is cached, allocate the first chunk; the chunk's tokens, or None when it does not fit."""
        limits = self.limits
        hashes = sequence.request.block_hashes if limits.enable_prefix_caching else ()
        # At least one token must be computed, so the last block of a fully cached prompt is computed again.
        hit_blocks = min(self.pool.match(hashes), (sequence.total_tokens - 1) // limits.block_size)
        computed = hit_blocks * limits.block_size
        first_time = sequence.preemptions == 0
        external = 0
        if sequence.external_ready_s is not None and first_time:
            external = max(0, sequence.request.prompt_tokens - 1 - computed)
        start = computed + external
        tokens = min(sequence.total_tokens - start, budget)
        private = limits.blocks_for(start + tokens) - hit_blocks
        if not self.pool.can_admit(hashes, hit_blocks, private):
            return None
        claimed = hashes[:hit_blocks]
        self.pool.claim(claimed)
        self.pool.allocate(private)
        sequence.shared = list(claimed)
        sequence.private_blocks = private
        sequence.published_blocks = hit_blocks
        sequence.computed_tokens = start
        if first_time:
            self._count_admission(sequence, cached=computed, external=external)
        return tokens

    def _count_admission(self, sequence: _Sequence, *, cached: int, external: int) -> None:
        sequence.cached_tokens = cached
        sequence.external_tokens = external
        counters = self.counters
        if self.limits.enable_prefix_caching:
            counters.prefix_queries_tokens += sequence.request.prompt_tokens
            counters.prefix_hits_tokens += cached
        if sequence.external_ready_s is not None:
            counters.external_queries_tokens += sequence.request.prompt_tokens - cached
            counters.external_hits_tokens += external

    def _grow(self, sequence: _Sequence, tokens: int) -> bool:
        held = sequence.private_blocks + len(sequence.shared)
        needed = self.limits.blocks_for(sequence.computed_tokens + tokens) - held
        if needed <= 0:
            return True
        if not self.pool.allocate(needed):
            return False
        sequence.private_blocks += needed
        return True

    def _publish(self, sequence: _Sequence) -> None:
        """Make prompt blocks that are now complete reusable by others."""
        if not self.limits.enable_prefix_caching:
            return
        hashes = sequence.request.block_hashes
        complete = min(sequence.computed_tokens // self.limits.block_size, len(hashes))
        for index in range(sequence.published_blocks, complete):
            if self.pool.publish(hashes[index]):
                sequence.private_blocks -= 1
                sequence.shared.append(hashes[index])
        sequence.published_blocks = max(sequence.published_blocks, complete)

    def _preempt(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.private_blocks, sequence.shared)
        sequence.private_blocks = 0
        sequence.shared = []
        sequence.published_blocks = 0
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(sequence)

    def _finish(self, sequence: _Sequence, reason: FinishReason, now_s: float) -> FinishedRequest:
        sequence.gone = True
        request = sequence.request
        del self._by_id[request.request_id]
        if request.hold_kv and reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._held[request.request_id] = (sequence.private_blocks, sequence.shared)
        else:
            self.pool.release(sequence.private_blocks, sequence.shared)
        return FinishedRequest(
            request=request,
            reason=reason,
            generated_tokens=sequence.generated_tokens,
            cached_tokens=sequence.cached_tokens,
            external_tokens=sequence.external_tokens,
            arrival_s=sequence.arrival_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            last_token_s=sequence.last_token_s,
            finished_s=now_s,
            preemptions=sequence.preemptions,
        )


def _work_of(scheduled: list[tuple[_Sequence, int]]) -> BatchWork:
    prefill_tokens = decode_seqs = kv_tokens = 0
    pairs = 0.0
    for sequence, tokens in scheduled:
        if tokens == 1:
            decode_seqs += 1
            kv_tokens += sequence.computed_tokens
        else:
            prefill_tokens += tokens
            pairs += tokens * (sequence.computed_tokens + tokens / 2)
    return BatchWork(prefill_tokens, decode_seqs, kv_tokens, pairs)


def _first_token(sequence: _Sequence, now_s: float) -> FirstToken:
    return FirstToken(
        request_id=sequence.request.request_id,
        prompt_tokens=sequence.request.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        external_tokens=sequence.external_tokens,
        time_to_first_token_s=max(0.0, now_s - sequence.arrival_s),
    )
