"""The page of a simulated vLLM server, for machines without a recorded one."""

import asyncio

from simulator.core.requests import FinishReason
from simulator.core.tokens import OutputPlan
from simulator.profiles import packaged_profiles
from simulator.server.server import ServerSettings, SimulatedServer
from simulator.server.vllm_metrics import RequestParams

REAL_PAGE_BYTES = 65_000


def simulated_page() -> bytes:
    """After 50 requests, a sleep and a wake; padded with unused families to the size of a real page."""

    async def work() -> bytes:
        profile = packaged_profiles()["a100-8b-tp1"]
        server = SimulatedServer(ServerSettings("bench-0", "bench", profile, time_scale=100.0))
        plan, params = OutputPlan(20, FinishReason.LENGTH), RequestParams(n=1, max_tokens=20)
        await asyncio.gather(*(server.submit(f"r-{index}", "prompt " * 100, plan, params) for index in range(50)))
        await server.sleep(1, "wait")
        await server.wake(None)
        return server.page.render().encode()

    page = asyncio.run(work())
    number = 0
    while len(page) < REAL_PAGE_BYTES:
        name = f"padding_{number}_total"
        page += f'# HELP {name} Padding.\n# TYPE {name} counter\n{name}{{engine="0",model_name="bench"}} 1.0\n'.encode()
        number += 1
    return page
