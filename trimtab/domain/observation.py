"""Signals of a role, or of a service over its roles, in a window, merged over collectors: values with a quality.

Values are computed on access: a reader that needs three signals pays for three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.grading import Coverage, Tally, grade, is_sane
from trimtab.domain.histogram import EMPTY, Histogram, merge_histograms
from trimtab.domain.measurement import NEVER_READ, Measurement, measurement_to_proto
from trimtab.domain.role_window import RoleWindow, SignalSums, role_number
from trimtab.domain.signals import LATENCY_NUMBERS, RATIO_SIGNALS, SIGNAL_NUMBERS, Latency, Signal
from trimtab.domain.time import timestamp_of_microseconds
from trimtab.domain.vocabulary import Role

# More replicas than a role can have.
_MANY = 1e9
# Where a request of a service passes several roles, one role reports a signal: the last one what is finished, the first
# one what is waited for.
_LAST_ROLES = frozenset({Role.COLOCATED, Role.DECODE})
_FIRST_ROLES = frozenset({Role.COLOCATED, Role.PREFILL, Role.PREFILL_ATTENTION})
_SPEAKING_ROLES: Mapping[Signal | Latency, frozenset[Role]] = {
    Signal.REQUEST_RPS: _LAST_ROLES,
    Latency.TTFT: _FIRST_ROLES,
    Latency.QUEUE: _FIRST_ROLES,
    Latency.TBT: _LAST_ROLES,
    Latency.TPOT: _LAST_ROLES,
    Latency.E2E: _LAST_ROLES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePart:
    """One role's windows that count, all with one end, with the replicas in them and those wanted.

    `signals` and `latencies` are those of all windows; `reset` is the largest count of replicas of which a counter
    fell.
    """

    role: Role | None
    windows: Sequence[RoleWindow]
    reported: frozenset[str]
    wanted: frozenset[str]
    coverage: Coverage
    signals: Mapping[Signal, Sequence[SignalSums]]
    latencies: Mapping[Latency, Sequence[Histogram | None]]
    reset: int

    @classmethod
    def of(
        cls, role: Role | None, windows: Sequence[RoleWindow], *, reported: frozenset[str], wanted: frozenset[str]
    ) -> RolePart:
        """The part that these windows, of one role, make up."""
        signals: dict[Signal, list[SignalSums]] = {}
        latencies: dict[Latency, list[Histogram | None]] = {}
        reset = 0
        for window in windows:
            for item in window.signals:
                signals.setdefault(item.signal, []).append(item)
                if item.reset > reset:
                    reset = item.reset
            for latency, histogram in window.latencies:
                latencies.setdefault(latency, []).append(histogram)
        return cls(
            role=role,
            windows=windows,
            reported=reported,
            wanted=wanted,
            coverage=Coverage(len(wanted), len(reported - wanted)),
            signals=signals,
            latencies=latencies,
            reset=reset,
        )


class SignalValue(NamedTuple):
    """A signal, and the largest value of one replica where that is reported and the signal has a value."""

    measurement: Measurement
    maximum: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyValue:
    """One latency over the window, in seconds; `count` values fell into it."""

    p50_s: Measurement
    p95_s: Measurement
    p99_s: Measurement
    mean_s: Measurement
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleObservation:
    """One role, or with `role` None a front door or a service over its roles. Made by `trimtab.domain.role_merge`."""

    service: str
    role: Role | None
    parts: Sequence[RolePart]

    @property
    def start_us(self) -> int:
        """The window's start: microseconds since 1970 on the store's clock."""
        return min(window.start_us for window in self._windows())

    @property
    def end_us(self) -> int:
        """The window's end."""
        return max(window.end_us for window in self._windows())

    @property
    def end_s(self) -> float:
        """The window's end: Unix seconds on the store's clock."""
        return self.end_us / 1e6

    @property
    def replica_revisions(self) -> dict[str, int]:
        """By cluster, the oldest replica revision that any of the windows rests on."""
        oldest: dict[str, int] = {}
        for window in self._windows():
            for cluster, revision in window.replica_revisions.items():
                oldest[cluster] = min(revision, oldest.get(cluster, revision))
        return dict(sorted(oldest.items()))

    @property
    def reported_replicas(self) -> list[str]:
        """The replicas that count and contributed, in order."""
        return sorted(name for part in self.parts for name in part.reported & part.wanted)

    @property
    def missing_replicas(self) -> list[str]:
        """The replicas that count and did not."""
        return sorted(name for part in self.parts for name in part.wanted - part.reported)

    @property
    def signals(self) -> list[Signal]:
        """The signals that a window has, in the order of their numbers."""
        return sorted({signal for part in self.parts for signal in part.signals}, key=SIGNAL_NUMBERS.__getitem__)

    @property
    def latencies(self) -> list[Latency]:
        """The latencies that a window has, in the order of their numbers."""
        return sorted({one for part in self.parts for one in part.latencies}, key=LATENCY_NUMBERS.__getitem__)

    def measurement(self, signal: Signal) -> Measurement:
        """One signal; MISSING where no window has it."""
        return self.value(signal).measurement

    def value(self, signal: Signal) -> SignalValue:
        """One signal, with its largest value."""
        parts = self._speaking(signal)
        items = [item for part in parts for item in part.signals.get(signal, ())]
        if not items and not any(signal in part.signals for part in self.parts):
            return SignalValue(NEVER_READ, None)
        if signal is Signal.ASLEEP_LOAD:
            coverage = Coverage(round(sum(item.weight for item in items if 0 <= item.weight < _MANY)))
        else:
            coverage = _coverage(parts)
        return _signal_value(signal, items, coverage)

    def quantile(self, latency: Latency, share: float) -> Measurement:
        """One quantile of a latency in seconds; MISSING where no window has it."""
        merged = self._merged(latency)
        return NEVER_READ if merged is None else merged.quantile(share)

    def latency(self, latency: Latency) -> LatencyValue:
        """One latency; MISSING where no window has it."""
        merged = self._merged(latency)
        if merged is None:
            return LatencyValue(p50_s=NEVER_READ, p95_s=NEVER_READ, p99_s=NEVER_READ, mean_s=NEVER_READ, count=0.0)
        return LatencyValue(
            p50_s=merged.quantile(0.5),
            p95_s=merged.quantile(0.95),
            p99_s=merged.quantile(0.99),
            mean_s=merged.mean(),
            count=merged.histogram.count,
        )

    def _windows(self) -> Iterable[RoleWindow]:
        return (window for part in self.parts for window in part.windows)

    def _speaking(self, wanted: Signal | Latency) -> Sequence[RolePart]:
        """The parts that count: those of the roles that report the signal, where a service has several roles."""
        if len(self.parts) == 1:
            return self.parts
        roles = _SPEAKING_ROLES.get(wanted)
        if roles is None:
            return self.parts
        return [part for part in self.parts if part.role in roles] or self.parts

    def _merged(self, latency: Latency) -> _MergedLatency | None:
        parts = self._speaking(latency)
        items = [item for part in parts for item in part.latencies.get(latency, ())]
        if not items and not any(latency in part.latencies for part in self.parts):
            return None
        good = [histogram for histogram in items if histogram is not None]
        histogram = merge_histograms(good)
        tally = Tally(
            reported=sum([len(part.reported) for part in parts]) if good else 0,
            reset=max([part.reset for part in parts]),
            refused=len(items) - len(good),
        )
        return _MergedLatency(histogram if is_sane(histogram.count) else EMPTY, tally, _coverage(parts))


