"""vLLM's sleep, wake, pause and resume as a table of states; the answers of each are in docs/simulator.md.

Sleeping frees memory tags (`weights`, `kv_cache`) and stops the scheduler; level 0 stops the scheduler only. Waking
restores tags, all of them or those named, and starts the scheduler once none is missing. `/pause` stops the scheduler
and frees nothing, so `/is_sleeping` is true after it while `engine_sleep_state` is still awake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
MEMORY_TAGS = frozenset({WEIGHTS, KV_CACHE})


@dataclasses.dataclass(frozen=True, slots=True)
class SleepState:
    """What is paused and what is offloaded."""

    level: int | None = None
    """Level of the sleep under way; None when not asleep."""
    missing: frozenset[str] = frozenset()
    """Memory tags that are not on the GPU."""
    paused: bool = False
    slept_before: bool = False
    """A first sleep is several times slower than later ones."""

    @property
    def is_sleeping(self) -> bool:
        """The answer of `/is_sleeping`; true after `/pause` too."""
        return self.paused or bool(self.missing)

    @property
    def offloaded(self) -> bool:
        """Whether memory was given up."""
        return bool(self.missing)

    @property
    def runnable(self) -> bool:
        """Whether the engine may step."""
        return not self.paused and not self.missing

    def sleep(self, level: int) -> SleepState:
        """Fall asleep; level 0 keeps the memory. Raises ValueError for a level but 0, 1 and 2."""
        if level not in (0, 1, 2):
            raise ValueError(f"sleep level must be 0, 1 or 2, not {level}")
        if level == 0:
            return dataclasses.replace(self, level=0 if not self.missing else self.level, paused=True)
        return SleepState(level=level, missing=MEMORY_TAGS, paused=True, slept_before=True)

    def wake(self, tags: Sequence[str] | None) -> SleepState:
        """Give memory back: everything, or the named tags; unknown tags change nothing."""
        missing = frozenset() if tags is None else self.missing - frozenset(tags)
        if missing:
            return dataclasses.replace(self, missing=missing)
        return SleepState(slept_before=self.slept_before)

    def pause(self) -> SleepState:
        """Stop the scheduler."""
        return dataclasses.replace(self, paused=True)

    def resume(self) -> SleepState:
        """Start the scheduler; what is offloaded stays so."""
        return dataclasses.replace(self, paused=False, level=self.level if self.missing else None)

    def gauges(self) -> dict[str, float]:
        """`engine_sleep_state` by its label `sleep_state`; level 0 sets all three to 0."""
        return {
            "awake": 1.0 if self.level is None else 0.0,
            "weights_offloaded": 1.0 if self.level == 1 else 0.0,
            "discard_all": 1.0 if self.level == 2 else 0.0,
        }
