"""The arbiter with the leading measure beside Z, and by load alone."""

import dataclasses

import pytest

from policy_engine.core.pool.arbiter import arbitrate
from policy_engine.core.pool.load import Load
from policy_engine.core.pool.target_allocation import solve_counts
from policy_engine.core.shared.vocabulary import Rule
from trimtab.config.poolrules import LoadRule, PoolRules

from .test_arbiter import candidates, key, member, moves


def loaded(name, z, work, routable, **more):
    """A member with `work` replicas' worth of work."""
    return dataclasses.replace(member(name, z, **more), load=Load(work, 0.0, routable))


def pool_of(members, awake, rules=None, **more):
    return dataclasses.replace(candidates(members, awake, **more), rules=rules or PoolRules())


FOUR = {"chat-0", "code-1", "code-2", "code-3"}


def fast(picture):
    return arbitrate(picture, fast_due=True, slow_due=False)


def slow(picture):
    return arbitrate(picture, fast_due=False, slow_due=True)


def test_a_rescue_starts_before_it_is_felt():
    verdict = fast(pool_of([loaded("chat", 1.6, 1.4, 1), loaded("code", 2.0, 0.9, 3)], FOUR))
    assert verdict.rule == Rule.RESCUE_LOAD
    assert moves(verdict) == (["code-1"], ["chat-1"])
    assert "ρ = 1.40" in verdict.reason


def test_no_rescue_below_the_limit_of_load():
    members = [loaded("chat", 1.6, 1.4, 1), loaded("code", 2.0, 0.9, 3)]
    assert moves(fast(pool_of(members, FOUR, PoolRules(load=LoadRule(rescue_above=1.5))))) is None
    by_share_alone = [dataclasses.replace(item, load=None) for item in members]
    assert moves(fast(pool_of(by_share_alone, FOUR, PoolRules.plain()))) is None


def test_the_most_loaded_receives_first():
    """`slow` is worse served now, `chat` has more to come for what it has."""
    members = [loaded("chat", 0.7, 1.9, 1), loaded("slow", 0.6, 1.1, 1), loaded("code", 3.0, 0.2, 2)]
    awake = {"chat-0", "slow-1", "code-2", "code-3"}
    assert moves(fast(pool_of(members, awake))) == (["code-2"], ["chat-2"])
    assert moves(fast(pool_of(members, awake, PoolRules.plain()))) is not None
    plain = [dataclasses.replace(item, load=None) for item in members]
    assert moves(fast(pool_of(plain, awake, PoolRules.plain()))) == (["code-2"], ["slow-2"])


@pytest.mark.parametrize(
    ("began_ago_s", "work", "moved"),
    [
        (2.0, 0.4, False),  # prompts have come and no tokens yet, and one replica is plenty
        (2.0, 1.2, True),  # and it is not
        (5.0, 0.4, True),  # a window that was busy throughout says so too
        (None, 0.4, True),  # it was never seen idle
    ],
)
def test_what_has_just_begun_is_judged_by_its_load(began_ago_s, work, moved):
    chat = dataclasses.replace(loaded("chat", 0.05, work, 1), began_ago_s=began_ago_s)
    picture = pool_of([chat, loaded("code", 3.0, 0.2, 3)], FOUR)
    verdict = fast(picture)
    assert (moves(verdict) is not None) is moved
    assert (moves(slow(picture)) is not None) is moved
    if not moved:
        reasons = [item.reason for item in verdict.candidates]
        assert reasons == ["was idle 2 s ago: its Z has not seen a busy window, and ρ = 0.40"]


def test_what_has_just_begun_is_judged_by_its_z_where_no_load_is_known():
    chat = dataclasses.replace(member("chat", 0.05), began_ago_s=2.0)
    assert moves(fast(pool_of([chat, member("code", 3.0)], FOUR))) is not None


@pytest.mark.parametrize(
    ("donor_work", "gives"),
    [
        (1.2, True),  # 1.2 / 2 = 0.6 is below 0.8
        (1.7, False),  # 0.85 is above 0.8 and not below the receiver's 0.9 by the margin
    ],
)
def test_a_donor_stays_lightly_loaded(donor_work, gives):
    members = [loaded("chat", 0.5, 0.9, 1), loaded("code", 4.0, donor_work, 3)]
    verdict = fast(pool_of(members, FOUR))
    assert (moves(verdict) is not None) is gives
    if not gives:
        assert [item.reason for item in verdict.candidates if item.donor] == ["its ρ would rise to 0.85, above 0.80"]


def test_in_an_overload_load_is_levelled_and_not_swapped():
    members = [loaded("chat", 0.3, 3.0, 1), loaded("code", 0.7, 3.3, 3)]
    assert moves(fast(pool_of(members, FOUR))) == (["code-1"], ["chat-1"])
    after = [loaded("chat", 0.5, 3.0, 2), loaded("code", 0.5, 3.3, 2)]
    assert moves(fast(pool_of(after, {"chat-0", "chat-1", "code-2", "code-3"}))) is None


LOAD = PoolRules(allocation="load", load=LoadRule(max_wakes=1))


def test_the_whole_pool_is_solved_for_the_least_worst_load():
    members = [loaded("chat", 2.0, 3.0, 1), loaded("code", 2.0, 1.0, 3), loaded("reason", 2.0, 1.2, 1)]
    picture = pool_of(members, {"chat-0", "code-1", "code-2", "code-3", "reason-4"}, LOAD, gpus=8, sizes={"reason": 2})
    # Eight GPUs: one each first (1 + 1 + 2), then chat 1.5 → 1.0 → with 3, reason 1.2 → does not fit any more
    assert solve_counts(picture) == {key("chat"): 3, key("code"): 1, key("reason"): 2}
    verdict = fast(picture)
    assert verdict.rule == Rule.LEVEL_LOAD
    assert moves(verdict) == ([], ["chat-6"])


