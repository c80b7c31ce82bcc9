"""Replicas of one service that serve whole requests, without a controller."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lab.virtual.clock import EngineClock, engines_of
from lab.virtual.fixed.records import Records
from lab.virtual.fixed.routing import LeastLoaded
from simulator.core.event_engine import EventEngine
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.traces.model import TraceRequest


class ColocatedFleet:
    """Replicas of one service that serve whole requests, the least loaded first."""

    def __init__(self) -> None:
        self.records = Records()
        self.router = LeastLoaded()
        self.clock = EngineClock(self._finished)
        self._sequence = 0

    def add(self, engine: EventEngine) -> int:
        """A replica that gets requests from now on; its index."""
        index = self.clock.add(engine)
        self.router.add(index, engine.unfinished)
        return index

    def submit(self, request: TraceRequest) -> int:
        """Route one request at its arrival; the replica's index. Raises ValueError when there is no replica."""
        self.clock.run_before(request.arrival_s)
        index = self.router.least()
        if index is None:
            raise ValueError(f"no replica takes the request at {request.arrival_s:.3f} s")
        self._sequence += 1
        self.clock.submit(
            index,
            EngineRequest(str(self._sequence), request.prompt_tokens, request.output_tokens),
            request.arrival_s,
        )
        self.router.change(index, 1)
        return index

    def run(self, requests: Iterable[TraceRequest]) -> Records:
        """Serve a trace to its end."""
        for request in requests:
            self.submit(request)
        self.clock.run_before(math.inf)
        return self.records

    def _finished(self, index: int, finished: FinishedRequest) -> None:
        self.router.change(index, -1)
        self.records.add(finished, index)


def colocated(profile: Profile, replicas: int) -> ColocatedFleet:
    """A fleet of equal replicas."""
    fleet = ColocatedFleet()
    for engine in engines_of(profile, replicas):
        fleet.add(engine)
    return fleet
