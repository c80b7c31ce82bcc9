"""Runs of one service at fixed capacity, seen through the collector's cores."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lab.calibration.watching import Watch, drive
from lab.calibration.windows import Windows
from lab.evaluation.statistics import Slo
from lab.virtual.clock import EngineClock, engines_of
from lab.virtual.fixed.disaggregated import DisaggregatedFleet
from lab.virtual.fixed.routing import LeastLoaded
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.traces.model import TraceRequest
from trimtab.domain.vocabulary import Role


def run_fixed(
    requests: Iterable[TraceRequest],
    *,
    profile: Profile,
    slo: Slo,
    replicas: int,
    duration_s: float,
    role: Role = Role.COLOCATED,
) -> Windows:
    """Serve requests with `replicas` servers, least loaded first; the windows up to `duration_s`, as one run.

    With a role of prefill or decode the servers do their stage's part of each request, as if the other stage took no
    time: prefill computes the prompt and holds its KV until it is fetched, decode fetches it and makes the answer.
    Every request runs to its end, so that its latencies are known. Requests longer than the model takes are left out.
    """
    fleet = _Fleet(profile, replicas, role)
    drive(requests, fleet.submit, fleet.clock, fleet.watch, duration_s=duration_s)
    return fleet.watch.windows(role, slo)


def attained(requests: Iterable[TraceRequest], *, profile: Profile, slo: Slo, role: Role) -> float | None:
    """The share of requests within the SLO on one server, as `run_fixed` would judge them; None of none."""
    fleet = _Fleet(profile, 1, role)
    for request in requests:
        fleet.submit(request)
    fleet.clock.run_before(math.inf)
    return fleet.watch.attained(role, slo)


def run_staged(
    requests: Iterable[TraceRequest],
    *,
    prefill: Profile,
    decode: Profile,
    slo: Slo,
    prefill_replicas: int,
    decode_replicas: int,
    duration_s: float,
) -> dict[Role, Windows]:
    """Serve requests with replicas of both roles, one handing over to the other; the windows of each role."""
    fleet = _StagedFleet(prefill, decode, prefill_replicas, decode_replicas)
    drive(requests, fleet.take, fleet.clock, fleet.watch, duration_s=duration_s)
    return {role: fleet.watch.windows(role, slo) for role in (Role.PREFILL, Role.DECODE)}


class _Fleet:
    """Equal replicas of one role on a clock."""

    def __init__(self, profile: Profile, replicas: int, role: Role) -> None:
        self._max_tokens = profile.limits.max_model_len
        self._link = profile.kv_link()
        self._role = role
        self._router = LeastLoaded()
        self.clock = EngineClock(self._end)
        self.watch = Watch(self.clock)
        for engine in engines_of(profile, replicas):
            index = self.clock.add(engine)
            self._router.add(index)
            self.watch.add(index, role, engine, profile.tensor_parallel)
        self._submitted = 0

    def submit(self, request: TraceRequest) -> None:
        if request.prompt_tokens + request.output_tokens > self._max_tokens:
            return
        self.clock.run_before(request.arrival_s)
        index = self._router.least()
        if index is not None:
            self._submitted += 1
            self.clock.submit(index, self._part(str(self._submitted), request), request.arrival_s)
            self._router.change(index, 1)

    def _part(self, name: str, request: TraceRequest) -> EngineRequest:
        if self._role is Role.PREFILL:
            return EngineRequest(name, request.prompt_tokens, 1, hold_kv=True)
        transfer_s = self._link.transfer_s(request.prompt_tokens) if self._role is Role.DECODE else None
        return EngineRequest(name, request.prompt_tokens, request.output_tokens, external_kv_s=transfer_s)

    def _end(self, index: int, finished: FinishedRequest) -> None:
        self._router.change(index, -1)
        self.watch.finished(index, finished)
        if finished.request.hold_kv:
            fetched_s = finished.finished_s + self._link.transfer_s(finished.request.prompt_tokens)
            self.clock.call_at(fetched_s, lambda at_s: self._fetched(index, finished.request.request_id, at_s))

    def _fetched(self, index: int, name: str, at_s: float) -> None:
        self.clock.at(index, at_s).release_held(name, at_s)
        self.clock.touched(index)


class _StagedFleet(DisaggregatedFleet):
    """Replicas of both roles, with a collector; the first token comes from the decode replica."""

    def __init__(self, prefill: Profile, decode: Profile, prefill_replicas: int, decode_replicas: int) -> None:
        super().__init__(prefill.kv_link(), prefill_sends_first_token=False)
        self._max_tokens = min(prefill.limits.max_model_len, decode.limits.max_model_len)
        self.watch = Watch(self.clock)
        for engine in engines_of(prefill, prefill_replicas):
            self.watch.add(self.add_prefill(engine), Role.PREFILL, engine, prefill.tensor_parallel)
        for engine in engines_of(decode, decode_replicas):
            self.watch.add(self.add_decode(engine), Role.DECODE, engine, decode.tensor_parallel)

    def take(self, request: TraceRequest) -> None:
        """`submit`, without requests that are longer than the model takes."""
        if request.prompt_tokens + request.output_tokens <= self._max_tokens:
            self.submit(request)

    def _finished(self, index: int, finished: FinishedRequest) -> None:
        self.watch.finished(index, finished)
        super()._finished(index, finished)
