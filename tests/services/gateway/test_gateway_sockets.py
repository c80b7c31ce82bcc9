"""A real gateway between real sockets: what clients, servers and the actuator see of it."""

import asyncio

import aiohttp
import pytest

from simulator.core.tokens import TextCursor, count_tokens, text_of
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2

ROUTABLE = actuator_pb2.ENDPOINT_STATE_ROUTABLE
DRAINING = actuator_pb2.ENDPOINT_STATE_DRAINING
EVICTING = actuator_pb2.ENDPOINT_STATE_EVICTING
PROMPT = "tell" * 8


def expected_text(tokens: int, prompt: str = PROMPT) -> str:
    return text_of(TextCursor.after(prompt).take(tokens))


async def two_servers(gateway, **settings):
    a, b = await gateway.server("a"), await gateway.server("b")
    await gateway.start(**settings)
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE), ("b", b.address, ROUTABLE)]})
    return a, b


async def test_streamed_answer_passes_through_unchanged(gateway):
    a = await gateway.server("a")
    await gateway.start()
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE)]})
    answer = await gateway.stream(model="chat", prompt=PROMPT, max_tokens=20, stream_options={"include_usage": True})
    assert answer.status == 200
    assert answer.text == expected_text(20)
    assert (answer.finish_reasons, answer.done, answer.errors) == (["length"], 1, [])
    assert answer.usage == {"prompt_tokens": 8, "completion_tokens": 20, "total_tokens": 28}


async def test_service_name_becomes_the_model_that_the_replica_serves(gateway):
    a = await gateway.server("a")
    await gateway.start()
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE, types_pb2.ROLE_COLOCATED, "org/model-7b")]})
    status, _ = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=2)
    also, _ = await gateway.complete(model="org/model-7b", prompt=PROMPT, max_tokens=2)
    assert (status, also) == (200, 200)
    assert [body["model"] for body in a.bodies] == ["org/model-7b", "org/model-7b"]
    async with gateway.http.get(gateway.url + "/v1/models") as response:
        names = [card["id"] for card in (await response.json())["data"]]
    assert names == ["chat", "org/model-7b"]


async def test_unknown_model_is_404_and_bad_bodies_are_400(gateway):
    await two_servers(gateway)
    status, answer = await gateway.complete(model="nobody", prompt=PROMPT)
    assert (status, answer["error"]["param"]) == (404, "model")
    for body in (b"{", b"[]", b'{"prompt":"x"}', b'{"model":"chat"}', b'{"model":"chat","prompt":"x","max_tokens":0}'):
        async with gateway.http.post(gateway.url + "/v1/completions", data=body) as response:
            assert response.status == 400
            assert "message" in (await response.json())["error"]


async def test_requests_spread_over_the_least_loaded_replicas(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = b.gate_after = 1
    tasks = [asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=4)) for _ in range(6)]
    await wait_until(lambda: a.active + b.active == 6)
    assert (a.active, b.active) == (3, 3)
    a.gate.set()
    b.gate.set()
    assert all(answer.text == expected_text(4) for answer in await asyncio.gather(*tasks))


async def test_hidden_replica_gets_nothing_new_and_drains_by_acknowledgement(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = 2
    under_way = asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=6))
    await wait_until(lambda: a.active == 1)
    await gateway.publish(2, {"chat": [("a", a.address, DRAINING), ("b", b.address, ROUTABLE)]})
    last = gateway.actuator.acknowledged[-1]
    assert [(item.replica, item.requests, item.pinned) for item in last.in_flight] == [("a", 1, 0)]
    for _ in range(4):
        await gateway.complete(model="chat", prompt=PROMPT, max_tokens=2)
    assert (len(a.bodies), len(b.bodies)) == (1, 4)
    a.gate.set()
    assert (await under_way).text == expected_text(6)
    await gateway.actuator.wait_acknowledged(2, drained="a")


@pytest.mark.parametrize("tokenize", [True, False])
async def test_evicted_stream_goes_on_elsewhere_as_one_seamless_answer(gateway, wait_until, tokenize):
    a, b = await two_servers(gateway)
    b.tokenize = tokenize
    a.tokens_per_event = 3
    a.gate_after = 9
    stream = asyncio.create_task(
        gateway.stream(model="chat", prompt=PROMPT, max_tokens=24, stream_options={"include_usage": True})
    )
    await gateway.until_streamed(expected_text(9))
    await gateway.publish(2, {"chat": [("a", a.address, EVICTING), ("b", b.address, ROUTABLE)]})
    answer = await stream
    assert answer.text == expected_text(24)
    assert (answer.finish_reasons, answer.done, answer.errors) == (["length"], 1, [])
    assert answer.ids == {"id-a"}
    assert answer.usage == {"prompt_tokens": 8, "completion_tokens": 24, "total_tokens": 32}
    assert b.bodies[0]["prompt"] == PROMPT + expected_text(9)
    assert b.bodies[0]["max_tokens"] == 15
    await wait_until(lambda: a.gone == 1)
    await gateway.actuator.wait_acknowledged(2, drained="a")


