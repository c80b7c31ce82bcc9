"""The store's clock, whatever the local one does."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import structlog

from trimtab.store.client import Store
from trimtab.store.clock import StoreClock


class FakeRedis:
    """Says the time it is told to, after a delay that is told too."""

    def __init__(self, clock: "Clocks") -> None:
        self._clock = clock

    async def time(self) -> tuple[int, int]:
        self._clock.monotonic_s += self._clock.delay_s
        now_us = round(self._clock.store_s * 1e6)
        back_s = self._clock.delay_back_s
        self._clock.monotonic_s += self._clock.delay_s if back_s is None else back_s
        return now_us // 1_000_000, now_us % 1_000_000


class Clocks:
    """Three clocks that go wrong separately, and a store with one of them."""

    def __init__(self) -> None:
        self.monotonic_s = 50.0
        self.wall_s = 1_700_000_000.0
        self.store_s = 1_700_000_100.0
        self.delay_s = 0.0
        self.delay_back_s: float | None = None
        self.redis = FakeRedis(self)

    def store_clock(self) -> StoreClock:
        return StoreClock(self, monotonic=lambda: self.monotonic_s, wall=lambda: self.wall_s)  # type: ignore[arg-type]

    def pass_time(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds
        self.store_s += seconds


async def test_follows_a_real_store(store: Store) -> None:
    async def stores_s() -> float:
        seconds, microseconds = await store.redis.time()
        return float(seconds) + microseconds / 1e6

    clock = StoreClock(store)
    asked_s = time.monotonic()
    assert await clock.refresh()
    error_s = 0.01 + (time.monotonic() - asked_s) / 2
    before_s, now_s, after_s = await stores_s(), clock.now_s(), await stores_s()
    assert before_s - error_s <= now_s <= after_s + error_s


async def test_local_time_until_the_store_answers() -> None:
    clocks = Clocks()
    clock = clocks.store_clock()
    assert clock.now_s() == clocks.wall_s
    assert not clock.synchronised
    assert await clock.refresh()
    assert clock.now_s() == pytest.approx(clocks.store_s, abs=1e-3)


async def test_a_step_of_the_local_wall_clock_changes_nothing() -> None:
    clocks = Clocks()
    clock = clocks.store_clock()
    await clock.refresh()
    clocks.wall_s -= 3600
    clocks.pass_time(10)
    assert clock.now_s() == pytest.approx(clocks.store_s, abs=1e-3)


async def test_half_of_the_round_trip_is_allowed_for() -> None:
    clocks = Clocks()
    clock = clocks.store_clock()
    clocks.delay_s = 0.2
    await clock.refresh()
    assert clock.now_s() == pytest.approx(clocks.store_s + 0.2, abs=1e-3)


async def test_a_slow_answer_moves_only_a_clock_that_it_contradicts() -> None:
    clocks = Clocks()
    clock = clocks.store_clock()
    await clock.refresh()
    # Nearly all of the delay comes before the store looks at its clock: by the middle this one would be 0.09 s behind.
    clocks.delay_s, clocks.delay_back_s = 0.2, 0.02
    clocks.store_s += 0.2
    assert await clock.refresh()
    assert clock.now_s() == pytest.approx(clocks.store_s + 0.02, abs=1e-3)
    clocks.store_s += 0.4
    assert await clock.refresh()
    assert clock.now_s() == pytest.approx(clocks.store_s + 0.02, abs=0.11), "it stepped"


async def test_an_answer_that_took_too_long_is_not_used() -> None:
    clocks = Clocks()
    clock = clocks.store_clock()
    await clock.refresh()
    clocks.delay_s, clocks.store_s = 2.0, clocks.store_s + 500
    assert not await clock.refresh()


async def test_a_step_of_the_stores_clock_is_followed_and_logged() -> None:
    clocks = Clocks()
    clock = clocks.store_clock()
    await clock.refresh()
    clocks.store_s -= 60
    with structlog.testing.capture_logs() as logs:
        await clock.refresh()
    assert clock.now_s() == pytest.approx(clocks.store_s, abs=1e-3)
    assert [(entry["event"], entry["step_s"]) for entry in logs] == [("the store's clock stepped", -60.0)]


async def test_a_store_that_is_away_leaves_the_clock_running(free_port: int) -> None:
    clock = StoreClock(Store(f"redis://127.0.0.1:{free_port}/0"))
    assert not await clock.refresh()
    assert clock.now_s() == pytest.approx(time.time(), abs=1)


async def test_run_refreshes_until_the_stop(store: Store, eventually: Callable[..., Awaitable[object]]) -> None:
    clock = StoreClock(store)
    stopping = asyncio.Event()
    running = asyncio.create_task(clock.run(stopping, interval_s=0.01))
    await eventually(lambda: clock.synchronised)
    stopping.set()
    await asyncio.wait_for(running, 30)
    assert running.done()
    assert clock.synchronised
