"""Moves that make requests quicker while nobody is in need."""

import dataclasses

import pytest

from policy_engine.core.pool.latency_moves import burden, quicker
from policy_engine.core.pool.load import Load
from policy_engine.core.pool.predict import speed
from policy_engine.core.shared.vocabulary import Rule
from trimtab.config.poolrules import LoadRule, PoolRules

from .test_arbiter import member, moves
from .test_load_rules import fast, pool_of, slow


def busy(name, work, routable, *, requests, rps, usual=None, settled=True, **more):
    """A well served member in a steady state: by Little's law each of its requests takes `requests / rps` seconds."""
    usual = work if usual is None else usual
    load = Load(work, 0.0, routable, usual=usual, requests=requests, request_rps=rps, settled=settled)
    return dataclasses.replace(member(name, 2.0), load=load, **more)


def answers(**more):
    """`code` has long answers, 20 s each, and ρ 0.55 on three replicas."""
    return busy("code", **{"work": 1.65, "routable": 3, "requests": 200.0, "rps": 10.0, **more})


def questions(**more):
    """`chat` has short ones, 2 s each, and ρ 0.35 on two."""
    return busy("chat", **{"work": 0.7, "routable": 2, "requests": 20.0, "rps": 10.0, **more})


TWO_AND_THREE = {"chat-0", "chat-4", "code-1", "code-2", "code-3"}


def picture(*members, rules=None):
    return pool_of(members, TWO_AND_THREE, rules, gpus=5)


def test_a_burden_is_the_rate_times_the_cubed_latency():
    item = answers()
    assert burden(item, 3) == pytest.approx(10.0 * 20.0**3)
    c = item.lost_at_capacity
    slower = speed(0.55, c) / speed(1.65 / 4, c)
    assert burden(item, 4) == pytest.approx(10.0 * (20.0 * slower) ** 3)
    assert burden(item, 4) < burden(item, 3) < burden(item, 2)
    assert burden(item, 0) == float("inf")
    assert burden(dataclasses.replace(item, weight=2.0), 3) == pytest.approx(2 * burden(item, 3))
    assert burden(member("idle", 2.0), 1) == 0.0, "without a load nothing is known"


def test_long_requests_get_what_short_ones_hardly_miss():
    """By load `chat` would be the more loaded one afterwards (0.7, and 0.41), so that levelling makes no such move."""
    verdict = slow(picture(questions(), answers()))
    assert verdict.rule == Rule.LEVEL_LATENCY
    assert moves(verdict) == (["chat-0"], ["code-0"])
    assert "cubed latencies falls by" in verdict.reason


@pytest.mark.parametrize(
    ("chat", "code", "why"),
    [
        (questions(work=1.7), answers(), "chat would be at ρ 1.7"),
        (questions(), answers(work=1.4), "code is at ρ 0.47: nothing to act on"),
        (questions(requests=150.0), answers(), "chat's latencies weigh more than the gain"),
        (questions(usual=0.4), answers(), "chat has more to do than usual"),
        (questions(), answers(usual=2.2), "code has less to do than usual"),
        (questions(settled=False), answers(), "what chat usually has still changes"),
        (questions(), answers(settled=False), "what code usually has still changes"),
        (questions(moved_ago_s=5.0), answers(), "chat has just moved"),
        (questions(), answers(moved_ago_s=5.0), "code has just moved"),
    ],
)
def test_what_keeps_it_from_moving(chat, code, why):
    assert moves(slow(picture(chat, code))) is None, why


def test_it_is_for_the_slow_loop_and_can_be_switched_off():
    members = (questions(), answers())
    assert moves(fast(picture(*members))) is None
    assert moves(slow(picture(*members, rules=PoolRules(load=LoadRule(latency_gain=0))))) is None
    assert moves(slow(picture(*members, rules=PoolRules(allocation="share")))) is None


def test_a_gain_that_is_asked_for_is_reached():
    candidates = picture(questions(), answers())
    found, _ = quicker(candidates)
    assert found is not None
    asked = LoadRule(latency_gain=found.gain + 0.01)
    assert quicker(dataclasses.replace(candidates, rules=PoolRules(load=asked)))[0] is None


def test_a_move_is_not_taken_back():
    """The other way round the sum rises, whatever the rule asks for."""
    after = pool_of(
        (busy("chat", 0.7, 1, requests=40.0, rps=10.0), busy("code", 1.65, 4, requests=160.0, rps=10.0)),
        {"chat-0", "code-1", "code-2", "code-3", "code-4"},
        PoolRules(load=LoadRule(latency_gain=0.01)),
        gpus=5,
    )
    assert moves(slow(after)) is None
