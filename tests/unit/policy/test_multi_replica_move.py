"""Several replicas for one receiver in one transition, sized by its load."""

import dataclasses

import pytest

from policy_engine.core.pool.arbiter import arbitrate
from policy_engine.core.pool.capacity_sources import source
from policy_engine.core.pool.donors import Terms
from policy_engine.core.pool.multi_replica_move import after_plan
from policy_engine.core.shared.vocabulary import Rule
from trimtab.config.poolrules import LoadRule, PoolRules

from .test_arbiter import candidates, key, member, moves
from .test_load_rules import loaded

EIGHT = {"chat-0", "code-1", "code-2", "code-3", "code-4", "rest-5", "rest-6", "rest-7"}


def fast(members, awake, *, most, allocation="share", gpus=8, sizes=None):
    rules = PoolRules(load=LoadRule(max_wakes=most), allocation=allocation)
    picture = dataclasses.replace(candidates(members, awake, gpus=gpus, sizes=sizes), rules=rules)
    return arbitrate(picture, fast_due=True, slow_due=False)


def burst(work):
    """`chat` has one replica and `work`; `code` has four and `rest` three, both with little to do."""
    return [loaded("chat", 0.5, work, 1), loaded("code", 3.0, 0.8, 4), loaded("rest", 3.0, 0.9, 3)]


@pytest.mark.parametrize(
    ("work", "most", "wakes"),
    [
        (1.4, 4, 1),  # 1.4 / 2 is below 0.9
        (2.4, 4, 2),
        (3.5, 4, 3),
        (3.5, 2, 2),  # bounded by the rule
        (3.5, 1, 1),
    ],
)
def test_a_burst_is_met_in_one_transition(work, most, wakes):
    verdict = fast(burst(work), EIGHT, most=most)
    assert verdict.rule == Rule.RESCUE_CRITICAL
    assert len(verdict.transition.wakes) == len(verdict.transition.releases) == wakes
    assert {item.service for item in verdict.transition.wakes} == {"chat"}


def test_each_further_donor_is_judged_as_it_will_stand_then():
    """`code` gives from four to two (ρ 0.2 → 0.4) and then has no more than `rest` with two; floors are kept."""
    verdict = fast(burst(9.0), EIGHT, most=8)
    given_up = [item.service for item in verdict.transition.releases]
    assert given_up.count("code") == 3
    assert given_up.count("rest") == 2
    names = [item.replica for item in (*verdict.transition.releases, *verdict.transition.wakes)]
    assert len(set(names)) == len(names)


def test_idle_gpus_and_a_release_may_go_together():
    verdict = fast(burst(2.6), EIGHT - {"rest-7"}, most=4)
    assert moves(verdict) == (["code-1"], ["chat-1", "chat-7"])


def test_without_a_load_one_replica_is_gained():
    members = [member("chat", 0.1), *burst(1.0)[1:]]
    assert len(fast(members, EIGHT, most=4).transition.wakes) == 1


def test_by_load_up_to_what_the_whole_pool_asks_for():
    verdict = fast(burst(3.0), EIGHT, most=8, allocation="load")
    assert verdict.rule == Rule.LEVEL_LOAD
    # Eight for 3.0, 0.8 and 0.9 of work: four, two and two.
    assert len(verdict.transition.wakes) == 3


def test_a_large_receiver_takes_pairs():
    members = [loaded("big", 0.5, 2.5, 1), loaded("code", 3.0, 0.4, 6)]
    awake = {"big-0", *(f"code-{index}" for index in range(2, 8))}
    verdict = fast(members, awake, most=4, sizes={"big": 2})
    assert [item.replica for item in verdict.transition.wakes] == ["big-2", "big-4"]
    assert len(verdict.transition.releases) == 4


def test_the_world_after_a_plan():
    members = [loaded("chat", 0.5, 2.0, 1), loaded("code", 3.0, 0.9, 3)]
    picture = candidates(members, {"chat-0", "code-1", "code-2", "code-3"})
    plan = source(picture, members[0], Terms(key("chat"), 0.5)).plan
    world = after_plan(picture, plan)
    assert world.awake == ("chat-0", "chat-1", "code-2", "code-3")
    assert (world.routable_count(key("chat")), world.routable_count(key("code"))) == (2, 2)
    assert world.member(key("chat")).load.rho == pytest.approx(1.0)
    assert world.member(key("code")).load.rho == pytest.approx(0.45)
    assert world.member(key("code")).share.z < 3.0 < picture.member(key("code")).share.z + 1e-9
