"""The arbiter of a pool (TRE, section IV): at most one transition per call, with its donors, receivers and reason.

`RULES` is the order of precedence: the first rule that applies and finds a plan makes the transition.

- *fast* (rescue): a hard-guard breach comes first, then a member below its floor, then critical members, members that
  lost routable capacity and members whose load is more than they can do; the most pressed first. Sources in this order:
  idle GPUs, the member's own awake but held replicas, a donor's release.
- Idle GPUs are always given, to the most pressed member that has demand: one in need by the fast loop, else by the slow
  one.
- *slow* (rebalance): a receiver below Z = 1 and a donor that stays above it; with `allocation: level`, while no member
  is in need, also a move that spreads the pool's room by what usually arrives, or else one that makes requests quicker.

The loops exclude each other: a rescue that found a source is the tick's transition. One that nothing could serve does
not keep the slow loop waiting, unless the pool's rules say so (`rebalance_waits`, as TRE has it).
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.pool.arbiter_rules import ArbiterRule, Due, Need, Served
from policy_engine.core.pool.balance_rules import GiveIdleGpus, LevelByLatency, LevelByLoad, Rebalance
from policy_engine.core.pool.considered import Considered, candidates_of, clamps_of
from policy_engine.core.pool.pool_candidates import PoolCandidates
from policy_engine.core.pool.rescue_rules import BREACHED, IN_NEED, SHORT_OF_FLOOR, LowerToCeiling
from policy_engine.core.shared.draft import Transition
from policy_engine.core.shared.vocabulary import Candidate, Clamp, MemberKey, Rule

RULES: tuple[ArbiterRule, ...] = (
    LowerToCeiling(),
    BREACHED,
    SHORT_OF_FLOOR,
    LevelByLoad(name="load-now", steady=False),
    IN_NEED,
    GiveIdleGpus(),
    Rebalance(),
    LevelByLoad(name="load-steady", steady=True),
    LevelByLatency(),
)
"""All rules, the one that takes precedence first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the arbiter decided. `transition` is None when it leaves everything as it is.

    `clamps` are what kept an event from being served; `holding` is the same as text. `unserved` names those events by
    rule and member.
    """

    transition: Transition | None
    rule: Rule
    reason: str
    receiver: MemberKey | None = None
    candidates: tuple[Candidate, ...] = ()
    clamps: tuple[Clamp, ...] = ()
    holding: str = ""
    unserved: tuple[str, ...] = ()


def arbitrate(candidates: PoolCandidates, *, fast_due: bool, slow_due: bool) -> Verdict:
    """Decide one tick. With neither loop due no rule applies."""
    due = Due(fast=fast_due, slow=slow_due)
    considered: list[Considered] = []
    urgent: list[Considered] = []
    unserved: list[Need] = []
    for rule in RULES:
        if not rule.applies(candidates, due):
            continue
        proposal = rule.propose(candidates, due)
        considered += proposal.considered
        if proposal.served is not None:
            return _verdict(candidates, rule, proposal.served, considered)
        if rule.urgent:
            urgent += proposal.considered
        unserved += proposal.unserved
    holding = "; ".join(f"{need.member.key}: {need.why}, and nothing can serve it" for need in unserved)
    return Verdict(
        None,
        Rule.HOLD,
        holding,
        candidates=candidates_of(considered),
        clamps=clamps_of(urgent),
        holding=holding,
        unserved=tuple(f"{need.rule} {need.member.key}" for need in unserved),
    )


def _verdict(candidates: PoolCandidates, rule: ArbiterRule, served: Served, considered: list[Considered]) -> Verdict:
    need, plan = served.need, served.plan
    transition = Transition(
        releases=tuple(candidates.change(item) for item in plan.releases),
        wakes=tuple(candidates.change(item) for item in plan.wakes),
    )
    receiver = need.member.key if plan.wakes else None
    return Verdict(
        transition,
        need.rule,
        rule.reason(served),
        receiver=receiver,
        candidates=candidates_of([*considered, *_taken(served)]),
    )


def _taken(served: Served) -> list[Considered]:
    """The pair that was taken, and members beside the receiver that wake on what it frees."""
    receiver, plan = served.need.member.key, served.plan
    if not plan.wakes:
        return []
    beside = sorted({item.member for item in plan.wakes} - {receiver})
    return [
        Considered(receiver=receiver, donor=plan.donor_words, reason=plan.words, taken=True),
        *(
            Considered(receiver=key, donor=plan.donor_words, reason="it uses what the release frees beside", taken=True)
            for key in beside
        ),
    ]
