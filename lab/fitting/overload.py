"""Replays recorded overload runs of a real vLLM server: fits the host's share of an iteration, grades the rest.

The run on the RTX PRO 6000 waits for batch slots, the one on the RTX 4090 for KV blocks; the host's share of
iterations is fitted on the first, and the second grades the model with it. As in the real server, whose prefix cache is
on, a preempted request finds again what is left of its prompt's blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.fitting.tables import Array, BenchRequest, rows
from simulator.core.event_engine import EventEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import IterationModel

_MAX_BLOCKS = 1 << 20
_MAX_READABLE_BLOCKS = 5000
"""From twice as many on, four decimals do not distinguish them."""
_HALF_DECIMAL = 0.5001e-4
_FIRST_STEP_S, _LAST_STEP_S = 2e-3, 25e-6
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -2), (-1, 2), (1, -4), (-1, 4))
"""A little more of every iteration makes up for much less of those with prefill, of which there are fewer."""


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
    engine = EventEngine(limits, timing)
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


def read_gauges(perf: Path, name: str) -> Gauges:
    """The gauges of a recorded run; raises TableError when there is none."""
    table = list(rows(perf / "llmservingsim" / f"bench_{name}_timeseries.csv"))

    def column(key: str) -> Array:
        return np.array([float(row[key]) for row in table])

    return Gauges(column("running"), column("waiting"), column("kv_cache_pct") / 100)


def kv_blocks(usage: Array) -> int:
    """Blocks of KV cache that the recorded server could allocate, from the usage it showed; 0 to 1, shape (any,).

    Usage is whole blocks over all of them, written with four decimals. Some 180 such figures fit one number of blocks
    and its multiples only. Nothing simulated and no time is looked at. Raises ValueError when no number fits.
    """
    shown = usage[(usage > 0) & (usage < 1)]
    for blocks in range(1, _MAX_READABLE_BLOCKS):
        if len(shown) and (np.abs(np.round(shown * blocks) / blocks - shown) <= _HALF_DECIMAL).all():
            return blocks
    raise ValueError(f"no number of KV blocks below {_MAX_READABLE_BLOCKS} shows these {len(shown)} usages")


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


@dataclasses.dataclass(frozen=True, slots=True)
class HostShare:
    """What the host adds to iterations; seconds."""

    host_s: float = 0.0
    """To every iteration."""
    prefill_s: float = 0.0
    """To every iteration with prefill, which does not run as one CUDA graph."""

    def on(self, timing: IterationModel) -> IterationModel:
        """The GPU's times with the host's share."""
        return dataclasses.replace(timing, host_s=self.host_s, prefill_s=self.prefill_s)


def fit_host_share(requests: Sequence[BenchRequest], limits: EngineLimits, timing: IterationModel) -> HostShare:
    """The share for which the simulated latencies are nearest to the recorded ones.

    Least mean square of the logarithms of simulated over recorded TTFT, TPOT and end-to-end latency of all requests, by
    a search that halves its steps: the sum is not smooth, since batches come out otherwise at other times.
    """

    def cost(share: HostShare) -> float:
        return float(np.mean(_log_errors(requests, replay(requests, limits, share.on(timing)).finished) ** 2))

    best, step_s = HostShare(), _FIRST_STEP_S
    least = cost(best)
    while step_s >= _LAST_STEP_S:
        trials = (
            HostShare(max(0.0, best.host_s + host * step_s), max(0.0, best.prefill_s + prefill * step_s))
            for host, prefill in _DIRECTIONS
        )
        costs = {trial: cost(trial) for trial in trials}
        nearest = min(costs, key=costs.__getitem__)
        if costs[nearest] < least:
            best, least = nearest, costs[nearest]
        else:
            step_s /= 2
    return best


def _log_errors(requests: Sequence[BenchRequest], simulated: Sequence[FinishedRequest]) -> Array:
    """Logarithms of simulated over recorded TTFT, TPOT and end-to-end latency; shape (3 · requests,)."""
    ratios = []
    for recorded, done in zip(requests, simulated, strict=True):
        first_s, last_s = done.first_token_s or 0.0, done.last_token_s or 0.0
        ratios.append((first_s - done.arrival_s) / recorded.time_to_first_token_s)
        ratios.append((last_s - first_s) / max(1, done.generated_tokens - 1) / recorded.time_per_output_token_s)
        ratios.append((done.finished_s - done.arrival_s) / (recorded.ended_s - recorded.arrival_s))
    return np.log(ratios)
