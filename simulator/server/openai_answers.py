"""The bodies that answer vLLM's OpenAI-shaped requests, field by field in vLLM's order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from simulator.core.tokens import Prompt
from simulator.server.openai_api import Call

VERSION = "0.32.0"
SYSTEM_FINGERPRINT = f"vllm-{VERSION}-simulated"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One finished sequence of an answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    prompt: Prompt
    finish_reason: str
    stop_reason: str | None


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The `usage` of a streamed answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def answer_body(
    call: Call,
    answer_id: str,
    created_s: int,
    model: str,
    choices: Sequence[Choice],
    *,
    prompt_tokens: int,
    completion_tokens: int,
    kv_transfer: dict[str, object] | None,
) -> str:
    """The JSON body of an answer that is not streamed, field by field as vLLM orders them."""
    head: dict[str, object] = {
        "id": answer_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [_choice_body(call, choice) for choice in choices],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": {
            **usage(prompt_tokens, completion_tokens),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }
    if call.chat:
        head |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    head |= {"kv_transfer_params": kv_transfer, "ec_transfer_params": None, "metrics": None}
    return json.dumps(head, separators=(",", ":"))


def _choice_body(call: Call, choice: Choice) -> dict[str, object]:
    shown_ids = list(choice.token_ids) if call.return_token_ids else None
    ending: dict[str, object] = {
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": shown_ids,
    }
    if call.chat:
        message = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        return {"index": choice.index, "message": message, **ending, "routed_experts": None}
    shows_ids = call.return_token_ids and not isinstance(choice.prompt, str)
    return {
        "index": choice.index,
        "text": choice.text,
        **ending,
        "prompt_logprobs": None,
        "prompt_token_ids": list(choice.prompt) if shows_ids else None,
        "routed_experts": None,
    }


def models_body(names: Sequence[str], root: str, max_model_len: int, created_s: int) -> dict[str, object]:
    """The JSON of `/v1/models`."""
    permission = {
        "id": "modelperm-simulated",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "vllm",
            "root": root,
            "parent": None,
            "max_model_len": max_model_len,
            "permission": [permission],
        }
        for name in names
    ]
    return {"object": "list", "data": cards}
