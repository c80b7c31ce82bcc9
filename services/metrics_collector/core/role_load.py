"""What gateways have open at each replica, and when it last answered: summed over gateways, shared by collectors.

These counts alone distinguish a replica that has work and does not move from an idle one; both may have the same page.
Its time without an answer begins at the later of its last answer and the moment at which it got work after having none:
an hour without work is no hour without an answer.

A gateway that has been silent for ``expiry_s`` is left out. Each report names every replica with work; all others have
none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.time import seconds_of, timestamp_of

_FORGET_S = 600.0


class ReplicaReport(NamedTuple):
    """One gateway's report of one replica: requests open right now, and chunks of answers since its last report."""

    in_flight: int
    answered: int


class ReplicaLoad(NamedTuple):
    """``moved_at_s`` is on the store's clock."""

    in_flight: int
    moved_at_s: float


@dataclass(slots=True)
class _Gateway:
    at_s: float
    replicas: dict[str, ReplicaLoad] = field(default_factory=dict)


class ReplicaLoads:
    """The board of one collector: reports of its own gateways, and those that other collectors got from theirs."""

    def __init__(self, *, expiry_s: float) -> None:
        self._expiry_s = expiry_s
        self._gateways: dict[str, _Gateway] = {}
        self._others: dict[str, ReplicaLoad] = {}

    def report(self, gateway: str, replicas: Mapping[str, ReplicaReport], *, at_s: float) -> None:
        """Take one report; it replaces the gateway's report before."""
        known = self._gateways.get(gateway)
        before = known.replicas if known is not None else {}
        now: dict[str, ReplicaLoad] = {}
        for replica, said in replicas.items():
            earlier = before.get(replica)
            moved = said.answered > 0 or earlier is None or (said.in_flight > 0 and earlier.in_flight == 0)
            now[replica] = ReplicaLoad(said.in_flight, at_s if moved or earlier is None else earlier.moved_at_s)
        for replica, earlier in before.items():
            if replica not in now and at_s - earlier.moved_at_s < _FORGET_S:
                now[replica] = ReplicaLoad(0, earlier.moved_at_s)
        self._gateways[gateway] = _Gateway(at_s, now)

    def heard(self, now_s: float) -> dict[str, float]:
        """Gateway → when it reported, of those that are not silent."""
        return {
            name: gateway.at_s
            for name, gateway in sorted(self._gateways.items())
            if abs(now_s - gateway.at_s) < self._expiry_s
        }

    def totals(self, now_s: float) -> dict[str, ReplicaLoad]:
        """Every replica that a gateway has named, summed over gateways."""
        totals = dict(self._others)
        for name in self.heard(now_s):
            _add(totals, self._gateways[name].replicas.items())
        return totals

    def load(self, replica: str, now_s: float) -> tuple[int, float] | None:
        """(requests that gateways have open at it, seconds since it was seen to move); None where none has named it."""
        heard = self.heard(now_s)
        found = [self._gateways[name].replicas[replica] for name in heard if replica in self._gateways[name].replicas]
        if replica in self._others:
            found.append(self._others[replica])
        if not found:
            return None
        moved_at_s = max(item.moved_at_s for item in found)
        return sum(item.in_flight for item in found), max(0.0, now_s - moved_at_s)

    def told(self, collector: str, now_s: float) -> pb.CollectorDemand:
        """What the other collectors should know."""
        message = pb.CollectorDemand(collector=collector)
        message.write_time.CopyFrom(timestamp_of(now_s))
        totals: dict[str, ReplicaLoad] = {}
        for name, at_s in self.heard(now_s).items():
            message.gateways.add(gateway=name, report_time=timestamp_of(at_s))
            _add(totals, self._gateways[name].replicas.items())
        for replica, load in sorted(totals.items()):
            message.replicas.add(replica=replica, in_flight=load.in_flight, moved_time=timestamp_of(load.moved_at_s))
        return message

    def take(self, others: Sequence[pb.CollectorDemand], now_s: float) -> frozenset[str]:
        """Replace what other collectors know by ``others``; gives the gateways of this one that are theirs by now.

        A gateway that went over to another collector is that one's from its first report there, and forgotten here.
        """
        totals: dict[str, ReplicaLoad] = {}
        moved: set[str] = set()
        for other in others:
            if abs(now_s - seconds_of(other.write_time)) >= self._expiry_s:
                continue
            for heard in other.gateways:
                own = self._gateways.get(heard.gateway)
                if own is not None and seconds_of(heard.report_time) > own.at_s:
                    moved.add(heard.gateway)
            _add(
                totals,
                ((item.replica, ReplicaLoad(item.in_flight, seconds_of(item.moved_time))) for item in other.replicas),
            )
        for gateway in moved:
            del self._gateways[gateway]
        for gateway in [name for name, item in self._gateways.items() if abs(now_s - item.at_s) > _FORGET_S]:
            del self._gateways[gateway]
        self._others = totals
        return frozenset(moved)


def _add(totals: dict[str, ReplicaLoad], items: Iterable[tuple[str, ReplicaLoad]]) -> None:
    for replica, load in items:
        known = totals.get(replica)
        totals[replica] = (
            load
            if known is None
            else ReplicaLoad(known.in_flight + load.in_flight, max(known.moved_at_s, load.moved_at_s))
        )
