"""Several collectors on one store: shares, deaths, joins and leaves, with every count of every server counted once."""

import asyncio
import json
import signal
import sys
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from metrics_collector.core.samples import EncodedSample
from metrics_collector.core.table import SeriesTable
from metrics_collector.shell.archive import Archive
from metrics_collector.shell.serve import _Collector
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.collector.v1 import collector_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.signals import Counter
from trimtab.errors import StartupError
from trimtab.rpc.clients import channel
from trimtab.store import keys
from trimtab.store.embedded import EmbeddedStore
from trimtab.store.observations import signal as signal_of

INTERVAL_S = 0.8
PACE = {"scrape_interval_s": INTERVAL_S, "scrape_timeout_s": 0.5, "window_s": 1.6}
CHAT = pb.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)
LEASE_S = 2.0
"""Where a lease is not to end by itself: longer than this machine stands still."""


class Servers:
    """vLLM servers on ports of their own, each with a token counter that the test starts and freezes."""

    def __init__(self, page: Callable[..., bytes]) -> None:
        self._page = page
        self._started: float | None = None
        self._frozen: float | None = None
        self._running: list[asyncio.Server] = []
        self.scraped: list[float] = []
        self.addresses: list[str] = []

    async def start(self, count: int) -> None:
        for number in range(count):
            server = await asyncio.start_server(self._serve(number), "127.0.0.1", 0)
            self._running.append(server)
            self.addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            self.scraped.append(0.0)

    def run(self) -> None:
        self._started = time.monotonic()

    def freeze(self) -> None:
        self._frozen = time.monotonic()

    def count(self, number: int) -> int:
        """Tokens of a server up to now; each has a rate of its own."""
        if self._started is None:
            return 0
        return int(((self._frozen or time.monotonic()) - self._started) * (100 + number))

    def counts(self) -> dict[str, float]:
        """Of every server, under its replica's name."""
        return {f"chat-{number:02d}": float(self.count(number)) for number in range(len(self.addresses))}

    def _serve(self, number: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    self.scraped[number] = time.monotonic()
                    body = self._page(running=1, generated=self.count(number))
                    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n"
                    writer.write(head % len(body) + body)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        return serve

    def listing(self, path: Path, names: Iterable[int] | None = None) -> Path:
        numbers = range(len(self.addresses)) if names is None else names
        groups = [{"targets": [self.addresses[number]], "labels": labels(f"chat-{number:02d}")} for number in numbers]
        path.write_text(json.dumps(groups))
        return path

    async def stop(self) -> None:
        for server in self._running:
            server.close()


def labels(replica: str) -> dict[str, str]:
    return {"service": "chat", "role": "colocated", "replica": replica}


@pytest.fixture
async def servers(vllm_page) -> AsyncIterator[Servers]:
    made = Servers(vllm_page)
    yield made
    await made.stop()


class Closed(NamedTuple):
    """What one spell of a target has counted up to a window's end."""

    spell: int
    total: float


class Ledger:
    """What the collectors have written: of each target and each spell under one collector, the increase.

    A spell begins when a collector takes the target up. One that ends and begins anew between two writes is two: the
    table counts from zero again.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tables: dict[str, SeriesTable] = {}
        self.notes = 0
        self.closed: dict[int, dict[str, Closed]] = {}
        self.pending: dict[str, dict[str, Closed | None] | None] = {}
        self.own: dict[str, frozenset[str]] = {}
        self._spells: Tally[tuple[str, str]] = Tally()
        self._spell: dict[int, dict[str, int]] = {}
        self._kept: list[SeriesTable] = []
        self._written: dict[tuple[str, str, int], float] = {}
        scrape, write, read_back = _Collector._scrape, Archive.write, Archive._read_back
        close = SeriesTable.close
        ledger = self

        def noted_close(table, target_ids, window):
            found = close(table, target_ids, window)
            # What is written is what stood here then: pages that come before the write are the next round's.
            closed = ledger.closed.setdefault(id(table), {})
            spell = ledger._spell.get(id(table), {})
            closed.update(
                {
                    name: Closed(spell[name], table.total(name, Counter.DECODE_TOKENS) or 0.0)
                    for name in target_ids
                    if name in table and name in spell
                }
            )
            return found

        def noted_scrape(collector, targets, seeds):
            name = collector._settings.collector_name
            ledger.takes_up(name, collector._scraper.table, frozenset(targets))
            ledger.own[name] = frozenset(targets)
            scrape(collector, targets, seeds)

        async def noted_write(archive, partials, samples, **rest):
            taken: list[EncodedSample] = list(samples)
            name = archive._collector
            # One that scrapes nothing yet has no table here.
            closed = ledger.closed.get(id(ledger.tables.get(name)), {})
            totals = {one.replica: closed.get(one.replica) for one in taken}
            ledger.pending[name] = totals if archive._may_write() else None
            return await write(archive, partials, taken, **rest)

        async def noted_read_back(archive, mine, **rest):
            # Everything is written by now; who is killed while it reads has reported all the same.
            totals = ledger.pending.pop(archive._collector, None)
            if totals is not None:
                ledger.note(archive._collector, totals)
            return await read_back(archive, mine, **rest)

        patch.setattr(SeriesTable, "close", noted_close)
        patch.setattr(_Collector, "_scrape", noted_scrape)
        patch.setattr(Archive, "write", noted_write)
        patch.setattr(Archive, "_read_back", noted_read_back)

    def takes_up(self, name: str, table: SeriesTable, targets: frozenset[str]) -> None:
        if self.tables.get(name) is not table:
            self.tables[name] = table
            # Tables are told apart by their ids.
            self._kept.append(table)
        before = self._spell.get(id(table), {})
        self._spells.update((name, target) for target in targets - before.keys())
        self._spell[id(table)] = {target: before.get(target, self._spells[name, target]) for target in targets}

    def note(self, name: str, totals: dict[str, Closed | None]) -> None:
        self.notes += 1
        for target, closed in totals.items():
            # One that was seeded and never closed here has brought nothing.
            spell, total = closed if closed is not None else (self._spells[name, target], 0.0)
            self._written[name, target, spell] = total

    def reported(self) -> dict[str, float]:
        sums: dict[str, float] = {}
        for (_, target, _), total in self._written.items():
            sums[target] = sums.get(target, 0.0) + total
        return dict(sorted(sums.items()))

    def shares(self, *names: str) -> list[frozenset[str]]:
        return [self.own.get(name, frozenset()) for name in names]

    def shared_out(self, targets: int, *names: str) -> bool:
        """Whether each target is scraped by one of ``names``, and each of them scrapes some."""
        shares = self.shares(*names)
        return all(shares) and sum(map(len, shares)) == len(frozenset().union(*shares)) == targets


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return Ledger(monkeypatch)


async def kill(collector, ledger: Ledger, eventually) -> None:
    """As near to SIGKILL as a task comes: nothing is written, no lease given back.

    It comes between two writes: whether one that is cut off has reached the store, nobody but the store can tell.
    """
    notes = ledger.notes
    await eventually(lambda: ledger.notes > notes)
    collector.may_fail = True
    collector.task.cancel()
    await asyncio.wait({collector.task})


async def test_every_count_is_counted_once_while_collectors_join_die_and_leave(
    start_collector, servers, ledger, tmp_path, eventually, monkeypatch
) -> None:
    monkeypatch.setattr("metrics_collector.core.sharing.MIN_LEASE_S", LEASE_S)
    await servers.start(60)
    path = servers.listing(tmp_path / "t.json")
    first = await start_collector(targets_files=[path], collector_name="c-0", **PACE)
    await eventually(lambda: len(ledger.reported()) == 60, what="one alone scrapes all")
    servers.run()
    second = await start_collector(targets_files=[path], collector_name="c-1", **PACE)
    await eventually(lambda: ledger.shared_out(60, "c-0", "c-1"), timeout_s=30, what="two share")
    third = await start_collector(targets_files=[path], collector_name="c-2", **PACE)
    await eventually(lambda: ledger.shared_out(60, "c-0", "c-1", "c-2"), timeout_s=30, what="three share")
    await asyncio.sleep(2 * INTERVAL_S)

    await kill(first, ledger, eventually)
    killed = time.monotonic()
    await eventually(lambda: ledger.shared_out(60, "c-1", "c-2"), timeout_s=30, what="the dead one's share is taken")
    taken_after_s = time.monotonic() - killed
    await asyncio.sleep(2 * INTERVAL_S)
    second.context.stopping.set()
    await asyncio.wait({second.task}, timeout=10)
    await eventually(lambda: len(ledger.own["c-2"]) == 60, timeout_s=30, what="the leaving one's share is taken")
    await asyncio.sleep(2 * INTERVAL_S)
    servers.freeze()
    await eventually(lambda: ledger.reported() == servers.counts(), timeout_s=30, what="the last counts")
    await asyncio.sleep(2 * INTERVAL_S)

    assert taken_after_s < LEASE_S + 1.75 * INTERVAL_S, "the lease, an interval, and a part of one for a stall"
    assert ledger.reported() == servers.counts()
    assert not third.task.done()


async def when_all_are_well(collector) -> tuple[list[pb.Target], pb.RoleObservation]:
    """Its targets, all of them up, and a window to which each has given its part: a stall may cost some theirs."""
    give_up = time.monotonic() + 30
    while True:
        listed = list((await collector.stub.ListTargets(pb.ListTargetsRequest(), timeout=30)).targets)
        observation = (await collector.stub.GetObservation(pb.GetObservationRequest(key=CHAT), timeout=30)).observation
        whole = signal_of(observation, pb.SIGNAL_DECODE_TPS).quality == types_pb2.QUALITY_OK
        if whole and {item.state for item in listed} == {pb.TARGET_STATE_UP}:
            return listed, observation
        assert time.monotonic() < give_up, (listed, observation)
        await asyncio.sleep(0.05)


async def test_any_collector_answers_for_all(start_collector, servers, ledger, tmp_path, eventually) -> None:
    await servers.start(10)
    servers.run()
    path = servers.listing(tmp_path / "t.json")
    collectors = [await start_collector(targets_files=[path], collector_name=f"c-{n}", **PACE) for n in range(2)]
    await eventually(lambda: ledger.shared_out(10, "c-0", "c-1"), timeout_s=30)
    await asyncio.sleep(4 * INTERVAL_S)

    names = [f"chat-{number:02d}" for number in range(10)]
    for collector in collectors:
        listed, observation = await when_all_are_well(collector)
        assert [item.target_id for item in listed] == names
        assert {item.target_id for item in listed if item.collector == "c-0"} == ledger.own["c-0"]
        assert list(observation.reported_replicas) == names
        tps = signal_of(observation, pb.SIGNAL_DECODE_TPS)
        assert tps.value == pytest.approx(sum(100 + number for number in range(10)), rel=0.05)
        page = await collector.stub.ListReplicaSamples(pb.ListReplicaSamplesRequest(key=CHAT, page_size=7), timeout=30)
        rest = await collector.stub.ListReplicaSamples(
            pb.ListReplicaSamplesRequest(key=CHAT, page_size=7, page_token=page.next_page_token), timeout=5
        )
        assert [item.replica for item in (*page.samples, *rest.samples)] == names
        assert rest.next_page_token == ""
        assert {item.collector for item in page.samples} == {"c-0", "c-1"}


async def test_a_target_that_leaves_takes_its_sample_with_it_whoever_scrapes_it(
    start_collector, servers, ledger, tmp_path, eventually
) -> None:
    await servers.start(6)
    path = servers.listing(tmp_path / "t.json")
    collectors = [await start_collector(targets_files=[path], collector_name=f"c-{n}", **PACE) for n in range(2)]
    await eventually(lambda: ledger.shared_out(6, "c-0", "c-1"), timeout_s=30)
    await asyncio.sleep(2 * INTERVAL_S)
    servers.listing(path, range(3))
    await asyncio.sleep(2 * INTERVAL_S)

    names: list[str] = []
    give_up = time.monotonic() + 30
    while names != ["chat-00", "chat-01", "chat-02"] and time.monotonic() < give_up:
        found = await collectors[0].stub.ListReplicaSamples(pb.ListReplicaSamplesRequest(key=CHAT), timeout=30)
        names = [item.replica for item in found.samples]
        await asyncio.sleep(0.05)

    assert names == ["chat-00", "chat-01", "chat-02"]


async def test_a_store_that_was_away_moves_no_target_and_loses_no_count(
    start_collector, servers, ledger, tmp_path, eventually, own_store: EmbeddedStore, monkeypatch
) -> None:
    # Shorter than the outage, too.
    monkeypatch.setattr("metrics_collector.core.sharing.MIN_LEASE_S", LEASE_S)
    await servers.start(12)
    path = servers.listing(tmp_path / "t.json")
    for number in range(2):
        await start_collector(targets_files=[path], collector_name=f"c-{number}", store_url=own_store.url, **PACE)
    await eventually(lambda: ledger.shared_out(12, "c-0", "c-1"), timeout_s=30)
    await eventually(lambda: len(ledger.reported()) == 12, timeout_s=30)
    before = ledger.shares("c-0", "c-1")
    servers.run()
    await asyncio.sleep(2 * INTERVAL_S)

    own_store.stop()
    await asyncio.sleep(4 * INTERVAL_S)
    own_store.start()
    seen = set()
    give_up = time.monotonic() + 6 * INTERVAL_S
    while time.monotonic() < give_up:
        seen.add(tuple(ledger.shares("c-0", "c-1")))
        await asyncio.sleep(0.05)
    servers.freeze()
    await eventually(lambda: ledger.reported() == servers.counts(), timeout_s=30, what="the last counts")
    await asyncio.sleep(2 * INTERVAL_S)

    assert seen == {tuple(before)}
    assert ledger.reported() == servers.counts()


async def test_a_second_collector_of_one_name_is_refused(start_collector, store) -> None:
    await start_collector(collector_name="c-0", **PACE)
    async with asyncio.timeout(30):
        while not await store.redis.hlen(keys.collector_members()):  # noqa: ASYNC110  (the store says nothing of it)
            await asyncio.sleep(0.02)
    second = await start_collector(collector_name="c-0", **PACE)
    second.may_fail = True

    with pytest.raises(StartupError, match="another collector named 'c-0' uses this store: give each its own"):
        await asyncio.wait_for(asyncio.shield(second.task), 5)


async def test_a_restarted_collector_goes_on_where_it_stopped(
    start_collector, servers, ledger, tmp_path, eventually
) -> None:
    await servers.start(4)
    path = servers.listing(tmp_path / "t.json")
    first = await start_collector(targets_files=[path], collector_name="c-0", **PACE)
    await eventually(lambda: len(ledger.reported()) == 4)
    servers.run()
    await asyncio.sleep(2 * INTERVAL_S)
    await kill(first, ledger, eventually)
    ledger.note("c-0", {})
    await asyncio.sleep(INTERVAL_S)
    await start_collector(targets_files=[path], collector_name="c-0", **PACE)
    await asyncio.sleep(4 * INTERVAL_S)
    servers.freeze()

    counted = servers.counts()
    await eventually(lambda: ledger.reported() == counted, timeout_s=30)
    await asyncio.sleep(2 * INTERVAL_S)
    assert ledger.reported() == counted, "what was counted once stays so"


async def test_a_gateway_that_goes_to_another_collector_is_counted_once(start_collector, eventually) -> None:
    collectors = [await start_collector(collector_name=f"c-{n}", demand_expiry_s=5.0, **PACE) for n in range(2)]
    await asyncio.sleep(3 * INTERVAL_S)

    async def report(collector, gateway: str, held: int) -> None:
        demand = pb.ServiceDemand(service="chat", interval_s=0.2, arrivals=2, held=held)
        request = pb.ReportDemandRequest(gateway=gateway, demands=[demand])
        await collector.stub.ReportDemand(request, timeout=5, wait_for_ready=True)

    for _ in range(8):
        await report(collectors[0], "gw-0", 3)
        await report(collectors[0], "gw-1", 4)
        await asyncio.sleep(0.2)
    held: list[float | None] = []
    door = pb.RoleKey(service="chat", role=types_pb2.ROLE_UNSPECIFIED)
    for step in range(20):
        await report(collectors[0], "gw-0", 3)
        await report(collectors[1], "gw-1", 4)
        await asyncio.sleep(0.2)
        found = await collectors[step % 2].stub.GetObservation(pb.GetObservationRequest(key=door), timeout=30)
        value = signal_of(found.observation, pb.SIGNAL_HELD)
        held.append(value.value if value.HasField("value") else None)

    assert held[-4:] == [7.0] * 4
    assert max(value or 0.0 for value in held) <= 7.0


async def test_a_killed_processs_targets_are_scraped_by_the_other(
    servers, store_url, tmp_path, free_ports, eventually
) -> None:
    await servers.start(20)
    servers.run()
    path = servers.listing(tmp_path / "t.json")
    ports = free_ports(4)
    processes: list[asyncio.subprocess.Process] = []
    try:
        for number in range(2):
            listen, metrics = ports[2 * number], ports[2 * number + 1]
            options = {
                "--listen": f"127.0.0.1:{listen}",
                "--metrics-listen": f"127.0.0.1:{metrics}",
                "--store-url": store_url,
                "--collector-name": f"c-{number}",
                "--targets-files": str(path),
                "--scrape-interval-s": "1",
                "--log-level": "warning",
            }
            words = [word for pair in options.items() for word in pair]
            processes.append(await asyncio.create_subprocess_exec(sys.executable, "-m", "metrics_collector", *words))
        async with channel(f"127.0.0.1:{ports[0]}") as connection:
            stub = collector_pb2_grpc.CollectorServiceStub(connection)
            give_up = time.monotonic() + 60
            owners: list[str] = []
            while set(owners) != {"c-0", "c-1"}:
                assert time.monotonic() < give_up, f"never shared: {owners}"
                await asyncio.sleep(0.1)
                try:
                    listed = await stub.ListTargets(pb.ListTargetsRequest(), timeout=30)
                except grpc.aio.AioRpcError:
                    continue
                owners = [item.collector for item in listed.targets]
        await asyncio.sleep(3)
        processes[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        # Two intervals until they are taken over, and each is scraped at its moment of the interval after.
        await eventually(
            lambda: all(at_s > killed + 0.2 for at_s in servers.scraped), timeout_s=3.9, what="all are scraped again"
        )
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()

    assert len(servers.scraped) == 20