async def test_evicted_chat_goes_on_by_its_unfinished_message(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = 4
    messages = [{"role": "user", "content": "hi there"}]
    ids = TextCursor.after("user: hi there\nassistant:").take(10)
    stream = asyncio.create_task(gateway.stream("/v1/chat/completions", model="chat", messages=messages, max_tokens=10))
    await gateway.until_streamed(text_of(ids[:4]))
    await gateway.publish(2, {"chat": [("a", a.address, EVICTING), ("b", b.address, ROUTABLE)]})
    answer = await stream
    assert answer.text == text_of(ids)
    assert answer.roles == 1
    assert b.bodies[0]["continue_final_message"] is True
    assert b.bodies[0]["max_tokens"] == 6


async def test_evicted_token_id_prompt_goes_on_by_token_ids(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = 5
    prompt = list(range(2000, 2012))
    ids = TextCursor.after(prompt).take(12)
    stream = asyncio.create_task(gateway.stream(model="chat", prompt=prompt, max_tokens=12))
    await gateway.until_streamed(text_of(ids[:5]))
    await gateway.publish(2, {"chat": [("a", a.address, EVICTING), ("b", b.address, ROUTABLE)]})
    answer = await stream
    assert answer.text == text_of(ids)
    assert b.bodies[0]["prompt"] == prompt + ids[:5]


async def test_evicted_request_that_cannot_be_continued_is_pinned_and_stays(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = 2
    stream = asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=6, presence_penalty=0.5))
    await gateway.until_streamed(expected_text(2))
    await gateway.publish(2, {"chat": [("a", a.address, EVICTING), ("b", b.address, ROUTABLE)]})
    await wait_until(lambda: [item.pinned for item in gateway.actuator.acknowledged[-1].in_flight] == [1])
    a.gate.set()
    assert (await stream).text == expected_text(6)
    assert not b.bodies


async def test_evicted_whole_answer_starts_afresh_elsewhere(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = 1
    call = asyncio.create_task(gateway.complete(model="chat", prompt=PROMPT, max_tokens=5))
    await wait_until(lambda: a.active == 1)
    await gateway.publish(2, {"chat": [("a", a.address, EVICTING), ("b", b.address, ROUTABLE)]})
    status, answer = await call
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(5))
    assert answer["id"] == "id-b"
    assert a.gone == 1


async def test_reissued_request_is_not_moved_again_and_is_reported_as_pinned(gateway, wait_until):
    a, b = await two_servers(gateway)
    a.gate_after = b.gate_after = 2
    stream = asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=8))
    await gateway.until_streamed(expected_text(2))
    await gateway.publish(2, {"chat": [("a", a.address, EVICTING), ("b", b.address, ROUTABLE)]})
    await wait_until(lambda: b.active == 1)
    await gateway.publish(3, {"chat": [("a", a.address, ROUTABLE), ("b", b.address, EVICTING)]})
    last = gateway.actuator.acknowledged[-1]
    assert [(item.replica, item.requests, item.pinned) for item in last.in_flight] == [("b", 1, 1)]
    b.gate.set()
    assert (await stream).text == expected_text(8)
    assert len(a.bodies) == 1


@pytest.mark.parametrize("how", ["abort", "reset", "eof", "error"])
async def test_stream_broken_by_its_server_is_continued_once(gateway, how):
    a, b = await two_servers(gateway)
    a.break_after, a.break_how = 7, how
    answer = await gateway.stream(model="chat", prompt=PROMPT, max_tokens=16)
    assert answer.text == expected_text(16)
    assert (answer.finish_reasons, answer.done, answer.errors) == (["length"], 1, [])
    assert len(b.bodies) == 1


@pytest.mark.parametrize("how", ["abort", "reset", "http_500"])
@pytest.mark.parametrize("stream", [True, False])
async def test_failure_before_the_first_byte_is_reissued_once(gateway, how, stream):
    a, b = await two_servers(gateway)
    a.break_after, a.break_how = 0, how
    if stream:
        answer = await gateway.stream(model="chat", prompt=PROMPT, max_tokens=4)
        text = answer.text
    else:
        _, whole = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=4)
        text = whole["choices"][0]["text"]
    assert text == expected_text(4)
    assert (len(a.bodies), len(b.bodies)) == (1, 1)


