"""Services that run in the test's own event loop, on ports that the kernel chooses."""

import asyncio
from typing import Any

from trimtab.rpc.run import ServiceContext

ANY_PORT = "127.0.0.1:0"
BIND_TIMEOUT_S = 30.0


async def bound_port(context: ServiceContext, serving: "asyncio.Future[Any]", protocol: str = "grpc") -> int:
    """The port that a service has bound, once it has.

    ``serving`` is the task of its ``serve``; where that ends before, its exception is raised.
    """
    async with asyncio.timeout(BIND_TIMEOUT_S):
        while protocol not in context.ports:
            if serving.done():
                serving.result()
                raise AssertionError(f"{context.name} ended before it listened")
            await asyncio.sleep(0.005)
    return context.ports[protocol]
