"""What runs on virtual time share: a trace served from its first arrival to its last answer, and a look a scrape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lab.virtual.control import ReplicaSample, ServiceTraffic
from lab.virtual.gateway import VirtualGateway
from lab.virtual.observing import VirtualCollector
from lab.virtual.sampling import Sampler, Tally
from lab.virtual.servers import ServerState, VirtualServers
from simulator.traces.model import TraceRequest


class Serving:
    """A trace in front of a gateway and its servers, and what a controller is shown of them.

    `started_s` and `until_s`, the trace's begin and end on the run's clock, are infinite before `serve`.
    """

    def __init__(
        self,
        gateway: VirtualGateway,
        servers: VirtualServers,
        collector: VirtualCollector,
        *,
        services: Sequence[str],
        timeline_s: float,
    ) -> None:
        """`timeline_s` is the time between two points of the run's timeline."""
        self.gateway = gateway
        self.servers = servers
        self.collector = collector
        self.started_s = self.until_s = math.inf
        self.gpu_hours = 0.0
        """From the trace's begin to its end; 0 before that."""
        self.tallies = {name: Tally() for name in services}
        self.samples: dict[str, ReplicaSample] = {}
        """The values of every awake server at the last observation."""
        self._sampler = Sampler()
        self._timeline_s = timeline_s
        self._drawn_s = -timeline_s

    def serve(self, requests: Iterable[TraceRequest], *, start_s: float, duration_s: float) -> None:
        """Send a trace that begins at `start_s` on the run's clock, up to its end. Call once."""
        clock = self.servers.clock
        self.started_s, self.until_s = start_s, start_s + duration_s
        hours_before = self.servers.gpu_hours()
        for request in requests:
            at_s = start_s + request.arrival_s
            clock.run_before(at_s)
            self.gateway.submit(request, at_s)
        clock.run_before(self.until_s)
        self.gpu_hours = self.servers.gpu_hours() - hours_before

    def let_end(self, grace_s: float) -> None:
        """After the trace's end: what is not answered has `grace_s` more, looked at every second."""
        clock = self.servers.clock
        while self.gateway.open_requests and clock.now_s < self.until_s + grace_s:
            clock.run_before(clock.now_s + 1.0)

    def goes_on(self, now_s: float) -> bool:
        """Whether there is something to look at: the trace is not over, or a request is not answered."""
        return now_s < self.until_s or self.gateway.open_requests > 0

    def look(self, now_s: float, *, windows: bool, sleepers: bool) -> None:
        """One scrape and one report of the front door, at the end of the window that they are for."""
        self.read(now_s, windows=windows, sleepers=sleepers)
        self.hear(now_s)

    def read(self, now_s: float, *, windows: bool, sleepers: bool, end_s: float | None = None) -> None:
        """One scrape: engines brought up to now, pages for the collector where `windows` are read, samples.

        `sleepers`: a server that is not awake shows what it has counted, as one asleep does; else it has no page. One
        that starts has none in any case.
        `end_s` is the end of the window that it is for, if it is later than now.
        """
        by_name = self.servers.by_name
        for server in by_name.values():
            self.servers.clock.at(server.index, now_s)
            server.recorder.asleep = not server.awake
        if windows:
            readings = {
                name: one.recorder.reading(now_s)
                for name, one in by_name.items()
                if one.awake or (sleepers and one.state is not ServerState.STARTING)
            }
            self.collector.scrape(now_s, readings, end_s=end_s)
        self.samples = self._sampler.take(self.servers, now_s)

    def hear(self, now_s: float) -> None:
        """What arrived at the gateway since this was last called, for the collector and the services' traffic."""
        for item in self.gateway.demand():
            self.tallies[item.service].add(item)
            self.collector.report(
                now_s,
                item.service,
                arrivals=item.arrivals,
                prompt_tokens=item.prompt_tokens,
                output_tokens=item.output_tokens,
                held=item.held,
            )

    def traffic(self, now_s: float) -> dict[str, ServiceTraffic]:
        """Every service's traffic since the last call."""
        return {service: tally.close(now_s) for service, tally in self.tallies.items()}

    def point_due(self, now_s: float) -> bool:
        """Whether the timeline wants a point now; saying so counts as drawing it."""
        if not self.started_s <= now_s < self.until_s or now_s - self._drawn_s < self._timeline_s - 1e-6:
            return False
        self._drawn_s = now_s
        return True

    def forget(self, name: str) -> None:
        """A server is gone; one of its name begins anew."""
        self._sampler.forget(name)
