"""What is known of one cluster, by its actuator's stream, by the registry in the store, or both.

Both carry the same sets under the same revisions. The registry works without the actuator; the stream works without
the store, and then has the replicas that the actuator shows again meanwhile. The newest set counts. Acknowledgements
go both ways too, numbered, so that an actuator that receives both keeps the later one.

Two questions are kept apart. A set is *stale* when no live actuator confirms it. It is still used, since an old set
is better than none; status, log and metric show it. A gateway that stood still may *trust* its set again once one way
has answered that there is no newer one, or none has answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog

from gateway.core.readiness import Standing
from gateway.core.revision_order import RevisionOrder
from gateway.core.routing import to_route
from gateway.shell.dispatch import Dispatcher
from gateway.shell.metrics import GatewayMetrics
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.domain.endpoint import Endpoint, endpoint_set_from_proto

log = structlog.get_logger(__name__)

_WARN_EVERY_S = 5.0


def reachable(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Endpoints that gateways talk to, and can: by HTTP."""
    return [endpoint for endpoint in to_route(endpoints) if endpoint.address.startswith(("http://", "https://"))]


class ClusterRoutes:
    """One cluster's sets and this gateway's acknowledgements of them. A *way* is the name of a link that joined."""

    def __init__(
        self,
        cluster: str,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        *,
        gateway: str,
        on_first_set: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.cluster = cluster
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._gateway = gateway
        self._on_first_set = on_first_set
        self._clock = clock
        self._wall = wall
        self._revision_order = RevisionOrder()
        self._listeners: dict[str, Callable[[], None]] = {}
        self._quiet: dict[str, str] = {}
        self._stale = False
        self._mute: set[str] = set()
        self._mute_since_stall = 0
        self._sequence = 0
        self._warned_s = float("-inf")
        dispatcher.on_report(self._report)
        metrics.stale.labels(cluster).set(1)

    def join(self, way: str, on_news: Callable[[], None]) -> None:
        """Add a link: `on_news` is called when this gateway has to acknowledge over it at once."""
        self._listeners[way] = on_news
        self._quiet[way] = "it has not answered yet"

    def _report(self, cluster: str) -> None:
        if cluster == self.cluster:
            self._tell()

    def _tell(self) -> None:
        for on_news in self._listeners.values():
            on_news()

    # Sets

    @property
    def revision(self) -> int | None:
        """The revision that is routed by; None before the first."""
        return self._revision_order.revision

    def offer(self, response: actuator_pb2.WatchEndpointsResponse, *, has_leader: bool) -> None:
        """A whole set has come: route by it, unless it is older than what is routed by, or makes no sense."""
        if response.cluster != self.cluster:
            self.warn("endpoint set refused: it is another cluster's", cluster=response.cluster, expected=self.cluster)
            return
        before = self.revision
        if not self._revision_order.takes(response.revision, has_leader=has_leader, now_s=self._clock()):
            self.warn("endpoint set refused: it is older", revision=str(response.revision), routing_by=str(before))
            return
        if response.lease_s > 0:
            self._dispatcher.lease_s = min(self._dispatcher.lease_s, response.lease_s)
        shown = endpoint_set_from_proto(response)
        try:
            self._dispatcher.apply(self.cluster, shown.revision, shown.services, reachable(shown.endpoints))
        except ValueError as error:
            self._revision_order.revision = before
            self.warn("endpoint set refused", error=str(error))
            return
        self._metrics.revision.labels(self.cluster).set(response.revision)
        if before is None:
            self._on_first_set()
        if before != response.revision:
            self._tell()

    # Whether it is stale

    def heard(self, way: str) -> None:
        """This way confirms the set: a live actuator has it."""
        self._revision_order.confirmed()
        self._quiet.pop(way, None)
        self._show_staleness()

    def quiet(self, way: str, why: str) -> None:
        """This way does not confirm the set any more."""
        self._quiet[way] = why
        self._show_staleness()

    def _show_staleness(self) -> None:
        stale = len(self._quiet) == len(self._listeners)
        self._metrics.stale.labels(self.cluster).set(int(stale or self.revision is None))
        if self.revision is None or stale == self._stale:
            return
        self._stale = stale
        if stale:
            why = "; ".join(f"{way}: {text}" for way, text in sorted(self._quiet.items()))
            log.warning("endpoint set is stale, routing by it all the same", cluster=self.cluster, why=why)
        else:
            log.info("endpoint set is current again", cluster=self.cluster)

    @property
    def standing(self) -> Standing:
        """The set that is routed by, and whether it is confirmed."""
        return Standing(
            cluster=self.cluster,
            revision=self.revision,
            services=self._dispatcher.router.named_by(self.cluster),
            quiet=dict(self._quiet),
            stale=len(self._quiet) == len(self._listeners),
        )

    # What this gateway says

    @property
    def stalls(self) -> int:
        """See `Dispatcher.stalls`; to be read before a question is asked, and given back with its answer."""
        return self._dispatcher.stalls

    def ack(self) -> actuator_pb2.AcknowledgeEndpointsRequest:
        """By which revision this gateway routes right now, and what it still has on hidden replicas."""
        self._sequence = max(self._sequence + 1, round(self._wall() * 1000))
        return actuator_pb2.AcknowledgeEndpointsRequest(
            gateway=self._gateway,
            revision=self.revision or 0,
            in_flight=[
                actuator_pb2.ReplicaInFlight(replica=item.replica, requests=item.requests, pinned=item.pinned)
                for item in self._dispatcher.router.left_behind(self.cluster)
            ],
            sequence=self._sequence,
        )

    def current(self, *, stalls: int) -> None:
        """One way has answered that there is nothing newer. An answer from before a stall proves nothing after it."""
        if stalls == self._dispatcher.stalls:
            self._dispatcher.trust(self.cluster)

    def unanswered(self, way: str, *, stalls: int) -> None:
        """This way did not answer. When none does, the last set stays in force."""
        if stalls != self._dispatcher.stalls:
            return
        if stalls != self._mute_since_stall:
            self._mute, self._mute_since_stall = set(), stalls
        self._mute.add(way)
        if self._mute >= self._listeners.keys():
            self._dispatcher.trust(self.cluster)

    def warn(self, event: str, **fields: str) -> None:
        """A line in the log, not more than one every five seconds."""
        now_s = self._clock()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(event, **{"cluster": self.cluster, **fields})
