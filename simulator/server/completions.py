"""Answers `/v1/completions` and `/v1/chat/completions`: sequences into the engine, text or events back."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import Sequence

from aiohttp import HttpVersion11, web

from simulator.core.requests import FinishedRequest, FinishReason
from simulator.core.tokens import OutputPlan, Prompt, TextCursor, count_tokens, plan_output, text_of
from simulator.server.openai_answers import Choice, answer_body
from simulator.server.openai_api import ApiError, Call, KvTransferParams, output_limit
from simulator.server.server import SimulatedServer
from simulator.server.streaming import AnswerHead, ChoiceStream, EventWriter
from simulator.server.vllm_metrics import RequestParams


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """One sequence of an answer."""

    index: int
    request_id: str
    prompt: Prompt
    plan: OutputPlan
    params: RequestParams


@dataclasses.dataclass(frozen=True, slots=True)
class _Handover:
    """What `kv_transfer_params` request of this server."""

    external_kv: tuple[str, str] | None = None
    hold_kv: bool = False


_serial = itertools.count(1)


async def answer(server: SimulatedServer, request: web.Request, call: Call) -> web.StreamResponse:
    """Serve one parsed call; raises ApiError for what cannot be served."""
    if call.model is not None and call.model != server.settings.model_name:
        message = f"The model `{call.model}` does not exist. Valid aliases: {server.settings.model_name}."
        raise ApiError(404, message, "NotFoundError", "model")
    asked_id = request.headers.get("X-Request-Id")
    answer_id = f"{'chatcmpl' if call.chat else 'cmpl'}-{asked_id or uuid.uuid4().hex[:16]}"
    jobs = _jobs(server, call, answer_id)
    headers = {"X-Request-Id": asked_id} if asked_id else {}
    handover = _handover(call.kv_transfer)
    server.check_queue()
    if call.stream:
        return await _stream(server, request, call, answer_id, jobs, handover, headers)
    pending = _submit(server, jobs, handover, [None] * len(jobs))
    finished = await _all_done(server, pending)
    return _plain(server, call, answer_id, jobs, finished, headers)


def _jobs(server: SimulatedServer, call: Call, answer_id: str) -> list[_Job]:
    jobs = []
    for position, prompt in enumerate(call.prompts):
        limit = output_limit(call, prompt, server.limits.max_model_len)
        plan = plan_output(
            prompt,
            max_tokens=limit,
            min_tokens=call.min_tokens,
            stop=call.stop,
            may_end=call.may_end,
            include_stop=call.include_stop,
        )
        params = RequestParams(call.n, limit)
        for copy in range(call.n):
            index = position * call.n + copy
            # The serial keeps engine ids apart when a client reuses its X-Request-Id.
            jobs.append(_Job(index, f"{answer_id}-{index}-{next(_serial)}", prompt, plan, params))
    return jobs


def _handover(params: KvTransferParams | None) -> _Handover:
    if params is None:
        return _Handover()
    if params.do_remote_prefill and params.remote_engine_id and params.remote_request_id:
        return _Handover(external_kv=(params.remote_engine_id, params.remote_request_id))
    return _Handover(hold_kv=params.do_remote_decode)


def _submit(
    server: SimulatedServer, jobs: list[_Job], handover: _Handover, sinks: Sequence[ChoiceStream | None]
) -> dict[str, asyncio.Future[FinishedRequest]]:
    return {
        job.request_id: server.submit(
            job.request_id,
            job.prompt,
            job.plan,
            job.params,
            sink=sink,
            external_kv=handover.external_kv,
            hold_kv=handover.hold_kv,
        )
        for job, sink in zip(jobs, sinks, strict=True)
    }


async def _all_done(
    server: SimulatedServer, pending: dict[str, asyncio.Future[FinishedRequest]]
) -> list[FinishedRequest]:
    """Wait for every sequence; when the client goes away meanwhile, abort them."""
    try:
        return [await done for done in pending.values()]
    except asyncio.CancelledError:
        _abort(server, pending)
        raise


def _abort(server: SimulatedServer, pending: dict[str, asyncio.Future[FinishedRequest]]) -> None:
    for request_id in pending:
        server.driver.abort(request_id)


def _plain(
    server: SimulatedServer,
    call: Call,
    answer_id: str,
    jobs: list[_Job],
    finished: list[FinishedRequest],
    headers: dict[str, str],
) -> web.Response:
    if any(f.reason is FinishReason.ERROR for f in finished):
        raise ApiError(500, "Internal server error", "InternalServerError")
    body = answer_body(
        call,
        answer_id,
        int(time.time()),
        server.settings.model_name,
        [_choice(job, one) for job, one in zip(jobs, finished, strict=True)],
        prompt_tokens=sum(count_tokens(prompt) for prompt in call.prompts),
        completion_tokens=sum(f.generated_tokens for f in finished),
        kv_transfer=_kv_answer(server, call, jobs, finished),
    )
    return web.Response(body=body.encode(), headers={"Content-Type": "application/json", **headers})


def _choice(job: _Job, finished: FinishedRequest) -> Choice:
    token_ids = TextCursor.after(job.prompt).take(finished.generated_tokens)
    text = text_of(token_ids)
    if job.plan.text_chars is not None:
        text = text[: job.plan.text_chars]
    stop_reason = job.plan.stop_reason if finished.reason is FinishReason.STOP else None
    return Choice(job.index, text, tuple(token_ids), job.prompt, finished.reason.value, stop_reason)


def _kv_answer(
    server: SimulatedServer, call: Call, jobs: list[_Job], finished: list[FinishedRequest]
) -> dict[str, object] | None:
    """What a prefill server passes to the decode server, through the gateway."""
    params = call.kv_transfer
    if params is None or not params.do_remote_decode or finished[0].reason is FinishReason.ABORT:
        return None
    blocks = server.limits.blocks_for(finished[0].request.prompt_tokens)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": list(range(blocks)),
        "remote_engine_id": server.settings.name,
        "remote_request_id": jobs[0].request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": server.settings.profile.tensor_parallel,
    }


async def _stream(
    server: SimulatedServer,
    request: web.Request,
    call: Call,
    answer_id: str,
    jobs: list[_Job],
    handover: _Handover,
    headers: dict[str, str],
) -> web.StreamResponse:
    chunked = request.version >= HttpVersion11
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
    if chunked:
        response.enable_chunked_encoding()
    # The headers go out here, also from a sleeping server, as vLLM's do.
    await response.prepare(request)
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    writer = EventWriter(transport, chunked=chunked)
    head = AnswerHead(call, answer_id, int(time.time()), server.settings.model_name)
    interval = server.settings.stream_interval
    streams = [ChoiceStream(head, writer, j.index, TextCursor.after(j.prompt), j.plan, interval) for j in jobs]
    pending = _submit(server, jobs, handover, streams)
    try:
        finished = []
        for stream, done in zip(streams, pending.values(), strict=True):
            one = await done
            stream.finish(one.reason.value)
            finished.append(one)
    except asyncio.CancelledError:
        _abort(server, pending)
        raise
    if call.include_usage:
        prompt_tokens = sum(count_tokens(prompt) for prompt in call.prompts)
        writer.write(head.usage_event(prompt_tokens, sum(f.generated_tokens for f in finished)))
    writer.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
