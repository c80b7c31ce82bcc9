"""Runs of one service at fixed capacity, seen through the collector's cores."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from policy_engine.core.signals import RoleSignals, Signal
from policy_engine.core.vocabulary import MemberKey
from simulator.calibration.windows import Floats, Windows, fates, pressures
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.evaluation.statistics import Slo
from simulator.offline.fleet import EngineClock, engines_of
from simulator.offline.routing import LeastLoaded
from simulator.traces.model import TraceRequest
from simulator.virtual.observing import VirtualCollector
from simulator.virtual.recording import EngineRecorder
from trimtab.words import Role

WINDOW_S = 5.0
SCRAPE_S = 1.0


def run_fixed(
    requests: Iterable[TraceRequest],
    *,
    profile: Profile,
    slo: Slo,
    replicas: int,
    duration_s: float,
) -> Windows:
    """Serve requests with `replicas` servers, least loaded first; the windows up to `duration_s`, as one run.

    Every request runs to its end, so that its latencies are known. Requests longer than the model takes are left out.
    """
    fleet = _Fleet(profile, replicas)
    ends_s: list[float] = []
    views: list[RoleSignals] = []
    waiting = iter(requests)
    request = next(waiting, None)
    for second in range(1, int(duration_s / SCRAPE_S) + 1):
        now_s = second * SCRAPE_S
        while request is not None and request.arrival_s < now_s:
            fleet.submit(request)
            request = next(waiting, None)
        fleet.scrape(now_s)
        if second % round(WINDOW_S / SCRAPE_S) == 0:
            ends_s.append(now_s)
            views.append(fleet.view(now_s))
    fleet.clock.run_before(math.inf)
    arrival_s, ttft_s, tpot_s = fleet.latencies()
    pressure = pressures(ttft_s, tpot_s, ttft_target_s=slo.ttft_s, tpot_target_s=slo.tpot_s)
    found, attained, count = fates(arrival_s, pressure, np.array(ends_s), window_s=WINDOW_S)
    columns = {
        name: np.array([_number(getattr(view, name)) for view in views])
        for name in ("prefill_tps", "decode_tps", "running", "waiting", "kv_usage_ratio", "request_rps")
    }
    windows = Windows(
        run=np.zeros(len(views), dtype=np.int64),
        end_s=np.array(ends_s),
        **columns,
        pressure=found,
        attained=attained,
        requests=count,
    )
    return windows.where(~np.isnan(np.sum(list(columns.values()), axis=0)))


def _number(signal: Signal) -> float:
    return signal.value if signal.value is not None and signal.usable else math.nan


class _Fleet:
    """Equal replicas of one service on a clock, with a collector."""

    def __init__(self, profile: Profile, replicas: int) -> None:
        self._max_tokens = profile.limits.max_model_len
        self._router = LeastLoaded()
        self._recorders: list[EngineRecorder] = []
        self._finished: list[FinishedRequest] = []
        self.clock = EngineClock(self._end)
        self._collector = VirtualCollector(window_s=WINDOW_S, interval_s=SCRAPE_S)
        self._key = MemberKey("service", Role.COLOCATED)
        self._names = [f"replica-{number}" for number in range(replicas)]
        for name, engine in zip(self._names, engines_of(profile, replicas), strict=True):
            self._router.add(self.clock.add(engine))
            self._recorders.append(EngineRecorder(engine))
            self._collector.add(name, self._key.service, self._key.role, profile.tensor_parallel)
        self._submitted = 0

    def submit(self, request: TraceRequest) -> None:
        if request.prompt_tokens + request.output_tokens > self._max_tokens:
            return
        self.clock.run_before(request.arrival_s)
        index = self._router.least()
        if index is not None:
            self._submitted += 1
            own = EngineRequest(str(self._submitted), request.prompt_tokens, request.output_tokens)
            self.clock.submit(index, own, request.arrival_s)
            self._router.change(index, 1)

    def scrape(self, now_s: float) -> None:
        self.clock.run_before(now_s)
        for index in range(len(self._names)):
            self.clock.at(index, now_s)
        self._collector.scrape(
            now_s, {name: one.reading(now_s) for name, one in zip(self._names, self._recorders, strict=True)}
        )

    def view(self, now_s: float) -> RoleSignals:
        return self._collector.signals(now_s, {self._key: self._names})[0][self._key]

    def latencies(self) -> tuple[Floats, Floats, Floats]:
        """(arrival, TTFT, TPOT) of each request in seconds; TPOT is NaN for an answer of one token."""
        rows = np.array(
            [
                (one.arrival_s, one.first_token_s or one.finished_s, one.finished_s, one.generated_tokens)
                for one in self._finished
            ],
            dtype=np.float64,
        ).reshape(-1, 4)
        after = np.where(rows[:, 3] > 1, rows[:, 3] - 1, np.nan)
        return rows[:, 0], rows[:, 1] - rows[:, 0], (rows[:, 2] - rows[:, 1]) / after

    def _end(self, index: int, finished: FinishedRequest) -> None:
        self._router.change(index, -1)
        self._recorders[index].finished(finished)
        self._finished.append(finished)
