"""The raw signals that Z is held against, as the paper does: queue, KV cache, prefill and decode throughput.

A raw signal is given the benefit of the doubt: whichever direction ranks health better within the windows counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from simulator.calibration.fitting import Quality
from simulator.calibration.ranks import kendall, spearman
from simulator.calibration.windows import Floats, Windows

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
