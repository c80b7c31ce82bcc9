"""An operation as its actuator shows it: steps of several replicas that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.domain.time import optional_timestamp, seconds_of


class OperationKind(StrEnum):
    """Which change an operation is."""

    TRANSITION = "transition"
    CREATE = "create"
    SCALE_IN = "scale-in"
    OVERLAY = "overlay"
    PREWARM = "prewarm"


class OperationState(StrEnum):
    """State of an operation or of one step."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    ROLLING_BACK = "rolling-back"
    ROLLED_BACK = "rolled-back"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINISHED = frozenset(
    {OperationState.SUCCEEDED, OperationState.ROLLED_BACK, OperationState.FAILED, OperationState.CANCELLED}
)


class StepKind(StrEnum):
    """What a step does."""

    RELEASE = "release"
    WAKE = "wake"
    CREATE = "create"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One replica's part of an operation. `kind` is None for one of a later release. Times are 0 before they are."""

    kind: StepKind | None
    replica: str
    service: str
    state: OperationState
    phase: str = ""
    detail: str = ""
    start_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Steps that belong together. `subject` is the pool or the Deployment Group; times are Unix seconds.

    `kind` is None for one of a later release, or one that is not known.
    """

    operation_id: str
    kind: OperationKind | None
    state: OperationState
    subject: str = ""
    decision_id: str = ""
    cluster: str = ""
    steps: tuple[Step, ...] = ()
    create_s: float = 0.0
    update_s: float = 0.0
    deadline_s: float = 0.0
    detail: str = ""

    @property
    def finished(self) -> bool:
        """Whether it will not change any more."""
        return self.state in FINISHED


def _number_name(prefix: str, word: StrEnum) -> str:
    return prefix + word.value.upper().replace("-", "_")


_KIND_NUMBERS = {
    kind: actuator_pb2.OperationKind.Value(_number_name("OPERATION_KIND_", kind)) for kind in OperationKind
}
_STATE_NUMBERS = {
    state: actuator_pb2.OperationState.Value(_number_name("OPERATION_STATE_", state)) for state in OperationState
}
_STEP_NUMBERS = {kind: actuator_pb2.StepKind.Value(_number_name("STEP_KIND_", kind)) for kind in StepKind}
_KINDS: dict[int, OperationKind] = {number: kind for kind, number in _KIND_NUMBERS.items()}
_STATES: dict[int, OperationState] = {number: state for state, number in _STATE_NUMBERS.items()}
_STEP_KINDS: dict[int, StepKind] = {number: kind for kind, number in _STEP_NUMBERS.items()}


def operation_to_proto(operation: Operation) -> actuator_pb2.Operation:
    """The message of an operation."""
    return actuator_pb2.Operation(
        operation_id=operation.operation_id,
        kind=_KIND_NUMBERS[operation.kind] if operation.kind is not None else actuator_pb2.OPERATION_KIND_UNSPECIFIED,
        state=_STATE_NUMBERS[operation.state],
        decision_id=operation.decision_id,
        cluster=operation.cluster,
        subject=operation.subject,
        steps=[
            actuator_pb2.OperationStep(
                kind=_STEP_NUMBERS[step.kind] if step.kind is not None else actuator_pb2.STEP_KIND_UNSPECIFIED,
                replica=step.replica,
                state=_STATE_NUMBERS[step.state],
                phase=step.phase,
                start_time=optional_timestamp(step.start_s or None),
                end_time=optional_timestamp(step.end_s or None),
                detail=step.detail,
                service=step.service,
            )
            for step in operation.steps
        ],
        create_time=optional_timestamp(operation.create_s or None),
        update_time=optional_timestamp(operation.update_s or None),
        deadline=optional_timestamp(operation.deadline_s or None),
        detail=operation.detail,
    )


def operation_from_proto(message: actuator_pb2.Operation) -> Operation:
    """The operation in a message. A state that this release does not know counts as running: it has not ended."""
    return Operation(
        operation_id=message.operation_id,
        kind=_KINDS.get(message.kind),
        state=_STATES.get(message.state, OperationState.RUNNING),
        decision_id=message.decision_id,
        cluster=message.cluster,
        subject=message.subject,
        steps=tuple(
            Step(
                kind=_STEP_KINDS.get(step.kind),
                replica=step.replica,
                state=_STATES.get(step.state, OperationState.RUNNING),
                phase=step.phase,
                start_s=seconds_of(step.start_time),
                end_s=seconds_of(step.end_time),
                detail=step.detail,
                service=step.service,
            )
            for step in message.steps
        ),
        create_s=seconds_of(message.create_time),
        update_s=seconds_of(message.update_time),
        deadline_s=seconds_of(message.deadline),
        detail=message.detail,
    )
