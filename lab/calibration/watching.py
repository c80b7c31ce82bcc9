"""What a collector sees of the replicas of a run at fixed capacity, and how the requests of each role fared.

A stage of a disaggregated service is judged by what it alone uses of the SLO, each request from the moment at which it
came to the stage. Prefill: the time to its token, over the TTFT target. Decode: the time per token over the TPOT
target, and the wait for its first token (KV on its way, no KV space, the queue) over the TTFT target, since with
Trimtab's gateway, as with vLLM's proxy, the client gets its first token from the decode server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from lab.calibration.windows import Floats, Windows, pressures, request_outcomes
from lab.evaluation.statistics import Slo
from lab.virtual.clock import EngineClock
from lab.virtual.observing import VirtualCollector
from lab.virtual.recording import EngineRecorder
from policy_engine.core.shared.vocabulary import MemberKey
from simulator.core.event_engine import EventEngine
from simulator.core.requests import FinishedRequest
from simulator.traces.model import TraceRequest
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_signals import RoleSignals
from trimtab.domain.vocabulary import Role

WINDOW_S = 5.0
SCRAPE_S = 1.0
_SERVICE = "service"
_COLUMNS = ("prefill_tps", "decode_tps", "running", "waiting", "kv_usage_ratio", "request_rps")


class Watch:
    """The collector of a run, and the requests that ended, by role."""

    def __init__(self, clock: EngineClock) -> None:
        self._clock = clock
        self._collector = VirtualCollector(window_s=WINDOW_S, interval_s=SCRAPE_S)
        self._roles: dict[int, Role] = {}
        self._recorders: dict[int, EngineRecorder] = {}
        self._names: dict[MemberKey, list[str]] = {}
        self._finished: dict[Role, list[FinishedRequest]] = {}
        self._ends_s: list[float] = []
        self._views: dict[Role, list[RoleSignals]] = {}

    def add(self, index: int, role: Role, engine: EventEngine, gpus: int) -> None:
        """Look at the engine that the clock knows by `index`, from now on; it has served nothing yet."""
        self._roles[index] = role
        self._recorders[index] = EngineRecorder(engine)
        self._collector.add(_name(index), _SERVICE, role, gpus)
        self._names.setdefault(MemberKey(_SERVICE, role), []).append(_name(index))
        self._finished.setdefault(role, [])
        self._views.setdefault(role, [])

    def finished(self, index: int, finished: FinishedRequest) -> None:
        """A request ended in an engine."""
        self._recorders[index].finished(finished)
        self._finished[self._roles[index]].append(finished)

    def scrape(self, now_s: float) -> None:
        """Read every server."""
        for index in self._recorders:
            self._clock.at(index, now_s)
        self._collector.scrape(now_s, {_name(index): one.reading(now_s) for index, one in self._recorders.items()})

    def close_window(self, now_s: float) -> None:
        """Keep what is known of the window that ends now."""
        views, _ = self._collector.signals(now_s, self._names)
        self._ends_s.append(now_s)
        for key, view in views.items():
            self._views[key.role].append(view)

    def attained(self, role: Role, slo: Slo) -> float | None:
        """The share of a role's requests within the SLO, of those that have ended; None of none."""
        _, pressure = _pressures(self._finished[role], role, slo)
        return float(np.mean(pressure <= 1.0)) if len(pressure) else None

    def windows(self, role: Role, slo: Slo) -> Windows:
        """Those of a role, once everything that arrived has ended; without the ones that could not be read."""
        views, ends_s = self._views[role], np.array(self._ends_s)
        arrival_s, pressure = _pressures(self._finished[role], role, slo)
        found, attained, count = request_outcomes(arrival_s, pressure, ends_s, window_s=WINDOW_S)
        columns = {name: np.array([_number(getattr(view, name)) for view in views]) for name in _COLUMNS}
        windows = Windows(
            run=np.zeros(len(views), dtype=np.int64),
            end_s=ends_s,
            **columns,
            pressure=found,
            attained=attained,
            requests=count,
        )
        return windows.where(~np.isnan(np.sum(list(columns.values()), axis=0)))


def drive(
    requests: Iterable[TraceRequest],
    submit: Callable[[TraceRequest], None],
    clock: EngineClock,
    watch: Watch,
    *,
    duration_s: float,
) -> None:
    """Submit requests at their time and scrape every second, up to `duration_s`; then let everything end."""
    waiting = iter(requests)
    request = next(waiting, None)
    for second in range(1, int(duration_s / SCRAPE_S) + 1):
        now_s = second * SCRAPE_S
        while request is not None and request.arrival_s < now_s:
            submit(request)
            request = next(waiting, None)
        clock.run_before(now_s)
        watch.scrape(now_s)
        if second % round(WINDOW_S / SCRAPE_S) == 0:
            watch.close_window(now_s)
    clock.run_before(math.inf)


def stage_pressures(role: Role, ttft_s: Floats, tpot_s: Floats, slo: Slo) -> Floats:
    """How much of the SLO requests used, or windows at their 95th percentiles; TTFT is from the arrival at the stage.

    NaN where the latency that decides is not known: TTFT, for a decode stage TPOT and TTFT both.
    """
    if role is Role.PREFILL:
        return np.asarray(ttft_s / slo.ttft_s)
    used = pressures(ttft_s, tpot_s, ttft_target_s=slo.ttft_s, tpot_target_s=slo.tpot_s)
    return used if role is Role.DECODE else np.where(np.isnan(ttft_s), np.nan, used)


def _pressures(finished: Iterable[FinishedRequest], role: Role, slo: Slo) -> tuple[Floats, Floats]:
    """(arrival, pressure) of each request; TPOT is NaN for an answer of one token."""
    rows = np.array(
        [
            (one.arrival_s, one.first_token_s or one.finished_s, one.finished_s, one.generated_tokens)
            for one in finished
        ],
        dtype=np.float64,
    ).reshape(-1, 4)
    arrival_s, first_s, ended_s = rows[:, 0], rows[:, 1], rows[:, 2]
    after = np.where(rows[:, 3] > 1, rows[:, 3] - 1, np.nan)
    return arrival_s, stage_pressures(role, first_s - arrival_s, (ended_s - first_s) / after, slo)


def _number(signal: Measurement) -> float:
    return signal.value if signal.value is not None and signal.usable else math.nan


def _name(index: int) -> str:
    return f"replica-{index}"
