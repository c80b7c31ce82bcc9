"""CollectorService over gRPC: targets, observations, history, watches, demand; actuators; the store going away."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
import pytest_asyncio
import redis
from aiohttp import web

from metrics_collector.core.samples import expand
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.config.settings import ServiceSettings
from trimtab.errors import StartupError
from trimtab.rpc.errors import error_reason, field_violations
from trimtab.rpc.run import ServiceContext
from trimtab.rpc.server import RpcServer
from trimtab.store import keys
from trimtab.store.observations import signal

TEXT = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
Asked = TypeVar("Asked")
CHAT = pb.RoleKey(service="chat", role=types_pb2.ROLE_COLOCATED)
DOOR = pb.RoleKey(service="chat", role=types_pb2.ROLE_UNSPECIFIED)


def serving(page: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=page(), headers=TEXT)

    return answer


def growing(vllm_page: Callable[..., bytes], tps: float = 1000.0, **page: object) -> Callable[[], bytes]:
    """A server's page at a constant token rate."""
    started = time.monotonic()
    return lambda: vllm_page(**{"running": 2, "waiting": 1} | page | {"generated": tps * (time.monotonic() - started)})


def write_targets(path: Path, **replicas: str) -> Path:
    """``name=host:port`` of colocated replicas of the service chat."""
    groups = [
        {"targets": [address], "labels": {"service": "chat", "role": "colocated", "replica": name.replace("_", "-")}}
        for name, address in replicas.items()
    ]
    path.write_text(json.dumps(groups))
    return path


async def get(stub: object, key: pb.RoleKey) -> pb.RoleObservation:
    response = await stub.GetObservation(pb.GetObservationRequest(key=key), timeout=30)  # type: ignore[attr-defined]
    return response.observation


async def until(
    stub: object, key: pb.RoleKey, condition: Callable[[pb.RoleObservation], bool], timeout_s: float = 30.0
) -> pb.RoleObservation:
    """The first observation that satisfies ``condition``."""
    give_up = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < give_up:
        try:
            last = await get(stub, key)
        except grpc.aio.AioRpcError as error:
            last = f"{error.code()}: {error.details()}"
        else:
            if condition(last):
                return last
        await asyncio.sleep(0.03)
    raise AssertionError(f"no such observation within {timeout_s} s; the last was {last}")


async def until_listed(
    stub: object, condition: Callable[[list[pb.Target]], bool], timeout_s: float = 30.0
) -> list[pb.Target]:
    """The first list of all targets that satisfies ``condition``."""
    give_up = time.monotonic() + timeout_s
    while True:
        listed = list((await stub.ListTargets(pb.ListTargetsRequest(), timeout=30)).targets)  # type: ignore[attr-defined]
        if condition(listed):
            return listed
        assert time.monotonic() < give_up, f"never so within {timeout_s} s: {listed}"
        await asyncio.sleep(0.03)


async def window_ends(stub: object, **request: object) -> list[int]:
    """The ends of the windows in the history, in milliseconds."""
    response = await stub.QueryHistory(pb.QueryHistoryRequest(key=CHAT, **request), timeout=30)  # type: ignore[attr-defined]
    return [item.window_end.ToMilliseconds() for item in response.observations]


def decode(observation: pb.RoleObservation) -> types_pb2.Measurement:
    return signal(observation, pb.SIGNAL_DECODE_TPS)


def decode_of(sample: pb.ReplicaSample) -> float:
    """The decode rate of one replica's sample; 0 when it has none."""
    values = {item.signal: item.measurement.value for item in sample.signals}
    return values.get(pb.SIGNAL_DECODE_TPS, 0.0)


def up(targets: list[pb.Target]) -> list[pb.Target]:
    return [item for item in targets if item.state == pb.TARGET_STATE_UP]


def has_quality(quality: "types_pb2.Quality.ValueType") -> Callable[[pb.RoleObservation], bool]:
    return lambda observation: decode(observation).quality == quality


OK = has_quality(types_pb2.QUALITY_OK)


def at_rate(tps: float, *, quality: Callable[[pb.RoleObservation], bool] = OK) -> Callable[[pb.RoleObservation], bool]:
    """Whether a window shows the servers' decode rate: one that a standstill of the machine fell into does not."""
    return lambda item: quality(item) and decode(item).value == pytest.approx(tps, rel=0.25)


