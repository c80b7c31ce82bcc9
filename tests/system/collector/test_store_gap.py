"""A store that goes away and comes back, end to end."""

import asyncio
import itertools
import json
import time

import grpc
import pytest
from aiohttp import web

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.store.observations import signal

CHAT = pb.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)


async def windows_until(stub: object, after_s: float) -> list[pb.RoleObservation]:
    """The history, once a window that ended after ``after_s`` is in it."""
    give_up = time.monotonic() + 15
    while True:
        try:
            found = await stub.QueryHistory(pb.QueryHistoryRequest(key=CHAT), timeout=5)  # type: ignore[attr-defined]
        except grpc.aio.AioRpcError:
            found = pb.QueryHistoryResponse()
        if found.observations and found.observations[-1].window_end.ToMilliseconds() > after_s * 1000:
            return list(found.observations)
        assert time.monotonic() < give_up, "no window came"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("gap_s", "window_s"), [(3.0, 6.0), (30.0, 40.0)], ids=["3 s", "30 s"])
async def test_what_was_counted_while_the_store_was_away_is_kept(
    start_collector, page_server, vllm_page, tmp_path, own_store, gap_s: float, window_s: float
) -> None:
    generated = 1000
    scraped_s: list[float] = []

    async def answer(_request: web.Request) -> web.Response:
        scraped_s.append(time.time())
        return web.Response(body=vllm_page(running=1, generated=generated), content_type="text/plain")

    server = await page_server(answer)
    path = tmp_path / "t.json"
    labels = {"service": "chat", "role": "colocated", "replica": "chat-0"}
    path.write_text(json.dumps([{"targets": [server.host_and_port], "labels": labels}]))
    collector = await start_collector(
        targets_files=[path],
        store_url=own_store.url,
        scrape_interval_s=0.5,
        scrape_timeout_s=0.4,
        window_s=window_s,
        stuck_after_s=100,
    )
    before = await windows_until(collector.stub, time.time() + 2.0)
    own_store.stop()
    stopped_s = time.time()
    await asyncio.sleep(gap_s / 3)
    generated += 9000
    await asyncio.sleep(2 * gap_s / 3)
    own_store.start()
    started_s = time.time()
    history = await windows_until(collector.stub, started_s + 0.5)

    ends_s = [item.window_end.ToMilliseconds() / 1000 for item in history]
    rate = signal(history[-1], pb.SIGNAL_DECODE_TPS).value
    covered_s = min(window_s, ends_s[-1] - scraped_s[0])
    assert pytest.approx(rate * covered_s, rel=0.25) == 9000, "all of it, in the window that spans the gap"
    assert max(later - earlier for earlier, later in itertools.pairwise(ends_s)) >= gap_s - 0.6
    assert not [end_s for end_s in ends_s if stopped_s + 0.6 < end_s < started_s], "windows inside are missing"
    assert {item.window_end.ToMilliseconds() for item in before} <= {round(end_s * 1000) for end_s in ends_s}
