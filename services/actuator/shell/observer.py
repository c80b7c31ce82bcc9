"""Observes the backend's lists, and every server on its own, so that a hung one delays no other.

A server is never asked twice at once. Replicas that an operation works on, and all of them while an operation waits for
GPUs, are observed more often.
"""

import asyncio
from collections.abc import Callable

import structlog

from actuator.core.model import Gpu
from actuator.core.world import GpuMemory, Listed, Node, ProbeResult, World
from actuator.shell.backend import Backend, BackendError
from actuator.shell.engine_client import EngineClient, EngineError, Gauges

log = structlog.get_logger(__name__)


class Observer:
    """Keeps the newest look at everything."""

    def __init__(
        self,
        backend: Backend,
        client: EngineClient,
        *,
        now_s: Callable[[], float],
        interval_s: float,
        urgent_interval_s: float,
    ) -> None:
        self._backend = backend
        self._client = client
        self._now_s = now_s
        self._urgent: Callable[[], frozenset[str]] = frozenset
        self._on_news: Callable[[], None] = lambda: None
        self._interval_s = interval_s
        self._urgent_interval_s = urgent_interval_s
        self._listed: dict[str, Listed] | None = None
        self._listed_as_of_s = 0.0
        self._nodes: dict[str, Node] = {}
        self._memory: dict[Gpu, GpuMemory] = {}
        self._sights: dict[str, ProbeResult] = {}
        self._asked_s: dict[str, float] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._backend_error = ""
        self._soon = asyncio.Event()
        # When each deleted replica was deleted; kept until a list that was asked for later has come.
        self._deleted_s: dict[str, float] = {}

    def listen(self, *, urgent: Callable[[], frozenset[str]], on_news: Callable[[], None]) -> None:
        """``urgent`` names replicas to look at often; ``on_news`` is called when something new was seen."""
        self._urgent = urgent
        self._on_news = on_news

    def world(self, busy: frozenset[str]) -> World:
        """Everything as last seen."""
        return World(
            listed=None if self._listed is None else dict(self._listed),
            listed_as_of_s=self._listed_as_of_s,
            nodes=self._nodes,
            gpu_memory=self._memory,
            measures_gpus=self._backend.measures_gpus,
            measured_nodes=self._backend.measured_nodes(),
            probes=dict(self._sights),
            busy=busy,
        )

    def probe(self, name: str) -> ProbeResult | None:
        """The newest look at one server."""
        return self._sights.get(name)

    def forget(self, name: str) -> None:
        """Drop a replica that was deleted just now: no list that was requested before may bring it back."""
        self._deleted_s[name] = self._now_s()
        if self._listed is not None:
            self._listed.pop(name, None)
        self._sights.pop(name, None)

    def look_soon(self) -> None:
        """Look at once: a step waits for a look from after this moment."""
        self._soon.set()

    @property
    def complete(self) -> bool:
        """The backend answered, and every server it lists was asked once."""
        return self._listed is not None and all(
            name in self._sights for name, listed in self._listed.items() if listed.address
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until ``stopping``."""
        backend_due_s = 0.0
        stop = asyncio.ensure_future(stopping.wait())
        try:
            while not stop.done():
                now_s = self._now_s()
                urgent = self._urgent()
                at_once = self._soon.is_set()
                self._soon.clear()
                if at_once:
                    # Not after the backend, which may be slow: a release waits for its server's answer.
                    self._ask_servers(urgent, at_once=True)
                if now_s >= backend_due_s or at_once:
                    await self._ask_backend()
                    interval_s = self._urgent_interval_s if urgent else self._interval_s
                    backend_due_s = now_s + interval_s * 0.95
                self._ask_servers(urgent, at_once=False)
                soon = asyncio.ensure_future(self._soon.wait())
                await asyncio.wait({stop, soon}, timeout=self._urgent_interval_s, return_when=asyncio.FIRST_COMPLETED)
                soon.cancel()
        finally:
            stop.cancel()
            for task in self._probes.values():
                task.cancel()
            await asyncio.gather(*self._probes.values(), return_exceptions=True)

    async def _ask_backend(self) -> None:
        asked_s = self._now_s()
        try:
            listed, nodes, memory = await asyncio.gather(
                self._backend.list_replicas(), self._backend.list_nodes(), self._backend.gpu_memory()
            )
        except BackendError as error:
            if str(error) != self._backend_error:
                log.warning("the backend does not answer, its last lists stay", error=str(error))
            self._backend_error = str(error)
            return
        if self._backend_error:
            log.info("the backend answers")
            self._backend_error = ""
        self._deleted_s = {name: since_s for name, since_s in self._deleted_s.items() if since_s >= asked_s}
        current = {name: item for name, item in listed.items() if name not in self._deleted_s}
        news = self._listed != current
        self._listed, self._listed_as_of_s, self._nodes = current, asked_s, dict(nodes)
        self._memory = {
            gpu: GpuMemory(used_gib=used, memory_gib=total, as_of_s=asked_s - self._backend.gpu_memory_age_s)
            for gpu, (used, total) in memory.items()
        }
        for name in [name for name in self._sights if name not in self._listed]:
            del self._sights[name]
        if news or self._urgent():
            self._on_news()

    def _ask_servers(self, urgent: frozenset[str], *, at_once: bool) -> None:
        now_s = self._now_s()
        for name, listed in sorted((self._listed or {}).items()):
            interval_s = self._urgent_interval_s if name in urgent else self._interval_s
            due = now_s - self._asked_s.get(name, 0.0) >= interval_s * 0.95 or (at_once and name in urgent)
            if not due or not listed.address:
                continue
            if name in self._probes:
                # What is being asked was asked before this moment.
                self._again.update({name} if at_once else ())
                continue
            self._asked_s[name] = now_s
            self._probes[name] = asyncio.create_task(self._probe(name, listed.address))

    async def _probe(self, name: str, address: str) -> None:
        try:
            before = self._sights.get(name)
            probe = await look(self._client, address, now_s=self._now_s(), misses=before.misses if before else 0)
            if name not in (self._listed or {}):
                return
            self._sights[name] = probe
            if before is None or _differs(before, probe) or name in self._urgent():
                self._on_news()
        finally:
            self._probes.pop(name, None)
            if name in self._again:
                self._again.discard(name)
                self.look_soon()


async def look(client: EngineClient, address: str, *, now_s: float, misses: int) -> ProbeResult:
    """Asks one server everything. ``misses`` is how often in a row it had not answered before."""
    try:
        await client.health(address)
    except EngineError as error:
        return ProbeResult(as_of_s=now_s, healthy=False, misses=misses + 1, refused=error.refused, error=str(error))
    error_text = ""
    sleeping: bool | None = None
    gauges = Gauges(in_flight=None, memory_in_use=None)
    try:
        sleeping = await client.is_sleeping(address)
        gauges = await client.gauges(address)
    except EngineError as error:
        error_text = str(error)
    return ProbeResult(
        as_of_s=now_s,
        healthy=True,
        sleeping=sleeping,
        paused=bool(sleeping and gauges.memory_in_use),
        in_flight=gauges.in_flight,
        waiting=gauges.waiting,
        kv_usage=gauges.kv_usage,
        sleep_level=gauges.sleep_level,
        error=error_text,
    )


def _differs(before: ProbeResult, after: ProbeResult) -> bool:
    return (before.healthy, before.refused, before.misses, before.sleeping, before.paused, before.in_flight == 0) != (
        after.healthy,
        after.refused,
        after.misses,
        after.sleeping,
        after.paused,
        after.in_flight == 0,
    )
