"""The loads of a calibration of stages: each is swept on its own for the fit, and judged within a whole service.

For the fit a stage's replicas serve as if the other stage took no time. What it is judged by are services of both
roles, in which the stage has as many replicas and the other one enough of them never to be short.

What a replica carries is searched for each kind of requests by itself: what ends it may be arithmetic, the bandwidth of
memory or room for KV, which no price of tokens covers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from lab.calibration.fixed import attained, run_fixed, run_staged
from lab.calibration.sweeps import (
    SMOOTH,
    Kind,
    Sweep,
    made_up,
    mixtures,
    recorded,
    requests_for,
    run_sweep,
    steps,
    swinging,
    unseen,
)
from lab.calibration.windows import Windows
from lab.evaluation.statistics import Slo
from simulator.core.profile import Profile
from simulator.traces.generators import Curve
from simulator.traces.model import TraceRequest
from trimtab.domain.vocabulary import Role

STAGES = (Role.PREFILL, Role.DECODE)
ATTAINMENT = 0.95
AMPLE = 1.25
"""How many more replicas the other stage has than its part of the highest load needs."""
_REQUESTS = 500
"""A search's run has so many requests and takes `Sweep.search_s` at least: an overload needs time to become a queue."""
_LOWEST_RPS, _HIGHEST_RPS = 0.05, 400.0
_REL_TOLERANCE = 0.03
_SEED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class StageCapacity:
    """What one replica of a stage carries within the SLO, in requests a second by kind."""

    role: Role
    rps: Mapping[str, float]

    def request_s(self, kind: Kind) -> float:
        """Seconds of a replica that a request takes."""
        return 1.0 / self.rps[kind.name]

    def of(self, kinds: Sequence[Kind]) -> tuple[Kind, ...]:
        """Those that it carries."""
        return tuple(kind for kind in kinds if kind.name in self.rps)

    @property
    def tokens_tps(self) -> float:
        """The stage's own tokens a second, when made-up kinds have equal parts of its time."""
        rates = [
            self.rps[kind.name] * (kind.prompt_mean if self.role is Role.PREFILL else kind.output_mean)
            for kind in self.of(made_up())
        ]
        return sum(rates) / len(rates)


def stage_capacity(profile: Profile, slo: Slo, role: Role, search_s: float) -> StageCapacity:
    """Searched on one replica. Kinds that miss the SLO even alone are left out, since no capacity helps them.

    Raises ValueError when no made-up or no recorded kind is left.
    """
    known: dict[str, float] = {}
    for several in (made_up(), recorded()):
        found = {kind.name: _highest_rps(profile, slo, role, kind, search_s) for kind in several}
        own = {name: rps for name, rps in found.items() if rps is not None}
        if not own:
            raise ValueError(f"{profile.name} as {role} does not keep the SLO for {', '.join(found)} at any rate")
        known |= own
    return StageCapacity(role, known)


def stage_fit_windows(profile: Profile, slo: Slo, capacity: StageCapacity, sweep: Sweep) -> Windows:
    """The windows of a fit: the stage alone."""

    def serve(requests: Iterator[TraceRequest], _: Sequence[Kind], replicas: int) -> Windows:
        return run_fixed(
            requests, profile=profile, slo=slo, replicas=replicas, duration_s=sweep.duration_s, role=capacity.role
        )

    kinds = mixtures(capacity.of(made_up()))
    return run_sweep(kinds, lambda seed: steps(sweep.duration_s, seed), capacity.request_s, sweep, serve)


def stage_judged_windows(
    role: Role, profiles: Mapping[Role, Profile], slo: Slo, capacities: Mapping[Role, StageCapacity], sweep: Sweep
) -> Windows:
    """Windows that no fit sees: recorded kinds and a load that swings, on services that `role` limits.

    Raises ValueError when no recorded kind suits both stages.
    """
    own, other = capacities[role], next(capacities[stage] for stage in STAGES if stage is not role)

    def serve(requests: Iterator[TraceRequest], kinds: Sequence[Kind], replicas: int) -> Windows:
        highest = max(replicas * SMOOTH[1] * other.request_s(kind) / own.request_s(kind) for kind in kinds)
        counts = {role: replicas, other.role: math.ceil(AMPLE * highest)}
        return run_staged(
            requests,
            prefill=profiles[Role.PREFILL],
            decode=profiles[Role.DECODE],
            slo=slo,
            prefill_replicas=counts[Role.PREFILL],
            decode_replicas=counts[Role.DECODE],
            duration_s=sweep.duration_s,
        )[role]

    suited = [(kind,) for kind in other.of(own.of(recorded()))]
    if not suited:
        raise ValueError("no recorded kind of requests keeps the SLO in both stages")
    return run_sweep(suited, lambda _: swinging(sweep.duration_s), own.request_s, unseen(sweep), serve)


def _highest_rps(profile: Profile, slo: Slo, role: Role, kind: Kind, search_s: float) -> float | None:
    low, high = _LOWEST_RPS, _HIGHEST_RPS
    if not _kept(profile, slo, role, kind, low, search_s):
        return None
    while high > low * (1 + _REL_TOLERANCE):
        middle = math.sqrt(low * high)
        if _kept(profile, slo, role, kind, middle, search_s):
            low = middle
        else:
            high = middle
    return low


def _kept(profile: Profile, slo: Slo, role: Role, kind: Kind, rps: float, search_s: float) -> bool:
    duration_s = max(search_s, _REQUESTS / rps)
    requests = requests_for([kind], Curve(((0.0, rps),)), lambda _: 1.0, replicas=1, duration_s=duration_s, seed=_SEED)
    share = attained(requests, profile=profile, slo=slo, role=role)
    return share is None or share >= ATTAINMENT
