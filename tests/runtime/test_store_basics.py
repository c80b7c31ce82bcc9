from trimtab.store.client import Store


async def test_store_round_trip(store: Store) -> None:
    await store.redis.set("k", b"v")
    assert await store.redis.get("k") == b"v"
