"""Replays recorded overload runs of a real vLLM server: fits the host's share of an iteration, grades the rest.

The run on the RTX PRO 6000 waits for batch slots, the one on the RTX 4090 for KV blocks; the host's share of an
iteration is fitted on the first, and the second grades the model with it. As in the real server, whose prefix cache is
on, a preempted request finds again what is left of its prompt's blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simulator.core.jumping import JumpingEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import IterationModel
from simulator.fitting.tables import Array, BenchRequest, rows

_MAX_BLOCKS = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A simulated run: requests in the order of the recording, and gauges at each whole second."""

    finished: tuple[FinishedRequest, ...]
    running: Array
    waiting: Array


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
    """Relative errors of the simulated run against the recorded one; positive where the simulation is larger."""

    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    e2e_p50: float
    e2e_p95: float
    makespan: float
    throughput: float
    """Tokens a second from the first arrival to the last token."""


def replay(
    requests: Sequence[BenchRequest], limits: EngineLimits, timing: IterationModel, first_gauge_s: float = 1.0
) -> Replay:
    """Serve recorded requests at their recorded arrivals, in virtual time; gauges each second from `first_gauge_s`."""
    engine = JumpingEngine(limits, timing)
    finished: dict[int, FinishedRequest] = {}
    running: list[float] = []
    waiting: list[float] = []
    following = 0
    while len(finished) < len(requests):
        tick_s = len(running) + first_gauge_s
        arrives = following < len(requests) and requests[following].arrival_s <= tick_s
        now_s = requests[following].arrival_s if arrives else tick_s
        for done in engine.advance(now_s):
            finished[int(done.request.request_id)] = done
        if arrives:
            engine.submit(_request(following, requests[following], limits), now_s)
            following += 1
        else:
            gauges = engine.observe(now_s)
            running.append(float(gauges.running))
            waiting.append(float(gauges.waiting))
    in_order = tuple(finished[index] for index in range(len(requests)))
    return Replay(in_order, np.array(running), np.array(waiting))


