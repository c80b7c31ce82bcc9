"""Rules of the arbiter's fast loop: a ceiling that was lowered, and members that must gain capacity now.

How pressed a member is, is its ρ where it has one, else 1/Z: of both, 1 is just enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policy_engine.core.pool.arbiter_rules import Due, Need, Proposal, Receiving, Served
from policy_engine.core.pool.capacity_sources import order, source
from policy_engine.core.pool.considered import Considered
from policy_engine.core.pool.donors import Terms
from policy_engine.core.pool.multi_replica_move import NextTerms, bundled
from policy_engine.core.pool.pool_candidates import MemberState, Plan, PoolCandidates
from policy_engine.core.pool.receivers import left_out, lost_and_missed, must_wait, release_terms, unseen
from policy_engine.core.shared.vocabulary import Region, Rule


@dataclass(frozen=True, slots=True)
class LowerToCeiling:
    """A ceiling that was lowered: the least loaded replica goes, one a tick."""

    name: str = "ceiling"
    urgent: bool = True

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """In the fast loop."""
        del candidates
        return due.fast

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """A release, of the first member by name that is above its ceiling."""
        del due
        for member in sorted(candidates.members, key=lambda item: item.key):
            awake = candidates.awake_count(member.key)
            if awake > member.ceiling and not member.shut:
                why = f"{member.key} has {awake} awake and may have {member.ceiling}"
                plan = Plan((), (candidates.least_loaded(member.key),), 0, 0, "")
                return Proposal(served=Served(need=Need(member=member, rule=Rule.BOUNDS, why=why), plan=plan))
        return Proposal()

    def reason(self, served: Served) -> str:
        """The two counts."""
        return served.need.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason to rescue a member.

    `why` gives the reason as text, empty when the cause does not apply. `doubt`, where given, gives the reason why the
    sign cannot be trusted, empty when it can; with a doubt the next cause is tried. `terms` are those of a donor's
    release. `more` gives the terms on which the receiver gains once more in the same transition; without it one replica
    is gained.
    """

    rule: Rule
    why: Callable[[PoolCandidates, MemberState], str]
    terms: Callable[[PoolCandidates, MemberState], Terms]
    doubt: Callable[[PoolCandidates, MemberState], str] | None = None
    more: NextTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue(Receiving):
    """Members in need, the most pressed first; of each the first of `causes` that applies.

    With `patient` a member whose needs are brief waits until this one has lasted.
    """

    name: str
    causes: tuple[Cause, ...]
    patient: bool = False
    urgent: bool = True

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """In the fast loop."""
        del candidates
        return due.fast

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """Capacity for the first member in need that a source is found for."""
        del due
        considered: list[Considered] = []
        unserved: list[Need] = []
        for member in sorted(candidates.members, key=order):
            found, doubts = self._cause(candidates, member)
            considered += doubts
            if found is None:
                continue
            cause, need = found
            sought = source(candidates, member, cause.terms(candidates, member))
            considered += sought.considered
            if sought.plan is not None:
                plan = sought.plan if cause.more is None else bundled(candidates, member, sought.plan, cause.more)
                return Proposal(served=Served(need=need, plan=plan), considered=tuple(considered))
            unserved.append(need)
        return Proposal(considered=tuple(considered), unserved=tuple(unserved))

    def pending(self, candidates: PoolCandidates) -> bool:
        """Whether some member is in need, whatever can serve it."""
        return any(self._cause(candidates, member)[0] is not None for member in candidates.members)

    def _cause(
        self, candidates: PoolCandidates, member: MemberState
    ) -> tuple[tuple[Cause, Need] | None, tuple[Considered, ...]]:
        """The cause that counts, with the need, and what kept others from counting."""
        if self.patient:
            waits = must_wait(candidates, member)
            if waits is not None:
                return None, (waits,)
        doubts: tuple[Considered, ...] = ()
        for cause in self.causes:
            why = cause.why(candidates, member)
            if not why:
                continue
            doubt = cause.doubt(candidates, member) if cause.doubt is not None else ""
            if not doubt:
                return (cause, Need(member=member, rule=cause.rule, why=why)), doubts
            doubts = (*doubts, left_out(candidates, member, doubt))
        return None, doubts


