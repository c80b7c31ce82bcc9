"""Drawing: the one module that imports matplotlib, which the extra `lab` brings.

Import it where a figure is drawn, since it takes half a second to load; `trimtab.cli.extras.require` reports a missing
matplotlib before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

__all__ = ["Axes", "Figure", "FuncFormatter", "MaxNLocator", "NullLocator", "PercentFormatter", "styled"]


def styled(style: dict[Any, Any]) -> AbstractContextManager[None]:
    """matplotlib's parameters for the length of a block."""
    return matplotlib.rc_context(style)
