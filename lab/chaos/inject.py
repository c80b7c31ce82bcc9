"""Carries the planned faults out, and measures how long each takes to be made good.

The time to recover is, for a server fault, from its end (healed; for a kill, from the kill) until the actuator lists
the replica as serving or asleep; for a killed process, from the kill until its successor does its work on what is new:
an actuator that lists, an engine that leads, windows that end after the kill. Late acknowledgements and a suspended
gateway recover when the gateway has acknowledged again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import grpc
import structlog

from lab.chaos.access import Access
from lab.chaos.fault_proxy import FaultProxy
from lab.chaos.losses import Trouble
from lab.chaos.plan import SERVER_FAULTS, VICTIMS, FaultKind, PlannedFault, choose
from lab.chaos.watch import Watch
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.domain.time import seconds_of

log = structlog.get_logger(__name__)

RECOVERY_LIMIT_S = 120.0
_POLL_S = 0.1
_CALL_S = 1.0
_MOVING = (types_pb2.LIFE_CYCLE_DRAINING, types_pb2.LIFE_CYCLE_REACTIVATING)
_AWAKE = (types_pb2.LIFE_CYCLE_ACTIVE, *_MOVING)
_ERRORS = (grpc.aio.AioRpcError, aiohttp.ClientError, TimeoutError, OSError)


@dataclass(slots=True)
class Injected:
    """A fault that was carried out. `recovery_s` is None when it had not been made good within `RECOVERY_LIMIT_S`."""

    at_s: float
    kind: FaultKind
    victim: str
    recovery_s: float | None = None


class Injector:
    """Runs a plan; `injected` and `troubles` list what was done, `skipped` what found no victim."""

    def __init__(self, access: Access, fault_proxy: FaultProxy, watch: Watch, *, service: str) -> None:
        """`service` is one whose windows show that the collector works."""
        self._access = access
        self._fault_proxy = fault_proxy
        self._watch = watch
        self._service = service
        self._followed: set[asyncio.Task[None]] = set()
        self.injected: list[Injected] = []
        self.troubles: list[Trouble] = []
        self.skipped: list[PlannedFault] = []

    async def run(self, faults: Sequence[PlannedFault]) -> None:
        """Inject every fault at its time from now on; returns after the last one."""
        start_s = time.monotonic()
        for fault in faults:
            await asyncio.sleep(max(0.0, start_s + fault.at_s - time.monotonic()))
            try:
                victim = await self._inject(fault, fault.at_s)
            except _ERRORS as error:
                log.warning("a fault could not be injected", kind=fault.kind.value, error=str(error))
                victim = None
            if victim is None:
                self.skipped.append(fault)

    async def settled(self) -> None:
        """Waits until every fault is over and made good, or given up."""
        while self._followed:
            await asyncio.wait(self._followed)

    async def stop(self) -> None:
        """Ends everything that was begun; a gateway that is suspended goes on."""
        for task in list(self._followed):
            task.cancel()
        await asyncio.gather(*self._followed, return_exceptions=True)

    async def _inject(self, fault: PlannedFault, at_s: float) -> str | None:
        if fault.kind.of_server:
            return await self._trouble_server(fault, at_s)
        if fault.kind in VICTIMS:
            return self._kill(fault, at_s)
        done = Injected(at_s, fault.kind, "gateway")
        if fault.kind is FaultKind.ACKNOWLEDGEMENT_DELAYED:
            self._follow(self._delay_acknowledgements(fault, done))
        else:
            pid = self._access.processes.pid("gateway")
            if pid is None:
                return None
            self._follow(self._suspend(pid, fault, done))
        self.injected.append(done)
        return done.victim

    def _follow(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)

    # Servers

    async def _trouble_server(self, fault: PlannedFault, at_s: float) -> str | None:
        victim = choose(self._candidates(fault.kind), self._moving(), fault.draw)
        if victim is None or not await self._access.trouble(victim, SERVER_FAULTS[fault.kind], fault.length_s):
            return None
        trouble = Trouble(victim, fault.kind.value, time.time())
        self.troubles.append(trouble)
        done = Injected(at_s, fault.kind, victim)
        self.injected.append(done)
        self._follow(self._follow_server(fault, trouble, done))
        return victim

    def _candidates(self, kind: FaultKind) -> list[str]:
        """Servers without a fault: awake ones, since faults of sleepers show little; asleep ones to refuse a wake."""
        held = {trouble.replica for trouble in self.troubles if trouble.until_s is None}
        wanted = (types_pb2.LIFE_CYCLE_SLEEPING,) if kind is FaultKind.WAKE_REFUSED else _AWAKE
        return [
            name
            for name, seen in sorted(self._watch.replicas.items())
            if name not in held and seen.life_cycle in wanted
        ]

    def _moving(self) -> list[str]:
        return [name for name, seen in sorted(self._watch.replicas.items()) if seen.life_cycle in _MOVING]

    async def _follow_server(self, fault: PlannedFault, trouble: Trouble, done: Injected) -> None:
        since_s = time.monotonic()
        if fault.kind is FaultKind.SERVER_KILLED:
            await self._until(lambda: self._runs(done.victim), since_s)
        else:
            await asyncio.sleep(fault.length_s)
            since_s = time.monotonic()
        position = self.troubles.index(trouble)
        self.troubles[position] = Trouble(trouble.replica, trouble.kind, trouble.since_s, time.time())
        listed = self._watch.looks["list"]
        done.recovery_s = await self._until(lambda: self._in_order(done.victim, listed), since_s)

    async def _runs(self, replica: str) -> bool:
        page = await self._access.fleet(f"/replicas/{replica}")
        return bool(page["state"] == "running")

    async def _in_order(self, replica: str, listed: int) -> bool:
        """Settled in a list that was made after the fault's end."""
        seen = self._watch.replicas.get(replica)
        return self._watch.looks["list"] > listed + 1 and seen is not None and seen.settled

    # Processes

    def _kill(self, fault: PlannedFault, at_s: float) -> str | None:
        name = VICTIMS[fault.kind]
        pid = self._access.processes.pid(name)
        if pid is None:
            return None
        killed_unix_s, killed_s = time.time(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        done = Injected(at_s, fault.kind, name)
        self.injected.append(done)
        self._follow(self._follow_process(name, pid, done, killed_unix_s, killed_s))
        return name

    async def _follow_process(
        self, name: str, dead: int, done: Injected, killed_unix_s: float, killed_s: float
    ) -> None:
        async def works() -> bool:
            if self._access.processes.pid(name) in (None, dead):
                return False
            return await self._works(name, killed_unix_s)

        done.recovery_s = await self._until(works, killed_s)

    async def _works(self, name: str, killed_unix_s: float) -> bool:
        stubs = self._access.stubs
        if name == "actuator":
            await stubs.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(), timeout=_CALL_S)
            return True
        if name in ("policy", "store"):
            status = await stubs.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=_CALL_S)
            if not status.leader:
                return False
        if name in ("collector", "store"):
            key = collector_pb2.RoleKey(service=self._service, role=types_pb2.ROLE_COLOCATED)
            request = collector_pb2.GetObservationRequest(key=key)
            window = (await stubs.collector.GetObservation(request, timeout=_CALL_S)).observation
            return seconds_of(window.window_end) > killed_unix_s
        return True

    async def _until(self, reached: Callable[[], Awaitable[bool]], since_s: float) -> float | None:
        """Seconds since `since_s` when it was reached; None when it took too long."""
        while time.monotonic() - since_s < RECOVERY_LIMIT_S:
            try:
                if await reached():
                    return time.monotonic() - since_s
            except _ERRORS:
                # Not there yet: the part that is called may be the one that was killed.
                pass
            await asyncio.sleep(_POLL_S)
        return None

    # The gateway

    async def _delay_acknowledgements(self, fault: PlannedFault, done: Injected) -> None:
        self._fault_proxy.delay_s = fault.delay_s
        try:
            await asyncio.sleep(fault.length_s)
        finally:
            self._fault_proxy.delay_s = 0.0
        await self._acknowledges(done)

    async def _suspend(self, pid: int, fault: PlannedFault, done: Injected) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.length_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        await self._acknowledges(done)

    async def _acknowledges(self, done: Injected) -> None:
        delivered, since_s = self._fault_proxy.delivered, time.monotonic()

        async def again() -> bool:
            return self._fault_proxy.delivered > delivered

        done.recovery_s = await self._until(again, since_s)
