"""Sends a pool's desired state to its actuator until it is acknowledged, and records the outcome of each transition.

Several transitions may be under way in a large pool, each with a record and an operation of its own: the next one is
only decided once the actuator has given the last one its operation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import grpc
import structlog

from policy_engine.core.pool.cycle import preemption
from policy_engine.core.pool.decide import PoolResult, PoolState, UnderWay
from policy_engine.core.pool.transition_outcome import (
    Acknowledged,
    Refusal,
    Settled,
    awake_after,
    caught_up,
    must_publish,
    refused,
    settled,
    under_way,
)
from policy_engine.core.shared.draft import ReplicaChange, Transition
from policy_engine.core.shared.vocabulary import Rule
from policy_engine.shell.actuator_clients import CALL_TIMEOUT_S, ActuatorLink
from policy_engine.shell.cycle import Cycle, Writer
from policy_engine.shell.engine_state import EngineState
from policy_engine.shell.records import Command, DecisionLog, with_outcome
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.config.resources import Pool
from trimtab.domain.operation import Operation, OperationState
from trimtab.domain.pool import DesiredPool, desired_to_proto
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import Role
from trimtab.rpc.errors import describe, error_info, error_reason
from trimtab.store import keys
from trimtab.store.errors import FencedOff

log = structlog.get_logger(__name__)

# The actuator's reason while it cannot read one of the pool's records.
_HELD = "RECORD_REFUSED"

_OUTCOMES = {
    OperationState.SUCCEEDED: decision_pb2.OUTCOME_STATE_SUCCEEDED,
    OperationState.ROLLED_BACK: decision_pb2.OUTCOME_STATE_ROLLED_BACK,
    OperationState.CANCELLED: decision_pb2.OUTCOME_STATE_ROLLED_BACK,
    OperationState.FAILED: decision_pb2.OUTCOME_STATE_FAILED,
}


@dataclass
class Publisher:
    """What each actuator has acknowledged, and what is left to send. Kept in memory alone."""

    writer: Writer
    log: DecisionLog
    expiry_s: float
    _acknowledged: dict[str, Acknowledged] = field(default_factory=dict)
    _refusals: dict[str, Refusal] = field(default_factory=dict)
    _preempted: set[str] = field(default_factory=set)

    async def publish(self, pool: Pool, link: ActuatorLink, cycle: Cycle, memory: EngineState) -> None:
        """Send the desired state unless this actuator has acknowledged it since it came back."""
        desired = memory.desired[pool.name]
        mark = Acknowledged(desired.state_revision, link.generation, cycle.token or 0)
        acknowledged, refusal = self._acknowledged.get(pool.name), self._refusals.get(pool.name)
        if not must_publish(mark, acknowledged, refusal, now_s=cycle.now_s):
            return
        sent = replace(desired, replica_revision=link.revision, expires_s=cycle.now_s + self.expiry_s)
        request = actuator_pb2.ApplyPoolStateRequest(state=desired_to_proto(sent), fencing=cycle.fencing())
        try:
            response = await link.stub.ApplyPoolState(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            await self._refused(pool, link, cycle, memory, error)
            return
        self._acknowledged[pool.name] = mark
        self._refusals.pop(pool.name, None)
        await self._acknowledge(pool, link, cycle, memory, response)

    def refusal(self, desired: DesiredPool) -> str:
        """Why the actuator refused this state; empty when it did not, or has not answered yet."""
        found = self._refusals.get(desired.pool)
        return found.detail if found is not None and found.state_revision == desired.state_revision else ""

    async def _acknowledge(
        self,
        pool: Pool,
        link: ActuatorLink,
        cycle: Cycle,
        memory: EngineState,
        response: actuator_pb2.ApplyPoolStateResponse,
    ) -> None:
        record = self.log.get(memory.desired[pool.name].decision_id)
        if response.HasField("operation"):
            link.take_operation(response.operation)
        if record is None or record.outcome.state != decision_pb2.OUTCOME_STATE_PENDING:
            return
        if not response.HasField("operation"):
            done = with_outcome(
                record,
                decision_pb2.OUTCOME_STATE_SUCCEEDED,
                now_s=cycle.now_s,
                detail="the cluster was so already",
            )
            await self.writer.commit(cycle, records=[done])
        elif response.operation.operation_id not in record.outcome.operation_ids:
            known = with_outcome(
                record,
                decision_pb2.OUTCOME_STATE_PENDING,
                now_s=cycle.now_s,
                detail="under way",
                operation_ids=[response.operation.operation_id],
            )
            await self.writer.commit(cycle, records=[known])

    async def follow(self, pool: Pool, link: ActuatorLink, cycle: Cycle, memory: EngineState) -> None:
        """Write the outcome of each of the pool's decisions whose operation has ended, and settle failed ones."""
        for record in self.log.pending_of(pool.name):
            if not record.outcome.operation_ids:
                if record.decision_id != memory.desired[pool.name].decision_id:
                    await self.writer.commit(cycle, records=[_superseded(record, cycle, "by a newer state")])
                continue
            operation = await self._operation(link, record.outcome.operation_ids[-1])
            if operation is not None and operation.finished:
                await self._conclude(pool, link, cycle, memory, record, operation.state, operation.detail)

    def under_way(self, pool: str) -> tuple[UnderWay, ...]:
        """Transitions and first layouts under way; one that the actuator has not taken yet bars all others."""
        return tuple(_under_way(record) for record in self.log.pending_of(pool))

    async def preempt(self, link: ActuatorLink, result: PoolResult) -> None:
        """Cancel, once, the operation of a transition that is to give way; the watch brings its end."""
        reason = preemption(result, known=link.operations, cancelled=self._preempted)
        if not reason:
            return
        operation_id = result.preempt_operation
        self._preempted.add(operation_id)
        request = actuator_pb2.CancelOperationRequest(operation_id=operation_id, reason=reason)
        try:
            response = await link.stub.CancelOperation(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("transition not cancelled", operation=operation_id, error=describe(error))
            return
        link.take_operation(response.operation)
        log.info("transition pre-empted", operation=operation_id, reason=reason)

    def superseded(self, pool: str, cycle: Cycle) -> list[decision_pb2.Decision]:
        """The pool's records that are still open, with that outcome."""
        return [_superseded(record, cycle, "by a new layout") for record in self.log.pending_of(pool)]

    async def _conclude(
        self,
        pool: Pool,
        link: ActuatorLink,
        cycle: Cycle,
        memory: EngineState,
        record: decision_pb2.Decision,
        state: OperationState,
        detail: str,
    ) -> None:
        outcome = _OUTCOMES[state]
        done = with_outcome(record, outcome, now_s=cycle.now_s, detail=detail)
        failed = state is not OperationState.SUCCEEDED
        commands: list[Command] = []
        after: Settled | None = None
        if failed and record.kind == decision_pb2.DECISION_KIND_TRANSITION:
            transition = _transition(record)
            released = [change.replica for change in transition.releases]
            after = settled(
                memory.pools.get(pool.name, PoolState()),
                memory.desired[pool.name],
                pool,
                cycle.snapshot.members_of(pool),
                transition,
                awake_after(state, released=released, replicas=await self._listed(link, pool, state)),
                decision_id=record.decision_id,
                preempted=not self._preempted.isdisjoint(record.outcome.operation_ids),
                now_s=cycle.now_s,
            )
            self._preempted.difference_update(record.outcome.operation_ids)
            commands = [memory.desired_command(after.desired), memory.pool_state_command(pool.name, after.state)]
        await self.writer.commit(cycle, records=[done], commands=commands)
        if after is not None:
            memory.desired[pool.name] = after.desired
            memory.pools[pool.name] = after.state
        level = log.warning if failed else log.info
        level(
            "transition ended",
            pool=pool.name,
            decision=record.decision_id,
            outcome=decision_pb2.OutcomeState.Name(outcome),
            detail=detail,
        )

    @staticmethod
    async def _listed(link: ActuatorLink, pool: Pool, state: OperationState) -> Collection[Replica]:
        """The pool's replicas as the actuator lists them now; only a transition that failed has to be asked about."""
        if state is not OperationState.FAILED:
            return ()
        try:
            return await link.list_replicas(pool.name)
        except grpc.aio.AioRpcError as error:
            log.warning("settling by the last picture", pool=pool.name, error=describe(error))
            return link.replicas.values()

    async def _operation(self, link: ActuatorLink, operation_id: str) -> Operation | None:
        """The operation as last received, or asked for where no watch has sent it. A forgotten one counts as failed."""
        known = link.operations.get(operation_id)
        if known is not None:
            return known
        try:
            response = await link.stub.GetOperation(
                actuator_pb2.GetOperationRequest(operation_id=operation_id), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                return None
            return Operation(
                operation_id=operation_id,
                kind=None,
                state=OperationState.FAILED,
                detail="the actuator knows no such operation",
            )
        return link.take_operation(response.operation)

    async def _refused(
        self, pool: Pool, link: ActuatorLink, cycle: Cycle, memory: EngineState, error: grpc.aio.AioRpcError
    ) -> None:
        reason = error_reason(error)
        if reason == "FENCED_OFF":
            info = error_info(error)
            current = int(info.metadata.get("highest_token", "0") or 0) if info is not None else 0
            raise FencedOff(keys.POLICY_ENGINE, token=cycle.token or 0, current_token=current)
        if memory.why_pool_held(pool.name) or reason == _HELD:
            # What cannot be read, here or by the actuator, is not decided on: the refusal stands until the record is
            # restored or removed. Nothing was done, and an operation under way is neither lost nor rolled back.
            log.warning("a held pool's state is not taken", pool=pool.name, error=describe(error))
            self._refusals[pool.name] = refused(memory.desired[pool.name], describe(error), now_s=cycle.now_s)
            return
        if reason in ("OUTDATED", "REVISION_REUSED"):
            await self._catch_up(pool, link, cycle, memory, error)
            return
        if error.code() not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            log.warning("pool state not delivered", pool=pool.name, error=describe(error))
            return
        if reason in ("EXPIRED", "UNKNOWN_REVISION"):
            log.warning("pool state came at a bad time", pool=pool.name, error=describe(error))
            return
        log.error("pool state refused", pool=pool.name, error=describe(error))
        self._refusals[pool.name] = refused(memory.desired[pool.name], describe(error), now_s=cycle.now_s)
        record = self.log.get(memory.desired[pool.name].decision_id)
        pending = record is not None and record.outcome.state == decision_pb2.OUTCOME_STATE_PENDING
        if record is not None and pending and record.kind == decision_pb2.DECISION_KIND_TRANSITION:
            self._refusals.pop(pool.name)
            await self._conclude(pool, link, cycle, memory, record, OperationState.ROLLED_BACK, describe(error))

    async def _catch_up(
        self, pool: Pool, link: ActuatorLink, cycle: Cycle, memory: EngineState, error: grpc.aio.AioRpcError
    ) -> None:
        """The actuator has a newer state than the store (which lost its last second): go on from what is awake."""
        info = error_info(error)
        theirs = int(info.metadata.get("state_revision", "0") or 0) if info is not None else 0
        desired = memory.desired[pool.name]
        policies = cycle.snapshot.members_of(pool)
        wish = caught_up(desired, pool, policies, link.replicas.values(), their_revision=theirs)
        await self.writer.commit(cycle, commands=[memory.desired_command(wish)])
        memory.desired[pool.name] = wish
        log.warning("the actuator is ahead", pool=pool.name, theirs=theirs, ours=desired.state_revision)


def _superseded(record: decision_pb2.Decision, cycle: Cycle, detail: str) -> decision_pb2.Decision:
    return with_outcome(record, decision_pb2.OUTCOME_STATE_SUPERSEDED, now_s=cycle.now_s, detail=detail)


def _under_way(record: decision_pb2.Decision) -> UnderWay:
    ids = record.outcome.operation_ids
    return under_way(
        _transition(record),
        Rule(decision_pb2.Rule.Name(record.rule).removeprefix("RULE_")),
        decision_id=record.decision_id,
        operation_id=ids[-1] if ids else "",
    )


def _transition(record: decision_pb2.Decision) -> Transition:
    def changes(found: list[decision_pb2.ReplicaChange]) -> tuple[ReplicaChange, ...]:
        return tuple(
            ReplicaChange(item.replica, item.service, Role.from_number(item.role), item.gpus) for item in found
        )

    return Transition(releases=changes(list(record.transition.releases)), wakes=changes(list(record.transition.wakes)))
