"""What surrounds a pool's decision: its input, its desired state, and what comes of transitions that failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policy_engine.core.pool.cycle import PoolPicture, pool_input, with_counts
from policy_engine.core.pool.decide import PoolInput, PoolState
from policy_engine.core.pool.desired import desired_pool, rebound, same_wish, succeeding
from policy_engine.core.pool.initial_layout import LayoutInput, birth_input, lay_out
from policy_engine.core.pool.transition_outcome import (
    REFUSED_PAUSE_S,
    Acknowledged,
    awake_after,
    caught_up,
    must_publish,
    refused,
    settled,
    under_way,
)
from policy_engine.core.shared.draft import ReplicaChange, Transition
from policy_engine.core.shared.vocabulary import Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.operation import Operation, OperationKind, OperationState, Step, StepKind
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import LifeCycle, Role

NOW_S = 1_700_000_000.0


def policy(name: str, low: int = 1) -> ServicePolicy:
    return ServicePolicy.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "model": f"m-{name}",
                "slo": {"ttftS": 1, "tpotS": 1},
                "roles": [{"role": "colocated", "minReplicas": low, "maxReplicas": 2}],
                "tokenServiceShare": {"thetaTps": 20},
            },
        }
    )


def pool(**spec: object) -> Pool:
    """Two GPUs that chat and code share, one replica of each awake."""
    return Pool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "n", "gpuIndices": [0, 1]}],
                "members": [{"service": "chat", "initialAwake": 1}, {"service": "code", "initialAwake": 1}],
                **spec,
            },
        }
    )


POLICIES = (policy("chat"), policy("code"))
# Awake at the birth: chat on GPU 0, code on GPU 1.
TRANSITION = Transition(
    releases=(ReplicaChange("code-n-1", "code", Role.COLOCATED, 1),),
    wakes=(ReplicaChange("chat-n-1", "chat", Role.COLOCATED, 1),),
)


def desired(given: Pool | None = None, **more: object) -> DesiredPool:
    given = given or pool()
    birth = lay_out(LayoutInput(given, POLICIES))
    made = desired_pool(given, POLICIES, birth.overlay, birth.awake, "d-0", state_revision=1)
    return replace(made, **more)


def listed(name: str, life_cycle: LifeCycle = LifeCycle.ACTIVE, **more: object) -> Replica:
    fields = {"pool": "shared", "in_flight": 3} | more
    service = name.partition("-")[0]
    return Replica(
        replica=name,
        service=service,
        role=Role.COLOCATED,
        life_cycle=life_cycle,
        routable=life_cycle is LifeCycle.ACTIVE,
        **fields,
    )


def operation(kind: OperationKind, *steps: tuple[StepKind, str], **more: object) -> Operation:
    fields = {"subject": "shared", "state": OperationState.RUNNING} | more
    made = tuple(
        Step(kind=step, replica=name, service=name.partition("-")[0], state=OperationState.RUNNING)
        for step, name in steps
    )
    return Operation(operation_id=f"o-{kind}", kind=kind, steps=made, **fields)


def given_of(*replicas: Replica, operations: tuple[Operation, ...] = ()) -> PoolInput:
    picture = PoolPicture(
        now_s=NOW_S,
        pool=pool(),
        policies=POLICIES,
        desired=desired(),
        replicas=replicas,
        operations=operations,
        under_way=(),
        views={},
        fronts={},
    )
    return pool_input(picture, PoolState())


# The input


def test_replicas_and_operations_of_other_pools_are_passed_over() -> None:
    stranger = operation(OperationKind.TRANSITION, (StepKind.WAKE, "chat-n-0"), subject="other")
    ended = operation(OperationKind.OVERLAY, (StepKind.WAKE, "code-n-1"), state=OperationState.SUCCEEDED)
    given = given_of(listed("code-n-1"), listed("chat-x", pool="other"), operations=(stranger, ended))
    assert [item.replica for item in given.replicas] == ["code-n-1"]
    assert given.busy == ()


def test_a_replica_that_is_pre_warmed_keeps_nobody_from_its_gpus_and_its_donors_are_not_busy() -> None:
    prewarm = operation(OperationKind.PREWARM, (StepKind.RELEASE, "code-n-1"), (StepKind.CREATE, "chat-n-1"))
    repair = operation(OperationKind.OVERLAY, (StepKind.WAKE, "code-n-0"))
    given = given_of(listed("chat-n-1", LifeCycle.STARTING), listed("code-n-1"), operations=(prewarm, repair))
    assert [(item.replica, item.life_cycle) for item in given.replicas] == [
        ("chat-n-1", LifeCycle.FAILED),
        ("code-n-1", LifeCycle.ACTIVE),
    ]
    assert given.busy == ("code-n-0",)


def test_newer_counts_replace_older_ones_and_a_replica_without_one_keeps_its_own() -> None:
    given = with_counts(given_of(listed("chat-n-0"), listed("code-n-1")), {"chat-n-0": 7})
    assert [item.in_flight for item in given.replicas] == [7, 3]
    assert [item.in_flight for item in with_counts(given, {"chat-n-0": None}).replicas] == [None, 3]


# The desired state


def test_a_floor_that_the_awake_set_does_not_reach_is_given_as_what_there_is() -> None:
    made = succeeding(desired(), pool(), POLICIES, ("chat-n-0",), "d-1")
    assert {item.service: item.min_replicas for item in made.floors} == {"chat": 1, "code": 0}
    assert (made.state_revision, made.decision_id) == (2, "d-1")


@pytest.mark.parametrize(("prewarm", "residence_s"), [(True, 20.0), (False, 0.0)])
def test_the_residence_goes_out_with_pre_warming_alone(*, prewarm: bool, residence_s: float) -> None:
    made = desired(pool(prewarm=prewarm, residenceS=20))
    assert (made.prewarm, made.residence_s) == (prewarm, residence_s)


def test_a_state_is_the_same_wish_whatever_its_revision_and_origin() -> None:
    one = desired()
    assert same_wish(one, replace(one, state_revision=9, decision_id="d-9", replica_revision=4, expires_s=NOW_S))
    assert not same_wish(one, replace(one, sleep_level=2))
    assert rebound(one, pool(), POLICIES) is None
    changed = rebound(one, pool(drainTimeoutS=7), POLICIES)
    assert changed is not None
    assert (changed.state_revision, changed.decision_id, changed.drain_timeout_s) == (2, "d-0", 7.0)


def test_a_pool_that_is_new_takes_over_who_is_awake_in_its_cluster() -> None:
    overlay = desired().overlay
    replicas = (listed("code-n-0"), listed("code-n-1"), listed("chat-n-0", LifeCycle.SLEEPING))
    assert birth_input(pool(), POLICIES, None, replicas, overlay, ()).awake == ("code-n-0", "code-n-1")
    assert birth_input(pool(), POLICIES, desired(), replicas, overlay, ()).awake == ("chat-n-0", "code-n-1")


def test_an_actuator_that_is_ahead_is_followed_from_what_is_awake() -> None:
    awake = (listed("chat-n-0"), listed("chat-n-1"))
    ahead = caught_up(desired(), pool(), POLICIES, awake, their_revision=12)
    assert (ahead.state_revision, ahead.awake) == (13, ("chat-n-0", "chat-n-1"))
    empty = caught_up(desired(state_revision=20), pool(), POLICIES, (), their_revision=12)
    assert (empty.state_revision, empty.awake) == (21, desired().awake)


# Publishing


def test_a_state_is_sent_until_it_is_acknowledged_and_again_to_an_actuator_that_came_back() -> None:
    mark = Acknowledged(state_revision=4, generation=1, token=7)
    assert must_publish(mark, None, None, now_s=NOW_S)
    assert not must_publish(mark, mark, None, now_s=NOW_S)
    for other in ({"state_revision": 3}, {"generation": 0}, {"token": 6}):
        assert must_publish(mark, replace(mark, **other), None, now_s=NOW_S)


def test_a_state_that_was_refused_waits_and_a_newer_one_does_not() -> None:
    refusal = refused(desired(state_revision=4), "no", now_s=NOW_S)
    same, newer = (Acknowledged(revision, generation=1, token=7) for revision in (4, 5))
    assert not must_publish(same, None, refusal, now_s=NOW_S + REFUSED_PAUSE_S - 0.1)
    assert must_publish(same, None, refusal, now_s=NOW_S + REFUSED_PAUSE_S)
    assert must_publish(newer, None, refusal, now_s=NOW_S)


# Transitions


def test_a_transition_without_an_operation_bars_all_others() -> None:
    waiting = under_way(TRANSITION, Rule.REBALANCE, decision_id="d-1", operation_id="")
    assert (waiting.operation, waiting.replicas) == ("of d-1", ())
    taken = under_way(TRANSITION, Rule.REBALANCE, decision_id="d-1", operation_id="o-1")
    assert (taken.operation, taken.replicas) == ("o-1", ("chat-n-1", "code-n-1"))


@pytest.mark.parametrize("state", [OperationState.ROLLED_BACK, OperationState.CANCELLED])
def test_what_was_rolled_back_is_as_before_whatever_is_listed(state: OperationState) -> None:
    now = awake_after(state, released=["code-n-1"], replicas=[listed("chat-n-1")])
    assert now == {"code-n-1"}


def test_of_a_transition_that_failed_the_life_cycles_say_who_is_awake() -> None:
    """Its steps do not: a replica that was hidden and never slept is awake, and so is one that nobody moved."""
    replicas = [listed("chat-n-1", LifeCycle.SLEEPING), listed("code-n-1", LifeCycle.DRAINING), listed("chat-n-0")]
    assert awake_after(OperationState.FAILED, released=["code-n-1"], replicas=replicas) == {"code-n-1", "chat-n-0"}


@pytest.mark.parametrize("preempted", [True, False])
def test_a_transition_that_gave_way_bars_nobody(*, preempted: bool) -> None:
    moved = succeeding(desired(), pool(), POLICIES, ("chat-n-0", "chat-n-1"), "d-1")
    after = settled(
        PoolState(),
        moved,
        pool(),
        POLICIES,
        TRANSITION,
        frozenset({"code-n-1"}),
        decision_id="d-1",
        preempted=preempted,
        now_s=NOW_S,
    )
    assert (after.desired.awake, after.desired.state_revision) == (("chat-n-0", "code-n-1"), 3)
    assert [item.replica for item in after.state.barred] == ([] if preempted else ["chat-n-1", "code-n-1"])
