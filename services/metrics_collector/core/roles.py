"""One collector's part of its roles' windows: sums over counted replicas, never averages.

A stuck replica has its page read and its values left out. One that sleeps is no capacity and is left out altogether,
unless an actuator counts it as routable: then the two disagree and it is missing. Counts are as in
``SignalSums``.

Ratios are sums with a weight: the KV usage weighs each replica once, the hit ratio its queries, the GPU exporter's
ratios its GPUs. Requests that wait at sleepers weigh the sleepers: they are demand, whether a replica counts or not.
Values of the GPU exporter count for a stuck server too, and are independent of resets and warming.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from metrics_collector.core.counting import Bools, Floats, Ints
from metrics_collector.core.gpu_table import GpuAverages
from metrics_collector.core.liveness import Verdicts
from metrics_collector.core.replica_windows import SIGNAL_COLUMN, ReplicaWindows
from metrics_collector.core.schema import COUNTERS, SCALARS
from metrics_collector.core.targets import RoleKey, Target
from trimtab.domain.histogram import Histogram, merge_histograms
from trimtab.domain.role_window import LatencySums, RoleWindow, SignalSums
from trimtab.domain.signals import PAGE_SIGNALS, Counter, Latency, Signal
from trimtab.domain.time import to_microseconds
from trimtab.domain.vocabulary import Role

GPU_SIGNALS: tuple[Signal, ...] = (
    Signal.GPU_UTILISATION_RATIO,
    Signal.SM_ACTIVITY_RATIO,
    Signal.GPU_POWER_W,
    Signal.GPU_MEMORY_RATIO,
)
"""The order of ``GpuAverages``."""
_ROLES = Role.by_number()
_GPU_COLUMNS = [SIGNAL_COLUMN[name] for name in GPU_SIGNALS]
_KV = SIGNAL_COLUMN[Signal.KV_USAGE_RATIO]
_HIT_RATIO = SIGNAL_COLUMN[Signal.PREFIX_HIT_RATIO]
_SLEEPERS = SIGNAL_COLUMN[Signal.ASLEEP_LOAD]
# Values from other sources than a replica's page are valid whatever the state of its page.
_BESIDE_PAGES = frozenset({*_GPU_COLUMNS, _SLEEPERS})
# Ratios that are means over replicas.
_MEANS = [SIGNAL_COLUMN[one] for one in PAGE_SIGNALS if one.is_ratio and one is not Signal.PREFIX_HIT_RATIO]
_GPU_MEANS = [SIGNAL_COLUMN[one] for one in GPU_SIGNALS if one.is_ratio]


@dataclass(frozen=True, kw_only=True)
class ExpectedReplicas:
    """The placed targets, by role and then replica: made once for a list of targets, used every round.

    ``role_of`` (n,) is the position in ``keys`` of each target's role, ``starts`` where each role begins.
    """

    targets: tuple[Target, ...]
    target_ids: tuple[str, ...]
    keys: tuple[RoleKey, ...]
    role_of: Ints
    starts: Ints
    counted: Bools
    routable_by_actuator: Bools
    gpus: Floats

    @classmethod
    def of(cls, targets: Iterable[Target]) -> "ExpectedReplicas":
        """The expected replicas of ``targets``, in whatever order; those that are not placed are left out."""
        ordered = sorted(
            (target for target in targets if target.placed),
            key=lambda target: (target.service, target.role, target.replica, target.target_id),
        )
        pairs = [(target.service, target.role) for target in ordered]
        starts = [i for i, pair in enumerate(pairs) if i == 0 or pair != pairs[i - 1]]
        sizes = [end - start for start, end in pairwise([*starts, len(ordered)])]
        return cls(
            targets=tuple(ordered),
            target_ids=tuple(target.target_id for target in ordered),
            keys=tuple(RoleKey(service=pairs[i][0], role=pairs[i][1]) for i in starts),
            role_of=np.repeat(np.arange(len(starts)), np.array(sizes, dtype=np.int64)),
            starts=np.array(starts, dtype=np.int64),
            counted=np.array([target.counted for target in ordered], dtype=bool),
            routable_by_actuator=np.array([target.routable_by_actuator for target in ordered], dtype=bool),
            gpus=np.array([max(1, target.gpus) for target in ordered], dtype=np.float64),
        )

    def limits_s(self, stuck_after_s: Callable[[RoleKey], float]) -> Floats:
        """The longest iteration of each target, (n,)."""
        return np.array([stuck_after_s(key) for key in self.keys], dtype=np.float64)[self.role_of]


def replica_values(
    expected_replicas: ExpectedReplicas,
    windows: ReplicaWindows,
    verdicts: Verdicts,
    gpus: Mapping[str, GpuAverages] | None,
) -> Floats:
    """Every signal of every replica, (n, len(Signal)); NaN where there is none.

    ``gpus`` is target id → averages over its GPUs in the window.
    """
    values = windows.values.copy()
    values[:, _SLEEPERS] = verdicts.asleep_load
    if gpus:
        nothing = GpuAverages()
        # None becomes NaN.
        readings = np.array([gpus.get(name, nothing) for name in expected_replicas.target_ids], dtype=np.float64)
        values[:, _GPU_COLUMNS] = np.where(np.isfinite(readings) & (readings >= 0), readings, np.nan)
    return values


@dataclass(frozen=True, kw_only=True)
class RoleColumns:
    """Sums of roles in a window, before it is written.

    ``seen`` (n,): counted replicas whose page was read; ``missing`` (n,): those whose page could not be read. ``sums``
    are by role, ``latencies`` too where there are any.
    """

    seen: Bools
    missing: Bools
    sums: Sequence["RoleSums"]
    latencies: Mapping[int, Mapping[Latency, Histogram]]


def role_columns(
    expected_replicas: ExpectedReplicas, windows: ReplicaWindows, verdicts: Verdicts, values: Floats
) -> RoleColumns:
    """The sums of every role of ``expected_replicas`` (at least one). ``values`` are ``replica_values``."""
    seen = expected_replicas.counted & windows.read & ~windows.asleep
    live = seen & ~verdicts.stuck
    return RoleColumns(
        seen=seen,
        missing=expected_replicas.counted & (~windows.read | (windows.asleep & expected_replicas.routable_by_actuator)),
        sums=_sums(expected_replicas, windows, verdicts, values, seen=seen, live=live),
        latencies=_latencies(expected_replicas, windows, live),
    )


def role_windows(
    expected_replicas: ExpectedReplicas,
    windows: ReplicaWindows,
    verdicts: Verdicts,
    values: Floats,
    *,
    collector: str,
    replica_revisions: Mapping[str, int],
) -> list[RoleWindow]:
    """The window of every role of ``expected_replicas``, in order. ``values`` are ``replica_values``.

    ``replica_revisions`` is by cluster, as in the actuators' last messages.
    """
    if not expected_replicas.keys:
        return []
    columns = role_columns(expected_replicas, windows, verdicts, values)
    names = _names(expected_replicas, columns.seen), _names(expected_replicas, columns.missing)
    revisions = dict(sorted(replica_revisions.items()))
    start_us, end_us = to_microseconds(windows.window.start_s), to_microseconds(windows.window.end_s)
    shown = PAGE_SIGNALS
    if not np.isnan(values[:, _GPU_COLUMNS]).all():
        shown = (*shown, *GPU_SIGNALS)
    found: list[RoleWindow] = []
    for role, key in enumerate(expected_replicas.keys):
        own = columns.sums[role]
        signals = [own.signal(name) for name in shown]
        if own.reported[_SLEEPERS]:
            signals.append(own.signal(Signal.ASLEEP_LOAD))
        histograms = columns.latencies.get(role, {})
        found.append(
            RoleWindow(
                collector=collector,
                service=key.service,
                role=_ROLES[key.role],
                start_us=start_us,
                end_us=end_us,
                reported_replicas=names[0][role],
                missing_replicas=names[1][role],
                replica_revisions=revisions,
                signals=signals,
                latencies=[LatencySums(one, histograms[one]) for one in Latency if one in histograms],
            )
        )
    return found


class RoleSums(NamedTuple):
    """One role's columns, each in the order of ``Signal``."""

    sums: list[float]
    weights: list[float]
    maxima: list[float]
    reported: list[int]
    reset: list[int]
    stale: int
    warming: int

    def signal(self, name: Signal) -> SignalSums:
        """What is added to one signal."""
        sums, weights, maxima, reports, resets, stale, warming = self
        column = SIGNAL_COLUMN[name]
        reported = reports[column]
        maximum = maxima[column] if reported and column != _HIT_RATIO else None
        if column in _BESIDE_PAGES:
            return SignalSums(name, sums[column], reported, maximum, weights[column])
        return SignalSums(name, sums[column], reported, maximum, weights[column], stale, resets[column], warming)


