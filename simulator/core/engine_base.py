"""What every engine keeps, however it counts its iterations: requests, the queue, KV blocks and counters.

`Engine` (iteration by iteration) and `EventEngine` (runs of iterations at once) build on it, so that admission,
prefix reuse, preemption and the end of a request are the same code for both.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Generic, TypeVar

from simulator.core.blocks import BlockPool
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineCounters, EngineRequest, FinishedRequest, FinishReason
from simulator.core.timing import IterationModel


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Book-keeping of one request inside an engine."""

    request: EngineRequest
    arrival_s: float
    total_tokens: int
    """Prompt and generated tokens so far: what must be computed before the next token comes."""
    computed_tokens: int = 0
    generated_tokens: int = 0
    private_blocks: int = 0
    shared: list[int] = dataclasses.field(default_factory=list)
    published_blocks: int = 0
    own_hashes: tuple[int, ...] = ()
    """Hashes of full blocks behind the prompt's, given when it was preempted: no other sequence has them."""
    cached_tokens: int = 0
    external_tokens: int = 0
    external_ready_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    preemptions: int = 0
    gone: bool = False


S = TypeVar("S", bound=Sequence)


def _hashes(sequence: Sequence) -> tuple[int, ...]:
    """Hashes of the blocks that can be found again, first to last."""
    own = sequence.own_hashes
    return sequence.request.block_hashes + own if own else sequence.request.block_hashes


