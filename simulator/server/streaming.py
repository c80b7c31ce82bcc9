"""Server-sent events of one streamed answer, written straight to the connection as tokens come.

The parts of a chunk that do not change are encoded once. One chunk carries `stream_interval` tokens, the first token
and the end go out at once, as with vLLM's `--stream-interval`. Chunks are written to the transport without waiting: a
client that does not read is cut off once `MAX_UNSENT_BYTES` wait for it.
"""

from __future__ import annotations

import asyncio
import json

from simulator.core.tokens import OutputPlan, TextCursor, text_of
from simulator.server.openai_answers import SYSTEM_FINGERPRINT, usage
from simulator.server.openai_api import Call

MAX_UNSENT_BYTES = 4 * 2**20


class EventWriter:
    """Writes events to a connection whose headers are out, in HTTP's chunked coding when that is in use."""

    def __init__(self, transport: asyncio.WriteTransport, *, chunked: bool) -> None:
        self._transport = transport
        self._chunked = chunked

    @property
    def closed(self) -> bool:
        """Whether the client is gone."""
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes, or cut a client off that has stopped reading."""
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._transport.abort()
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


class AnswerHead:
    """What all chunks of one answer share."""

    def __init__(self, call: Call, answer_id: str, created_s: int, model: str) -> None:
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        fields = {"id": answer_id, "object": kind, "created": created_s, "model": model}
        self.call = call
        self.text = "data: " + json.dumps(fields, separators=(",", ":"))[:-1] + ',"choices":['

    def usage_event(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The last event when the client requested usage."""
        body = json.dumps(usage(prompt_tokens, completion_tokens), separators=(",", ":"))
        return f'{self.text}],"usage":{body},"system_fingerprint":"{SYSTEM_FINGERPRINT}"}}\n\n'.encode()


class ChoiceStream:
    """Writes one sequence of an answer as the engine emits its tokens."""

    def __init__(
        self, head: AnswerHead, writer: EventWriter, index: int, cursor: TextCursor, plan: OutputPlan, interval: int
    ) -> None:
        self._writer = writer
        self._cursor = cursor
        self._plan = plan
        self._interval = interval
        self._call = head.call
        self._pending = 0
        self._generated = 0
        self._sent_chars = 0
        if head.call.chat:
            self._before = f'{head.text}{{"index":{index},"delta":{{"content":"'.encode()
            self._after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
            writer.write(
                f'{head.text}{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
                f'"finish_reason":null}}],"prompt_token_ids":null}}\n\n'.encode()
            )
        else:
            self._before = f'{head.text}{{"index":{index},"text":"'.encode()
            self._after = (
                b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
                b'"token_ids":null}]}\n\n'
            )

    @property
    def generated_tokens(self) -> int:
        """Tokens emitted so far."""
        return self._generated

    def token(self) -> None:
        """The engine emitted one token; the last one waits for `finish`, which carries it."""
        self._pending += 1
        self._generated += 1
        last = self._generated >= self._plan.output_tokens
        if not last and (self._generated == 1 or self._pending >= self._interval):
            text, ids = self._take()
            self._writer.write(self._before + text.encode() + self._tail(self._after, ids))

    def finish(self, reason: str) -> None:
        """Send what is left with the reason why the answer ended."""
        text, ids = self._take()
        stop = json.dumps(self._plan.stop_reason if reason == "stop" else None).encode()
        fields = b'"finish_reason":"' + reason.encode() + b'"'
        after = self._after.replace(b'"finish_reason":null', fields)
        if self._call.chat:
            after = after.replace(b',"token_ids"', b',"stop_reason":' + stop + b',"token_ids"')
        else:
            after = after.replace(b'"stop_reason":null', b'"stop_reason":' + stop)
        if not self._call.include_usage:
            after = after.replace(b"}]}\n\n", b'}],"system_fingerprint":"' + SYSTEM_FINGERPRINT.encode() + b'"}\n\n')
        self._writer.write(self._before + text.encode() + self._tail(after, ids))

    def _take(self) -> tuple[str, list[int]]:
        ids = self._cursor.take(self._pending)
        self._pending = 0
        text = text_of(ids)
        if self._plan.text_chars is not None:
            text = text[: max(0, self._plan.text_chars - self._sent_chars)]
        self._sent_chars += len(text)
        return text, ids

    def _tail(self, after: bytes, ids: list[int]) -> bytes:
        if not self._call.return_token_ids:
            return after
        return after.replace(b'"token_ids":null', b'"token_ids":' + json.dumps(ids, separators=(",", ":")).encode())
