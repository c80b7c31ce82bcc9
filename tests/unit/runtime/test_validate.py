"""Violations: every fault of a request is found in one pass, and named by its path."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.api.common.v1 import types_pb2
from trimtab.names import is_identifier
from trimtab.rpc.errors import InvalidRequest
from trimtab.rpc.validate import Violations


def test_all_faults_are_collected_with_their_paths() -> None:
    violations = Violations()
    violations.identifier("name", "Not A Name")
    with violations.below("bounds[0]"):
        violations.finite_number("min", math.nan)
        with violations.below("inner"):
            violations.require("x", False, "is wrong")
    violations.enum_set("role", 0, types_pb2.Role)
    with pytest.raises(InvalidRequest) as caught:
        violations.raise_if_any()
    assert [item.field for item in caught.value.violations] == ["name", "bounds[0].min", "bounds[0].inner.x", "role"]
    assert caught.value.reason == "INVALID_REQUEST"


def test_nothing_is_raised_for_a_good_request() -> None:
    violations = Violations()
    assert violations.identifier("name", "chat-7b") == "chat-7b"
    assert violations.finite_number("x", 0.5, minimum=0, maximum=1, above=0) == 0.5
    assert violations.bounded_string("note", "", required=False) == ""
    assert violations.enum_set("role", types_pb2.ROLE_DECODE, types_pb2.Role) == types_pb2.ROLE_DECODE
    assert violations.require("y", True, "never")
    violations.raise_if_any()
    assert not violations


@pytest.mark.parametrize(
    ("value", "bounds", "text"),
    [
        (math.nan, {}, "not a finite"),
        (math.inf, {}, "not a finite"),
        (-0.1, {"minimum": 0.0}, "at least 0"),
        (0.0, {"above": 0.0}, "more than 0"),
        (1.1, {"maximum": 1.0}, "at most 1"),
    ],
)
def test_numbers_out_of_bounds(value: float, bounds: dict[str, float], text: str) -> None:
    violations = Violations()
    violations.finite_number("x", value, **bounds)
    assert [text in item.description for item in violations.found] == [True]


@pytest.mark.parametrize("value", ["", "-a", "a-", "A", "a_b", "a" * 64, "a.b", "a\n", "é"])
def test_names_that_are_refused(value: str) -> None:
    violations = Violations()
    violations.identifier("name", value)
    assert len(violations.found) == 1


@given(st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True))
def test_names_that_are_taken(value: str) -> None:
    assert is_identifier(value)


@pytest.mark.parametrize("value", ["", "x" * 257, "a\nb", "a\x00"])
def test_text_that_is_refused(value: str) -> None:
    violations = Violations()
    violations.bounded_string("note", value)
    assert len(violations.found) == 1


def test_a_flood_of_faults_is_bounded_and_counted() -> None:
    violations = Violations()
    for index in range(250):
        violations.add(f"f[{index}]", "is wrong")
    with pytest.raises(InvalidRequest) as caught:
        violations.raise_if_any()
    assert len(caught.value.violations) == 101
    assert "150 more" in caught.value.violations[-1].description


def test_an_enum_value_of_a_newer_client_is_refused() -> None:
    violations = Violations()
    violations.enum_set("role", 999, types_pb2.Role)
    assert "999" in violations.found[0].description
