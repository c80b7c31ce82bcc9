"""The arbiter's precedence: the order of its rules, and of the causes within one."""

from __future__ import annotations

from policy_engine.core.pool.arbiter import RULES
from policy_engine.core.pool.considered import MAX_CANDIDATES, Considered, candidates_of, clamps_of
from policy_engine.core.pool.rescue_rules import Rescue
from policy_engine.core.shared.vocabulary import Candidate, Clamp, ClampKind, Rule

from .test_arbiter import key


def test_the_order_of_the_rules_is_fixed():
    assert [rule.name for rule in RULES] == [
        "ceiling",
        "hard-guard",
        "floor",
        "load-now",
        "pressed",
        "idle-gpus",
        "rebalance",
        "load-steady",
        "latency",
    ]
    causes = {rule.name: [cause.rule for cause in rule.causes] for rule in RULES if isinstance(rule, Rescue)}
    assert causes == {
        "hard-guard": [Rule.RESCUE_HARD_GUARD],
        "floor": [Rule.FLOOR_REPAIR],
        "pressed": [Rule.RESCUE_CRITICAL, Rule.RESCUE_LOST_CAPACITY, Rule.RESCUE_LOAD],
    }


def test_only_rules_of_the_fast_loop_are_urgent():
    assert [rule.name for rule in RULES if rule.urgent] == ["ceiling", "hard-guard", "floor", "load-now", "pressed"]


def test_of_the_same_pair_the_first_reason_counts_unless_it_was_taken():
    left = Considered(receiver=key("chat"), donor="code", reason="first", clamp=ClampKind.MIN_REPLICAS, awake=2)
    again = Considered(receiver=key("chat"), donor="code", reason="second", clamp=ClampKind.MIN_REPLICAS, awake=3)
    other = Considered(receiver=key("rest"), reason="no idle GPUs")
    taken = Considered(receiver=key("chat"), donor="code", reason="at last", taken=True)
    assert candidates_of([left, again, other]) == (
        Candidate("chat", "code", False, "first"),
        Candidate("rest", "", False, "no idle GPUs"),
    )
    assert candidates_of([left, other, taken])[0] == Candidate("chat", "code", True, "at last")
    assert clamps_of([other, left, again]) == (Clamp(ClampKind.MIN_REPLICAS, 3.0, 2.0, "chat: code: first"),)


def test_a_record_keeps_a_bounded_number_of_candidates_and_always_the_one_that_was_taken():
    many = [Considered(receiver=key("chat"), donor=f"d{number}", reason="full") for number in range(MAX_CANDIDATES + 9)]
    taken = Considered(receiver=key("chat"), donor="last", reason="gives", taken=True)
    found = candidates_of([*many, taken])
    assert len(found) == MAX_CANDIDATES + 1
    assert found[-1] == Candidate("chat", "last", True, "gives")
