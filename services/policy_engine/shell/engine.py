"""The engine's loop: leadership, cycles, and what a cycle reads from the store and the actuators.

The leader decides and writes; a follower makes the same cycles on the stored state and writes nothing, so that its
status is fresh and it can take over. Without the store nothing is decided: actuators and pre-scheduler keep the last
desired state.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

import structlog

from policy_engine.core.shared.retention import RetentionLimits
from policy_engine.core.shared.vocabulary import MemberKey
from policy_engine.shell.actuator_clients import Fleet
from policy_engine.shell.catalog import Catalog, Snapshot
from policy_engine.shell.cycle import Cycle, Writer
from policy_engine.shell.engine_state import EngineState, load_engine_state
from policy_engine.shell.metrics import EngineMetrics
from policy_engine.shell.observe import Observed, observe
from policy_engine.shell.pools import PoolRunner
from policy_engine.shell.publish import Publisher
from policy_engine.shell.records import Command, DecisionLog
from policy_engine.shell.scaled import ScaledRunner
from policy_engine.shell.settings import EngineSettings
from trimtab.config.resources import POOL, SERVICE_POLICY, Pool, ServicePolicy
from trimtab.config.specs import PolicyKind
from trimtab.rpc.clients import ClientTls
from trimtab.rpc.run import ServiceContext
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.clock import StoreClock
from trimtab.store.errors import CorruptEntry, FencedOff, StoreUnavailable
from trimtab.store.lease import Lease, StoreLease, fenced_write
from trimtab.store.record_hash import RefusedLog

log = structlog.get_logger(__name__)

# Between two cycles at least: operations that end in a row make one early cycle, not many.
MIN_PAUSE_S = 0.02
# While new windows start the cycles, one that is due by time alone waits this share of a tick longer: else it would run
# just before the next window. After so many ticks without a window, time alone starts them again.
WINDOW_GRACE = 0.25
WINDOWS_GONE = 3.0


class Engine:
    """One process of the policy engine."""

    def __init__(self, settings: EngineSettings, context: ServiceContext, store: Store) -> None:
        self.settings = settings
        self.context = context
        self.store = store
        self.clock = StoreClock(store)
        self.lease: Lease = StoreLease(
            store, keys.POLICY_ENGINE, f"{context.name}-{uuid.uuid4().hex[:12]}", settings.lease_ttl_s
        )
        self.log = DecisionLog(
            store,
            limits=RetentionLimits(per_subject=settings.decisions_kept, in_all=settings.decisions_kept_in_all),
            stopping=context.stopping,
            now=self.clock.now_s,
        )
        self.catalog = Catalog(store)
        # Starts the next cycle at once: new windows, the end of an operation (its pool is free for a transition), the
        # lease, an actuator that answers again.
        self._early = asyncio.Event()
        self._windows_at_s = float("-inf")
        self.fleet = Fleet(
            settings.actuators,
            tls=ClientTls.from_settings(settings),
            lost_after_s=settings.actuator_lost_after_s,
            on_news=self._early.set,
        )
        self.metrics = EngineMetrics(context.registry)
        self.writer = Writer(store, self.log, on_record=self.metrics.count)
        self.pools = PoolRunner(
            self.fleet, self.writer, self.log, Publisher(self.writer, self.log, settings.publish_expiry_s)
        )
        self.scaled = ScaledRunner(store, self.fleet, self.writer, self.log, settings.publish_expiry_s)
        self.memory = EngineState()
        self._refused = RefusedLog()
        # Cycles and changes of resources exclude each other: a change is never seen by half of a cycle.
        self.lock = asyncio.Lock()
        self.last_cycle_s = 0.0
        self.last_observed = Observed()
        self.known_token = 0
        self._loaded_token: int | None = None
        self._scaled_at_s = float("-inf")
        self._complained = ""

    async def run(self) -> None:
        """Make a cycle whenever windows were written or something else is new, and at a steady pace otherwise."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self.context.stopping.is_set():
            self._early.clear()
            started, began_s = time.perf_counter(), loop.time()
            await self._guarded_cycle()
            self.metrics.cycle_s.observe(time.perf_counter() - started)
            tick_s = self.settings.tick_interval_s
            if self._windows_at_s > began_s - WINDOWS_GONE * tick_s:
                due = max(self._windows_at_s + (1 + WINDOW_GRACE) * tick_s, began_s + tick_s)
            elif loop.time() >= due:
                due = max(due + tick_s, loop.time())
            early = asyncio.ensure_future(self._early.wait())
            try:
                if await self.context.pause(MIN_PAUSE_S):
                    return
                await asyncio.wait({early}, timeout=max(0.0, due - loop.time()))
            finally:
                early.cancel()

    def windows_written(self) -> None:
        """A collector has written a round of windows."""
        self._windows_at_s = asyncio.get_running_loop().time()
        self._early.set()

    @property
    def leading(self) -> bool:
        """Whether this process leads, and has taken up the stored state."""
        return self.lease.held and self._loaded_token == self.lease.token

    def lease_changed(self, token: int | None) -> None:
        """Leadership came or went."""
        log.debug("lease changed", token=token)
        self._early.set()

    async def _guarded_cycle(self) -> None:
        try:
            async with self.lock:
                await self.cycle()
        except StoreUnavailable as error:
            # What was written may or may not be there: the next cycle reads it again.
            self._drop("store", str(error))
        except FencedOff as error:
            self._drop("fenced off", str(error))
            await self._step_down(error)
        except CorruptEntry as error:
            self._drop("corrupt", str(error))
        else:
            if self._complained:
                log.info("cycles go on")
            self._complained = ""

    async def _step_down(self, error: FencedOff) -> None:
        """Give the lease up. If others have seen a token that the store has lost, the store's counter is raised first,
        so that the next token is higher."""
        try:
            with contextlib.suppress(FencedOff):  # the store knows of a newer leader already
                await fenced_write(self.store, keys.POLICY_ENGINE, error.current_token, [])
            await self.lease.release()
        except StoreUnavailable as unavailable:
            log.warning("lease not released, it runs out by itself", error=str(unavailable))

    def _drop(self, reason: str, detail: str) -> None:
        self._loaded_token = None
        self.metrics.failed_cycles.labels(reason).inc()
        if self._complained != reason:
            log.warning("cycle ended early, holding", reason=reason, error=detail)
        self._complained = reason

    async def cycle(self) -> None:
        """One cycle; the caller holds the lock."""
        token = self.lease.token
        self.metrics.leader.set(1 if token is not None else 0)
        if token is None or token != self._loaded_token:
            await self._load(token)
        else:
            await self.memory.look_again(self.store)
        self.known_token = token if token is not None else await self._leader_token()
        snapshot = await self.catalog.refresh()
        self.log.set_live(snapshot.names, leading=token is not None)
        cycle = await self.look(snapshot, token)
        if token is not None:
            await self._forget_deleted(cycle)
        pools = [snapshot.pools[name] for name in sorted(snapshot.pools)]
        await self._pool_cycles(pools, cycle)
        self.pools.forget(set(snapshot.pools))
        services = self.scaled_services(snapshot)
        self.scaled.forget({policy.name for policy in services})
        if cycle.now_s - self._scaled_at_s >= self.settings.scaled_interval_s - 0.05 or cycle.now_s < self._scaled_at_s:
            await self.scaled.cycle(services, cycle, self.memory)
            self._scaled_at_s = cycle.now_s
        self.last_cycle_s, self.last_observed = cycle.now_s, cycle.observed
        refused = [*self.memory.refused(), *self.scaled.refused_results.values()]
        self._refused.show(refused)
        self.metrics.show(self.pools.reports.values(), self.scaled.reports.values(), refused)

    async def _pool_cycles(self, pools: list[Pool], cycle: Cycle) -> None:
        """Side by side: an actuator that hangs delays its own pools only. The first failure is raised at the end."""
        results = await asyncio.gather(
            *(self.pools.cycle(pool, cycle, self.memory) for pool in pools), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _load(self, token: int | None) -> None:
        """Read the stored state. Desired states that were published and the store has lost are written again."""
        before, self.memory = self.memory, await load_engine_state(self.store)
        if token is None:
            self._loaded_token = None
            return
        await self.log.load()
        lost: list[Command] = []
        for name, desired in sorted(before.desired.items()):
            stored = self.memory.desired.get(name)
            if stored is not None and stored.state_revision < desired.state_revision:
                log.warning("the store lost a pool's desired state, keeping the newer one", pool=name)
                self.memory.desired[name] = desired
                lost.append(self.memory.desired_command(desired))
        if lost:
            await fenced_write(self.store, keys.POLICY_ENGINE, token, lost)
        self._loaded_token = token
        self._scaled_at_s = float("-inf")
        log.info("leading", token=token, pools=len(self.memory.desired), services=len(self.memory.scaled))

    async def look(self, snapshot: Snapshot, token: int | None) -> Cycle:
        """Read everything that a cycle decides on."""
        routable: dict[MemberKey, list[str]] = {}
        for link in self.fleet.links.values():
            for replica in link.replicas.values():
                if replica.routable:
                    routable.setdefault(MemberKey(replica.service, replica.role), []).append(replica.replica)
        members = [
            MemberKey(policy.name, spec.role) for policy in snapshot.policies.values() for spec in policy.spec.roles
        ]
        wanted = {key: routable.get(key, []) for key in members}
        observed = await observe(self.store, wanted)
        return Cycle(now_s=self.clock.now_s(), token=token, snapshot=snapshot, observed=observed)

    async def _leader_token(self) -> int:
        """The newest token handed out, as a follower sees it."""
        return int(await self.store.redis.get(keys.lease_token(keys.POLICY_ENGINE)) or 0)

    @staticmethod
    def scaled_services(snapshot: Snapshot) -> list[ServicePolicy]:
        """Policies of services that are scaled, by name."""
        return [
            policy
            for _, policy in sorted(snapshot.policies.items())
            if policy.spec.kind == PolicyKind.SCALED and snapshot.pool_of(policy.name) is None
        ]

    async def _forget_deleted(self, cycle: Cycle) -> None:
        """A deleted resource is not managed any more; its replicas stay as they are."""
        commands = []
        for name in sorted(self.memory.pool_names()):
            if name not in cycle.snapshot.messages_of(POOL):
                commands += self.memory.forget_pool(name)
        scaled = {policy.name for policy in self.scaled_services(cycle.snapshot)}
        unreadable = cycle.snapshot.messages_of(SERVICE_POLICY).keys() - cycle.snapshot.policies.keys()
        for name in sorted(self.memory.service_names()):
            if name not in scaled and name not in unreadable:
                commands += self.memory.forget_scaled(name)
        if commands:
            await self.writer.commit(cycle, commands=commands)