async def asked_until(ask: Callable[[], Awaitable[Asked]], condition: Callable[[Asked], bool]) -> Asked:
    """The first answer that satisfies ``condition``."""
    give_up = time.monotonic() + 30
    while not condition(found := await ask()):
        assert time.monotonic() < give_up, f"never so: {found}"
        await asyncio.sleep(0.03)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chat(shared, vllm_page, store_server_url, tmp_path_factory):
    """A collector with two healthy replicas of chat, its first full window seen; the tests only read from it."""
    with redis.Redis.from_url(store_server_url) as client:
        client.flushdb()
        client.set("trimtab-tests:marker", "1")
    async with shared.page_servers() as page_server, shared.collectors(store_server_url) as start_collector:
        servers = [await page_server(serving(growing(vllm_page))) for _ in range(2)]
        path = tmp_path_factory.mktemp("chat") / "t.json"
        write_targets(path, chat_0=servers[0].host_and_port, chat_1=servers[1].host_and_port)
        collector = await start_collector(targets_files=[path])
        await until(collector.stub, CHAT, OK)
        yield collector


# Reading: one collector for all


@pytest.mark.asyncio(loop_scope="module")
async def test_targets_are_listed_in_pages_with_their_states(chat) -> None:
    await until_listed(chat.stub, lambda items: len(up(items)) == 2)
    first = await chat.stub.ListTargets(pb.ListTargetsRequest(page_size=1), timeout=30)
    second = await chat.stub.ListTargets(
        pb.ListTargetsRequest(page_size=1, page_token=first.next_page_token), timeout=30
    )
    other = await chat.stub.ListTargets(pb.ListTargetsRequest(service="other"), timeout=30)

    (target,) = first.targets
    assert (target.target_id, target.service, target.state) == ("chat-0", "chat", pb.TARGET_STATE_UP)
    assert target.counted
    assert target.source == "file_sd"
    assert abs(target.last_success_time.ToMilliseconds() / 1000 - time.time()) < 5
    assert [item.target_id for item in second.targets] == ["chat-1"]
    assert second.next_page_token == ""
    assert list(other.targets) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_role_never_observed_is_not_found(chat) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await get(chat.stub, pb.RoleKey(service="other", role=types_pb2.ROLE_DECODE))

    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert error_reason(raised.value) == "ROLE_NOT_OBSERVED"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_names_what_is_missing(chat) -> None:
    other = pb.RoleKey(service="other", role=types_pb2.ROLE_DECODE)

    some = await chat.stub.BatchGetObservations(pb.BatchGetObservationsRequest(keys=[other, CHAT, CHAT]), timeout=30)
    everything = await chat.stub.BatchGetObservations(pb.BatchGetObservationsRequest(), timeout=30)

    assert [item.service for item in some.observations] == ["chat"]
    assert list(some.missing) == [other]
    assert [(item.service, item.role) for item in everything.observations] == [("chat", types_pb2.ROLE_COLOCATED)]


@pytest.mark.asyncio(loop_scope="module")
async def test_history_holds_one_window_per_interval_oldest_first(chat) -> None:
    ends_ms: list[int] = []
    give_up = time.monotonic() + 30
    while len(ends_ms) < 5 and time.monotonic() < give_up:
        await asyncio.sleep(0.1)
        ends_ms = await window_ends(chat.stub)
    last_two = await chat.stub.QueryHistory(pb.QueryHistoryRequest(key=CHAT, max_results=2), timeout=30)

    assert len(ends_ms) >= 5
    assert all(end_ms % 200 == 0 for end_ms in ends_ms), "windows are aligned to the store's clock"
    assert ends_ms == sorted(set(ends_ms))
    assert len(last_two.observations) == 2
    middle = pb.QueryHistoryRequest(key=CHAT)
    middle.start_time.FromMilliseconds(ends_ms[1])
    middle.end_time.FromMilliseconds(ends_ms[3])
    between = await chat.stub.QueryHistory(middle, timeout=30)
    assert [item.window_end.ToMilliseconds() for item in between.observations] == ends_ms[1:3]


