"""One pass in figures, per service and over all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from simulator.replay.report import Outcome, ReplayReport, RequestRecord


@dataclasses.dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a service, in seconds, for each request."""

    ttft_s: float
    tpot_s: float

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request was answered completely and within both targets."""
        return record.outcome is Outcome.OK and self.ttft_met_by(record) and self.tpot_met_by(record)

    def ttft_met_by(self, record: RequestRecord) -> bool:
        """Whether the first token of an answer that completed came in time."""
        return record.outcome is Outcome.OK and record.ttft_s is not None and record.ttft_s <= self.ttft_s

    def tpot_met_by(self, record: RequestRecord) -> bool:
        """Whether the tokens after the first came fast enough; an answer of one token has none to be slow."""
        return record.outcome is Outcome.OK and (record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """One latency over complete answers, in seconds; None where there was none."""

    count: int
    mean_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """The distribution of some values."""
        ordered = sorted(values)
        mean_s = math.fsum(ordered) / len(ordered) if ordered else None
        return cls(len(ordered), mean_s, quantile(ordered, 0.5), quantile(ordered, 0.95), quantile(ordered, 0.99))


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """The q-quantile of ascending values, linear between neighbours (numpy's default); None of none."""
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceSummary:
    """One service over a pass. Shares are fractions of all its requests, lost ones included."""

    service: str
    requests: int
    lost: int
    slo_attainment: float
    """Share within both targets."""
    ttft_attainment: float
    tpot_attainment: float
    ttft: Distribution
    tpot: Distribution
    e2e: Distribution
    goodput_rps: float
    """Requests within both targets per second of the trace."""
    output_tps: float
    """Tokens received per second of the trace."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassSummary:
    """A pass: its services by name, and all of them together."""

    total: ServiceSummary
    services: tuple[ServiceSummary, ...]
    outcomes: dict[str, int]
    max_late_s: float
    started_unix_s: float
    """When the trace began, by the client's clock."""

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return dataclasses.asdict(self)


def summarise(report: ReplayReport, slos: Mapping[str, Slo]) -> PassSummary:
    """Figures of a replay. Raises KeyError, naming it, for a service without an SLO."""
    by_service: dict[str, list[RequestRecord]] = {}
    for record in report.records:
        by_service.setdefault(record.service, []).append(record)
    missing = sorted(by_service.keys() - slos.keys())
    if missing:
        raise KeyError(f"no SLO is known for {', '.join(missing)}")
    duration_s = max(report.duration_s, 1e-9)
    services = tuple(_service(name, by_service[name], slos, duration_s) for name in sorted(by_service))
    total = _service("all", report.records, slos, duration_s)
    return PassSummary(total, services, report.outcomes, report.max_late_s, report.started_unix_s)


def _service(name: str, records: Sequence[RequestRecord], slos: Mapping[str, Slo], duration_s: float) -> ServiceSummary:
    complete = [record for record in records if record.outcome is Outcome.OK]
    good = sum(slos[record.service].met_by(record) for record in records)
    count = max(1, len(records))
    return ServiceSummary(
        service=name,
        requests=len(records),
        lost=len(records) - len(complete),
        slo_attainment=good / count,
        ttft_attainment=sum(slos[record.service].ttft_met_by(record) for record in records) / count,
        tpot_attainment=sum(slos[record.service].tpot_met_by(record) for record in records) / count,
        ttft=Distribution.of([record.ttft_s for record in complete if record.ttft_s is not None]),
        tpot=Distribution.of([record.tpot_s for record in complete if record.tpot_s is not None]),
        e2e=Distribution.of([record.e2e_s for record in complete if record.e2e_s is not None]),
        goodput_rps=good / duration_s,
        output_tps=sum(record.received_tokens for record in records) / duration_s,
    )
