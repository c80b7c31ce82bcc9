"""From all targets to those that this collector scrapes, each begun where the collector before it stopped.

What is another's by now is given up at once; what is new is taken when its last stored reading has been read, so that
no counter is counted twice and none is lost. That holds for a target of a collector that died, for one of a collector
that joined or left, and for this one's own targets after a restart.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog
from redis.exceptions import ResponseError

from metrics_collector.core.schema import Reading
from metrics_collector.core.targets import RoleKey, Target
from metrics_collector.shell.archive import Archive
from metrics_collector.shell.collector_lease import CollectorLease
from trimtab.rpc.run import ServiceContext
from trimtab.store.errors import StoreUnavailable

log = structlog.get_logger(__name__)

SEED_AGE_S = 60.0
"""An older reading is not used: the server may have restarted since."""

Seeds = Mapping[str, tuple[float, Reading]]
"""Target → when its page was read last, on the store's clock, and the page's row."""


class TargetAssignment:
    """``update`` with every change of targets; ``settled`` when members changed (``CollectorLease.on_settled``).

    ``apply`` gets the targets to scrape from now on, and the seeds of those that are new, for ``SeriesTable.seed``.
    """

    def __init__(
        self,
        membership: CollectorLease,
        archive: Archive,
        *,
        apply: Callable[[Mapping[str, Target], Seeds], None],
        now_s: Callable[[], float],
    ) -> None:
        self._membership = membership
        self._archive = archive
        self._apply = apply
        self._now_s = now_s
        self._changed = asyncio.Event()
        self.everything: Mapping[str, Target] = {}
        self._own: frozenset[str] = frozenset()
        self._applied: Mapping[str, Target] = {}
        self._elsewhere: dict[RoleKey, frozenset[str]] = {}

    def elsewhere(self) -> Mapping[RoleKey, frozenset[str]]:
        """The replicas that other collectors scrape, by role."""
        return self._elsewhere

    def update(self, everything: Mapping[str, Target]) -> None:
        """The targets of all sources, of every collector, by id. Those that are gone are given up before it returns."""
        self.everything = everything
        self.settled()

    def settled(self) -> None:
        """Give up what is not this collector's, and take what is, soon."""
        share = self._share()
        kept = self._own & share
        self._own = kept
        # Also for those that stay: what their source says of them may be new.
        own = {target_id: self.everything[target_id] for target_id in sorted(kept)}
        if own != self._applied:
            self._applied = own
            self._apply(own, {})
        elsewhere: dict[RoleKey, set[str]] = {}
        for target_id, target in self.everything.items():
            if target_id not in share and target.placed:
                elsewhere.setdefault(target.key, set()).add(target.replica)
        self._elsewhere = {key: frozenset(names) for key, names in elsewhere.items()}
        if share - kept:
            self._changed.set()

    def _share(self) -> frozenset[str]:
        """This collector's servers, and the exporters of the nodes that one of these servers runs on."""
        servers = [target_id for target_id, target in self.everything.items() if not target.exporter]
        share = self._membership.share(servers)
        exporters = {target_id: target for target_id, target in self.everything.items() if target.exporter}
        if not exporters:
            return share
        nodes = {(self.everything[target_id].cluster, self.everything[target_id].node) for target_id in share}
        return share | {target_id for target_id, one in exporters.items() if (one.cluster, one.node) in nodes}

    async def run(self, context: ServiceContext) -> None:
        """Take what is new, until the service stops."""
        while await _either(self._changed, context):
            self._changed.clear()
            await self.take()

    async def take(self) -> None:
        """Take what is this collector's and not scraped yet. A store that is away has no seeds to give."""
        new = self._share() - self._own
        if not new:
            return
        wanted: dict[RoleKey, list[str]] = {}
        for target_id in sorted(new):
            target = self.everything[target_id]
            if target.placed:
                wanted.setdefault(target.key, []).append(target.replica)
        try:
            found = await self._archive.last_readings(wanted)
        except (StoreUnavailable, ResponseError) as error:
            log.warning("targets are begun without their last readings", targets=len(new), error=str(error))
            found = {}
        oldest_s = self._now_s() - SEED_AGE_S
        # Members and targets may have changed while the store was read.
        self._own |= new & self._share()
        own = self._applied = {target_id: self.everything[target_id] for target_id in sorted(self._own)}
        seeds = {
            target_id: found[target.replica]
            for target_id, target in own.items()
            if target_id in new and target.replica in found and found[target.replica][0] > oldest_s
        }
        self._apply(own, seeds)


async def _either(changed: asyncio.Event, context: ServiceContext) -> bool:
    """Whether ``changed`` came before the stop."""
    waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(context.stopping.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not context.stopping.is_set()
