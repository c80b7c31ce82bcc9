"""Simulated servers and fleets on real sockets, quick enough for tests."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from simulator.core.profile import Profile
from simulator.profiles import packaged_profiles
from simulator.server.app import make_app
from simulator.server.server import ServerSettings, SimulatedServer
from tests.support.gateway import gateway  # noqa: F401


@dataclasses.dataclass(frozen=True)
class ServerAt:
    """A server and where it listens."""

    url: str
    server: SimulatedServer


@pytest.fixture
def quick_profile() -> Profile:
    """An 8B model whose iterations take 2 ms and whose sleep and wake take 30 and 20 ms, the first sleep 60 ms."""
    base = packaged_profiles()["a100-8b-tp1"]
    timing = base.timing.model_copy(update={"host_s": 0.001, "weights_s": 0.001, "linear_s": 0.0, "token_s": 1e-6})
    lifecycle = base.lifecycle.model_copy(
        update={
            "start_up_s": 0.05,
            "first_sleep_s": 0.06,
            "sleep_s": 0.03,
            "wake_s": 0.02,
            "sleep_level2_s": 0.01,
            "wake_level2_s": 0.04,
        }
    )
    limits = base.limits.model_copy(update={"max_model_len": 4096})
    return base.model_copy(
        update={"name": "quick", "model": "tiny", "timing": timing, "lifecycle": lifecycle, "limits": limits}
    )


MakeServer = Callable[..., Awaitable[ServerAt]]


@pytest.fixture
async def make_server(quick_profile: Profile) -> AsyncIterator[MakeServer]:
    """`await make_server(profile=…, stream_interval=…)` starts a server named `tiny`."""
    runners: list[web.AppRunner] = []

    async def make(profile: Profile = quick_profile, **settings: object) -> ServerAt:
        server = SimulatedServer(ServerSettings("tiny-0", "tiny", profile, **settings))  # type: ignore[arg-type]
        runner = web.AppRunner(make_app(server), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return ServerAt(f"http://127.0.0.1:{runner.addresses[0][1]}", server)

    yield make
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """`await until(condition)` waits until the condition holds."""

    async def wait(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  (what is waited for has no event)
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
