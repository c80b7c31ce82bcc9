"""Paged KV cache: a fixed number of blocks, shared by hash, evicted in least-recently-used order.

A block is *private* to a sequence, *shared* under a prompt hash with a reference count, or *idle*: cached under its
hash, used by no sequence, evicted when space is needed. Usage counts private and shared blocks only, as vLLM's gauge
does. Limits: only full prompt blocks get a hash; generated tokens are never reused by another request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Accounting of one engine's KV blocks; raises ValueError where the caller's books are wrong."""

    __slots__ = ("_idle", "_private_blocks", "_shared", "total_blocks")

    def __init__(self, total_blocks: int) -> None:
        if total_blocks < 1:
            raise ValueError(f"total_blocks must be at least 1, not {total_blocks}")
        self.total_blocks = total_blocks
        self._private_blocks = 0
        self._shared: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self._private_blocks + len(self._shared)

    @property
    def available_blocks(self) -> int:
        """Blocks that can be handed out, idle cached ones included."""
        return self.total_blocks - self._private_blocks - len(self._shared)

    @property
    def idle_blocks(self) -> int:
        """Cached blocks that no sequence holds."""
        return len(self._idle)

    @property
    def usage_ratio(self) -> float:
        """Held blocks over all blocks; reusable cached blocks do not count."""
        return self.used_blocks / self.total_blocks

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of `hashes` are in the cache."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._shared and block_hash not in self._idle:
                break
            count += 1
        return count

    def can_admit(self, hashes: Sequence[int], hit_blocks: int, private_blocks: int) -> bool:
        """Whether the first `hit_blocks` of `hashes` can be claimed and `private_blocks` allocated beside them."""
        idle_hits = sum(1 for block_hash in hashes[:hit_blocks] if block_hash in self._idle)
        return private_blocks + idle_hits <= self.available_blocks

    def claim(self, hashes: Sequence[int]) -> None:
        """Take a reference on cached blocks. Raises ValueError for one that is not in the cache."""
        for block_hash in hashes:
            count = self._shared.get(block_hash)
            if count is not None:
                self._shared[block_hash] = count + 1
            elif block_hash in self._idle:
                del self._idle[block_hash]
                self._shared[block_hash] = 1
            else:
                raise ValueError("cannot claim a block that is not cached")

    def allocate(self, blocks: int) -> bool:
        """Take `blocks` private blocks, evicting idle ones; False and no change when there are too few."""
        used_blocks = self._private_blocks + len(self._shared) + blocks
        if used_blocks > self.total_blocks:
            return False
        self._private_blocks += blocks
        idle = self._idle
        while idle and used_blocks + len(idle) > self.total_blocks:
            idle.popitem(last=False)
        return True

    def publish(self, block_hash: int) -> bool:
        """Turn a private block into a shared one under `block_hash`; False when that hash is cached already.

        Raises ValueError without a private block.
        """
        if block_hash in self._shared or block_hash in self._idle:
            return False
        if self._private_blocks < 1:
            raise ValueError("no private block to publish")
        self._private_blocks -= 1
        self._shared[block_hash] = 1
        return True

    def release(self, private_blocks: int, hashes: Sequence[int]) -> None:
        """Free blocks; shared ones without another holder become idle, a prompt's tail first to be evicted.

        Raises ValueError for more private blocks than there are.
        """
        if private_blocks > self._private_blocks:
            raise ValueError(f"cannot release {private_blocks} private blocks of {self._private_blocks}")
        self._private_blocks -= private_blocks
        for block_hash in reversed(hashes):
            count = self._shared[block_hash] - 1
            if count:
                self._shared[block_hash] = count
            else:
                del self._shared[block_hash]
                self._idle[block_hash] = None

    def drop_idle(self) -> None:
        """Forget every reusable block, as a sleep or a cache reset does."""
        self._idle.clear()
