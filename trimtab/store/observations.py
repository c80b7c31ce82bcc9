"""One pure merge of what several collectors wrote about one role's window, and of a service's roles.

Collectors write sums, never averages, so that merging is adding; quantiles are taken last, from merged buckets. The
policy engine and the collector's API call the same function, and see the same numbers.

All sums come from windows that end at the same moment (``trimtab.store.common_window``).

m of "n of m" is the number of replicas the caller expects (the routable ones of the actuators), or, without that, the
number the collectors counted. The quality of a value, the first that applies:

    no replica in the sum     STALE when one stands still, WARMING when one is too new, else MISSING; no value
    a counter fell            RESET: what was counted since is included, so the value may be too small
    n < m                     PARTIAL n of m
    a replica is new          WARMING
    else                      OK

Requests that wait at sleepers are demand, not capacity: there n of m are the sleepers.

NaN, infinities and negatives are refused: such a signal of such a partial counts as not reported.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.histogram import EMPTY, Histogram, merge_histograms
from trimtab.domain.time import microseconds_of, seconds_of
from trimtab.store.common_window import choose

__all__ = [
    "Graded",
    "Tally",
    "age_s",
    "grade",
    "merge",
    "merge_service",
    "signal",
    "window_end_s",
]

RATIO_SIGNALS = frozenset(
    {
        pb.SIGNAL_KV_USAGE_RATIO,
        pb.SIGNAL_PREFIX_HIT_RATIO,
        pb.SIGNAL_GPU_UTILISATION_RATIO,
        pb.SIGNAL_SM_ACTIVITY_RATIO,
        pb.SIGNAL_GPU_MEMORY_RATIO,
    }
)
"""Signals whose value is ``sum / weight``."""

# More replicas than a role can have.
_MANY = 1e9
# Where a request of a service passes several roles, one of them says it: the last for what is finished, the first for
# what is waited for.
_LAST_ROLES = frozenset({types_pb2.ROLE_COLOCATED, types_pb2.ROLE_DECODE})
_FIRST_ROLES = frozenset({types_pb2.ROLE_COLOCATED, types_pb2.ROLE_PREFILL, types_pb2.ROLE_PREFILL_ATTENTION})
_SIGNAL_ROLES: Mapping["pb.Signal.ValueType", Collection["types_pb2.Role.ValueType"]] = {
    pb.SIGNAL_REQUEST_RPS: _LAST_ROLES
}
_LATENCY_ROLES: Mapping["pb.Latency.ValueType", Collection["types_pb2.Role.ValueType"]] = {
    pb.LATENCY_TTFT: _FIRST_ROLES,
    pb.LATENCY_QUEUE: _FIRST_ROLES,
    pb.LATENCY_TBT: _LAST_ROLES,
    pb.LATENCY_TPOT: _LAST_ROLES,
    pb.LATENCY_E2E: _LAST_ROLES,
}


def merge(partials: Sequence[pb.RolePartial], *, expected: Collection[str] | None = None) -> pb.RoleObservation:
    """The observation that ``partials`` (at least one, all of one service and role) amount to.

    Give the two newest partials of each collector.
    Raises ``ValueError`` for no partial and for partials of different roles.
    """
    if not partials:
        raise ValueError("no partial to merge: a role that nobody observed has no observation")
    if len({(partial.service, partial.role) for partial in partials}) > 1:
        raise ValueError("partials of different services or roles cannot be merged")
    parts = [_part(partials, expected)]
    return _observe(parts, role=partials[0].role)


def merge_service(
    partials: Sequence[pb.RolePartial],
    *,
    expected: Mapping["types_pb2.Role.ValueType", Collection[str]] | None = None,
) -> pb.RoleObservation:
    """One service over its roles, from partials of any of them: an observation whose role is unspecified.

    What roles do is added; n of m count the replicas of all roles. Finished requests, TBT, TPOT and E2E are those of
    the roles that finish requests (colocated, decode), TTFT and the queue time those of the roles that take them in
    (colocated, prefill): one request is not counted in two roles. Front doors are left out. ``expected`` is by role.
    Raises ``ValueError`` for no partial of a role and for partials of different services.
    """
    by_role: dict[types_pb2.Role.ValueType, list[pb.RolePartial]] = {}
    for partial in partials:
        if partial.role != types_pb2.ROLE_UNSPECIFIED:
            by_role.setdefault(partial.role, []).append(partial)
    if not by_role:
        raise ValueError("no partial to merge: a service that nobody observed has no observation")
    if len({partial.service for own in by_role.values() for partial in own}) > 1:
        raise ValueError("partials of different services cannot be merged")
    parts = [_part(by_role[role], None if expected is None else expected.get(role, ())) for role in sorted(by_role)]
    return _observe(parts, role=types_pb2.ROLE_UNSPECIFIED)


def signal(observation: pb.RoleObservation, wanted: "pb.Signal.ValueType") -> types_pb2.Measurement:
    """One signal's measurement; MISSING when the observation does not hold it."""
    for item in observation.signals:
        if item.signal == wanted:
            return item.measurement
    return types_pb2.Measurement(quality=types_pb2.QUALITY_MISSING, detail="not observed")


