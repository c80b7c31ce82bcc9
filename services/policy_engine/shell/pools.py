"""Runs pools: lays them out, feeds the arbiter, writes what it decides, publishes it, and sees what came of it.

A decision and the new desired state are in the store before the actuator hears of them; it is told again until it has
acknowledged that revision, after its restarts and by new leaders too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import structlog

from policy_engine.core.birth import BirthInput, lay_out
from policy_engine.core.overlay import OverlayError, OverlayReplica, Resident, make_overlay, renamed
from policy_engine.core.pool import PoolInput, PoolResult, PoolState, decide_pool
from policy_engine.core.vocabulary import MemberKey
from policy_engine.shell.convert import overlay_from_proto, replica_facts, with_in_flight
from policy_engine.shell.links import Fleet
from policy_engine.shell.memory import Memory
from policy_engine.shell.poolstate import awake_in_cluster, desired_state, residents, same_wish
from policy_engine.shell.publish import Publisher
from policy_engine.shell.records import DecisionLog
from policy_engine.shell.turn import Turn, Writer
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.config.resources import Pool, ServicePolicy

log = structlog.get_logger(__name__)

__all__ = ["PoolReport", "PoolRunner"]


@dataclass(frozen=True)
class PoolReport:
    """A pool at its last turn, for status and metrics. `result` is None while it is not laid out."""

    pool: Pool
    result: PoolResult | None
    desired: actuator_pb2.PoolState | None
    holding: str
    operation_id: str = ""


def _releases(result: PoolResult) -> bool:
    """Whether capacity is to be taken from somebody."""
    transition = result.draft.transition if result.draft is not None else None
    return transition is not None and bool(transition.releases)


@dataclass
class _Layout:
    """The overlay that the resources ask for, made once per version of them and of who lives there already."""

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

    async def turn(self, pool: Pool, turn: Turn, memory: Memory) -> None:
        """One pool's turn. Raises FencedOff and StoreUnavailable."""
        if memory.why_pool_held(pool.name):
            await self._hold(pool, turn, memory)
            return
        policies = turn.snapshot.members_of(pool)
        layout = self._layout(pool, policies, turn, memory)
        unreachable = self.unreachable(pool) or layout.error
        if turn.token is not None and not unreachable and not pool.metadata.paused:
            await self._lay_out(pool, policies, layout, turn, memory)
        desired = memory.desired.get(pool.name)
        if desired is None:
            paused = "paused by an operator" if pool.metadata.paused else "not laid out yet"
            self.reports[pool.name] = PoolReport(pool, None, None, unreachable or paused)
            return
        link = self.fleet.links.get(pool.spec.cluster)
        if turn.token is not None and link is not None and link.reachable:
            await self.publisher.follow(pool, link, turn, memory)
            desired = memory.desired[pool.name]
        given = self.gather(pool, policies, turn, memory, desired, unreachable)
        result = decide_pool(given)
        if turn.token is not None and link is not None and link.reachable and _releases(result):
            # Who has the fewest requests in flight is asked when it matters.
            given = replace(given, replicas=with_in_flight(given.replicas, await link.in_flight(pool.name)))
            result = decide_pool(given)
        holding = self.publisher.refusal(desired) or result.holding
        operations = ", ".join(item.operation for item in given.operations)
        self.reports[pool.name] = PoolReport(pool, result, desired, holding, operations)
        if turn.token is None:
            return
        await self._commit(given, result, turn, memory)
        if link is not None and link.reachable:
            await self.publisher.publish(pool, link, turn, memory)
            if result.preempt:
                await self.publisher.preempt(link, result.preempt_operation, result.preempt)

    async def _hold(self, pool: Pool, turn: Turn, memory: Memory) -> None:
        """A pool of which a record cannot be read: nothing is decided, its last desired state goes on."""
        desired = memory.desired.get(pool.name)
        self.reports[pool.name] = PoolReport(pool, None, desired, memory.why_pool_held(pool.name))
        link = self.fleet.links.get(pool.spec.cluster)
        if turn.token is not None and desired is not None and link is not None and link.reachable:
            await self.publisher.publish(pool, link, turn, memory)

    def forget(self, names: set[str]) -> None:
        """Drop reports of pools that are gone."""
        for name in sorted(set(self.reports) - names):
            del self.reports[name]
            self._layouts.pop(name, None)

    def _layout(self, pool: Pool, policies: tuple[ServicePolicy, ...], turn: Turn, memory: Memory) -> _Layout:
        etags = turn.snapshot.etags(pool, policies)
        desired = memory.desired.get(pool.name)
        laid_out = overlay_from_proto(desired.overlay) if desired is not None else ()
        living = residents(self.fleet.links.get(pool.spec.cluster), pool, laid_out)
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

    def unreachable(self, pool: Pool) -> str:
        """Why the pool's cluster cannot be seen; empty when it can."""
        link = self.fleet.links.get(pool.spec.cluster)
        if link is None:
            return f"no actuator is configured for cluster {pool.spec.cluster}"
        return "" if link.reachable else link.detail

    async def _lay_out(
        self, pool: Pool, policies: tuple[ServicePolicy, ...], layout: _Layout, turn: Turn, memory: Memory
    ) -> None:
        """Birth, a new layout, or new bounds of a pool that stays laid out as it is."""
        desired = memory.desired.get(pool.name)
        known = overlay_from_proto(desired.overlay) if desired is not None else ()
        link = self.fleet.links[pool.spec.cluster]
        if desired is not None and known == layout.overlay:
            wish = desired_state(pool, policies, layout.overlay, tuple(desired.awake), desired.decision_id)
            if not same_wish(desired, wish):
                wish.state_revision = desired.state_revision + 1
                await self.writer.commit(turn, commands=[memory.desired_command(wish)])
                memory.desired[pool.name] = wish
            return
        awake = tuple(desired.awake) if desired is not None else awake_in_cluster(link, pool.name)
        awake = renamed(known, layout.overlay, awake)
        given = BirthInput(pool, policies, known, awake, layout.residents)
        try:
            birth = lay_out(given)
        except OverlayError as error:
            layout.error = str(error)
            log.warning("a pool cannot be laid out", pool=pool.name, error=str(error))
            return
        record = self.writer.record(
            birth.draft, given, turn, revisions=self.fleet.revisions(), etags=turn.snapshot.etags(pool, policies)
        )
        wish = desired_state(pool, policies, birth.overlay, birth.awake, record.decision_id)
        wish.state_revision = desired.state_revision + 1 if desired is not None else 1
        records = [record, *self.publisher.superseded(pool.name, turn)]
        await self.writer.commit(turn, records=records, commands=[memory.desired_command(wish)])
        memory.desired[pool.name] = wish
        log.info("pool laid out", pool=pool.name, decision=record.decision_id, reason=record.reason)

    def gather(
        self,
        pool: Pool,
        policies: tuple[ServicePolicy, ...],
        turn: Turn,
        memory: Memory,
        desired: actuator_pb2.PoolState,
        unreachable: str,
    ) -> PoolInput:
        """The core's input for this pool now."""
        link = self.fleet.links.get(pool.spec.cluster)
        replicas = [item for item in link.replicas.values() if item.pool == pool.name] if link is not None else []
        unfinished = link.unfinished_of(pool.name) if link is not None else []
        # The actuator takes a pre-warming back when a newer state needs its GPUs, so it keeps nobody from them.
        prewarms = [item for item in unfinished if item.kind == actuator_pb2.OPERATION_KIND_PREWARM]
        boots = {s.replica for item in prewarms for s in item.steps if s.kind == actuator_pb2.STEP_KIND_CREATE}
        members = [MemberKey(member.service, member.role) for member in pool.spec.members]
        return PoolInput(
            now_s=turn.now_s,
            pool=pool,
            policies=policies,
            overlay=overlay_from_proto(desired.overlay),
            awake=tuple(sorted(desired.awake)),
            replicas=replica_facts(replicas, yielding=frozenset(boots)),
            views=tuple((key, turn.observed.roles[key]) for key in sorted(members) if key in turn.observed.roles),
            fronts=tuple(
                (service, turn.observed.fronts[service])
                for service in sorted({key.service for key in members})
                if service in turn.observed.fronts
            ),
            state=memory.pools.get(pool.name, PoolState()),
            unreachable=unreachable,
            operations=self.publisher.under_way(pool.name),
            busy=tuple(sorted({step.replica for item in unfinished if item not in prewarms for step in item.steps})),
        )

    async def _commit(self, given: PoolInput, result: PoolResult, turn: Turn, memory: Memory) -> None:
        name = given.pool.name
        records: list[decision_pb2.Decision] = []
        commands = []
        wish: actuator_pb2.PoolState | None = None
        if result.draft is not None:
            record = self.writer.record(
                result.draft,
                given,
                turn,
                revisions=self.fleet.revisions(),
                etags=turn.snapshot.etags(given.pool, given.policies),
            )
            records.append(record)
            log.info("decided", pool=name, decision=record.decision_id, reason=record.reason)
            if result.awake != given.awake:
                desired = memory.desired[name]
                wish = desired_state(given.pool, given.policies, given.overlay, result.awake, record.decision_id)
                wish.state_revision = desired.state_revision + 1
                commands.append(memory.desired_command(wish))
        if result.state != memory.pools.get(name):
            commands.append(memory.pool_state_command(name, result.state))
        if records or commands:
            await self.writer.commit(turn, records=records, commands=commands)
        memory.pools[name] = result.state
        if wish is not None:
            memory.desired[name] = wish
