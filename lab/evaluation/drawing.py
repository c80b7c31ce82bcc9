"""A plot that is drawn: what pages and files do with it, without matplotlib."""

from __future__ import annotations

from typing import NamedTuple

INK = "#010203"
"""The colour of text and axes; drawn nowhere else."""


class Plot(NamedTuple):
    """One drawing."""

    name: str
    """Of its file, without an ending."""
    title: str
    """The text alternative: what the drawing shows."""
    trace: str | None
    """None: of all traces."""
    svg: str
    """In `INK`, on nothing."""


def to_file(svg: str) -> str:
    """A plot for a file of its own: dark on white."""
    start = svg.index(">", svg.index("<svg")) + 1
    return svg[:start] + '\n <rect width="100%" height="100%" fill="#ffffff"/>' + svg[start:].replace(INK, "#222222")
