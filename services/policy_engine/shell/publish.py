"""Tells actuators a pool's desired state until they have it, and writes down what came of each transition.

Several transitions may be under way on a large pool, each with a record and an operation of its own: the next one is
only decided once the actuator has given the last one its operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
import structlog

from policy_engine.core.draft import ReplicaChange, Transition
from policy_engine.core.overlay import adopt_awake
from policy_engine.core.pool import PoolState, UnderWay, bar, settle
from policy_engine.core.vocabulary import MemberKey, Rule
from policy_engine.shell.convert import overlay_from_proto
from policy_engine.shell.links import FINISHED, ActuatorLink
from policy_engine.shell.memory import Memory
from policy_engine.shell.poolstate import awake_in_cluster, desired_state
from policy_engine.shell.records import Command, DecisionLog, with_outcome
from policy_engine.shell.turn import Turn, Writer
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.config.resources import Pool
from trimtab.domain.time import timestamp_of
from trimtab.rpc.errors import describe, error_info, error_reason
from trimtab.store import keys
from trimtab.store.errors import FencedOff
from trimtab.words import Role

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 3.0
REFUSED_PAUSE_S = 10.0
# The actuator's reason while it cannot read one of the pool's records.
_HELD = "RECORD_REFUSED"

_SERVING = frozenset({types_pb2.LIFE_CYCLE_ACTIVE, types_pb2.LIFE_CYCLE_DRAINING, types_pb2.LIFE_CYCLE_REACTIVATING})
_OUTCOMES = {
    actuator_pb2.OPERATION_STATE_SUCCEEDED: decision_pb2.OUTCOME_STATE_SUCCEEDED,
    actuator_pb2.OPERATION_STATE_ROLLED_BACK: decision_pb2.OUTCOME_STATE_ROLLED_BACK,
    actuator_pb2.OPERATION_STATE_CANCELLED: decision_pb2.OUTCOME_STATE_ROLLED_BACK,
    actuator_pb2.OPERATION_STATE_FAILED: decision_pb2.OUTCOME_STATE_FAILED,
}
_Acknowledged = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What an actuator would not take, and when to ask again."""

    state_revision: int
    until_s: float
    detail: str


