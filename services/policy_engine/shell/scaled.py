"""Runs scaled services: feeds the pipeline, writes decisions, and publishes absolute scaling requests.

A request is refreshed with every cycle and expires when no leader does so; the pre-scheduler answers through the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from policy_engine.core.scaled.decide import ScaledInput, ScaledResult, ScaledState, decide_scaled
from policy_engine.core.scaled.scaling_request import count_replicas, exists, scaling_request
from policy_engine.core.scaled.units import RoleCounts
from policy_engine.shell.actuator_clients import Fleet
from policy_engine.shell.cycle import Cycle, Writer
from policy_engine.shell.engine_state import EngineState, read_hash
from policy_engine.shell.records import Command, DecisionLog, with_outcome
from trimtab.api.policy.v1 import decision_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.config.resources import ServicePolicy
from trimtab.domain.role_signals import FrontDoor
from trimtab.domain.scaling import request_to_proto
from trimtab.domain.time import seconds_of, timestamp_of
from trimtab.domain.vocabulary import Role
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.records import Refused
from trimtab.store.schedule_results import SCHEDULE_RESULT

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ScaledReport:
    """A scaled service at its last cycle, for status and metrics."""

    policy: ServicePolicy
    result: ScaledResult


@dataclass
class ScaledRunner:
    """Every scaled service of this engine."""

    store: Store
    fleet: Fleet
    writer: Writer
    log: DecisionLog
    expiry_s: float
    reports: dict[str, ScaledReport] = field(default_factory=dict)
    refused_results: dict[str, Refused] = field(default_factory=dict)
    """Results of the pre-scheduler that cannot be read, by service."""

    async def cycle(self, policies: Sequence[ServicePolicy], cycle: Cycle, memory: EngineState) -> None:
        """All scaled services' cycle. Raises FencedOff and StoreUnavailable."""
        records: list[decision_pb2.Decision] = []
        commands: list[Command] = []
        states: dict[str, ScaledState] = {}
        requests: dict[str, scheduler_pb2.ScalingRequest] = {}
        open_records = await self._outcomes(memory, cycle) if cycle.token is not None else {}
        for policy in policies:
            if memory.why_service_held(policy.name):
                self.reports[policy.name] = _held(policy, memory)
                if cycle.token is not None and policy.name in memory.requests:
                    requests[policy.name] = self._refreshed(memory.requests[policy.name], cycle)
                continue
            given = self.gather(policy, cycle, memory)
            result = decide_scaled(given)
            self.reports[policy.name] = ScaledReport(policy, result)
            if cycle.token is None or result.state.desired is None:
                continue
            decision_id = memory.requests[policy.name].decision_id if policy.name in memory.requests else ""
            record: decision_pb2.Decision | None = None
            if result.draft is not None:
                record = self.writer.record(
                    result.draft,
                    given,
                    cycle,
                    revisions=self.fleet.revisions(),
                    etags=cycle.snapshot.etags(None, (policy,)),
                )
                records.append(record)
                log.info("decided", service=policy.name, decision=record.decision_id, reason=record.reason)
                if record.kind == decision_pb2.DECISION_KIND_SCALE:
                    decision_id = record.decision_id
                    self._supersede(policy.name, record, open_records, cycle)
            created_s = self._created_s(policy.name, decision_id, record, memory, cycle)
            request = self._request(policy, result.state.desired, decision_id, created_s, cycle)
            requests[policy.name] = request
            if result.state != memory.scaled.get(policy.name):
                commands.append(memory.scaled_state_command(policy.name, result.state))
                states[policy.name] = result.state
        commands += [memory.request_command(request) for request in requests.values()]
        records = [*open_records.values(), *records]
        if records or commands:
            await self.writer.commit(cycle, records=records, commands=commands)
        memory.scaled.update(states)
        memory.requests.update(requests)

    def _refreshed(self, request: scheduler_pb2.ScalingRequest, cycle: Cycle) -> scheduler_pb2.ScalingRequest:
        """The last request of a held service, valid for longer and otherwise unchanged."""
        refreshed = scheduler_pb2.ScalingRequest()
        refreshed.CopyFrom(request)
        refreshed.fencing.CopyFrom(cycle.fencing())
        refreshed.expire_time.CopyFrom(timestamp_of(cycle.now_s + self.expiry_s))
        return refreshed

    def forget(self, names: set[str]) -> None:
        """Drop reports of services that are gone."""
        for name in sorted(set(self.reports) - names):
            del self.reports[name]

    def gather(self, policy: ServicePolicy, cycle: Cycle, memory: EngineState) -> ScaledInput:
        """The core's input for this service now."""
        listed = self.fleet.replicas_of(policy.name)
        views = {key.role: view for key, view in cycle.observed.roles.items() if key.service == policy.name}
        front = cycle.observed.fronts.get(policy.name)
        state = memory.scaled.get(policy.name, ScaledState())
        if state.desired is not None and not _same_roles(policy, state.desired):
            # The policy's roles were changed: counts of roles that are gone do not apply to new ones.
            state = ScaledState()
        return ScaledInput(
            now_s=cycle.now_s,
            policy=policy,
            views=tuple(views[spec.role] for spec in policy.spec.roles if spec.role in views),
            front=front if front is not None else FrontDoor(),
            replicas=count_replicas(policy, ((item.role, item.life_cycle, item.routable) for item in listed)),
            state=state,
            unreachable=self.fleet.why_blind(policy.name),
        )

    def _request(
        self, policy: ServicePolicy, desired: RoleCounts, decision_id: str, created_s: float, cycle: Cycle
    ) -> scheduler_pb2.ScalingRequest:
        return request_to_proto(
            scaling_request(
                policy,
                desired,
                decision_id=decision_id,
                created_s=created_s,
                expires_s=cycle.now_s + self.expiry_s,
                replica_revisions=self.fleet.revisions(),
                writer=keys.POLICY_ENGINE,
                token=cycle.token or 0,
            )
        )

    def _created_s(
        self,
        service: str,
        decision_id: str,
        record: decision_pb2.Decision | None,
        memory: EngineState,
        cycle: Cycle,
    ) -> float:
        """When the requested counts were decided: a request that is only refreshed keeps its place in the queue."""
        if record is not None and record.decision_id == decision_id:
            return seconds_of(record.decide_time)
        before = memory.requests.get(service)
        if before is not None and before.decision_id == decision_id and before.HasField("create_time"):
            return seconds_of(before.create_time)
        return cycle.now_s

    def _supersede(
        self,
        service: str,
        record: decision_pb2.Decision,
        open_records: dict[str, decision_pb2.Decision],
        cycle: Cycle,
    ) -> None:
        """Close the service's earlier decisions whose outcome is open or denied."""
        for earlier in self.log.newest(subject=service, count=20):
            current = open_records.get(earlier.decision_id, earlier)
            unsettled = current.outcome.state in (
                decision_pb2.OUTCOME_STATE_PENDING,
                decision_pb2.OUTCOME_STATE_DENIED,
            )
            if current.kind == decision_pb2.DECISION_KIND_SCALE and unsettled:
                open_records[earlier.decision_id] = with_outcome(
                    current,
                    decision_pb2.OUTCOME_STATE_SUPERSEDED,
                    now_s=cycle.now_s,
                    detail=f"by {record.decision_id}",
                )

    async def _outcomes(self, memory: EngineState, cycle: Cycle) -> dict[str, decision_pb2.Decision]:
        """New outcomes of the decisions in force, from the pre-scheduler's results."""
        changed: dict[str, decision_pb2.Decision] = {}
        self.refused_results = {}
        for service, raw in await read_hash(self.store, keys.schedule_results()):
            request = memory.requests.get(service)
            record = self.log.get(request.decision_id) if request is not None else None
            if record is None:
                continue
            result = SCHEDULE_RESULT.decode(raw, key=keys.schedule_results(), field=service)
            if isinstance(result, Refused):
                self.refused_results[service] = result
                continue
            if result.decision_id != record.decision_id:
                continue
            state, detail = self._outcome_of(service, result, memory)
            if (state, detail) != (record.outcome.state, record.outcome.detail) and _may_follow(record, state):
                changed[record.decision_id] = with_outcome(record, state, now_s=cycle.now_s, detail=detail)
        return changed

    def _outcome_of(
        self, service: str, result: scheduler_pb2.ScalingResult, memory: EngineState
    ) -> tuple[decision_pb2.OutcomeState.ValueType, str]:
        if result.outcome == scheduler_pb2.SCHEDULING_OUTCOME_DENIED:
            constraint = scheduler_pb2.BindingConstraint.Name(result.binding_constraint)
            name = constraint.removeprefix("BINDING_CONSTRAINT_").lower().replace("_", " ")
            # A refused write is tried again in the next cycle, so the outcome stays open; a lack of capacity is one.
            refused = result.binding_constraint == scheduler_pb2.BINDING_CONSTRAINT_ACTUATOR_REFUSED
            state = decision_pb2.OUTCOME_STATE_PENDING if refused else decision_pb2.OUTCOME_STATE_DENIED
            return state, f"{name}: {result.detail}"
        if self._reached(service, memory):
            return decision_pb2.OUTCOME_STATE_SUCCEEDED, "the replicas are ready"
        name = scheduler_pb2.SchedulingOutcome.Name(result.outcome).removeprefix("SCHEDULING_OUTCOME_").lower()
        if result.outcome == scheduler_pb2.SCHEDULING_OUTCOME_UNCHANGED:
            name = "placed"
        return decision_pb2.OUTCOME_STATE_PENDING, f"{name}; not all replicas are ready yet"

    def _reached(self, service: str, memory: EngineState) -> bool:
        state = memory.scaled.get(service)
        if state is None or state.desired is None:
            return False
        listed = self.fleet.replicas_of(service)
        return all(
            sum(1 for item in listed if item.role is role and item.routable) == count
            and sum(1 for item in listed if item.role is role and exists(item.life_cycle)) == count
            for role, count in state.desired
        )


def _held(policy: ServicePolicy, memory: EngineState) -> ScaledReport:
    """The report of a service of which a record cannot be read: nothing is decided, its last request stays in force."""
    state = memory.scaled.get(policy.name, ScaledState())
    request = memory.requests.get(policy.name)
    if state.desired is None and request is not None:
        counts = tuple((Role.from_number(role.role), role.replicas) for role in request.roles)
        state = replace(state, desired=counts)
    return ScaledReport(policy, ScaledResult(state, None, memory.why_service_held(policy.name)))


def _may_follow(record: decision_pb2.Decision, state: decision_pb2.OutcomeState.ValueType) -> bool:
    """An outcome that is final stays; a denial may still be served when capacity appears."""
    if record.outcome.state == decision_pb2.OUTCOME_STATE_PENDING:
        return True
    return record.outcome.state == decision_pb2.OUTCOME_STATE_DENIED and state != decision_pb2.OUTCOME_STATE_PENDING


def _same_roles(policy: ServicePolicy, desired: RoleCounts) -> bool:
    return {spec.role for spec in policy.spec.roles} == {role for role, _ in desired}
