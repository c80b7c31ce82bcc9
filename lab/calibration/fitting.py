"""The search for a profile: weights by rank, θ and the regions by the share of requests within the SLO.

Weights are those of a small grid whose share ranks the windows of the fit best by health; of nearly equal ones the
first of the grid, which begins with the usual ones. θ is the smallest share at which 95 % of the requests keep their
SLO: the share within the SLO is fitted as a function of the window's share that never falls (isotonic regression,
weighted by requests), so that θ does not depend on how many healthy windows were recorded. A window is critical where
less than half of the requests keep it, and has a surplus where 99 % do.

A stage of a disaggregated service has a profile of its own. A prefill stage's answers are one token each: by Little's
law its requests take `(running + waiting) / decode_tps` seconds to it, whatever their prompts' lengths, so the form by
answers counts these tokens and the prompts' hardly. The paper's form has a stage count its own tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pydantic

from lab.calibration.ranks import kendall, spearman
from lab.calibration.shares import Weights, order_of, shares
from lab.calibration.windows import Floats, Windows
from lab.evaluation.statistics import Slo
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role

RELIABILITY = 0.95
LOST, SAFE = 0.5, 0.99
PREFILL_WEIGHTS = (0.05, 0.02, 0.01, 0.0)
WAITING_WEIGHTS = (8.0, 4.0, 16.0, 2.0, 1.0)
SMOOTHINGS = (1.0, 0.7, 0.5)
PUBLISHED_PREFILL_WEIGHTS = (0.05, 0.02, 0.01)
PUBLISHED_WAITING_WEIGHTS = (8.0, 4.0, 16.0, 2.0)
PUBLISHED_SMOOTHINGS = (0.7, 0.5)
"""TRE (III-A, III-B) publishes no values of its scalars, only bounds: w_p is above 0 and below 1, w_q is above 1, and α
keeps a part of the value before.
"""
FIRST_TOKENS_ONLY = 1e-6
"""Of a prefill stage's prompt tokens; 0 would have the policy engine count nothing but them."""
# Better by less than this is as good.
_EQUAL = 0.002
_CRITICAL_RANGE = (0.3, 0.9)
_SURPLUS_RANGE = (1.1, 2.0)
FEWEST_WINDOWS = 30


class CalibrationError(Exception):
    """No profile can be fitted to the windows; one line with the reason and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """How a signal ranks the health of windows, and what θ separates. None where no window allows it."""

    windows: int
    spearman: float | None
    kendall: float | None
    attained_above: float | None = None
    """Share of requests within the SLO in windows with Z of at least 1."""
    attained_below: float | None = None
    misjudged: float | None = None
    """The fit's error: share of the windows that keep the SLO with Z below 1, or miss it with Z of at least 1."""


def fit_fixed(windows: Windows, slo: Slo, role: Role = Role.COLOCATED) -> TokenServiceShare:
    """The paper's form: weights of prompt tokens and waiting requests that stay as they are."""
    prefill = {Role.PREFILL: (1.0,), Role.DECODE: (0.0,)}.get(role, PREFILL_WEIGHTS)
    grid = [Weights(*values) for values in itertools.product(prefill, WAITING_WEIGHTS, (1.0,))]
    return _profile(windows, _smoothed(windows, _best(windows, grid, slo, role), slo, role), slo, role)


def fit_published(windows: Windows, slo: Slo) -> TokenServiceShare:
    """The paper's form within its bounds of the scalars: prompt tokens count, and a share is always smoothed."""
    grid = [
        Weights(*values)
        for values in itertools.product(PUBLISHED_PREFILL_WEIGHTS, PUBLISHED_WAITING_WEIGHTS, PUBLISHED_SMOOTHINGS)
    ]
    return _profile(windows, _best(windows, grid, slo, Role.COLOCATED), slo, Role.COLOCATED)


def fit_by_answers(windows: Windows, slo: Slo, role: Role = Role.COLOCATED) -> TokenServiceShare:
    """The form whose weight of a waiting request follows the length of answers."""
    weights = Weights(FIRST_TOKENS_ONLY, 1.0, 1.0) if role is Role.PREFILL else Weights(0.0, None, 1.0)
    return _profile(windows, _smoothed(windows, weights, slo, role), slo, role)


