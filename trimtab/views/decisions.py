"""Decisions and pre-warmings as people read them: rows of one table, a line each, and an operation in full.

A pre-warming is no decision of the policy engine: the actuator begins it by itself. It moves servers as decisions do,
so it is shown among them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.views.text import short_name, time_text

OPERATION_PREFIX = "o-"
"""What ids of operations begin with; those of decisions do not."""
_UNFINISHED = (
    actuator_pb2.OPERATION_STATE_PENDING,
    actuator_pb2.OPERATION_STATE_RUNNING,
    actuator_pb2.OPERATION_STATE_ROLLING_BACK,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One line of the table, with the moment that orders it."""

    at_ns: int
    time: str
    identity: str
    subject: str
    rule: str
    reason: str
    outcome: str

    def line(self) -> str:
        """All of it on one line."""
        return f"{self.time} {self.identity} {self.subject} {self.rule}: {self.reason} [{self.outcome}]"


def pre_warmings(operations: Iterable[actuator_pb2.Operation], subject: str = "") -> list[actuator_pb2.Operation]:
    """Those among operations, of one pool or service where one is given."""
    return [
        operation
        for operation in operations
        if operation.kind == actuator_pb2.OPERATION_KIND_PREWARM
        and subject in ("", operation.subject, *(step.service for step in operation.steps))
    ]


def is_finished(operation: actuator_pb2.Operation) -> bool:
    """Whether it will not change any more."""
    return operation.state not in _UNFINISHED


def decision_row(decision: decision_pb2.Decision) -> DecisionRow:
    """What was decided, why, and what came of it."""
    return DecisionRow(
        at_ns=decision.decide_time.ToNanoseconds(),
        time=time_text(decision.decide_time),
        identity=decision.decision_id,
        subject=decision.subject,
        rule=short_name(decision_pb2.Rule.Name(decision.rule), "RULE_"),
        reason=decision.reason,
        outcome=short_name(decision_pb2.OutcomeState.Name(decision.outcome.state), "OUTCOME_STATE_"),
    )


def pre_warming_row(operation: actuator_pb2.Operation) -> DecisionRow:
    """The server that is warmed up, its donors, and the progress or the end of it."""
    return DecisionRow(
        at_ns=operation.create_time.ToNanoseconds(),
        time=time_text(operation.create_time),
        identity=operation.operation_id,
        subject=operation.subject,
        rule="pre-warming",
        reason=f"{pre_warming_reason(operation)}; {_stand(operation)}",
        outcome=short_name(actuator_pb2.OperationState.Name(operation.state), "OPERATION_STATE_"),
    )


def pre_warming_reason(operation: actuator_pb2.Operation) -> str:
    """Which replicas, and why: `a boots ahead of need, to be asleep when it is wanted; b makes room`."""
    cold, donors = _named(operation, actuator_pb2.STEP_KIND_CREATE), _named(operation, actuator_pb2.STEP_KIND_RELEASE)
    one = len(cold) == 1
    wish = "to be asleep when it is wanted" if one else "to be asleep when they are wanted"
    room = f"; {' and '.join(donors)} {'makes' if len(donors) == 1 else 'make'} room" if donors else ""
    return f"{' and '.join(cold)} {'boots' if one else 'boot'} ahead of need, {wish}{room}"


def _named(operation: actuator_pb2.Operation, kind: actuator_pb2.StepKind.ValueType) -> list[str]:
    return [step.replica for step in operation.steps if step.kind == kind]


def _stand(operation: actuator_pb2.Operation) -> str:
    if is_finished(operation):
        ended = f"ended {time_text(operation.update_time)}"
        return f"{ended}: {operation.detail}" if operation.detail else ended
    phases = [
        f"{step.replica} {step.phase}" for step in operation.steps if step.phase and not step.HasField("end_time")
    ]
    return f"under way: {', '.join(phases)}" if phases else "under way"


def newest_rows(
    decisions: Iterable[decision_pb2.Decision], warmed: Iterable[actuator_pb2.Operation] = (), *, limit: int
) -> tuple[DecisionRow, ...]:
    """Decisions and pre-warmings together, newest first, at most `limit`."""
    every = [*map(decision_row, decisions), *map(pre_warming_row, warmed)]
    return tuple(sorted(every, key=lambda row: row.at_ns, reverse=True)[:limit])


def operation_lines(operation: actuator_pb2.Operation) -> Sequence[str]:
    """An operation in full: what for, by which decision, since when, each step, and how it ended."""
    kind = short_name(actuator_pb2.OperationKind.Name(operation.kind), "OPERATION_KIND_")
    state = short_name(actuator_pb2.OperationState.Name(operation.state), "OPERATION_STATE_")
    warms = operation.kind == actuator_pb2.OPERATION_KIND_PREWARM
    lines = [f"{operation.operation_id} {'pre-warming' if warms else kind} of {operation.subject}: {state}"]
    if warms:
        lines.append(f"reason: {pre_warming_reason(operation)}")
    if operation.decision_id:
        relation = "the pool's state is that of" if warms else "decision:"
        lines.append(f"{relation} {operation.decision_id}")
    until = f", ended {time_text(operation.update_time)}" if is_finished(operation) else ""
    lines.append(f"began {time_text(operation.create_time)}{until}; deadline {time_text(operation.deadline)}")
    lines += [_step_line(step) for step in operation.steps]
    if operation.detail:
        lines.append(f"outcome: {operation.detail}")
    return lines


def _step_line(step: actuator_pb2.OperationStep) -> str:
    kind = short_name(actuator_pb2.StepKind.Name(step.kind), "STEP_KIND_")
    state = short_name(actuator_pb2.OperationState.Name(step.state), "OPERATION_STATE_")
    times = f", {time_text(step.start_time)} to {time_text(step.end_time)}" if step.HasField("end_time") else ""
    said = "; ".join(text for text in (step.phase, step.detail) if text)
    return f"step: {kind} {step.replica}: {state}{times}{f' ({said})' if said else ''}"
