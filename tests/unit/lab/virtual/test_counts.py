"""Counts become awake sets: budget kept, what can stay stays, scattered GPUs are brought together."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.virtual.counts import choose_awake
from policy_engine.core.pool.gpu_layout import OverlayReplica, adopt_awake
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import LifeCycle, Role

A, B, PAIR = (MemberKey(name, Role.COLOCATED) for name in ("a", "b", "pair"))
OVERLAY = tuple(
    OverlayReplica(f"{key.service}{first}", key, key.service, "profile", "n", tuple(range(first, first + size)))
    for key, size in ((A, 1), (B, 1), (PAIR, 2))
    for first in range(0, 4, size)
)
BY_NAME = {item.replica: item for item in OVERLAY}


def facts(awake: tuple[str, ...], loads: Mapping[str, int] | None = None) -> dict[str, Replica]:
    return {
        item.replica: Replica(
            replica=item.replica,
            service=item.member.service,
            role=item.member.role,
            life_cycle=LifeCycle.ACTIVE if item.replica in awake else LifeCycle.SLEEPING,
            routable=item.replica in awake,
            in_flight=(loads or {}).get(item.replica, 0),
        )
        for item in OVERLAY
    }


@pytest.mark.parametrize(
    ("awake", "wanted", "loads", "expected"),
    [
        pytest.param(("a0", "b1"), {A: 1, B: 1}, {}, ("a0", "b1"), id="nothing changes"),
        pytest.param(("a0", "a1"), {A: 1}, {"a0": 5}, ("a0",), id="the least loaded goes"),
        pytest.param(("a0",), {A: 1, B: 1}, {}, ("a0", "b1"), id="a broken pair is filled first"),
        pytest.param(("a0", "a1"), {A: 2, PAIR: 1}, {}, ("a0", "a1", "pair2"), id="a whole pair is free"),
        pytest.param(("a0", "b2"), {A: 1, B: 1, PAIR: 1}, {"a0": 9}, ("a0", "b1", "pair2"), id="the less loaded moves"),
        pytest.param(("a0", "a1", "b2"), {A: 2, B: 1, PAIR: 1}, {}, ("a0", "a1", "b2"), id="no room for a pair"),
        pytest.param(("pair0", "pair2"), {PAIR: 1, A: 2}, {"pair0": 1}, ("a2", "a3", "pair0"), id="a pair for two"),
    ],
)
def test_what_counts_become(
    awake: tuple[str, ...], wanted: dict[MemberKey, int], loads: dict[str, int], expected: tuple[str, ...]
) -> None:
    assert choose_awake(OVERLAY, awake, wanted, facts(awake, loads)) == expected


def test_a_replica_in_an_operation_stays_as_it_is() -> None:
    awake = ("a0", "a1")
    assert choose_awake(OVERLAY, awake, {A: 1}, facts(awake, {"a0": 3}), busy=["a1"]) == ("a1",)
    assert choose_awake(OVERLAY, (), {A: 1}, facts(()), busy=["a0"]) == ("a1",)


@given(
    wanted=st.tuples(*(st.integers(0, 4) for _ in range(3))),
    awake=st.lists(st.sampled_from(sorted(BY_NAME)), unique=True, max_size=6),
)
def test_no_gpu_is_given_twice_and_no_member_gets_more_than_it_asked_for(
    wanted: tuple[int, int, int], awake: list[str]
) -> None:
    start = adopt_awake(OVERLAY, awake)
    counts = dict(zip((A, B, PAIR), wanted, strict=True))
    found = choose_awake(OVERLAY, start, counts, facts(start))
    gpus = [gpu for name in found for gpu in BY_NAME[name].gpus]
    assert len(gpus) == len(set(gpus))
    for key, count in counts.items():
        assert sum(1 for name in found if BY_NAME[name].member == key) <= count
    if 2 * counts[PAIR] + counts[A] + counts[B] <= 4:
        assert {key: sum(1 for name in found if BY_NAME[name].member == key) for key in counts} == counts