async def windows_from(stub: object, first_ms: int, number: int) -> list[int]:
    """So many windows of the history, in order: one for each interval in which the collector was not held up."""
    return [end_ms for end_ms in await window_ends(stub) if end_ms >= first_ms][:number]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_watch_gives_a_snapshot_then_every_window(chat) -> None:
    stream = chat.stub.WatchObservations(pb.WatchObservationsRequest(keys=[CHAT]), timeout=60)
    messages = []
    async for message in stream:
        messages.append(message)
        if len(messages) == 4:
            break
    stream.cancel()

    first, *rest = messages
    assert [item.service for item in first.snapshot.observations] == ["chat"]
    assert first.snapshot.revision > 0
    ends_ms = [message.observation.window_end.ToMilliseconds() for message in rest]
    assert ends_ms == await windows_from(chat.stub, ends_ms[0], 3)
    assert ends_ms[0] > first.snapshot.observations[0].window_end.ToMilliseconds()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_watch_of_a_silent_role_gets_bookmarks(chat) -> None:
    stream = chat.stub.WatchObservations(pb.WatchObservationsRequest(keys=[DOOR]), timeout=60)
    kinds = []
    async for message in stream:
        kinds.append(message.WhichOneof("event"))
        if len(kinds) == 2:
            break
    stream.cancel()

    assert kinds == ["snapshot", "bookmark"]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_event_of_a_watch_has_its_revision(chat) -> None:
    stream = chat.stub.WatchObservations(pb.WatchObservationsRequest(keys=[CHAT]), timeout=60)
    messages = [await anext(aiter(stream)) for _ in range(3)]
    stream.cancel()

    assert messages[0].revision == messages[0].snapshot.revision > 0
    assert [one.revision for one in messages[1:]] == [
        one.observation.window_end.ToMilliseconds() for one in messages[1:]
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_watch_that_comes_back_gets_what_it_missed_and_goes_on_without_a_gap(chat) -> None:
    stream = chat.stub.WatchObservations(pb.WatchObservationsRequest(keys=[CHAT]), timeout=60)
    seen = [(await anext(aiter(stream))).revision for _ in range(2)]
    stream.cancel()
    await asyncio.sleep(1.0)
    request = pb.WatchObservationsRequest(keys=[CHAT], since_revision=seen[-1])
    stream = chat.stub.WatchObservations(request, timeout=60)
    messages = [await anext(aiter(stream)) for _ in range(9)]
    stream.cancel()

    assert {one.WhichOneof("event") for one in messages} == {"observation"}
    revisions = [one.revision for one in messages]
    assert revisions[0] == seen[-1], "the last revision seen is told again: another role may have had it too"
    assert revisions == await windows_from(chat.stub, revisions[0], 9)
    assert revisions[-1] > seen[-1] + 1000


@pytest.mark.parametrize("revision", [1, 10**15])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_watch_that_comes_back_too_late_or_from_nowhere_gets_a_snapshot(chat, revision) -> None:
    request = pb.WatchObservationsRequest(keys=[CHAT], since_revision=revision)
    stream = chat.stub.WatchObservations(request, timeout=60)
    first, second = [await anext(aiter(stream)) for _ in range(2)]
    stream.cancel()

    assert first.WhichOneof("event") == "snapshot"
    assert [item.service for item in first.snapshot.observations] == ["chat"]
    assert second.observation.window_end.ToMilliseconds() == second.revision
    assert [first.revision, second.revision] == await windows_from(chat.stub, first.revision, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_history_is_thinned_to_the_last_window_of_each_step(chat) -> None:
    await asyncio.sleep(1.5)
    ends_ms = await window_ends(chat.stub, step_s=1)
    tiny_ms = await window_ends(chat.stub, step_s=1e-9)
    every_ms = await window_ends(chat.stub)

    assert len(ends_ms) >= 2
    assert ends_ms[:-1] == list({end_ms // 1000: end_ms for end_ms in every_ms}.values())[: len(ends_ms) - 1]
    assert tiny_ms == every_ms[: len(tiny_ms)], "a step that is shorter than any window leaves none out"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_service_is_given_as_a_whole_and_by_role(chat) -> None:
    found = await asked_until(
        lambda: chat.stub.GetServiceObservation(pb.GetServiceObservationRequest(service="chat"), timeout=30),
        lambda answer: at_rate(2000)(answer.service),
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await chat.stub.GetServiceObservation(pb.GetServiceObservationRequest(service="other"), timeout=30)

    assert decode(found.service).value == pytest.approx(2000, rel=0.25)
    assert [item.role for item in found.roles] == [types_pb2.ROLE_COLOCATED]
    assert not found.HasField("front_door")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert error_reason(raised.value) == "SERVICE_NOT_OBSERVED"


@pytest.mark.asyncio(loop_scope="module")
async def test_replicas_samples_are_listed_in_pages(chat) -> None:
    await until(chat.stub, CHAT, OK)
    request = pb.ListReplicaSamplesRequest(key=CHAT, page_size=1)

    def at_its_rate(answer: pb.ListReplicaSamplesResponse) -> bool:
        return decode_of(answer.samples[0]) == pytest.approx(1000, rel=0.25)

    first = await asked_until(lambda: chat.stub.ListReplicaSamples(request, timeout=30), at_its_rate)
    request.page_token = first.next_page_token
    second = await chat.stub.ListReplicaSamples(request, timeout=30)

    assert [item.replica for item in (*first.samples, *second.samples)] == ["chat-0", "chat-1"]
    assert second.next_page_token == ""
    assert decode_of(first.samples[0]) == pytest.approx(1000, rel=0.25)
    assert first.samples[0].generation_tokens_total > 0


@pytest.mark.parametrize(
    ("method", "request_message", "fields"),
    [
        ("GetObservation", pb.GetObservationRequest(), ["key.service"]),
        ("GetObservation", pb.GetObservationRequest(key=pb.RoleKey(service="chat", role=99)), ["key.role"]),
        ("BatchGetObservations", pb.BatchGetObservationsRequest(keys=[pb.RoleKey(service="C")]), ["keys[0].service"]),
        ("QueryHistory", pb.QueryHistoryRequest(key=CHAT, max_results=9999), ["max_results"]),
        ("ListTargets", pb.ListTargetsRequest(service="C", page_size=1001), ["service", "page_size"]),
        ("GetServiceObservation", pb.GetServiceObservationRequest(), ["service"]),
        ("ListReplicaSamples", pb.ListReplicaSamplesRequest(key=DOOR, page_size=1001), ["key.role", "page_size"]),
        ("QueryHistory", pb.QueryHistoryRequest(key=CHAT, step_s=-1), ["step_s"]),
        (
            "ReportDemand",
            pb.ReportDemandRequest(
                gateway="gw",
                replicas=[pb.ReplicaDemand(replica="a"), pb.ReplicaDemand(replica="a"), pb.ReplicaDemand()],
            ),
            ["replicas[1].replica", "replicas[2].replica"],
        ),
        (
            "ReportDemand",
            pb.ReportDemandRequest(
                demands=[
                    pb.ServiceDemand(service="chat", interval_s=1e-320),
                    pb.ServiceDemand(service="chat", interval_s=1, arrivals=2**63),
                ]
            ),
            ["gateway", "demands[0].interval_s", "demands[1].service", "demands[1].arrivals"],
        ),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_does_not_parse_comes_back_with_one_violation_per_field(
    chat, method, request_message, fields
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await getattr(chat.stub, method)(request_message, timeout=30)

    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [item.field for item in field_violations(raised.value)] == fields


@pytest.mark.asyncio(loop_scope="module")
async def test_the_newest_sample_of_each_replica_is_in_one_hash_per_role(chat, store_server_url) -> None:
    await until(chat.stub, CHAT, OK)
    with redis.Redis.from_url(store_server_url) as client:

        async def stored() -> dict[str, pb.ReplicaSample]:
            found = client.hgetall(keys.latest_samples("chat", "ROLE_COLOCATED"))
            return {name.decode(): expand(pb.ReplicaSample.FromString(data)) for name, data in found.items()}

        samples = await asked_until(
            stored, lambda found: "chat-0" in found and decode_of(found["chat-0"]) == pytest.approx(1000, rel=0.25)
        )

    assert sorted(samples) == ["chat-0", "chat-1"]
    sample = samples["chat-0"]
    assert sample.state == pb.TARGET_STATE_UP
    assert sample.awake
    assert sample.generation_tokens_total > 0
    values = {item.signal: item.measurement for item in sample.signals}
    assert values[pb.SIGNAL_DECODE_TPS].value == pytest.approx(1000, rel=0.25)
    assert values[pb.SIGNAL_RUNNING].value == 2.0
    assert pb.SIGNAL_PREFIX_HIT_RATIO not in values, "what is not known is not there"


@pytest.mark.asyncio(loop_scope="module")
async def test_aggregate_series_are_on_the_collectors_own_metrics(chat, eventually) -> None:
    sample = chat.context.registry.get_sample_value
    role = {"service": "chat", "role": "colocated"}
    # Both in one step: what is so for a moment need not be in the next.
    await eventually(
        lambda: (
            sample("trimtab_signal_quality", role | {"signal": "decode_tps", "quality": "ok"}) == 1
            and sample("trimtab_collector_targets", {"state": "up"}) == 2
            and sample("trimtab_signal", role | {"signal": "decode_tps"}) == pytest.approx(2000, rel=0.25)
        )
    )

    assert sample("trimtab_signal", role | {"signal": "decode_tps"}) == pytest.approx(2000, rel=0.25)
    assert sample("trimtab_signal_quality", role | {"signal": "decode_tps", "quality": "ok"}) == 1
    assert sample("trimtab_signal", role | {"signal": "prefix_hit_ratio"}) is None
    assert sample("trimtab_role_replicas", role | {"reported": "yes"}) == 2
    assert sample("trimtab_collector_targets", {"state": "up"}) == 2
    assert sample("trimtab_collector_scrapes_total", {"state": "up"}) >= 4


# From page to observation


async def test_a_servers_page_becomes_an_observation(start_collector, page_server, vllm_page, tmp_path) -> None:
    started = time.monotonic()

    def page() -> bytes:
        lived_s = time.monotonic() - started
        return vllm_page(
            running=3,
            waiting=1,
            kv=0.5,
            generated=1000 * lived_s,
            computed=500 * lived_s,
            cached=250 * lived_s,
            finished=4 * lived_s,
            preempted=2 * lived_s,
            ttft={"0.1": 0.0, "1.0": 10 * lived_s, "+Inf": 10 * lived_s},
        )

    server = await page_server(serving(page))
    path = write_targets(tmp_path / "t.json", chat_0=server.host_and_port)
    collector = await start_collector(targets_files=[path])

    rates = {
        pb.SIGNAL_DECODE_TPS: 1000,
        pb.SIGNAL_PREFILL_CACHED_TPS: 250,
        pb.SIGNAL_REQUEST_RPS: 4,
        pb.SIGNAL_PREEMPTION_RPS: 2,
    }

    def at_its_rates(item: pb.RoleObservation) -> bool:
        return OK(item) and all(signal(item, one).value == pytest.approx(rates[one], rel=0.25) for one in rates)

    found = await until(collector.stub, CHAT, at_its_rates)

    values = {item.signal: item.measurement.value for item in found.signals if item.measurement.HasField("value")}
    # Its requests wait ten seconds for their first token, so what was computed is spread over longer than this test.
    assert 0 < values.pop(pb.SIGNAL_PREFILL_TPS) < 625
    assert values == {
        **{one: pytest.approx(rates[one], rel=0.25) for one in rates},
        pb.SIGNAL_RUNNING: 3.0,
        pb.SIGNAL_WAITING: 1.0,
        pb.SIGNAL_KV_USAGE_RATIO: 0.5,
    }
    (ttft,) = found.latencies
    assert ttft.p50_s.value == pytest.approx(0.55), "half-way through the bucket from 0.1 to 1"
    assert list(found.reported_replicas) == ["chat-0"]
    assert found.window_end.ToMicroseconds() - found.window_start.ToMicroseconds() == 600_000


# Targets


async def test_servers_that_answer_wrongly_slowly_or_not_at_all_are_named_and_the_rest_counts(
    start_collector, page_server, vllm_page, tmp_path, free_port
) -> None:
    async def error(_request: web.Request) -> web.Response:
        return web.Response(status=500)

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def login(_request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    good = [await page_server(serving(growing(vllm_page))) for _ in range(2)]
    path = write_targets(
        tmp_path / "t.json",
        good_0=good[0].host_and_port,
        good_1=good[1].host_and_port,
        wrong=(await page_server(error)).host_and_port,
        slow=(await page_server(hang)).host_and_port,
        login=(await page_server(login)).host_and_port,
        gone=f"127.0.0.1:{free_port}",
    )
    collector = await start_collector(targets_files=[path])

    partial = has_quality(types_pb2.QUALITY_PARTIAL)
    found = await until(collector.stub, CHAT, at_rate(2000, quality=partial))
    listed = await until_listed(collector.stub, lambda items: len(up(items)) == 2)

    assert (decode(found).quality, decode(found).reported, decode(found).expected) == (types_pb2.QUALITY_PARTIAL, 2, 6)
    assert decode(found).value == pytest.approx(2000, rel=0.25)
    assert list(found.missing_replicas) == ["gone", "login", "slow", "wrong"]
    states = {item.target_id: (pb.TargetState.Name(item.state), item.last_error) for item in listed}
    assert states["wrong"] == ("TARGET_STATE_DOWN", "/metrics/: HTTP 500")
    assert states["slow"] == ("TARGET_STATE_DOWN", "no page within 0.15 s")
    assert states["login"] == ("TARGET_STATE_BAD_PAGE", "content type 'text/html' is no metrics page")
    assert states["gone"][0] == "TARGET_STATE_DOWN"
    assert states["good-0"] == ("TARGET_STATE_UP", "")


async def test_a_targets_file_is_followed_and_a_malformed_one_changes_nothing(
    start_collector, page_server, vllm_page, tmp_path, eventually
) -> None:
    servers = [await page_server(serving(growing(vllm_page))) for _ in range(2)]
    path = write_targets(tmp_path / "t.json", chat_0=servers[0].host_and_port)
    collector = await start_collector(targets_files=[path])
    await until(collector.stub, CHAT, lambda item: list(item.reported_replicas) == ["chat-0"])

    write_targets(path, chat_0=servers[0].host_and_port, chat_1=servers[1].host_and_port)
    await until(collector.stub, CHAT, lambda item: list(item.reported_replicas) == ["chat-0", "chat-1"])
    path.write_text('[{"targets": ["no port"]}]')
    readable = ("trimtab_collector_targets_file_readable", {"file": str(path)})
    await eventually(lambda: collector.context.registry.get_sample_value(*readable) == 0.0)
    later_ms = time.time() * 1000 + 300
    kept = await until(
        collector.stub,
        CHAT,
        lambda item: item.window_end.ToMilliseconds() > later_ms and len(item.reported_replicas) == 2,
    )
    write_targets(path, chat_1=servers[1].host_and_port)
    left = await until(collector.stub, CHAT, lambda item: list(item.reported_replicas) == ["chat-1"])

    assert list(kept.reported_replicas) == ["chat-0", "chat-1"]
    assert list(left.missing_replicas) == [], "case 4: what is gone is in no sum, and nobody waits for it"


# Demand


async def test_gateways_demand_enters_at_the_front_door_and_expires(start_collector) -> None:
    collector = await start_collector(demand_expiry_s=0.6)

    seen = asyncio.Event()

    async def report(gateway: str, held: int) -> None:
        while not seen.is_set():
            demand = pb.ServiceDemand(
                service="chat", interval_s=0.1, arrivals=5, prompt_tokens=500, requested_output_tokens=50, held=held
            )
            await collector.stub.ReportDemand(
                pb.ReportDemandRequest(gateway=gateway, demands=[demand]), timeout=30, wait_for_ready=True
            )
            await asyncio.sleep(0.1)

    def whole(item: pb.RoleObservation) -> bool:
        """Both have reported, and as often as they say, all through the window."""
        rate = signal(item, pb.SIGNAL_ARRIVAL_RPS).value
        return signal(item, pb.SIGNAL_HELD).value == 7.0 and rate == pytest.approx(100.0, rel=0.2)

    both = asyncio.gather(report("gw-0", 3), report("gw-1", 4))
    found = await until(collector.stub, DOOR, whole)
    seen.set()
    await both
    silent = await until(collector.stub, DOOR, lambda item: not signal(item, pb.SIGNAL_HELD).HasField("value"))

    assert list(found.missing_replicas) == []
    assert signal(silent, pb.SIGNAL_HELD).quality == types_pb2.QUALITY_MISSING
    assert list(silent.missing_replicas) == ["gw-0", "gw-1"]


# Actuators


class FakeActuator(actuator_pb2_grpc.ActuatorServiceServicer):
    """WatchReplicas alone: a snapshot at first, then what the test puts into each stream."""

    def __init__(self) -> None:
        self.replicas: list[actuator_pb2.Replica] = []
        self.revision = 1
        self.streams: list[asyncio.Queue[actuator_pb2.WatchReplicasResponse]] = []

    def tell(self, message: actuator_pb2.WatchReplicasResponse) -> None:
        for stream in self.streams:
            stream.put_nowait(message)

    async def WatchReplicas(self, request, context) -> AsyncIterator[actuator_pb2.WatchReplicasResponse]:
        queue: asyncio.Queue[actuator_pb2.WatchReplicasResponse] = asyncio.Queue()
        self.streams.append(queue)
        yield actuator_pb2.WatchReplicasResponse(
            snapshot=actuator_pb2.ReplicaSnapshot(replicas=self.replicas, revision=self.revision, cluster="east")
        )
        while True:
            try:
                yield await asyncio.wait_for(queue.get(), 0.2)
            except TimeoutError:
                yield actuator_pb2.WatchReplicasResponse(bookmark=actuator_pb2.ReplicaBookmark(revision=self.revision))


@pytest.fixture
async def actuator() -> AsyncIterator[tuple[FakeActuator, str, RpcServer]]:
    fake = FakeActuator()
    context = ServiceContext("actuator")
    server = RpcServer(ServiceSettings(listen="127.0.0.1:0", drain_grace_s=0.1), context)
    server.add(actuator_pb2_grpc.add_ActuatorServiceServicer_to_server, fake, "trimtab.actuator.v1.ActuatorService")
    await server.start()
    yield fake, f"127.0.0.1:{server.port}", server
    await server.drain()


def a_replica(name: str, address: str, *, routable: bool = True, revision: int = 1) -> actuator_pb2.Replica:
    return actuator_pb2.Replica(
        replica=name,
        service="chat",
        role=types_pb2.ROLE_COLOCATED,
        address=address,
        routable=routable,
        revision=revision,
        cluster="east",
    )


async def test_the_actuators_replicas_are_the_reference(
    start_collector, page_server, vllm_page, actuator, tmp_path
) -> None:
    fake, address, _ = actuator
    servers = [await page_server(serving(growing(vllm_page))) for _ in range(3)]
    fake.replicas = [
        a_replica("chat-0", servers[0].url),
        a_replica("chat-1", servers[1].url, routable=False),
        a_replica("chat-2", ""),
    ]
    fake.revision = 41
    stray = write_targets(tmp_path / "t.json", stray=servers[2].host_and_port)
    collector = await start_collector(actuators={"east": address}, targets_files=[stray])

    # One that is routable has no address: whole the window never is.
    found = await until(collector.stub, CHAT, at_rate(1000, quality=lambda _: True))
    listed = await until_listed(collector.stub, lambda items: len(up(items)) == 3)

    assert decode(found).value == pytest.approx(1000, rel=0.25), "the hidden one and the stray are not counted"
    assert list(found.reported_replicas) == ["chat-0"]
    assert list(found.missing_replicas) == ["chat-2"], "routable without an address: counted, and not read"
    assert dict(found.replica_revisions) == {"east": 41}
    assert {item.target_id: (item.counted, item.state) for item in listed} == {
        "chat-0": (True, pb.TARGET_STATE_UP),
        "chat-1": (False, pb.TARGET_STATE_UP),
        "chat-2": (True, pb.TARGET_STATE_PENDING),
        "stray": (False, pb.TARGET_STATE_UP),
    }


async def test_changes_of_replicas_are_followed(start_collector, page_server, vllm_page, actuator) -> None:
    fake, address, _ = actuator
    servers = [await page_server(serving(growing(vllm_page))) for _ in range(2)]
    fake.replicas = [a_replica("chat-0", servers[0].url)]
    collector = await start_collector(actuators={"east": address})
    await until(collector.stub, CHAT, lambda item: list(item.reported_replicas) == ["chat-0"])

    fake.revision = 2
    fake.tell(actuator_pb2.WatchReplicasResponse(changed=a_replica("chat-1", servers[1].url, revision=2)))
    both = await until(
        collector.stub, CHAT, lambda item: len(item.reported_replicas) == 2 and item.replica_revisions["east"] >= 2
    )
    fake.revision = 3
    fake.tell(actuator_pb2.WatchReplicasResponse(removed=actuator_pb2.ReplicaRemoved(replica="chat-0", revision=3)))
    one = await until(
        collector.stub, CHAT, lambda item: len(item.reported_replicas) == 1 and item.replica_revisions["east"] >= 3
    )

    assert list(one.reported_replicas) == ["chat-1"]
    assert dict(both.replica_revisions) == {"east": 2}
    assert dict(one.replica_revisions) == {"east": 3}
    assert list(one.missing_replicas) == []


async def test_a_lost_actuator_keeps_its_last_replicas_and_says_so(
    start_collector, page_server, vllm_page, actuator
) -> None:
    fake, address, server = actuator
    page = await page_server(serving(growing(vllm_page)))
    fake.replicas = [a_replica("chat-0", page.url)]
    collector = await start_collector(actuators={"east": address}, actuator_lost_after_s=0.5)
    await until(collector.stub, CHAT, OK)

    await server.drain()
    registry = collector.context.registry
    give_up = time.monotonic() + 30
    while registry.get_sample_value("trimtab_collector_actuator_connected", {"cluster": "east"}) != 0.0:
        assert time.monotonic() < give_up, "the loss was never told"
        await asyncio.sleep(0.05)

    lost_ms = time.time() * 1000
    after = await until(
        collector.stub, CHAT, lambda item: at_rate(1000)(item) and item.window_end.ToMilliseconds() > lost_ms
    )
    assert list(after.reported_replicas) == ["chat-0"]
    assert decode(after).value == pytest.approx(1000, rel=0.25)


async def test_the_collector_waits_for_an_actuator_that_comes_later(
    start_collector, page_server, vllm_page, free_ports
) -> None:
    (port,) = free_ports(1)
    page = await page_server(serving(growing(vllm_page)))
    collector = await start_collector(actuators={"east": f"127.0.0.1:{port}"}, actuator_lost_after_s=0.3)
    await asyncio.sleep(0.5)
    fake = FakeActuator()
    fake.replicas = [a_replica("chat-0", page.url)]
    server = RpcServer(ServiceSettings(listen=f"127.0.0.1:{port}", drain_grace_s=0.1), ServiceContext("actuator"))
    server.add(actuator_pb2_grpc.add_ActuatorServiceServicer_to_server, fake, "trimtab.actuator.v1.ActuatorService")
    await server.start()
    try:
        found = await until(collector.stub, CHAT, OK)
    finally:
        await server.drain()

    assert list(found.reported_replicas) == ["chat-0"]


# The store


async def test_a_store_that_is_away_costs_its_windows_and_no_counts(
    start_collector, page_server, vllm_page, tmp_path, own_store, eventually
) -> None:
    page = await page_server(serving(growing(vllm_page)))
    path = write_targets(tmp_path / "t.json", chat_0=page.host_and_port)
    collector = await start_collector(targets_files=[path], store_url=own_store.url, window_s=3.0)
    await until(collector.stub, CHAT, OK)

    own_store.stop()
    before = len(page.requests)
    await asyncio.sleep(1.2)
    await eventually(lambda: len(page.requests) - before >= 4, what="scraping that goes on")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await get(collector.stub, CHAT)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert error_reason(raised.value) == "STORE_UNAVAILABLE"
    own_store.start()
    resumed_ms = time.time() * 1000
    back = await until(collector.stub, CHAT, lambda item: OK(item) and item.window_end.ToMilliseconds() > resumed_ms)
    history = await collector.stub.QueryHistory(pb.QueryHistoryRequest(key=CHAT), timeout=30)

    assert back.window_start.ToMilliseconds() < resumed_ms, "whole at once: counters went on in memory"
    assert decode(back).value == pytest.approx(1000, rel=0.25)
    ends_ms = [item.window_end.ToMilliseconds() for item in history.observations]
    gaps_ms = [later - earlier for earlier, later in itertools.pairwise(ends_ms)]
    assert max(gaps_ms) >= 1000, "the windows inside the gap are missing, not made up"


async def test_the_collector_waits_for_a_store_that_comes_later(
    start_collector, page_server, vllm_page, tmp_path, own_store
) -> None:
    own_store.stop()
    page = await page_server(serving(growing(vllm_page)))
    path = write_targets(tmp_path / "t.json", chat_0=page.host_and_port)
    collector = await start_collector(targets_files=[path], store_url=own_store.url)
    await asyncio.sleep(0.3)
    assert not collector.task.done()
    own_store.start()

    found = await until(collector.stub, CHAT, OK)

    assert list(found.reported_replicas) == ["chat-0"]


async def test_partials_of_two_collectors_are_merged(start_collector, page_server, vllm_page, tmp_path) -> None:
    servers = [await page_server(serving(growing(vllm_page, tps=tps))) for tps in (1000.0, 500.0)]
    for number, server in enumerate(servers):
        path = write_targets(tmp_path / f"{number}.json", **{f"chat_{number}": server.host_and_port})
        collector = await start_collector(targets_files=[path], collector_name=f"collector-{number}")

    found = await until(collector.stub, CHAT, at_rate(1500))

    assert list(found.reported_replicas) == ["chat-0", "chat-1"]
    assert decode(found).value == pytest.approx(1500, rel=0.25)


async def test_a_role_and_a_replica_that_are_gone_leave_the_store(
    start_collector, page_server, vllm_page, tmp_path, store
) -> None:
    page = await page_server(serving(growing(vllm_page)))
    path = write_targets(tmp_path / "t.json", chat_0=page.host_and_port)
    collector = await start_collector(targets_files=[path])
    await until(collector.stub, CHAT, lambda item: list(item.reported_replicas) == ["chat-0"])
    path.write_text(path.read_text().replace('"chat"', '"other"'))
    await until(
        collector.stub, pb.RoleKey(service="other", role=CHAT.role), lambda item: len(item.reported_replicas) == 1
    )

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await get(collector.stub, CHAT)

    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert await store.redis.hkeys(keys.latest_samples("chat", "ROLE_COLOCATED")) == []
    assert await store.redis.hkeys(keys.latest_samples("other", "ROLE_COLOCATED")) == [b"chat-0"]


async def test_a_store_that_refuses_a_write_costs_windows_not_the_collector(
    start_collector, page_server, vllm_page, tmp_path, store
) -> None:
    await store.redis.set(keys.latest_partials("chat", "ROLE_COLOCATED"), "somebody else's")
    page = await page_server(serving(growing(vllm_page)))
    path = write_targets(tmp_path / "t.json", chat_0=page.host_and_port)
    collector = await start_collector(targets_files=[path])
    lost = ("trimtab_collector_rounds_total", {"outcome": "lost"})
    give_up = time.monotonic() + 30
    while not collector.context.registry.get_sample_value(*lost):
        assert time.monotonic() < give_up, "no round was refused"
        await asyncio.sleep(0.05)

    await store.redis.delete(keys.latest_partials("chat", "ROLE_COLOCATED"))
    found = await until(collector.stub, CHAT, OK)

    assert list(found.reported_replicas) == ["chat-0"]


async def test_a_store_of_another_schema_is_refused(start_collector, store) -> None:
    await store.redis.set(keys.SCHEMA, "0")
    collector = await start_collector()
    collector.may_fail = True

    with pytest.raises(StartupError, match="older schema 0"):
        await asyncio.wait_for(asyncio.shield(collector.task), 30)


async def test_a_targets_file_that_is_wrong_from_the_start_is_refused(start_collector, tmp_path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("- targets: [nowhere]\n")
    collector = await start_collector(targets_files=[path])
    collector.may_fail = True

    with pytest.raises(StartupError, match=r"t\.yaml: \[0\].targets\[0\]: 'nowhere' must be host:port"):
        await asyncio.wait_for(asyncio.shield(collector.task), 30)
