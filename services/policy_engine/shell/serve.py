"""The policy engine as a process: what `python -m policy_engine` runs."""

from __future__ import annotations

import structlog

from policy_engine.shell.bootstrap import apply_directory, read_directory
from policy_engine.shell.engine import Engine
from policy_engine.shell.servicer import PolicyServicer
from policy_engine.shell.settings import EngineSettings
from trimtab.api.policy.v1 import policy_pb2_grpc
from trimtab.rpc.run import ServiceContext, run_until_stopped
from trimtab.rpc.server import RpcServer
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import StoreUnavailable
from trimtab.store.lease import keep_lease
from trimtab.store.news import follow_news

log = structlog.get_logger(__name__)

SERVICE = "trimtab.policy.v1.PolicyService"


async def serve(settings: EngineSettings, context: ServiceContext) -> None:
    """Wait for the store, serve and run until the stop, drain."""
    resources = read_directory(settings.bootstrap_dir) if settings.bootstrap_dir is not None else []
    try:
        store = await Store.connect(settings.store_url, stopping=context.stopping)
    except StoreUnavailable:
        if context.stopping.is_set():
            return
        raise
    try:
        await store.check_schema()
        engine = Engine(settings, context, store)
        server = RpcServer(settings, context)
        servicer = PolicyServicer(engine)
        server.add(policy_pb2_grpc.add_PolicyServiceServicer_to_server, servicer, SERVICE)
        await server.start()
        log.info("serving", listen=settings.listen, actuators=sorted(settings.actuators))
        await run_until_stopped(
            context,
            engine.clock.run(context.stopping),
            keep_lease(engine.lease, context.stopping, on_change=engine.lease_changed),
            engine.fleet.run(context.stopping),
            follow_news(store, keys.windows_written(), engine.windows_written, stopping=context.stopping),
            engine.log.run(),
            engine.run(),
            apply_directory(resources, servicer, context),
        )
        await server.drain()
        if engine.lease.held:
            await engine.lease.release()
    finally:
        await store.close()
