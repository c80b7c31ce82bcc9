"""What windows remember: timed values, the oldest dropped as time goes on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """Values by time, oldest first."""

    values: tuple[tuple[float, float], ...] = ()

    def added(self, now_s: float, value: float, *, keep_s: float) -> History:
        """With one more, without those older than `keep_s`."""
        kept = tuple(entry for entry in self.values if now_s - entry[0] <= keep_s)
        return History((*kept, (now_s, value)))

    def since(self, now_s: float, window_s: float) -> list[float]:
        """Values of the last `window_s`, both ends included."""
        return [value for at_s, value in self.values if now_s - at_s <= window_s]

    def mean(self, now_s: float, window_s: float) -> float | None:
        """Mean of the last `window_s`; None without any."""
        values = self.since(now_s, window_s)
        return sum(values) / len(values) if values else None


EMPTY = History()
