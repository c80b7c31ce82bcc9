"""The raw signals that Z is compared with, as in the paper: queue, KV cache, prefill and decode throughput.

Of a raw signal the direction counts that ranks health better within the windows.

`all_together` is no signal to decide by; it measures how much of health the raw signals hold together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lab.calibration.fitting import Quality
from lab.calibration.ranks import kendall, spearman
from lab.calibration.windows import Floats, Windows

NEIGHBOURS = 20
_AT_A_TIME = 250

RAW: Mapping[str, Callable[[Windows], Floats]] = {
    "waiting": lambda windows: windows.waiting,
    "running": lambda windows: windows.running,
    "queue (running + waiting)": lambda windows: windows.running + windows.waiting,
    "KV usage": lambda windows: windows.kv_usage_ratio,
    "prefill TPS": lambda windows: windows.prefill_tps,
    "decode TPS": lambda windows: windows.decode_tps,
}


def raw_qualities(windows: Windows) -> dict[str, Quality]:
    """How each raw signal ranks health; signals that were not recorded are left out."""
    found: dict[str, Quality] = {}
    for name, of in RAW.items():
        values = of(windows)
        chosen = windows.judged & ~np.isnan(values)
        if not chosen.any():
            continue
        health = windows.health[chosen]
        rank, tau = spearman(values[chosen], health), kendall(values[chosen], health)
        found[name] = Quality(int(chosen.sum()), None if rank is None else abs(rank), None if tau is None else abs(tau))
    return found


def all_together(known: Windows, asked: Windows) -> Floats:
    """The health of windows of `asked`, by the most similar windows of `known`: of one model, by every raw signal.

    Similarity is by the ranks of the signals among their own values in `known`; the answer is the geometric mean
    over `NEIGHBOURS`. With `known` from the same traces on other seeds, a form of a signal that ranks as well leaves
    little to find in what a collector sees of a window. Every window of `known` has to be judged.
    """
    places = [np.sort(of(known)) for of in RAW.values()]
    mine, theirs = (_placed(windows, places) for windows in (known, asked))
    health = np.log(known.health)
    neighbours = min(NEIGHBOURS, len(known))
    found = np.empty(len(asked))
    for first in range(0, len(asked), _AT_A_TIME):
        some = theirs[first : first + _AT_A_TIME]
        apart = np.zeros((len(some), len(mine)))
        for column in range(some.shape[1]):
            apart += (some[:, column, None] - mine[None, :, column]) ** 2
        nearest = np.argpartition(apart, neighbours - 1, axis=1)[:, :neighbours]
        found[first : first + len(some)] = health[nearest].mean(axis=1)
    return np.asarray(np.exp(found))


def _placed(windows: Windows, ascending: Sequence[Floats]) -> Floats:
    """(windows, signals): the rank of each value among `ascending`, from 0 to 1; equal ones get their middle."""
    columns = []
    for of, values in zip(RAW.values(), ascending, strict=True):
        own = of(windows)
        both = np.searchsorted(values, own, side="left") + np.searchsorted(values, own, side="right")
        columns.append(both / (2.0 * len(values)))
    return np.stack(columns, axis=1)
