"""Sharing targets out: everybody reckons alike, each target has one owner, and only a share moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics_collector.core.sharing import (
    Member,
    lease_s,
    owner,
    parse_members,
    share,
    sharers,
    sources_fingerprint,
)

NAMES = ["collector-0", "collector-1", "collector-2"]
TARGETS = [f"chat-{number}" for number in range(3000)]


def member(name: str, *, joined_at_s: float = 0.0, until_s: float = 102.0, sources: str = "a") -> Member:
    return Member(name=name, incarnation="x", joined_at_s=joined_at_s, until_s=until_s, interval_s=1.0, sources=sources)


def test_each_target_has_one_owner_and_shares_are_even() -> None:
    shares = [share(TARGETS, NAMES, name=name) for name in NAMES]

    assert sorted(target for one in shares for target in one) == sorted(TARGETS)
    assert all(900 < len(one) < 1100 for one in shares)
    assert share(TARGETS, NAMES, name="stranger") == frozenset()


def test_the_owner_is_the_same_in_every_process() -> None:
    assert [owner(target, NAMES) for target in TARGETS[:6]] == OWNERS


OWNERS = ["collector-1", "collector-1", "collector-2", "collector-2", "collector-2", "collector-2"]


@given(gone=st.sampled_from(NAMES), target=st.sampled_from(TARGETS))
def test_a_member_that_goes_moves_its_own_targets_only(gone: str, target: str) -> None:
    before, after = owner(target, NAMES), owner(target, [name for name in NAMES if name != gone])

    assert after == before or before == gone


@pytest.mark.parametrize(
    ("members", "at_s", "expected"),
    [
        pytest.param([member("a")], 100.0, ("a",), id="one alone"),
        pytest.param([member("a", joined_at_s=100.0)], 100.0, ("a",), id="the first works at once"),
        pytest.param([member("a"), member("b", joined_at_s=99.0)], 100.9, ("a",), id="a new one is not yet counted"),
        pytest.param([member("a"), member("b", joined_at_s=99.0)], 101.0, ("a", "b"), id="two intervals later it is"),
        pytest.param(
            [member("a"), member("b", until_s=100.0)], 99.9, ("a", "b"), id="a silent one until its lease ends"
        ),
        pytest.param([member("a"), member("b", until_s=100.0)], 100.0, ("a",), id="and no longer"),
        pytest.param([member("a"), member("b", sources="z")], 100.0, ("a",), id="other sources share nothing"),
        pytest.param([member("a", until_s=50.0)], 100.0, (), id="nobody lives"),
        pytest.param(
            [member("b", joined_at_s=100.0), member("a", joined_at_s=100.0)], 100.0, ("a", "b"), id="all start at once"
        ),
    ],
)
def test_who_shares(members: list[Member], at_s: float, expected: tuple[str, ...]) -> None:
    assert sharers(members, sources="a", at_s=at_s) == expected


def test_a_lease_outlasts_an_interval_and_is_over_within_two() -> None:
    assert [lease_s(interval_s) for interval_s in (0.2, 1.0, 4.0)] == [1.0, 1.25, 5.0]


def test_members_are_read_and_what_is_none_is_passed_over() -> None:
    found = parse_members({b"b": b"i2 1000 2500 500 s", b"a": b"i1 0 1 1000 s", b"c": b"nonsense", b"d": b"i x 1 1 s"})

    assert [item.name for item in found] == ["a", "b"]
    assert found[1] == Member(name="b", incarnation="i2", joined_at_s=1.0, until_s=2.5, interval_s=0.5, sources="s")


def test_sources_are_told_apart_in_any_order() -> None:
    assert sources_fingerprint(["x", "y"]) == sources_fingerprint(["y", "x"]) != sources_fingerprint(["x"])
