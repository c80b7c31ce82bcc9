"""Requests of the OpenAI-style API: what routing needs from them, and the bodies that a reissue or a hand-over needs.

Bodies are passed on as they came, unknown fields included; a body is written anew only when something in it has to
change. A token estimate is exact for prompts given as token ids and a quarter of the characters otherwise.

A request is *continuable* when another server can be asked for the rest of its answer: one prompt, one choice, and
nothing whose meaning depends on where the answer began (logprobs, penalties on the output, structured output, tools,
echo). Other requests can be sent again only while nothing of their answer has been passed on.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import TypeAlias

JsonValue: TypeAlias = "str | int | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]

CHARS_PER_TOKEN = 4
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when it is not given (OpenAI's and vLLM's default)."""
ASSUMED_CHAT_TOKENS = 256
"""What an unbounded chat answer counts as in the demand report."""
_TOKENS_PER_MESSAGE = 4

_ZERO_OR_ABSENT = ("presence_penalty", "frequency_penalty", "echo", "use_beam_search", "suffix", "prompt_logprobs")
_ABSENT = (
    "logprobs",
    "top_logprobs",
    "tools",
    "functions",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "truncate_prompt_tokens",
    "logits_processors",
    "kv_transfer_params",
)


class Kind(enum.Enum):
    """The two routes that generate text."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


class BadRequest(Exception):
    """The body is not a request; the message is for the caller. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One parsed request. `body` must not be changed: it is the parsed form of `raw`."""

    kind: Kind
    raw: bytes
    body: JsonObject
    model: str
    stream: bool
    include_usage: bool
    prompt_tokens: int
    """Estimate, see the module."""
    max_tokens: int | None
    """None: as many as the model's length allows."""
    continuable: bool

    @property
    def requested_output_tokens(self) -> int:
        """Output tokens for the demand report."""
        return self.max_tokens if self.max_tokens is not None else ASSUMED_CHAT_TOKENS

    @property
    def token_id_prompt(self) -> bool:
        """Whether the prompt came as token ids, so that an answer is continued by its ids."""
        return isinstance(self.body.get("prompt"), list)


