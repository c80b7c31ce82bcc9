"""One client request from its first replica to its last byte: relay, hand-over, reissue.

A request is sent to a second replica once: when its replica fails it or is evicted, and as long as the client can be
given one seamless answer. Before anything was passed on it starts afresh; after that, the second replica is asked
for the rest (prompt + text so far, `max_tokens` less what was sent) and ids and usage are rewritten. An answer that
is not streamed always starts afresh: the work done is lost, the client sees one answer.

Leaving an evicted replica cancels this request's own task while it waits for the server, and takes the cancellation
back (as `asyncio.timeout` does); a client that goes away cancels it for good.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import structlog
from aiohttp import web

from gateway.core.openai import (
    GenerationRequest,
    JsonObject,
    continuation_body,
    decode_body,
    encode,
    error_body,
    fresh_body,
    prefill_body,
)
from gateway.core.routing import ReplicaKey, Stage, Ticket
from gateway.core.sse import (
    DONE,
    BrokenStream,
    Continuation,
    EventBuffer,
    SentAnswer,
    choices_of,
    event_bytes,
    events_of,
    finish_reason_of,
    is_plain,
)
from gateway.shell.dispatch import Dispatcher, NoReplica
from gateway.shell.upstream import TRANSPORT_ERRORS, Upstream, UpstreamFailure
from trimtab.domain.vocabulary import Role

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 2
MAX_MISCONNECTIONS = 3
"""How many replicas that cannot even be connected to are passed over; none of them has seen the request."""
ABORT = "abort"
_PASSED_BACK = ("Content-Type", "X-Request-Id", "Retry-After")


class _Rejected(Exception):
    """A server refused the request as the client's mistake; its answer is passed on."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response.status)
        self.response = response


