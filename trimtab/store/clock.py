"""The store's clock, by which every age is computed.

Clocks of machines differ; the store's is the one that all share. A ``StoreClock`` keeps the offset between
it and this machine's monotonic clock, so that a step of the local wall clock changes nothing, and reading the time
costs no round trip.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from trimtab.store.client import Store
from trimtab.store.errors import StoreUnavailable
from trimtab.tasks import stopped_within

log = structlog.get_logger(__name__)

REFRESH_INTERVAL_S = 5.0
_MAX_ROUND_TRIP_S = 1.0
_NOTABLE_STEP_S = 0.5


class StoreClock:
    """``now_s()`` is Unix time in seconds on the store's clock.

    Until the first answer it is this machine's time; when the store is away, the last offset goes on to hold. The
    store's clock is taken as it is: when it steps, after a fail-over say, so does this one, with a line in the log. A
    slow answer leaves the offset open by half of its round trip, and changes nothing where the known one lies within
    that: a busy machine does not make this clock jump.
    """

    def __init__(
        self,
        store: Store,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()
        self.synchronised = False

    def now_s(self) -> float:
        """Unix seconds on the store's clock. Never raises."""
        return self._monotonic() + self._offset_s

    async def refresh(self) -> bool:
        """Ask the store; True when its answer was fit for use. Raises nothing: a store that is away changes nothing."""
        before = self._monotonic()
        try:
            seconds, microseconds = await self._store.redis.time()
        except StoreUnavailable:
            return False
        after = self._monotonic()
        if after - before > _MAX_ROUND_TRIP_S:
            # Half of the round trip is the error; a slow answer is less exact than the known offset.
            return False
        offset_s = seconds + microseconds / 1e6 - (before + after) / 2
        if self.synchronised and abs(offset_s - self._offset_s) <= (after - before) / 2:
            return True
        if self.synchronised and abs(offset_s - self._offset_s) > _NOTABLE_STEP_S:
            log.warning("the store's clock stepped", step_s=round(offset_s - self._offset_s, 3))
        self._offset_s = offset_s
        self.synchronised = True
        return True

    async def run(self, stopping: asyncio.Event, *, interval_s: float = REFRESH_INTERVAL_S) -> None:
        """Refresh until ``stopping`` is set."""
        while True:
            await self.refresh()
            if await stopped_within(stopping, interval_s):
                return
