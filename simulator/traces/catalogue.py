"""Every workload that has a name, generated, and every trace that has a file, read: one way to open either."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from simulator.traces.diurnal import diurnal
from simulator.traces.generators import Curve
from simulator.traces.model import TraceError, TraceRequest
from simulator.traces.probes import PROBE_DURATION_S, PROBES, probe
from simulator.traces.readers import read_trace
from simulator.traces.servegen import DAY_S, ClientMix, made_up_clients, requests_of_clients

CLIENT_MIX_DURATION_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A generated workload: how long it lasts by default, and how it is made of a seed and a duration."""

    duration_s: float
    make: Callable[[int, float], Iterator[TraceRequest]]


def _client_mix(seed: int, duration_s: float) -> Iterator[TraceRequest]:
    clients = made_up_clients(
        ClientMix(clients=60, total_rps=6.0), curve=Curve(((0.0, 1.0),)), duration_s=duration_s, seed=seed
    )
    return requests_of_clients(clients, service="chat", seed=seed, duration_s=duration_s)


def _probe(name: str) -> Workload:
    return Workload(PROBE_DURATION_S, lambda seed, duration_s: probe(name, seed=seed, duration_s=duration_s))


WORKLOADS: Mapping[str, Workload] = {
    **{name: _probe(name) for name in PROBES},
    "diurnal": Workload(DAY_S, lambda seed, duration_s: diurnal(seed=seed, duration_s=duration_s)),
    "client-mix": Workload(CLIENT_MIX_DURATION_S, _client_mix),
}


def workload(name: str, *, seed: int, duration_s: float | None = None) -> Iterator[TraceRequest]:
    """A generated workload by its name. Raises `TraceError` for a name that is none."""
    chosen = WORKLOADS.get(name)
    if chosen is None:
        raise TraceError(f"there is no workload {name!r}; there are {', '.join(sorted(WORKLOADS))}")
    return chosen.make(seed, chosen.duration_s if duration_s is None else duration_s)


def opened(file_or_name: str, *, seed: int = 1, duration_s: float | None = None) -> Iterator[TraceRequest]:
    """A workload's requests, or a file's; a name wins over a file in the current folder. Raises `TraceError`."""
    if file_or_name in WORKLOADS:
        return workload(file_or_name, seed=seed, duration_s=duration_s)
    path = Path(file_or_name)
    if not path.exists():
        raise TraceError(
            f"{file_or_name} is neither a file nor a workload; workloads are {', '.join(sorted(WORKLOADS))}"
        )
    return _until(read_trace(path), duration_s)


def _until(requests: Iterator[TraceRequest], duration_s: float | None) -> Iterator[TraceRequest]:
    for request in requests:
        if duration_s is not None and request.arrival_s >= duration_s:
            return
        yield request
