"""Replays recorded overload runs of a real vLLM server: fits the host's share of an iteration, grades the rest.

The run on the RTX PRO 6000 waits for batch slots, the one on the RTX 4090 for KV blocks; the host's share of an
iteration is fitted on the first, and the second grades the model with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from simulator.core.engine import Engine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import IterationModel
from simulator.fitting.tables import BenchRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
    """Relative errors of the simulated run against the recorded one; positive where the simulation is slower."""

    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    makespan: float


def replay(requests: Sequence[BenchRequest], limits: EngineLimits, timing: IterationModel) -> list[FinishedRequest]:
    """Serve recorded requests with the engine model, in virtual time; results in the order of the requests."""
    engine = Engine(limits, timing)
    finished: dict[str, FinishedRequest] = {}
    now_s = 0.0
    following = 0
    while len(finished) < len(requests):
        while following < len(requests) and requests[following].arrival_s <= now_s:
            one = requests[following]
            engine.submit(EngineRequest(str(following), one.prompt_tokens, one.output_tokens), one.arrival_s)
            following += 1
        ended_s = engine.begin_step(now_s)
        if ended_s is None:
            now_s = requests[following].arrival_s
            continue
        for done in engine.end_step().finished:
            finished[done.request.request_id] = done
        now_s = ended_s
    return [finished[str(index)] for index in range(len(requests))]


def grade(requests: Sequence[BenchRequest], simulated: Sequence[FinishedRequest]) -> Grade:
    """Compare a replay with the recording."""
    ttft = [(f.first_token_s or 0.0) - f.arrival_s for f in simulated]
    tpot = [((f.last_token_s or 0.0) - (f.first_token_s or 0.0)) / max(1, f.generated_tokens - 1) for f in simulated]

    def against(ours: Sequence[float], theirs: Sequence[float], percentile: float) -> float:
        return float(np.percentile(ours, percentile) / np.percentile(theirs, percentile) - 1)

    real_ttft = [r.time_to_first_token_s for r in requests]
    real_tpot = [r.time_per_output_token_s for r in requests]
    return Grade(
        ttft_p50=against(ttft, real_ttft, 50),
        ttft_p95=against(ttft, real_ttft, 95),
        tpot_p50=against(tpot, real_tpot, 50),
        tpot_p95=against(tpot, real_tpot, 95),
        makespan=max(f.finished_s for f in simulated) / max(r.ended_s for r in requests) - 1,
    )


def fit_host_s(requests: Sequence[BenchRequest], limits: EngineLimits, timing: IterationModel) -> float:
    """The host's share of an iteration that makes the median time per output token that of the recording."""
    low_s, high_s = 0.0, 0.03
    for _ in range(9):
        middle_s = (low_s + high_s) / 2
        model = dataclasses.replace(timing, host_s=middle_s)
        if grade(requests, replay(requests, limits, model)).tpot_p50 > 0:
            high_s = middle_s
        else:
            low_s = middle_s
    return (low_s + high_s) / 2
