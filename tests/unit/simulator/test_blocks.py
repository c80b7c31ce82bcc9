"""Paged KV blocks: the books always balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.blocks import BlockPool


def test_usage_leaves_out_reusable_blocks() -> None:
    pool = BlockPool(10)
    assert pool.allocate(3)
    assert pool.publish(7)
    assert pool.usage_ratio == pytest.approx(0.3)
    pool.release(2, [7])
    assert pool.usage_ratio == 0
    assert pool.idle_blocks == 1
    assert pool.available_blocks == 10


def test_idle_blocks_are_evicted_oldest_first_and_a_prompts_tail_before_its_head() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3)
    for block_hash in (1, 2, 3):
        assert pool.publish(block_hash)
    pool.release(0, [1, 2, 3])
    assert pool.allocate(2)
    assert pool.match([1, 2, 3]) == 2


def test_claiming_idle_blocks_needs_room_for_them() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.publish(1)
    pool.release(0, [1])
    assert pool.can_admit([1], 1, 2)
    assert not pool.can_admit([1], 1, 3)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda pool: pool.claim([1]), "not cached"),
        (lambda pool: pool.release(1, []), "cannot release 1 private blocks of 0"),
        (lambda pool: pool.publish(1), "no private block"),
    ],
)
def test_wrong_books_are_refused(action, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        action(BlockPool(2))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=60))
def test_blocks_are_conserved_whatever_happens(total: int, actions: list[tuple[int, int]]) -> None:
    pool = BlockPool(total)
    private: list[int] = []
    shared: list[int] = []
    for kind, amount in actions:
        if kind == 0 and pool.allocate(amount):
            private.extend([1] * amount)
        elif kind == 1 and private and pool.publish(amount):
            private.pop()
            shared.append(amount)
        elif kind == 2 and private:
            pool.release(1, [])
            private.pop()
        elif kind == 3 and shared:
            pool.release(0, [shared.pop()])
        elif kind == 4 and pool.match([amount]) and pool.can_admit([amount], 1, 0):
            pool.claim([amount])
            shared.append(amount)
        assert pool.used_blocks == len(private) + len(set(shared))
        assert pool.used_blocks + pool.idle_blocks <= total
        assert pool.available_blocks == total - pool.used_blocks
