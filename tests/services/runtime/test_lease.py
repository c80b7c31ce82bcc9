"""One leader at a time, and no write of a former one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.errors import FencedOff, StoreUnavailable
from trimtab.store.lease import StoreLease, fenced_write, keep_lease, suspend_aware_monotonic

NAME = keys.POLICY_ENGINE
Eventually = Callable[..., Awaitable[object]]


class HandClock:
    """A monotonic clock that moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def expire(store: Store) -> None:
    """The store's view once the lease's time is over."""
    await store.redis.delete(keys.lease(NAME))


async def test_one_holder_and_the_same_token_while_it_renews(store: Store) -> None:
    first, second = StoreLease(store, NAME, "a"), StoreLease(store, NAME, "b")
    assert await first.acquire_or_renew() == 1
    assert await second.acquire_or_renew() is None
    assert second.held_by_other
    assert await first.acquire_or_renew() == 1
    assert not first.held_by_other
    assert (first.held, second.held) == (True, False)
    assert (first.token, second.token) == (1, None)


async def test_release_lets_another_in_at_once_with_a_higher_token(store: Store) -> None:
    first, second = StoreLease(store, NAME, "a"), StoreLease(store, NAME, "b")
    await first.acquire_or_renew()
    await first.release()
    assert not first.held
    assert await second.acquire_or_renew() == 2
    await first.release()
    assert await second.acquire_or_renew() == 2, "a former holder cannot release what is another's"


async def test_a_candidate_that_restarts_is_not_taken_for_its_former_self(store: Store) -> None:
    await StoreLease(store, NAME, "a-1").acquire_or_renew()
    assert await StoreLease(store, NAME, "a-2").acquire_or_renew() is None


async def test_a_write_that_comes_late_is_refused_under_the_next_token_of_the_same_holder(store: Store) -> None:
    lease, other = StoreLease(store, NAME, "a"), StoreLease(store, NAME, "b")
    first = await lease.acquire_or_renew()
    lease.renew_token()
    assert not lease.held
    assert await other.acquire_or_renew() is None, "it is still its own"
    second = await lease.acquire_or_renew()
    assert (first, second) == (1, 2)
    assert await lease.acquire_or_renew() == second
    with pytest.raises(FencedOff):
        await fenced_write(store, NAME, first, [("SET", f"t:{{{NAME}}}:x", "late")])


async def test_a_lease_runs_out_in_the_store(store: Store) -> None:
    await StoreLease(store, NAME, "a", ttl_s=0.1).acquire_or_renew()
    await asyncio.sleep(0.15)
    assert await StoreLease(store, NAME, "b").acquire_or_renew() == 2


async def test_a_stalled_process_knows_that_its_lease_is_over(store: Store) -> None:
    """It stops for longer than the lease; another takes over; its first look at the clock tells it."""
    clock = HandClock()
    stalled = StoreLease(store, NAME, "stalled", ttl_s=3.0, monotonic=clock)
    token = await stalled.acquire_or_renew()
    assert token == 1
    clock.now += 2.9
    assert stalled.held
    clock.now += 0.2
    assert not stalled.held
    assert stalled.token is None
    assert stalled.left_s() == 0
    await expire(store)
    assert await StoreLease(store, NAME, "other").acquire_or_renew() == 2
    with pytest.raises(FencedOff, match=r"token 1 .* 2 is newer"):
        await fenced_write(store, NAME, token, [("HSET", keys.desired_pools(), "p", b"old")])
    assert await store.redis.hget(keys.desired_pools(), "p") is None
    assert await stalled.acquire_or_renew() is None


async def test_an_answer_slower_than_the_lease_grants_nothing(store: Store) -> None:
    times: Iterator[float] = iter([10.0, *[14.0] * 10])
    lease = StoreLease(store, NAME, "slow", ttl_s=3.0, monotonic=lambda: next(times))
    assert await lease.acquire_or_renew() is None
    assert not lease.held
    assert not lease.held_by_other, "it is free, or its own still"


