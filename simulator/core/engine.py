"""Continuous batching as vLLM's V1 scheduler does it, on virtual time.

Each iteration spends a token budget: running sequences first, in order of admission (one token when decoding, a chunk
when still prefilling), then waiting ones, first come first served, up to `max_num_seqs` and as long as all that they
have fits. Blocks are allocated as sequences grow; when none is left the most recently admitted sequence is preempted:
it lets go of its KV, goes back to the head of the queue and recomputes what was evicted meanwhile. Requests whose KV
comes from another server wait as `deferred` until it is there and then compute their last prompt token only.

Drive it with `submit`, `begin_step` and `end_step`; `abort` may come at any time. Whether the engine may run at all
(asleep, paused) is the caller's business. Limits: no speculative decoding, no priorities, no LoRA, no beam search.
"""

from __future__ import annotations

import dataclasses

from simulator.core.engine_base import EngineBase, Sequence
from simulator.core.limits import EngineLimits
from simulator.core.requests import (
    EngineRequest,
    FinishedRequest,
    FinishReason,
    FirstToken,
    StepOutcome,
)
from simulator.core.timing import BatchWork, IterationModel


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    started_s: float
    ended_s: float
    work: BatchWork
    scheduled: list[tuple[Sequence, int]]


class Engine(EngineBase[Sequence]):
    """One engine core: a queue, a batch and a KV cache."""

    def __init__(self, limits: EngineLimits, timing: IterationModel) -> None:
        super().__init__(limits, timing)
        self._running: list[Sequence] = []
        self._step: _Step | None = None
        self._looked_s = 0.0

    @property
    def num_passed_over(self) -> int:
        """Requests that were left in the queue when the last iteration began."""
        return self._passed_over(self._looked_s)

    @property
    def num_running(self) -> int:
        """Requests in the execution batch."""
        return len(self._running)

    @property
    def in_step(self) -> bool:
        """Whether an iteration is under way."""
        return self._step is not None

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request.

        Raises ValueError when its id is in use or it is longer than the model takes.
        """
        self._register(Sequence(request, now_s, request.prompt_tokens))

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
        return self._release_held(request_id)

    def reset_cache(self) -> None:
        """Forget the prefix cache and everything held for decode servers, as a sleep does."""
        self._reset_cache()

    def begin_step(self, now_s: float) -> float | None:
        """Put the next batch together.

        Returns the time at which the iteration ends, or None when nothing can run now. Raises ValueError when an
        iteration is under way.
        """
        if self._step is not None:
            raise ValueError("an iteration is under way")
        self._looked_s = now_s
        self._accept_arrived_kv(now_s)
        scheduled: list[tuple[Sequence, int]] = []
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
        """Finish the iteration under way and return its results; raises ValueError when there is none.

        It ends at the time that `begin_step` returned, or at `ended_s` when it was held up.
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
        done: list[Sequence] = []
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

    def _schedule_running(self, scheduled: list[tuple[Sequence, int]]) -> tuple[int, bool]:
        budget = self.limits.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
            if not self._grow(sequence, tokens):
                victim = self._running.pop()
                self._requeue(victim)
                preempted = True
                continue
            budget -= tokens
            scheduled.append((sequence, tokens))
            index += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: list[tuple[Sequence, int]], budget: int, now_s: float) -> None:
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


def _work_of(scheduled: list[tuple[Sequence, int]]) -> BatchWork:
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


def _first_token(sequence: Sequence, now_s: float) -> FirstToken:
    return FirstToken(
        request_id=sequence.request.request_id,
        prompt_tokens=sequence.request.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        external_tokens=sequence.external_tokens,
        time_to_first_token_s=max(0.0, now_s - sequence.arrival_s),
    )
