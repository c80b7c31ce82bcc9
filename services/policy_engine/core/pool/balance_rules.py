"""Rules of the arbiter that need not be urgent: idle GPUs, levelling by load, rebalancing, and shorter latencies."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from policy_engine.core.pool.arbiter_rules import Due, Need, Proposal, Receiving, Served
from policy_engine.core.pool.capacity_sources import order, source
from policy_engine.core.pool.considered import Considered
from policy_engine.core.pool.donors import HEALTHY_Z, Terms
from policy_engine.core.pool.latency_moves import quicker
from policy_engine.core.pool.multi_replica_move import bundled
from policy_engine.core.pool.pool_candidates import PoolCandidates
from policy_engine.core.pool.receivers import left_out, must_wait, rho_limit, unseen, z_threshold
from policy_engine.core.pool.rescue_rules import waits_for_rescue
from policy_engine.core.pool.target_allocation import below_target, more_below_target
from policy_engine.core.shared.vocabulary import Rule

# A member whose needs are brief more often than this is not levelled by what they add up to.
MOSTLY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelByLoad(Receiving):
    """Replicas for the member that is furthest below what the load gives it, if any can come.

    By the work of now, in the fast loop of a pool with `allocation: load`; or with `steady` by what usually arrives, in
    the slow loop of one with `allocation: level`, where members whose needs are mostly brief are left out.
    """

    name: str
    steady: bool

    @property
    def urgent(self) -> bool:
        """The fast one is."""
        return not self.steady

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """By the pool's allocation, in its loop."""
        if self.steady:
            return due.slow and candidates.rules.allocation == "level" and not waits_for_rescue(candidates)
        return due.fast and candidates.rules.allocation == "load"

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """As many replicas as the load asks for, up to what one transition may wake."""
        del due
        considered: list[Considered] = []
        more = functools.partial(more_below_target, steady=True) if self.steady else more_below_target
        for member, why, terms in below_target(candidates, steady=self.steady):
            if self.steady and member.brief > MOSTLY and candidates.rules.load.patience_s > 0:
                reason = "most of its needs are brief: what it usually has is no sign"
                considered.append(left_out(candidates, member, reason))
                continue
            sought = source(candidates, member, terms)
            considered += sought.considered
            if sought.plan is not None:
                need = Need(member=member, rule=Rule.LEVEL_LOAD, why=why)
                served = Served(need=need, plan=bundled(candidates, member, sought.plan, more))
                return Proposal(served=served, considered=tuple(considered))
        return Proposal(considered=tuple(considered))


@dataclass(frozen=True, slots=True)
class GiveIdleGpus(Receiving):
    """Idle GPUs for the most pressed member with demand: by the fast loop alone one with Z below 1, else any.

    Above Z = 1 it waits for the slow loop: without a need, a transition every few seconds costs more than it brings.
    """

    name: str = "idle-gpus"
    urgent: bool = False

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """In either loop."""
        del candidates
        return due.fast or due.slow

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """A wake that needs no release."""
        for member in sorted(candidates.members, key=order):
            z = member.share.z
            if not member.share.demand or not member.share.fit or z is None or (z >= HEALTHY_Z and not due.slow):
                continue
            if member.shut or candidates.awake_count(member.key) >= member.ceiling:
                continue
            plan = candidates.idle_plan(member)
            if plan is not None:
                why = f"idle GPUs, and it is the most pressed with demand (Z = {z:.2f})"
                return Proposal(served=Served(need=Need(member=member, rule=Rule.IDLE_GPU, why=why), plan=plan))
        return Proposal()


@dataclass(frozen=True, slots=True)
class Rebalance(Receiving):
    """A receiver below Z = 1 from a donor that stays above; in an overload, by the pool's rule, from one better off."""

    name: str = "rebalance"
    urgent: bool = False

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """In the slow loop."""
        return due.slow and not waits_for_rescue(candidates)

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """One replica for the most pressed member that can get one."""
        del due
        considered: list[Considered] = []
        level = candidates.rules.overload == "level" and _all_below_one(candidates)
        for member in sorted(candidates.members, key=order):
            share = member.share
            if (
                not share.demand
                or not share.fit
                or share.z is None
                or share.z >= HEALTHY_Z
                or unseen(candidates, member)
            ):
                continue
            waits = must_wait(candidates, member)
            if waits is not None:
                considered.append(waits)
                continue
            threshold = z_threshold(candidates, member) if level else None
            sought = source(candidates, member, Terms(member.key, threshold, rho_limit(candidates, member)))
            considered += sought.considered
            if sought.plan is not None:
                why = f"Z = {share.z:.2f} is below 1" + (", as is everyone's" if level else "")
                served = Served(need=Need(member=member, rule=Rule.REBALANCE, why=why), plan=sought.plan)
                return Proposal(served=served, considered=tuple(considered))
        return Proposal(considered=tuple(considered))


def _all_below_one(candidates: PoolCandidates) -> bool:
    """Whether every member with demand has less than it needs."""
    known = [item.share.z for item in candidates.members if item.share.demand and item.share.z is not None]
    return bool(known) and all(z < HEALTHY_Z for z in known)


@dataclass(frozen=True, slots=True)
class LevelByLatency(Receiving):
    """With loads level and steady, the move that makes requests quicker, if there is one."""

    name: str = "latency"
    urgent: bool = False

    def applies(self, candidates: PoolCandidates, due: Due) -> bool:
        """In the slow loop of a pool with `allocation: level`."""
        return due.slow and candidates.rules.allocation == "level" and not waits_for_rescue(candidates)

    def propose(self, candidates: PoolCandidates, due: Due) -> Proposal:
        """The move with the greatest gain."""
        del due
        found, considered = quicker(candidates)
        if found is None:
            return Proposal(considered=considered)
        why = f"with a replica more the sum of cubed latencies falls by {found.gain:.0%}"
        need = Need(member=found.member, rule=Rule.LEVEL_LATENCY, why=why)
        return Proposal(served=Served(need=need, plan=found.plan), considered=considered)
