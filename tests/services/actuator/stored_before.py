"""Records of every kind, and the bytes that the last release with store schema 1 wrote for them.

``data/records-of-schema-1.json`` was written by that release from these values: hash → field → bytes. Neither changes.
"""

import json
from pathlib import Path
from typing import Any

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
from tests.unit.actuator.actuator_fleet_model import parts
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role

BYTES: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "data" / "records-of-schema-1.json").read_text(encoding="utf-8")
)


def _spec(name: str, gpus: tuple[int, ...], *, node: str = "node-0", **fields: Any) -> PlacedSpec:
    known: dict[str, Any] = {
        "service": "chat",
        "role": Role.COLOCATED,
        "model": "llama",
        "profile": "tp1",
        "gpu_type": "A100-40GB",
        "pool": "shared",
        "decision_id": "d-1",
    }
    spec = Spec(replica=name, **(known | fields))
    return PlacedSpec(spec=spec, placement=Placement(node=node, gpu_indices=gpus))


CHAT_0 = _spec("chat-0", (0,))
CHAT_1 = _spec("chat-1", (1,))
CODE_0 = _spec("code-0", (0, 1), service="code", model="qwen", profile="tp2")
GIVEN = _spec("given-0", (3,), pool="", decision_id="", model="", profile="", gpu_type="")
MOE_PREFILL = _spec(
    "moe-p-0",
    (0, 1, 2, 3),
    service="moe",
    role=Role.PREFILL_ATTENTION,
    node="node-7",
    pool="",
    group="moe-g1",
    decision_id="d-9",
)
MOE_FFN = _spec("moe-f-0", (4,), service="moe", role=Role.PREFILL_FFN, node="node-7", pool="", group="moe-g1")
PD_PREFILL = _spec("pd-p-0", (5,), service="pd", role=Role.PREFILL, pool="", group="pd-g")
PD_DECODE = _spec("pd-d-0", (6,), service="pd", role=Role.DECODE, pool="", group="pd-g")
REPLICAS = (
    Replica(
        **parts(CHAT_0),
        life_cycle=LifeCycle.ACTIVE,
        since_s=1790000000.25,
        cause="created",
        address="http://node-0:8000",
        ready=True,
        start_time_s=1789999000.125,
        slept_once=True,
        hidden_revision=1790000000123,
        revision=1790000000130,
    ),
    Replica(
        **parts(CHAT_1),
        life_cycle=LifeCycle.DRAINING,
        since_s=1790000001.5,
        cause="o-1",
        address="http://node-0:8001",
        holds=(
            Hold(owner=HoldOwner.GATING, reason="canary", since_s=1.5),
            Hold(owner=HoldOwner.RELEASE, reason="o-1", since_s=1790000001.5),
        ),
        ready=True,
        told_to_sleep=Told(level=1, since_s=1790000002.0),
        evicting=True,
        hidden_revision=5,
        revision=6,
        slept_once=True,
    ),
    Replica(
        **parts(CODE_0),
        life_cycle=LifeCycle.SLEEPING,
        since_s=12.0,
        cause="slept",
        address="http://node-0:8002",
        sleep_level=2,
        slept_once=True,
        holds=(Hold(owner=HoldOwner.RELEASE, reason="o-0", since_s=11.0),),
        told_to_sleep=Told(level=2, since_s=10.0),
    ),
    Replica(
        **parts(GIVEN),
        life_cycle=LifeCycle.UNKNOWN,
        since_s=0.0,
        cause="found",
        address="http://given:8000",
        detail="does not answer: «Zeitüberschreitung»",
        holds=(
            Hold(owner=HoldOwner.OPERATOR, reason="alice", since_s=3.0),
            Hold(owner=HoldOwner.SOFT_SCALE_IN, reason="", since_s=4.0),
            Hold(owner=HoldOwner.START_UP, reason="found", since_s=5.0),
        ),
    ),
    Replica(
        **parts(MOE_PREFILL),
        life_cycle=LifeCycle.STARTING,
        since_s=20.0,
        cause="placed",
        holds=(Hold(owner=HoldOwner.START_UP, reason="o-3", since_s=20.0),),
    ),
    Replica(**parts(MOE_FFN), life_cycle=LifeCycle.REACTIVATING, since_s=1e9 + 1 / 3, cause="woken", sleep_level=1),
    Replica(**parts(PD_PREFILL), life_cycle=LifeCycle.TERMINATING, since_s=30.0, cause="deleted", address="http://x"),
    Replica(
        **parts(PD_DECODE),
        life_cycle=LifeCycle.FAILED,
        since_s=31.0,
        cause="died",
        detail="nothing listens at its address",
        revision=18446744073709,
    ),
)
S = OperationState
G = Goal
K = StepKind
A = ActionKind
OPERATIONS = (
    Operation(
        operation_id="o-1",
        kind=OperationKind.TRANSITION,
        subject="shared",
        create_s=1.0,
        update_s=2.5,
        deadline_s=99.0,
        state=OperationState.RUNNING,
        decision_id="d-1",
        pool_revision=7,
        steps=(
            Step(
                kind=StepKind.RELEASE,
                goal=Goal.ASLEEP,
                replica="chat-1",
                service="chat",
                state=OperationState.RUNNING,
                phase="falling asleep",
                start_s=1.0,
                asked=ActionKind.SLEEP,
                stay=("chat-0",),
                waiting_before=3,
                acknowledged_s=1.25,
                drain_deadline_s=1.75,
                give_up_s=11.75,
            ),
            Step(
                kind=StepKind.WAKE,
                goal=Goal.AWAKE,
                replica="code-0",
                service="code",
                state=OperationState.PENDING,
                phase="waiting for its GPUs: chat-1 is draining",
            ),
        ),
    ),
    Operation(
        operation_id="o-2",
        kind=OperationKind.OVERLAY,
        subject="shared",
        create_s=1.0,
        update_s=2.0,
        deadline_s=3600.0,
        state=OperationState.SUCCEEDED,
        pool_revision=1,
        steps=(
            Step(
                kind=StepKind.CREATE,
                goal=Goal.ASLEEP,
                replica="chat-0",
                service="chat",
                placed=CHAT_0,
                state=OperationState.SUCCEEDED,
                phase="asleep",
                start_s=1.0,
                end_s=2.0,
                attempts=2,
                detail="could not be created: full",
                not_before_s=1.5,
                waiting_before=0,
            ),
        ),
        detail="brought up",
    ),
    Operation(
        operation_id="o-3",
        kind=OperationKind.CREATE,
        subject="moe-g1",
        create_s=20.0,
        update_s=20.0,
        deadline_s=900.0,
        state=OperationState.ROLLING_BACK,
        decision_id="d-9",
        steps=(
            Step(
                kind=StepKind.CREATE,
                goal=Goal.ABSENT,
                replica="moe-p-0",
                service="moe",
                placed=MOE_PREFILL,
                state=OperationState.ROLLING_BACK,
                asked=ActionKind.CREATE,
            ),
            Step(
                kind=StepKind.CREATE,
                goal=Goal.AWAKE,
                replica="moe-f-0",
                service="moe",
                placed=MOE_FFN,
                state=OperationState.CANCELLED,
                asked=ActionKind.CANARY,
            ),
        ),
        cancelled=True,
        detail="taken back",
    ),
    Operation(
        operation_id="o-4",
        kind=OperationKind.SCALE_IN,
        subject="pd-g",
        create_s=30.0,
        update_s=31.0,
        deadline_s=200.0,
        state=OperationState.FAILED,
        steps=(
            Step(
                kind=StepKind.DELETE,
                goal=Goal.ABSENT,
                replica="pd-p-0",
                service="pd",
                state=OperationState.FAILED,
                asked=ActionKind.DELETE,
                attempts=3,
                unaware_s=30.5,
            ),
        ),
        detail="given up",
    ),
    Operation(
        operation_id="o-5",
        kind=OperationKind.PREWARM,
        subject="shared",
        create_s=40.0,
        update_s=41.0,
        deadline_s=500.0,
        state=OperationState.ROLLED_BACK,
        steps=(
            Step(
                kind=StepKind.RELEASE,
                goal=Goal.AWAKE,
                replica="chat-0",
                service="chat",
                state=OperationState.ROLLED_BACK,
                asked=ActionKind.WAKE,
            ),
            Step(
                kind=StepKind.CREATE,
                goal=Goal.ASLEEP,
                replica="code-0",
                service="code",
                placed=CODE_0,
                state=OperationState.CANCELLED,
                phase="never begun",
                end_s=41.0,
            ),
        ),
    ),
    Operation(
        operation_id="o-6",
        kind=OperationKind.TRANSITION,
        subject="shared",
        create_s=50.0,
        update_s=50.0,
        deadline_s=500.0,
        waits_for=("o-1", "o-5"),
        pool_revision=8,
    ),
    Operation(
        operation_id="o-7",
        kind=OperationKind.TRANSITION,
        subject="shared",
        create_s=50.0,
        update_s=50.0,
        deadline_s=500.0,
        state=OperationState.CANCELLED,
        cancelled=True,
        pool_revision=6,
    ),
)
POOLS = (
    Pool(
        pool="shared",
        state_revision=8,
        overlay=(CHAT_0, CHAT_1, CODE_0),
        awake=("code-0",),
        floors=(
            Floor(service="chat", role=Role.COLOCATED, min_replicas=1),
            Floor(service="code", role=Role.DECODE, min_replicas=0),
        ),
        budget_gpus=2,
        decision_id="d-1",
        drain_timeout_s=0.5,
        sleep_level=1,
        prewarm=True,
        residence_s=8.0,
        effective_awake=("chat-0", "chat-1"),
        settled_revision=7,
        operation_id="o-6",
    ),
    Pool(
        pool="empty",
        state_revision=1,
        overlay=(),
        awake=(),
        floors=(),
        budget_gpus=1,
        decision_id="",
        drain_timeout_s=0.0,
        sleep_level=0,
    ),
)
META = Meta(
    endpoint_revision=1790000000123,
    replica_revision=1790000000130,
    inventory_revision=1790000000001,
    operation_counter=17,
    inventory_digest="0123456789abcdef",
    fencing={"policy-engine": 4, "prescheduler": 2**40},
    requests={
        "z-1": (
            GroupOutcome(group="moe-g1", accepted=True, operation_id="o-3"),
            GroupOutcome(group="pd-g", accepted=False, detail="GPU node-0/5 is not free"),
        ),
        "a-2": (),
    },
)