@dataclass
class Publisher:
    """What each actuator has acknowledged, and what is left to tell. Nothing here outlives the process."""

    writer: Writer
    log: DecisionLog
    expiry_s: float
    _acknowledged: dict[str, _Acknowledged] = field(default_factory=dict)
    _refusals: dict[str, _Refusal] = field(default_factory=dict)
    _preempted: set[str] = field(default_factory=set)

    async def publish(self, pool: Pool, link: ActuatorLink, turn: Turn, memory: Memory) -> None:
        """Send the desired state unless this actuator has acknowledged it since it came back."""
        desired = memory.desired[pool.name]
        mark = (desired.state_revision, link.generation, turn.token or 0)
        refusal = self._refusals.get(pool.name)
        waits = refusal is not None and refusal.state_revision == desired.state_revision
        if self._acknowledged.get(pool.name) == mark or (
            refusal is not None and waits and turn.now_s < refusal.until_s
        ):
            return
        message = actuator_pb2.PoolState()
        message.CopyFrom(desired)
        message.replica_revision = link.revision
        message.expire_time.CopyFrom(timestamp_of(turn.now_s + self.expiry_s))
        request = actuator_pb2.ApplyPoolStateRequest(state=message, fencing=turn.fencing())
        try:
            response = await link.stub.ApplyPoolState(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            await self._refused(pool, link, turn, memory, error)
            return
        self._acknowledged[pool.name] = mark
        self._refusals.pop(pool.name, None)
        await self._acknowledge(pool, link, turn, memory, response)

    def refusal(self, desired: actuator_pb2.PoolState) -> str:
        """Why the actuator does not take this state; empty when it does, or has not said."""
        found = self._refusals.get(desired.pool)
        return found.detail if found is not None and found.state_revision == desired.state_revision else ""

    async def _acknowledge(
        self,
        pool: Pool,
        link: ActuatorLink,
        turn: Turn,
        memory: Memory,
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
                now_s=turn.now_s,
                detail="the cluster was so already",
            )
            await self.writer.commit(turn, records=[done])
        elif response.operation.operation_id not in record.outcome.operation_ids:
            known = with_outcome(
                record,
                decision_pb2.OUTCOME_STATE_PENDING,
                now_s=turn.now_s,
                detail="under way",
                operation_ids=[response.operation.operation_id],
            )
            await self.writer.commit(turn, records=[known])

    async def follow(self, pool: Pool, link: ActuatorLink, turn: Turn, memory: Memory) -> None:
        """Write the outcome of each of the pool's decisions whose operation has ended, and settle failed ones."""
        for record in self.log.pending_of(pool.name):
            if not record.outcome.operation_ids:
                if record.decision_id != memory.desired[pool.name].decision_id:
                    await self.writer.commit(turn, records=[_superseded(record, turn, "by a newer state")])
                continue
            operation = await self._operation(link, record.outcome.operation_ids[-1])
            if operation is not None and operation.state in FINISHED:
                outcome = _OUTCOMES[operation.state]
                await self._conclude(pool, link, turn, memory, record, outcome, operation.detail)

    def under_way(self, pool: str) -> tuple[UnderWay, ...]:
        """Transitions, and births, that the actuator works on; one that it has not taken yet bars all others."""
        return tuple(_under_way(record) for record in self.log.pending_of(pool))

    async def preempt(self, link: ActuatorLink, operation_id: str, reason: str) -> None:
        """Ask for the roll-back of a transition, once; its end is told by the watch."""
        if operation_id not in link.operations or operation_id in self._preempted:
            return
        self._preempted.add(operation_id)
        request = actuator_pb2.CancelOperationRequest(operation_id=operation_id, reason=f"pre-empted: {reason}")
        try:
            response = await link.stub.CancelOperation(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("transition not cancelled", operation=operation_id, error=describe(error))
            return
        link.take_operation(response.operation)
        log.info("transition pre-empted", operation=operation_id, reason=reason)

    def superseded(self, pool: str, turn: Turn) -> list[decision_pb2.Decision]:
        """The pool's records that are still open, with that outcome."""
        return [_superseded(record, turn, "by a new layout") for record in self.log.pending_of(pool)]

    async def _conclude(
        self,
        pool: Pool,
        link: ActuatorLink,
        turn: Turn,
        memory: Memory,
        record: decision_pb2.Decision,
        outcome: decision_pb2.OutcomeState.ValueType,
        detail: str,
    ) -> None:
        done = with_outcome(record, outcome, now_s=turn.now_s, detail=detail)
        failed = outcome in (decision_pb2.OUTCOME_STATE_ROLLED_BACK, decision_pb2.OUTCOME_STATE_FAILED)
        commands: list[Command] = []
        wish: actuator_pb2.PoolState | None = None
        state = memory.pools.get(pool.name, PoolState())
        if failed and record.kind == decision_pb2.DECISION_KIND_TRANSITION:
            transition = _transition(record)
            moved = tuple(sorted(change.replica for change in (*transition.releases, *transition.wakes)))
            # A transition that gave way has not shown that anything is wrong with its replicas.
            if self._preempted.isdisjoint(record.outcome.operation_ids):
                state = bar(state, moved, turn.now_s)
            self._preempted.difference_update(record.outcome.operation_ids)
            desired = memory.desired[pool.name]
            awake_now = await self._awake_now(link, pool, transition, outcome)
            overlay = overlay_from_proto(desired.overlay)
            awake = settle(overlay, tuple(desired.awake), transition, awake_now)
            wish = desired_state(pool, turn.snapshot.members_of(pool), overlay, awake, record.decision_id)
            wish.state_revision = desired.state_revision + 1
            commands = [memory.desired_command(wish), memory.pool_state_command(pool.name, state)]
        await self.writer.commit(turn, records=[done], commands=commands)
        if wish is not None:
            memory.desired[pool.name] = wish
            memory.pools[pool.name] = state
        level = log.warning if failed else log.info
        level(
            "transition ended",
            pool=pool.name,
            decision=record.decision_id,
            outcome=decision_pb2.OutcomeState.Name(outcome),
            detail=detail,
        )

    async def _awake_now(
        self,
        link: ActuatorLink,
        pool: Pool,
        transition: Transition,
        outcome: decision_pb2.OutcomeState.ValueType,
    ) -> frozenset[str]:
        """Who of the transition is awake: as before when it was rolled back, as the actuator lists when it failed."""
        if outcome == decision_pb2.OUTCOME_STATE_ROLLED_BACK:
            return frozenset(change.replica for change in transition.releases)
        try:
            request = actuator_pb2.ListReplicasRequest(pool=pool.name, page_size=1000)
            listed = await link.stub.ListReplicas(request, timeout=CALL_TIMEOUT_S)
            replicas = list(listed.replicas)
        except grpc.aio.AioRpcError as error:
            log.warning("settling by the last picture", pool=pool.name, error=describe(error))
            replicas = list(link.replicas.values())
        return frozenset(item.replica for item in replicas if item.life_cycle in _SERVING)

    async def _operation(self, link: ActuatorLink, operation_id: str) -> actuator_pb2.Operation | None:
        """The operation as last heard of; asked for when no watch has told it. Forgotten counts as failed."""
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
            return actuator_pb2.Operation(
                operation_id=operation_id,
                state=actuator_pb2.OPERATION_STATE_FAILED,
                detail="the actuator knows no such operation",
            )
        link.take_operation(response.operation)
        return response.operation

    async def _refused(
        self, pool: Pool, link: ActuatorLink, turn: Turn, memory: Memory, error: grpc.aio.AioRpcError
    ) -> None:
        reason = error_reason(error)
        if reason == "FENCED_OFF":
            info = error_info(error)
            current = int(info.metadata.get("highest_token", "0") or 0) if info is not None else 0
            raise FencedOff(keys.POLICY_ENGINE, token=turn.token or 0, current_token=current)
        if memory.why_pool_held(pool.name) or reason == _HELD:
            # What cannot be read, here or by the actuator, is not decided on: the refusal stands until the record is
            # restored or removed. Nothing was done, and an operation under way is neither lost nor rolled back.
            log.warning("a held pool's state is not taken", pool=pool.name, error=describe(error))
            until_s = turn.now_s + REFUSED_PAUSE_S
            self._refusals[pool.name] = _Refusal(memory.desired[pool.name].state_revision, until_s, describe(error))
            return
        if reason in ("OUTDATED", "REVISION_REUSED"):
            await self._catch_up(pool, link, turn, memory, error)
            return
        if error.code() not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            log.warning("pool state not delivered", pool=pool.name, error=describe(error))
            return
        if reason in ("EXPIRED", "UNKNOWN_REVISION"):
            log.warning("pool state came at a bad time", pool=pool.name, error=describe(error))
            return
        log.error("pool state refused", pool=pool.name, error=describe(error))
        until_s = turn.now_s + REFUSED_PAUSE_S
        self._refusals[pool.name] = _Refusal(memory.desired[pool.name].state_revision, until_s, describe(error))
        record = self.log.get(memory.desired[pool.name].decision_id)
        pending = record is not None and record.outcome.state == decision_pb2.OUTCOME_STATE_PENDING
        if record is not None and pending and record.kind == decision_pb2.DECISION_KIND_TRANSITION:
            self._refusals.pop(pool.name)
            await self._conclude(
                pool, link, turn, memory, record, decision_pb2.OUTCOME_STATE_ROLLED_BACK, describe(error)
            )

    async def _catch_up(
        self, pool: Pool, link: ActuatorLink, turn: Turn, memory: Memory, error: grpc.aio.AioRpcError
    ) -> None:
        """The actuator has a newer state than the store (which lost its last second): go on from what is awake."""
        info = error_info(error)
        theirs = int(info.metadata.get("state_revision", "0") or 0) if info is not None else 0
        desired = memory.desired[pool.name]
        overlay = overlay_from_proto(desired.overlay)
        awake = adopt_awake(overlay, awake_in_cluster(link, pool.name)) or tuple(desired.awake)
        wish = desired_state(pool, turn.snapshot.members_of(pool), overlay, awake, desired.decision_id)
        wish.state_revision = max(theirs, desired.state_revision) + 1
        await self.writer.commit(turn, commands=[memory.desired_command(wish)])
        memory.desired[pool.name] = wish
        log.warning("the actuator is ahead", pool=pool.name, theirs=theirs, ours=desired.state_revision)


def _superseded(record: decision_pb2.Decision, turn: Turn, detail: str) -> decision_pb2.Decision:
    return with_outcome(record, decision_pb2.OUTCOME_STATE_SUPERSEDED, now_s=turn.now_s, detail=detail)


def _under_way(record: decision_pb2.Decision) -> UnderWay:
    transition = _transition(record)
    ids = list(record.outcome.operation_ids)
    return UnderWay(
        operation=ids[-1] if ids else f"of {record.decision_id}",
        rule=Rule(decision_pb2.Rule.Name(record.rule).removeprefix("RULE_")),
        receivers=_members(transition.wakes),
        donors=_members(transition.releases),
        replicas=tuple(sorted(change.replica for change in (*transition.releases, *transition.wakes))) if ids else (),
    )


def _members(changes: tuple[ReplicaChange, ...]) -> tuple[MemberKey, ...]:
    return tuple(sorted({MemberKey(change.service, change.role) for change in changes}))


def _transition(record: decision_pb2.Decision) -> Transition:
    def changes(found: list[decision_pb2.ReplicaChange]) -> tuple[ReplicaChange, ...]:
        return tuple(
            ReplicaChange(item.replica, item.service, Role.from_number(item.role), item.gpus) for item in found
        )

    return Transition(releases=changes(list(record.transition.releases)), wakes=changes(list(record.transition.wakes)))
