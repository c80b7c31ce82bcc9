"""The metrics collector's cores on virtual time: readings go in, the policy engine's signals come out.

Readings are worked, windows closed, roles summed and merged by the code that production runs; only pages, sockets and
the store are left out. Whoever drives it says when: one `scrape` every `interval_s` with the readings of all servers,
sleepers included, one `report` of the front door, and `signals` for the newest window.

A window ends at the newest scrape, or so long after it as the caller says, and is as long as a live collector's.
Sleepers count as little as they do there, and a server counts for rates from its second reading after it woke.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from metrics_collector.core.demand import DemandBoard, DemandReport, FrontDoorSums, forget, front_door_sums, report
from metrics_collector.core.liveness import judge_all
from metrics_collector.core.replica_windows import SIGNAL_COLUMN
from metrics_collector.core.roles import LATENCIES, RoleSums, Roster, role_columns
from metrics_collector.core.schema import Latency, Reading
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import ROLES, RoleKey, Target
from metrics_collector.core.window import Window, window_length_s
from policy_engine.core.observed import ROLE_LATENCIES, ROLE_SIGNALS
from policy_engine.core.signals import FrontDoor, RoleSignals
from policy_engine.core.vocabulary import MemberKey
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.histogram import Histogram
from trimtab.domain.measurement import NEVER_READ, Measurement
from trimtab.store.observations import RATIO_SIGNALS, Graded, Tally, grade
from trimtab.words import Quality, Role

_NAME = "virtual"
_SPARE_ROWS = 4
_LATENCIES = {
    field: own for field, number in ROLE_LATENCIES.items() for own, name in LATENCIES.items() if name == number
}
_QUALITIES: Mapping[int, Quality] = {quality.number: quality for quality in Quality}

Observed = tuple[dict[MemberKey, RoleSignals], dict[str, FrontDoor]]
"""The newest window of roles, and of front doors by service; absent where nobody has observed anything."""


class VirtualCollector:
    """One collector over all servers of a run. The defaults are the live collector's."""

    def __init__(
        self,
        *,
        window_s: float = 5.0,
        interval_s: float = 1.0,
        stuck_after_s: float = 10.0,
        demand_expiry_s: float = 3.0,
    ) -> None:
        """`window_s` is stretched to two intervals; `stuck_after_s` is the longest iteration that a server may take."""
        self._length_s = window_length_s(window_s, interval_s)
        self._interval_s = interval_s
        self._stuck_after_s = stuck_after_s
        self._demand_expiry_s = demand_expiry_s
        self._table = SeriesTable(rows=max(12, int(self._length_s / interval_s) + _SPARE_ROWS))
        self._targets: dict[str, tuple[MemberKey, Target]] = {}
        self._roster: tuple[frozenset[tuple[MemberKey, str]], Roster] | None = None
        self._demand = DemandBoard()
        self._ends_s: tuple[float, ...] = ()
        """Of the newest windows, two at most: the newest may end a little later than now."""

    def add(self, replica: str, service: str, role: Role, gpus: int) -> None:
        """A server that is scraped from now on. Raises ValueError when the name is taken."""
        if replica in self._targets:
            raise ValueError(f"replica {replica} is there already")
        target = Target(
            target_id=replica,
            address="",
            service=service,
            role=ROLES[role.value],
            replica=replica,
            cluster="",
            gpus=gpus,
            source=_NAME,
            counted=False,
        )
        self._targets[replica] = (MemberKey(service, role), target)
        self._table.add(replica, keep_s=self._length_s)
        self._roster = None

    def remove(self, replica: str) -> None:
        """A server goes, with all that is known of it."""
        del self._targets[replica]
        self._table.remove(replica)
        self._roster = None

    def scrape(self, now_s: float, readings: Mapping[str, Reading], *, end_s: float | None = None) -> None:
        """One round: the readings of this moment; a server that gave none is left out of `readings`.

        `end_s` is the end of the window that they are the newest of, if it is later than now.
        """
        for replica, reading in readings.items():
            self._table.put(replica, reading, at_s=now_s)
        self._ends_s = (*self._ends_s[-1:], now_s if end_s is None else end_s)

    def report(
        self, now_s: float, service: str, *, arrivals: int, prompt_tokens: int, output_tokens: int, held: int
    ) -> None:
        """What came to the front door of `service` since the report an interval ago, and how many are held now."""
        said = DemandReport(
            at_s=now_s,
            interval_s=self._interval_s,
            arrivals=arrivals,
            prompt_tokens=prompt_tokens,
            requested_output_tokens=output_tokens,
            held=held,
        )
        self._demand = report(self._demand, _NAME, {service: said}, keep_s=2 * self._length_s)

    def signals(self, now_s: float, routable: Mapping[MemberKey, Collection[str]]) -> Observed:
        """The newest window of every member of `routable`, whose values are the replicas that count.

        They are also the m of "n of m". It is the last window of those scraped for that ends at or before `now_s`;
        there is nothing before the first one's end.
        """
        end_s = max((one for one in self._ends_s if one <= now_s), default=None)
        if end_s is None:
            return {}, {}
        window = Window(start_s=end_s - self._length_s, end_s=end_s)
        roles = self._roles(window, routable)
        self._demand = forget(self._demand, now_s=end_s)
        services = {key.service for key in routable}
        expiry_s = max(self._demand_expiry_s, 2 * self._interval_s)
        fronts = {
            sums.service: _front_door(sums, window_end_s=end_s)
            for sums in front_door_sums(self._demand, window, expiry_s=expiry_s)
            if sums.service in services
        }
        return roles, fronts

    def _roles(self, window: Window, routable: Mapping[MemberKey, Collection[str]]) -> dict[MemberKey, RoleSignals]:
        roster = self._roster_of(routable)
        if not roster.keys:
            return {}
        windows = self._table.close(roster.target_ids, window)
        verdicts = judge_all(roster.target_ids, windows, {}, limits_s=roster.limits_s(lambda _: self._stuck_after_s))
        columns = role_columns(roster, windows, verdicts, windows.values)
        reported = np.add.reduceat(columns.seen.astype(np.int64), roster.starts).tolist()
        places = {key: place for place, key in enumerate(roster.keys)}
        found: dict[MemberKey, RoleSignals] = {}
        for key in sorted(routable):
            place = places.get(RoleKey(service=key.service, role=ROLES[key.role.value]))
            if place is not None:
                found[key] = _role_signals(
                    key.role,
                    columns.sums[place],
                    columns.latencies.get(place, {}),
                    window_end_s=window.end_s,
                    reported=reported[place],
                    expected=len(set(routable[key])),
                )
        return found

    def _roster_of(self, routable: Mapping[MemberKey, Collection[str]]) -> Roster:
        counted = frozenset((key, name) for key, names in routable.items() for name in names)
        if self._roster is None or self._roster[0] != counted:
            targets: list[Target] = []
            for name, (key, target) in self._targets.items():
                counts = (key, name) in counted
                targets.append(replace(target, counted=counts, routable_by_actuator=counts))
            self._roster = (counted, Roster.of(targets))
        return self._roster[1]


