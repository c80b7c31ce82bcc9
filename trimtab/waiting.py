"""Waiting that a stop cuts short."""

import asyncio


async def stopped_within(stopping: asyncio.Event | None, seconds: float) -> bool:
    """Sleep for ``seconds``, at most until ``stopping`` is set; True when it is."""
    if stopping is None:
        await asyncio.sleep(max(0.0, seconds))
        return False
    try:
        await asyncio.wait_for(stopping.wait(), max(0.0, seconds))
    except TimeoutError:
        return False
    return True
