"""Decisions and pre-warmings as people read them: rows of one table, a line each, and an operation in full.

A pre-warming is no decision of the policy engine: the actuator begins it by itself. It moves servers as decisions do,
so it is shown among them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.cli.output import ONE_LINE_COLUMNS, short_name, time_text

OPERATION_PREFIX = "o-"
"""What ids of operations begin with; those of decisions do not."""
_UNFINISHED = (
    actuator_pb2.OPERATION_STATE_PENDING,
    actuator_pb2.OPERATION_STATE_RUNNING,
    actuator_pb2.OPERATION_STATE_ROLLING_BACK,
)
_STYLES = {
    "succeeded": "green",
    "pending": "yellow",
    "running": "yellow",
    "rolling-back": "yellow",
    "failed": "red",
    "rolled-back": "red",
    "denied": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


def decision_row(decision: decision_pb2.Decision) -> Row:
    """What was decided, why, and what came of it."""
    return Row(
        at_ns=decision.decide_time.ToNanoseconds(),
        time=time_text(decision.decide_time),
        identity=decision.decision_id,
        subject=decision.subject,
        rule=short_name(decision_pb2.Rule.Name(decision.rule), "RULE_"),
        reason=decision.reason,
        outcome=short_name(decision_pb2.OutcomeState.Name(decision.outcome.state), "OUTCOME_STATE_"),
    )


def pre_warming_row(operation: actuator_pb2.Operation) -> Row:
    """Who is warmed up, who makes room, and how far that is or how it ended."""
    return Row(
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


def table_of(
    decisions: Iterable[decision_pb2.Decision],
    warmed: Iterable[actuator_pb2.Operation] = (),
    *,
    limit: int,
    width: int,
) -> Table:
    """Newest first, at most `limit`: when, what, why and what came of it. Where narrow, the reason stands below."""
    every = [*map(decision_row, decisions), *map(pre_warming_row, warmed)]
    rows = sorted(every, key=lambda row: row.at_ns, reverse=True)[:limit]
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("time", no_wrap=True)
    if width < ONE_LINE_COLUMNS:
        table.add_column("decision, subject, rule, outcome and reason", ratio=1)
        for row in rows:
            head = f"{row.identity}  {row.subject}  {row.rule}  "
            table.add_row(row.time, Text.assemble(head, _outcome(row), f"\n{row.reason}"))
        return table
    for title in ("decision", "subject", "rule"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", ratio=1)
    table.add_column("outcome", no_wrap=True)
    for row in rows:
        table.add_row(row.time, row.identity, row.subject, row.rule, Text(row.reason), _outcome(row))
    return table


def _outcome(row: Row) -> Text:
    return Text(row.outcome, style=_STYLES.get(row.outcome, "dim"))


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