def _role_signals(
    role: Role,
    sums: RoleSums,
    latencies: Mapping[Latency, Histogram],
    *,
    window_end_s: float,
    reported: int,
    expected: int,
) -> RoleSignals:
    """What one role's sums amount to; the same as `merge` and then `role_signals` make of one collector's partial."""

    def of(name: pb.Signal.ValueType) -> Measurement:
        column = SIGNAL_COLUMN[name]
        value: float | None = sums.sums[column]
        tally = Tally(sums.reported[column], sums.stale, sums.reset[column], sums.warming)
        if name in RATIO_SIGNALS:
            value = sums.sums[column] / sums.weights[column] if sums.weights[column] > 0 else None
        return _signal(grade(value, tally, reported=min(tally.reported, expected), expected=expected))

    def p95_of(latency: Latency) -> Measurement:
        histogram = latencies.get(latency)
        if histogram is None:
            return NEVER_READ
        found = histogram.quantile(0.95)
        tally = Tally(reported, reset=max(sums.reset))
        if found is None:
            tally.notes.append("nothing finished in the window")
        value = None if found is None else found[0]
        return _signal(grade(value, tally, reported=min(reported, expected), expected=expected))

    return RoleSignals(
        role=role,
        window_end_s=window_end_s,
        **{field: of(name) for field, name in ROLE_SIGNALS.items()},
        **{field: p95_of(latency) for field, latency in _LATENCIES.items()},
    )


def _front_door(sums: FrontDoorSums, *, window_end_s: float) -> FrontDoor:
    expected = len(sums.heard) + len(sums.missing)

    def of(value: float, reported: int) -> Measurement:
        return _signal(grade(value, Tally(reported), reported=reported, expected=expected))

    return FrontDoor(
        window_end_s=window_end_s,
        held=of(float(sum(sums.held)), len(sums.heard)),
        arrival_rps=of(sums.arrival_rps, sums.reported),
        arrival_prompt_tps=of(sums.arrival_prompt_tps, sums.reported),
        arrival_output_tps=of(sums.arrival_output_tps, sums.reported),
    )


def _signal(found: Graded) -> Measurement:
    return Measurement(found.value, _QUALITIES[found.quality], found.reported, found.expected, found.detail)
