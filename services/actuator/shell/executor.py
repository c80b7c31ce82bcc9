"""Carries the core's actions out: one at a time per replica, each bounded, each safe to repeat."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from actuator.core.model import ActionKind, Limits
from actuator.core.world import Action, Outcome
from actuator.shell.backend import Backend, BackendError
from actuator.shell.engine_client import EngineClient, EngineError

log = structlog.get_logger(__name__)

_POLL_S = 0.1


class Executor:
    """Runs actions as tasks; ``on_outcome`` is called once per action, after which the replica is free again."""

    def __init__(
        self,
        backend: Backend,
        client: EngineClient,
        limits: Limits,
        on_outcome: Callable[[Outcome], None],
        *,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        """``may_act``: whether this process is still the writer; checked once more before a server is put to sleep."""
        self._backend = backend
        self._client = client
        self._limits = limits
        self._on_outcome = on_outcome
        self._may_act = may_act
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def busy(self) -> frozenset[str]:
        """Replicas that are being acted on."""
        return frozenset(self._tasks)

    def start(self, action: Action) -> None:
        """Begins an action, unless one is under way for that replica."""
        if action.replica in self._tasks:
            return
        log.info("action", action=action.kind.value, replica=action.replica)
        self._tasks[action.replica] = asyncio.create_task(self._run(action))

    async def stop(self) -> None:
        """End every task; what they did stays, and is asked for again by the process that resumes."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, action: Action) -> None:
        run: dict[ActionKind, Callable[[Action], Awaitable[Outcome]]] = {
            ActionKind.CREATE: self._create,
            ActionKind.DELETE: self._delete,
            ActionKind.SLEEP: self._sleep,
            ActionKind.WAKE: self._wake,
            ActionKind.CANARY: self._canary,
        }
        outcome = _failed(action, "the action was cut short", unsettled=True)
        try:
            outcome = await run[action.kind](action)
        finally:
            del self._tasks[action.replica]
            outcome = replace(outcome, action=action)
            if not outcome.ok and not outcome.busy:
                log.warning("action failed", action=action.kind.value, replica=action.replica, error=outcome.error)
            self._on_outcome(outcome)

    async def _create(self, action: Action) -> Outcome:
        if action.placed is None:
            return _failed(action, "there is nothing that says what to create", permanent=True)
        try:
            await self._backend.create_replica(action.placed)
        except BackendError as error:
            return _failed(action, str(error), permanent=error.permanent)
        return _done(action)

    async def _delete(self, action: Action) -> Outcome:
        try:
            await self._backend.delete_replica(action.replica)
        except BackendError as error:
            return _failed(action, str(error), permanent=error.permanent)
        return _done(action)

    async def _sleep(self, action: Action) -> Outcome:
        """With nothing in flight ask for /sleep; done when /is_sleeping is true and memory is released.

        Unsettled: a server that cannot be read, since an earlier call may be at work there, and one whose sleep was
        asked for and not seen. Neither may be shown again before it is known to be awake.
        """
        sent = False
        try:
            gauges = await self._client.gauges(action.address)
            if await self._client.is_sleeping(action.address) and not gauges.memory_in_use:
                return _done(action)
        except EngineError as error:
            return _failed(action, str(error), unsettled=True)
        if gauges.in_flight is None:
            return _failed(action, "its in-flight count cannot be read, so it may not be put to sleep")
        if gauges.in_flight > 0:
            return Outcome(kind=action.kind, replica=action.replica, ok=False, busy=True, error="in flight")
        if not self._may_act():
            # The present writer may have shown it again while this process stood still.
            return _failed(action, "this process is the writer no longer", unsettled=True)
        try:
            async with asyncio.timeout(self._limits.sleeping_s):
                await self._client.sleep(action.address, level=action.sleep_level, timeout_s=self._limits.sleeping_s)
                sent = True
                await self._until_sleeping(action.address, wanted=True)
        except EngineError as error:
            permanent = not sent and error.unsupported
            return _failed(action, str(error), permanent=permanent, unsettled=sent or not error.answered)
        except TimeoutError:
            return _failed(action, f"not asleep within {self._limits.sleeping_s:g} s", unsettled=True)
        return _done(action)

    async def _wake(self, action: Action) -> Outcome:
        try:
            async with asyncio.timeout(self._limits.reactivating_s):
                level = max(action.sleep_level, (await self._client.gauges(action.address)).sleep_level or 0)
                await self._client.wake_up(action.address, level=level, timeout_s=self._limits.reactivating_s)
                await self._until_sleeping(action.address, wanted=False)
                await self._client.health(action.address)
        except EngineError as error:
            return _failed(action, str(error), permanent=error.unsupported)
        except TimeoutError:
            return _failed(action, f"not awake within {self._limits.reactivating_s:g} s")
        return _done(action)

    async def _canary(self, action: Action) -> Outcome:
        try:
            served = await self._client.canary(action.address, action.model)
        except EngineError as error:
            return _failed(action, str(error))
        return Outcome(kind=action.kind, replica=action.replica, ok=True, served_model=served)

    async def _until_sleeping(self, address: str, *, wanted: bool) -> None:
        """Poll until the server is in the wanted state; the caller bounds the time."""
        while bool(await self._client.is_sleeping(address)) is not wanted:  # noqa: ASYNC110  # a server has no event
            await asyncio.sleep(_POLL_S)


def _done(action: Action) -> Outcome:
    return Outcome(kind=action.kind, replica=action.replica, ok=True)


def _failed(action: Action, error: str, *, permanent: bool = False, unsettled: bool = False) -> Outcome:
    return Outcome(
        kind=action.kind, replica=action.replica, ok=False, error=error, permanent=permanent, unsettled=unsettled
    )
