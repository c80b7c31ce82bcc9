"""What is said of a number that YAML 1.1 reads as text: the spelling that is told is read as that very number."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.faults import check_scalar

WANTED = "YAML wants "


def said_of(text: str) -> str:
    with pytest.raises(ValueError, match="must be a number") as caught:
        check_scalar(text, frozenset({float}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1e-2", ": YAML wants 1.0e-2, without quotes"),
        ("1E3", ": YAML wants 1.0e+3, without quotes"),
        ("-2.5e3", ": YAML wants -2.5e+3, without quotes"),
        ("-.5e3", ": YAML wants -0.5e+3, without quotes"),
        ("5.e-1", ": YAML wants 5.0e-1, without quotes"),
        ("2", ": leave the quotes out"),
        ("0.25", ": leave the quotes out"),
        ("1e", ""),
        ("e5", ""),
        ("1e999", ""),
        ("inf", ""),
    ],
)
def test_a_text_that_looks_like_a_number_gets_the_spelling_that_yaml_takes(text: str, hint: str) -> None:
    assert said_of(text) == f"must be a number, not the text {text!r}{hint}"


@given(
    st.sampled_from(["", "-", "+"]),
    st.from_regex(r"[0-9]{1,4}(\.[0-9]{0,4})?|\.[0-9]{1,4}", fullmatch=True),
    st.from_regex(r"[eE][-+]?[0-9]{1,2}", fullmatch=True),
)
def test_the_spelling_is_read_as_the_same_number(sign: str, mantissa: str, exponent: str) -> None:
    text = f"{sign}{mantissa}{exponent}"
    spelling = said_of(text).partition(WANTED)[2].removesuffix(", without quotes")
    assert yaml.safe_load(spelling) == float(text)
