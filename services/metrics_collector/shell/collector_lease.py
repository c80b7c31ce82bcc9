"""This collector's lease among those that share the store, and what they exchange.

Twice an interval one pipeline renews the lease, reads those of all collectors, and exchanges what gateways have
reported. In the middle of each interval, at a moment that all compute alike, the members are settled
(``metrics_collector.core.sharing``): by then the round that ended with the interval is written, so that a collector
that takes a target over finds its last sample.

When the store is away, every collector keeps its share: none can write anything, and a lease that ends then is no sign
that its holder died. When it is back, shares stay for as long as a new member waits, until all have renewed their
leases.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import structlog

from metrics_collector.core.sharing import JOIN_INTERVALS, Member, lease_s, parse_members, share, sharers
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.errors import StartupError
from trimtab.rpc.run import ServiceContext
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry, StoreUnavailable

log = structlog.get_logger(__name__)

_EXPIRE_S = 600

# KEYS: members. ARGV: name, incarnation, lease ms, interval ms, sources, ms after which the dead are forgotten.
# A lease that ended begins anew; one that another process holds under this name is left alone.
_RENEW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local joined = now
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored then
  local incarnation, since, upto = string.match(stored, '^(%S+) (%d+) (%d+) ')
  if incarnation and tonumber(upto) > now then
    if incarnation ~= ARGV[2] then return {'taken', upto} end
    joined = tonumber(since)
  end
end
local all = redis.call('HGETALL', KEYS[1])
for index = 1, #all, 2 do
  local upto = string.match(all[index + 1], '^%S+ %d+ (%d+) ')
  if not upto or tonumber(upto) < now - tonumber(ARGV[6]) then redis.call('HDEL', KEYS[1], all[index]) end
end
local value = string.format('%s %.0f %.0f %s %s', ARGV[2], joined, now + tonumber(ARGV[3]), ARGV[4], ARGV[5])
redis.call('HSET', KEYS[1], ARGV[1], value)
return redis.call('HGETALL', KEYS[1])
"""

# KEYS: members. ARGV: name, incarnation.
_LEAVE = """
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored and string.match(stored, '^(%S+) ') == ARGV[2] then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
"""


