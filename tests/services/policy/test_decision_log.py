"""Decision records over the real store: kept by subject, listed in order, followed by every process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from policy_engine.core.shared.retention import RetentionLimits
from policy_engine.shell.records import NEWS_KEPT, DecisionLog, with_outcome
from trimtab.api.policy.v1 import decision_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.lease import fenced_write

LIMITS = RetentionLimits(per_subject=20, in_all=200, deleted_subjects=2)
PENDING = decision_pb2.OUTCOME_STATE_PENDING
NONE = decision_pb2.OUTCOME_STATE_NONE


def decision(number: int, subject: str, *, moves: tuple[str, ...] = (), state: int = NONE) -> decision_pb2.Decision:
    record = decision_pb2.Decision(decision_id=f"d-{number:012x}-0", subject=subject, reason=f"the {number}th")
    for service in moves:
        record.counts.add(service=service, before=1, after=2)
    return with_outcome(record, state, now_s=1.0)


class Process:
    """The log of one process, and writes as the leader makes them."""

    def __init__(self, store: Store, limits: RetentionLimits = LIMITS) -> None:
        self.store = store
        self.stopping = asyncio.Event()
        self.log = DecisionLog(store, limits=limits, stopping=self.stopping, now=lambda: 0.0)

    async def write(self, *records: decision_pb2.Decision) -> None:
        for start in range(0, max(1, len(records)), 100):
            portion = records[start : start + 100]
            await fenced_write(self.store, keys.POLICY_ENGINE, 1, self.log.commands(portion))
            self.log.wrote(portion)

    def numbers(self, subject: str = "", *, count: int = 1000, before: str = "") -> list[int]:
        found = self.log.newest(subject=subject, count=count, before=before)
        return [int(record.decision_id[2:14], 16) for record in found]


async def stored(store: Store) -> set[int]:
    return {int(name[2:14], 16) for name in await store.redis.hkeys(keys.decision_index())}


async def until(condition: Callable[[], bool]) -> None:
    give_up = asyncio.get_running_loop().time() + 20
    while True:
        if condition():
            return
        assert asyncio.get_running_loop().time() < give_up
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def following(process: Process) -> AsyncIterator[None]:
    task = asyncio.create_task(process.log.run())
    try:
        yield
    finally:
        process.stopping.set()
        await asyncio.wait_for(task, 30)


async def test_a_noisy_subject_evicts_nobody_elses_decisions(store: Store) -> None:
    leader = Process(store)
    await leader.log.load()
    await leader.write(decision(1, "quiet"), decision(2, "quiet", state=PENDING))
    await leader.write(*(decision(number, "noisy") for number in range(3, 1500)))
    await leader.write()
    assert leader.numbers("quiet") == [2, 1]
    assert leader.numbers("noisy") == list(range(1499, 1479, -1))
    assert await stored(store) == {1, 2, *range(1480, 1500)}
    restarted = Process(store)
    await restarted.log.load()
    assert restarted.numbers() == leader.numbers()
    assert [record.decision_id for record in restarted.log.pending_of("quiet")] == ["d-000000000002-0"]


async def test_many_busy_subjects_share_the_limit_on_all(store: Store) -> None:
    leader = Process(store, RetentionLimits(per_subject=20, in_all=50))
    await leader.log.load()
    await leader.write(decision(0, "quiet"))
    await leader.write(*(decision(number, f"busy-{number % 7}") for number in range(1, 400)))
    await leader.write()
    assert leader.numbers("quiet") == [0]
    assert [len(leader.numbers(f"busy-{index}")) for index in range(7)] == [7] * 7
    assert len(await stored(store)) == 50


async def test_deleted_subjects_keep_theirs_until_others_were_deleted(store: Store) -> None:
    leader = Process(store)
    await leader.log.load()
    leader.log.set_live({"chat", "old", "mid", "new"}, leading=True)
    for number, subject in enumerate(("chat", "old", "mid", "new", "old", "mid", "new")):
        await leader.write(decision(number, subject))
    leader.log.set_live({"chat"}, leading=True)
    await leader.write()
    assert (leader.numbers("old"), leader.numbers("mid"), leader.numbers("new")) == ([], [5, 2], [6, 3])
    assert leader.numbers("chat") == [0], "one that exists is not counted among them, however old"
    assert await stored(store) == {0, 2, 3, 5, 6}


async def test_pages_go_through_all_of_a_subject_though_records_are_dropped_between(store: Store) -> None:
    leader = Process(store)
    await leader.log.load()
    await leader.write(*(decision(number, "pool", moves=("chat",) if number % 2 else ()) for number in range(20)))
    assert leader.numbers("chat") == list(range(19, 0, -2)), "a service's list has what moved it"
    first = leader.numbers("pool", count=15)
    assert first == list(range(19, 4, -1))
    await leader.write(*(decision(number, "pool") for number in range(20, 38)))
    assert leader.numbers("pool", count=15, before=f"d-{first[-1]:012x}-0") == [], "they are gone, and no page repeats"
    assert leader.numbers("pool", count=4, before="d-000000000014-0") == [19, 18]
    assert leader.numbers("chat") == [19]
    assert leader.numbers(count=3) == [37, 36, 35]


async def test_what_an_older_release_stored_is_listed(store: Store) -> None:
    """It kept the newest of all subjects together under the same two keys."""
    for number in range(30):
        record = decision(number, "chat" if number < 2 else "pool", state=PENDING if number == 0 else NONE)
        raw = record.SerializeToString()
        await store.redis.hset(keys.decision_index(), record.decision_id, raw)
        await store.redis.xadd(keys.decisions(), {"m": raw}, maxlen=10, approximate=False)
    leader = Process(store)
    await leader.log.load()
    assert leader.numbers("chat") == [1, 0]
    assert leader.numbers("pool") == list(range(29, 9, -1))
    assert len(leader.log.pending_of("chat")) == 1
    await leader.write(decision(30, "chat"))
    assert await stored(store) == {0, 1, *range(10, 31)}


async def test_a_follower_shows_what_the_leader_writes_and_deletes_nothing(store: Store) -> None:
    leader, follower = Process(store), Process(store)
    await leader.log.load()
    async with following(follower):
        await leader.write(*(decision(number, "pool") for number in range(25)))
        await until(lambda: follower.numbers() == list(range(24, 4, -1)))
        await leader.write(with_outcome(decision(24, "pool"), decision_pb2.OUTCOME_STATE_FAILED, now_s=2.0))
        failed = decision_pb2.OUTCOME_STATE_FAILED
        await until(lambda: follower.log.newest(count=1)[0].outcome.state == failed)
        follower.log.set_live({"pool"}, leading=False)
        assert follower.log.commands([]) == []


async def test_a_process_that_fell_behind_the_news_misses_nothing(store: Store) -> None:
    limits = RetentionLimits(per_subject=2000, in_all=5000)
    leader, follower = Process(store, limits), Process(store, limits)
    await leader.log.load()
    await follower.log.load()
    await leader.write(*(decision(number, "pool") for number in range(NEWS_KEPT + 200)))
    assert not await follower.log.follow(), "the stream is full of what it has not seen: some may be gone"
    assert len(follower.numbers(count=5000)) == NEWS_KEPT
    await follower.log.load()
    assert follower.numbers(count=5000) == list(range(NEWS_KEPT + 199, -1, -1))
    await leader.write(decision(NEWS_KEPT + 200, "pool"))
    assert await follower.log.follow()
    assert follower.numbers(count=1) == [NEWS_KEPT + 200]


async def test_watchers_get_what_a_process_found_only_when_it_read_again(store: Store) -> None:
    leader, follower = Process(store), Process(store)
    await leader.log.load()
    await leader.write(decision(1, "pool", state=PENDING), decision(2, "pool"))
    await follower.log.load()
    seen: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def read() -> None:
        async for message in follower.log.hub.watch():
            if message.HasField("decision"):
                seen.put_nowait((message.decision.decision_id, message.decision.outcome.state))

    reading = asyncio.create_task(read())
    await until(lambda: follower.log.hub.readers == 1)
    done = with_outcome(decision(1, "pool"), decision_pb2.OUTCOME_STATE_SUCCEEDED, now_s=2.0)
    await leader.write(done, decision(3, "pool"))
    await follower.log.load()
    async with asyncio.timeout(20):
        assert [await seen.get() for _ in range(2)] == [
            ("d-000000000001-0", decision_pb2.OUTCOME_STATE_SUCCEEDED),
            ("d-000000000003-0", NONE),
        ]
    follower.stopping.set()
    await asyncio.wait_for(reading, 30)


async def test_a_stream_that_ends_in_rubbish_keeps_no_leader_from_its_records(store: Store) -> None:
    first = Process(store)
    await first.log.load()
    await first.write(decision(1, "chat"))
    await store.redis.xadd(keys.decisions(), {"other": b"x"})
    leader = Process(store)
    await leader.log.load()
    assert leader.numbers() == [1]
    async with following(leader):
        await leader.write(decision(2, "chat"))
        await until(lambda: leader.numbers() == [2, 1])


async def test_a_record_that_does_not_parse_is_left_out_and_stays(store: Store) -> None:
    first = Process(store)
    await first.log.load()
    await first.write(decision(1, "chat"))
    await store.redis.hset(keys.decision_index(), "d-000000000002-0", b"\xff\xff")
    leader = Process(store)
    await leader.log.load()
    assert leader.numbers() == [1]
    await leader.write(decision(3, "chat"))
    assert await stored(store) == {1, 2, 3}


@pytest.mark.parametrize("subject", ["", "pool"])
async def test_a_listing_costs_what_it_returns(store: Store, subject: str) -> None:
    """One page of one subject beside 50 others is found without a look at every record."""
    process = Process(store, RetentionLimits(per_subject=1000, in_all=100_000))
    log = process.log
    log.wrote(decision(number, f"s-{number % 50}") for number in range(5000))
    log.wrote(decision(number, "pool") for number in range(5000, 5010))

    class Counting(dict[str, object]):
        reads = 0

        def __getitem__(self, key: str) -> object:
            Counting.reads += 1
            return super().__getitem__(key)

    log._index._records = Counting(log._index._records)
    assert len(log.newest(subject=subject, count=5)) == 5
    assert Counting.reads == 5
