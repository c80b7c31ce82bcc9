"""One chaos run against a stack that is up: load, faults and checks side by side, then the verdict.

The stack has to be laid out already, and its gateway has to reach the actuator through the fault proxy.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import grpc

from lab.chaos.access import Access
from lab.chaos.fault_proxy import FaultProxy
from lab.chaos.inject import Injector
from lab.chaos.load import BASE_FLOOR, SERVICES, FloorChange, chaos_load, floor_changes
from lab.chaos.losses import judge, read_failures
from lab.chaos.plan import plan_faults
from lab.chaos.report import ChaosReport
from lab.chaos.rules import tokens_that_fell, undecided
from lab.chaos.watch import Watch
from simulator.replay.client import OnProgress, ReplayOptions, replay
from simulator.replay.report import Outcome
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2

ID_PREFIX = "chaos-"
SETTLE_TIMEOUT_S = 150.0
_POLL_S = 0.5
_PAGE = 500
_ERRORS = (grpc.aio.AioRpcError, aiohttp.ClientError, TimeoutError, OSError)
_UNFINISHED = (
    actuator_pb2.OPERATION_STATE_PENDING,
    actuator_pb2.OPERATION_STATE_RUNNING,
    actuator_pb2.OPERATION_STATE_ROLLING_BACK,
)
_REISSUES = re.compile(
    r'^trimtab_gateway_reissues_total\{cause="([a-z_]+)",service="[^"]*"\} ([0-9.e+]+)$', re.MULTILINE
)

SetFloors = Callable[[Mapping[str, int]], Awaitable[None]]
"""Apply the policies with these floors, again until the engine has taken them."""


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """How a run goes."""

    duration_s: float
    seed: int
    drain_s: float = 90.0
    """How long answers may take after the load has ended."""


async def run_chaos(
    access: Access,
    fault_proxy: FaultProxy,
    options: ChaosOptions,
    *,
    set_floors: SetFloors,
    restarts: Callable[[], Mapping[str, int]],
    on_progress: OnProgress | None = None,
    stopping: asyncio.Event | None = None,
) -> ChaosReport:
    """Trouble the stack for `duration_s` and count. What is under way at the end is waited for."""
    watch = Watch(access, fault_proxy, dict.fromkeys(SERVICES, BASE_FLOOR))
    injector = Injector(access, fault_proxy, watch, service=SERVICES[0])
    before = await _server_counts(access)
    watching = asyncio.create_task(watch.run())
    floors = asyncio.create_task(_move_floors(floor_changes(duration_s=options.duration_s), set_floors))
    faults = asyncio.create_task(injector.run(plan_faults(duration_s=options.duration_s, seed=options.seed)))
    try:
        await watch.listed.wait()
        names = set(watch.replicas)
        replayed = await replay(
            chaos_load(duration_s=options.duration_s, seed=options.seed),
            ReplayOptions(
                url=access.gateway_url, seed=options.seed, id_prefix=ID_PREFIX, finish_timeout_s=options.drain_s
            ),
            duration_s=options.duration_s,
            on_progress=on_progress,
            stopping=stopping,
        )
        if not replayed.stopped:
            await faults
            await injector.settled()
        unsettled = await _settle(watch)
        load_average = os.getloadavg()
    finally:
        for task in (floors, faults, watching):
            task.cancel()
        await asyncio.gather(floors, faults, watching, return_exceptions=True)
        await injector.stop()
    await watch.list_operations()
    after = await _server_counts(access)
    decisions = await _decisions(access)
    operations = list(watch.operations.values())
    failures = read_failures(access.gateway_log.read_text(errors="replace").splitlines())
    gone, new = sorted(names - set(watch.replicas)), sorted(watch.names - names)
    return ChaosReport(
        duration_s=options.duration_s,
        seed=options.seed,
        servers=len(names),
        requests_sent=len(replayed.records),
        requests_complete=sum(record.outcome is Outcome.OK for record in replayed.records),
        losses=judge(replayed.records, failures, injector.troubles, id_prefix=ID_PREFIX),
        reissues=await _reissues(access),
        aborted_by_sleep=after["aborted_by_sleep"] - before["aborted_by_sleep"],
        misrouted=after["requests_received_while_asleep"] - before["requests_received_while_asleep"],
        breaches=watch.breaches,
        looks=watch.looks,
        operations=operations,
        undecided=undecided(operations, decisions),
        fallen_tokens=tokens_that_fell(decisions),
        replica_changes=[f"{name} is gone" for name in gone] + [f"{name} is new" for name in new],
        unsettled=unsettled,
        injected=injector.injected,
        skipped=injector.skipped,
        process_restarts=restarts(),
        load_average=[round(one, 2) for one in load_average],
    )


async def _move_floors(changes: Sequence[FloorChange], set_floors: SetFloors) -> None:
    start_s = time.monotonic()
    for change in changes:
        await asyncio.sleep(max(0.0, start_s + change.at_s - time.monotonic()))
        await set_floors(change.floors)


async def _settle(watch: Watch) -> list[str]:
    """Wait until no operation is under way and every replica is in order; return what is not by the end."""
    give_up_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        with suppress(*_ERRORS):
            await watch.list_operations()
        missing = [
            f"{operation.operation_id} of {operation.subject} is under way"
            for operation in watch.operations.values()
            if operation.state in _UNFINISHED
        ]
        missing += [f"{name} is not in order" for name, seen in sorted(watch.replicas.items()) if not seen.settled]
        if not missing or time.monotonic() > give_up_s:
            return missing
        await asyncio.sleep(_POLL_S)


async def _server_counts(access: Access) -> dict[str, int]:
    """Counters over every simulated server that ever lived."""
    services = (await access.fleet("/stats"))["services"].values()
    names = ("aborted_by_sleep", "requests_received_while_asleep")
    return {name: sum(int(service[name]) for service in services) for name in names}


async def _reissues(access: Access) -> dict[str, int]:
    """Cause → requests that the gateway sent a second time."""
    async with access.http.get(access.gateway_url + "/metrics") as reply:
        page = await reply.text()
    found: dict[str, int] = {}
    for cause, count in _REISSUES.findall(page):
        found[cause] = found.get(cause, 0) + round(float(count))
    return found


async def _decisions(access: Access) -> list[decision_pb2.Decision]:
    found: list[decision_pb2.Decision] = []
    token = ""
    while True:
        request = policy_pb2.ListDecisionsRequest(page_size=_PAGE, page_token=token)
        page = await access.stubs.policy.ListDecisions(request, timeout=5.0)
        found += page.decisions
        token = page.next_page_token
        if not token:
            return found
