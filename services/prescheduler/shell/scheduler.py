"""The cycle: read requests, ask the clusters, plan, write to each actuator, keep the results.

One cycle at a time, and only the leader's cycles write. Between two cycles the standing requests are read, and a
change starts the next cycle at once.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from prescheduler.core.groups import list_groups
from prescheduler.core.model import MissingCluster, Outcome, Plan, ServiceResult
from prescheduler.core.placement_backoff import Backoff, note_placements
from prescheduler.core.plan import plan_cycle
from prescheduler.core.result_choice import settle
from prescheduler.core.tree import build_tree
from prescheduler.shell import codec
from prescheduler.shell.clusters import Clusters, View
from prescheduler.shell.metrics import Metrics
from prescheduler.shell.records import Records, StandingRequests
from prescheduler.shell.settings import PreSchedulerSettings
from prescheduler.shell.writer import NotLeading, Writer
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.placement import GroupPlacement
from trimtab.domain.scaling import ScalingRequest
from trimtab.domain.time import timestamp_of
from trimtab.rpc.errors import FailedPrecondition, Unavailable
from trimtab.rpc.run import ServiceContext
from trimtab.store.clock import StoreClock
from trimtab.store.errors import FencedOff, StoreUnavailable
from trimtab.store.lease import Lease
from trimtab.store.record_hash import RefusedLog

log = structlog.get_logger(__name__)

RETRY_S = 1.0
"""The next cycle comes no later than this when a cluster had changed between look and write."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One cycle: what it found and what the clusters answered."""

    plan: Plan
    view: View
    cycle: scheduler_pb2.Cycle


