"""Windows of runs at fixed capacity: what a collector saw in each, and how its requests fared.

The health of a window is the part of their SLO that its requests did not use. Each request that arrived in it has a
pressure, the larger of TTFT over its target and TPOT over its target; the window's is their 95th percentile, as the
targets are, and its health is one over that: 1 at the edge, 2 with half of every target to spare. Arrivals are taken
because a signal that moves capacity must rank the requests that will use it; their outcome is known later, and to no
controller. A share within the SLO would be the same for every healthy window and for every hopeless one, and could not
be ranked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

QUANTILE = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Columns, one row a window; the rows of a run follow each other in time.

    Rates are sums over the role's replicas, per second; `waiting` holds what gateways hold as well. `kv_usage_ratio`
    and `request_rps` are NaN where they were not recorded, `pressure` and `attained` where nothing arrived.
    """

    run: Ints
    """Number of the unbroken run that a window belongs to."""
    end_s: Floats
    prefill_tps: Floats
    decode_tps: Floats
    running: Floats
    waiting: Floats
    kv_usage_ratio: Floats
    request_rps: Floats
    """Finished requests."""
    pressure: Floats
    attained: Floats
    """Share of the arrived requests within both targets."""
    requests: Floats
    """How many arrived."""

    def __len__(self) -> int:
        return len(self.run)

    @property
    def health(self) -> Floats:
        """One over the pressure."""
        return np.asarray(1.0 / self.pressure)

    @property
    def judged(self) -> Bools:
        """Windows of which the health is known."""
        return ~np.isnan(self.pressure)

    def where(self, chosen: Bools) -> Windows:
        """Some of the windows."""
        return self.take(np.flatnonzero(chosen))

    def take(self, places: Ints) -> Windows:
        """Those at `places`, in that order."""
        return Windows(**{field.name: getattr(self, field.name)[places] for field in dataclasses.fields(self)})

    def split_in_time(self, share: float) -> tuple[Windows, Windows]:
        """The first `share` of every run, and the rest."""
        first = np.zeros(len(self), dtype=bool)
        for run in np.unique(self.run).tolist():
            places = np.flatnonzero(self.run == run)
            first[places[: round(share * len(places))]] = True
        return self.where(first), self.where(~first)


def joined(several: Sequence[Windows]) -> Windows:
    """All windows of some (at least one), whose runs stay apart."""
    columns: dict[str, list[NDArray[np.generic]]] = {field.name: [] for field in dataclasses.fields(Windows)}
    first = 0
    for windows in several:
        for name, parts in columns.items():
            parts.append(windows.run + first if name == "run" else getattr(windows, name))
        first += int(windows.run.max(initial=-1)) + 1
    return Windows(**{name: np.concatenate(parts) for name, parts in columns.items()})


def pressures(ttft_s: Floats, tpot_s: Floats, *, ttft_target_s: float, tpot_target_s: float) -> Floats:
    """Of each request, or of each window's 95th percentiles; a TPOT that is NaN (one token) does not press."""
    return np.asarray(np.fmax(ttft_s / ttft_target_s, tpot_s / tpot_target_s))


def request_outcomes(
    arrival_s: Floats, pressure: Floats, ends_s: Floats, *, window_s: float
) -> tuple[Floats, Floats, Floats]:
    """(pressure, share within the SLO, requests) of each window (end − window_s, end], from requests by arrival."""
    order = np.argsort(arrival_s, kind="stable")
    arrival_s, pressure = arrival_s[order], pressure[order]
    first = np.searchsorted(arrival_s, ends_s - window_s, side="right")
    last = np.searchsorted(arrival_s, ends_s, side="right")
    found = np.full(len(ends_s), np.nan)
    attained = np.full(len(ends_s), np.nan)
    for index, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if end > start:
            own = pressure[start:end]
            found[index] = np.quantile(own, QUANTILE)
            attained[index] = np.mean(own <= 1.0)
    return found, attained, (last - first).astype(np.float64)