def parse_request(kind: Kind, raw: bytes) -> GenerationRequest:
    """Raises `BadRequest`. Only what the gateway itself uses is checked; the rest is the server's business."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("model must be a non-empty string", "model")
    prompt_tokens = _completion_tokens(body) if kind is Kind.COMPLETION else _chat_tokens(body)
    stream_options = body.get("stream_options")
    options: Mapping[str, JsonValue] = stream_options if isinstance(stream_options, dict) else {}
    return GenerationRequest(
        kind=kind,
        raw=raw,
        body=body,
        model=model,
        stream=body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        prompt_tokens=prompt_tokens,
        max_tokens=_max_tokens(kind, body),
        continuable=_continuable(kind, body),
    )


def _max_tokens(kind: Kind, body: JsonObject) -> int | None:
    fields = ("max_tokens",) if kind is Kind.COMPLETION else ("max_completion_tokens", "max_tokens")
    for field in fields:
        value = body.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{field} must be a positive integer", field)
        return value
    return DEFAULT_COMPLETION_TOKENS if kind is Kind.COMPLETION else None


def _completion_tokens(body: JsonObject) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _text_tokens(prompt)
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return len(prompt)
        if all(isinstance(item, str) for item in prompt):
            return sum(_text_tokens(item) for item in prompt if isinstance(item, str))
        if all(isinstance(item, list) for item in prompt):
            return sum(len(item) for item in prompt if isinstance(item, list))
    raise BadRequest("prompt must be a string, a list of strings, or a list of token ids", "prompt")


def _chat_tokens(body: JsonObject) -> int:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a non-empty list", "messages")
    total = 0
    for message in messages:
        if not isinstance(message, dict):
            raise BadRequest("every message must be an object", "messages")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            total += _text_tokens(text) if isinstance(text, str) else 0
        total += _TOKENS_PER_MESSAGE
    return total


def _text_tokens(text: str) -> int:
    return -(-len(text) // CHARS_PER_TOKEN)


def _continuable(kind: Kind, body: JsonObject) -> bool:
    if any(body.get(field) not in (None, False, 0, "", 0.0) for field in _ZERO_OR_ABSENT):
        return False
    # By identity: `logprobs: 0` asks for logprobs.
    if any(body.get(field) is not None and body.get(field) is not False for field in _ABSENT):
        return False
    if any(body.get(field) not in (None, 1) for field in ("n", "best_of", "repetition_penalty")):
        return False
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        return False
    if kind is Kind.CHAT:
        return True
    prompt = body.get("prompt")
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(type(item) is int for item in prompt))


def encode(body: JsonObject) -> bytes:
    """Compact JSON."""
    return json.dumps(body, separators=(",", ":")).encode()


def fresh_body(request: GenerationRequest, model: str) -> JsonObject:
    """The request as the replica that serves `model` takes it.

    A streamed answer to token ids is asked for with its token ids, without which it could not be continued.
    """
    body = request.body
    if request.stream and request.token_id_prompt and request.continuable and body.get("return_token_ids") is not True:
        body = {**body, "return_token_ids": True}
    return body if body.get("model") == model else {**body, "model": model}


def continuation_body(
    request: GenerationRequest, model: str, *, text: str, token_ids: list[int] | None, sent_tokens: int
) -> JsonObject:
    """The request for the rest of an answer of which `text` (`sent_tokens` tokens) was passed on.

    Raises ValueError when `max_tokens` is used up, or when a prompt of token ids is to go on without `token_ids`.
    """
    body = {**fresh_body(request, model)}
    if request.max_tokens is not None:
        left = request.max_tokens - sent_tokens
        if left < 1:
            raise ValueError("nothing is left to generate")
        for field in ("max_tokens", "max_completion_tokens"):
            if body.get(field) is not None:
                body[field] = left
        if request.kind is Kind.COMPLETION:
            body["max_tokens"] = left
    least = body.get("min_tokens")
    if isinstance(least, int):
        body["min_tokens"] = max(0, least - sent_tokens)
    if request.kind is Kind.CHAT:
        return _continued_chat(body, text)
    prompt = body["prompt"]
    if isinstance(prompt, str):
        body["prompt"] = prompt + text
    elif isinstance(prompt, list):
        if token_ids is None:
            raise ValueError("an answer to token ids goes on by token ids only")
        body["prompt"] = [*prompt, *token_ids]
    return body


def _continued_chat(body: JsonObject, text: str) -> JsonObject:
    """vLLM's `continue_final_message`: the answer so far becomes the unfinished last message."""
    given = body["messages"]
    messages = given if isinstance(given, list) else []
    last = messages[-1] if messages else None
    if body.get("continue_final_message") is True and isinstance(last, dict) and isinstance(last.get("content"), str):
        messages = [*messages[:-1], {**last, "content": f"{last['content']}{text}"}]
    else:
        messages = [*messages, {"role": "assistant", "content": text}]
    return {**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def prefill_body(body: JsonObject) -> JsonObject:
    """The prefill half of a hand-over, as vLLM's NIXL proxy sends it: one token, and the KV kept for decoding."""
    changed = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    if "max_completion_tokens" in changed:
        changed["max_completion_tokens"] = 1
    return {
        **changed,
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def decode_body(body: JsonObject, prefill_answer: JsonObject) -> JsonObject:
    """The decode half: the request with what the prefill server answered. Raises ValueError when that names no KV."""
    parameters = prefill_answer.get("kv_transfer_params")
    if not isinstance(parameters, dict) or not parameters:
        raise ValueError("the prefill server sent no kv_transfer_params")
    return {**body, "kv_transfer_params": parameters}


def error_body(status: int, message: str, *, error_type: str, param: str | None = None) -> bytes:
    """An error in vLLM's format."""
    return encode({"error": {"message": message, "type": error_type, "param": param, "code": status}})