class Scheduler:
    """Runs cycles on its own beat and on demand."""

    def __init__(
        self,
        settings: PreSchedulerSettings,
        *,
        clusters: Clusters,
        records: Records,
        lease: Lease,
        clock: StoreClock,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._clusters = clusters
        self._records = records
        self._lease = lease
        self._clock = clock
        self._metrics = metrics
        self._one_cycle = asyncio.Lock()
        self._seen: dict[str, frozenset[str]] = {}
        self._highest_tokens: dict[str, int] = {}
        self._loaded_for: int | None = None
        self._last_silent: frozenset[str] = frozenset()
        self._last_held: Mapping[str, str] = {}
        self._refused = RefusedLog()
        self._newest: View | None = None
        self._counter = 0
        self._writer = Writer(clusters, records, lease, clock, placement_ttl_s=settings.placement_ttl_s)
        self._backoffs: dict[str, Backoff] = {}

    # The beat

    async def run(self, context: ServiceContext) -> None:
        """Cycle until the service stops."""
        fingerprint: int | None = None
        next_at = 0.0
        while True:
            if self._lease.held:
                standing = await self._read_standing()
                due = time.monotonic() >= next_at
                if standing is not None and (due or standing.fingerprint != fingerprint):
                    started = time.monotonic()
                    if await self._standing_cycle(standing):
                        fingerprint = standing.fingerprint
                    wait_s = min(self._settings.cycle_s, RETRY_S) if self._writer.outdated else self._settings.cycle_s
                    next_at = started + wait_s
            else:
                fingerprint = None
            if await context.pause(min(self._settings.kick_poll_s, self._settings.cycle_s)):
                return

    async def _read_standing(self) -> StandingRequests | None:
        try:
            return await self._records.read_requests()
        except StoreUnavailable as error:
            self._failed("store", error)
            return None

    async def _standing_cycle(self, standing: StandingRequests) -> bool:
        """One cycle over the standing requests; False when it could not be finished."""
        try:
            async with self._one_cycle:
                await self._cycle(standing.requests, broken=standing.broken, tokens=standing.highest_tokens)
        except StoreUnavailable as error:
            self._failed("store", error)
        except (FencedOff, NotLeading) as error:
            self._failed("lease", error)
        else:
            return True
        return False

    def _failed(self, cause: str, error: Exception) -> None:
        self._metrics.failed_cycles.labels(cause).inc()
        log.warning("cycle not finished", cause=cause, error=str(error))

    # On demand

    async def schedule(self, requests: Sequence[ScalingRequest], *, validate_only: bool) -> scheduler_pb2.Cycle:
        """One cycle over ``requests`` alone.

        Raises ``FailedPrecondition`` when another process leads, ``Unavailable`` when the lease went meanwhile.
        """
        if validate_only:
            return (await self._plan(requests, broken={})).cycle
        if not self._lease.held:
            raise FailedPrecondition("NOT_LEADING", "another pre-scheduler leads; only validate_only is served here")
        try:
            async with self._one_cycle:
                return await self._cycle(requests, broken={}, tokens={}, standing=False)
        except NotLeading as error:
            raise Unavailable("LEASE_LOST", str(error)) from error

    async def view(self, *, max_age_s: float | None = None) -> View:
        """The clusters' inventories: of the newest cycle when that is recent enough, else read now."""
        limit_s = 2 * self._settings.cycle_s if max_age_s is None else max_age_s
        if self._newest is not None and self._clock.now_s() - self._newest.as_of_s <= limit_s:
            return self._newest
        return await self._look()

    @property
    def leading(self) -> bool:
        """Whether this process may write."""
        return self._lease.held

    # One cycle

    async def _look(self) -> View:
        view = await self._clusters.collect(as_of_s=self._clock.now_s())
        for inventory in view.inventories:
            self._seen[inventory.cluster] = frozenset(
                replica.service for replica in inventory.replicas if not replica.leaving
            )
        self._newest = view
        return view

    async def _plan(
        self,
        requests: Sequence[ScalingRequest],
        *,
        broken: Mapping[str, str],
        tokens: Mapping[str, int] | None = None,
    ) -> Report:
        started = time.monotonic()
        view = await self._look()
        held = self._records.held()
        waiting = [item for item in requests if item.service in held]
        requests = [item for item in requests if item.service not in held]
        for writer, token in (tokens or {}).items():
            self._highest_tokens[writer] = max(self._highest_tokens.get(writer, 0), token)
        missing = self._missing(view)
        now_s = self._clock.now_s()
        plan_started = time.monotonic()
        # A thread, since a large fleet takes a while and the lease has to be renewed meanwhile.
        plan = await asyncio.to_thread(
            plan_cycle,
            view.inventories,
            requests,
            now_s=now_s,
            missing=missing,
            highest_tokens=dict(self._highest_tokens),
            backoffs=self._backoffs,
        )
        self._metrics.plan_duration.observe(time.monotonic() - plan_started)
        results = [
            *plan.results,
            *(_held(item.service, item.decision_id, held[item.service]) for item in waiting),
            *(_held(name, "", f"the request does not parse: {broken[name]}") for name in sorted(broken)),
        ]
        plan = Plan(results=tuple(results))
        return Report(plan=plan, view=view, cycle=self._cycle_message(plan, view, started))

    async def _cycle(
        self,
        requests: Sequence[ScalingRequest],
        *,
        broken: Mapping[str, str],
        tokens: Mapping[str, int],
        standing: bool = True,
    ) -> scheduler_pb2.Cycle:
        """Plan, write, keep. Raises ``NotLeading``, ``FencedOff``, ``StoreUnavailable``."""
        started = time.monotonic()
        await self._load()
        report = await self._plan(requests, broken=broken, tokens=tokens)
        for group in (group for result in report.plan.results for group in result.groups if group.add):
            self._seen[group.cluster] |= {group.service}
        plan, accepted = await self._writer.apply(report.plan, report.view)
        if standing:
            self._backoffs = note_placements(
                self._backoffs, plan, now_s=self._clock.now_s(), first_wait_s=self._settings.retry_placement_s
            )
        self._metrics.count(plan)
        self._metrics.silent_clusters.set(len(report.view.silent))
        cycle = self._cycle_message(plan, report.view, started)
        await self._keep(
            plan, report.view, cycle, pending=[*accepted, *self._writer.unsettled_groups()], standing=standing
        )
        self._metrics.cycle_duration.observe(time.monotonic() - started)
        return cycle

    async def _load(self) -> None:
        """At the start of a term, read what earlier leaders wrote; later, what could not be read then."""
        token = self._writer.token()
        if self._loaded_for != token:
            await self._records.load()
            self._loaded_for = token
        else:
            await self._records.look_again()
        refused = self._records.refused()
        self._refused.show(refused)
        self._metrics.show_refused(refused)

    def _missing(self, view: View) -> tuple[MissingCluster, ...]:
        stored = self._records.services_by_cluster() if view.silent else {}
        found = []
        for cluster, error in sorted(view.silent.items()):
            services = self._seen.get(cluster, stored.get(cluster))
            found.append(
                MissingCluster(
                    cluster=cluster, error=error, services=services or frozenset(), known=services is not None
                )
            )
        return (*found, *self._writer.unsettled())

    async def _keep(
        self,
        plan: Plan,
        view: View,
        cycle: scheduler_pb2.Cycle,
        *,
        pending: Sequence[GroupPlacement],
        standing: bool,
    ) -> None:
        before = self._records.results
        settled = {item.service: settle(before.get(item.service), item) for item in plan.results}
        changed = any(
            before.get(service) != result and not self._records.refused_result(service)
            for service, result in settled.items()
        )
        acted = any(item.groups for item in plan.results)
        silent, held = frozenset(view.silent), self._records.held()
        noteworthy = changed or acted or silent != self._last_silent or held != self._last_held
        reachable = [item.cluster for item in view.inventories]
        groups = await asyncio.to_thread(lambda: list_groups(build_tree(view.inventories), view.inventories))
        await self._records.write_cycle(
            self._writer.token(),
            results=settled if standing else {},
            standing=[item.service for item in plan.results] if standing else None,
            groups=groups,
            reachable=reachable,
            pending=pending,
            cycle=cycle if noteworthy else None,
        )
        self._last_silent, self._last_held = silent, held
        if noteworthy:
            log.info("cycle", cycle=cycle.cycle_id, outcomes=_counts(plan), silent=sorted(silent))

    def _cycle_message(self, plan: Plan, view: View, started: float) -> scheduler_pb2.Cycle:
        self._counter += 1
        now_s = self._clock.now_s()
        return scheduler_pb2.Cycle(
            cycle_id=f"c-{round(now_s * 1000):x}-{self._counter}",
            cycle_time=timestamp_of(now_s),
            results=[codec.result_to_wire(item) for item in plan.results],
            unreachable_clusters=[
                scheduler_pb2.UnreachableCluster(cluster=name, error=view.silent[name]) for name in sorted(view.silent)
            ],
            inventory_revisions={item.cluster: item.inventory_revision for item in view.inventories},
            duration_s=time.monotonic() - started,
        )


def _held(service: str, decision_id: str, detail: str) -> ServiceResult:
    return ServiceResult(service=service, decision_id=decision_id, outcome=Outcome.HELD, detail=detail)


def _counts(plan: Plan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in plan.results:
        counts[item.outcome.name.lower()] = counts.get(item.outcome.name.lower(), 0) + 1
    return dict(sorted(counts.items()))
