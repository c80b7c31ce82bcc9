"""What came out of a suite's runs, by policy, trace and metric: over seeds, pooled, and against another policy.

Traces are random and all policies meet the same ones, so a policy is compared with another seed by seed: the relative
change of each pair, and then its mean and interval. Two policies' difference shows far better so than by two means.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from lab.evaluation.confidence import Confidence
from lab.evaluation.summaries import ALL, Case, Figures, RunSummary, pooled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All runs of a suite, or of the part that was run."""

    policies: tuple[str, ...]
    traces: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str
    runs: Mapping[Case, RunSummary]
    failures: Mapping[Case, str] = dataclasses.field(default_factory=dict)
    """What went wrong, in a line, by case."""

    def of(self, policy: str, trace: str) -> tuple[RunSummary, ...]:
        """The runs of a policy on a trace, by seed; those that failed or were left out are not among them."""
        cases = (Case(policy, trace, seed) for seed in self.seeds)
        return tuple(self.runs[case] for case in cases if case in self.runs)

    def values(self, policy: str, trace: str, metric: str, service: str = ALL) -> tuple[float | None, ...]:
        """A figure of each run of `of`; None where it is missing."""
        return tuple(run.value(metric, service) for run in self.of(policy, trace))

    def confidence(self, policy: str, trace: str, metric: str, service: str = ALL) -> Confidence:
        """A figure over seeds."""
        return Confidence.of(self.values(policy, trace, metric, service))

    def change(self, policy: str, trace: str, metric: str, *, against: str, service: str = ALL) -> Confidence:
        """(policy - against) / against of each seed, as a fraction: -0.4 is 40 % less.

        Seeds that lack one of the two, or where `against` has 0, count as missing.
        """
        changes: list[float | None] = []
        for seed in self.seeds:
            pair = [self.runs.get(Case(name, trace, seed)) for name in (policy, against)]
            ours, theirs = (None if run is None else run.value(metric, service) for run in pair)
            changes.append((ours - theirs) / theirs if ours is not None and theirs else None)
        return Confidence.of(changes)

    def pooled(self, policy: str, trace: str, service: str = ALL) -> Figures | None:
        """All seeds' requests taken together; None when none ran."""
        parts = [figures for run in self.of(policy, trace) if (figures := run.figures(service)) is not None]
        return pooled(parts) if parts else None

    def lost_requests(self) -> float | None:
        """Of all runs together. None where some are missing and the others lost none: those may have lost some."""
        lost = sum(run.total.lost for run in self.runs.values())
        whole = len(self.runs) == len(self.policies) * len(self.traces) * len(self.seeds)
        return float(lost) if lost or whole else None

    def services(self) -> tuple[str, ...]:
        """Names of all services that any run names."""
        return tuple(sorted({figures.service for run in self.runs.values() for figures in run.services}))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of positive values, such as ratios; None when there is none, or one is missing or not positive."""
    found = list(values)
    known = [value for value in found if value is not None and math.isfinite(value) and value > 0]
    if not known or len(known) != len(found):
        return None
    return math.exp(math.fsum(math.log(value) for value in known) / len(known))