class _MergedLatency(NamedTuple):
    histogram: Histogram
    tally: Tally
    coverage: Coverage

    def quantile(self, share: float) -> Measurement:
        value, above = self.histogram.quantile(share) or (None, False)
        found = grade(value, self.tally, self.coverage, self._note())
        if above:
            detail = "; ".join(filter(None, (found.detail, "above the largest finite bucket")))
            return replace(found, detail=detail)
        return found

    def mean(self) -> Measurement:
        count = self.histogram.count
        return grade(self.histogram.total / count if count > 0 else None, self.tally, self.coverage, self._note())

    def _note(self) -> str:
        if self.histogram.count <= 0:
            return "nothing finished in the window"
        return "the collectors' buckets have no finite bound in common" if len(self.histogram.upper_bounds) < 2 else ""


def _coverage(parts: Sequence[RolePart]) -> Coverage:
    if len(parts) == 1:
        return parts[0].coverage
    return Coverage(
        expected=sum(part.coverage.expected for part in parts),
        strangers=sum(part.coverage.strangers for part in parts),
    )


def _signal_value(signal: Signal, items: Sequence[SignalSums], coverage: Coverage) -> SignalValue:
    reported = stale = reset = warming = refused = 0
    total = weight = 0.0
    maximum: float | None = None
    for _, own, replicas, largest, divisor, standing, fallen, new in items:
        stale += standing
        warming += new
        if not (0 <= own < inf and 0 <= divisor < inf and (largest is None or 0 <= largest < inf)):
            refused += replicas
            continue
        reported += replicas
        reset += fallen
        total += own
        weight += divisor
        if largest is not None and (maximum is None or largest > maximum):
            maximum = largest
    value: float | None = total
    note = ""
    if signal in RATIO_SIGNALS:
        value = total / weight if weight > 0 else None
        if value is None and reported:
            note = "nothing to take a share of in the window"
    measurement = grade(value, Tally(reported, stale, reset, warming, refused), coverage, note)
    return SignalValue(measurement, None if measurement.value is None else maximum)


def observation_to_proto(observation: RoleObservation) -> pb.RoleObservation:
    """The message of an observation: every signal and latency that it has."""
    message = pb.RoleObservation(
        service=observation.service,
        role=role_number(observation.role),
        window_start=timestamp_of_microseconds(observation.start_us),
        window_end=timestamp_of_microseconds(observation.end_us),
        replica_revisions=observation.replica_revisions,
        reported_replicas=observation.reported_replicas,
        missing_replicas=observation.missing_replicas,
    )
    for signal in observation.signals:
        found = observation.value(signal)
        message.signals.add(
            signal=SIGNAL_NUMBERS[signal], measurement=measurement_to_proto(found.measurement), maximum=found.maximum
        )
    for latency in observation.latencies:
        value = observation.latency(latency)
        message.latencies.add(
            latency=LATENCY_NUMBERS[latency],
            p50_s=measurement_to_proto(value.p50_s),
            p95_s=measurement_to_proto(value.p95_s),
            p99_s=measurement_to_proto(value.p99_s),
            mean_s=measurement_to_proto(value.mean_s),
            count=value.count,
        )
    return message
