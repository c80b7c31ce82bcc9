"""The demo's two passes, the policy's and the static split's, set against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rich.table import Table

from lab.evaluation.bars import Bar
from lab.evaluation.statistics import PassSummary, ServiceSummary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassFigures:
    """One pass: what its clients saw, and what the fleet and the control plane counted."""

    name: str
    summary: PassSummary
    gpu_hours: float
    """GPU time of awake replicas, by the servers' own clocks."""
    misrouted_requests: int
    """Requests that servers received while they were asleep, by the servers' own count."""
    wakes: int = 0
    releases: int = 0
    transitions: int = 0
    decisions: int = 0

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {**dataclasses.asdict(self), "summary": self.summary.to_json()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """The demo's result."""

    policy: PassFigures
    static: PassFigures
    inputs: Mapping[str, object]
    """Seed, duration, trace and its notes, static split, tokens per chunk: what a reader needs to repeat it."""
    machine: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def slo_gain_points(self) -> float:
        """SLO attainment of the policy less that of the static split, in percentage points."""
        return 100.0 * (self.policy.summary.total.slo_attainment - self.static.summary.total.slo_attainment)

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The figures that the demo is judged by. Losses and misroutings are those of the policy's pass."""
        gain = round(self.slo_gain_points, 2)
        lost = self.policy.summary.total.lost
        misrouted = self.policy.misrouted_requests
        return (
            Bar("slo_gain_points", gain, 0.0, gain > 0),
            Bar("wakes", self.policy.wakes, 1, self.policy.wakes >= 1),
            Bar("releases", self.policy.releases, 1, self.policy.releases >= 1),
            Bar("lost_requests", lost, 0, lost == 0),
            Bar("misrouted_requests", misrouted, 0, misrouted == 0),
        )

    @property
    def ok(self) -> bool:
        """Whether every bar is met."""
        return all(bar.ok for bar in self.bars)

    def to_json(self) -> dict[str, object]:
        """One object with the machine, the inputs, the results and the bars."""
        return {
            "machine": dict(self.machine),
            "inputs": dict(self.inputs),
            "results": {"policy": self.policy.to_json(), "static": self.static.to_json()},
            "bars": [bar.document() for bar in self.bars],
        }


def summary_table(summary: DemoSummary) -> Table:
    """The summary for a terminal: a row per service and pass."""
    table = Table(title="policy against a static split of the same GPUs, same trace and seed", title_justify="left")
    for heading in ("service", "pass"):
        table.add_column(heading)
    for heading in ("requests", "lost", "in SLO", "TTFT P95", "TPOT P95", "E2E P95", "good req/s"):
        table.add_column(heading, justify="right")
    static = {service.service: service for service in summary.static.summary.services}
    for service in summary.policy.summary.services:
        _add_pair(table, service, static.get(service.service), summary)
        table.add_section()
    _add_pair(table, summary.policy.summary.total, summary.static.summary.total, summary)
    table.caption = _caption(summary)
    table.caption_justify = "left"
    return table


def _add_pair(table: Table, policy: ServiceSummary, static: ServiceSummary | None, summary: DemoSummary) -> None:
    table.add_row(policy.service, summary.policy.name, *_cells(policy), style="bold")
    if static is not None:
        table.add_row("", summary.static.name, *_cells(static))


def _cells(service: ServiceSummary) -> tuple[str, ...]:
    return (
        str(service.requests),
        str(service.lost),
        f"{service.slo_attainment:.1%}",
        _seconds(service.ttft.p95_s),
        _milliseconds(service.tpot.p95_s),
        _seconds(service.e2e.p95_s),
        f"{service.goodput_rps:.2f}",
    )


def _caption(summary: DemoSummary) -> str:
    policy, static = summary.policy, summary.static
    return (
        f"{summary.slo_gain_points:+.1f} points of SLO attainment; {policy.wakes} wakes, {policy.releases} releases in "
        f"{policy.transitions} transitions, {policy.decisions} decisions; GPU-hours {policy.gpu_hours:.3f} against "
        f"{static.gpu_hours:.3f}; {policy.summary.total.lost} lost, {policy.misrouted_requests} misrouted"
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.0f} ms"
