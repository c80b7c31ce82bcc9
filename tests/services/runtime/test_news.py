"""News over the store's channels: heard at once, and again after the store was away."""

import asyncio
from contextlib import suppress

from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.errors import StoreUnavailable
from trimtab.store.news import follow_news


async def _say_until_heard(store: Store, heard: asyncio.Event) -> None:
    """Published again and again: a message that comes before the subscription is nobody's."""
    async with asyncio.timeout(30):
        while not heard.is_set():
            with suppress(StoreUnavailable):
                await store.redis.publish(keys.windows_written(), "1.000")
            await asyncio.sleep(0.05)


async def test_news_is_heard_and_heard_again_after_the_store_was_killed(own_store: EmbeddedStore) -> None:
    store = await Store.connect(own_store.url)
    stopping, heard = asyncio.Event(), asyncio.Event()
    following = asyncio.create_task(follow_news(store, keys.windows_written(), heard.set, stopping=stopping))
    try:
        await _say_until_heard(store, heard)
        own_store.kill()
        await asyncio.sleep(0.2)
        own_store.start()
        heard.clear()
        await _say_until_heard(store, heard)
        heard.clear()
        async with asyncio.timeout(30):
            await store.redis.publish(keys.windows_written(), "2.000")
            await heard.wait()
    finally:
        stopping.set()
        await asyncio.wait_for(following, 30)
        await store.close()
    assert heard.is_set()


async def test_what_is_said_on_another_channel_is_no_news(own_store: EmbeddedStore) -> None:
    store = await Store.connect(own_store.url)
    stopping, heard, other = asyncio.Event(), asyncio.Event(), asyncio.Event()
    following = asyncio.gather(
        follow_news(store, keys.windows_written(), heard.set, stopping=stopping),
        follow_news(store, keys.demand(), other.set, stopping=stopping),
    )
    try:
        async with asyncio.timeout(30):
            while not other.is_set():
                await store.redis.publish(keys.demand(), "x")
                await asyncio.sleep(0.05)
        assert not heard.is_set()
    finally:
        stopping.set()
        await asyncio.wait_for(following, 30)
        await store.close()
