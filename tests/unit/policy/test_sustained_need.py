"""How long needs last, and who has to wait for that."""

import dataclasses

import pytest

from policy_engine.core.pool.guards import GuardState
from policy_engine.core.pool.load import Load
from policy_engine.core.pool.sustained_need import NeedMemory, remember_need
from policy_engine.core.shared.vocabulary import Rule
from trimtab.config.poolrules import LoadRule, PoolRules

from .test_arbiter import moves
from .test_load_rules import FOUR, fast, loaded, pool_of, slow, usually

RULE = LoadRule(patience_s=10)


def after(works, *, memory=None, first_s=100.0, starved=False, replicas=2):
    """The memory after windows, one second apart, in which so much arrived for `replicas`."""
    memory = memory or NeedMemory()
    for second, work in enumerate(works):
        memory = remember_need(memory, Load(work, 0.0, replicas), first_s + second, RULE, starved=starved)
    return memory


CALM, BURST, STEP = [0.2] * 20, [3.0] * 3 + [0.2] * 17, [3.0] * 20


def test_bursts_that_are_over_are_remembered_as_brief():
    once = after(BURST)
    assert once.brief == pytest.approx(0.3)
    twice = after(BURST, memory=once, first_s=120.0)
    assert twice.brief == pytest.approx(0.3 + 0.3 * 0.7)
    assert after(CALM).brief == 0.0


def test_a_need_that_lasts_makes_the_next_be_believed():
    brief = after(BURST * 6)
    lasted = after(STEP[:9], memory=brief, first_s=1000.0)
    assert lasted.brief == pytest.approx(0.7 * brief.brief)


def test_what_was_looked_at_again_is_measured_by_what_it_began_with():
    """A rescue came in between: with four replicas ρ is low, and yet the need lasts."""
    began = after([3.0] * 3)
    rescued = after([3.0] * 6, memory=began, first_s=103.0, replicas=4)
    assert (rescued.brief, rescued.watched_since_s) == (0.0, None)


def test_patience_grows_with_the_share_of_brief_needs_and_is_used_up_by_the_need():
    memory = after(BURST * 6)
    assert memory.waits_s(RULE) == pytest.approx(10 * memory.brief), "no need yet"
    began = after([3.0], memory=memory, first_s=500.0)
    assert began.waits_s(RULE) == pytest.approx(10 * memory.brief)
    later = after([3.0] * 5, memory=memory, first_s=500.0)
    assert later.waits_s(RULE) == pytest.approx(10 * memory.brief - 4)
    assert after([3.0] * 12, memory=memory, first_s=500.0).waits_s(RULE) == 0.0, "never for longer than the need lasts"
    assert memory.waits_s(LoadRule(patience_s=0)) == 0.0


def test_a_share_that_lacks_uses_patience_up_whatever_the_load_says():
    """A profile may state too much capacity: then ρ looks well while requests starve."""
    memory = after(BURST * 6)
    assert after([0.5] * 12, memory=memory, first_s=500.0, starved=True).waits_s(RULE) == 0.0
    assert after([0.5] * 12, memory=memory, first_s=500.0).waits_s(RULE) > 5.0


def test_windows_count_once_and_a_clock_set_back_begins_anew():
    memory = after(BURST * 6)
    assert remember_need(memory, Load(9.0, 0.0, 2), memory.window_end_s, RULE, starved=True) == memory
    assert remember_need(memory, None, 999.0, RULE, starved=False) == memory
    assert remember_need(memory, Load(0.1, 0.0, 2), 1.0, RULE, starved=False).brief == 0.0


def waiting(member, seconds=4.0, **more):
    return dataclasses.replace(member, waits_s=seconds, **more)


def test_who_waits_is_not_rescued_and_the_record_says_why():
    members = [waiting(loaded("chat", 1.1, 1.4, 1)), loaded("code", 3.0, 0.3, 3)]
    verdict = fast(pool_of(members, FOUR))
    assert moves(verdict) is None
    assert "its needs are brief: this one has to last 4 s more" in {item.reason for item in verdict.candidates}
    critical = [waiting(loaded("chat", 0.2, 1.4, 1)), loaded("code", 3.0, 0.3, 3)]
    assert moves(fast(pool_of(critical, FOUR))) is None


@pytest.mark.parametrize(("brief", "patience_s", "levelled"), [(0.4, 10, True), (0.6, 10, False), (0.6, 0, True)])
def test_what_mostly_brief_needs_add_up_to_is_not_levelled(brief, patience_s, levelled):
    """A member whose needs were brief now and then still gets what it usually has to do."""
    chat = dataclasses.replace(usually(loaded("chat", 2.0, 0.6, 1), 1.8), brief=brief)
    rules = PoolRules(load=LoadRule(patience_s=patience_s))
    verdict = slow(pool_of([chat, usually(loaded("code", 2.0, 0.6, 3), 0.6)], FOUR, rules))
    assert (verdict.rule == Rule.LEVEL_LOAD) is levelled
    said = {item.reason for item in verdict.candidates}
    assert ("most of its needs are brief: what it usually has is no sign" in said) is not levelled


def test_hard_guards_do_not_wait():
    guard = GuardState("TTFT", "TTFT")
    members = [waiting(loaded("chat", 1.1, 1.4, 1), guard=guard), loaded("code", 3.0, 0.3, 3)]
    verdict = fast(pool_of(members, FOUR))
    assert verdict.rule == Rule.RESCUE_HARD_GUARD
    assert moves(verdict) is not None


def test_a_member_without_capacity_does_not_wait():
    chat = waiting(dataclasses.replace(loaded("chat", 0.0, 1.4, 0), floor=0))
    verdict = fast(pool_of([chat, loaded("code", 3.0, 0.3, 3)], {"code-1", "code-2", "code-3"}))
    assert verdict.rule in (Rule.RESCUE_CRITICAL, Rule.IDLE_GPU)
    assert moves(verdict) is not None
