"""Figures that something is asked of, and whether they are what was asked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

Value = float | None | Mapping[str, float | None]
"""One figure, or one per trace or model. None: it could not be told, for instance because its runs were left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what was asked of it."""

    name: str
    value: Value
    bar: float
    ok: bool


def at_least(name: str, value: Value, bar: float) -> Bar:
    """Met when the value, or every one of a mapping, is there and not below `bar`."""
    return _judged(name, value, bar, lambda figure: figure >= bar)


def at_most(name: str, value: Value, bar: float) -> Bar:
    """Met when the value, or every one of a mapping, is there and not above `bar`."""
    return _judged(name, value, bar, lambda figure: figure <= bar)


def _judged(name: str, value: Value, bar: float, good: Callable[[float], bool]) -> Bar:
    if isinstance(value, Mapping):
        told: Value = {key: _told(figure) for key, figure in value.items()}
        figures = list(told.values()) if isinstance(told, Mapping) else []
    else:
        told = _told(value)
        figures = [told]
    ok = bool(figures) and all(figure is not None and good(figure) for figure in figures)
    return Bar(name, told, bar, ok)


def _told(figure: float | None) -> float | None:
    return None if figure is None or not math.isfinite(figure) else float(figure)