def window_end_s(observation: pb.RoleObservation) -> float:
    """End of the window: Unix seconds on the store's clock."""
    return seconds_of(observation.window_end)


def age_s(observation: pb.RoleObservation, now_s: float) -> float:
    """Seconds since the window ended; never negative."""
    return max(0.0, now_s - window_end_s(observation))


@dataclass(frozen=True, kw_only=True)
class _Coverage:
    """m, and how many of the reporting replicas are not among the expected ones."""

    expected: int
    strangers: int = 0

    def reported(self, contributors: int) -> int:
        """n: contributors that are expected. Which ones a sum holds is not known, so strangers count against it."""
        return min(max(0, contributors - self.strangers), self.expected)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One role's partials that count, all of one window, with the replicas in them and those wanted."""

    role: "types_pb2.Role.ValueType"
    chosen: Sequence[pb.RolePartial]
    reported: frozenset[str]
    wanted: frozenset[str]


def _part(partials: Sequence[pb.RolePartial], expected: Collection[str] | None) -> _Part:
    chosen, left_out = choose(partials)
    reported = frozenset(name for partial in chosen for name in partial.reported_replicas)
    if expected is None:
        named = (*chosen, *left_out)
        wanted = reported.union(*((*partial.reported_replicas, *partial.missing_replicas) for partial in named))
    else:
        wanted = frozenset(expected)
    return _Part(role=partials[0].role, chosen=chosen, reported=reported, wanted=wanted)


def _observe(parts: Sequence[_Part], *, role: "types_pb2.Role.ValueType") -> pb.RoleObservation:
    """What one role, or several of one service, amount to."""
    chosen = [partial for part in parts for partial in part.chosen]
    observation = pb.RoleObservation(
        service=chosen[0].service,
        role=role,
        replica_revisions=_oldest_revisions(chosen),
        reported_replicas=sorted(name for part in parts for name in part.reported & part.wanted),
        missing_replicas=sorted(name for part in parts for name in part.wanted - part.reported),
    )
    observation.window_start.CopyFrom(min((p.window_start for p in chosen), key=microseconds_of))
    observation.window_end.CopyFrom(max((p.window_end for p in chosen), key=microseconds_of))
    for name in sorted({item.signal for partial in chosen for item in partial.signals}):
        speaking = _speaking(parts, _SIGNAL_ROLES.get(name))
        items = [item for part in speaking for partial in part.chosen for item in partial.signals]
        own = [item for item in items if item.signal == name]
        observation.signals.append(_merge_signal(name, own, _coverage(name, own, speaking)))
    for latency in sorted({item.latency for partial in chosen for item in partial.latencies}):
        speaking = _speaking(parts, _LATENCY_ROLES.get(latency))
        histograms = [item for part in speaking for partial in part.chosen for item in partial.latencies]
        observation.latencies.append(
            _merge_latency(latency, [item for item in histograms if item.latency == latency], speaking)
        )
    return observation


def _speaking(parts: Sequence[_Part], roles: Collection["types_pb2.Role.ValueType"] | None) -> Sequence[_Part]:
    """The parts whose word counts: those of ``roles`` where a service has several, and one of them is among these."""
    if roles is None or len(parts) == 1:
        return parts
    return [part for part in parts if part.role in roles] or parts


def _coverage(name: "pb.Signal.ValueType", items: Sequence[pb.SignalPartial], parts: Sequence[_Part]) -> _Coverage:
    if name == pb.SIGNAL_ASLEEP_LOAD:
        return _Coverage(expected=round(sum(item.weight for item in items if 0 <= item.weight < _MANY)))
    return _coverage_of(parts)


def _coverage_of(parts: Sequence[_Part]) -> _Coverage:
    return _Coverage(
        expected=sum(len(part.wanted) for part in parts),
        strangers=sum(len(part.reported - part.wanted) for part in parts),
    )


def _oldest_revisions(partials: Iterable[pb.RolePartial]) -> dict[str, int]:
    """By cluster, the oldest replica revision that any of the partials rests on."""
    oldest: dict[str, int] = {}
    for partial in partials:
        for cluster, revision in partial.replica_revisions.items():
            oldest[cluster] = min(revision, oldest.get(cluster, revision))
    return dict(sorted(oldest.items()))


@dataclass
class Tally:
    """How many replicas a value rests on, and in what state."""

    reported: int = 0
    stale: int = 0
    reset: int = 0
    warming: int = 0
    refused: int = 0
    notes: list[str] = field(default_factory=list)


