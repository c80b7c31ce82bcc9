"""vLLM's OpenAI-shaped requests, parsed at the edge.

What does not parse comes back as vLLM's error body with its status. Unknown fields are accepted and ignored, as vLLM
does. Limits: no logprobs, no tools, no images, no beam search; `n` and batches of prompts are served one sequence
each.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Literal

import pydantic

from simulator.core.tokens import Prompt, count_tokens, token_ids

_MAX_SEQUENCES = 128


class ApiError(Exception):
    """An answer of vLLM's error shape."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> str:
        """The JSON body."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}, separators=(",", ":"))


def _json_error(raw: bytes) -> ApiError | None:
    """FastAPI's answer to a body that is no JSON; None when it is."""
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        place, text = f"body.{error.pos}", error.msg
    except UnicodeDecodeError as error:
        place, text = f"body.{error.start}", "Invalid UTF-8"
    else:
        return None
    shown = {
        "type": "json_invalid",
        "loc": place,
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": text},
    }
    return ApiError(400, f"1 validation error:\n  {shown}", "Bad Request", place)


def _shown_input(value: object) -> object:
    """An offending value as vLLM shows it: containers by their size only."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return value


def validation_error(error: pydantic.ValidationError, where: str) -> ApiError:
    """What FastAPI's validation answers in vLLM: every violation as a Python mapping on a line of its own."""
    violations = error.errors(include_url=False)
    lines = []
    for violation in violations:
        loc = ".".join([where, *(str(part) for part in violation["loc"])])
        shown: dict[str, object] = {"type": violation["type"], "loc": loc, "msg": violation["msg"]}
        shown["input"] = _shown_input(violation["input"])
        if "ctx" in violation:
            shown["ctx"] = {key: value for key, value in violation["ctx"].items() if key != "error"}
        lines.append(f"  {shown}")
    first = ".".join([where, *(str(part) for part in violations[0]["loc"])])
    plural = "" if len(lines) == 1 else "s"
    return ApiError(400, f"{len(lines)} validation error{plural}:\n" + "\n".join(lines), "Bad Request", first)


class StreamOptions(pydantic.BaseModel):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class KvTransferParams(pydantic.BaseModel):
    """`kv_transfer_params` of vLLM's NIXL connector, which a prefill server returns and a decode server takes."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int] | list[list[int]] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    tp_size: int | None = None


class _Body(pydantic.BaseModel):
    model: str | None = None
    max_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    min_tokens: Annotated[int, pydantic.Field(ge=0)] = 0
    ignore_eos: bool = False
    n: Annotated[int, pydantic.Field(ge=1, le=_MAX_SEQUENCES)] = 1
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: KvTransferParams | None = None


_TokenIds = Annotated[list[Annotated[int, pydantic.Field(ge=0, lt=2**62)]], pydantic.Field(min_length=1)]


class CompletionBody(_Body):
    """Body of `/v1/completions`."""

    prompt: (
        Annotated[str, pydantic.Field(min_length=1)]
        | _TokenIds
        | Annotated[list[str], pydantic.Field(min_length=1, max_length=_MAX_SEQUENCES)]
        | Annotated[list[_TokenIds], pydantic.Field(min_length=1, max_length=_MAX_SEQUENCES)]
    )


class _TextPart(pydantic.BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(pydantic.BaseModel):
    """One message of a chat."""

    role: str
    content: str | list[_TextPart] | None = None

    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(_Body):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], pydantic.Field(min_length=1)]
    max_completion_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One parsed request: what to generate and how to answer."""

    chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    """None: up to the model's length, or where the model ends its answer."""
    min_tokens: int
    may_end: bool
    stop: tuple[str, ...]
    include_stop: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    kv_transfer: KvTransferParams | None


def render_chat(body: ChatBody) -> str:
    """The chat template: `role: content` lines and the assistant's turn; a continued message stays open.

    Sending the text so far as a final assistant message with `continue_final_message` therefore gives the very string
    that the first server's answer had led to. Raises `ApiError` 400 for flags that exclude each other.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "BadRequestError",
        )
    *before, last = body.messages
    lines = [f"{message.role}: {message.text()}\n" for message in before]
    if body.continue_final_message:
        return "".join(lines) + f"{last.role}:" + last.text()
    ending = "assistant:" if body.add_generation_prompt else ""
    return "".join(lines) + f"{last.role}: {last.text()}\n" + ending


def parse_call(raw: bytes, *, chat: bool) -> Call:
    """Parse a body; raises ApiError for what vLLM would refuse."""
    body: CompletionBody | ChatBody
    try:
        body = ChatBody.model_validate_json(raw) if chat else CompletionBody.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise _json_error(raw) or validation_error(error, "body") from error
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    max_tokens = body.max_tokens
    if isinstance(body, ChatBody):
        prompts: tuple[Prompt, ...] = (render_chat(body),)
        max_tokens = body.max_completion_tokens or max_tokens
    else:
        prompts = _prompts(body.prompt)
        max_tokens = 16 if max_tokens is None else max_tokens
    if max_tokens is not None and body.min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
        raise ApiError(400, message, "BadRequestError", "min_tokens")
    return Call(
        chat=chat,
        model=body.model,
        prompts=prompts,
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        may_end=max_tokens is None and not body.ignore_eos,
        stop=tuple(s for s in stop if s),
        include_stop=body.include_stop_str_in_output,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        kv_transfer=body.kv_transfer_params,
    )


class _TokenizeBody(pydantic.BaseModel):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


def parse_tokenize(raw: bytes) -> list[int]:
    """Token ids of a `/tokenize` body; raises ApiError when it has neither prompt nor messages."""
    try:
        body = _TokenizeBody.model_validate_json(raw)
        if body.prompt is None:
            body = _TokenizeBody(prompt=render_chat(ChatBody(messages=body.messages or [])))
    except pydantic.ValidationError as error:
        raise _json_error(raw) or validation_error(error, "body") from error
    return token_ids(body.prompt or "")


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(token for token in prompt if isinstance(token, int)),)
    prompts = tuple(p if isinstance(p, str) else tuple(p) for p in prompt if not isinstance(p, int))
    if not all(prompts):
        raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", "BadRequestError")
    return prompts


def output_limit(call: Call, prompt: Prompt, max_model_len: int) -> int:
    """Tokens the answer may have; raises ApiError when prompt and answer do not fit into the model."""
    prompt_tokens = count_tokens(prompt)
    room = max_model_len - prompt_tokens
    if room < 1:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your request has "
            f"{prompt_tokens} input tokens. Please reduce the length of the input messages."
        )
        raise ApiError(400, message, "BadRequestError", "input_tokens")
    if call.max_tokens is None:
        return room
    if call.max_tokens > room:
        message = (
            f"'max_tokens' or 'max_completion_tokens' is too large: {call.max_tokens}. This model's maximum context "
            f"length is {max_model_len} tokens and your request has {prompt_tokens} input tokens "
            f"({call.max_tokens} > {max_model_len} - {prompt_tokens})."
        )
        raise ApiError(400, message, "BadRequestError", "max_tokens")
    return call.max_tokens