async def test_a_renewal_asked_for_before_a_write_was_lost_does_not_keep_that_writes_token(store: Store) -> None:
    lost: list[str] = ["a write"]

    def register_script(script: str) -> Callable[..., Awaitable[object]]:
        run = store.redis.register_script(script)

        async def answered(**call: Any) -> object:
            reply = await run(**call)
            if lost and lease.held:
                lost.clear()
                lease.renew_token()
            return reply

        return answered

    slow: Any = SimpleNamespace(redis=SimpleNamespace(register_script=register_script))
    lease = StoreLease(slow, NAME, "a")
    assert await lease.acquire_or_renew() == 1
    assert await lease.acquire_or_renew() == 2
    assert not lost
    with pytest.raises(FencedOff):
        await fenced_write(store, NAME, 1, [("SET", f"t:{{{NAME}}}:x", "late")])


async def test_two_leaders_write_in_turns_and_never_over_each_other(store: Store) -> None:
    """Every accepted write carries a token at least as high as all accepted before it."""

    async def lead(owner: str, rounds: int) -> None:
        lease = StoreLease(store, NAME, owner, ttl_s=0.02)
        for number in range(rounds):
            token = await lease.acquire_or_renew()
            if token is None:
                await asyncio.sleep(0.003)
                continue
            # Every third time it stalls between looking and writing.
            await asyncio.sleep(0.05 if number % 3 == 0 else 0)
            try:
                await fenced_write(store, NAME, token, [("RPUSH", keys.owned(NAME, "log"), f"{token}:{owner}")])
            except FencedOff:
                refused.append(token)

    refused: list[int] = []
    await asyncio.gather(*(lead(owner, 40) for owner in ("a", "b", "c")))
    log = [entry.decode().split(":") for entry in await store.redis.lrange(keys.owned(NAME, "log"), 0, -1)]
    tokens = [int(token) for token, _ in log]
    assert tokens == sorted(tokens)
    assert len({tuple(entry) for entry in log}) == len(set(tokens)), "one owner for each token"
    assert refused, "the stalls were long enough to be fenced off"


async def test_tokens_survive_a_crash_of_the_store(own_store: EmbeddedStore) -> None:
    store = await Store.connect(own_store.url, wait_s=5)
    lease = StoreLease(store, NAME, "a", ttl_s=30)
    assert await lease.acquire_or_renew() == 1
    own_store.kill()
    with pytest.raises(StoreUnavailable):
        await lease.acquire_or_renew()
    assert lease.held, "what was granted lasts its time"
    await asyncio.to_thread(own_store.start)
    assert await lease.acquire_or_renew() == 1
    await lease.release()
    assert await StoreLease(store, NAME, "b").acquire_or_renew() == 2
    await store.close()


async def test_a_store_that_forgot_its_tokens_does_not_hand_an_old_one_out_again(store: Store) -> None:
    lease = StoreLease(store, NAME, "a")
    for _ in range(3):
        await lease.acquire_or_renew()
        await lease.release()
    await store.redis.delete(keys.lease_token(NAME))
    assert await lease.acquire_or_renew() == 4


async def test_a_fenced_write_repairs_a_counter_that_is_behind(store: Store) -> None:
    await fenced_write(store, NAME, 7, [("HSET", keys.desired_pools(), "p", b"x")])
    assert await StoreLease(store, NAME, "b").acquire_or_renew() == 8


async def test_fenced_write_runs_all_and_gives_the_replies(store: Store) -> None:
    key = keys.desired_pools()
    replies = await fenced_write(
        store,
        NAME,
        1,
        [
            ("HSET", key, "p", b"\x00\xff\r\n"),
            ("HGET", key, "p"),
            ("HGET", key, "none"),
            ("XADD", keys.decisions(), "MAXLEN", 10, "*", "m", b""),
            ("HDEL", key, "p"),
        ],
    )
    assert replies[:3] == [1, b"\x00\xff\r\n", None]
    assert replies[4] == 1
    assert await store.redis.xlen(keys.decisions()) == 1


