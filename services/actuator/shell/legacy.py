"""Reads the actuator's records as releases before store schema 2 wrote them: JSON of the core's types of then.

Frozen: the models below describe what those releases wrote, and do not change when the core does; only the functions
that make values of the core out of them follow it. Each reader raises ``ValueError`` for bytes that it cannot read.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from actuator.core.model import (
    ActionKind,
    Floor,
    Goal,
    GroupOutcome,
    Hold,
    Meta,
    Operation,
    OperationKind,
    OperationState,
    PlacedSpec,
    Placement,
    Pool,
    Replica,
    Spec,
    Step,
    StepKind,
    Told,
)
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role

_Role = Literal["colocated", "prefill", "decode", "prefill-attention", "prefill-ffn"]
_LifeCycle = Literal["starting", "active", "draining", "sleeping", "reactivating", "terminating", "failed", "unknown"]
_HoldOwner = Literal["start-up", "release", "soft-scale-in", "gating", "operator"]
_OperationKind = Literal["transition", "create", "scale-in", "overlay", "prewarm"]
_State = Literal["pending", "running", "succeeded", "rolling-back", "rolled-back", "failed", "cancelled"]
_StepKind = Literal["release", "wake", "create", "delete"]
_Goal = Literal["awake", "asleep", "absent"]
_Action = Literal["create", "delete", "sleep", "wake", "canary"]
_Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Spec(_Record):
    replica: str
    service: str
    role: _Role
    model: str
    profile: str
    node: str
    gpu_indices: tuple[_Count, ...]
    gpu_type: str = ""
    pool: str = ""
    group: str = ""
    decision_id: str = ""

    def value(self) -> PlacedSpec:
        spec = Spec(
            replica=self.replica,
            service=self.service,
            role=Role(self.role),
            model=self.model,
            profile=self.profile,
            gpu_type=self.gpu_type,
            pool=self.pool,
            group=self.group,
            decision_id=self.decision_id,
        )
        return PlacedSpec(spec=spec, placement=Placement(node=self.node, gpu_indices=self.gpu_indices))


class _Hold(_Record):
    owner: _HoldOwner
    reason: str
    since_s: float


class _Told(_Record):
    level: _Count
    since_s: float


class _Replica(_Record):
    spec: _Spec
    life_cycle: _LifeCycle
    since_s: float
    cause: str
    address: str = ""
    holds: tuple[_Hold, ...] = ()
    ready: bool = False
    start_time_s: float = 0.0
    slept_once: bool = False
    sleep_level: _Count = 0
    told_to_sleep: _Told | None = None
    evicting: bool = False
    hidden_revision: _Count = 0
    revision: _Count = 0
    detail: str = ""


def read_replica(raw: bytes) -> Replica:
    """A field of the hash ``replicas``."""
    found = _Replica.model_validate_json(raw)
    told, placed = found.told_to_sleep, found.spec.value()
    return Replica(
        spec=placed.spec,
        placement=placed.placement,
        life_cycle=LifeCycle(found.life_cycle),
        since_s=found.since_s,
        cause=found.cause,
        address=found.address,
        holds=tuple(
            Hold(owner=HoldOwner(hold.owner), reason=hold.reason, since_s=hold.since_s) for hold in found.holds
        ),
        ready=found.ready,
        start_time_s=found.start_time_s,
        slept_once=found.slept_once,
        sleep_level=found.sleep_level,
        told_to_sleep=Told(level=told.level, since_s=told.since_s) if told is not None else None,
        evicting=found.evicting,
        hidden_revision=found.hidden_revision,
        revision=found.revision,
        detail=found.detail,
    )


class _Floor(_Record):
    service: str
    role: _Role
    min_replicas: _Count


class _Pool(_Record):
    pool: str
    state_revision: _Count
    overlay: tuple[_Spec, ...]
    awake: tuple[str, ...]
    floors: tuple[_Floor, ...]
    budget_gpus: _Count
    decision_id: str
    drain_timeout_s: float
    sleep_level: _Count
    prewarm: bool = False
    residence_s: float = 0.0
    effective_awake: tuple[str, ...] = ()
    settled_revision: _Count = 0
    operation_id: str = ""


def read_pool(raw: bytes) -> Pool:
    """A field of the hash ``pools``."""
    found = _Pool.model_validate_json(raw)
    return Pool(
        pool=found.pool,
        state_revision=found.state_revision,
        overlay=tuple(spec.value() for spec in found.overlay),
        awake=found.awake,
        floors=tuple(
            Floor(service=floor.service, role=Role(floor.role), min_replicas=floor.min_replicas)
            for floor in found.floors
        ),
        budget_gpus=found.budget_gpus,
        decision_id=found.decision_id,
        drain_timeout_s=found.drain_timeout_s,
        sleep_level=found.sleep_level,
        prewarm=found.prewarm,
        residence_s=found.residence_s,
        effective_awake=found.effective_awake,
        settled_revision=found.settled_revision,
        operation_id=found.operation_id,
    )


class _Step(_Record):
    kind: _StepKind
    goal: _Goal
    replica: str
    service: str
    spec: _Spec | None = None
    state: _State = "pending"
    phase: str = ""
    detail: str = ""
    start_s: float = 0.0
    end_s: float = 0.0
    asked: _Action | None = None
    attempts: _Count = 0
    not_before_s: float = 0.0
    stay: tuple[str, ...] = ()
    waiting_before: _Count | None = None
    unaware_s: float = 0.0
    acknowledged_s: float = 0.0
    drain_deadline_s: float = 0.0
    give_up_s: float = 0.0

    def value(self) -> Step:
        return Step(
            kind=StepKind(self.kind),
            goal=Goal(self.goal),
            replica=self.replica,
            service=self.service,
            placed=self.spec.value() if self.spec is not None else None,
            state=OperationState(self.state),
            phase=self.phase,
            detail=self.detail,
            start_s=self.start_s,
            end_s=self.end_s,
            asked=ActionKind(self.asked) if self.asked is not None else None,
            attempts=self.attempts,
            not_before_s=self.not_before_s,
            stay=self.stay,
            waiting_before=self.waiting_before,
            unaware_s=self.unaware_s,
            acknowledged_s=self.acknowledged_s,
            drain_deadline_s=self.drain_deadline_s,
            give_up_s=self.give_up_s,
        )


class _Operation(_Record):
    operation_id: str
    kind: _OperationKind
    subject: str
    create_s: float
    update_s: float
    deadline_s: float
    state: _State = "pending"
    decision_id: str = ""
    pool_revision: _Count = 0
    steps: tuple[_Step, ...] = ()
    detail: str = ""
    cancelled: bool = False
    waits_for: tuple[str, ...] = ()


def read_operation(raw: bytes) -> Operation:
    """A field of the hash ``operations``."""
    found = _Operation.model_validate_json(raw)
    return Operation(
        operation_id=found.operation_id,
        kind=OperationKind(found.kind),
        subject=found.subject,
        create_s=found.create_s,
        update_s=found.update_s,
        deadline_s=found.deadline_s,
        state=OperationState(found.state),
        decision_id=found.decision_id,
        pool_revision=found.pool_revision,
        steps=tuple(step.value() for step in found.steps),
        detail=found.detail,
        cancelled=found.cancelled,
        waits_for=found.waits_for,
    )


class _GroupOutcome(_Record):
    group: str
    accepted: bool
    detail: str = ""
    operation_id: str = ""


class _Meta(_Record):
    endpoint_revision: _Count = 0
    replica_revision: _Count = 0
    inventory_revision: _Count = 0
    operation_counter: _Count = 0
    inventory_digest: str = ""
    fencing: dict[str, _Count] = {}
    requests: dict[str, tuple[_GroupOutcome, ...]] = {}


def read_meta(raw: bytes) -> Meta:
    """The field ``meta`` of the hash ``revisions``."""
    found = _Meta.model_validate_json(raw)
    return Meta(
        endpoint_revision=found.endpoint_revision,
        replica_revision=found.replica_revision,
        inventory_revision=found.inventory_revision,
        operation_counter=found.operation_counter,
        inventory_digest=found.inventory_digest,
        fencing=found.fencing,
        requests={
            request_id: tuple(
                GroupOutcome(
                    group=item.group, accepted=item.accepted, detail=item.detail, operation_id=item.operation_id
                )
                for item in outcomes
            )
            for request_id, outcomes in found.requests.items()
        },
    )