class EngineBase(Generic[S]):
    """Queue, deferred requests, held KV and the block pool of one engine."""

    # A fleet has thousands of engines: slots keep each within few cache lines.
    __slots__ = ("_by_id", "_deferred", "_held", "_own_blocks", "_waiting", "counters", "limits", "pool", "timing")

    def __init__(self, limits: EngineLimits, timing: IterationModel) -> None:
        self.limits = limits
        self.timing = timing
        self.pool = BlockPool(limits.num_gpu_blocks)
        self.counters = EngineCounters()
        self._waiting: deque[S] = deque()
        self._deferred: list[S] = []
        self._by_id: dict[str, S] = {}
        self._held: dict[str, tuple[int, list[int]]] = {}
        self._own_blocks = 0

    @property
    def num_waiting(self) -> int:
        """Requests queued for capacity."""
        return len(self._waiting)

    @property
    def waiting_blocks(self) -> int:
        """KV blocks that the queued requests will take when they are admitted."""
        return sum(self.limits.blocks_for(sequence.total_tokens) for sequence in self._waiting)

    @property
    def num_deferred(self) -> int:
        """Requests that wait for their KV to arrive."""
        return len(self._deferred)

    @property
    def unfinished(self) -> int:
        """Requests that are in the engine in any state."""
        return len(self._by_id)

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

    def _passed_over(self, looked_s: float) -> int:
        """Queued requests that came before the scheduler looked at its queue at `looked_s`, and were left there.

        They are what vLLM's gauge counts as waiting; what comes later is with its front end until the iteration ends.
        """
        later = 0
        for sequence in reversed(self._waiting):
            if sequence.arrival_s <= looked_s:
                break
            later += 1
        return len(self._waiting) - later

    def _register(self, sequence: S) -> None:
        """Take a request in; raises ValueError when its id is in use or it is longer than the model takes."""
        request = sequence.request
        if request.request_id in self._by_id or request.request_id in self._held:
            raise ValueError(f"request id {request.request_id!r} is in use")
        length = request.prompt_tokens + request.output_tokens
        if length > self.limits.max_model_len:
            raise ValueError(f"{length} tokens are more than max_model_len {self.limits.max_model_len}")
        self._by_id[request.request_id] = sequence
        if request.external_kv_s is None:
            self._waiting.append(sequence)
        else:
            sequence.external_ready_s = sequence.arrival_s + request.external_kv_s
            self._deferred.append(sequence)

    def _accept_arrived_kv(self, now_s: float) -> None:
        if not self._deferred:
            return
        arrived: list[S] = []
        absent: list[S] = []
        for sequence in self._deferred:
            ready_s = sequence.external_ready_s
            (arrived if ready_s is not None and ready_s <= now_s else absent).append(sequence)
        if arrived:
            self._deferred = absent
            for sequence in sorted(arrived, key=lambda s: s.arrival_s):
                self._queue_by_arrival(sequence)

    def _queue_by_arrival(self, sequence: S) -> None:
        """Queue a request whose KV is there before those that came after it, as vLLM, which never took it out."""
        waiting = self._waiting
        place = len(waiting)
        while place and not waiting[place - 1].preemptions and waiting[place - 1].arrival_s > sequence.arrival_s:
            place -= 1
        waiting.insert(place, sequence)

    def _admit(self, sequence: S, budget: int) -> int | None:
        """Claim what is cached, allocate the first chunk; the chunk's tokens, or None when the sequence does not fit.

        All of it must fit, not its first chunk alone, as vLLM's `scheduler_reserve_full_isl` has it by default.
        """
        limits = self.limits
        hashes = _hashes(sequence) if limits.enable_prefix_caching else ()
        # At least one token must be computed, so the last block of a fully cached prompt is computed again.
        hit_blocks = min(self.pool.match(hashes), (sequence.total_tokens - 1) // limits.block_size) if hashes else 0
        if not self.pool.can_admit(hashes, hit_blocks, limits.blocks_for(sequence.total_tokens) - hit_blocks):
            return None
        computed = hit_blocks * limits.block_size
        first_time = sequence.preemptions == 0
        external = 0
        if sequence.external_ready_s is not None and first_time:
            external = max(0, sequence.request.prompt_tokens - 1 - computed)
        start = computed + external
        tokens = min(sequence.total_tokens - start, budget)
        private = limits.blocks_for(start + tokens) - hit_blocks
        claimed = hashes[:hit_blocks]
        self.pool.claim(claimed)
        if not self.pool.allocate(private):
            raise ValueError("a first chunk took more KV blocks than its whole sequence")
        sequence.shared = list(claimed)
        sequence.private_blocks = private
        sequence.published_blocks = hit_blocks
        sequence.computed_tokens = start
        if first_time:
            self._count_admission(sequence, cached=computed, external=external)
        return tokens

    def _count_admission(self, sequence: S, *, cached: int, external: int) -> None:
        sequence.cached_tokens = cached
        sequence.external_tokens = external
        counters = self.counters
        if self.limits.enable_prefix_caching:
            counters.prefix_queries_tokens += sequence.request.prompt_tokens
            counters.prefix_hits_tokens += cached
        if sequence.external_ready_s is not None:
            counters.external_queries_tokens += sequence.request.prompt_tokens - cached
            counters.external_hits_tokens += external

    def _grow(self, sequence: S, tokens: int) -> bool:
        """Allocate the blocks that `tokens` more computed tokens need; False when there are too few."""
        held = sequence.private_blocks + len(sequence.shared)
        needed = self.limits.blocks_for(sequence.computed_tokens + tokens) - held
        if needed <= 0:
            return True
        if not self.pool.allocate(needed):
            return False
        sequence.private_blocks += needed
        return True

    def _publish(self, sequence: S) -> None:
        """Make blocks that are now complete and have a hash reusable."""
        if not self.limits.enable_prefix_caching:
            return
        hashes = _hashes(sequence)
        complete = min(sequence.computed_tokens // self.limits.block_size, len(hashes))
        for index in range(sequence.published_blocks, complete):
            if self.pool.publish(hashes[index]):
                sequence.private_blocks -= 1
                sequence.shared.append(hashes[index])
        sequence.published_blocks = max(sequence.published_blocks, complete)

    def _requeue(self, sequence: S) -> None:
        """Preempt: the sequence lets go of its KV and goes to the head of the queue.

        What of it is not evicted until then it finds again, generated tokens too.
        """
        if self.limits.enable_prefix_caching and sequence.request.block_hashes:
            complete = sequence.computed_tokens // self.limits.block_size
            known = len(sequence.request.block_hashes) + len(sequence.own_hashes)
            if complete > known:
                first = self._own_blocks
                self._own_blocks = first + complete - known
                # Hashes of prompts are not negative.
                sequence.own_hashes += tuple(range(-first - 1, -self._own_blocks - 1, -1))
            self._publish(sequence)
        self.pool.release(sequence.private_blocks, sequence.shared)
        sequence.private_blocks = 0
        sequence.shared = []
        sequence.published_blocks = 0
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(sequence)

    def _release_held(self, request_id: str) -> bool:
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self.pool.release(*held)
        return True

    def _reset_cache(self) -> None:
        for request_id in self.held_requests:
            self._release_held(request_id)
        self.pool.drop_idle()

    def _finish(self, sequence: S, reason: FinishReason, now_s: float) -> FinishedRequest:
        sequence.gone = True
        request = sequence.request
        del self._by_id[request.request_id]
        if request.hold_kv and reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._held[request.request_id] = (sequence.private_blocks, sequence.shared)
        else:
            self.pool.release(sequence.private_blocks, sequence.shared)
        return FinishedRequest(
            request,
            reason,
            sequence.generated_tokens,
            sequence.cached_tokens,
            sequence.external_tokens,
            sequence.arrival_s,
            sequence.scheduled_s,
            sequence.first_token_s,
            sequence.last_token_s,
            now_s,
            sequence.preemptions,
        )
