"""Bars: figures with a required value, and whether they meet it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

Value = float | None | Mapping[str, float | None]
"""One figure, or one per trace or model. None: it is not known, for instance because its runs were left out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """A figure and its required value."""

    name: str
    value: Value
    bar: float
    ok: bool | None
    """None: it is not judged, and so neither met nor missed."""
    reason: str = ""
    """Why it is not judged, or which figure is missing where none of those that there are falls short."""
    policies: tuple[str, ...] = ()
    """The policies whose runs on every trace of the suite it is from; empty: not declared, so it may be any of them."""

    def left_out(self, why: str) -> Bar:
        """The same as not judged, if all that it lacks is figures."""
        return dataclasses.replace(self, ok=None, reason=why) if self.ok is False and self.reason else self

    def document(self) -> dict[str, object]:
        """As plain data; `reason` only where there is one."""
        told: dict[str, object] = {"name": self.name, "value": self.value, "bar": self.bar, "ok": self.ok}
        return {**told, "reason": self.reason} if self.reason else told


def at_least(name: str, value: Value, bar: float, *, policies: tuple[str, ...] = ()) -> Bar:
    """Met when the value, or every one of a mapping, is there and not below `bar`. `policies`: see `Bar`."""
    return _judged(name, value, bar, policies, lambda figure: figure >= bar)


def at_most(name: str, value: Value, bar: float, *, policies: tuple[str, ...] = ()) -> Bar:
    """Met when the value, or every one of a mapping, is there and not above `bar`. `policies`: see `Bar`."""
    return _judged(name, value, bar, policies, lambda figure: figure <= bar)


def _judged(name: str, value: Value, bar: float, policies: tuple[str, ...], good: Callable[[float], bool]) -> Bar:
    told: Value
    if isinstance(value, Mapping):
        figures = told = {key: _told(figure) for key, figure in value.items()}
    else:
        told = _told(value)
        figures = {"": told}
    missing = [key for key, figure in figures.items() if figure is None]
    short = any(figure is not None and not good(figure) for figure in figures.values())
    if short or (figures and not missing):
        return Bar(name, told, bar, ok=not short, policies=policies)
    return Bar(name, told, bar, ok=False, reason=f"no figure {', '.join(missing)}".strip(), policies=policies)


def _told(figure: float | None) -> float | None:
    return None if figure is None or not math.isfinite(figure) else float(figure)
