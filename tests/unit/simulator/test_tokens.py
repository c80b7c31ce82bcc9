"""Deterministic text: counting, continuing, stopping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core.requests import FinishReason
from simulator.core.tokens import (
    TextCursor,
    block_hashes,
    count_tokens,
    make_prompt,
    plan_output,
    text_of,
    token_ids,
    word,
)

PROMPTS = st.text(min_size=1, max_size=60)


def answer(prompt: str | tuple[int, ...], tokens: int) -> list[int]:
    return TextCursor.after(prompt).take(tokens)


@given(PROMPTS, st.integers(1, 40), st.integers(0, 40))
def test_prompt_and_text_so_far_continue_as_if_nothing_had_happened(prompt: str, total: int, cut: int) -> None:
    cut = min(cut, total)
    whole = answer(prompt, total)
    sent = text_of(whole[:cut])
    assert count_tokens(prompt + sent) == count_tokens(prompt) + cut
    assert answer(prompt + sent, total - cut) == whole[cut:]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30), st.integers(1, 30), st.integers(0, 30))
def test_prompts_of_token_ids_continue_too(prompt: list[int], total: int, cut: int) -> None:
    cut = min(cut, total)
    whole = answer(tuple(prompt), total)
    assert answer((*prompt, *whole[:cut]), total - cut) == whole[cut:]


def test_taking_tokens_in_pieces_gives_the_same_text() -> None:
    cursor = TextCursor.after("hello world")
    pieces = [*cursor.take(3), *cursor.take(1), *cursor.take(6)]
    assert pieces == answer("hello world", 10)


@given(st.integers(1, 300), st.integers(0, 50))
def test_made_prompts_have_the_asked_length(tokens: int, seed: int) -> None:
    prompt = make_prompt(tokens, seed)
    assert count_tokens(prompt) == tokens == len(token_ids(prompt))
    assert text_of(token_ids(prompt)) == prompt


def test_words_are_four_characters_and_distinct() -> None:
    words = {word(1000 + index) for index in range(26**3)}
    assert len(words) == 26**3
    assert {len(w) for w in words} == {4}


def test_answers_differ_with_the_prompt() -> None:
    answers = {tuple(answer(make_prompt(40, seed), 8)) for seed in range(50)}
    assert len(answers) == 50


def test_block_hashes_are_equal_exactly_where_prefixes_are() -> None:
    shared, tail = make_prompt(64, 1), make_prompt(32, 2)
    one = block_hashes(shared + tail, 16)
    other = block_hashes(shared + make_prompt(32, 3), 16)
    assert len(one) == 6
    assert one[:4] == other[:4] == block_hashes(shared, 16)
    assert one[4] != other[4]
    assert block_hashes(tuple(range(40)), 16) == block_hashes(tuple(range(33)), 16)
    assert block_hashes("abc", 16) == ()


def test_a_stop_string_ends_the_answer_before_it_also_across_tokens() -> None:
    text = text_of(answer("prompt", 30))
    stop = text[38:43]
    plan = plan_output("prompt", max_tokens=30, stop=[stop])
    assert plan.finish_reason is FinishReason.STOP
    assert plan.stop_reason == stop
    assert plan.text_chars == text.index(stop)
    assert plan.output_tokens == -(-(text.index(stop) + 5) // 4)
    kept = plan_output("prompt", max_tokens=30, stop=[stop], include_stop=True)
    assert kept.text_chars == text.index(stop) + 5


def test_min_tokens_delays_a_stop_and_max_tokens_wins() -> None:
    text = text_of(answer("prompt", 30))
    stop = text[4:8]
    assert plan_output("prompt", max_tokens=30, stop=[stop]).output_tokens == 2
    late = plan_output("prompt", max_tokens=30, min_tokens=10, stop=[stop])
    assert late.output_tokens >= 10
    assert plan_output("prompt", max_tokens=1, stop=[stop]).finish_reason is FinishReason.LENGTH


def test_an_answer_without_a_limit_ends_by_itself_at_a_place_that_a_continuation_keeps() -> None:
    prompt = make_prompt(20, 5)
    plan = plan_output(prompt, max_tokens=8000, may_end=True)
    assert plan.finish_reason is FinishReason.STOP
    assert 1 < plan.output_tokens < 8000
    sent = text_of(answer(prompt, plan.output_tokens // 2))
    rest = plan_output(prompt + sent, max_tokens=8000, may_end=True)
    assert rest.output_tokens == plan.output_tokens - plan.output_tokens // 2


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        make_prompt(0)
