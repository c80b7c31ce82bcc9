"""Requests and streams as bytes: what is read out of them and what is made of them."""

import itertools
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.demand import DemandTally, ReplicaReport, until_report_s
from gateway.core.openai import (
    BadRequest,
    Kind,
    continuation_body,
    decode_body,
    fresh_body,
    parse_request,
    prefill_body,
)
from gateway.core.sse import (
    MAX_EVENT_BYTES,
    BrokenStream,
    Continuation,
    EventBuffer,
    SentAnswer,
    event_bytes,
    events_of,
    finish_reason_of,
    is_plain,
)
from simulator.core.tokens import TextCursor, text_of


def completion(**body):
    return parse_request(Kind.COMPLETION, json.dumps({"model": "m", "prompt": "four" * 3, **body}).encode())


def chat(**body):
    messages = [{"role": "user", "content": "hello"}]
    return parse_request(Kind.CHAT, json.dumps({"model": "m", "messages": messages, **body}).encode())


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("four" * 3, 3), ("five5", 2), ([1, 2, 3], 3), (["four", "fo"], 2), ([[1, 2], [3]], 3)],
)
def test_prompt_tokens_are_counted_or_estimated(prompt, tokens):
    assert completion(prompt=prompt).prompt_tokens == tokens


def test_chat_tokens_count_text_parts_and_message_overhead():
    parts = [{"type": "text", "text": "12345678"}, {"type": "image_url", "image_url": {}}]
    assert chat(messages=[{"role": "user", "content": parts}, {"role": "user", "content": None}]).prompt_tokens == 10


def test_output_limits_follow_each_route():
    assert (completion().max_tokens, chat().max_tokens) == (16, None)
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert (completion(max_tokens=3).requested_output_tokens, chat().requested_output_tokens) == (3, 256)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 2},
        {"echo": True},
        {"logprobs": 0},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"prompt": ["a", "b"]},
        {"kv_transfer_params": {"do_remote_decode": True}},
    ],
)
def test_requests_that_cannot_be_continued(more):
    assert not completion(**more).continuable


@pytest.mark.parametrize(
    "more", [{}, {"n": 1, "echo": False, "logprobs": None, "presence_penalty": 0}, {"stop": ["x"]}]
)
def test_requests_that_can_be_continued(more):
    assert completion(**more).continuable
    assert chat(response_format={"type": "text"}).continuable
    assert not chat(tools=[{"type": "function"}]).continuable


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"\xff", None),
        (b'{"prompt":"x"}', "model"),
        (b'{"model":3,"prompt":"x"}', "model"),
        (b'{"model":"m"}', "prompt"),
        (b'{"model":"m","prompt":[]}', "prompt"),
        (b'{"model":"m","prompt":[1,"a"]}', "prompt"),
        (b'{"model":"m","prompt":"x","max_tokens":true}', "max_tokens"),
        (b'{"model":"m","prompt":"x","max_tokens":-1}', "max_tokens"),
        (b"[" * 100_000, None),
    ],
)
def test_bad_bodies_name_the_field(raw, param):
    with pytest.raises(BadRequest) as refused:
        parse_request(Kind.COMPLETION, raw)
    assert refused.value.param == param


def test_body_is_untouched_unless_something_must_change():
    request = completion(unknown_field=[1])
    assert fresh_body(request, "m") is request.body
    assert fresh_body(request, "other") == {**request.body, "model": "other"}


def test_continuation_asks_for_the_rest():
    request = completion(max_tokens=10, min_tokens=6)
    body = continuation_body(request, "m", text=" abc def", token_ids=None, sent_tokens=2)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ("four" * 3 + " abc def", 8, 4)
    with pytest.raises(ValueError, match="nothing is left"):
        continuation_body(request, "m", text="", token_ids=None, sent_tokens=10)


def test_continued_chat_extends_a_message_that_was_left_open():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
    request = chat(messages=messages, continue_final_message=True, add_generation_prompt=False, max_completion_tokens=9)
    body = continuation_body(request, "m", text=" more", token_ids=None, sent_tokens=1)
    assert body["messages"][-1] == {"role": "assistant", "content": "I say more"}
    assert body["max_completion_tokens"] == 8


def test_hand_over_bodies_follow_the_nixl_proxy():
    request = completion(stream=True, stream_options={"include_usage": True}, max_tokens=50, min_tokens=5)
    first = prefill_body(request.body)
    assert (first["stream"], first["max_tokens"]) == (False, 1)
    assert "stream_options" not in first
    assert "min_tokens" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert prefill_body(chat(max_completion_tokens=9).body)["max_completion_tokens"] == 1
    second = decode_body(request.body, {"kv_transfer_params": {"remote_engine_id": "p"}})
    assert (second["stream"], second["max_tokens"]) == (True, 50)
    with pytest.raises(ValueError, match="no kv_transfer_params"):
        decode_body(request.body, {})


@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=6), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_event_buffer_gives_back_every_byte_in_whole_events(texts, cuts):
    data = b"".join(event_bytes({"choices": [{"text": text}]}) for text in texts)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    buffer = EventBuffer()
    pieces = [buffer.feed(data[start:end]) for start, end in itertools.pairwise(edges)]
    assert b"".join(pieces) == data
    assert all(not piece or piece.endswith(b"\n\n") for piece in pieces)


def test_event_without_end_is_refused():
    buffer = EventBuffer()
    with pytest.raises(BrokenStream):
        buffer.feed(b"x" * (MAX_EVENT_BYTES + 1))


