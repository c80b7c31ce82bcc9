"""Notices of writes to the store, in place of polling.

A notice is only a hint: it may come twice, late, or not at all while the store is away. A process that waits for one
has to read by itself from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from trimtab.store.client import Store
from trimtab.tasks import stopped_within

log = structlog.get_logger(__name__)

_LISTEN_S = 1.0
_BACKOFF_S = 0.5


async def follow_news(store: Store, channel: str, on_news: Callable[[], None], *, stopping: asyncio.Event) -> None:
    """Call ``on_news`` for every message on ``channel`` until ``stopping``; after an outage it subscribes again."""
    listening = True
    while not stopping.is_set():
        try:
            await _listen(store, channel, on_news, stopping)
        except (RedisError, OSError) as error:
            if listening:
                log.info("no news from the store for now", channel=channel, error=str(error))
            listening = False
            await stopped_within(stopping, _BACKOFF_S)
        else:
            listening = True


async def _listen(store: Store, channel: str, on_news: Callable[[], None], stopping: asyncio.Event) -> None:
    subscription = store.redis.pubsub(ignore_subscribe_messages=True)
    try:
        await subscription.subscribe(channel)
        while not stopping.is_set():
            if await subscription.get_message(timeout=_LISTEN_S) is not None:
                on_news()
    finally:
        with suppress(RedisError, OSError):
            await subscription.aclose()  # type: ignore[no-untyped-call]