async def test_second_failure_ends_in_an_error_not_in_a_loop(gateway):
    a, b = await two_servers(gateway)
    a.break_how = b.break_how = "http_500"
    status, answer = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=4)
    assert status == 502
    assert "boom" in answer["error"]["message"]
    assert len(a.bodies) + len(b.bodies) == 2


async def test_second_failure_inside_a_stream_is_an_error_event(gateway):
    a, b = await two_servers(gateway)
    a.break_how = b.break_how = "reset"
    a.break_after = b.break_after = 3
    answer = await gateway.stream(model="chat", prompt=PROMPT, max_tokens=16)
    assert answer.text == expected_text(6)
    assert (len(answer.errors), answer.finish_reasons) == (1, [])


async def test_silent_server_is_given_up_after_the_idle_timeout(gateway):
    a, b = await two_servers(gateway, idle_timeout_s=1.5)
    a.break_how = "hang"
    status, answer = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=4)
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(4))
    assert len(b.bodies) == 1


async def test_dead_server_is_avoided_for_a_moment(gateway):
    a, b = await two_servers(gateway, avoid_s=30)
    await a.stop()
    for _ in range(3):
        status, _ = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=2)
        assert status == 200
    assert len(b.bodies) == 3


async def test_replicas_that_refuse_connections_are_passed_over_without_using_up_the_reissue(gateway):
    servers = [await gateway.server(name) for name in "abcd"]
    await gateway.start(avoid_s=30)
    await gateway.publish(1, {"chat": [(server.name, server.address, ROUTABLE) for server in servers]})
    await servers[0].stop()
    await servers[1].stop()
    servers[2].break_how = "http_500"
    status, answer = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=4)
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(4))
    async with gateway.http.get(gateway.url + "/metrics") as response:
        page = await response.text()
    assert 'trimtab_gateway_reissues_total{cause="error",service="chat"} 1.0' in page


async def test_dead_fleet_ends_in_502_after_a_few_tries(gateway):
    a, b = await two_servers(gateway, avoid_s=0.05)
    await a.stop()
    await b.stop()
    status, answer = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=4)
    assert status == 502
    assert "Cannot connect" in answer["error"]["message"]


async def test_client_errors_of_the_server_are_passed_on(gateway):
    a, b = await two_servers(gateway)
    a.break_how = b.break_how = "http_400"
    status, answer = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=4)
    assert (status, answer["error"]["message"]) == (400, "too long")
    assert len(a.bodies) + len(b.bodies) == 1


async def test_client_that_goes_away_cancels_the_server(gateway, wait_until):
    a, _ = await two_servers(gateway)
    a.gate_after = 2
    call = asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=9))
    await wait_until(lambda: a.active == 1)
    call.cancel()
    await wait_until(lambda: a.gone == 1)
    with pytest.raises(asyncio.CancelledError):
        await call
    page_has_none = "trimtab_gateway_in_flight_requests 0.0"

    async def page() -> str:
        async with gateway.http.get(gateway.url + "/metrics") as response:
            return await response.text()

    assert page_has_none in await page()


async def test_request_is_held_until_a_replica_is_routable_and_demand_is_reported(gateway, wait_until):
    a = await gateway.server("a")
    await gateway.start()
    await gateway.publish(1, {"chat": []})
    call = asyncio.create_task(gateway.complete(model="chat", prompt=PROMPT, max_tokens=7))
    held = lambda: any(d.held == 1 for report in gateway.collector.reports for d in report.demands)  # noqa: E731
    await wait_until(held)
    assert not call.done()
    await gateway.publish(2, {"chat": [("a", a.address, ROUTABLE)]})
    status, answer = await call
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(7))
    await wait_until(lambda: gateway.collector.total("chat", "arrivals") == 1)
    assert gateway.collector.total("chat", "prompt_tokens") == count_tokens(PROMPT)
    assert gateway.collector.total("chat", "requested_output_tokens") == 7


async def test_what_a_replica_has_and_has_answered_is_reported(gateway, wait_until):
    a = await gateway.server("a")
    await gateway.start()
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE)]})
    status, _ = await gateway.complete(model="chat", prompt=PROMPT, max_tokens=7)
    assert status == 200

    def answered() -> int:
        return sum(one.answered for report in gateway.collector.reports for one in report.replicas)

    await wait_until(lambda: answered() > 0)
    told = len(gateway.collector.reports)
    await wait_until(lambda: len(gateway.collector.reports) >= told + 3)
    assert {one.replica for report in gateway.collector.reports for one in report.replicas} == {"a"}
    assert answered() == 1, "an answer is told once"
    assert list(gateway.collector.reports[-1].replicas) == [], "a replica without work is not named"


