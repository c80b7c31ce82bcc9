"""Routing through the registry in the store, for gateways that need only the store in common with the actuator.

The endpoint set is stored in one step with the records, so it is there before watchers get it, and outlives this
process. The gateways' acknowledgements are read at the beginning of every step, after what the step before has
stored: so a gateway that read a set that shows a replica has acknowledged before the set that hides it was written,
and is known here before anything is done to the replica.

Acknowledgements in the store have no time. A gateway renews its lease by one that differs from the one before; the
lease counts from when that was seen here. After a time in which this process could not look (it starts, it stood
still, the store was away) every gateway that is known or has an acknowledgement there gets a grace.

The same look shows whether the set that this process wrote is still there. A store that has lost it may have lost
more: the controller then reads everything again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from actuator.core.endpoints import endpoint_set, services_of
from actuator.core.model import Gateway, State
from actuator.shell.codec import parse_gateway
from actuator.shell.routing import StreamRouting
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.domain.endpoint import endpoint_set_to_proto
from trimtab.rpc.errors import RpcError
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry, StoreUnavailable
from trimtab.store.lease import Argument, suspend_aware_monotonic
from trimtab.store.registry import EndpointRegistry, service_bytes

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Standing:
    """A set as it was written."""

    revision: int
    reign: int
    names: frozenset[str]
    services: Mapping[str, bytes]
    head: bytes


class RegistryRouting:
    """A ``Routing`` for followers of the registry and, by ``stream``, for those of ``WatchEndpoints``."""

    def __init__(
        self,
        registry: EndpointRegistry,
        stream: StreamRouting,
        *,
        lease_s: float,
        grace_s: float,
        now_s: Callable[[], float],
        monotonic: Callable[[], float] = suspend_aware_monotonic,
    ) -> None:
        self._registry = registry
        self._stream = stream
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._now_s = now_s
        self._monotonic = monotonic
        # What is in the store for certain, and what is being written.
        self._standing: _Standing | None = None
        self._writing: _Standing | None = None
        self._words: dict[str, bytes] = {}
        self._looked_at = float("-inf")
        self._forgotten: list[str] = []

    # What is written

    def to_store(self, new: State, token: int) -> Sequence[tuple[Argument, ...]]:
        """The services that changed and the head; everything in a new term, or where the stored set is not known."""
        self._writing = None
        names, old = services_of(new), self._standing
        if old is not None and (old.revision, old.reign, old.names) == (new.meta.endpoint_revision, token, names):
            return ()
        shown = endpoint_set_to_proto(endpoint_set(new, cluster=self._registry.cluster, lease_s=self._lease_s))
        head = self._registry.new_head(
            revision=shown.revision, leader_term=token, lease_s=self._lease_s, now_s=self._now_s()
        )
        services = service_bytes(shown.services)
        self._writing = _Standing(shown.revision, token, names, services, head.SerializeToString())
        before = old.services if old is not None and old.reign == token else None
        return self._registry.commands(before, services, head)

    def stored(self, *, certain: bool) -> None:
        """Note what is in the store now."""
        if not certain:
            self._standing = None
        elif self._writing is not None:
            self._standing = self._writing
        self._writing = None

    # What is heard

    async def look(self, newest_revision: int) -> None:
        """Take in new acknowledgements. Raises ``StoreUnavailable``, also when the store has lost what was written."""
        await self._forget()
        head, words = await self._registry.look()
        if self._standing is not None and head != self._standing.head:
            self.stored(certain=False)
            raise StoreUnavailable("it does not hold the endpoint set that was written to it")
        self._take(words, newest_revision)

    def _take(self, words: Mapping[str, bytes], newest_revision: int) -> None:
        now_s, moment = self._now_s(), self._monotonic()
        everyone = moment - self._looked_at > self._lease_s / 2
        self._looked_at = moment
        if everyone:
            self._stream.spare(now_s + self._grace_s)
        lease_until_s = now_s + (self._grace_s if everyone else self._lease_s)
        for name, word in words.items():
            if everyone or word != self._words.get(name):
                self._take_acknowledgement(
                    name, word, lease_until_s=lease_until_s, now_s=now_s, newest_revision=newest_revision
                )
        self._words = dict(words)

    def _take_acknowledgement(
        self, name: str, word: bytes, *, lease_until_s: float, now_s: float, newest_revision: int
    ) -> None:
        sequence = 0
        try:
            said = decode(pb.AcknowledgeEndpointsRequest, word, place=f"the word of gateway {name}")
            parsed = parse_gateway(said, lease_until_s=lease_until_s, newest_revision=newest_revision)
            gateway, sequence = replace(parsed, gateway=name), said.sequence
        except (CorruptEntry, RpcError) as error:
            # It is alive, and has acknowledged nothing.
            log.warning("a gateway's word cannot be read", gateway=name, error=str(error))
            gateway = Gateway(gateway=name, lease_until_s=lease_until_s)
        self._stream.take_acknowledgement(gateway, sequence=sequence, now_s=now_s)

    async def _forget(self) -> None:
        """Remove acknowledgements of gateways that the core has dropped, unless there is a newer one."""
        while self._forgotten:
            name = self._forgotten[-1]
            if name in self._words:
                await self._registry.forget(name, self._words[name])
            self._forgotten.pop()

    # What the stream's followers share

    def show(self, old: State, new: State) -> None:
        """Publish to the stream's followers; the registry's got it when it was stored."""
        self._stream.show(old, new)
        known = self._stream.heard()
        self._forgotten += [name for name in sorted(old.gateways.keys() - new.gateways.keys()) if name not in known]

    def heard(self) -> Mapping[str, Gateway]:
        """Every gateway's last acknowledgement, from stream or registry."""
        return self._stream.heard()

    def remember(self, gateways: Mapping[str, Gateway]) -> None:
        """Take over the gateways known before; the next look finds those with an acknowledgement in the store."""
        self._stream.remember(gateways)
        self._looked_at = float("-inf")

    def open(self) -> None:
        """The stream's followers are served from now on."""
        self._stream.open()

    def close(self) -> None:
        """Ends every stream. The registry stays as it is: the last set is better than none."""
        self._stream.close()
        self.stored(certain=False)