def _merge_signal(
    name: "pb.Signal.ValueType", items: Sequence[pb.SignalPartial], coverage: _Coverage
) -> pb.SignalValue:
    tally = Tally()
    total, weight = 0.0, 0.0
    maximum: float | None = None
    for item in items:
        tally.stale += item.stale
        tally.warming += item.warming
        numbers = (item.sum, item.weight, item.maximum if item.HasField("maximum") else 0.0)
        if not all(_sane(number) for number in numbers):
            tally.refused += item.reported
            continue
        tally.reported += item.reported
        tally.reset += item.reset
        total += item.sum
        weight += item.weight
        if item.HasField("maximum"):
            maximum = item.maximum if maximum is None else max(maximum, item.maximum)
    value: float | None = total
    if name in RATIO_SIGNALS:
        value = total / weight if weight > 0 else None
        if value is None and tally.reported:
            tally.notes.append("nothing to take a share of in the window")
    measurement = _measurement(value, tally, coverage)
    return pb.SignalValue(
        signal=name, measurement=measurement, maximum=maximum if measurement.HasField("value") else None
    )


def _merge_latency(
    latency: "pb.Latency.ValueType", items: Sequence[pb.LatencyPartial], parts: Sequence[_Part]
) -> pb.LatencyValue:
    good = [item for item in items if _sane_histogram(item)]
    tally = Tally(
        reported=sum(len(part.reported) for part in parts) if good else 0,
        reset=max((item.reset for part in parts for partial in part.chosen for item in partial.signals), default=0),
        refused=len(items) - len(good),
    )
    coverage = _coverage_of(parts)
    histogram = merge_histograms([_histogram(item) for item in good])
    if not _sane(histogram.count):
        histogram = EMPTY
    count = histogram.count
    merged = pb.LatencyValue(latency=latency, count=count)
    if count <= 0:
        tally.notes.append("nothing finished in the window")
    elif len(histogram.upper_bounds) < 2:
        tally.notes.append("the collectors' buckets have no finite bound in common")
    for share, target in ((0.5, merged.p50_s), (0.95, merged.p95_s), (0.99, merged.p99_s)):
        found = histogram.quantile(share)
        target.CopyFrom(_measurement(None if found is None else found[0], tally, coverage))
        if found is not None and found[1]:
            target.detail = "; ".join(filter(None, (target.detail, "above the largest finite bucket")))
    mean = histogram.total / count if count > 0 else None
    merged.mean_s.CopyFrom(_measurement(mean, tally, coverage))
    return merged


def _histogram(item: pb.LatencyPartial) -> Histogram:
    return Histogram(
        upper_bounds=tuple(item.upper_bounds_s), cumulative=list(accumulate(item.increases)), total=item.sum_s
    )


def _measurement(value: float | None, tally: Tally, coverage: _Coverage) -> types_pb2.Measurement:
    found = grade(value, tally, reported=coverage.reported(tally.reported), expected=coverage.expected)
    return types_pb2.Measurement(
        value=found.value,
        quality=found.quality,
        reported=found.reported,
        expected=found.expected,
        detail=found.detail,
    )


class Graded(NamedTuple):
    """A value with its quality; None exactly when there is none."""

    value: float | None
    quality: "types_pb2.Quality.ValueType"
    reported: int
    expected: int
    detail: str


def grade(value: float | None, tally: Tally, *, reported: int, expected: int) -> Graded:
    """The value with its quality, by the table in this module's docstring: ``reported`` is n, ``expected`` m."""
    details = list(tally.notes)
    if value is not None and not _sane(value):
        # Sums of huge but finite numbers.
        value = None
        details.append("out of range")
    if reported < expected:
        details += [
            f"{count} {word}"
            for count, word in ((tally.stale, "stale"), (tally.warming, "warming"), (tally.refused, "refused"))
            if count
        ]
    if reported == 0 or value is None:
        value = None
        if tally.stale and not tally.reported:
            quality = types_pb2.QUALITY_STALE
        elif tally.warming and not tally.reported:
            quality = types_pb2.QUALITY_WARMING
        else:
            quality = types_pb2.QUALITY_MISSING
        if expected == 0:
            details.insert(0, "no replica is expected")
    elif tally.reset:
        quality = types_pb2.QUALITY_RESET
    elif reported < expected:
        quality = types_pb2.QUALITY_PARTIAL
    elif tally.warming:
        quality = types_pb2.QUALITY_WARMING
    else:
        quality = types_pb2.QUALITY_OK
    return Graded(value, quality, reported, expected, "; ".join(details))


def _sane(number: float) -> bool:
    return math.isfinite(number) and number >= 0


def _sane_histogram(item: pb.LatencyPartial) -> bool:
    """Ascending bounds up to +Inf, one finite increase each, finite sum."""
    bounds = list(item.upper_bounds_s)
    return (
        len(bounds) == len(item.increases) > 0
        and bounds[-1] == math.inf
        and all(lower < upper for lower, upper in pairwise(bounds))
        and all(_sane(increase) for increase in item.increases)
        and _sane(item.sum_s)
    )