@given(text=st.text())
@example(text="abort")
@example(text="error")
def test_generated_text_is_never_taken_for_an_end_or_an_abort(text):
    piece = event_bytes({"choices": [{"text": text, "finish_reason": None}]})
    if "[DONE]" not in text and text not in ("abort", "error"):
        assert is_plain(piece), "it need not be parsed"
    (event,) = events_of(piece)
    assert event["choices"][0]["text"] == text
    assert finish_reason_of(event) is None
    assert "error" not in event


@pytest.mark.parametrize("piece", [b"data: {\n\n", b"data: [1]\n\n"])
def test_broken_events_are_told(piece):
    with pytest.raises(BrokenStream):
        list(events_of(piece))


def sent(kind, *events):
    answer = SentAnswer(kind)
    for event in events:
        answer.append(event_bytes(event))
    return answer


def test_sent_tokens_are_exact_where_the_server_says_so():
    chunk = {"id": "x", "choices": [{"text": " abc def"}]}
    assert sent(Kind.COMPLETION, chunk).exact_tokens is None
    assert sent(Kind.COMPLETION, chunk).estimated_tokens == 2
    assert sent(Kind.COMPLETION, {**chunk, "usage": {"completion_tokens": 5}}).exact_tokens == 5
    named = {"choices": [{"text": " abc def", "token_ids": [7, 8, 9]}]}
    assert sent(Kind.COMPLETION, named).exact_tokens == 3
    assert sent(Kind.COMPLETION, named, chunk).token_ids is None
    assert SentAnswer(Kind.COMPLETION).exact_tokens == 0


def test_long_answers_are_kept_as_text_not_as_events():
    answer = SentAnswer(Kind.COMPLETION)
    words = [text_of([token]) for token in TextCursor(1, 1).take(2000)]
    for word in words:
        answer.append(event_bytes({"id": "x", "choices": [{"text": word, "padding": "p" * 100}]}))
    assert answer._unread_bytes < 70_000
    assert answer.text == "".join(words)


def test_reasoning_cannot_be_continued():
    assert not sent(Kind.CHAT, {"choices": [{"delta": {"reasoning_content": "hm"}}]}).only_text
    assert sent(Kind.CHAT, {"choices": [{"delta": {"content": "hm"}}]}).only_text


def test_continuation_reads_as_the_rest_of_the_first_answer():
    before = sent(Kind.CHAT, {"id": "one", "created": 1, "model": "m", "choices": [{"delta": {"content": " abc"}}]})
    rest = Continuation(Kind.CHAT, before, 1)
    head = {"id": "two", "choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    assert rest.rewrite(head) is None
    event = {"id": "two", "created": 9, "model": "m", "choices": [{"delta": {"role": "assistant", "content": " def"}}]}
    assert rest.rewrite(event) == {
        "id": "one",
        "created": 1,
        "model": "m",
        "choices": [{"delta": {"content": " def"}}],
    }
    usage = {
        "prompt_tokens": 11,
        "completion_tokens": 4,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 11},
    }
    whole = rest.rewrite({"id": "two", "choices": [], "usage": usage})
    assert whole["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 10},
    }


def test_demand_that_was_not_delivered_is_reported_again_over_a_longer_interval():
    tally = DemandTally(0.0)
    tally.note("chat", prompt_tokens=10, output_tokens=5)
    first = tally.report(1.0, {"chat": 2, "idle": 0})
    assert [(r.service, r.interval_s, r.arrivals, r.held) for r in first] == [("chat", 1.0, 1, 2), ("idle", 1.0, 0, 0)]
    tally.note("chat", prompt_tokens=1, output_tokens=1)
    second = tally.report(2.0, {"chat": 0})
    assert [(r.interval_s, r.arrivals, r.prompt_tokens) for r in second] == [(2.0, 2, 11)]
    tally.note("chat", prompt_tokens=100, output_tokens=1)
    tally.delivered()
    third = tally.report(3.0, {"chat": 0})
    assert [(r.interval_s, r.arrivals, r.prompt_tokens) for r in third] == [(1.0, 1, 100)]


def test_demand_of_a_long_outage_is_dropped():
    tally = DemandTally(0.0)
    tally.note("chat", prompt_tokens=10, output_tokens=5)
    tally.report(50.0, {"chat": 0})
    assert [(r.interval_s, r.arrivals) for r in tally.report(100.0, {"chat": 0})] == [(50.0, 0)]


def test_answers_of_replicas_are_told_until_they_have_arrived() -> None:
    tally = DemandTally(0.0)

    assert tally.report_replicas({"a": (1, 5), "b": (0, 0)}) == [ReplicaReport(replica="a", in_flight=1, answered=5)]
    assert tally.report_replicas({"a": (0, 6)}) == [ReplicaReport(replica="a", in_flight=0, answered=6)]
    tally.delivered()
    assert tally.report_replicas({"a": (0, 6)}) == []
    assert tally.report_replicas({"a": (2, 3)}) == [ReplicaReport(replica="a", in_flight=2, answered=3)]


@pytest.mark.parametrize(
    ("wall_s", "every_s", "pause_s"),
    [
        (100.0, 1.0, 0.9),
        (100.3, 1.0, 0.6),
        (100.5, 1.0, 1.4),
        (100.95, 1.0, 0.95),
        (100.0, 0.05, 0.0375),
        (7.0, 10.0, 12.9),
    ],
    ids=["at the end", "well before", "too soon after the last", "a little late", "often", "seldom"],
)
def test_demand_is_reported_shortly_before_windows_end(wall_s: float, every_s: float, pause_s: float) -> None:
    assert until_report_s(wall_s, every_s) == pytest.approx(pause_s)
