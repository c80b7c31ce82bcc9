"""The one writer of the actuator's state: lease, store, ticks, and what is published to watchers.

Four modes. *Standing by*: another actuator holds the lease; nothing is served or written. *Active*: every change is
computed by the core, stored with the lease's token, then published, then acted on. *Fail static*: the store is away;
the last endpoints are served, nothing is acted on, what a release had hidden comes back. *Held*: the cluster's
metadata cannot be read; nothing is served, written or acted on until it can, since revisions might fall.

Endpoint sets and the gateways' acknowledgements go through a ``Routing``.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import structlog

from actuator.core.endpoints import leased
from actuator.core.held import refuse_for
from actuator.core.model import ActionKind, Limits, State
from actuator.core.refused import RefusedKind, RefusedRecord
from actuator.core.tick import UNKNOWN_GATEWAY, Tick, due_s, fail_static, resume, take_up, tick
from actuator.core.world import Action, Outcome, World
from actuator.shell.executor import Executor
from actuator.shell.metrics import ActuatorMetrics
from actuator.shell.observer import Observer
from actuator.shell.publisher import Publisher
from actuator.shell.records import Records
from actuator.shell.refusals import error_of
from actuator.shell.routing import Routing
from trimtab.rpc.errors import Unavailable
from trimtab.store.errors import FencedOff, StoreUnavailable
from trimtab.store.lease import Lease
from trimtab.tasks import stopped_within, to_its_end

log = structlog.get_logger(__name__)

T = TypeVar("T")

_READ_AGAIN_S = 10.0
"""So often refused records are read again."""


class Mode(StrEnum):
    """What this process may do."""

    STANDING_BY = "standing by"
    ACTIVE = "active"
    FAIL_STATIC = "fail static"
    HELD = "held"


@dataclass(frozen=True, kw_only=True)
class ControllerParts:
    """What the controller works with."""

    lease: Lease
    records: Records
    observer: Observer
    publisher: Publisher
    routing: Routing
    metrics: ActuatorMetrics
    limits: Limits
    now_s: Callable[[], float]


class Controller:
    """Owns the state. Everything that changes it goes through ``change`` or the loop, one at a time."""

    def __init__(self, parts: ControllerParts, *, interval_s: float) -> None:
        self._parts = parts
        self._interval_s = interval_s
        self._mode = Mode.STANDING_BY
        self._state = State()
        self._stored = State()
        self._outcomes: list[Outcome] = []
        self._executor: Executor | None = None
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        # An acknowledgement or an outcome came: what waits for it waits next for a look from after it.
        self._look_again = False
        # Under which this process has written, or may have.
        self._own_tokens: set[int] = set()
        self._told_refused: set[RefusedRecord] = set()
        self._read_again_s = 0.0
        # The first step after a take-over decides what there is to show; until then no watcher gets an empty cluster.
        self._opened = False

    # What servicers read

    @property
    def serving(self) -> bool:
        """Whether this process speaks for the cluster."""
        return self._opened and self._mode not in (Mode.STANDING_BY, Mode.HELD)

    @property
    def state(self) -> State:
        """The state. Raises ``Unavailable`` while another process is the cluster's actuator, or none can be."""
        self.require_serving()
        return self._state

    def world(self) -> World:
        """The newest look at everything."""
        return self._parts.observer.world(self._executor.busy if self._executor is not None else frozenset())

    def urgent(self) -> frozenset[str]:
        """Replicas that an unfinished operation works on."""
        return frozenset(
            step.replica
            for operation in self._state.operations.values()
            if not operation.finished
            for step in operation.steps
            if not step.finished
        )

    # What servicers do

    async def change(self, function: Callable[[State, World, float], tuple[State, T]]) -> T:
        """Computes, stores, publishes. Raises what ``function`` raises, ``Unavailable`` when nothing may be written."""
        return await to_its_end(self._change(function))

    async def _change(self, function: Callable[[State, World, float], tuple[State, T]]) -> T:
        async with self._lock:
            self.require_serving()
            if self._mode is not Mode.ACTIVE or self._parts.lease.token is None:
                raise Unavailable("STORE_UNAVAILABLE", "the store is away: nothing is changed until it is back")
            new, result = function(self._with_gateways(), self.world(), self._parts.now_s())
            try:
                await self._store(new)
            except StoreUnavailable as error:
                # It may have been written all the same: the next step reads again what is there.
                self._enter(Mode.FAIL_STATIC)
                self.kick()
                raise Unavailable("STORE_UNAVAILABLE", f"the store does not answer: {error}") from error
            except FencedOff as error:
                # Of our own token: passed on, the caller would take it for an answer about its token.
                self._fenced_off(error)
                self.kick()
                raise Unavailable("STANDING_BY", "the lease of this actuator was over: nothing was written") from error
            self._publish(new)
        self.kick()
        return result

    def kick(self) -> None:
        """Something happened: do not wait for the next beat."""
        self._news.set()

    def hear_router(self) -> None:
        """A gateway acknowledged: a step may go on after one more look at its server."""
        self._look_again = True
        self.kick()

    # Loops

    def use(self, executor: Executor) -> None:
        """The executor is made after the controller, since it reports here."""
        self._executor = executor

    def on_outcome(self, outcome: Outcome) -> None:
        """An action has ended."""
        if outcome.ok and outcome.kind is ActionKind.DELETE:
            self._parts.observer.forget(outcome.replica)
        self._outcomes.append(outcome)
        self._look_again = True
        self.kick()

    async def keep_lease(self, stopping: asyncio.Event) -> None:
        """Tries and renews three times per life of the lease, more often while the store is away."""
        lease = self._parts.lease
        while True:
            try:
                await lease.acquire_or_renew()
                if lease.held_by_other and self._mode is not Mode.STANDING_BY:
                    await self._step_down()
            except StoreUnavailable as error:
                log.debug("lease not renewed", error=str(error))
            self.kick()
            pause_s = lease.ttl_s / (15 if self._mode is Mode.FAIL_STATIC else 3)
            if await stopped_within(stopping, pause_s):
                break
        try:
            await lease.release()
        except StoreUnavailable as error:
            log.info("lease not released, it runs out by itself", error=str(error))

    async def run(self, stopping: asyncio.Event) -> None:
        """Steps at every beat and kick, and when a step's time has come."""
        while not stopping.is_set():
            self._news.clear()
            look_again, self._look_again = self._look_again, False
            async with self._lock:
                await self._step()
            if look_again:
                self._parts.observer.look_soon()
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _pause_s(self) -> float:
        now_s = self._parts.now_s()
        at_s = due_s(self._state, now_s)
        return self._interval_s if at_s is None else min(self._interval_s, at_s - now_s)

    async def _step(self) -> None:
        token = self._parts.lease.token
        if self._mode is not Mode.ACTIVE and token is not None and self._parts.observer.complete:
            await self._take_over(token)
        elif self._mode is Mode.ACTIVE and token is None:
            self._enter(Mode.FAIL_STATIC)
        if self._mode is Mode.ACTIVE:
            await self._read_refused_again()
        if self._mode is Mode.ACTIVE:
            await self._tick()
        elif self._mode is Mode.FAIL_STATIC:
            self._outcomes.clear()
            now_s, limits = self._parts.now_s(), self._parts.limits
            self._finish(fail_static(self._with_gateways(), self.world(), now_s=now_s, limits=limits))

    async def _tick(self) -> None:
        outcomes: list[Outcome] = []
        try:
            await self._parts.routing.look(self._state.meta.endpoint_revision)
            outcomes, self._outcomes = self._outcomes, []
            now_s, limits = self._parts.now_s(), self._parts.limits
            result = tick(self._with_gateways(), self.world(), outcomes, now_s=now_s, limits=limits)
            await self._store(result.state)
        except StoreUnavailable as error:
            self._outcomes = [*outcomes, *self._outcomes]
            log.warning("the store is away: nothing is acted on", error=str(error))
            self._enter(Mode.FAIL_STATIC)
            return
        except FencedOff as error:
            self._outcomes = [*outcomes, *self._outcomes]
            self._fenced_off(error)
            return
        self._finish(result)

    def _finish(self, result: Tick) -> None:
        for note in result.notes:
            log.info("life cycle", change=note)
        self._publish(result.state)
        for action in result.actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        # The lease may have run out while the state was being stored.
        if self._executor is not None and self._parts.lease.held:
            self._executor.start(action)

    async def _take_over(self, token: int) -> None:
        try:
            loaded = await self._parts.records.load()
        except StoreUnavailable as error:
            log.warning("the records cannot be read yet", error=str(error))
            return
        if any(record.kind is RefusedKind.META for record in loaded.state.refused):
            self._hold_cluster(loaded.state)
            return
        last = loaded.last_token
        memory_is_newest = self._mode is Mode.FAIL_STATIC and (last is None or last in self._own_tokens)
        now_s = self._parts.now_s()
        if memory_is_newest:
            if not await self._take_up(loaded.state):
                return
        else:
            self._stored = loaded.state
            self._state = resume(loaded.state, now_s=now_s, limits=self._parts.limits)
            self._parts.routing.remember(self._state.gateways)
            self._outcomes.clear()
            self._opened = False
        self._tell_refused(self._state.refused)
        self._read_again_s = now_s + _READ_AGAIN_S
        log.info(
            "writing for the cluster", token=token, kept_memory=memory_is_newest, replicas=len(self._state.replicas)
        )
        self._enter(Mode.ACTIVE)

    async def _read_refused_again(self) -> None:
        """Takes up what has become readable, or was removed, of the records that were refused."""
        now_s = self._parts.now_s()
        if not self._state.refused or now_s < self._read_again_s:
            return
        self._read_again_s = now_s + _READ_AGAIN_S
        try:
            loaded = await self._parts.records.load()
        except StoreUnavailable as error:
            log.warning("the store is away: nothing is acted on", error=str(error))
            self._enter(Mode.FAIL_STATIC)
            return
        if any(record.kind is RefusedKind.META for record in loaded.state.refused):
            self._hold_cluster(loaded.state)
        elif await self._take_up(loaded.state):
            self._tell_refused(self._state.refused)

    async def _take_up(self, loaded: State) -> bool:
        """Goes on from memory with the refused records that the store has now; False when that cannot be stored."""
        self._stored = loaded
        if self._state.refused == loaded.refused:
            return True
        now_s, limits = self._parts.now_s(), self._parts.limits
        new = take_up(self._with_gateways(), loaded, self.world(), now_s=now_s, limits=limits)
        try:
            await self._store(new)
        except StoreUnavailable as error:
            log.warning("the store is away: nothing is acted on", error=str(error))
            self._enter(Mode.FAIL_STATIC)
            return False
        except FencedOff as error:
            self._fenced_off(error)
            return False
        self._publish(new)
        return True

    def _hold_cluster(self, loaded: State) -> None:
        """Serves nothing and writes nothing on such records; the next step reads them again."""
        if self._mode is not Mode.HELD:
            self._leave()
            self._enter(Mode.HELD)
        self._state = loaded
        self._tell_refused(loaded.refused)

    def _tell_refused(self, refused: tuple[RefusedRecord, ...]) -> None:
        """Logs each record once, and again when it has become another one."""
        for record in refused:
            if record not in self._told_refused:
                log.error(
                    "a stored record is refused, its subject is held",
                    kind=record.kind.value,
                    name=record.name,
                    reason=record.reason,
                    why=record.why,
                    remedy=record.remedy,
                )
        for record in sorted(self._told_refused - set(refused), key=lambda record: record.why):
            log.info("a record that was refused is read again, or gone", kind=record.kind.value, name=record.name)
        self._told_refused = set(refused)
        self._parts.metrics.show_refused(refused)

    async def _store(self, new: State) -> None:
        token = self._parts.lease.token
        if token is None:
            raise StoreUnavailable("the lease has run out")
        routing, certain = self._parts.routing, False
        self._own_tokens.add(token)
        try:
            await self._parts.records.save(self._stored, new, token, routing.to_store(new, token))
            certain = True
        except StoreUnavailable:
            # It may land yet, even after what is written next: from now on it would be refused.
            self._parts.lease.renew_token()
            raise
        finally:
            routing.stored(certain=certain)
        self._stored = new

    def _publish(self, new: State) -> None:
        old, self._state = self._state, new
        self._parts.metrics.count(old, new)
        now_s = self._parts.now_s()
        gateways = [g for g in leased(self._parts.routing.heard(), now_s) if g.gateway != UNKNOWN_GATEWAY]
        self._parts.metrics.show(new, self.world(), leased_gateways=len(gateways))
        self._parts.publisher.publish(old, new)
        self._parts.routing.show(old, new)
        if not self._opened:
            self._parts.publisher.open()
            self._parts.routing.open()
            self._opened = True

    def _with_gateways(self) -> State:
        return replace(self._state, gateways=dict(self._parts.routing.heard()))

    def _enter(self, mode: Mode) -> None:
        if mode is not self._mode:
            log.info("mode", before=self._mode.value, now=mode.value)
        self._mode = mode
        self._parts.metrics.active.set(int(mode is Mode.ACTIVE))
        self._parts.metrics.store_away.set(int(mode is Mode.FAIL_STATIC))

    def _fenced_off(self, error: FencedOff) -> None:
        """A write came after a newer token, and was not done.

        The newer token may be our own: a process that stood still for longer than its lease has taken it again while
        the write waited. Then memory is as good as it was, and goes on under the new token.
        """
        if error.current_token == self._parts.lease.token:
            log.warning("the lease ran out while a write waited: going on under its new token", error=str(error))
            self._enter(Mode.FAIL_STATIC)
            return
        log.warning("another actuator writes: standing by", error=str(error))
        self._leave()

    async def _step_down(self) -> None:
        async with self._lock:
            self._leave()

    def _leave(self) -> None:
        self._enter(Mode.STANDING_BY)
        self._opened = False
        self._parts.publisher.close()
        self._parts.routing.close()
        self._parts.routing.remember({})
        self._state = self._stored = State()
        self._told_refused = set()
        self._parts.metrics.show_refused(())

    def require_serving(self) -> None:
        """Raises ``Unavailable`` with the reason unless this process speaks for the cluster."""
        if self._mode is Mode.HELD:
            raise error_of(refuse_for("the cluster is held", self._state.refused[0]))
        if not self.serving:
            raise Unavailable("STANDING_BY", "another actuator speaks for this cluster, or this one is starting")
