"""An open-loop client: every request is sent at its time, however the others fare.

Answers are streamed. While one runs, only its chunks' times are noted; it is read when it has ended, so that the client
takes as little as possible of a machine that it shares with the fleet. Times start at the planned arrival.

Limits: one process and one thread; `late_s` of the records shows when that was not enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from simulator.replay.prompts import PromptMaker, expected_answer
from simulator.replay.report import Outcome, ReplayProgress, ReplayReport, RequestRecord
from simulator.traces.model import TraceRequest

_PROGRESS_S = 0.25
_CONNECT_PAUSE_S = 0.1
_MAX_DETAIL = 200
OnProgress = Callable[[ReplayProgress], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How a trace is sent."""

    url: str
    """The gateway, `http://host:port`; requests go to `/v1/completions` with the service's name as the model."""
    seed: int = 1
    """Seed of the prompts' text."""
    request_timeout_s: float = 180.0
    finish_timeout_s: float = 60.0
    """How long answers may take after the trace has ended."""
    connect_timeout_s: float = 5.0
    """How long a gateway that refuses connections (a restart) is tried again before the request is lost."""
    max_in_flight: int = 4096
    token_ids: bool = False
    """Send prompts as token ids, for servers whose tokenizer is not the simulator's."""
    id_prefix: str = ""
    """With the request's place in the trace it is sent as `X-Request-Id`, to be found in logs; empty: none is sent."""
    check_text: bool = True
    """Compare each answer with the text that simulated servers give; off for real servers."""


@dataclasses.dataclass(slots=True)
class _Reading:
    """One answer as its bytes came."""

    chunks: list[bytes] = dataclasses.field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer, read."""

    text: str
    completion_tokens: int | None
    """From `usage`."""
    finish_reason: str | None
    error: str | None
    done: bool


def read_answer(data: bytes) -> Answer:
    """Parse a stream of events. Raises ValueError or TypeError for events that are not JSON objects."""
    text: list[str] = []
    tokens: int | None = None
    reason: str | None = None
    error: str | None = None
    done = False
    for block in data.split(b"\n\n"):
        if not block.startswith(b"data:"):
            continue
        payload = block[5:].strip()
        if payload == b"[DONE]":
            done = True
            continue
        event = json.loads(payload)
        if not isinstance(event, dict):
            raise TypeError("an event is not a JSON object")
        if "error" in event:
            error = json.dumps(event["error"])
        usage = event.get("usage")
        if isinstance(usage, dict):
            tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            text.append(choice.get("text") or "")
            reason = choice.get("finish_reason") or reason
    return Answer("".join(text), tokens, reason, error, done)


class _Run:
    """One replay under way."""

    def __init__(
        self, requests: Sequence[TraceRequest], options: ReplayOptions, session: aiohttp.ClientSession
    ) -> None:
        self.requests = requests
        self.options = options
        self.records: dict[int, RequestRecord] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.lost = 0
        self.received_tokens = 0
        self.start_s = time.monotonic()
        self._session = session
        self._prompts = PromptMaker(options.seed)

    async def send_all(self) -> None:
        """Start every request at its time."""
        for index, request in enumerate(self.requests):
            wait_s = self.start_s + request.arrival_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self.sent += 1
            if len(self.tasks) >= self.options.max_in_flight:
                detail = f"{len(self.tasks)} requests were under way"
                self._record(self._blank(index, Outcome.NOT_SENT, detail))
                continue
            task = asyncio.create_task(self._send(index, request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _send(self, index: int, request: TraceRequest) -> None:
        planned_s = self.start_s + request.arrival_s
        late_s = max(0.0, time.monotonic() - planned_s)
        prompt = (
            self._prompts.token_ids(index, request.prompt_tokens)
            if self.options.token_ids
            else self._prompts.text(index, request.prompt_tokens)
        )
        reading = _Reading()
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                failure = await self._exchange(index, prompt, reading)
        except aiohttp.ClientError as error:
            failure = (Outcome.CONNECTION, str(error) or type(error).__name__)
        except TimeoutError:
            failure = (Outcome.TIMEOUT, f"no complete answer in {self.options.request_timeout_s:g} s")
        except OSError as error:
            failure = (Outcome.CONNECTION, str(error))
        except asyncio.CancelledError:
            self._record(self._blank(index, Outcome.UNFINISHED, "the replay ended"))
            raise
        self._record(self._judged(index, prompt, reading, failure, planned_s, late_s))

    async def _exchange(self, index: int, prompt: str | list[int], reading: _Reading) -> tuple[Outcome, str] | None:
        """Send and read one request; returns how it failed where the answer itself does not show it."""
        request = self.requests[index]
        body = json.dumps(
            {
                "model": request.service,
                "prompt": prompt,
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            separators=(",", ":"),
        ).encode()
        headers = {"Content-Type": "application/json"}
        if self.options.id_prefix:
            headers["X-Request-Id"] = f"{self.options.id_prefix}{index}"
        async with await self._post(body, headers) as response:
            if response.status != 200:
                text = (await response.text())[:_MAX_DETAIL]
                return Outcome.HTTP_ERROR, f"{response.status} {text}"
            while chunk := await response.content.readany():
                reading.last_s = time.monotonic()
                if reading.first_s is None:
                    reading.first_s = reading.last_s
                reading.chunks.append(chunk)
        return None

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The answer's head. A gateway that cannot be connected to has not seen the request, so it is tried again."""
        give_up_s = time.monotonic() + self.options.connect_timeout_s
        while True:
            try:
                return await self._session.post(self.options.url + "/v1/completions", data=body, headers=headers)
            except aiohttp.ClientConnectorError:
                if time.monotonic() >= give_up_s:
                    raise
                await asyncio.sleep(_CONNECT_PAUSE_S)

    def _judged(
        self,
        index: int,
        prompt: str | list[int],
        reading: _Reading,
        failure: tuple[Outcome, str] | None,
        planned_s: float,
        late_s: float,
    ) -> RequestRecord:
        request = self.requests[index]
        try:
            answer = read_answer(b"".join(reading.chunks))
        except (ValueError, TypeError, AttributeError) as error:
            answer = Answer("", None, None, f"unreadable: {error}", done=False)
        expected = expected_answer(prompt, request.output_tokens) if self.options.check_text else None
        received = _received_tokens(answer, expected, request.output_tokens)
        outcome, detail = failure if failure is not None else _judge(answer, request, received, expected)
        first_s = reading.first_s
        answered = outcome is Outcome.OK and first_s is not None
        return dataclasses.replace(
            self._blank(index, outcome, detail[:_MAX_DETAIL]),
            received_tokens=received,
            late_s=late_s,
            ttft_s=first_s - planned_s if first_s is not None and received else None,
            tpot_s=(reading.last_s - first_s) / (received - 1) if answered and first_s and received > 1 else None,
            e2e_s=reading.last_s - planned_s if answered else None,
        )

    def _blank(self, index: int, outcome: Outcome, detail: str) -> RequestRecord:
        """The record of a request without anything of an answer."""
        request = self.requests[index]
        return RequestRecord(
            index=index,
            service=request.service,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            outcome=outcome,
            detail=detail,
        )

    def _record(self, record: RequestRecord) -> None:
        self.records[record.index] = record
        self.received_tokens += record.received_tokens
        self.lost += record.outcome is not Outcome.OK

    def progress(self, duration_s: float) -> ReplayProgress:
        """Its progress now."""
        return ReplayProgress(
            elapsed_s=time.monotonic() - self.start_s,
            duration_s=duration_s,
            planned=len(self.requests),
            sent=self.sent,
            finished=len(self.records),
            lost=self.lost,
            received_tokens=self.received_tokens,
        )


