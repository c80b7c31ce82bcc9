"""What Z will be once a member has more or fewer replicas.

By the pool's rule. `none`: the Z of now. `power`: Z · (n'/n)^1.5, super-linear since those that stay also queue more.
`elasticity`: the same with an exponent learnt from what the member's own transfers did to its Z. `capacity`: a replica
under load ρ serves each request at a speed of about `1 − c·ρ` of an idle one's, where `c = 1 − base TPOT / TPOT target`
(processor sharing, with the target reached at ρ = 1); work stays, so ρ' = ρ·n/n'. Far from saturation that changes
little; near it the queue takes over, so the milder of this and the power counts. Where the load is not known, it is the
power alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from policy_engine.core.pool.load import Load
from trimtab.config.poolrules import PoolRules
from trimtab.config.specs import Slo, TokenServiceShare

POWER = 1.5
MIN_EXPONENT, MAX_EXPONENT = 0.5, 3.0
LEARNING_RATE = 0.3
# A request that is alone gets its tokens this many times faster than the SLO asks, where the profile does not say.
USUAL_SPARE = 4.0
# Beyond saturation speeds fall on, they do not turn negative.
SLOWEST = 0.02
# A change of arrivals beyond this share explains more of a change of Z than the transfer does.
STEADY_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class Elasticity:
    """The learnt exponent, and a transfer whose effect is awaited: replicas, Z and work before it."""

    exponent: float = POWER
    before_replicas: int | None = None
    before_z: float | None = None
    before_work: float | None = None


def power_z(z: float, *, replicas: int, after: int, exponent: float = POWER) -> float:
    """Z after a change from `replicas` to `after`; 0 without any."""
    if replicas <= 0 or after <= 0:
        return 0.0
    return float(z * (after / replicas) ** exponent)


def congestion(profile: TokenServiceShare, slo: Slo) -> float:
    """c: the share of a lone request's speed that is lost at ρ = 1."""
    base_s = profile.base_tpot_s if profile.base_tpot_s is not None else slo.tpot_s / USUAL_SPARE
    return max(0.0, 1.0 - base_s / slo.tpot_s)


def capacity_z(z: float, load: Load, *, after: int, lost_at_capacity: float) -> float | None:
    """Z with `after` replicas by the load; None where the load does not give one."""
    now, then = load.rho, load.with_replicas(after)
    if now is None:
        return None
    if then is None:
        return 0.0
    return z * speed(then, lost_at_capacity) / speed(now, lost_at_capacity)


def speed(rho: float, lost_at_capacity: float) -> float:
    """Of a request under load ρ, an idle replica's being 1.

    Falls to `SLOWEST` in a straight line, and from there as 1/ρ, so that more load is always slower.
    """
    straight = 1.0 - lost_at_capacity * rho
    if straight >= SLOWEST or lost_at_capacity <= 0:
        return max(SLOWEST, straight)
    edge = (1.0 - SLOWEST) / lost_at_capacity
    return SLOWEST * edge / rho


def z_after(
    rules: PoolRules,
    z: float,
    *,
    replicas: int,
    after: int,
    load: Load | None,
    exponent: float,
    lost_at_capacity: float,
) -> float:
    """Z after a change, by the pool's rule; 0 without a replica."""
    if rules.prediction == "none":
        return z if after > 0 else 0.0
    if rules.prediction == "capacity" and load is not None and after > 0:
        predicted = capacity_z(z, load, after=after, lost_at_capacity=lost_at_capacity)
        if predicted is not None:
            milder = max if after < replicas else min
            return milder(predicted, power_z(z, replicas=replicas, after=after))
    return power_z(z, replicas=replicas, after=after, exponent=exponent if rules.prediction == "elasticity" else POWER)


def await_effect(memory: Elasticity, *, replicas: int, z: float | None, load: Load | None) -> Elasticity:
    """Remember replicas, Z and load as they were before a transfer of the member."""
    if z is None or z <= 0 or replicas <= 0:
        return replace(memory, before_replicas=None, before_z=None, before_work=None)
    return replace(
        memory, before_replicas=replicas, before_z=z, before_work=load.arriving if load is not None else None
    )


def learn(memory: Elasticity, *, replicas: int, z: float | None, load: Load | None) -> Elasticity:
    """The exponent after a transfer's effect has been seen.

    Not learnt from: a count that did not change (rolled back), an unknown Z, arrivals that changed by more.
    """
    done = replace(memory, before_replicas=None, before_z=None, before_work=None)
    before_n, before_z = memory.before_replicas, memory.before_z
    if before_n is None or before_z is None:
        return memory
    if z is None or z <= 0 or replicas <= 0 or replicas == before_n:
        return done
    if memory.before_work is not None and not _steady(load, memory.before_work):
        return done
    seen = math.log(z / before_z) / math.log(replicas / before_n)
    bounded = min(MAX_EXPONENT, max(MIN_EXPONENT, seen))
    return replace(done, exponent=memory.exponent + LEARNING_RATE * (bounded - memory.exponent))


def _steady(load: Load | None, before: float) -> bool:
    return load is not None and abs(load.arriving - before) <= STEADY_RATIO * max(before, 1e-9)
