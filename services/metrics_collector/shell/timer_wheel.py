"""A timer wheel: thousands of calls a second for one timer of the loop.

Moments are rounded up to a slot, so that what is due together is done together: one wake-up, and sockets that become
readable in one go. Calls cannot be cancelled; the called function checks whether it still applies.
"""

import asyncio
import heapq
from collections.abc import Callable
from time import monotonic

SLOT_S = 0.004


class TimerWheel:
    """Calls functions at moments of the running loop's clock. ``failure`` gets what the first of them raised."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # A loop may keep its time still for a whole turn; calls set late in a long one would come early.
        self._ahead_s = self._loop.time() - monotonic()
        self._slots: dict[int, list[Callable[[], None]]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_slot = 0
        self.failure: asyncio.Future[object] = self._loop.create_future()

    def call_in(self, delay_s: float, call: Callable[[], None], *, slots: int = 1) -> None:
        """Call ``delay_s`` from now, up to ``slots`` slots later; never at once."""
        slot = int((monotonic() + self._ahead_s + max(0.0, delay_s)) / SLOT_S) + 1
        slot += -slot % slots
        calls = self._slots.get(slot)
        if calls is not None:
            calls.append(call)
            return
        self._slots[slot] = [call]
        heapq.heappush(self._order, slot)
        if self._timer is None or slot < self._timer_slot:
            self._set_timer()

    def close(self) -> None:
        """Make no more calls."""
        self._slots.clear()
        self._order.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.failure.cancel()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_slot = self._order[0]
        self._timer = self._loop.call_at(self._timer_slot * SLOT_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now_slot = int((monotonic() + self._ahead_s) / SLOT_S + 1e-6)
        while self._order and self._order[0] <= now_slot:
            for call in self._slots.pop(heapq.heappop(self._order)):
                try:
                    call()
                except Exception as error:  # noqa: BLE001
                    # A loop swallows what its callbacks raise.
                    self.fail(error)
        if self._order:
            self._set_timer()

    def fail(self, error: Exception) -> None:
        """Report a defect: it is raised to the waiter for ``failure``, which ends the process."""
        if not self.failure.done():
            self.failure.set_exception(error)