def _sums(
    expected_replicas: ExpectedReplicas,
    windows: ReplicaWindows,
    verdicts: Verdicts,
    values: Floats,
    *,
    seen: Bools,
    live: Bools,
) -> list[RoleSums]:
    starts = expected_replicas.starts
    # The hit ratio's parts are known even where a replica had no query; signals of sleeping ones count for any replica.
    hits = windows.increases[:, COUNTERS.index(Counter.PREFIX_HITS)]
    queries = windows.increases[:, COUNTERS.index(Counter.PREFIX_QUERIES)]
    hits = np.where(np.isnan(queries), np.nan, np.minimum(hits, queries))
    weights = np.zeros((len(values), len(Signal)))
    terms = values.copy()
    terms[:, _HIT_RATIO], weights[:, _HIT_RATIO] = hits, queries
    weights[:, _MEANS] = 1.0
    for column in _GPU_MEANS:
        terms[:, column], weights[:, column] = values[:, column] * expected_replicas.gpus, expected_replicas.gpus
    within = live[:, None] & ~np.isnan(terms)
    within[:, _GPU_COLUMNS] = seen[:, None] & ~np.isnan(terms[:, _GPU_COLUMNS])
    within[:, _SLEEPERS] = ~np.isnan(terms[:, _SLEEPERS])
    peaks = values
    if not np.isnan(windows.kv_usage_max_ratio).all():
        peaks = values.copy()
        peaks[:, _KV] = np.fmax(values[:, _KV], windows.kv_usage_max_ratio)
    weights[~within] = 0.0
    weights[:, _SLEEPERS] = windows.asleep
    stale = np.add.reduceat((seen & verdicts.stuck).astype(np.int64), starts).tolist()
    warming = np.add.reduceat((live & windows.warming).astype(np.int64), starts).tolist()
    columns = (
        np.add.reduceat(np.where(within, terms, 0.0), starts),
        np.add.reduceat(weights, starts),
        np.maximum.reduceat(np.where(within, peaks, -np.inf), starts),
        np.add.reduceat(within.astype(np.int64), starts),
        np.add.reduceat((within & windows.reset[:, None]).astype(np.int64), starts),
    )
    rows = zip(*(column.tolist() for column in columns), stale, warming, strict=True)
    return [RoleSums(*row) for row in rows]


