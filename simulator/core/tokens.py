"""Deterministic text: the output of a simulated model depends on the text before it, and on nothing else.

A string is counted at four characters a token, rounded up. Every generated token is four characters, a blank and
three letters, so `tokens(prompt + text so far) = tokens(prompt) + tokens so far`. The next token is a function of the
last four characters and of the position, hence a request that was cut off can be continued on any other server by
sending prompt + text so far: the continuation is the text the first server would have sent. Prompts given as token
ids continue in the same way with the ids that `return_token_ids` reports.

Limits: four characters a token is a convention, no tokenizer; two prompts of equal length that end in the same four
characters get the same answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zlib
from collections.abc import Sequence

from simulator.core.requests import FinishReason

CHARS_PER_TOKEN = 4
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORDS = tuple(f" {a}{b}{c}" for a in _LETTERS for b in _LETTERS for c in _LETTERS)
FIRST_WORD_ID = 1000
"""Token id of the first word; the words follow one another from here."""
_WORD_IDS = {word: FIRST_WORD_ID + index for index, word in enumerate(_WORDS)}
_FOREIGN_ID = FIRST_WORD_ID + len(_WORDS)
_EOS_EVERY_TOKENS = 256

Prompt = str | Sequence[int]


def count_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt: its ids, or a quarter of its characters rounded up."""
    if isinstance(prompt, str):
        return -(-len(prompt) // CHARS_PER_TOKEN)
    return len(prompt)


def token_ids(text: str) -> list[int]:
    """The ids of a text's tokens, `count_tokens` of them."""
    return [last_token_id(text[start : start + CHARS_PER_TOKEN]) for start in range(0, len(text), CHARS_PER_TOKEN)]


def word(token_id: int) -> str:
    """The text of a token; ids outside the vocabulary wrap around into it."""
    return _WORDS[(token_id - FIRST_WORD_ID) % len(_WORDS)]


def last_token_id(prompt: Prompt) -> int:
    """The id that the first generated token follows."""
    if not isinstance(prompt, str):
        return prompt[-1]
    tail = prompt[-CHARS_PER_TOKEN:]
    known = _WORD_IDS.get(tail)
    return known if known is not None else _FOREIGN_ID + zlib.crc32(tail.encode()) % len(_WORDS)


def next_token_id(previous_id: int, position: int) -> int:
    """The token at `position` (counted from the start of the prompt) after `previous_id`."""
    return FIRST_WORD_ID + _mix(previous_id, position) % len(_WORDS)


def _mix(previous_id: int, position: int) -> int:
    mixed = (previous_id * 2654435761 + position * 2246822519) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    return (mixed * 3266489917 & 0xFFFFFFFF) >> 7


def _ends_at(previous_id: int, position: int) -> bool:
    """Whether the model ends its answer by itself before this position."""
    return _mix(previous_id, position + 7919) % _EOS_EVERY_TOKENS == 0


def make_prompt(tokens: int, seed: int = 0) -> str:
    """A prompt of exactly `tokens` tokens; equal seeds share their text and so their KV blocks.

    Raises ValueError for less than one.
    """
    if tokens < 1:
        raise ValueError(f"a prompt needs at least one token, not {tokens}")
    previous = _FOREIGN_ID + seed
    words = []
    for position in range(tokens):
        previous = next_token_id(previous, position + seed * 7)
        words.append(_WORDS[previous - FIRST_WORD_ID])
    return "".join(words)


def block_hashes(prompt: Prompt, block_size: int, *, salt: str = "") -> tuple[int, ...]:
    """Chained hashes of the prompt's full KV blocks; equal prefixes have equal hashes."""
    digest = hashlib.blake2b(salt.encode(), digest_size=8).digest()
    hashes = []
    full_blocks = count_tokens(prompt) // block_size
    if isinstance(prompt, str):
        width = block_size * CHARS_PER_TOKEN
        full_blocks = min(full_blocks, len(prompt) // width)
        data = prompt[: full_blocks * width]
        pieces = [data[start : start + width].encode() for start in range(0, len(data), width)]
    else:
        pieces = [
            struct.pack(f"<{block_size}q", *prompt[start : start + block_size])
            for start in range(0, full_blocks * block_size, block_size)
        ]
    for piece in pieces:
        digest = hashlib.blake2b(digest + piece, digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return tuple(hashes)


@dataclasses.dataclass(slots=True)
class TextCursor:
    """Writes a request's text, token by token."""

    previous_id: int
    position: int

    @classmethod
    def after(cls, prompt: Prompt) -> TextCursor:
        """The cursor behind `prompt`."""
        return cls(last_token_id(prompt), count_tokens(prompt))

    def take(self, tokens: int) -> list[int]:
        """The next `tokens` token ids; their text is `text_of` of them."""
        ids = []
        previous, position = self.previous_id, self.position
        for _ in range(tokens):
            previous = FIRST_WORD_ID + _mix(previous, position) % len(_WORDS)
            position += 1
            ids.append(previous)
        self.previous_id, self.position = previous, position
        return ids


def text_of(token_ids: Sequence[int]) -> str:
    """The text of generated tokens."""
    return "".join([_WORDS[token_id - FIRST_WORD_ID] for token_id in token_ids])


@dataclasses.dataclass(frozen=True, slots=True)
class OutputPlan:
    """How an answer ends: after how many tokens, why, and after how many characters its text is cut."""

    output_tokens: int
    finish_reason: FinishReason
    stop_reason: str | None = None
    text_chars: int | None = None


def plan_output(
    prompt: Prompt,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    may_end: bool = False,
    include_stop: bool = False,
) -> OutputPlan:
    """Determine beforehand how the answer to `prompt` ends.

    `may_end` lets the model end its answer by itself (about every 256 tokens); `stop` are strings that end it. Neither
    ends it before `min_tokens`.
    """
    if not stop and not may_end:
        return OutputPlan(max_tokens, FinishReason.LENGTH)
    cursor = TextCursor.after(prompt)
    longest = max((len(s) for s in stop), default=0)
    text = ""
    for count in range(1, max_tokens + 1):
        if may_end and count > max(1, min_tokens) and _ends_at(cursor.previous_id, cursor.position):
            return OutputPlan(count, FinishReason.STOP, text_chars=len(text))
        start = max(0, len(text) - longest + 1)
        text += text_of(cursor.take(1))
        if count < min_tokens:
            continue
        found = min(((text.find(s, start), s) for s in stop if text.find(s, start) >= 0), default=None)
        if found is not None:
            index, stop_string = found
            chars = index + len(stop_string) if include_stop else index
            return OutputPlan(count, FinishReason.STOP, stop_string, chars)
    return OutputPlan(max_tokens, FinishReason.LENGTH)