class CollectorLease:
    """One collector among those that share targets.

    ``join`` before anything is scraped, then ``run``; ``leave`` at an orderly stop. ``on_settled`` is called when the
    share may have changed. ``demand`` gives what gateways have reported to this collector, and ``on_demand`` gets what
    they have reported to the others.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        sources: str,
        interval_s: float,
        now_s: Callable[[], float],
        on_settled: Callable[[], None] = lambda: None,
        demand: Callable[[], pb.CollectorDemand] | None = None,
        on_demand: Callable[[Sequence[pb.CollectorDemand]], None] = lambda _found: None,
    ) -> None:
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self._store = store
        self._sources = sources
        self._interval_s = interval_s
        self._now_s = now_s
        self._on_settled = on_settled
        self._demand = demand
        self._on_demand = on_demand
        self._members: tuple[Member, ...] = ()
        self._sharers: tuple[str, ...] = ()
        self._store_lost = False
        self._keep_until_s = 0.0
        self._replaced = False

    @property
    def sharers(self) -> tuple[str, ...]:
        """The names of those that share, as settled last, in order."""
        return self._sharers

    @property
    def members(self) -> tuple[Member, ...]:
        """Every collector of the store that was read last, of whatever sources."""
        return self._members

    @property
    def collectors(self) -> int:
        """How many collectors write to the store now; at least 1."""
        return max(1, sum(member.lives(self._now_s()) for member in self._members))

    def may_report(self) -> bool:
        """Whether the lease holds right now; without it another one may have taken the targets over."""
        own = self._own()
        return own is not None and not self._replaced and own.lives(self._now_s())

    def share(self, target_ids: Collection[str]) -> frozenset[str]:
        """Those of ``target_ids`` that are this collector's to scrape."""
        return share(target_ids, self._sharers, name=self.name)

    async def join(self, context: ServiceContext) -> None:
        """Take the lease.

        Waits for the end of one that a former process left under this name. Raises ``StartupError`` when that is
        renewed meanwhile, since its holder is then alive; ``StoreUnavailable``.
        """
        upto_ms: int | None = None
        give_up_s = self._now_s() + lease_s(self._interval_s) + 1.0
        while not await self._renew():
            own = await self._stored_until_ms()
            if upto_ms is not None and own is not None and own > upto_ms:
                raise StartupError(
                    f"another collector named {self.name!r} uses this store: give each its own --collector-name"
                )
            upto_ms = own if upto_ms is None else upto_ms
            if self._now_s() > give_up_s or await context.pause(min(0.2, self._interval_s / 2)):
                raise StoreUnavailable(f"stopped while waiting for the lease of collector {self.name!r}")
        others = [member for member in self._members if member.name != self.name and member.lives(self._now_s())]
        if not any(member.sources == self._sources for member in others):
            self._settle(self._now_s())

    async def run(self, context: ServiceContext) -> None:
        """Renew twice an interval, at multiples of half of it, and settle in the middle, until the service stops."""
        half_s = self._interval_s / 2
        while True:
            number = int(self._now_s() // half_s) + 1
            if await context.pause(number * half_s - self._now_s()):
                return
            await self.beat(settle_at_s=number * half_s if number % 2 else None)

    async def beat(self, *, settle_at_s: float | None = None) -> None:
        """One renewal; with ``settle_at_s`` the members at that moment are settled. Raises nothing for the store."""
        before = self._own()
        try:
            renewed = await self._renew()
        except StoreUnavailable as error:
            if not self._store_lost:
                log.warning("store lost, the share of targets stays as it is", error=str(error))
            self._store_lost = True
            return
        if not renewed:
            if not self._replaced:
                log.error("another collector has taken this one's name, nothing is reported", collector=self.name)
            self._replaced = True
            self._members = ()
        else:
            self._replaced = False
            own = self._own()
            if self._store_lost and before is not None and own is not None and own.joined_at_s > before.joined_at_s:
                self._keep_until_s = own.joined_at_s + JOIN_INTERVALS * self._interval_s
        self._store_lost = False
        if settle_at_s is not None and settle_at_s >= self._keep_until_s:
            self._settle(settle_at_s)

    async def leave(self) -> None:
        """End the lease; the others take the targets over at once. Raises nothing: the lease ends by itself."""
        try:
            await cast(
                "Any",
                self._store.redis.eval(_LEAVE, 1, keys.collector_members(), self.name, self.incarnation),
            )
        except StoreUnavailable as error:
            log.info("the lease was not given back", error=str(error))

    def _settle(self, at_s: float) -> None:
        found = sharers(self._members, sources=self._sources, at_s=at_s)
        if found != self._sharers:
            log.info("targets are shared anew", collectors=list(found), before=list(self._sharers))
        self._sharers = found
        self._on_settled()

    def _own(self) -> Member | None:
        return next((member for member in self._members if member.name == self.name), None)

    async def _renew(self) -> bool:
        """Whether the lease is this process's own; with it come those of all collectors, and their demand."""
        pipeline = self._store.redis.pipeline(transaction=False)
        pipeline.eval(
            _RENEW,
            1,
            keys.collector_members(),
            self.name,
            self.incarnation,
            str(round(lease_s(self._interval_s) * 1000)),
            str(round(self._interval_s * 1000)),
            self._sources,
            str(_EXPIRE_S * 1000),
        )
        if self._demand is not None and self.collectors > 1:
            pipeline.hset(keys.demand(), self.name, self._demand().SerializeToString())
            pipeline.expire(keys.demand(), _EXPIRE_S)
        pipeline.hgetall(keys.demand())
        replies = await pipeline.execute()
        lease, demand = replies[0], cast("dict[bytes, bytes]", replies[-1])
        if lease[0] == b"taken":
            return False
        self._members = parse_members(dict(zip(lease[::2], lease[1::2], strict=True)))
        self._on_demand(self._others(demand))
        return True

    def _others(self, reply: Mapping[bytes, bytes]) -> list[pb.CollectorDemand]:
        living = {member.name for member in self._members if member.lives(self._now_s())} - {self.name}
        found: list[pb.CollectorDemand] = []
        for name in sorted(living):
            data = reply.get(name.encode())
            if data is None:
                continue
            try:
                found.append(decode(pb.CollectorDemand, data, place=f"{keys.demand()} {name}"))
            except CorruptEntry as error:
                log.warning("demand in the store is unreadable", error=str(error))
        return found

    async def _stored_until_ms(self) -> int | None:
        stored = await cast("Any", self._store.redis.hget(keys.collector_members(), self.name))
        members = parse_members({self.name.encode(): stored}) if stored is not None else ()
        return round(members[0].until_s * 1000) if members else None
