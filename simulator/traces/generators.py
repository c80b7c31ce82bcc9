"""Seeded load: Poisson arrivals along a piecewise linear rate, lengths from a clipped lognormal.

Each service draws from a generator of its own, so that a change to one leaves the others' requests alone. Only
`Random.random()` and basic mathematics are used, which Python keeps stable over its versions. `streams` does the
same with other laws, in arrays and without holding the requests.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.traces.model import TraceRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function of time: `(time_s, value)` points, constant before the first and after the last."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point")
        for (before_s, _), (after_s, _) in zip(self.points, self.points[1:], strict=False):
            if after_s < before_s:
                raise ValueError(f"a curve's points go forward in time: {after_s} comes after {before_s}")
        if any(not math.isfinite(value) or value < 0 for _, value in self.points):
            raise ValueError("a curve's values are finite and not negative")

    def at(self, time_s: float) -> float:
        """The value at a time; at a jump (two points of one time) the later one."""
        if time_s < self.points[0][0]:
            return self.points[0][1]
        for (before_s, before), (after_s, after) in zip(self.points, self.points[1:], strict=False):
            if before_s <= time_s < after_s:
                return before + (after - before) * (time_s - before_s) / (after_s - before_s)
        return self.points[-1][1]

    @property
    def maximum(self) -> float:
        """The largest value."""
        return max(value for _, value in self.points)

    def scaled(self, factor: float) -> Curve:
        """The same curve with every value times `factor`."""
        return Curve(tuple((time_s, value * factor) for time_s, value in self.points))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts: lognormal with this mean and coefficient of variation, clipped (so the true mean is near it)."""

    mean_tokens: float
    cv: float
    min_tokens: int = 1
    max_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.mean_tokens <= self.max_tokens:
            raise ValueError(
                f"1 ≤ min ≤ mean ≤ max must hold: {self.min_tokens}, {self.mean_tokens}, {self.max_tokens}"
            )
        if not 0 <= self.cv <= 10:
            raise ValueError(f"cv must be from 0 to 10, not {self.cv}")

    def draw(self, source: random.Random) -> int:
        """One length."""
        variance = math.log1p(self.cv**2)
        normal = math.sqrt(-2.0 * math.log(1.0 - source.random())) * math.cos(2.0 * math.pi * source.random())
        tokens = math.exp(math.log(self.mean_tokens) - variance / 2 + math.sqrt(variance) * normal)
        return min(self.max_tokens, max(self.min_tokens, round(tokens)))

    def sample(self, source: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """`count` lengths of the same distribution, in an array."""
        variance = math.log1p(self.cv**2)
        normal = source.standard_normal(count)
        tokens = np.exp(math.log(self.mean_tokens) - variance / 2 + math.sqrt(variance) * normal)
        return np.clip(np.rint(tokens), self.min_tokens, self.max_tokens).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """One service's requests: a rate over time and two length distributions."""

    service: str
    request_rps: Curve
    prompt: Lengths
    output: Lengths


def generate(loads: Sequence[ServiceLoad], *, duration_s: float, seed: int) -> list[TraceRequest]:
    """Requests of all services over `[0, duration_s)`, by arrival. Raises ValueError for a duration that is none."""
    if not 0 < duration_s <= 30 * 86_400:
        raise ValueError(f"duration_s must be above 0 and at most 30 days, not {duration_s}")
    requests: list[TraceRequest] = []
    for load in loads:
        source = random.Random(f"{seed}/{load.service}")
        peak_rps = load.request_rps.maximum
        time_s = 0.0
        while peak_rps > 0:
            time_s -= math.log(1.0 - source.random()) / peak_rps
            if time_s >= duration_s:
                break
            # Thinning: candidates come at the peak rate, each is kept with the share that is due at its time.
            if source.random() * peak_rps < load.request_rps.at(time_s):
                requests.append(TraceRequest(time_s, load.service, load.prompt.draw(source), load.output.draw(source)))
    return sorted(requests, key=lambda request: (request.arrival_s, request.service))


def rotating(
    names: Sequence[str], *, duration_s: float, phase_s: float, ramp_s: float, hot: float, cold: float
) -> dict[str, Curve]:
    """Values that are `hot` for one name a phase, each in turn and over again, and `cold` for the others.

    At the end of a phase one falls as the next rises, for `ramp_s` around that moment. All begin cold, and the first
    rises at once. Raises ValueError when a ramp does not fit into a phase.
    """
    if not 0 <= ramp_s <= phase_s:
        raise ValueError(f"a ramp of {ramp_s} s does not fit into phases of {phase_s} s")
    phases = math.ceil(duration_s / phase_s) + 1
    curves = {}
    for index, name in enumerate(names):
        points = [(0.0, cold)]
        for phase in range(phases):
            before = hot if phase and (phase - 1) % len(names) == index else cold
            after = hot if phase % len(names) == index else cold
            if before != after:
                turn_s = phase * phase_s
                points += [(turn_s - ramp_s / 2, before)] if phase else []
                points.append((turn_s + ramp_s / 2, after))
        curves[name] = Curve(tuple(points))
    return curves