async def test_full_hold_queue_and_long_waits_are_503_with_retry_after(gateway, wait_until):
    await gateway.start(max_held_per_service=1, max_hold_s=2.0)
    await gateway.publish(1, {"chat": []})
    first = asyncio.create_task(gateway.complete(model="chat", prompt=PROMPT))
    await wait_until(lambda: any(d.held for report in gateway.collector.reports for d in report.demands))
    async with gateway.http.post(gateway.url + "/v1/completions", json={"model": "chat", "prompt": "x"}) as refused:
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert "too many" in (await refused.json())["error"]["message"]
    status, answer = await first
    assert status == 503
    assert "too long" in answer["error"]["message"]


async def test_request_before_the_first_endpoint_set_waits_for_it(gateway):
    a = await gateway.server("a")
    await gateway.start()
    call = asyncio.create_task(gateway.complete(model="chat", prompt=PROMPT, max_tokens=2))
    await asyncio.sleep(0.1)
    assert not call.done()
    await gateway.publish(1, {"chat": [("a", a.address, ROUTABLE)]})
    assert (await call)[0] == 200


async def test_gone_actuator_leaves_the_last_set_in_force_and_comes_back(gateway, wait_until):
    a, b = await two_servers(gateway)
    await gateway.actuator.stop()
    for _ in range(3):
        assert (await gateway.complete(model="chat", prompt=PROMPT, max_tokens=2))[0] == 200
    gateway.actuator.acknowledged.clear()
    gateway.actuator.publish(5, {"chat": [("b", b.address, ROUTABLE)]})
    await gateway.actuator.start()
    await gateway.actuator.wait_acknowledged(5)
    before = len(a.bodies)
    assert (await gateway.complete(model="chat", prompt=PROMPT, max_tokens=2))[0] == 200
    assert len(a.bodies) == before


async def test_prefill_server_hands_its_kv_to_a_decode_server(gateway, wait_until):
    p, d = await gateway.server("p"), await gateway.server("d")
    await gateway.start()
    await gateway.publish(
        1,
        {
            "sum": [
                ("p", p.address, ROUTABLE, types_pb2.ROLE_PREFILL),
                ("d", d.address, ROUTABLE, types_pb2.ROLE_DECODE),
            ]
        },
    )
    d.gate_after = 0
    stream = asyncio.create_task(gateway.stream(model="sum", prompt=PROMPT, max_tokens=9))
    await wait_until(lambda: d.active == 1)
    first, second = p.bodies[0], d.bodies[0]
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["kv_transfer_params"] == p.kv_params
    assert second["max_tokens"] == 9
    # The KV is still to be fetched, so the prefill server is not free yet.
    endpoints = [("p", p.address, DRAINING, types_pb2.ROLE_PREFILL), ("d", d.address, ROUTABLE, types_pb2.ROLE_DECODE)]
    await gateway.publish(2, {"sum": endpoints})
    assert [item.replica for item in gateway.actuator.acknowledged[-1].in_flight] == ["p"]
    d.gate.set()
    assert (await stream).text == expected_text(9)
    await gateway.actuator.wait_acknowledged(2, drained="p")


async def test_prefill_server_is_free_once_decoding_has_begun(gateway, wait_until):
    p, d = await gateway.server("p"), await gateway.server("d")
    await gateway.start()
    decode = ("d", d.address, ROUTABLE, types_pb2.ROLE_DECODE)
    await gateway.publish(1, {"sum": [("p", p.address, ROUTABLE, types_pb2.ROLE_PREFILL), decode]})
    d.gate_after = 1
    stream = asyncio.create_task(gateway.stream(model="sum", prompt=PROMPT, max_tokens=9))
    await wait_until(lambda: d.active == 1)
    await gateway.publish(2, {"sum": [("p", p.address, DRAINING, types_pb2.ROLE_PREFILL), decode]})
    await gateway.actuator.wait_acknowledged(2, drained="p")
    assert not stream.done()
    d.gate.set()
    assert (await stream).text == expected_text(9)


