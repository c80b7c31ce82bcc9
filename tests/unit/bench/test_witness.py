"""The witness tells a run that moved from one that did not, and the quick cases stand where they stood."""

import dataclasses
import enum

import numpy as np
import pytest

from bench.witness import QUICK, cases, digest, known_digests, moved


class _Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class _Before:
    speed: float
    colour: _Colour
    parts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Renamed:
    velocity: float
    paint: str
    pieces: tuple[int, ...] = ()


def test_names_of_types_and_fields_do_not_enter() -> None:
    assert digest(_Before(1.5, _Colour.RED, (1, 2))) == digest(_Renamed(1.5, "red", (1, 2)))


@pytest.mark.parametrize(
    "other",
    [
        _Before(1.50000001, _Colour.RED, (1, 2)),
        _Before(1.5, _Colour.RED, (2, 1)),
        _Before(1.5, _Colour.RED, (1,)),
        _Before(float("nan"), _Colour.RED, (1, 2)),
    ],
)
def test_another_value_is_another_digest(other: _Before) -> None:
    assert digest(_Before(1.5, _Colour.RED, (1, 2))) != digest(other)


def test_the_last_bit_of_a_number_moves_nothing() -> None:
    assert digest(np.array([0.1 + 0.2])) == digest([0.3])


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(TypeError, match="object is no plain data"):
        digest([object()])


def test_quick_cases_stand_where_they_stood() -> None:
    """A change that means to move them writes ``witness.json`` anew and says so."""
    assert set(QUICK) <= set(cases())
    _, differing = moved(QUICK, known_digests())
    assert differing == []


def test_every_case_is_known() -> None:
    assert set(known_digests()) == set(cases())


def test_a_moved_digest_is_named() -> None:
    known = {name: dict(parts) for name, parts in known_digests().items()}
    known["placement"]["plan"] = "0" * 16
    _, differing = moved(("placement",), known)
    assert differing == ["placement: plan"]
