"""Engines on one virtual clock, advanced by the next event.

A heap holds for each engine a time before which no request can end; nothing is done for engines without an event, so
the work of a run grows with its requests, not with replicas times iterations. What arrives at the moment an iteration
ends takes part in the next one, and is routed as if that iteration were still under way.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from simulator.core.curves import DecodeCurves
from simulator.core.event_engine import EventEngine
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import BatchWork

OnFinished = Callable[[int, FinishedRequest], None]


class EngineClock:
    """Processes the ends of requests and scheduled calls in order of time.

    What happens inside an engine without ending a request is computed when the engine is read or a request can end.
    Until then a lower bound is kept: more work never makes an iteration shorter, so requests that came since can only
    delay the planned end, and a request of n tokens takes n iterations at the least.
    """

    def __init__(self, on_finished: OnFinished) -> None:
        self.engines: list[EventEngine] = []
        self.now_s = 0.0
        self._on_finished = on_finished
        self._floor_s: list[float] = []
        self._bound_s: list[float] = []
        self._due: list[tuple[float, int]] = []
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._called = 0

    def add(self, engine: EventEngine) -> int:
        """Take an engine in; its index."""
        self.engines.append(engine)
        # A little less, so that rounding never puts the bound behind the end.
        self._floor_s.append(engine.timing.iteration_s(BatchWork(0, 1, 0, 0.0)) * (1 - 1e-9))
        self._bound_s.append(math.inf)
        index = len(self.engines) - 1
        self.touched(index)
        return index

    def submit(self, index: int, request: EngineRequest, now_s: float) -> None:
        """Give a request to an engine; raises ValueError as the engine does."""
        engine = self.engines[index]
        if engine.next_s < now_s:
            self._catch_up(index, now_s)
        engine.submit(request, now_s)
        bound_s = now_s + request.output_tokens * self._floor_s[index]
        if bound_s < self._bound_s[index]:
            self._bound_s[index] = bound_s
            heapq.heappush(self._due, (bound_s, index))

    def at(self, index: int, now_s: float) -> EventEngine:
        """An engine in its state at `now_s`, to be read; a caller that changes it calls `touched`."""
        self._catch_up(index, now_s)
        return self.engines[index]

    def touched(self, index: int) -> None:
        """Look again when an engine can end a request, after a call to it from outside."""
        bound_s = self._bound_s[index] = self.engines[index].next_s
        if bound_s < math.inf:
            heapq.heappush(self._due, (bound_s, index))

    def call_at(self, at_s: float, call: Callable[[float], None]) -> None:
        """Call with the time at `at_s`, before the engines' own events of that time."""
        self._called += 1
        heapq.heappush(self._calls, (at_s, self._called, call))

    def run_before(self, until_s: float) -> None:
        """Let everything happen that is due before `until_s`; then it is `until_s`, unless that is infinity."""
        due, calls, bounds_s, engines = self._due, self._calls, self._bound_s, self.engines
        while True:
            engine_s = due[0][0] if due else math.inf
            if calls and calls[0][0] <= engine_s:
                if calls[0][0] >= until_s:
                    break
                at_s, _, call = heapq.heappop(calls)
                self.now_s = at_s
                call(at_s)
                continue
            if engine_s >= until_s:
                break
            _, index = heapq.heappop(due)
            if bounds_s[index] != engine_s:
                continue
            self.now_s = engine_s
            engine = engines[index]
            bounds_s[index] = math.inf
            while engine.next_s <= engine_s:
                for one in engine.fire():
                    self._on_finished(index, one)
            if engine.next_s < bounds_s[index]:
                bounds_s[index] = engine.next_s
                heapq.heappush(due, (engine.next_s, index))
        if until_s < math.inf:
            self.now_s = until_s

    def _catch_up(self, index: int, now_s: float) -> None:
        engine = self.engines[index]
        while engine.next_s < now_s:
            for one in engine.fire():
                self._on_finished(index, one)


def engines_of(profile: Profile, count: int) -> list[EventEngine]:
    """Engines of one profile, which share what they know about its iteration times."""
    limits, timing = profile.engine_limits(), profile.iteration_model()
    curves = DecodeCurves(timing, limits.kv_capacity_tokens)
    return [EventEngine(limits, timing, curves) for _ in range(count)]
