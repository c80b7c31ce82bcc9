"""``trimtab.collector.v1.CollectorService``: requests are parsed here, answers come from the core and the store."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from metrics_collector.core.demand import DemandReport, report
from metrics_collector.core.role_load import ReplicaLoads, ReplicaReport
from metrics_collector.core.samples import expand
from metrics_collector.core.sharing import owner
from metrics_collector.core.status import TargetStatus, describe_target
from metrics_collector.core.targets import RoleKey, Target
from metrics_collector.shell.archive import Archive, role_name
from metrics_collector.shell.publisher import Publisher
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.time import seconds_of
from trimtab.rpc.errors import NotFound
from trimtab.rpc.validate import Violations
from trimtab.rpc.watch import WatchHub

SERVICE_NAME = "trimtab.collector.v1.CollectorService"

_DEFAULT_PAGE_SIZE = 500
_MAX_PAGE_SIZE = 1000
_MAX_KEYS = 1000
_DEFAULT_HISTORY = 500
_MAX_HISTORY = 5000
_MAX_DEMANDS = 10_000
# Services that gateways may report at once: each costs a window every interval.
_MAX_SERVICES = 2000
_MAX_REPLICAS = 10_000
_MAX_REPLICA_NAME = 512
_MAX_MISSED = 5000
"""A reader that comes back gets a snapshot in place of more than so many windows."""
# Shorter ones drown in the rounding of clocks.
_MIN_REPORT_INTERVAL_S = 0.001
_MAX_REPORT_INTERVAL_S = 60.0
_MAX_COUNT = 10**12
_MAX_STEP_S = 86_400.0
_END_OF_TIME_S = 253_402_300_799.0

_Context = Any  # grpc.aio.ServicerContext, whose two type parameters differ by method.


class CollectorServicer(collector_pb2_grpc.CollectorServiceServicer):
    """The service's methods. Raises ``trimtab.rpc.errors``; a store that is away becomes UNAVAILABLE.

    ``targets`` are those of all sources, ``statuses`` holds those that are scraped here; ``sharers`` names the
    collectors that share the targets.
    """

    def __init__(
        self,
        archive: Archive,
        publisher: Publisher,
        hub: WatchHub[pb.WatchObservationsResponse],
        *,
        targets: Callable[[], Mapping[str, Target]],
        statuses: Callable[[], Mapping[str, TargetStatus]],
        now_s: Callable[[], float],
        keep_s: float,
        loads: ReplicaLoads | None = None,
        sharers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._archive = archive
        self._publisher = publisher
        self._hub = hub
        self._targets = targets
        self._statuses = statuses
        self._now_s = now_s
        self._keep_s = keep_s
        self._loads = loads
        self._sharers = sharers

    async def ListTargets(self, request: pb.ListTargetsRequest, context: _Context) -> pb.ListTargetsResponse:
        """Targets by id; the token is the last id of the page before, so that targets may come and go meanwhile."""
        violations = Violations()
        if request.service:
            violations.identifier("service", request.service)
        violations.require("page_size", request.page_size <= _MAX_PAGE_SIZE, f"may be at most {_MAX_PAGE_SIZE}")
        violations.bounded_string("page_token", request.page_token, max_length=512, required=False)
        violations.raise_if_any()
        rows = [
            (target_id, target)
            for target_id, target in sorted(self._targets().items())
            if target_id > request.page_token and request.service in ("", target.service)
        ]
        page = rows[: request.page_size or _DEFAULT_PAGE_SIZE]
        return pb.ListTargetsResponse(
            targets=await self._describe([target for _, target in page]),
            next_page_token=page[-1][0] if len(rows) > len(page) else "",
        )

    async def _describe(self, targets: Sequence[Target]) -> list[pb.Target]:
        """Of a target that another collector scrapes, its newest sample in the store says how it stands."""
        statuses, sharers = self._statuses(), self._sharers()
        elsewhere = {one.key for one in targets if one.target_id not in statuses and one.placed}
        samples = {key: await self._archive.samples(key) for key in sorted(elsewhere, key=lambda key: key.service)}
        rows: list[pb.Target] = []
        for target in targets:
            status = statuses.get(target.target_id)
            row = describe_target(target, status if status is not None else TargetStatus())
            row.node = target.node
            row.gpu_indices[:] = target.gpu_indices
            row.exporter = target.exporter
            if sharers:
                row.collector = owner(target.target_id, sharers)
            sample = samples.get(target.key, {}).get(target.replica) if status is None else None
            if sample is not None:
                row.state = sample.state
                row.last_success_time.CopyFrom(sample.sample_time)
            rows.append(row)
        return rows

    async def GetObservation(self, request: pb.GetObservationRequest, context: _Context) -> pb.GetObservationResponse:
        """NOT_FOUND with reason ROLE_NOT_OBSERVED when no collector has written about the role."""
        violations = Violations()
        key = _role_key(violations, "key", request.key)
        violations.raise_if_any()
        (observation,) = await self._archive.latest([key])
        if observation is None:
            raise _not_observed(key)
        return pb.GetObservationResponse(observation=observation)

    async def BatchGetObservations(
        self, request: pb.BatchGetObservationsRequest, context: _Context
    ) -> pb.BatchGetObservationsResponse:
        """In the order of the keys; by service and role when none are given."""
        wanted = _role_keys(request.keys)
        observations = await self._archive.latest(wanted or await self._archive.roles())
        response = pb.BatchGetObservationsResponse(observations=[item for item in observations if item is not None])
        if wanted:
            response.missing.extend(
                pb.RoleKey(service=key.service, role=key.role)
                for key, item in zip(wanted, observations, strict=True)
                if item is None
            )
        return response

    async def GetServiceObservation(
        self, request: pb.GetServiceObservationRequest, context: _Context
    ) -> pb.GetServiceObservationResponse:
        """NOT_FOUND with reason SERVICE_NOT_OBSERVED when no collector has written about any role of it."""
        violations = Violations()
        violations.identifier("service", request.service)
        violations.raise_if_any()
        found = await self._archive.service(request.service)
        if found is None:
            raise NotFound(
                "SERVICE_NOT_OBSERVED",
                f"no role of service {request.service!r} was ever observed; ListTargets shows what is scraped",
                {"service": request.service},
            )
        return found

    async def ListReplicaSamples(
        self, request: pb.ListReplicaSamplesRequest, context: _Context
    ) -> pb.ListReplicaSamplesResponse:
        """By name; the token is the last name of the page before."""
        violations = Violations()
        key = _role_key(violations, "key", request.key)
        violations.require("key.role", key.role != types_pb2.ROLE_UNSPECIFIED, "a front door has no replicas")
        violations.require("page_size", request.page_size <= _MAX_PAGE_SIZE, f"may be at most {_MAX_PAGE_SIZE}")
        violations.bounded_string("page_token", request.page_token, max_length=_MAX_REPLICA_NAME, required=False)
        violations.raise_if_any()
        names = [(name, data) for name, data in (await self._archive.samples(key)).items() if name > request.page_token]
        page = names[: request.page_size or _DEFAULT_PAGE_SIZE]
        return pb.ListReplicaSamplesResponse(
            samples=[expand(data) for _, data in page],
            next_page_token=page[-1][0] if len(names) > len(page) else "",
        )

    async def QueryHistory(self, request: pb.QueryHistoryRequest, context: _Context) -> pb.QueryHistoryResponse:
        """Windows that ended in [start_time, end_time); without an end until now, without a start from the first.

        With a step, of each step the last window alone.
        """
        violations = Violations()
        key = _role_key(violations, "key", request.key)
        start_s = _seconds(violations, "start_time", request.start_time) if request.HasField("start_time") else 0.0
        end_s = (
            _seconds(violations, "end_time", request.end_time)
            if request.HasField("end_time")
            else self._now_s() + self._keep_s
        )
        violations.require("end_time", end_s > start_s or not request.HasField("end_time"), "must be after start_time")
        violations.require("max_results", request.max_results <= _MAX_HISTORY, f"may be at most {_MAX_HISTORY}")
        violations.finite_number("step_s", request.step_s, minimum=0, maximum=_MAX_STEP_S)
        violations.raise_if_any()
        observations = await self._archive.history(
            key,
            start_s=start_s,
            end_s=end_s,
            max_results=request.max_results or _DEFAULT_HISTORY,
            step_s=request.step_s,
        )
        if not observations and (await self._archive.latest([key]))[0] is None:
            raise _not_observed(key)
        return pb.QueryHistoryResponse(observations=observations)

    async def WatchObservations(
        self, request: pb.WatchObservationsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchObservationsResponse]:
        """The snapshot holds what is known of the roles asked for; later ones of them come as they appear.

        A reader that comes back with a revision gets what ended since, from the history, and then goes on.
        """
        wanted = frozenset(_role_keys(request.keys))

        def snapshot() -> list[pb.WatchObservationsResponse]:
            known = self._publisher.observations
            found = [known[key] for key in known if not wanted or key in wanted]
            revision = self._publisher.revision
            return [
                pb.WatchObservationsResponse(
                    snapshot=pb.ObservationSnapshot(observations=found, revision=revision), revision=revision
                )
            ]

        def keep(message: pb.WatchObservationsResponse) -> bool:
            return not wanted or RoleKey(service=message.observation.service, role=message.observation.role) in wanted

        if not request.since_revision:
            async for message in self._hub.watch(snapshot=snapshot, keep=keep):
                yield message
            return
        told: dict[RoleKey, int] = {}
        begun = False
        # After the first message every change is queued, so windows of the history come before them.
        async for message in self._hub.watch(snapshot=lambda: [pb.WatchObservationsResponse()], keep=keep):
            if not begun:
                begun = True
                for missed in await self._missed(request.since_revision, wanted) or snapshot():
                    if missed.HasField("observation"):
                        told[_key_of(missed.observation)] = missed.revision
                    yield missed
            elif not message.HasField("observation") or told.get(_key_of(message.observation), 0) < message.revision:
                yield message

    async def _missed(self, since: int, wanted: Iterable[RoleKey]) -> list[pb.WatchObservationsResponse]:
        """The windows that ended at ``since`` or later, oldest first; none where they are too many or not kept."""
        since_s = since / 1000
        now_s = self._now_s()
        if not now_s - self._archive.history_retention_s < since_s <= now_s + self._keep_s:
            return []
        found: list[pb.RoleObservation] = []
        for key in sorted(wanted or await self._archive.roles(), key=lambda key: (key.service, key.role)):
            found += await self._archive.history(
                key, start_s=since_s, end_s=now_s + self._keep_s, max_results=_MAX_MISSED + 1
            )
            if len(found) > _MAX_MISSED:
                return []
        messages = [observed(item) for item in found]
        return sorted(messages, key=lambda message: message.revision)

    async def ReportDemand(self, request: pb.ReportDemandRequest, context: _Context) -> pb.ReportDemandResponse:
        """Counts are added to the windows that the reported interval lies in; what is held replaces what was."""
        violations = Violations()
        violations.identifier("gateway", request.gateway)
        violations.require("demands", len(request.demands) <= _MAX_DEMANDS, f"may have at most {_MAX_DEMANDS}")
        demands: dict[str, DemandReport] = {}
        now_s = self._now_s()
        for index, demand in enumerate(request.demands[:_MAX_DEMANDS]):
            with violations.below(f"demands[{index}]"):
                violations.identifier("service", demand.service)
                violations.require("service", demand.service not in demands, "is reported twice")
                violations.finite_number(
                    "interval_s", demand.interval_s, minimum=_MIN_REPORT_INTERVAL_S, maximum=_MAX_REPORT_INTERVAL_S
                )
                for name in ("arrivals", "prompt_tokens", "requested_output_tokens", "held"):
                    violations.require(name, getattr(demand, name) <= _MAX_COUNT, f"may be at most {_MAX_COUNT}")
            demands[demand.service] = DemandReport(
                at_s=now_s,
                interval_s=demand.interval_s,
                arrivals=demand.arrivals,
                prompt_tokens=demand.prompt_tokens,
                requested_output_tokens=demand.requested_output_tokens,
                held=demand.held,
            )
        replicas = _replica_reports(violations, request.replicas)
        spoken_of = len(self._publisher.demand.services.keys() | demands.keys())
        violations.require(
            "demands", spoken_of <= _MAX_SERVICES, f"gateways may speak of at most {_MAX_SERVICES} services"
        )
        violations.raise_if_any()
        self._publisher.demand = report(self._publisher.demand, request.gateway, demands, keep_s=self._keep_s)
        if self._loads is not None:
            self._loads.report(request.gateway, replicas, at_s=now_s)
        return pb.ReportDemandResponse()


def observed(observation: pb.RoleObservation) -> pb.WatchObservationsResponse:
    """The event of a new window."""
    return pb.WatchObservationsResponse(observation=observation, revision=observation.window_end.ToMilliseconds())


def bookmark(revision: int) -> pb.WatchObservationsResponse:
    """The event that shows that the stream is alive."""
    return pb.WatchObservationsResponse(bookmark=pb.Bookmark(revision=revision), revision=revision)


def _key_of(observation: pb.RoleObservation) -> RoleKey:
    return RoleKey(service=observation.service, role=observation.role)


def _replica_reports(violations: Violations, replicas: Sequence[pb.ReplicaDemand]) -> dict[str, ReplicaReport]:
    violations.require("replicas", len(replicas) <= _MAX_REPLICAS, f"may have at most {_MAX_REPLICAS}")
    found: dict[str, ReplicaReport] = {}
    for index, item in enumerate(replicas[:_MAX_REPLICAS]):
        # Ten thousand a second are fine, and are not to be looked at one field after the other.
        fine = 0 < len(item.replica) <= _MAX_REPLICA_NAME and item.replica not in found
        if not (fine and item.in_flight <= _MAX_COUNT and item.answered <= _MAX_COUNT):
            with violations.below(f"replicas[{index}]"):
                violations.bounded_string("replica", item.replica, max_length=_MAX_REPLICA_NAME)
                violations.require("replica", item.replica not in found, "is reported twice")
                for name in ("in_flight", "answered"):
                    violations.require(name, getattr(item, name) <= _MAX_COUNT, f"may be at most {_MAX_COUNT}")
        found[item.replica] = ReplicaReport(item.in_flight, item.answered)
    return found


def _role_key(violations: Violations, field: str, key: pb.RoleKey) -> RoleKey:
    with violations.below(field):
        violations.identifier("service", key.service)
        # Role 0 is the front door; anything else must be a role that is known here.
        violations.require("role", key.role in types_pb2.Role.values(), f"{key.role} is not a known role")
    return RoleKey(service=key.service, role=key.role)


def _role_keys(keys: Iterable[pb.RoleKey]) -> list[RoleKey]:
    """Parsed and without duplicates. Raises ``InvalidRequest``."""
    given = list(keys)
    violations = Violations()
    violations.require("keys", len(given) <= _MAX_KEYS, f"may be at most {_MAX_KEYS}")
    wanted = [_role_key(violations, f"keys[{index}]", key) for index, key in enumerate(given[:_MAX_KEYS])]
    violations.raise_if_any()
    return list(dict.fromkeys(wanted))


def _seconds(violations: Violations, field: str, timestamp: Timestamp) -> float:
    seconds = seconds_of(timestamp)
    violations.finite_number(field, seconds, minimum=0, maximum=_END_OF_TIME_S)
    return seconds


def _not_observed(key: RoleKey) -> NotFound:
    what = "the front door" if key.role == types_pb2.ROLE_UNSPECIFIED else role_name(key)
    return NotFound(
        "ROLE_NOT_OBSERVED",
        f"{what} of service {key.service!r} was never observed; ListTargets shows what is scraped",
        {"service": key.service, "role": role_name(key)},
    )