def _names(expected_replicas: ExpectedReplicas, chosen: Bools) -> list[list[str]]:
    """The replicas chosen, by role."""
    found: list[list[str]] = [[] for _ in expected_replicas.keys]
    positions = np.flatnonzero(chosen)
    for position, role in zip(positions.tolist(), expected_replicas.role_of[positions].tolist(), strict=True):
        found[role].append(expected_replicas.targets[position].replica)
    return found


def _latencies(
    expected_replicas: ExpectedReplicas, windows: ReplicaWindows, live: Bools
) -> dict[int, dict[Latency, Histogram]]:
    """Role → its latencies, from the bucket increases of its live replicas."""
    found: dict[int, dict[Latency, list[Histogram]]] = {}
    for item in windows.histograms:
        chosen = live[item.positions]
        roles = expected_replicas.role_of[item.positions[chosen]]
        if not len(roles):
            continue
        increases = item.increases[chosen]
        starts = np.flatnonzero(np.concatenate(([True], roles[1:] != roles[:-1])))
        sums = np.add.reduceat(np.fmax(increases, 0.0), starts)
        for latency, bounds_s in item.schema.bounds_s:
            first, last, total = (column - SCALARS for column in item.schema.histograms[latency])
            told = np.logical_or.reduceat(~np.isnan(increases[:, last]), starts).tolist()
            # A count is never negative, whatever rounding did to a difference.
            cumulative = np.maximum.accumulate(sums[:, first : last + 1], axis=1).tolist()
            seconds = sums[:, total].tolist()
            for place, role in enumerate(roles[starts].tolist()):
                if told[place]:
                    histogram = Histogram(upper_bounds=bounds_s, cumulative=cumulative[place], total=seconds[place])
                    found.setdefault(role, {}).setdefault(latency, []).append(histogram)
    return {
        role: {latency: merge_histograms(several) for latency, several in own.items()} for role, own in found.items()
    }
