"""The metrics collector's cores on virtual time: readings go in, the policy engine's signals come out.

Readings are processed, windows closed, roles summed and merged by the code that production runs; only pages, sockets
and the store are left out. The caller sets the times: one `scrape` every `interval_s` with the readings of all servers,
sleeping ones included, one `report` of the front door, and `signals` for the newest window.

A window ends at the newest scrape, or at a given time after it, and is as long as a live collector's. Sleeping servers
count as they do there, and a server counts for rates from its second reading after it woke.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from metrics_collector.core.demand import DemandBoard, DemandReport, forget, front_door_windows, report
from metrics_collector.core.liveness import judge_all
from metrics_collector.core.roles import ExpectedReplicas, replica_values, role_windows
from metrics_collector.core.schema import Reading
from metrics_collector.core.table import SeriesTable
from metrics_collector.core.targets import ROLES, Target
from metrics_collector.core.window import Window, window_length_s
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.domain.role_merge import merge
from trimtab.domain.role_signals import FrontDoor, RoleSignals, front_door, role_signals
from trimtab.domain.vocabulary import Role

_NAME = "virtual"
_SPARE_ROWS = 4

Observed = tuple[dict[MemberKey, RoleSignals], dict[str, FrontDoor]]
"""The newest window of roles, and of front doors by service; absent where nothing was observed."""


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
        self._expected: tuple[frozenset[tuple[MemberKey, str]], ExpectedReplicas] | None = None
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
        self._expected = None

    def remove(self, replica: str) -> None:
        """A server goes, with all that is known of it."""
        del self._targets[replica]
        self._table.remove(replica)
        self._expected = None

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
            found.service: front_door(merge([found]))
            for found in front_door_windows(self._demand, window, collector=_NAME, expiry_s=expiry_s)
            if found.service in services
        }
        return roles, fronts

    def _roles(self, window: Window, routable: Mapping[MemberKey, Collection[str]]) -> dict[MemberKey, RoleSignals]:
        expected_replicas = self._expected_of(routable)
        if not expected_replicas.keys:
            return {}
        windows = self._table.close(expected_replicas.target_ids, window)
        verdicts = judge_all(
            expected_replicas.target_ids,
            windows,
            {},
            limits_s=expected_replicas.limits_s(lambda _: self._stuck_after_s),
        )
        values = replica_values(expected_replicas, windows, verdicts, None)
        closed = role_windows(expected_replicas, windows, verdicts, values, collector=_NAME, replica_revisions={})
        by_member = {MemberKey(one.service, one.role): one for one in closed if one.role is not None}
        return {
            key: role_signals(key.role, merge([by_member[key]], expected=routable[key]))
            for key in sorted(routable)
            if key in by_member
        }

    def _expected_of(self, routable: Mapping[MemberKey, Collection[str]]) -> ExpectedReplicas:
        counted = frozenset((key, name) for key, names in routable.items() for name in names)
        if self._expected is None or self._expected[0] != counted:
            targets: list[Target] = []
            for name, (key, target) in self._targets.items():
                counts = (key, name) in counted
                targets.append(replace(target, counted=counts, routable_by_actuator=counts))
            self._expected = (counted, ExpectedReplicas.of(targets))
        return self._expected[1]
