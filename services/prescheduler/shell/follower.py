"""Sends the leader's cycles to the watchers of every process, by reading the stream that the leader appends to."""

from collections.abc import Callable

import structlog

from prescheduler.shell.records import Records
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.rpc.run import ServiceContext
from trimtab.store.errors import StoreUnavailable
from trimtab.store.records import Refused

log = structlog.get_logger(__name__)

POLL_S = 0.5
_BATCH = 100


async def follow_cycles(
    records: Records, publish: Callable[[scheduler_pb2.Cycle], None], context: ServiceContext
) -> None:
    """Publish every cycle appended from now on, until the service stops."""
    position: str | None = None
    while True:
        try:
            if position is None:
                newest = await records.cycles.read_last(1)
                position = newest[-1][0] if newest else "0"
            for entry_id, cycle in await records.cycles.read_after(position, _BATCH):
                if isinstance(cycle, Refused):
                    log.warning("a stored cycle is refused, watchers do not see it", why=str(cycle))
                else:
                    publish(cycle)
                position = entry_id
        except StoreUnavailable as error:
            log.debug("cycles not read", error=str(error))
        if await context.pause(POLL_S):
            return
