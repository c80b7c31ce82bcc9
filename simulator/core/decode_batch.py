"""The decoding sequences of one engine, described so that no iteration touches any of them.

A sequence that decodes has `offset + iterations so far` computed tokens, so its last iteration is known when it joins,
the KV that all of them read is one sum, and it takes a block in every `block_size`-th iteration, which only depends on
the offset's residue.
"""

from __future__ import annotations

import dataclasses
import heapq

from simulator.core.engine_base import Sequence
from simulator.core.timing import BatchWork


@dataclasses.dataclass(slots=True, eq=False)
class Runner(Sequence):
    """A sequence that, while it decodes, has `offset + iterations so far` computed tokens."""

    order: int = -1
    """Its place in order of admission; -1 while it is not in the batch."""
    decoding: bool = False
    offset: int = 0
    end_step: int = 0
    """The count of iterations after which it has all its tokens."""


class DecodeBatch:
    """Sums over the decoding sequences; `step` counts the engine's iterations."""

    __slots__ = ("_ends", "_offsets", "_residues", "count")

    def __init__(self, block_size: int) -> None:
        self.count = 0
        self._offsets = 0
        self._residues = [0] * block_size
        self._ends: list[tuple[int, int, Runner]] = []

    def join(self, sequence: Runner, step: int) -> None:
        """Take in a sequence whose next token is the first it decodes; `end_step` is set."""
        sequence.offset = offset = sequence.computed_tokens - step
        sequence.decoding = True
        self.count += 1
        self._offsets += offset
        self._residues[-offset % len(self._residues)] += 1
        heapq.heappush(self._ends, (sequence.end_step, sequence.order, sequence))

    def leave(self, sequence: Runner) -> None:
        """Let a sequence go; what it has computed is the caller's to write down."""
        sequence.decoding = False
        offset = sequence.offset
        self.count -= 1
        self._offsets -= offset
        self._residues[-offset % len(self._residues)] -= 1

    def kv_tokens(self, step: int) -> int:
        """KV entries that iteration `step` reads."""
        return self._offsets + self.count * step

    def work_beside(self, chunks: list[tuple[Runner, int]], step: int) -> BatchWork:
        """What iteration `step` computes with these chunks of prompts beside the batch."""
        prefill_tokens, decode_seqs, kv_tokens, pairs = 0, self.count, self.kv_tokens(step), 0.0
        for sequence, tokens in chunks:
            if tokens == 1:
                decode_seqs += 1
                kv_tokens += sequence.computed_tokens
            else:
                prefill_tokens += tokens
                pairs += tokens * (sequence.computed_tokens + tokens / 2)
        return BatchWork(prefill_tokens, decode_seqs, kv_tokens, pairs)

    def steps_to_end(self, step: int) -> int:
        """Iterations from `step` on until the first sequence has all its tokens; there must be a sequence."""
        ends = self._ends
        while ends[0][2].order != ends[0][1]:
            heapq.heappop(ends)
        return ends[0][0] - step

    def pop_ended(self, step: int) -> Runner | None:
        """The next sequence that has all its tokens before iteration `step`, in order of admission; None: no other."""
        ends = self._ends
        while ends and ends[0][0] <= step:
            _, order, sequence = heapq.heappop(ends)
            if sequence.order == order:
                return sequence
        return None

    def blocks_at(self, step: int) -> int:
        """Blocks that iteration `step` takes."""
        return self._residues[step % len(self._residues)]

    def blocks_of(self, first_step: int, steps: int) -> int:
        """Blocks that `steps` iterations from `first_step` on take."""
        residues = self._residues
        size = len(residues)
        cycles, rest = divmod(steps, size)
        start = first_step % size
        blocks = cycles * self.count + sum(residues[start : start + rest])
        return blocks + sum(residues[: start + rest - size]) if start + rest > size else blocks

    def steps_within(self, first_step: int, blocks: int, at_most: int) -> int:
        """How many iterations from `first_step` on take no more than `blocks` blocks, `at_most` at the most."""
        residues = self._residues
        size = len(residues)
        cycles, left = divmod(blocks, self.count)
        steps = cycles * size
        while steps < at_most:
            left -= residues[(first_step + steps) % size]
            if left < 0:
                return steps
            steps += 1
        return at_most
