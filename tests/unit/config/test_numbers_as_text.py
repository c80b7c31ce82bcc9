"""What is said of a number that stands as text: with the hint followed, YAML reads that very number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.faults import check_scalar
from trimtab.config.yamlfile import parse_yaml_documents

LEAVE = ": leave the quotes out"


def said_of(text: str) -> str:
    with pytest.raises(ValueError, match="must be a number") as caught:
        check_scalar(text, frozenset({float}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1e-2", LEAVE),
        ("-.5e3", LEAVE),
        ("2", LEAVE),
        ("0.25", LEAVE),
        ("1_000", ": write 1000"),
        ("1e", ""),
        ("e5", ""),
        ("1e999", ""),
        ("1:30", ""),
        ("yes", ""),
        ("inf", ""),
    ],
)
def test_a_text_that_looks_like_a_number_gets_a_hint(text: str, hint: str) -> None:
    assert said_of(text) == f"must be a number, not the text {text!r}{hint}"


@given(
    st.sampled_from(["", "-", "+"]),
    st.from_regex(r"[0-9]{1,4}(\.[0-9]{0,4})?|\.[0-9]{1,4}", fullmatch=True),
    st.from_regex(r"([eE][-+]?[0-9]{1,2})?", fullmatch=True),
)
def test_without_its_quotes_it_is_read_as_the_same_number(sign: str, mantissa: str, exponent: str) -> None:
    text = f"{sign}{mantissa}{exponent}"
    assert said_of(text).endswith(LEAVE)
    assert parse_yaml_documents(text, source="a file") == [float(text)]
