"""A service process for the tests: ``--mode`` says how it behaves."""

import asyncio
from pathlib import Path
from typing import Literal

from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.config.settings import ServiceSettings
from trimtab.rpc.run import ServiceContext, StartupError, main, run_until_stopped
from trimtab.rpc.server import RpcServer
from trimtab.store.client import Store


class DemoSettings(ServiceSettings):
    """Settings of a process under test."""

    mode: Literal[
        "serve", "startup-error", "grouped-error", "defect", "return", "stuck", "store", "write", "dying-loop"
    ] = "serve"
    state_file: Path = Path("state")
    store_wait_s: float = 0.2


async def serve(settings: DemoSettings, context: ServiceContext) -> None:
    if settings.mode == "startup-error":
        raise StartupError("no such\nthing")
    if settings.mode == "grouped-error":
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    if settings.mode == "defect":
        raise KeyError("a defect")
    if settings.mode == "return":
        return
    if settings.mode == "stuck":
        await context.stopping.wait()
        await asyncio.sleep(600)
    if settings.mode == "store":
        store = await Store.connect(settings.store_url, wait_s=settings.store_wait_s, stopping=context.stopping)
        await store.check_schema()
        await store.close()
    if settings.mode == "write":
        settings.state_file.write_text("x")
    server = RpcServer(settings, context)
    server.add(
        collector_pb2_grpc.add_CollectorServiceServicer_to_server,
        collector_pb2_grpc.CollectorServiceServicer(),
        "trimtab.collector.v1.CollectorService",
    )
    await server.start()
    loops = [tick(context)]
    if settings.mode == "dying-loop":
        loops.append(fail())
    await run_until_stopped(context, *loops)
    await server.drain()


async def tick(context: ServiceContext) -> None:
    while not await context.pause(0.01):
        pass


async def fail() -> None:
    raise StartupError("from a task")


if __name__ == "__main__":
    main("demo", DemoSettings, serve)
