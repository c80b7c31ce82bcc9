"""The connection to the store: bounded in time, and back after the store was."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.exceptions

from trimtab.errors import StartupError
from trimtab.store import keys
from trimtab.store.client import CALL_TIMEOUT_S, Store
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.errors import StoreUnavailable
from trimtab.store.upgrades import UPGRADES


@pytest.fixture
async def connected(own_store: EmbeddedStore) -> Any:
    store = await Store.connect(own_store.url, wait_s=5)
    yield store
    await store.close()


async def test_values_are_bytes(store: Store) -> None:
    await store.redis.hset("h", "field", b"\x00\xff")
    assert await store.redis.hgetall("h") == {b"field": b"\x00\xff"}


async def test_a_refused_command_is_no_outage(store: Store) -> None:
    await store.redis.set("s", "text")
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        await store.redis.hget("s", "field")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [("maxmemory", "1", "maxmemory"), ("min-replicas-to-write", "3", "NOREPLICAS")],
)
async def test_a_store_that_takes_no_writes_is_an_outage(
    own_store: EmbeddedStore, connected: Store, setting: str, value: str, words: str
) -> None:
    await connected.redis.config_set(setting, value)
    script = connected.redis.register_script("return redis.call('SET', KEYS[1], 'x')")
    for write in (
        lambda: connected.redis.set("k", "x"),
        lambda: connected.redis.pipeline().set("k", "x").execute(),
        lambda: script(keys=["k"]),
    ):
        with pytest.raises(StoreUnavailable, match=rf"takes no writes: .*{words}"):
            await write()
    assert await connected.redis.get("k") is None, "reading goes on"


async def test_every_kind_of_call_works_again_after_a_crash(own_store: EmbeddedStore, connected: Store) -> None:
    """SIGKILL, restart on the same port: no dead pooled connection is handed out, no write was lost."""
    script = connected.redis.register_script("return redis.call('INCR', KEYS[1])")
    pipeline = connected.redis.pipeline()
    # Twenty connections in the pool, all of which die.
    await asyncio.gather(*(connected.redis.hset("h", str(index), b"x") for index in range(20)))
    assert await script(keys=["counter"]) == 1
    own_store.kill()
    for call in (
        lambda: connected.redis.get("k"),
        lambda: script(keys=["counter"]),
        lambda: connected.redis.pipeline().get("k").execute(),
        connected.ping,
    ):
        with pytest.raises(StoreUnavailable):
            await call()
    own_store.start()
    assert await asyncio.gather(*(connected.redis.hlen("h") for _ in range(20))) == [20] * 20
    assert await script(keys=["counter"]) == 2, "the script is loaded again"
    pipeline.get("counter")
    assert await pipeline.execute() == [b"2"]


async def test_a_store_that_hangs_costs_no_call_more_than_its_bound(own_store: EmbeddedStore, connected: Store) -> None:
    await connected.ping()
    own_store.suspend()
    try:
        started = time.monotonic()
        results = await asyncio.gather(
            connected.redis.get("k"),
            connected.redis.pipeline().get("k").execute(),
            *(connected.redis.get("k") for _ in range(10)),
            return_exceptions=True,
        )
        took_s = time.monotonic() - started
    finally:
        own_store.resume()
    assert [type(result) for result in results] == [StoreUnavailable] * 12
    assert took_s < CALL_TIMEOUT_S + 0.5
    assert await connected.redis.get("k") is None


async def test_use_during_a_restart_loses_no_acknowledged_write(
    own_store: EmbeddedStore, connected: Store, eventually: Callable[..., Awaitable[object]]
) -> None:
    acknowledged: list[int] = []
    stop = asyncio.Event()

    async def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                await connected.redis.sadd("written", number)
            except StoreUnavailable:
                await asyncio.sleep(0.01)
            else:
                acknowledged.append(number)

    writer = asyncio.create_task(write())
    await eventually(lambda: len(acknowledged) >= 50, what="fifty writes")
    own_store.kill()
    before = len(acknowledged)
    await asyncio.sleep(0.1)
    await asyncio.to_thread(own_store.start)
    await eventually(lambda: len(acknowledged) >= before + 50, what="fifty more writes after the restart")
    stop.set()
    await writer
    kept = {int(member) for member in await connected.redis.smembers("written")}
    assert before > 0
    assert set(acknowledged) <= kept


async def test_a_command_that_broke_is_not_sent_again() -> None:
    """Whether it was carried out cannot be known; an LPUSH that is repeated pushes twice."""
    sent = 0

    async def answer_then_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while line := await reader.readline():
            if line.strip() == b"LPUSH":
                sent += 1
                break
            if line.strip() in (b"SETNAME", b"SETINFO"):
                writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(answer_then_hang_up, "127.0.0.1", 0)
    store = Store(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    with pytest.raises(StoreUnavailable, match=r"(?i)connection"):
        await store.redis.lpush("list", "x")
    assert sent == 1
    await store.close()
    server.close()


async def test_connect_waits_for_a_store_that_comes_later(own_store: EmbeddedStore) -> None:
    own_store.stop()
    waiting = asyncio.create_task(Store.connect(own_store.url))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await asyncio.to_thread(own_store.start)
    store = await asyncio.wait_for(waiting, 30)
    await store.ping()
    await store.close()


async def test_connect_gives_up_after_its_wait(free_port: int) -> None:
    with pytest.raises(StoreUnavailable, match=rf"redis://u:\*\*\*@127.0.0.1:{free_port}/0"):
        await Store.connect(f"redis://u:secret@127.0.0.1:{free_port}/0", wait_s=0.3)


async def test_a_stop_ends_the_wait_for_the_store(free_port: int) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stopping.set)
    with pytest.raises(StoreUnavailable, match="stopped"):
        await asyncio.wait_for(Store.connect(f"redis://127.0.0.1:{free_port}/0", stopping=stopping), 30)


async def test_wrong_credentials_are_said_to_be_so(store_url: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"(?i)credentials|password|auth"):
        await Store.connect(store_url.replace("redis://", "redis://:wrong@"), wait_s=0.1)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:port/0", "nonsense://x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="store URL"):
        Store(url)


async def test_schema_is_claimed_once_and_then_accepted(store: Store) -> None:
    await store.check_schema()
    await store.check_schema()
    assert await store.redis.get(keys.SCHEMA) == str(keys.SCHEMA_VERSION).encode()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("0", "older schema 0"),
        (str(keys.SCHEMA_VERSION + 1), "newer schema"),
        ("garbage", "no schema version"),
    ],
)
async def test_another_schema_is_refused_in_one_line(store: Store, found: str, words: str) -> None:
    await store.redis.set(keys.SCHEMA, found)
    with pytest.raises(StartupError, match=words) as caught:
        await store.check_schema()
    assert "\n" not in str(caught.value)
    assert await store.redis.get(keys.SCHEMA) == found.encode()


async def test_an_older_store_is_upgraded_step_by_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def step(name: str) -> Callable[[object], Awaitable[None]]:
        async def run(redis: object) -> None:
            assert redis is store.redis
            done.append(f"{name} at {await store.redis.get(keys.SCHEMA)!r}")

        return run

    monkeypatch.setattr(keys, "SCHEMA_VERSION", 9)
    monkeypatch.setattr("trimtab.store.client.UPGRADES", {7: (step("a"), step("b")), 8: (step("c"),)})
    await store.redis.set(keys.SCHEMA, "7")
    await store.check_schema()
    assert done == ["a at b'7'", "b at b'7'", "c at b'8'"], "a step is done before the number says so"
    assert await store.redis.get(keys.SCHEMA) == b"9"


async def test_an_upgrade_that_is_broken_off_is_done_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    async def fails_once(_redis: object) -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            raise StoreUnavailable("gone")

    monkeypatch.setattr(keys, "SCHEMA_VERSION", 8)
    monkeypatch.setattr("trimtab.store.client.UPGRADES", {7: (fails_once,)})
    await store.redis.set(keys.SCHEMA, "7")
    with pytest.raises(StoreUnavailable):
        await store.check_schema()
    assert await store.redis.get(keys.SCHEMA) == b"7"
    await store.check_schema()
    assert (await store.redis.get(keys.SCHEMA), runs) == (b"8", [0, 1])


async def test_processes_that_start_at_once_upgrade_one_version_each_time(store: Store) -> None:
    await store.redis.set(keys.SCHEMA, "1")
    await asyncio.gather(*(store.check_schema() for _ in range(8)))
    assert await store.redis.get(keys.SCHEMA) == str(keys.SCHEMA_VERSION).encode()


async def test_a_reader_takes_an_older_store_as_it_is(store: Store) -> None:
    await store.redis.set(keys.SCHEMA, "1")
    await store.check_schema(upgrade=False)
    assert await store.redis.get(keys.SCHEMA) == b"1"
    await store.redis.set(keys.SCHEMA, str(keys.SCHEMA_VERSION + 1))
    with pytest.raises(StartupError, match="newer schema"):
        await store.check_schema(upgrade=False)


async def test_every_schema_since_the_first_can_be_upgraded() -> None:
    assert sorted(UPGRADES) == list(range(1, keys.SCHEMA_VERSION))


async def test_many_tasks_share_one_store(store: Store) -> None:
    """More at a time than there are connections, and not so many that a busy machine cannot answer them in time."""
    for _ in range(10):
        await asyncio.gather(*(store.redis.incr("n") for _ in range(100)))
    assert await store.redis.get("n") == b"1000"