def test_a_member_without_a_load_keeps_what_it_has():
    members = [loaded("chat", 2.0, 3.0, 1), member("code", 2.0)]
    assert solve_counts(pool_of(members, FOUR, LOAD)) == {key("chat"): 1, key("code"): 3}


def test_by_load_a_move_needs_a_gain_and_something_to_do():
    light = [loaded("chat", 2.0, 0.4, 1), loaded("code", 2.0, 0.1, 3)]
    assert moves(fast(pool_of(light, FOUR, LOAD))) is None, "ρ 0.4 is nothing to act on"
    busy = [loaded("chat", 2.0, 0.9, 1), loaded("code", 2.0, 0.3, 3)]
    assert moves(fast(pool_of(busy, FOUR, LOAD))) == (["code-1"], ["chat-1"])
    level = [loaded("chat", 2.0, 0.9, 1), loaded("code", 2.0, 1.7, 3)]
    assert moves(fast(pool_of(level, FOUR, LOAD))) is None, "0.85 for 0.9 is no gain"


def usually(item, work):
    """The member with what usually arrives beside what arrives now."""
    return dataclasses.replace(item, load=dataclasses.replace(item.load, usual=work))


@pytest.mark.parametrize(
    ("usual", "moved"),
    [
        ((1.8, 0.6), (["code-1", "code-2"], ["chat-1", "chat-2"])),  # 0.6 for both
        ((0.9, 1.2), (["code-1"], ["chat-1"])),  # 0.45 and 0.6
        ((0.9, 1.5), None),  # code would stand at 0.75, not 0.3 below 0.9
        ((0.4, 0.1), None),  # nothing to act on
    ],
)
def test_the_slow_loop_levels_what_usually_arrives(usual, moved):
    """Both are well served, so that no share asks for a move."""
    members = [usually(loaded("chat", 2.0, 0.6, 1), usual[0]), usually(loaded("code", 2.0, 0.6, 3), usual[1])]
    verdict = slow(pool_of(members, FOUR, PoolRules()))
    assert moves(verdict) == moved
    assert verdict.rule == (Rule.HOLD if moved is None else Rule.LEVEL_LOAD)


def test_levelling_can_be_switched_off_and_is_not_for_the_fast_loop():
    members = [usually(loaded("chat", 2.0, 0.6, 1), 1.8), usually(loaded("code", 2.0, 0.6, 3), 0.6)]
    assert moves(slow(pool_of(members, FOUR, PoolRules(allocation="share")))) is None
    assert moves(fast(pool_of(members, FOUR, PoolRules()))) is None


def test_one_burst_is_no_trend():
    """`chat` has much to do now, and little usually: that is for a rescue to judge, not for the slow loop."""
    members = [usually(loaded("chat", 2.0, 1.8, 1), 0.4), usually(loaded("code", 2.0, 0.3, 3), 0.3)]
    assert moves(slow(pool_of(members, FOUR, PoolRules()))) is None


def test_a_member_in_need_comes_before_levelling():
    members = [
        usually(loaded("chat", 2.0, 0.5, 1), 1.5),
        usually(loaded("slow", 0.7, 0.5, 1), 0.3),
        usually(loaded("code", 3.0, 0.2, 2), 0.2),
    ]
    verdict = slow(pool_of(members, {"chat-0", "slow-1", "code-2", "code-3"}, PoolRules()))
    assert verdict.rule == Rule.REBALANCE
    assert [item.service for item in verdict.transition.wakes] == ["slow"]


def test_priority_weighs_load_and_z():
    rules = PoolRules(priority_base=1.5)
    plain = [loaded("chat", 0.7, 1.2, 1), loaded("slow", 0.7, 1.3, 1), loaded("code", 3.0, 0.2, 2)]
    weighed = [dataclasses.replace(plain[0], weight=1.5), *plain[1:]]
    awake = {"chat-0", "slow-1", "code-2", "code-3"}
    assert moves(fast(pool_of(plain, awake, rules)))[1] == ["slow-2"]
    assert moves(fast(pool_of(weighed, awake, rules)))[1] == ["chat-2"]


@pytest.mark.parametrize(
    ("z", "work", "settled", "rescued"),
    [
        (2.0, 1.1, True, False),  # with a surplus of Z this is chance
        (2.0, 1.25, True, True),
        (2.0, 1.1, False, True),  # unless arrivals are on their way elsewhere
        (1.1, 1.1, True, True),
        (1.1, 0.85, False, False),
    ],
)
def test_with_a_surplus_and_settled_arrivals_a_rescue_takes_a_higher_load(z, work, settled, rescued):
    chat = loaded("chat", z, work, 1)
    members = [
        dataclasses.replace(chat, load=dataclasses.replace(chat.load, settled=settled)),
        loaded("code", 3.0, 0.3, 3),
    ]
    assert (moves(fast(pool_of(members, FOUR))) is not None) is rescued


def test_a_surplus_never_lowers_what_a_rescue_takes():
    members = [loaded("chat", 2.0, 1.4, 1), loaded("code", 3.0, 0.3, 3)]
    assert moves(fast(pool_of(members, FOUR, PoolRules(load=LoadRule(rescue_above=1.5))))) is None
