"""One replica under a closed loop: a fixed number of clients, each sending its next request when the last one ends."""

from __future__ import annotations

import dataclasses
import random
import statistics

from simulator.core.curves import DecodeCurves
from simulator.core.jumping import JumpingEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import IterationModel


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What the clients send. Lengths are uniform from `least_share` of the given ones up to them, those of prompts from
    `least_prompt_share` where that is given.
    """

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    rounds: int
    """Requests of each client, on average."""
    least_share: float = 1.0
    least_prompt_share: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Latencies:
    """Means over all requests, as benchmark clients print them."""

    ttft_s: float
    tpot_s: float


def run_closed_loop(limits: EngineLimits, timing: IterationModel, load: Load, request_s: float = 0.0) -> Latencies:
    """Serve the load from an empty replica to the last answer, on virtual time; the same load gives the same result.

    `request_s` passes between a client's send and the request's arrival at the engine (HTTP, tokenizer); it counts in
    the TTFT.
    """
    generator = random.Random(load.concurrency * 1_000_003 + load.prompt_tokens * 1009 + load.output_tokens)
    engine = JumpingEngine(limits, timing, DecodeCurves(timing, limits.kv_capacity_tokens))
    total = load.concurrency * load.rounds
    sent = 0
    # Clients wait the same time each, so that arrivals come in the order of what caused them.
    due: list[float] = [request_s] * load.concurrency
    finished: list[FinishedRequest] = []
    while len(finished) < total:
        while due and due[0] <= engine.next_s:
            at_s = due.pop(0)
            if sent < total:
                engine.submit(_request(sent, load, generator), at_s)
                sent += 1
        for done in engine.fire():
            finished.append(done)
            due.append(done.finished_s + request_s)
    ttft = [(f.first_token_s or 0.0) - f.arrival_s for f in finished]
    tpot = [
        ((f.last_token_s or 0.0) - (f.first_token_s or 0.0)) / (f.generated_tokens - 1)
        for f in finished
        if f.generated_tokens > 1
    ]
    return Latencies(request_s + statistics.fmean(ttft), statistics.fmean(tpot) if tpot else 0.0)


def _request(index: int, load: Load, generator: random.Random) -> EngineRequest:
    def length(most: int, share: float) -> int:
        return max(1, generator.randint(round(most * share), most))

    prompt_share = load.least_share if load.least_prompt_share is None else load.least_prompt_share
    return EngineRequest(
        str(index), length(load.prompt_tokens, prompt_share), length(load.output_tokens, load.least_share)
    )
