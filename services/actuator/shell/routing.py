"""The interface to routers: endpoint sets go out, acknowledgements come back.

The core derives the endpoint set from its records and needs two things: that a set with its revision goes out, and that
each router's acknowledgement comes back (its lease, the revision that it routes by, its requests on hidden replicas).
Implementations of ``Routing`` carry them. ``StreamRouting`` serves gateways that follow a stream and call back;
``actuator.shell.registry`` adds those that follow the registry in the store. Where routing is by readiness gates and
annotations of pods, an adapter would write those and acknowledge the revision that it has seen.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from actuator.core.endpoints import endpoint_set, services_of
from actuator.core.model import Gateway, State
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.domain.endpoint import endpoint_set_to_proto
from trimtab.rpc.errors import Unavailable
from trimtab.rpc.watch import WatchHub
from trimtab.store.lease import Argument


class Routing(Protocol):
    """The interface of a routing adapter, as the controller uses it.

    Each step: ``look``, the core decides on what was ``heard``, ``to_store`` with the new state, ``stored``, ``show``.
    """

    async def look(self, newest_revision: int) -> None:
        """Take in the routers' acknowledgements. What is ``heard`` after it is from after the last set was stored.

        Raises ``StoreUnavailable`` when that cannot be known: then nothing may be decided on it.
        """
        ...

    def to_store(self, new: State, token: int) -> Sequence[tuple[Argument, ...]]:
        """What is written in the same step as ``new``, under the actuator's fencing token."""
        ...

    def stored(self, *, certain: bool) -> None:
        """The write is over. Not ``certain``: it may or may not have been done."""
        ...

    def show(self, old: State, new: State) -> None:
        """From now on only what is routable in ``new`` may be sent to. Called after the state was stored."""
        ...

    def heard(self) -> Mapping[str, Gateway]:
        """Every router's last acknowledgement, by name."""
        ...

    def remember(self, gateways: Mapping[str, Gateway]) -> None:
        """A leader term begins with these names known; each has to acknowledge again."""
        ...

    def open(self) -> None:
        """This process serves the cluster from now on: the next set shown is the first."""
        ...

    def close(self) -> None:
        """It does so no longer."""
        ...


class StreamRouting:
    """Gateways that follow ``WatchEndpoints`` and call ``AcknowledgeEndpoints``."""

    def __init__(self, *, cluster: str, lease_s: float) -> None:
        self._cluster = cluster
        self._lease_s = lease_s
        self._state = State()
        self._gateways: dict[str, Gateway] = {}
        self._sequences: dict[str, int] = {}
        self._on_word: Callable[[], None] = lambda: None
        self._hub: WatchHub[pb.WatchEndpointsResponse] | None = None
        self._closed = asyncio.Event()

    def listen(self, on_word: Callable[[], None]) -> None:
        """``on_word`` is called when an acknowledgement may let a step go on."""
        self._on_word = on_word

    # What the controller asks

    async def look(self, newest_revision: int) -> None:
        """Gateways call by themselves."""

    def to_store(self, new: State, token: int) -> Sequence[tuple[Argument, ...]]:
        """Nothing: sets go over the stream."""
        return ()

    def stored(self, *, certain: bool) -> None:
        """Nothing was."""

    def show(self, old: State, new: State) -> None:
        """Send every watcher a set that changed; drop gateways that the state has dropped."""
        self._state = new
        for name in old.gateways.keys() - new.gateways.keys():
            if self._gateways.get(name) == old.gateways[name]:
                del self._gateways[name]
                self._sequences.pop(name, None)
        changed = new.meta.endpoint_revision != old.meta.endpoint_revision or services_of(new) != services_of(old)
        if self._hub is not None and changed:
            self._hub.publish(self.endpoint_set())

    def heard(self) -> Mapping[str, Gateway]:
        """Every gateway's last acknowledgement."""
        return dict(self._gateways)

    def remember(self, gateways: Mapping[str, Gateway]) -> None:
        """The gateways that were known before."""
        self._gateways = dict(gateways)
        self._sequences = {}

    def open(self) -> None:
        """Watchers are served from now on."""
        self.close()
        self._closed = asyncio.Event()
        self._hub = WatchHub(snapshot=lambda: [self.endpoint_set()], bookmark=self.endpoint_set, stopping=self._closed)

    def close(self) -> None:
        """Ends every stream."""
        self._closed.set()
        self._hub = None

    # What gateways ask

    def watch(self, name: str, *, lease_until_s: float) -> AsyncIterator[pb.WatchEndpointsResponse]:
        """One gateway's stream; it starts the gateway's lease. Raises ``Unavailable`` while no watcher is served."""
        if self._hub is None:
            raise Unavailable("STANDING_BY", "another actuator speaks for this cluster, or this one is starting")
        stream = self._hub.watch()
        if name not in self._gateways:
            self.take_acknowledgement(Gateway(gateway=name, lease_until_s=lease_until_s))
        return stream

    def take_acknowledgement(self, gateway: Gateway, *, sequence: int = 0, now_s: float = 0.0) -> None:
        """Take an acknowledgement. One that was overtaken by a later one, over the registry, is dropped."""
        before = self._gateways.get(gateway.gateway)
        if (
            before is not None
            and before.lease_until_s > now_s
            and 0 < sequence < self._sequences.get(before.gateway, 0)
        ):
            return
        self._gateways[gateway.gateway] = gateway
        self._sequences[gateway.gateway] = sequence
        if before is None or before.acknowledged_revision != gateway.acknowledged_revision or before.in_flight:
            self._on_word()

    def spare(self, until_s: float) -> None:
        """No lease ends before ``until_s``: acknowledgements could not be read meanwhile."""
        self._gateways = {
            name: replace(gateway, lease_until_s=max(gateway.lease_until_s, until_s))
            for name, gateway in self._gateways.items()
        }

    def endpoint_set(self) -> pb.WatchEndpointsResponse:
        """The whole set; also the heartbeat."""
        return endpoint_set_to_proto(endpoint_set(self._state, cluster=self._cluster, lease_s=self._lease_s))