def _received_tokens(answer: Answer, expected: str | None, asked: int) -> int:
    """From the text where its tokens can be counted (a quarter of the characters), else as the server reports."""
    if expected is not None:
        return len(answer.text) * asked // max(1, len(expected))
    return answer.completion_tokens or 0


def _judge(answer: Answer, request: TraceRequest, received: int, expected: str | None) -> tuple[Outcome, str]:
    """Whether an answer with status 200 has what was requested."""
    if answer.error is not None:
        return Outcome.STREAM_ERROR, answer.error
    if answer.finish_reason == "abort":
        return Outcome.ABORTED, f"after {received} of {request.output_tokens} tokens"
    if received < request.output_tokens or not answer.done or answer.finish_reason is None:
        end = "" if answer.done else ", no end mark"
        return Outcome.SHORT, f"{received} of {request.output_tokens} tokens{end}"
    if expected is not None and answer.text != expected:
        return Outcome.GARBLED, "the text is not the one that the prompt leads to"
    return Outcome.OK, ""


async def replay(
    requests: Sequence[TraceRequest],
    options: ReplayOptions,
    *,
    duration_s: float | None = None,
    on_progress: OnProgress | None = None,
    stopping: asyncio.Event | None = None,
) -> ReplayReport:
    """Send a trace, oldest first, and wait for its answers. `stopping` ends it early.

    `duration_s` is the trace's length, by default until its last arrival; the replay lasts at least as long.
    """
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    length_s = duration_s if duration_s is not None else (ordered[-1].arrival_s if ordered else 0.0)
    started_unix_s = time.time()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        run = _Run(ordered, options, session)
        work = asyncio.create_task(_whole(run, length_s))
        stop = asyncio.create_task((stopping or asyncio.Event()).wait())
        try:
            while not work.done() and not stop.done():
                await asyncio.wait({work, stop}, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                if on_progress is not None:
                    on_progress(run.progress(length_s))
            if work.done():
                work.result()
        finally:
            stop.cancel()
            work.cancel()
            for task in list(run.tasks):
                task.cancel()
            await asyncio.gather(work, stop, *run.tasks, return_exceptions=True)
        wall_s = time.monotonic() - run.start_s
    records = tuple(run.records[index] for index in sorted(run.records))
    return ReplayReport(records, length_s, wall_s, started_unix_s, stopped=len(records) < len(ordered))


async def _whole(run: _Run, length_s: float) -> None:
    await run.send_all()
    left_s = run.start_s + length_s - time.monotonic()
    if left_s > 0:
        await asyncio.sleep(left_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(run.options.finish_timeout_s):
            while run.tasks:
                await asyncio.wait(run.tasks)