def _breach(candidates: PoolCandidates, member: MemberState) -> str:
    """The hard guard that is breached, empty without one. It overrides Z: a healthy donor may give to a higher Z."""
    del candidates
    return member.guard.hard if member.share.demand else ""


def _below_floor(candidates: PoolCandidates, member: MemberState) -> str:
    awake = candidates.awake_count(member.key)
    return f"{awake} awake, the floor is {member.floor}" if awake < member.floor else ""


def _critical(candidates: PoolCandidates, member: MemberState) -> str:
    del candidates
    share = member.share
    critical = share.fit and share.demand and share.region == Region.CRITICAL
    return share.detail or f"Z = {share.z:.2f} is critical" if critical and share.z is not None else ""


def _critical_unseen(candidates: PoolCandidates, member: MemberState) -> str:
    return unseen(candidates, member) if member.share.z else ""


def _lost(candidates: PoolCandidates, member: MemberState) -> str:
    if not lost_and_missed(candidates, member):
        return ""
    return f"lost {candidates.lost_count(member.key)} of its awake replicas"


def _overloaded(candidates: PoolCandidates, member: MemberState) -> str:
    rho = member.load.rho if member.load is not None else None
    if rho is None or not member.share.fit or rho <= _rescue_above(candidates, member):
        return ""
    return f"ρ = {rho:.2f}: more work comes than its replicas can do"


def _rescue_above(candidates: PoolCandidates, member: MemberState) -> float:
    """From which ρ on it is rescued: with a surplus of Z and settled arrivals a little more is chance."""
    rule = candidates.rules.load
    surplus = member.share.region == Region.SURPLUS and member.load is not None and member.load.settled
    return max(rule.rescue_above, rule.surplus_rescue_above) if surplus else rule.rescue_above


def _floor_terms(candidates: PoolCandidates, member: MemberState) -> Terms:
    del candidates
    return Terms(member.key, 0.0)


def _more_by_load(candidates: PoolCandidates, member: MemberState) -> Terms | None:
    """A member without a load, or with one within its limit, has enough."""
    rho = member.load.rho if member.load is not None else None
    return release_terms(candidates, member) if rho is not None and rho > candidates.rules.load.rescue_above else None


HARD_GUARD = Cause(rule=Rule.RESCUE_HARD_GUARD, why=_breach, terms=release_terms, more=_more_by_load)
BELOW_FLOOR = Cause(rule=Rule.FLOOR_REPAIR, why=_below_floor, terms=_floor_terms)
CRITICAL = Cause(
    rule=Rule.RESCUE_CRITICAL, why=_critical, doubt=_critical_unseen, terms=release_terms, more=_more_by_load
)
LOST_CAPACITY = Cause(rule=Rule.RESCUE_LOST_CAPACITY, why=_lost, terms=release_terms, more=_more_by_load)
OVERLOAD = Cause(rule=Rule.RESCUE_LOAD, why=_overloaded, terms=release_terms, more=_more_by_load)

BREACHED = Rescue(name="hard-guard", causes=(HARD_GUARD,))
SHORT_OF_FLOOR = Rescue(name="floor", causes=(BELOW_FLOOR,))
IN_NEED = Rescue(name="pressed", causes=(CRITICAL, LOST_CAPACITY, OVERLOAD), patient=True)


def waits_for_rescue(candidates: PoolCandidates) -> bool:
    """Whether the slow loop takes from no donor now: by the pool's rules, while a rescue is pending (TRE, IV-B)."""
    return candidates.rules.rebalance_waits and any(
        rule.pending(candidates) for rule in (BREACHED, SHORT_OF_FLOOR, IN_NEED)
    )
