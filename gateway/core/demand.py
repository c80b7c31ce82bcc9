"""What arrives at the front door, for the collector: counts since the last report that was taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_MAX_INTERVAL_S = 60.0
_LEAD_S = 0.1


def until_report_s(wall_s: float, every_s: float) -> float:
    """The pause from `wall_s` (Unix) to the next report: shortly before the clock comes to a multiple of `every_s`.

    Collectors close their windows at multiples of their interval, so the arrivals in a window are fresh. With a wrong
    clock reports come at some other moment, and as often. From half to one and a half of `every_s`.
    """
    lead_s = min(_LEAD_S, every_s / 4)
    pause_s = every_s - (wall_s + lead_s) % every_s
    return pause_s if pause_s >= every_s / 2 else pause_s + every_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemandReport:
    """One service's demand over `interval_s`; `held` is a count of now."""

    service: str
    interval_s: float
    arrivals: int
    prompt_tokens: int
    requested_output_tokens: int
    held: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One replica: requests open at it now, and pieces of answers since the last report that arrived."""

    replica: str
    in_flight: int
    answered: int


@dataclasses.dataclass(slots=True)
class _Tally:
    arrivals: int = 0
    prompt_tokens: int = 0
    requested_output_tokens: int = 0


class DemandTally:
    """Counts per service. A report that did not arrive stays in the counts, and its time in the interval.

    After a minute without a report that arrived, the counts begin anew: rates over an outage have no use.
    """

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._tallies: dict[str, _Tally] = {}
        self._reported: dict[str, _Tally] = {}
        self._reported_at_s = now_s
        self._answers: dict[str, int] = {}
        self._told_answers: dict[str, int] = {}

    def note(self, service: str, *, prompt_tokens: int, output_tokens: int) -> None:
        """One request arrived."""
        tally = self._tallies.setdefault(service, _Tally())
        tally.arrivals += 1
        tally.prompt_tokens += prompt_tokens
        tally.requested_output_tokens += output_tokens

    def report(self, now_s: float, held: dict[str, int]) -> list[DemandReport]:
        """Demand of every service in `held` (all known ones) and every one that saw arrivals, by name.

        Empty while no time has passed. Call `delivered` when the report has arrived.
        """
        if now_s - self._since_s > _MAX_INTERVAL_S:
            self._tallies.clear()
            self._since_s = self._reported_at_s
        interval_s = now_s - self._since_s
        self._reported = {service: dataclasses.replace(tally) for service, tally in self._tallies.items()}
        self._reported_at_s = now_s
        if interval_s <= 0:
            return []
        return [
            DemandReport(
                service=service,
                interval_s=interval_s,
                arrivals=tally.arrivals,
                prompt_tokens=tally.prompt_tokens,
                requested_output_tokens=tally.requested_output_tokens,
                held=held.get(service, 0),
            )
            for service in sorted(held.keys() | self._reported.keys())
            for tally in (self._reported.get(service, _Tally()),)
        ]

    def report_replicas(self, traffic: Mapping[str, tuple[int, int]]) -> list[ReplicaReport]:
        """Replicas with requests or answers, by name. `traffic` has requests right now, and answers in all.

        Answers in all may begin anew for a replica that went and came back. Call `delivered` when it has arrived.
        """
        self._told_answers = {replica: answers for replica, (_, answers) in traffic.items()}
        reports: list[ReplicaReport] = []
        for replica, (in_flight, answers) in sorted(traffic.items()):
            before = self._answers.get(replica, 0)
            answered = answers - before if answers >= before else answers
            if in_flight or answered:
                reports.append(ReplicaReport(replica=replica, in_flight=in_flight, answered=answered))
        return reports

    def delivered(self) -> None:
        """The last report arrived: its counts are not reported again."""
        for service, sent in self._reported.items():
            tally = self._tallies.get(service)
            if tally is None:
                continue
            tally.arrivals -= sent.arrivals
            tally.prompt_tokens -= sent.prompt_tokens
            tally.requested_output_tokens -= sent.requested_output_tokens
            if not tally.arrivals:
                del self._tallies[service]
        self._reported = {}
        self._answers = self._told_answers
        self._since_s = self._reported_at_s
