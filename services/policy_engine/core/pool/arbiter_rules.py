"""The protocol of the arbiter's rules, and the values that rules and arbiter exchange.

`policy_engine.core.pool.arbiter` holds the rules in their order of precedence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from policy_engine.core.pool.considered import Considered
from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.pool_candidates import MemberState, Plan, PoolCandidates
from policy_engine.core.shared.vocabulary import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The loops that are due: `fast` rescues, `slow` rebalances."""

    fast: bool
    slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A member whose capacity should change, the rule of the vocabulary behind it, and the reason as text."""

    member: MemberState
    rule: Rule
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A need and the plan that serves it."""

    need: Need
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What a rule found. `served` is None when it proposes nothing.

    `considered` are the sources that it considered, in order. `unserved` are needs that are worth a record although
    nothing can serve them.
    """

    served: Served | None = None
    considered: tuple[Considered, ...] = ()
    unserved: tuple[Need, ...] = ()


class ArbiterRule(Protocol):
    """One rule of the arbiter. Rules hold no state: all that they know of the pool is passed to them."""

    @property
    def name(self) -> str:
        """Its name in the list of rules; unique there."""

    @property
    def urgent(self) -> bool:
        """Whether the limits that keep it from serving are clamps of the tick, when nothing else is done either."""

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """Whether the rule takes part in this tick: by the loops that are due and the pool's rules."""

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """The rule's change of capacity, if it has one."""

    def reason(self, served: Served) -> str:
        """The text of the decision record: the need, and what is done about it."""


class Receiving:
    """The reason of a rule that gives its member capacity."""

    __slots__ = ()

    def reason(self, served: Served) -> str:
        """The need, the replicas that wake, and what makes room for them."""
        need, plan = served.need, served.plan
        made = f"releases {_names(plan.releases)}" if plan.releases else plan.words
        remark = f"; {plan.remark}" if plan.remark else ""
        return f"{need.member.key}: {need.why}; wakes {_names(plan.wakes)}, {made}{remark}"


def _names(replicas: Iterable[OverlayReplica]) -> str:
    return ", ".join(item.replica for item in replicas)
