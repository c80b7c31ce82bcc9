"""Executor and observer with the client of another engine than vLLM."""

from __future__ import annotations

import asyncio

import pytest

from actuator.core.model import ActionKind, Limits
from actuator.core.world import Action, Outcome
from actuator.shell.engine_client import EngineClient, EngineError, Gauges
from actuator.shell.executor import Executor
from actuator.shell.observer import look


class InMemoryEngine:
    """Servers of an engine without HTTP, by address; `fault` is what each call raises."""

    def __init__(self, fault: EngineError | None = None) -> None:
        self.asleep: dict[str, int] = {}
        self.fault = fault

    async def health(self, address: str) -> None:
        del address
        if self.fault is not None and self.fault.refused:
            raise self.fault

    async def is_sleeping(self, address: str) -> bool | None:
        return address in self.asleep

    async def gauges(self, address: str) -> Gauges:
        level = self.asleep.get(address)
        return Gauges(in_flight=0, memory_in_use=level is None, waiting=0, kv_usage=0.25, sleep_level=level)

    async def sleep(self, address: str, *, level: int, timeout_s: float) -> None:
        del timeout_s
        if self.fault is not None:
            raise self.fault
        self.asleep[address] = level

    async def wake_up(self, address: str, *, level: int, timeout_s: float) -> None:
        del timeout_s
        if self.fault is not None:
            raise self.fault
        assert self.asleep.pop(address) == level

    async def canary(self, address: str, model: str) -> str:
        if address in self.asleep:
            raise EngineError("it sleeps", answered=True)
        return model or "served"

    async def close(self) -> None:
        self.asleep.clear()


class NoBackend:
    """None of the actions under test asks it for anything."""


async def outcome_of(client: EngineClient, kind: ActionKind, **fields: object) -> Outcome:
    done: asyncio.Queue[Outcome] = asyncio.Queue()
    executor = Executor(NoBackend(), client, Limits(), done.put_nowait)
    executor.start(Action(kind=kind, replica="a-0", address="mem://a", **fields))
    return await done.get()


async def test_another_engine_sleeps_wakes_and_answers() -> None:
    engine = InMemoryEngine()
    assert (await outcome_of(engine, ActionKind.SLEEP, sleep_level=2)).ok
    seen = await look(engine, "mem://a", now_s=5.0, misses=0)
    assert (seen.healthy, seen.sleeping, seen.paused, seen.sleep_level) == (True, True, False, 2)
    assert (await outcome_of(engine, ActionKind.CANARY)).error == "it sleeps"
    assert (await outcome_of(engine, ActionKind.WAKE, sleep_level=2)).ok
    seen = await look(engine, "mem://a", now_s=6.0, misses=0)
    assert (seen.sleeping, seen.in_flight, seen.kv_usage) == (False, 0, 0.25)
    assert (await outcome_of(engine, ActionKind.CANARY)).served_model == "served"


@pytest.mark.parametrize(
    ("fault", "permanent", "unsettled"),
    [
        (EngineError("no such call", answered=True, unsupported=True), True, False),
        (EngineError("it failed", answered=True), False, False),
        (EngineError("no answer"), False, True),
    ],
    ids=["unsupported", "answered", "no answer"],
)
async def test_what_an_engine_s_error_says_decides_how_to_go_on(
    fault: EngineError, permanent: bool, unsettled: bool
) -> None:
    slept = await outcome_of(InMemoryEngine(fault), ActionKind.SLEEP)
    assert (slept.ok, slept.permanent, slept.unsettled) == (False, permanent, unsettled)
    woken = await outcome_of(InMemoryEngine(fault), ActionKind.WAKE)
    assert (woken.ok, woken.permanent) == (False, permanent)


async def test_a_server_where_nothing_listens_is_missed_and_refused() -> None:
    seen = await look(InMemoryEngine(EngineError("gone", refused=True)), "mem://a", now_s=5.0, misses=1)
    assert (seen.healthy, seen.refused, seen.misses) == (False, True, 2)
