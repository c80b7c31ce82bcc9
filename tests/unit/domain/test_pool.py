"""The codecs of desired states, replicas and operations: what goes out comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.member import MemberKey
from trimtab.domain.operation import (
    Operation,
    OperationKind,
    OperationState,
    Step,
    StepKind,
    operation_from_proto,
    operation_to_proto,
)
from trimtab.domain.pool import DesiredPool, Floor, OverlayReplica, desired_from_proto, desired_to_proto
from trimtab.domain.replica import Hold, Replica, replica_from_proto, replica_to_proto
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role

NAMES = st.text("abc-0", max_size=4)
COUNTS = st.integers(0, 2**31)
SECONDS = st.integers(0, 2**51).map(lambda number: number / 1e6)
GPUS = st.sets(st.integers(0, 63)).map(lambda found: tuple(sorted(found)))
ROLES = st.sampled_from(Role)


@given(
    st.builds(
        DesiredPool,
        pool=NAMES,
        overlay=st.lists(
            st.builds(OverlayReplica, NAMES, st.builds(MemberKey, NAMES, ROLES), NAMES, NAMES, NAMES, gpu_indices=GPUS)
        ).map(tuple),
        awake=st.lists(NAMES).map(tuple),
        floors=st.lists(st.builds(Floor, service=NAMES, role=ROLES, min_replicas=COUNTS)).map(tuple),
        budget_gpus=COUNTS,
        decision_id=NAMES,
        drain_timeout_s=SECONDS,
        sleep_level=st.sampled_from([1, 2]),
        prewarm=st.booleans(),
        residence_s=SECONDS,
        state_revision=COUNTS,
        replica_revision=COUNTS,
        expires_s=st.none() | SECONDS,
    )
)
def test_a_desired_state_comes_back_as_it_was(desired: DesiredPool) -> None:
    assert desired_from_proto(desired_to_proto(desired)) == desired


def test_a_sleep_level_that_was_not_said_is_the_first() -> None:
    assert desired_from_proto(pb.PoolState(pool="p")).sleep_level == 1


@given(
    st.builds(
        Replica,
        replica=NAMES,
        service=NAMES,
        role=ROLES,
        life_cycle=st.sampled_from(LifeCycle),
        routable=st.booleans(),
        in_flight=st.none() | COUNTS,
        node=NAMES,
        gpu_indices=GPUS,
        pool=NAMES,
        deployment_group=NAMES,
        cluster=NAMES,
        model=NAMES,
        address=NAMES,
        gpu_type=NAMES,
        holds=st.lists(
            st.builds(Hold, owner=st.sampled_from(HoldOwner), reason=NAMES, since_s=SECONDS), max_size=2
        ).map(tuple),
        ready=st.booleans(),
        life_cycle_since_s=SECONDS,
        start_s=SECONDS,
        revision=COUNTS,
        detail=NAMES,
        slept_once=st.booleans(),
    )
)
def test_a_replica_comes_back_as_it_was(replica: Replica) -> None:
    assert replica_from_proto(replica_to_proto(replica)) == replica


def test_a_life_cycle_of_a_later_release_is_unknown_and_a_role_is_refused_by_name() -> None:
    message = pb.Replica(replica="r-0", role=types_pb2.ROLE_DECODE, life_cycle=99)
    assert replica_from_proto(message).life_cycle is LifeCycle.UNKNOWN
    message.role = 99
    with pytest.raises(ValueError, match="replica r-0: 99 is no role"):
        replica_from_proto(message)


STATES = st.sampled_from(OperationState)


@given(
    st.builds(
        Operation,
        operation_id=NAMES,
        kind=st.none() | st.sampled_from(OperationKind),
        state=STATES,
        subject=NAMES,
        decision_id=NAMES,
        cluster=NAMES,
        steps=st.lists(
            st.builds(
                Step,
                kind=st.none() | st.sampled_from(StepKind),
                replica=NAMES,
                service=NAMES,
                state=STATES,
                phase=NAMES,
                detail=NAMES,
                start_s=SECONDS,
                end_s=SECONDS,
            ),
            max_size=3,
        ).map(tuple),
        create_s=SECONDS,
        update_s=SECONDS,
        deadline_s=SECONDS,
        detail=NAMES,
    )
)
def test_an_operation_comes_back_as_it_was(operation: Operation) -> None:
    assert operation_from_proto(operation_to_proto(operation)) == operation


def test_a_state_of_a_later_release_has_not_ended() -> None:
    assert not operation_from_proto(pb.Operation(operation_id="o-1", state=99)).finished
