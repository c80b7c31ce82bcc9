"""Streams of server-sent events: what of an answer was passed on, and the continuation rewritten as its seamless rest.

Events are passed on unread. `SentAnswer` keeps their bytes and reads them only when an answer has to be continued (or
when they have grown large), since at thousands of tokens a second reading each of them would be the gateway's work.

Limits: events end with a blank line of `\\n\\n`, as vLLM writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from gateway.core.openai import JsonObject, JsonValue, Kind, encode

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 8 * 1024 * 1024
_COMPACT_BYTES = 64 * 1024
_DATA = b"data:"
_SUSPECT = (b'"abort"', b'"error"', b"[DONE]")


class BrokenStream(Exception):
    """What the server sent is no stream of events."""


class EventBuffer:
    """Cuts bytes as they arrive into pieces that end with an event."""

    def __init__(self) -> None:
        self._carry = b""

    def feed(self, data: bytes) -> bytes:
        """All events completed by `data` as one piece, maybe empty. Raises `BrokenStream` when one is too long."""
        if self._carry:
            data = self._carry + data
            self._carry = b""
        if data.endswith(EVENT_END):
            return data
        cut = data.rfind(EVENT_END) + len(EVENT_END)
        if cut < len(EVENT_END):
            cut = 0
        self._carry = data[cut:]
        if len(self._carry) > MAX_EVENT_BYTES:
            raise BrokenStream(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return data[:cut]


def is_plain(piece: bytes) -> bool:
    """Whether a piece holds no end, error or abort for sure.

    Text hardly ever matches, since its quotes are escaped; a piece whose whole text is such a word has to be parsed.
    """
    return not any(mark in piece for mark in _SUSPECT)


def events_of(piece: bytes) -> Iterator[JsonObject | None]:
    """The events of a piece as objects; None for `[DONE]`. Comments are skipped. Raises `BrokenStream`."""
    for block in piece.split(EVENT_END):
        if not block.startswith(_DATA):
            continue
        payload = block[len(_DATA) :].strip()
        if payload == b"[DONE]":
            yield None
            continue
        try:
            event = json.loads(payload)
        except ValueError as error:
            raise BrokenStream(f"an event is not JSON: {error}") from None
        if not isinstance(event, dict):
            raise BrokenStream("an event is not a JSON object")
        yield event


def event_bytes(event: JsonObject) -> bytes:
    """One event on the wire."""
    return _DATA + b" " + encode(event) + EVENT_END


def finish_reason_of(event: JsonObject) -> str | None:
    """The finish reason of the first choice that has one."""
    for choice in choices_of(event):
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            return reason
    return None


def choices_of(event: JsonObject) -> list[JsonObject]:
    """The choices of an answer or of one event of it."""
    choices = event.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


class SentAnswer:
    """The part of one streamed answer that its client has. Reading properties parses what has come since."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._text: list[str] = []
        self._token_ids: list[int] | None = []
        self._events_with_text = 0
        self._completion_tokens: int | None = None
        self._finish_reason: str | None = None
        self._beyond_text = False
        self._identity: JsonObject = {}
        self.empty = True

    def append(self, piece: bytes) -> None:
        """Whole events that are about to be written to the client."""
        self.empty = False
        self._unread.append(piece)
        self._unread_bytes += len(piece)
        if self._unread_bytes > _COMPACT_BYTES:
            self._read()

    def _read(self) -> None:
        piece = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        for event in events_of(piece):
            if event is not None:
                self._read_event(event)

    def _read_event(self, event: JsonObject) -> None:
        if not self._identity:
            self._identity = {key: event[key] for key in ("id", "created", "model") if key in event}
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            tokens = usage["completion_tokens"]
            self._completion_tokens = tokens if isinstance(tokens, int) else None
        for choice in choices_of(event):
            self._read_choice(choice)

    def _read_choice(self, choice: JsonObject) -> None:
        source: JsonValue = choice if self._kind is Kind.COMPLETION else choice.get("delta")
        holder = source if isinstance(source, dict) else {}
        text = holder.get("text" if self._kind is Kind.COMPLETION else "content")
        if isinstance(text, str) and text:
            self._text.append(text)
            self._events_with_text += 1
        if any(holder.get(field) for field in ("reasoning", "reasoning_content", "tool_calls")):
            self._beyond_text = True
        ids = choice.get("token_ids")
        if isinstance(ids, list) and self._token_ids is not None:
            self._token_ids += [item for item in ids if isinstance(item, int)]
        elif isinstance(text, str) and text:
            self._token_ids = None
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._finish_reason = reason

    @property
    def text(self) -> str:
        """The text passed on."""
        self._read()
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    @property
    def token_ids(self) -> list[int] | None:
        """The tokens passed on, where the server named all of them."""
        self._read()
        return self._token_ids

    @property
    def exact_tokens(self) -> int | None:
        """How many tokens were passed on; None where the server did not report it."""
        self._read()
        if self._token_ids:
            return len(self._token_ids)
        if self._completion_tokens is not None:
            return self._completion_tokens
        return 0 if not self._text else None

    @property
    def estimated_tokens(self) -> int:
        """Tokens passed on by their characters, at least one an event."""
        return max(self._events_with_text, -(-len(self.text) // 4))

    @property
    def finished(self) -> bool:
        """Whether the client has the finish reason, hence all text."""
        self._read()
        return self._finish_reason is not None

    @property
    def only_text(self) -> bool:
        """False once reasoning or tool calls were passed on, which no continuation can follow."""
        self._read()
        return not self._beyond_text

    @property
    def identity(self) -> JsonObject:
        """`id`, `created` and `model` of the answer."""
        self._read()
        return self._identity


class Continuation:
    """Rewrites the events of a continuing answer so that they read on where the first server stopped."""

    def __init__(self, kind: Kind, sent: SentAnswer, sent_tokens: int) -> None:
        self._chat = kind is Kind.CHAT
        self._identity = sent.identity
        self._sent_tokens = sent_tokens

    def rewrite(self, event: JsonObject) -> JsonObject | None:
        """The event as the client shall see it; None when it has had it already."""
        event = {**event, **self._identity}
        if event.get("prompt_token_ids") is not None:
            event["prompt_token_ids"] = None
        choices = [{**choice} for choice in choices_of(event)]
        for choice in choices:
            if choice.get("prompt_token_ids") is not None:
                choice["prompt_token_ids"] = None
            delta = choice.get("delta")
            if isinstance(delta, dict) and "role" in delta:
                choice["delta"] = {key: value for key, value in delta.items() if key != "role"}
        if self._chat and choices and all(_says_nothing(choice) for choice in choices):
            return None
        if choices:
            event["choices"] = [*choices]
        usage = event.get("usage")
        if isinstance(usage, dict):
            event["usage"] = self._whole_usage(usage)
        return event

    def _whole_usage(self, usage: JsonObject) -> JsonObject:
        """The sent tokens were part of the second server's prompt; for the client they are output."""
        whole = {**usage}
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int):
            whole["prompt_tokens"] = max(0, prompt - self._sent_tokens)
        if isinstance(completion, int):
            whole["completion_tokens"] = completion + self._sent_tokens
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(details, dict) and isinstance(cached, int) and isinstance(prompt, int):
            whole["prompt_tokens_details"] = {
                **details,
                "cached_tokens": min(cached, max(0, prompt - self._sent_tokens)),
            }
        return whole

    def rest_without_server(self, *, include_usage: bool, prompt_tokens: int) -> bytes:
        """The end of an answer whose every token was passed on before its server could say so."""
        choice: JsonObject = {"index": 0, "finish_reason": "length", "stop_reason": None}
        if self._chat:
            choice["delta"] = {}
        else:
            choice |= {"text": "", "logprobs": None}
        name = "chat.completion.chunk" if self._chat else "text_completion"
        end = event_bytes({**self._identity, "object": name, "choices": [choice]})
        if include_usage:
            usage: JsonObject = {
                "prompt_tokens": prompt_tokens,
                "total_tokens": prompt_tokens + self._sent_tokens,
                "completion_tokens": self._sent_tokens,
            }
            end += event_bytes({**self._identity, "object": name, "choices": [], "usage": usage})
        return end + DONE


def _says_nothing(choice: JsonObject) -> bool:
    """A chat event that only opened the message."""
    delta = choice.get("delta")
    return choice.get("finish_reason") is None and (
        not isinstance(delta, dict) or not any(value for value in delta.values())
    )
