"""The loads of a calibration: from healthy to degraded and back, with prompts and answers of several kinds.

A fit sees made-up lengths and steps of load in some order; what it is judged by are lengths and gaps of recorded
traces, another seed and a load that rises and falls smoothly. Loads are parts of what the replicas carry within the
SLO (`lab.suites.capacity`, for stages `lab.calibration.stagesweeps`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from lab.calibration.fixed import run_fixed
from lab.calibration.windows import Windows, joined
from lab.evaluation.statistics import Slo
from lab.suites.capacity import TokenCost
from simulator.core.profile import Profile
from simulator.traces.generators import Curve, Lengths
from simulator.traces.lengths import GapLaw, LengthLaw, packaged
from simulator.traces.model import TraceRequest
from simulator.traces.seeding import generator
from simulator.traces.streams import POISSON, Stream, requests_of

LEVELS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Parts of the capacity that a fit's runs step through."""
SMOOTH = (0.35, 1.3)
"""Between which the load of the runs that were not seen goes up and down."""
RECORDED = ("azure-conv", "azure-code")
MADE_UP = {
    "chat": (Lengths(mean_tokens=700, cv=0.8, max_tokens=8000), Lengths(mean_tokens=220, cv=0.7, max_tokens=2000)),
    "answers": (Lengths(mean_tokens=200, cv=0.6, max_tokens=2000), Lengths(mean_tokens=800, cv=0.5, max_tokens=4000)),
    "prompts": (Lengths(mean_tokens=4000, cv=0.5, max_tokens=16_000), Lengths(mean_tokens=60, cv=0.6, max_tokens=400)),
}
"""Lengths of prompts and answers by kind; they are not those of any trace that a profile is judged by."""
FIT_SEED = 101
_OTHER_SEED = 10_000
_PERIODS = 3
_POINTS_A_PERIOD = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one kind, with the mean lengths that size their rate."""

    name: str
    prompt: LengthLaw
    output: LengthLaw
    gaps: GapLaw = POISSON
    prompt_mean: float
    output_mean: float


RequestSeconds = Callable[[Kind], float]
"""Seconds of one replica that a mean request of a kind takes: it carries one over that a second."""
ServeRequests = Callable[[Iterator[TraceRequest], Sequence[Kind], int], Windows]
"""Serves requests of some kinds with so many replicas."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How much is run: every kind on each number of replicas, `repeats` times with other draws.

    `search_s`: how long a run is at least by which it is found what a replica of a stage carries.
    """

    replicas: tuple[int, ...] = (1, 3)
    duration_s: float = 540.0
    seed: int = FIT_SEED
    repeats: int = 2
    search_s: float = 120.0


def made_up() -> tuple[Kind, ...]:
    """Chat, long answers and long prompts."""
    return tuple(
        Kind(name=name, prompt=prompt, output=output, prompt_mean=prompt.mean_tokens, output_mean=output.mean_tokens)
        for name, (prompt, output) in MADE_UP.items()
    )


def recorded() -> tuple[Kind, ...]:
    """Lengths and gaps of the packaged traces."""
    found = []
    for name in RECORDED:
        laws = packaged(name)
        found.append(
            Kind(
                name=name,
                prompt=laws.prompt_tokens,
                output=laws.output_tokens,
                gaps=laws.gaps_ms,
                prompt_mean=laws.prompt_tokens.mean,
                output_mean=laws.output_tokens.mean,
            )
        )
    return tuple(found)


def fit_windows(profile: Profile, slo: Slo, cost: TokenCost, sweep: Sweep) -> Windows:
    """The windows of a fit: each made-up kind alone, and all of them together, in steps of load."""
    return run_sweep(
        mixtures(made_up()),
        lambda seed: steps(sweep.duration_s, seed),
        by_tokens(cost),
        sweep,
        _runs(profile, slo, sweep),
    )


def judged_windows(profile: Profile, slo: Slo, cost: TokenCost, sweep: Sweep) -> Windows:
    """Windows that no fit sees: recorded kinds and a load that swings."""
    kinds = [(kind,) for kind in recorded()]
    return run_sweep(
        kinds, lambda _: swinging(sweep.duration_s), by_tokens(cost), unseen(sweep), _runs(profile, slo, sweep)
    )


def mixtures(kinds: tuple[Kind, ...]) -> list[tuple[Kind, ...]]:
    """Each kind alone, and all of them together."""
    return [*((kind,) for kind in kinds), kinds]


def unseen(sweep: Sweep) -> Sweep:
    """A sweep with draws that the fit's has not."""
    return dataclasses.replace(sweep, seed=sweep.seed + _OTHER_SEED, repeats=1)


def by_tokens(cost: TokenCost) -> RequestSeconds:
    """What requests take where tokens have a price each."""
    return lambda kind: kind.prompt_mean * cost.prompt_token_s + kind.output_mean * cost.output_token_s


def steps(duration_s: float, seed: int) -> Curve:
    """Every level once, in an order drawn by the seed, each for the same time."""
    order = generator(seed, "levels").permutation(len(LEVELS)).tolist()
    each_s = duration_s / len(LEVELS)
    points = [
        (at_s, LEVELS[level]) for place, level in enumerate(order) for at_s in (place * each_s, (place + 1) * each_s)
    ]
    return Curve(tuple(points))


def swinging(duration_s: float) -> Curve:
    """A sine between the ends of `SMOOTH`."""
    low, high = SMOOTH
    count = _PERIODS * _POINTS_A_PERIOD
    return Curve(
        tuple(
            (
                duration_s * step / count,
                low + (high - low) * (1 - math.cos(2 * math.pi * step / _POINTS_A_PERIOD)) / 2,
            )
            for step in range(count + 1)
        )
    )


def requests_for(
    kinds: Sequence[Kind], curve: Curve, request_s: RequestSeconds, *, replicas: int, duration_s: float, seed: int
) -> Iterator[TraceRequest]:
    """Requests of some kinds that share the load equally; the curve is in parts of the replicas' capacity."""
    streams = [
        Stream(
            service="service",
            name=kind.name,
            request_rps=curve.scaled(replicas / len(kinds) / request_s(kind)),
            prompt=kind.prompt,
            output=kind.output,
            gaps=kind.gaps,
        )
        for kind in kinds
    ]
    return requests_of(streams, duration_s=duration_s, seed=seed)


def run_sweep(
    several: Sequence[Sequence[Kind]],
    curve: Callable[[int], Curve],
    request_s: RequestSeconds,
    sweep: Sweep,
    run: ServeRequests,
) -> Windows:
    """The windows of every mixture on every number of replicas, each run on draws of its own."""
    found: list[Windows] = []
    for kinds, replicas, _ in itertools.product(several, sweep.replicas, range(sweep.repeats)):
        seed = sweep.seed + len(found)
        requests = requests_for(
            kinds, curve(seed), request_s, replicas=replicas, duration_s=sweep.duration_s, seed=seed
        )
        found.append(run(requests, kinds, replicas))
    return joined(found)


def _runs(profile: Profile, slo: Slo, sweep: Sweep) -> ServeRequests:
    return lambda requests, _, replicas: run_fixed(
        requests, profile=profile, slo=slo, replicas=replicas, duration_s=sweep.duration_s
    )
