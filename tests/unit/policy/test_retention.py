"""Which decision records are dropped: by subject, fairly beyond the limit on all, and of deleted subjects."""

from hypothesis import given
from hypothesis import strategies as st

from policy_engine.core.shared.retention import RetentionLimits, surplus

LIMITS = RetentionLimits(per_subject=3, in_all=100, deleted_subjects=2)


def left_after(owned, dropped):
    return {subject: [name for name in ids if name not in dropped] for subject, ids in owned.items()}


def numbered(*numbers: int) -> list[str]:
    return [f"d-{number:04}" for number in numbers]


def test_each_subject_keeps_its_newest() -> None:
    owned = {"chat": numbered(1, 3, 5, 7, 9), "code": numbered(2)}
    assert surplus(owned, open_ids=set(), live=None, limits=LIMITS) == numbered(1, 3)


def test_an_open_record_outlives_newer_ones_that_are_closed() -> None:
    owned = {"pool": numbered(1, 2, 3, 4)}
    assert surplus(owned, open_ids={"d-0001"}, live=None, limits=LIMITS) == numbered(2)
    every = set(owned["pool"])
    assert surplus(owned, open_ids=every, live=None, limits=LIMITS) == numbered(1), "open ones are bounded, too"


def test_beyond_the_limit_on_all_the_largest_gives_way() -> None:
    limits = RetentionLimits(per_subject=100, in_all=6)
    owned = {"quiet": numbered(1), "busy": numbered(2, 3, 4, 5, 6, 7), "other": numbered(0, 8)}
    assert surplus(owned, open_ids=set(), live=None, limits=limits) == numbered(2, 3, 4)


def test_of_equal_subjects_the_one_that_was_silent_longest_gives_way() -> None:
    limits = RetentionLimits(per_subject=100, in_all=3)
    owned = {"silent": numbered(1, 2), "new": numbered(3, 4)}
    assert surplus(owned, open_ids=set(), live=None, limits=limits) == numbered(1)


def test_the_newest_deleted_subjects_are_kept() -> None:
    owned = {"chat": numbered(1), "gone-1": numbered(2, 9), "gone-2": numbered(3), "gone-3": numbered(4, 5)}
    assert surplus(owned, open_ids=set(), live={"chat"}, limits=LIMITS) == numbered(3)
    assert surplus(owned, open_ids=set(), live=None, limits=LIMITS) == [], "not known yet which exist"


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sets(st.integers(0, 500), min_size=1, max_size=30)),
    st.integers(1, 20),
    st.integers(1, 60),
    st.sets(st.integers(0, 500), max_size=40),
)
def test_a_subject_within_its_equal_share_loses_nothing(
    numbers: dict[str, set[int]], per_subject: int, in_all: int, open_numbers: set[int]
) -> None:
    owned = {subject: [f"d-{number:04}-{subject}" for number in sorted(ids)] for subject, ids in numbers.items()}
    open_ids = {name for ids in owned.values() for name in ids if int(name[2:6]) in open_numbers}
    limits = RetentionLimits(per_subject=per_subject, in_all=in_all)
    dropped = surplus(owned, open_ids=open_ids, live=None, limits=limits)
    left = left_after(owned, set(dropped))
    assert sum(map(len, left.values())) <= in_all
    assert all(len(ids) <= per_subject for ids in left.values())
    share = min(per_subject, in_all // max(1, len(owned)))
    for subject, ids in owned.items():
        assert len(left[subject]) >= min(len(ids), share)
    within = {subject: ids[-per_subject:] for subject, ids in owned.items()}
    if not open_ids and sum(map(len, within.values())) <= in_all:
        assert left == within, "nothing goes but by the subject's own limit"