async def test_hand_over_waits_for_a_decode_server_and_goes_on_when_one_comes(gateway, wait_until):
    p, q, d = await gateway.server("p"), await gateway.server("q"), await gateway.server("d")
    await gateway.start()
    p.gate_after = 0
    first = ("p", p.address, ROUTABLE, types_pb2.ROLE_PREFILL)
    await gateway.publish(1, {"sum": [first, ("d", d.address, ROUTABLE, types_pb2.ROLE_DECODE)]})
    call = asyncio.create_task(gateway.complete(model="sum", prompt=PROMPT, max_tokens=5))
    await wait_until(lambda: p.active == 1)
    await gateway.publish(2, {"sum": [first, ("d", d.address, DRAINING, types_pb2.ROLE_DECODE)]})
    p.gate.set()
    await wait_until(lambda: any(x.held for report in gateway.collector.reports for x in report.demands))
    endpoints = [
        ("p", p.address, EVICTING, types_pb2.ROLE_PREFILL),
        ("q", q.address, ROUTABLE, types_pb2.ROLE_PREFILL),
        ("e", d.address, ROUTABLE, types_pb2.ROLE_DECODE),
    ]
    await gateway.publish(3, {"sum": endpoints})
    status, answer = await call
    assert (status, answer["choices"][0]["text"]) == (200, expected_text(5))
    await gateway.actuator.wait_acknowledged(3, drained="p")


async def test_new_sets_and_ended_drains_are_acknowledged_at_once(gateway, wait_until):
    gateway.actuator.heartbeat_s = 30
    a, b = await two_servers(gateway, acknowledge_s=10)
    a.gate_after = 1
    stream = asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=3))
    await wait_until(lambda: a.active == 1)
    await asyncio.wait_for(gateway.publish(2, {"chat": [("a", a.address, DRAINING), ("b", b.address, ROUTABLE)]}), 30)
    assert [item.replica for item in gateway.actuator.acknowledged[-1].in_flight] == ["a"]
    a.gate.set()
    await stream
    await asyncio.wait_for(gateway.actuator.wait_acknowledged(2, drained="a"), 30)
    assert len(gateway.actuator.acknowledged) <= 5


async def test_broken_decode_server_is_replaced_with_a_second_hand_over(gateway):
    p, d, e = await gateway.server("p"), await gateway.server("d"), await gateway.server("e")
    await gateway.start()
    endpoints = [
        ("p", p.address, ROUTABLE, types_pb2.ROLE_PREFILL),
        ("d", d.address, ROUTABLE, types_pb2.ROLE_DECODE),
        ("e", e.address, ROUTABLE, types_pb2.ROLE_DECODE),
    ]
    await gateway.publish(1, {"sum": endpoints})
    d.break_after, d.break_how = 4, "reset"
    answer = await gateway.stream(model="sum", prompt=PROMPT, max_tokens=10)
    assert answer.text == expected_text(10)
    assert p.bodies[1]["prompt"] == PROMPT + expected_text(4)
    assert e.bodies[0]["max_tokens"] == 6


async def test_disaggregated_service_without_decode_holds(gateway, wait_until):
    p, d = await gateway.server("p"), await gateway.server("d")
    await gateway.start()
    await gateway.publish(1, {"sum": [("p", p.address, ROUTABLE, types_pb2.ROLE_PREFILL)]})
    call = asyncio.create_task(gateway.complete(model="sum", prompt=PROMPT, max_tokens=3))
    await wait_until(lambda: any(x.held for report in gateway.collector.reports for x in report.demands))
    assert not p.bodies
    endpoints = [("p", p.address, ROUTABLE, types_pb2.ROLE_PREFILL), ("d", d.address, ROUTABLE, types_pb2.ROLE_DECODE)]
    await gateway.publish(2, {"sum": endpoints})
    assert (await call)[0] == 200


async def test_busy_port_is_one_clear_line(gateway):
    from gateway.shell.serve import serve
    from gateway.shell.settings import GatewaySettings
    from trimtab.errors import StartupError
    from trimtab.rpc.run import ServiceContext

    await two_servers(gateway)
    again = GatewaySettings.model_validate({"listen": gateway.address, "actuators": gateway.settings.actuators})
    with pytest.raises(StartupError, match="in use"):
        await serve(again, ServiceContext("gateway"))


async def test_stop_lets_a_stream_end(gateway, wait_until):
    a, _ = await two_servers(gateway, drain_grace_s=5)
    a.gate_after = 2
    stream = asyncio.create_task(gateway.stream(model="chat", prompt=PROMPT, max_tokens=6))
    await wait_until(lambda: a.active == 1)
    gateway.context.stopping.set()
    async with asyncio.timeout(30):
        while await gateway.is_listening():  # noqa: ASYNC110  # a socket has no event for it
            await asyncio.sleep(0.01)
    with pytest.raises(aiohttp.ClientError):
        await gateway.complete(model="chat", prompt=PROMPT)
    a.gate.set()
    assert (await stream).text == expected_text(6)
