"""Runs pools: lays them out, calls the arbiter, writes its decisions, publishes them and follows their operations.

A decision and the new desired state are in the store before they are sent to the actuator. They are sent again until
the actuator has acknowledged that revision, after its restarts and by new leaders too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import structlog

from policy_engine.core.pool.cycle import PoolPicture, needs_counts, next_desired, pool_input, with_counts
from policy_engine.core.pool.decide import PoolInput, PoolResult, PoolState, decide_pool
from policy_engine.core.pool.desired import desired_pool, rebound, residents
from policy_engine.core.pool.gpu_layout import OverlayError, OverlayReplica, Resident, make_overlay
from policy_engine.core.pool.initial_layout import birth_input, lay_out
from policy_engine.shell.actuator_clients import Fleet
from policy_engine.shell.cycle import Cycle, Writer
from policy_engine.shell.engine_state import EngineState
from policy_engine.shell.publish import Publisher
from policy_engine.shell.records import DecisionLog
from trimtab.api.policy.v1 import decision_pb2
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica

log = structlog.get_logger(__name__)

__all__ = ["PoolReport", "PoolRunner"]


@dataclass(frozen=True)
class PoolReport:
    """A pool at its last cycle, for status and metrics. `result` is None while it is not laid out."""

    pool: Pool
    result: PoolResult | None
    desired: DesiredPool | None
    holding: str
    operation_id: str = ""


@dataclass
class _Layout:
    """The overlay of the resources, made once per version of them and of the replicas that exist there."""

    etags: tuple[tuple[str, str], ...] = ()
    residents: tuple[Resident, ...] = ()
    overlay: tuple[OverlayReplica, ...] = ()
    error: str = ""


@dataclass
class PoolRunner:
    """Every pool of this engine."""

    fleet: Fleet
    writer: Writer
    log: DecisionLog
    publisher: Publisher
    reports: dict[str, PoolReport] = field(default_factory=dict)
    _layouts: dict[str, _Layout] = field(default_factory=dict)

    async def cycle(self, pool: Pool, cycle: Cycle, memory: EngineState) -> None:
        """One pool's cycle. Raises FencedOff and StoreUnavailable."""
        if memory.why_pool_held(pool.name):
            await self._hold(pool, cycle, memory)
            return
        policies = cycle.snapshot.members_of(pool)
        layout = self._layout(pool, policies, cycle, memory)
        unreachable = self.unreachable(pool) or layout.error
        if cycle.token is not None and not unreachable and not pool.metadata.paused:
            await self._lay_out(pool, policies, layout, cycle, memory)
        desired = memory.desired.get(pool.name)
        if desired is None:
            paused = "paused by an operator" if pool.metadata.paused else "not laid out yet"
            self.reports[pool.name] = PoolReport(pool, None, None, unreachable or paused)
            return
        link = self.fleet.links.get(pool.spec.cluster)
        if cycle.token is not None and link is not None and link.reachable:
            await self.publisher.follow(pool, link, cycle, memory)
            desired = memory.desired[pool.name]
        given = self.gather(pool, policies, cycle, memory, unreachable)
        result = decide_pool(given)
        if cycle.token is not None and link is not None and link.reachable and needs_counts(result):
            given = with_counts(given, await link.in_flight(pool.name))
            result = decide_pool(given)
        holding = self.publisher.refusal(desired) or result.holding
        operations = ", ".join(item.operation for item in given.operations)
        self.reports[pool.name] = PoolReport(pool, result, desired, holding, operations)
        if cycle.token is None:
            return
        await self._commit(given, result, cycle, memory)
        if link is not None and link.reachable:
            await self.publisher.publish(pool, link, cycle, memory)
            await self.publisher.preempt(link, result)

    async def _hold(self, pool: Pool, cycle: Cycle, memory: EngineState) -> None:
        """Hold a pool of which a record cannot be read: nothing is decided, its last desired state stays in force."""
        desired = memory.desired.get(pool.name)
        self.reports[pool.name] = PoolReport(pool, None, desired, memory.why_pool_held(pool.name))
        link = self.fleet.links.get(pool.spec.cluster)
        if cycle.token is not None and desired is not None and link is not None and link.reachable:
            await self.publisher.publish(pool, link, cycle, memory)

    def forget(self, names: set[str]) -> None:
        """Drop reports of pools that are gone."""
        for name in sorted(set(self.reports) - names):
            del self.reports[name]
            self._layouts.pop(name, None)

    def _layout(self, pool: Pool, policies: tuple[ServicePolicy, ...], cycle: Cycle, memory: EngineState) -> _Layout:
        etags = cycle.snapshot.etags(pool, policies)
        desired = memory.desired.get(pool.name)
        living = residents(self.replicas(pool), pool, desired.overlay if desired is not None else ())
        known = self._layouts.get(pool.name)
        if known is not None and (known.etags, known.residents) == (etags, living):
            return known
        layout = _Layout(etags=etags, residents=living)
        try:
            layout.overlay = make_overlay(pool, {policy.name: policy for policy in policies}, living)
        except OverlayError as error:
            layout.error = str(error)
            log.warning("a pool cannot be laid out", pool=pool.name, error=str(error))
        self._layouts[pool.name] = layout
        return layout

    def replicas(self, pool: Pool) -> Collection[Replica]:
        """Replicas of the pool's cluster as its actuator last listed them."""
        link = self.fleet.links.get(pool.spec.cluster)
        return link.replicas.values() if link is not None else ()

    def unreachable(self, pool: Pool) -> str:
        """Why the pool's cluster cannot be seen; empty when it can."""
        link = self.fleet.links.get(pool.spec.cluster)
        if link is None:
            return f"no actuator is configured for cluster {pool.spec.cluster}"
        return "" if link.reachable else link.detail

    async def _lay_out(
        self, pool: Pool, policies: tuple[ServicePolicy, ...], layout: _Layout, cycle: Cycle, memory: EngineState
    ) -> None:
        """Lay a pool out for the first time or anew, or give its state new bounds where the layout stays."""
        desired = memory.desired.get(pool.name)
        if desired is not None and desired.overlay == layout.overlay:
            wish = rebound(desired, pool, policies)
            if wish is not None:
                await self.writer.commit(cycle, commands=[memory.desired_command(wish)])
                memory.desired[pool.name] = wish
            return
        given = birth_input(pool, policies, desired, self.replicas(pool), layout.overlay, layout.residents)
        try:
            birth = lay_out(given)
        except OverlayError as error:
            layout.error = str(error)
            log.warning("a pool cannot be laid out", pool=pool.name, error=str(error))
            return
        record = self.writer.record(
            birth.draft, given, cycle, revisions=self.fleet.revisions(), etags=cycle.snapshot.etags(pool, policies)
        )
        revision = desired.state_revision + 1 if desired is not None else 1
        wish = desired_pool(pool, policies, birth.overlay, birth.awake, record.decision_id, state_revision=revision)
        records = [record, *self.publisher.superseded(pool.name, cycle)]
        await self.writer.commit(cycle, records=records, commands=[memory.desired_command(wish)])
        memory.desired[pool.name] = wish
        log.info("pool laid out", pool=pool.name, decision=record.decision_id, reason=record.reason)

    def gather(
        self,
        pool: Pool,
        policies: tuple[ServicePolicy, ...],
        cycle: Cycle,
        memory: EngineState,
        unreachable: str,
    ) -> PoolInput:
        """The core's input for this pool, which is laid out, now."""
        link = self.fleet.links.get(pool.spec.cluster)
        picture = PoolPicture(
            now_s=cycle.now_s,
            pool=pool,
            policies=policies,
            desired=memory.desired[pool.name],
            replicas=self.replicas(pool),
            operations=link.operations.values() if link is not None else (),
            under_way=self.publisher.under_way(pool.name),
            views=cycle.observed.roles,
            fronts=cycle.observed.fronts,
            unreachable=unreachable,
        )
        return pool_input(picture, memory.pools.get(pool.name, PoolState()))

    async def _commit(self, given: PoolInput, result: PoolResult, cycle: Cycle, memory: EngineState) -> None:
        name = given.pool.name
        records: list[decision_pb2.Decision] = []
        commands = []
        wish: DesiredPool | None = None
        if result.draft is not None:
            record = self.writer.record(
                result.draft,
                given,
                cycle,
                revisions=self.fleet.revisions(),
                etags=cycle.snapshot.etags(given.pool, given.policies),
            )
            records.append(record)
            log.info("decided", pool=name, decision=record.decision_id, reason=record.reason)
            wish = next_desired(given, result, memory.desired[name], decision_id=record.decision_id)
            if wish is not None:
                commands.append(memory.desired_command(wish))
        if result.state != memory.pools.get(name):
            commands.append(memory.pool_state_command(name, result.state))
        if records or commands:
            await self.writer.commit(cycle, records=records, commands=commands)
        memory.pools[name] = result.state
        if wish is not None:
            memory.desired[name] = wish
