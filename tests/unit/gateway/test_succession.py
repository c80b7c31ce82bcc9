"""Which endpoint set a gateway routes by when they come by several ways, late, or out of an older store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.revision_order import STANDS_BY_S, RevisionOrder


@pytest.mark.parametrize(
    ("comes", "expected"),
    [
        # (revision, has_leader, seconds) → routed by in the end
        ([(5, False, 0), (6, True, 1), (7, False, 2)], 7),
        ([(7, True, 0), (7, True, 1)], 7),
        ([(7, True, 0), (5, False, 1), (5, False, 1000)], 7),
        ([(7, True, 0), (5, True, 1), (5, True, STANDS_BY_S)], 7),
        ([(7, True, 0), (5, True, 1), (5, True, STANDS_BY_S + 1)], 5),
        ([(7, True, 0), (5, True, 1), (6, True, STANDS_BY_S + 1)], 6),
        ([(7, True, 0), (5, True, 1), (7, True, 5), (5, True, STANDS_BY_S + 1)], 7),
        ([(7, True, 0), (5, True, 1), (5, False, STANDS_BY_S + 1)], 7),
    ],
    ids=[
        "newer ones",
        "the same again",
        "an old store without an actuator, for ever",
        "an actuator that has not stood by it for long",
        "an actuator that has",
        "and went on meanwhile",
        "the newer one was heard of again in between",
        "the actuator has gone",
    ],
)
def test_an_older_set_is_taken_only_when_an_actuator_stands_by_it(
    comes: list[tuple[int, bool, float]], expected: int
) -> None:
    revision_order = RevisionOrder()
    for revision, has_leader, now_s in comes:
        revision_order.takes(revision, has_leader=has_leader, now_s=now_s)
    assert revision_order.revision == expected


def test_what_was_confirmed_in_between_begins_the_wait_anew() -> None:
    revision_order = RevisionOrder()
    revision_order.takes(7, has_leader=True, now_s=0.0)
    revision_order.takes(5, has_leader=True, now_s=1.0)
    revision_order.confirmed()
    assert not revision_order.takes(5, has_leader=True, now_s=STANDS_BY_S + 1)
    assert revision_order.takes(5, has_leader=True, now_s=2 * STANDS_BY_S + 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.floats(0, 3)), max_size=30))
def test_nobody_goes_back_within_the_time_after_the_newest_was_heard_of(
    comes: list[tuple[int, bool, float]],
) -> None:
    revision_order, now_s = RevisionOrder(), 0.0
    newest_at: dict[int, float] = {}
    for revision, has_leader, pause_s in comes:
        now_s += pause_s
        before = revision_order.revision
        took = revision_order.takes(revision, has_leader=has_leader, now_s=now_s)
        assert took == (revision_order.revision == revision)
        if before is not None and revision < before and took:
            assert has_leader
            assert now_s - newest_at[before] >= STANDS_BY_S
        if took:
            newest_at[revision] = now_s
