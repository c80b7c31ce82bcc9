"""The gRPC face: Schedule, GetTopology, ListDeploymentGroups, WatchCycles."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from prescheduler.core.domains import list_domains
from prescheduler.core.groups import list_groups
from prescheduler.core.tree import build_tree
from prescheduler.shell import codec
from prescheduler.shell.parse import parse_schedule
from prescheduler.shell.records import Records
from prescheduler.shell.scheduler import Scheduler
from trimtab.api.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from trimtab.domain.scaling import ScalingRequest
from trimtab.domain.time import timestamp_of
from trimtab.rpc.errors import AlreadyExists, FailedPrecondition
from trimtab.rpc.validate import Violations
from trimtab.rpc.watch import WatchHub
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import Lease
from trimtab.store.records import Refused
from trimtab.tasks import to_its_end

SERVICE_NAME = "trimtab.scheduler.v1.PreSchedulerService"
MAX_PAGE_SIZE = 1000
_Context = Any


class PreSchedulerServicer(scheduler_pb2_grpc.PreSchedulerServiceServicer):
    """Parses, asks the scheduler, answers. Reads are served by every process, writes by the leader."""

    def __init__(
        self, scheduler: Scheduler, records: Records, lease: Lease, hub: "WatchHub[scheduler_pb2.WatchCyclesResponse]"
    ) -> None:
        self._scheduler = scheduler
        self._records = records
        self._lease = lease
        self._hub = hub
        self._answering = asyncio.Lock()

    async def Schedule(
        self, request: scheduler_pb2.ScheduleRequest, _context: _Context
    ) -> scheduler_pb2.ScheduleResponse:
        """Place requests on a fresh tree; a request id that was answered before gets the first answer again."""
        requests = parse_schedule(request)
        if request.validate_only:
            cycle = await self._scheduler.schedule(requests, validate_only=True)
            return scheduler_pb2.ScheduleResponse(cycle=cycle)
        if not request.request_id:
            cycle = await to_its_end(self._scheduler.schedule(requests, validate_only=False))
            return scheduler_pb2.ScheduleResponse(cycle=cycle)
        return await to_its_end(self._schedule_once(request, requests))

    async def _schedule_once(
        self, request: scheduler_pb2.ScheduleRequest, requests: Sequence[ScalingRequest]
    ) -> scheduler_pb2.ScheduleResponse:
        """One such call at a time: a retry that overtakes its first attempt gets that one's answer too."""
        async with self._answering:
            return await self._answer(request, requests)

    async def _answer(
        self, request: scheduler_pb2.ScheduleRequest, requests: Sequence[ScalingRequest]
    ) -> scheduler_pb2.ScheduleResponse:
        digest = hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()
        try:
            known = await self._records.read_answer(request.request_id)
        except CorruptEntry as error:
            raise FailedPrecondition("RECORD_REFUSED", str(error)) from error
        if known is not None:
            if known[0] != digest:
                raise AlreadyExists("REQUEST_ID_REUSED", f"request_id {request.request_id!r} came with another call")
            return known[1]
        cycle = await self._scheduler.schedule(requests, validate_only=False)
        answer = scheduler_pb2.ScheduleResponse(cycle=cycle)
        token = self._lease.token
        if token is not None:
            await self._records.write_answer(token, request.request_id, digest, answer)
        return answer

    async def GetTopology(
        self, request: scheduler_pb2.GetTopologyRequest, _context: _Context
    ) -> scheduler_pb2.GetTopologyResponse:
        """The tree of the newest cycle; built now when there is no recent one."""
        violations = Violations()
        violations.bounded_string("cluster", request.cluster, max_length=253, required=False)
        violations.raise_if_any()
        view = await self._scheduler.view()
        rows = list_domains(build_tree(view.inventories), request.cluster)
        return scheduler_pb2.GetTopologyResponse(
            domains=[codec.domain_to_wire(row) for row in rows],
            as_of=timestamp_of(view.as_of_s),
            unreachable_clusters=[
                scheduler_pb2.UnreachableCluster(cluster=name, error=view.silent[name])
                for name in sorted(view.silent)
                if request.cluster in ("", name)
            ],
        )

    async def ListDeploymentGroups(
        self, request: scheduler_pb2.ListDeploymentGroupsRequest, _context: _Context
    ) -> scheduler_pb2.ListDeploymentGroupsResponse:
        """Groups in order of service, name and cluster. The page token is the last one's key."""
        violations = Violations()
        violations.bounded_string("service", request.service, max_length=63, required=False)
        violations.bounded_string("page_token", request.page_token, max_length=512, required=False)
        violations.require("page_size", request.page_size <= MAX_PAGE_SIZE, f"is more than {MAX_PAGE_SIZE}")
        violations.raise_if_any()
        view = await self._scheduler.view()
        groups = [
            codec.deployment_group_to_wire(group)
            for group in list_groups(build_tree(view.inventories), view.inventories)
            if request.service in ("", group.service)
        ]
        groups = [group for group in groups if not request.page_token or _page_key(group) > request.page_token]
        size = request.page_size or MAX_PAGE_SIZE
        page = groups[:size]
        return scheduler_pb2.ListDeploymentGroupsResponse(
            groups=page, next_page_token=_page_key(page[-1]) if len(groups) > size else ""
        )

    async def WatchCycles(
        self, _request: scheduler_pb2.WatchCyclesRequest, _context: _Context
    ) -> AsyncIterator[scheduler_pb2.WatchCyclesResponse]:
        """The newest cycle that is kept, then every one that did something."""
        newest = [
            scheduler_pb2.WatchCyclesResponse(cycle=cycle)
            for _, cycle in await self._records.cycles.read_last(1)
            if not isinstance(cycle, Refused)
        ]
        # The stream of cycles is read at intervals: it may bring the newest one once more.
        shown = {message.cycle.cycle_id for message in newest}
        stream = self._hub.watch(snapshot=lambda: newest, keep=lambda message: message.cycle.cycle_id not in shown)
        async for message in stream:
            yield message


def _page_key(group: scheduler_pb2.DeploymentGroup) -> str:
    # The separator sorts before every character of a name, so that keys sort as (service, group, cluster) do.
    return " ".join((group.service, group.group, group.cluster))
