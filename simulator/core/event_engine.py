"""The engine of `simulator.core.engine`, jumping over runs of iterations in which nothing changes.

While every running sequence decodes and none can be admitted, each iteration does the same: one token for each, one
block for those whose last block is full. Such a run lasts until the first sequence ends, blocks run out, a request
arrives that can be admitted, or KV arrives from elsewhere; its time and its blocks are closed forms. All other
iterations (those with prefill, those that preempt) are done one by one. Property tests hold both engines equal.

Drive it by events: `next_s` is the time of the next event inside; call `advance` up to the time of an event outside
(an arrival, an observation), then `submit`, `abort`, `release_held`, `stop`, `resume` or `observe` at that
time. What arrives at the very end of an iteration takes part in the next one. Per decoding sequence nothing is touched
in a run (`simulator.core.decode_batch`).
"""

from __future__ import annotations

import math

from simulator.core.curves import DecodeCurve, DecodeCurves
from simulator.core.decode_batch import DecodeBatch, Runner
from simulator.core.engine_base import EngineBase
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineGauges, EngineRequest, FinishedRequest, FinishReason
from simulator.core.timing import IterationModel

_NEVER_S = math.inf


class EventEngine(EngineBase[Runner]):
    """One engine core on virtual time that costs work per event, not per token."""

    __slots__ = (
        "_batch",
        "_blocks_until",
        "_busy_s",
        "_chunks",
        "_computed",
        "_curves",
        "_generated",
        "_last_end_s",
        "_order",
        "_partial",
        "_run_start_s",
        "_run_steps",
        "_running",
        "_stopped",
        "first_tokens",
        "gaps",
        "next_s",
    )

    def __init__(self, limits: EngineLimits, timing: IterationModel, curves: DecodeCurves | None = None) -> None:
        """`curves` may be shared between engines of the same iteration model; ValueError when it is another's."""
        super().__init__(limits, timing)
        if curves is not None and curves.timing != timing:
            raise ValueError("the curves belong to another iteration model")
        self._curves = curves if curves is not None else DecodeCurves(timing, limits.kv_capacity_tokens)
        self.next_s = _NEVER_S
        """The time of the next event inside; infinity when only a call from outside can change anything."""
        self.gaps: list[tuple[float, int]] | None = None
        """Set to a list to collect (mean seconds between tokens, how many tokens) of every run and iteration."""
        self.first_tokens: list[Runner] | None = None
        """Set to a list to collect every sequence when its first token comes."""
        self._running: dict[Runner, None] = {}
        self._partial: Runner | None = None
        self._order = 0
        self._batch = DecodeBatch(limits.block_size)
        self._chunks: list[tuple[Runner, int]] = []
        self._run_steps = 0
        self._run_start_s = 0.0
        self._blocks_until = 0
        self._last_end_s = 0.0
        self._stopped = False
        self._generated = 0
        self._computed = 0
        self._busy_s = 0.0

    @property
    def num_running(self) -> int:
        """Requests in the execution batch."""
        return len(self._running)

    @property
    def num_passed_over(self) -> int:
        """Requests that were left in the queue at the start of the iteration under way; call `observe` before."""
        return self._passed_over(self._run_start_s)

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request; raises ValueError when its id is in use or it is longer than the model takes."""
        sequence = Runner(request, now_s, request.prompt_tokens)
        self._register(sequence)
        ready_s = sequence.external_ready_s
        if not self._run_steps:
            self._reconsider(now_s)
        elif ready_s is not None:
            self._reconsider(ready_s)
        elif len(self._waiting) == 1 and len(self._running) < self.limits.max_num_seqs:
            # Behind a head that does not fit, no request is admitted either: the run goes on.
            self._reconsider(now_s)

    def advance(self, until_s: float) -> list[FinishedRequest]:
        """Let everything happen that is due up to `until_s`; what finished, in order."""
        finished: list[FinishedRequest] = []
        while self.next_s <= until_s:
            finished.extend(self.fire())
        return finished

    def fire(self) -> list[FinishedRequest]:
        """Process the next event, at `next_s`; the finished requests. Raises ValueError when there is none."""
        now_s = self.next_s
        if now_s == _NEVER_S:
            raise ValueError("nothing is to happen in this engine")
        finished = self._end_run(now_s) if self._run_steps else []
        self._begin(now_s)
        return finished

    def abort(self, request_id: str, now_s: float, reason: FinishReason = FinishReason.ABORT) -> FinishedRequest | None:
        """End a request now and free its blocks; None when the engine does not have it."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        self._settle(now_s)
        if sequence.order >= 0:
            self._shorten(1)
            self._leave(sequence, self._blocks_until if sequence.decoding else 0)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._deferred.remove(sequence)
        finished = self._finish(sequence, reason, now_s)
        if self._waiting:
            self._reconsider(now_s)
        return finished

    def abort_all(self, now_s: float) -> tuple[FinishedRequest, ...]:
        """End every request, in order of arrival at the engine."""
        finished = [self.abort(request_id, now_s) for request_id in list(self._by_id)]
        return tuple(f for f in finished if f is not None)

    def release_held(self, request_id: str, now_s: float) -> bool:
        """Free the KV that a finished request kept for a decode server; False when nothing is held under that id."""
        self._settle(now_s)
        released = self._release_held(request_id)
        if released and self._waiting:
            self._reconsider(now_s)
        return released

    def reset_cache(self, now_s: float) -> None:
        """Forget the prefix cache and everything held for decode servers, as a sleep does."""
        self._settle(now_s)
        self._reset_cache()
        if self._waiting:
            self._reconsider(now_s)

    def stop(self, now_s: float) -> None:
        """Begin no further iteration; the one under way ends as planned."""
        self._settle(now_s)
        self._stopped = True
        if self._run_steps:
            self._shorten(1)
        else:
            self.next_s = _NEVER_S

    def resume(self, now_s: float) -> None:
        """Begin iterations again."""
        self._stopped = False
        if not self._run_steps and self._by_id:
            self.next_s = now_s

    def observe(self, now_s: float) -> EngineGauges:
        """What the engine holds at `now_s`, up to which it must have been advanced."""
        self._settle(now_s)
        busy_s = self._busy_s + (max(0.0, now_s - self._run_start_s) if self._run_steps else 0.0)
        return EngineGauges(
            running=len(self._running),
            waiting=len(self._waiting),
            deferred=len(self._deferred),
            used_blocks=self.pool.used_blocks,
            kv_usage_ratio=self.pool.usage_ratio,
            steps=self.counters.steps,
            generated_tokens=self._generated,
            computed_tokens=self._computed,
            preemptions=self.counters.preemptions,
            busy_s=busy_s,
        )

    def iteration_end_s(self, now_s: float) -> float:
        """When the iteration under way at `now_s`, up to which it was advanced, ends; `next_s` when none is."""
        self._settle(now_s)
        if self._run_steps <= 1:
            return self.next_s
        curve = self._curves.of(self._batch.count)
        return self._run_start_s + curve.total_s(self._batch.kv_tokens(self.counters.steps), 1)

    # --- the run under way ----------------------------------------------------------------------------------------

    def _reconsider(self, at_s: float) -> None:
        """Schedule anew at the first end of an iteration at or after `at_s`, at `at_s` itself when none runs."""
        if not self._run_steps:
            if not self._stopped and at_s < self.next_s:
                self.next_s = at_s
        elif self._run_steps > 1 and at_s < self.next_s:
            curve = self._curves.of(self._batch.count)
            self._shorten(
                curve.steps_until(self._batch.kv_tokens(self.counters.steps), at_s - self._run_start_s, self._run_steps)
            )

    def _shorten(self, steps: int) -> None:
        """Let the run end after `steps` of its iterations."""
        if steps < self._run_steps:
            self._run_steps = steps
            self.next_s = self._run_start_s + self._curves.of(self._batch.count).total_s(
                self._batch.kv_tokens(self.counters.steps), steps
            )

    def _settle(self, now_s: float) -> None:
        """Book the iterations of the run that ended before `now_s`, so that its first is the one under way."""
        if self._run_steps <= 1:
            return
        curve, kv_tokens = self._curves.of(self._batch.count), self._batch.kv_tokens(self.counters.steps)
        done = curve.steps_until(kv_tokens, now_s - self._run_start_s, self._run_steps) - 1
        if done:
            start_s = self._run_start_s + curve.total_s(kv_tokens, done)
            self._book(done, start_s)
            self._run_start_s = start_s
            self._run_steps -= done
            self._take_blocks(self.counters.steps + 1)

    def _book(self, steps: int, end_s: float) -> None:
        """Count iterations of the run that are over; blocks up to them are taken."""
        after = self.counters.steps + steps
        self._take_blocks(after)
        self.counters.steps = after
        tokens = self._batch.count * steps
        self._generated += tokens
        self._computed += tokens
        self._busy_s += end_s - self._run_start_s
        self._last_end_s = end_s
        if self.gaps is not None and tokens:
            self.gaps.append(((end_s - self._run_start_s) / steps, tokens))

    def _take_blocks(self, until_step: int) -> None:
        """Allocate what decoding takes in the iterations before `until_step`."""
        first = self._blocks_until
        if until_step > first:
            self._blocks_until = until_step
            blocks = self._batch.blocks_of(first, until_step - first)
            if blocks and not self.pool.allocate(blocks):
                raise ValueError("a run of iterations took more KV blocks than there are")

    def _end_run(self, now_s: float) -> list[FinishedRequest]:
        self._book(self._run_steps, now_s)
        self._run_steps = 0
        if self._chunks:
            for sequence, tokens in self._chunks:
                if not sequence.gone:
                    self._end_chunk(sequence, tokens, now_s)
            self._chunks = []
        step = self.counters.steps
        finished: list[FinishedRequest] = []
        while (ended := self._batch.pop_ended(step)) is not None:
            self._leave(ended, step)
            finished.append(self._finish(ended, ended.request.finish_reason, now_s))
        return finished

    def _end_chunk(self, sequence: Runner, tokens: int, now_s: float) -> None:
        """A chunk of a prompt is computed; after the last one the first token is there and the sequence decodes."""
        sequence.computed_tokens += tokens
        self._computed += tokens
        if sequence.published_blocks < len(sequence.request.block_hashes):
            self._publish(sequence)
        if sequence.computed_tokens < sequence.total_tokens:
            self._partial = sequence
            return
        if sequence is self._partial:
            self._partial = None
        self._generated += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            if self.first_tokens is not None:
                self.first_tokens.append(sequence)
        elif self.gaps is not None and sequence.last_token_s is not None:
            self.gaps.append((now_s - sequence.last_token_s, 1))
        step = self.counters.steps
        # One of the tokens still to come is the one that this iteration brought.
        sequence.end_step = step + sequence.request.output_tokens - sequence.generated_tokens - 1
        self._batch.join(sequence, step)

    def _leave(self, sequence: Runner, block_step: int) -> None:
        """Take a sequence out of the batch with its books up to date; its blocks are those before `block_step`."""
        del self._running[sequence]
        sequence.order = -1
        if sequence is self._partial:
            self._partial = None
        if not sequence.decoding:
            return
        self._batch.leave(sequence)
        step = self.counters.steps
        sequence.computed_tokens = sequence.offset + step
        sequence.generated_tokens = sequence.request.output_tokens - (sequence.end_step - step)
        sequence.total_tokens = sequence.request.prompt_tokens + sequence.generated_tokens
        sequence.last_token_s = self._last_end_s
        sequence.private_blocks = self.limits.blocks_for(sequence.offset + block_step) - len(sequence.shared)

    # --- the next run ---------------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Put the next batch together and find out how long it stays as it is."""
        self.next_s = _NEVER_S
        if self._stopped:
            return
        if self._deferred:
            self._accept_arrived_kv(now_s)
        step = self.counters.steps
        preempted = self._grow_running(step)
        if not preempted and self._waiting:
            self._admit_waiting(now_s)
        self._blocks_until = step + 1
        self._run_start_s = now_s
        if self._chunks:
            self._run_steps = 1
            self.next_s = now_s + self.timing.iteration_s(self._batch.work_beside(self._chunks, step))
        elif self._batch.count:
            self._begin_decoding(now_s, preempted)
        else:
            deferred_s = self.next_deferred_s()
            self.next_s = _NEVER_S if deferred_s is None else deferred_s

    def _grow_running(self, step: int) -> bool:
        """Allocate what the running sequences need for iteration `step`; True when some were preempted for it."""
        partial = self._partial
        needed = self._batch.blocks_at(step)
        if partial is None:
            if not needed or self.pool.allocate(needed):
                return False
        else:
            budget = self.limits.max_num_batched_tokens - self._batch.count
            tokens = min(partial.total_tokens - partial.computed_tokens, budget)
            chunk_blocks = self.limits.blocks_for(partial.computed_tokens + tokens) - (
                partial.private_blocks + len(partial.shared)
            )
            if self.pool.allocate(needed + chunk_blocks):
                partial.private_blocks += chunk_blocks
                self._chunks.append((partial, tokens))
                return False
        return self._grow_one_by_one(step)

    def _grow_one_by_one(self, step: int) -> bool:
        order = list(self._running)
        size = self.limits.block_size
        index = 0
        while index < len(order):
            sequence = order[index]
            if sequence.decoding:
                fits = (sequence.offset + step) % size != 0 or self.pool.allocate(1)
                tokens = 0
            else:
                # Every sequence before it decodes and takes one token of the budget.
                budget = self.limits.max_num_batched_tokens - index
                tokens = min(sequence.total_tokens - sequence.computed_tokens, budget)
                fits = self._grow(sequence, tokens)
            if not fits:
                victim = order.pop()
                self._leave(victim, step)
                self._requeue(victim)
                continue
            if tokens:
                self._chunks.append((sequence, tokens))
            index += 1
        return True

    def _admit_waiting(self, now_s: float) -> None:
        limits, waiting, running = self.limits, self._waiting, self._running
        budget = limits.max_num_batched_tokens - self._batch.count - sum(tokens for _, tokens in self._chunks)
        while waiting and budget > 0 and len(running) < limits.max_num_seqs:
            sequence = waiting[0]
            tokens = self._admit(sequence, budget)
            if tokens is None:
                break
            waiting.popleft()
            self._order += 1
            sequence.order = self._order
            running[sequence] = None
            if sequence.scheduled_s is None:
                sequence.scheduled_s = max(now_s, sequence.arrival_s)
            budget -= tokens
            self._chunks.append((sequence, tokens))

    def _begin_decoding(self, now_s: float, preempted: bool) -> None:
        """Plan a run of iterations that only decode; the blocks of the first one are taken."""
        step = self.counters.steps
        steps = 1 if preempted else self._batch.steps_to_end(step)
        if steps > 1:
            # Evicting cached blocks never helps the head of the queue: what it lacks then, it must compute.
            steps = 1 + self._batch.steps_within(step + 1, self.pool.available_blocks, steps - 1)
        curve: DecodeCurve = self._curves.of(self._batch.count)
        kv_tokens = self._batch.kv_tokens(self.counters.steps)
        self._run_steps = steps
        self.next_s = now_s + curve.total_s(kv_tokens, steps)
        if self._deferred and (deferred_s := self.next_deferred_s()) is not None:
            self._reconsider(deferred_s)
