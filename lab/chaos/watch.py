"""Checks the stack all the time, from the outside, and keeps every breach of an invariant.

Three views: which servers are awake on which GPU (from the fleet, in place of DCGM), each server's own answer
(`/is_sleeping`), and the actuator's list. Trimtab's own view is not used where there is another source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import grpc

from lab.chaos.access import Access
from lab.chaos.fault_proxy import FaultProxy
from lab.chaos.rules import Seen, hidden_below_floor, two_awake
from trimtab.api.actuator.v1 import actuator_pb2

GPU_LOOK_S = 0.1
WORD_LOOK_S = 0.5
WORD_TIMEOUT_S = 0.4
LIST_LOOK_S = 0.2
OPERATIONS_LOOK_S = 2.0
# A request that was chosen before the acknowledgement may reach its server a little after it: so many looks, with
# their pauses between them. A time would pass for a machine that stood still, and the request not get on meanwhile.
LOOKS_ON_THE_WIRE = 3
_CALL_S = 1.0
_ERRORS = (grpc.aio.AioRpcError, aiohttp.ClientError, TimeoutError, OSError)


@dataclass(slots=True)
class _Hidden:
    """A replica that the gateway has confirmed to be hidden: requests it had received by then."""

    revision: int
    looks: int = 0
    received: int | None = None


@dataclass(slots=True)
class Breaches:
    """Breaches of an invariant, each once."""

    budget: list[str] = field(default_factory=list)
    floor: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)

    def note(self, where: list[str], what: list[str]) -> None:
        """Adds what is new."""
        where += [text for text in what if text not in where]


class Watch:
    """Runs its looks until its task is cancelled; a look that fails is not counted as one."""

    def __init__(self, access: Access, fault_proxy: FaultProxy, floors: Mapping[str, int]) -> None:
        self._access = access
        self._fault_proxy = fault_proxy
        self._floors = floors
        self._hidden: dict[str, _Hidden] = {}
        self._words: dict[str, bool | None] = {}
        self.replicas: dict[str, Seen] = {}
        self.listed = asyncio.Event()
        self.names: set[str] = set()
        self.operations: dict[str, actuator_pb2.Operation] = {}
        self.breaches = Breaches()
        self.looks = dict.fromkeys(("gpus", "words", "list", "hidden"), 0)

    async def run(self) -> None:
        """Check until cancelled."""
        await asyncio.gather(
            self._every(GPU_LOOK_S, self._look_at_gpus),
            self._every(WORD_LOOK_S, self._ask_servers),
            self._every(LIST_LOOK_S, self._list),
            self._every(LIST_LOOK_S, self._look_at_hidden),
            self._every(OPERATIONS_LOOK_S, self.list_operations),
        )

    async def _every(self, pause_s: float, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            # The part that is called may have been killed just now; the next check comes soon.
            with suppress(*_ERRORS):
                await look()
            await asyncio.sleep(pause_s)

    async def _look_at_gpus(self) -> None:
        page = await self._access.fleet("/gpus")
        crowded = [
            f"{gpu['node']}:{gpu['index']} has {', '.join(gpu['awake_replicas'])} (fleet)"
            for gpu in page["gpus"]
            if len(gpu["awake_replicas"]) > 1
        ]
        self.breaches.note(self.breaches.budget, crowded)
        self.looks["gpus"] += 1

    async def _ask_servers(self) -> None:
        asked = [seen for _, seen in sorted(self.replicas.items()) if seen.address]
        words = await asyncio.gather(*(self._word(seen.address) for seen in asked))
        now = {seen.replica: word for seen, word in zip(asked, words, strict=True)}
        self.breaches.note(self.breaches.budget, [f"{text} (servers)" for text in two_awake(self._words, now, asked)])
        self._words = now
        self.looks["words"] += any(word is not None for word in words)

    async def _word(self, address: str) -> bool | None:
        """Whether a server reports that it is awake; None when it does not answer."""
        timeout = aiohttp.ClientTimeout(total=WORD_TIMEOUT_S)
        try:
            async with self._access.http.get(address + "/is_sleeping", timeout=timeout) as reply:
                return not (await reply.json())["is_sleeping"] if reply.status == 200 else None
        except _ERRORS:
            return None

    async def _list(self) -> None:
        reply = await self._access.stubs.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(), timeout=_CALL_S)
        now = {replica.replica: Seen.of(replica) for replica in reply.replicas}
        self.breaches.note(self.breaches.floor, hidden_below_floor(self.replicas, now, self._floors))
        self.replicas = now
        self.listed.set()
        self.names |= now.keys()
        self.looks["list"] += 1

    async def _look_at_hidden(self) -> None:
        """A server whose hiding the gateway has confirmed may receive nothing more until it is shown again."""
        confirmed = {
            name: revision
            for name, revision in self._fault_proxy.hidden_since.items()
            if revision <= self._fault_proxy.acknowledged_revision
        }
        self._hidden = {
            name: self._hidden[name]
            if name in self._hidden and self._hidden[name].revision == revision
            else _Hidden(revision)
            for name, revision in confirmed.items()
        }
        for name, hidden in list(self._hidden.items()):
            hidden.looks += 1
            if hidden.looks <= LOOKS_ON_THE_WIRE:
                continue
            received = int((await self._access.fleet(f"/replicas/{name}/stats"))["requests_received"])
            if not await self._fault_proxy.knows_all() or self._fault_proxy.hidden_since.get(name) != hidden.revision:
                continue  # it may have been shown again meanwhile
            if hidden.received is not None and received > hidden.received:
                text = f"{name} received {received - hidden.received} requests after revision {hidden.revision}"
                self.breaches.note(self.breaches.hidden, [text])
            hidden.received = received
            self.looks["hidden"] += 1

    async def list_operations(self) -> None:
        """Keep every operation, also when the actuator has forgotten it by the end."""
        request = actuator_pb2.ListOperationsRequest(page_size=1000)
        reply = await self._access.stubs.actuator.ListOperations(request, timeout=5.0)
        self.operations |= {operation.operation_id: operation for operation in reply.operations}