def quality(windows: Windows, profile: TokenServiceShare, slo: Slo, role: Role = Role.COLOCATED) -> Quality:
    """Of a profile's Z."""
    order = order_of(windows, profile, slo, role)
    known = windows.judged & ~np.isnan(order)
    chosen, order = windows.where(known), order[known]
    healthy = order >= 1.0
    return Quality(
        len(order),
        spearman(order, chosen.health),
        kendall(order, chosen.health),
        _attained(chosen.where(healthy)),
        _attained(chosen.where(~healthy)),
        float(np.mean(healthy != (chosen.pressure <= 1.0))) if len(order) else None,
    )


def isotonic(x: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """(x ascending, the function of x that never falls and is nearest to y), by pooling adjacent violators."""
    order = np.argsort(x, kind="stable")
    means: list[float] = []
    weights: list[float] = []
    counts: list[int] = []
    for value, own in zip(y[order].tolist(), weight[order].tolist(), strict=True):
        means.append(value)
        weights.append(own)
        counts.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            total = weights[-2] + weights[-1]
            means[-2] = (means[-2] * weights[-2] + means[-1] * weights[-1]) / total
            weights[-2], counts[-2] = total, counts[-2] + counts[-1]
            means.pop(), weights.pop(), counts.pop()
    return x[order], np.repeat(means, counts)


def _smoothed(windows: Windows, weights: Weights, slo: Slo, role: Role) -> Weights:
    return _best(windows, [dataclasses.replace(weights, smoothing=value) for value in SMOOTHINGS], slo, role)


def _best(windows: Windows, grid: Sequence[Weights], slo: Slo, role: Role) -> Weights:
    best, best_rank = grid[0], -np.inf
    for weights in grid:
        known = shares(windows, weights, slo, role)
        chosen = windows.judged & ~known.idle & ~np.isnan(known.smoothed_tps)
        rank = spearman(known.smoothed_tps[chosen], windows.health[chosen])
        if rank is not None and rank > best_rank + _EQUAL:
            best, best_rank = weights, rank
    return best


def _profile(windows: Windows, weights: Weights, slo: Slo, role: Role) -> TokenServiceShare:
    known = shares(windows, weights, slo, role)
    chosen = windows.judged & ~known.idle & ~np.isnan(known.smoothed_tps)
    if chosen.sum() < FEWEST_WINDOWS:
        raise CalibrationError(
            f"only {chosen.sum()} windows hold arriving requests and load: at least {FEWEST_WINDOWS} are needed"
        )
    share, attained = isotonic(known.smoothed_tps[chosen], windows.attained[chosen], windows.requests[chosen])
    if attained[-1] < RELIABILITY:
        raise CalibrationError(
            f"at no load do {RELIABILITY:.0%} of the requests keep the SLO: record lighter load or give a wider SLO"
        )
    if attained[0] >= RELIABILITY:
        raise CalibrationError("every window keeps the SLO, so nothing shows where it breaks: record heavier load")
    theta = float(share[np.argmax(attained >= RELIABILITY)])
    if theta <= 0:
        raise CalibrationError("the SLO is kept by windows without any token: the columns do not belong together")
    lost = float(share[np.argmax(attained >= LOST)]) / theta
    safe = float(share[np.argmax(attained >= SAFE)]) / theta if attained[-1] >= SAFE else _SURPLUS_RANGE[1]
    try:
        return TokenServiceShare(
            prefill_weight=weights.prefill,
            waiting_weight=weights.waiting,
            smoothing=weights.smoothing,
            theta_tps=float(f"{theta:.4g}"),
            critical_below=round(float(np.clip(lost, *_CRITICAL_RANGE)), 2),
            surplus_above=round(float(np.clip(safe, *_SURPLUS_RANGE)), 2),
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise CalibrationError(
            f"the fit gives {first['loc'][0]} {first['input']:g}, which no policy takes: "
            "the columns' units are wrong (tokens per second, requests)"
        ) from None


def _attained(windows: Windows) -> float | None:
    total = float(windows.requests.sum())
    return float(windows.attained @ windows.requests) / total if total > 0 else None