def _request(index: int, recorded: BenchRequest, limits: EngineLimits) -> EngineRequest:
    """A request whose prompt shares no block with another's."""
    first = index * _MAX_BLOCKS
    hashes = tuple(range(first, first + recorded.prompt_tokens // limits.block_size))
    return EngineRequest(str(index), recorded.prompt_tokens, recorded.output_tokens, block_hashes=hashes)


def grade(requests: Sequence[BenchRequest], simulated: Sequence[FinishedRequest]) -> Grade:
    """Compare a replay with the recording."""
    ttft = [(f.first_token_s or 0.0) - f.arrival_s for f in simulated]
    tpot = [((f.last_token_s or 0.0) - (f.first_token_s or 0.0)) / max(1, f.generated_tokens - 1) for f in simulated]
    e2e = [f.finished_s - f.arrival_s for f in simulated]

    def against(ours: Sequence[float], theirs: Sequence[float], percentile: float) -> float:
        return float(np.percentile(ours, percentile) / np.percentile(theirs, percentile) - 1)

    real_ttft = [r.time_to_first_token_s for r in requests]
    real_tpot = [r.time_per_output_token_s for r in requests]
    real_e2e = [r.ended_s - r.arrival_s for r in requests]
    makespan = max(f.finished_s for f in simulated) / max(r.ended_s for r in requests)
    return Grade(
        ttft_p50=against(ttft, real_ttft, 50),
        ttft_p95=against(ttft, real_ttft, 95),
        tpot_p50=against(tpot, real_tpot, 50),
        tpot_p95=against(tpot, real_tpot, 95),
        e2e_p50=against(e2e, real_e2e, 50),
        e2e_p95=against(e2e, real_e2e, 95),
        makespan=makespan - 1,
        throughput=1 / makespan - 1,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """What a recorded server showed at each second: shape (seconds,) each."""

    running: Array
    waiting: Array
    kv_usage: Array
    """Part of its KV cache in use, 0 to 1."""
    generated_tokens: Array
    """In the second before."""


def read_gauges(perf: Path, name: str) -> Gauges:
    """The gauges of a recorded run; raises TableError when there is none."""
    table = list(rows(perf / "llmservingsim" / f"bench_{name}_timeseries.csv"))

    def column(key: str) -> Array:
        return np.array([float(row[key]) for row in table])

    return Gauges(column("running"), column("waiting"), column("kv_cache_pct") / 100, column("gen_throughput"))


def kv_capacity_tokens(requests: Sequence[BenchRequest], gauges: Gauges, first_s: float, block_size: int = 16) -> int:
    """Tokens of KV cache that the recorded server had, in whole blocks; nothing simulated is looked at.

    Read off the last seconds, when nobody waits and nobody is preempted: tokens held over the usage shown. What a
    request still lacks then is the pace of the following seconds times the time to its end.
    """
    at_s: Array = first_s + np.arange(len(gauges.running), dtype=np.float64)
    found = []
    for tick in range(int(np.flatnonzero(gauges.waiting)[-1]) + 1, len(at_s)):
        if not gauges.running[tick] or not gauges.kv_usage[tick]:
            continue
        held = 0.0
        for request in requests:
            if request.arrival_s <= at_s[tick] < request.ended_s:
                missing = _tokens_until(request.ended_s, gauges, at_s, tick)
                held += -(-(request.prompt_tokens + request.output_tokens - missing) // block_size) * block_size
        found.append(held / float(gauges.kv_usage[tick]))
    if not found:
        raise ValueError("the recorded run never ends with requests that run while none waits")
    return int(np.median(found)) // block_size * block_size


def _tokens_until(end_s: float, gauges: Gauges, at_s: Array, tick: int) -> float:
    """Tokens that one running request gets from a tick on."""
    tokens = 0.0
    for later in range(tick + 1, len(at_s)):
        seconds = min(1.0, end_s - float(at_s[later - 1]))
        if seconds <= 0:
            break
        batch = float(gauges.running[later] + gauges.running[later - 1]) / 2
        tokens += seconds * float(gauges.generated_tokens[later]) / max(1.0, batch)
    return tokens


def first_gauge_s(requests: Sequence[BenchRequest], in_system: Array) -> float:
    """When the recording's first gauges were read, in seconds from the first arrival.

    The gauges have a clock of their own. It is set so that running and waiting together are what had arrived and not
    yet ended by the recorded times of the requests; nothing simulated is looked at.
    """
    arrived = np.sort([r.arrival_s for r in requests])
    ended = np.sort([r.ended_s for r in requests])
    candidates = np.arange(0.0, 2.0, 0.02)

    def mismatch(first_s: float) -> float:
        at_s = first_s + np.arange(len(in_system))
        inside = np.searchsorted(arrived, at_s, side="right") - np.searchsorted(ended, at_s, side="right")
        return float(np.abs(inside - in_system).sum())

    return float(min(candidates, key=mismatch))


def series_error(simulated: Array, recorded: Array) -> float:
    """Mean absolute difference over the mean of the recording; a run that is over counts as zero from then on."""
    length = max(len(simulated), len(recorded))
    padded = [np.pad(values, (0, length - len(values))) for values in (simulated, recorded)]
    return float(np.abs(padded[0] - padded[1]).mean() / padded[1].mean())


def fit_host_s(requests: Sequence[BenchRequest], limits: EngineLimits, timing: IterationModel) -> float:
    """The host's share of an iteration that makes the median time per output token that of the recording."""
    low_s, high_s = 0.0, 0.03
    for _ in range(9):
        middle_s = (low_s + high_s) / 2
        model = dataclasses.replace(timing, host_s=middle_s)
        if grade(requests, replay(requests, limits, model).finished).tpot_p50 > 0:
            high_s = middle_s
        else:
            low_s = middle_s
    return (low_s + high_s) / 2