class Exchange:
    """Serves one request. `outcome` is set when `run` ends."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        upstream: Upstream,
        http_request: web.Request,
        generation: GenerationRequest,
        service: str,
        on_reissue: Callable[[str], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._http_request = http_request
        self._generation = generation
        self._service = service
        self._on_reissue = on_reissue
        self._headers = _forwarded_headers(http_request)
        self._task: asyncio.Task[object] | None = asyncio.current_task()
        self._sent = SentAnswer(generation.kind)
        self._response: web.StreamResponse | None = None
        self._may_leave = False
        """Whether the task waits for a server, where it can be interrupted without tearing the answer."""
        self._moving = False
        self._reissued = False
        self._misconnections = 0
        self._failed_on: set[ReplicaKey] = set()
        self.outcome = "failed"

    async def run(self) -> web.StreamResponse:
        """The finished response. Raises CancelledError when the client is gone."""
        while True:
            try:
                response = await self._attempt()
            except _Rejected as rejected:
                return await self._refuse(rejected)
            except NoReplica as missing:
                self.outcome = "no_replica"
                return await self._give_up(
                    503, str(missing), "Service Unavailable", {"Retry-After": str(RETRY_AFTER_S)}
                )
            except UpstreamFailure as failure:
                if failure.never_sent and self._misconnections < MAX_MISCONNECTIONS:
                    self._misconnections += 1
                    continue
                if self._reissued or not self._can_start_again():
                    log.warning("request failed", upstream_error=str(failure), reissued=self._reissued, **self._where())
                    return await self._give_up(502, str(failure), "BadGatewayError", {})
                log.info("request is reissued", upstream_error=str(failure), **self._where())
                cause = failure.cause
            except asyncio.CancelledError:
                if not self._taken_back():
                    self.outcome = "client_gone"
                    raise
                log.info("request is reissued", upstream_error="evicted", **self._where())
                cause = "evicted"
            else:
                self.outcome = "ok"
                return response
            self._reissued = True
            self._on_reissue(cause)

    def _where(self) -> dict[str, str]:
        """The fields of a log line about the request."""
        return {"of_service": self._service, "request_id": self._headers.get("X-Request-Id", "")}

    # Leaving a replica

    def move(self, ticket: Ticket) -> None:
        """See `dispatch.Mover`."""
        if self._reissued or not self._can_start_again():
            ticket.movable = False
        elif self._may_leave and not self._moving and self._task is not None:
            self._moving = True
            self._task.cancel()

    def _taken_back(self) -> bool:
        if not self._moving or self._task is None:
            return False
        self._moving = False
        return self._task.uncancel() == 0

    def _can_start_again(self) -> bool:
        if self._sent.empty:
            return True
        if not self._generation.continuable or not self._sent.only_text:
            return False
        return not self._generation.token_id_prompt or self._sent.token_ids is not None

    # One attempt

    async def _attempt(self) -> web.StreamResponse:
        if self._response is not None and self._sent.finished:
            return await self._end(DONE)
        again = self._reissued or self._misconnections > 0
        ticket = await self._dispatcher.acquire(self._service, Stage.FRONT, self, again=again, failed=self._failed_on)
        try:
            ticket.movable = not self._reissued
            if self._sent.empty:
                return await self._serve(ticket, fresh_body(self._generation, ticket.target.model), None)
            sent_tokens = await self._sent_tokens(ticket)
            continuation = Continuation(self._generation.kind, self._sent, sent_tokens)
            if self._generation.max_tokens is not None and sent_tokens >= self._generation.max_tokens:
                end = continuation.rest_without_server(
                    include_usage=self._generation.include_usage, prompt_tokens=self._generation.prompt_tokens
                )
                return await self._end(end)
            body = continuation_body(
                self._generation,
                ticket.target.model,
                text=self._sent.text,
                token_ids=self._sent.token_ids if self._generation.token_id_prompt else None,
                sent_tokens=sent_tokens,
            )
            return await self._serve(ticket, body, continuation)
        finally:
            self._dispatcher.release(ticket)

    async def _sent_tokens(self, ticket: Ticket) -> int:
        """How many tokens the client has: as the servers reported, else as the new server counts, else estimated."""
        exact = self._sent.exact_tokens
        if exact is not None:
            return exact
        counted = await self._upstream.count_tokens(ticket.target, self._sent.text, self._headers)
        return counted if counted is not None else self._sent.estimated_tokens

    async def _serve(self, ticket: Ticket, body: JsonObject, continuation: Continuation | None) -> web.StreamResponse:
        if ticket.target.role is not Role.PREFILL:
            return await self._relay(ticket, body, continuation, None)
        handed_over = await self._prefill(ticket, body)
        self._may_leave = True
        try:
            decode = await self._dispatcher.acquire(
                self._service, Stage.DECODE, self, cluster=ticket.target.cluster, failed=self._failed_on
            )
        finally:
            self._may_leave = False
        try:
            decode.movable = not self._reissued
            # The prefill server's KV is needed until the decode server has it, so its ticket is kept until then.
            return await self._relay(decode, handed_over, continuation, ticket)
        finally:
            self._dispatcher.release(decode)

    async def _prefill(self, ticket: Ticket, body: JsonObject) -> JsonObject:
        """The body for the decode server."""
        response = await self._post(ticket, encode(prefill_body(body)))
        data = await self._read_whole(ticket, response)
        answer = self._checked_answer(ticket, data)
        try:
            return decode_body(body, answer)
        except ValueError as error:
            raise self._failed(ticket, UpstreamFailure.error(ticket.target, str(error))) from None

    async def _relay(
        self, ticket: Ticket, body: JsonObject, continuation: Continuation | None, prefill: Ticket | None
    ) -> web.StreamResponse:
        raw = self._generation.raw if body is self._generation.body else encode(body)
        response = await self._post(ticket, raw)
        if not self._generation.stream:
            data = await self._read_whole(ticket, response)
            self._checked_answer(ticket, data)
            return web.Response(body=data, headers=_answer_headers(response))
        try:
            return await self._relay_stream(ticket, response, continuation, prefill)
        finally:
            response.close()

    async def _post(self, ticket: Ticket, raw: bytes) -> aiohttp.ClientResponse:
        self._may_leave = True
        try:
            response = await self._upstream.post(ticket.target, self._generation.kind.value, raw, self._headers)
        except UpstreamFailure as failure:
            raise self._failed(ticket, failure) from None
        finally:
            self._may_leave = False
        if response.status != 200:
            data = await self._read_whole(ticket, response)
            raise _Rejected(web.Response(status=response.status, body=data, headers=_answer_headers(response)))
        return response

    async def _read_whole(self, ticket: Ticket, response: aiohttp.ClientResponse) -> bytes:
        self._may_leave = True
        try:
            return await response.read()
        except TRANSPORT_ERRORS as error:
            raise self._failed(ticket, UpstreamFailure.unreachable(ticket.target, error)) from None
        finally:
            self._may_leave = False
            response.close() if not response.content.is_eof() else response.release()

    def _checked_answer(self, ticket: Ticket, data: bytes) -> JsonObject:
        """The answer's object where something in it is needed; an aborted one is a failure with status 200."""
        suspicious = b'"abort"' in data or b"kv_transfer_params" in data
        answer: object = {}
        if suspicious:
            try:
                answer = json.loads(data)
            except ValueError:
                answer = None
        if not isinstance(answer, dict):
            raise self._failed(ticket, UpstreamFailure.error(ticket.target, "the answer is not a JSON object"))
        if any(choice.get("finish_reason") == ABORT for choice in choices_of(answer)):
            raise self._failed(ticket, UpstreamFailure.aborted(ticket.target))
        self._dispatcher.router.answered(ticket)
        return answer

    def _failed(self, ticket: Ticket, failure: UpstreamFailure) -> UpstreamFailure:
        self._dispatcher.failed(ticket, failure.failure)
        self._failed_on.add(ticket.target.key)
        return failure

    # Streams

    async def _relay_stream(
        self,
        ticket: Ticket,
        response: aiohttp.ClientResponse,
        continuation: Continuation | None,
        prefill: Ticket | None,
    ) -> web.StreamResponse:
        buffer = EventBuffer()
        while True:
            self._may_leave = True
            try:
                data = await response.content.readany()
            except TRANSPORT_ERRORS as error:
                raise self._failed(ticket, UpstreamFailure.unreachable(ticket.target, error)) from None
            finally:
                self._may_leave = False
            if not data:
                raise self._failed(ticket, UpstreamFailure.cut_off(ticket.target, "the stream ended early"))
            try:
                piece = buffer.feed(data)
                if not piece:
                    continue
                end: UpstreamFailure | bool = False
                if continuation is not None or not is_plain(piece):
                    piece, end = self._inspect(ticket, piece, continuation)
            except BrokenStream as error:
                raise self._failed(ticket, UpstreamFailure.cut_off(ticket.target, str(error))) from None
            if piece:
                self._dispatcher.router.answered(ticket)
                if prefill is not None:
                    # The decode half has begun: the prefill server has done its part.
                    self._dispatcher.release(prefill)
                    prefill = None
            if end is True:
                return await self._end(piece)
            if piece:
                await self._pass_on(piece, ticket)
            if isinstance(end, UpstreamFailure):
                raise self._failed(ticket, end)

    def _inspect(
        self, ticket: Ticket, piece: bytes, continuation: Continuation | None
    ) -> tuple[bytes, UpstreamFailure | bool]:
        """What of the piece is passed on, and whether the answer ended with it: True at `[DONE]`, or how it failed."""
        out: list[bytes] = []
        end: UpstreamFailure | bool = False
        for event in events_of(piece):
            if event is None:
                out.append(DONE)
                end = True
                break
            error = event.get("error")
            if error is not None and not choices_of(event):
                end = UpstreamFailure.error(ticket.target, encode({"error": error}).decode())
                break
            if finish_reason_of(event) == ABORT:
                end = UpstreamFailure.aborted(ticket.target)
                break
            shown = event if continuation is None else continuation.rewrite(event)
            if shown is not None:
                out.append(event_bytes(shown))
        if continuation is None and not isinstance(end, UpstreamFailure):
            return piece, end
        return b"".join(out), end

    async def _pass_on(self, piece: bytes, ticket: Ticket | None) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            )
            await self._response.prepare(self._http_request)
        if piece:
            self._sent.append(piece)
        if ticket is not None and not self._generation.continuable:
            ticket.movable = False
        if piece:
            await self._response.write(piece)
        return self._response

    async def _end(self, piece: bytes) -> web.StreamResponse:
        response = await self._pass_on(piece, None)
        await response.write_eof()
        return response

    async def _refuse(self, rejected: _Rejected) -> web.StreamResponse:
        self.outcome = "client_error"
        if self._response is None:
            return rejected.response
        # The second server refuses the rest of an answer that is under way: for the client the answer fails.
        self.outcome = "failed"
        return await self._give_up(502, "the answer could not be continued", "BadGatewayError", {})

    async def _give_up(self, status: int, message: str, kind: str, headers: dict[str, str]) -> web.StreamResponse:
        body = error_body(status, message, error_type=kind)
        if self._response is None:
            return web.Response(status=status, body=body, content_type="application/json", headers=headers)
        return await self._end(b"data: " + body + b"\n\n" + DONE)


def _forwarded_headers(request: web.Request) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    for name in ("Authorization", "X-Request-Id"):
        if name in request.headers:
            headers[name] = request.headers[name]
    return headers


def _answer_headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: response.headers[name] for name in _PASSED_BACK if name in response.headers}