async def test_fenced_write_takes_no_key_of_another_owner(store: Store) -> None:
    with pytest.raises(ValueError, match="is not of"):
        await fenced_write(store, NAME, 1, [("HSET", keys.cycles(), "p", b"x")])
    with pytest.raises(ValueError, match="words"):
        await fenced_write(store, NAME, 1, [("PING",)])
    with pytest.raises(ValueError, match="words"):
        await fenced_write(store, NAME, 1, [("HSET", keys.desired_pools(), *["x"] * 5000)])
    assert await fenced_write(store, NAME, 1, []) == []


async def test_run_acquires_renews_and_releases(store: Store, eventually: Eventually) -> None:
    told: list[int | None] = []
    stopping = asyncio.Event()
    clock = suspend_aware_monotonic
    lease = StoreLease(store, NAME, "a", ttl_s=3.0)
    running = asyncio.create_task(keep_lease(lease, stopping, on_change=told.append))
    await eventually(lambda: told == [1])
    first_end_s = clock() + lease.left_s()
    await eventually(lambda: clock() + lease.left_s() > first_end_s + 0.5, what="a renewal beyond its first time")
    assert lease.held
    stopping.set()
    await asyncio.wait_for(running, 30)
    assert told == [1, None]
    assert await store.redis.exists(keys.lease(NAME)) == 0


async def test_run_tells_the_loss_while_the_store_is_away_and_comes_back(
    own_store: EmbeddedStore, eventually: Eventually
) -> None:
    store = await Store.connect(own_store.url, wait_s=5)
    told: list[int | None] = []
    stopping = asyncio.Event()
    running = asyncio.create_task(keep_lease(StoreLease(store, NAME, "a", ttl_s=1.0), stopping, on_change=told.append))
    await eventually(lambda: told == [1])
    own_store.kill()
    await eventually(lambda: told == [1, None], what="the loss")
    await asyncio.to_thread(own_store.start)
    await eventually(lambda: len(told) >= 3, what="the lease after the restart")
    assert told[2] in (1, 2), "1 when the store's expiry had not passed"
    stopping.set()
    await asyncio.wait_for(running, 30)
    await store.close()


async def test_the_loss_is_told_on_time_when_the_store_hangs(own_store: EmbeddedStore, eventually: Eventually) -> None:
    store = await Store.connect(own_store.url, wait_s=5)
    told: list[int | None] = []
    running = asyncio.create_task(
        keep_lease(StoreLease(store, NAME, "a", ttl_s=0.3), asyncio.Event(), on_change=told.append)
    )
    await eventually(lambda: told == [1])
    own_store.suspend()
    await eventually(lambda: told == [1, None], timeout_s=1.8, what="the loss, before the call gives up")
    own_store.resume()
    await eventually(lambda: len(told) >= 3, what="the lease again")
    assert told[:2] == [1, None]
    running.cancel()
    await store.close()


async def test_another_waits_in_line_and_takes_over_from_a_killed_holder(store: Store, eventually: Eventually) -> None:
    told: list[int | None] = []
    holders: list[int | None] = []
    stopping = asyncio.Event()
    killed, waiting_for_it = StoreLease(store, NAME, "killed", ttl_s=1.0), StoreLease(store, NAME, "next", ttl_s=1.0)
    holder = asyncio.create_task(keep_lease(killed, asyncio.Event(), on_change=holders.append))
    await eventually(lambda: holders == [1])
    waiting = asyncio.create_task(keep_lease(waiting_for_it, stopping, on_change=told.append))
    await eventually(lambda: waiting_for_it.held_by_other, what="a refusal")
    assert told == []
    holder.cancel()
    await eventually(lambda: told == [2], what="the take-over")
    stopping.set()
    await asyncio.wait_for(waiting, 30)


def test_the_lease_clock_never_stands_still() -> None:
    first = suspend_aware_monotonic()
    assert suspend_aware_monotonic() >= first


@pytest.mark.parametrize("ttl_s", [0, -1])
async def test_a_lease_without_time_is_refused(store: Store, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        StoreLease(store, NAME, "a", ttl_s=ttl_s)
