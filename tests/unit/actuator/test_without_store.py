"""What the store's absence and a restart may not do: show a server that was told to sleep, or trust old words."""

from dataclasses import replace

import pytest

from actuator.core.model import (
    ActionKind,
    Goal,
    Meta,
    Operation,
    OperationKind,
    OperationState,
    Replica,
    State,
    Step,
    StepKind,
    Told,
)
from actuator.core.tick import fail_static, resume
from actuator.core.world import World
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import LIMITS, spec
from trimtab.domain.vocabulary import LifeCycle

NOW_S = 1000.0
DRAINING = Replica(
    **parts(spec("a", 0)), life_cycle=LifeCycle.DRAINING, since_s=990.0, cause="", address="http://a", ready=True,
    hidden_revision=5,
)  # fmt: skip


def release(asked: ActionKind | None, *, kind: OperationKind, done: bool = False) -> Operation:
    """An operation that puts the replica to sleep, or did."""
    step = Step(
        kind=StepKind.RELEASE,
        goal=Goal.ASLEEP,
        replica=DRAINING.name,
        service="a",
        state=OperationState.SUCCEEDED if done else OperationState.RUNNING,
        asked=asked,
    )
    return Operation(
        operation_id=f"o-{kind}", kind=kind, subject="p", create_s=980.0, update_s=990.0, deadline_s=2000.0,
        state=OperationState.RUNNING, steps=(step,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "expected"), [(False, LifeCycle.ACTIVE), (True, LifeCycle.DRAINING)], ids=["hidden", "told"]
)
def test_an_old_step_that_is_done_does_not_show_what_another_was_told_to_put_to_sleep(
    told: bool, expected: LifeCycle
) -> None:
    old = release(None, kind=OperationKind.OVERLAY, done=True)
    new = release(ActionKind.SLEEP if told else None, kind=OperationKind.TRANSITION)
    state = State(
        replicas={DRAINING.name: replace(DRAINING, told_to_sleep=Told(level=1, since_s=990.0) if told else None)},
        operations={old.operation_id: old, new.operation_id: new},
        meta=Meta(endpoint_revision=5),
    )
    after = fail_static(state, World(), now_s=NOW_S, limits=LIMITS)
    assert after.state.replicas[DRAINING.name].life_cycle is expected


def test_after_a_restart_what_is_hidden_has_to_be_acknowledged_anew() -> None:
    """Without the store it may have been shown again by a revision that nobody wrote down."""
    shown = replace(DRAINING, **parts(spec("b", 1)), life_cycle=LifeCycle.ACTIVE, hidden_revision=3)
    state = State(replicas={DRAINING.name: DRAINING, shown.name: shown}, meta=Meta(endpoint_revision=5))
    resumed = resume(state, now_s=NOW_S, limits=LIMITS)
    assert resumed.meta.endpoint_revision > 5
    assert resumed.replicas[DRAINING.name].hidden_revision == resumed.meta.endpoint_revision
    assert resumed.replicas[shown.name].hidden_revision == 3
