"""The description of a suite, by which `trimtab evaluate` runs it: policies × traces × seeds, and the bars.

To write one: a module with a function `suite(options: Options) -> Suite`, and a line in `catalogue.SUITES`. A suite
must have only names, SLOs and `run`, which turns a case into a `RunResult`; summaries, intervals, tables, plots, the
report and the exit status are the machinery's. `lab/evaluation/smoke.py` is the smallest.

- `run` goes to worker processes: it must be picklable, so a function of a module or a `functools.partial` of one with
  plain data. It must give the same result for the same case, in whatever process and order. What it raises makes the
  case a failed one, reported by name, and the others go on.
- `bars` and `notes` are called once, in the main process, with the whole `Evaluation`. Failed cases and, for `bars`,
  filters may have removed runs: `Evaluation.confidence` and its like then hold None. `bars` is always called over all
  policies and traces of the suite, so that a mean over traces is never one of those that happened to run. A bar of
  `bars.at_least` or `at_most` that lacks a figure is missed where a case failed, and not judged, which is neither met
  nor missed, where a filter left out what it needs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.baselines.tuning import Setting
from lab.evaluation.bars import Bar
from lab.evaluation.statistics import Slo
from lab.evaluation.study import Evaluation
from lab.evaluation.summaries import Case, RunSummary
from lab.virtual.result import RunResult


class SuiteError(Exception):
    """A suite cannot be run as requested; the message is one line with the fault and what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line for a suite, given when it is made."""

    duration_s: float | None = None
    """Length of each trace; None: the suite's own. A suite that has no choice raises `SuiteError` for anything else."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How the thresholds of one policy are found, on seeds that the evaluation does not use.

    The cost of a setting is `cost` of its runs over all of `traces` × `seeds`, less is better. `run` is picklable.
    The result is written to a file (`--out`, or the suite's own `tuned_file`) that `tuned.read_tuned` reads.
    """

    space: Mapping[str, Sequence[float]]
    """Values to try for each threshold."""
    start: Setting
    """Tried first; the same names as `space`."""
    traces: tuple[str, ...]
    seeds: tuple[int, ...]
    run: Callable[[Setting, Case], RunResult]
    """Raises ValueError for an impossible setting, such as a lower threshold above the upper one."""
    cost: Callable[[Sequence[RunSummary]], float]
    """From the summaries in order of traces, then seeds. Not finite: as bad as impossible."""
    cost_name: str = "cost"
    max_trials: int = 200
    exhaustive: bool = False
    """Try every combination of `space`, instead of one threshold after another from `start` on."""
    finalists: int | None = None
    """Search on the first seed alone, then choose among so many of the best by their cost over all seeds.

    None: every setting is run on all seeds.
    """

    @property
    def in_two_stages(self) -> bool:
        """Whether the search looks at one seed and a choice among its best at all of them."""
        return self.finalists is not None and len(self.seeds) > 1

    def cases(self, seeds: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """Trace and seed of each run of a trial on these seeds."""
        return tuple((trace, seed) for trace in self.traces for seed in seeds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite. Mappings are in the order in which tables and plots show them."""

    name: str
    title: str
    description: str
    """What is run and why, in a sentence or two of plain text."""
    policies: Mapping[str, str]
    """Name: what it is, in a line."""
    baseline: str
    """The policy that the others are compared with, trace by trace and seed by seed."""
    traces: Mapping[str, str]
    """Name: what it is, in a line."""
    seeds: tuple[int, ...]
    slos: Mapping[str, Slo]
    """By service; every service that a run names needs one."""
    run: Callable[[Case], RunResult]
    inputs: Mapping[str, object]
    """Whatever else decides the results, as plain data for JSON: durations, fleets, profiles, thresholds.

    Checked when the suite is made: TypeError for what JSON cannot hold, ValueError for NaN and infinity.
    """
    bars: Callable[[Evaluation], Sequence[Bar]] | None = None
    notes: Callable[[Evaluation], Sequence[str]] | None = None
    """Paragraphs of plain text for the report."""
    plotted: tuple[str, ...] = ()
    """Policies whose replicas and Z are drawn over time; empty: the first three."""
    tunings: Mapping[str, Tuning] = dataclasses.field(default_factory=dict)
    """By policy."""
    tuned_file: Path | None = None
    """Where the suite reads the settings that were found; `--tune POLICY --write` writes there."""
    whole: Suite | None = None
    """What this is a part of, where policies or traces were taken away."""

    def __post_init__(self) -> None:
        if not (self.policies and self.traces and self.seeds and self.slos):
            raise ValueError(f"suite {self.name}: policies, traces, seeds and slos must not be empty")
        if self.baseline not in self.policies:
            raise ValueError(f"suite {self.name}: the baseline {self.baseline!r} is none of its policies")
        json.dumps(self.inputs, allow_nan=False)
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"suite {self.name}: a seed is given twice")
        seen = sorted({seed for tuning in self.tunings.values() for seed in tuning.seeds} & set(self.seeds))
        if seen:
            raise ValueError(f"suite {self.name}: seed {seen[0]} is tuned on and evaluated on")
        unknown = sorted((set(self.plotted) | set(self.tunings)) - set(self.policies))
        if unknown:
            raise ValueError(f"suite {self.name}: {', '.join(unknown)} is none of its policies")

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every run, by trace, then policy, then seed."""
        return tuple(
            Case(policy, trace, seed) for trace in self.traces for policy in self.policies for seed in self.seeds
        )

    @property
    def left_out_policies(self) -> tuple[str, ...]:
        """Those of the whole suite that are not run."""
        return () if self.whole is None else tuple(name for name in self.whole.policies if name not in self.policies)

    @property
    def left_out_traces(self) -> tuple[str, ...]:
        """Those of the whole suite that are not run."""
        return () if self.whole is None else tuple(name for name in self.whole.traces if name not in self.traces)

    def only(self, *, policies: Sequence[str] = (), traces: Sequence[str] = (), seeds: int | None = None) -> Suite:
        """A part of it: these policies and traces (none: all) and its first `seeds` seeds.

        The baseline stays when it is among the policies, else the first of them takes its place. Raises `SuiteError`.
        """
        if seeds is not None and not 1 <= seeds <= len(self.seeds):
            raise SuiteError(f"--seeds {seeds}: suite {self.name} has {len(self.seeds)} seeds; give 1 to that many")
        kept = _chosen(self.name, "policy", self.policies, policies)
        kept_traces = _chosen(self.name, "trace", self.traces, traces)
        fewer = len(kept) < len(self.policies) or len(kept_traces) < len(self.traces)
        return dataclasses.replace(
            self,
            policies=kept,
            traces=kept_traces,
            seeds=self.seeds[:seeds],
            baseline=self.baseline if self.baseline in kept else next(iter(kept)),
            plotted=tuple(name for name in self.plotted if name in kept),
            tunings={name: tuning for name, tuning in self.tunings.items() if name in kept},
            whole=self.whole or (self if fewer else None),
        )


def _chosen(suite: str, what: str, there: Mapping[str, str], wanted: Sequence[str]) -> Mapping[str, str]:
    unknown = [name for name in wanted if name not in there]
    if unknown:
        raise SuiteError(f"--{what} {unknown[0]}: suite {suite} has {', '.join(there)}")
    return {name: line for name, line in there.items() if not wanted or name in wanted}
