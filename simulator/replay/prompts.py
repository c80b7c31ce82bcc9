"""Prompts of a given length that share no prefix, made at the cost of copying bytes.

The simulated servers count four characters a token, so a slice of one long text, behind a mark of its own, is a prompt
of exactly so many tokens, and no two requests share a KV block. Real servers count otherwise: give them token ids.
"""

from __future__ import annotations

from simulator.core.tokens import CHARS_PER_TOKEN, FIRST_WORD_ID, TextCursor, make_prompt, text_of

_CORPUS_TOKENS = 4096
_MARK_TOKENS = 2
_MARKS = 36**6
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class PromptMaker:
    """Makes the prompt of request `index`; equal seeds give equal prompts."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._corpus = make_prompt(_CORPUS_TOKENS, seed=seed)

    def text(self, index: int, tokens: int) -> str:
        """A prompt of exactly `tokens` tokens. Raises ValueError below one token."""
        if tokens < 1:
            raise ValueError(f"a prompt needs at least one token, not {tokens}")
        mark = f" {_base36(index + self._seed * 7919):>6} "
        start = (index * 97) % _CORPUS_TOKENS * CHARS_PER_TOKEN
        wanted = max(0, tokens - _MARK_TOKENS) * CHARS_PER_TOKEN
        tail = self._corpus[start : start + wanted]
        while len(tail) < wanted:
            tail += self._corpus[: wanted - len(tail)]
        return (mark + tail)[: tokens * CHARS_PER_TOKEN] if tokens < _MARK_TOKENS else mark + tail

    def token_ids(self, index: int, tokens: int) -> list[int]:
        """A prompt as token ids between 1,000 and 18,576, which every usual vocabulary has.

        Raises ValueError for less than one.
        """
        if tokens < 1:
            raise ValueError(f"a prompt needs at least one token, not {tokens}")
        return TextCursor(FIRST_WORD_ID + index * 31 + self._seed, index).take(tokens)


def expected_answer(prompt: str | list[int], tokens: int) -> str:
    """The answer of a simulated server to a prompt."""
    return text_of(TextCursor.after(prompt).take(tokens))


def _base36(number: int) -> str:
    number %= _MARKS
    digits = ""
    for _ in range(6):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
