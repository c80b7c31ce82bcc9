"""One replica under a closed loop: a fixed number of clients, each sending its next request when the last one ends."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
import statistics
from collections.abc import Iterator

from simulator.core.curves import DecodeCurves
from simulator.core.event_engine import EventEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest
from simulator.core.timing import IterationModel

_JUST_AFTER_S = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What the clients send. Lengths are uniform from `least_share` of the given ones up to them."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    rounds: int
    """Measured requests of each client, on average."""
    least_share: float = 1.0
    warm_up_rounds: int = 0
    """Requests of each client that are served before: when the last one is over, all clients begin again at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Latencies:
    """Means over all requests, as benchmark clients print them."""

    ttft_s: float
    tpot_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Served:
    ttft_s: float
    tpot_s: float | None
    """None of a request with one token."""
    finished_s: float


def run_closed_loop(
    limits: EngineLimits, timing: IterationModel, load: Load, request_s: float = 0.0, *, scheduled_ahead: bool = False
) -> Latencies:
    """Serve the load from an empty replica to the last answer, on virtual time; the same load gives the same result.

    `request_s` passes between a client's send and the request's arrival at the engine (HTTP, tokenizer); it counts in
    the TTFT. `scheduled_ahead` is vLLM's asynchronous scheduling: while an iteration runs, the next one is put together
    already, so that what arrives meanwhile takes part in the one after that.
    """
    generator = random.Random(load.concurrency * 1_000_003 + load.prompt_tokens * 1009 + load.output_tokens)
    engine = EventEngine(limits, timing, DecodeCurves(timing, limits.kv_capacity_tokens))
    start_s = 0.0
    for served in _serve(engine, load, load.warm_up_rounds, request_s, start_s, generator, scheduled_ahead):
        start_s = served.finished_s
    measured = list(_serve(engine, load, load.rounds, request_s, start_s, generator, scheduled_ahead))
    tpot = [one.tpot_s for one in measured if one.tpot_s is not None]
    return Latencies(statistics.fmean(one.ttft_s for one in measured), statistics.fmean(tpot) if tpot else 0.0)


def _serve(
    engine: EventEngine,
    load: Load,
    rounds: int,
    request_s: float,
    start_s: float,
    generator: random.Random,
    scheduled_ahead: bool,
) -> Iterator[_Served]:
    """What finishes, in order, of all requests of `rounds` rounds; the clients begin at `start_s`."""
    total = load.concurrency * rounds
    sent = done = 0
    sent_s: dict[str, float] = {}
    # (arrival, order, request or None before it is drawn): requests that wait for an iteration to end come again.
    due: list[tuple[float, int, EngineRequest | None]] = [
        (start_s + request_s, index, None) for index in range(load.concurrency)
    ]
    order = load.concurrency
    while done < total:
        while due and due[0][0] <= engine.next_s:
            at_s, _, request = heapq.heappop(due)
            if request is None:
                if sent == total:
                    continue
                request = _request(sent, load, generator)
                sent_s[request.request_id] = at_s - request_s
                sent += 1
                end_s = engine.iteration_end_s(at_s) if scheduled_ahead else at_s
                if at_s < end_s < math.inf:
                    heapq.heappush(due, (end_s + _JUST_AFTER_S, order, request))
                    order += 1
                    continue
            engine.submit(request, at_s)
        for finished in engine.fire():
            done += 1
            heapq.heappush(due, (finished.finished_s + request_s, order, None))
            order += 1
            first_s, last_s = finished.first_token_s or 0.0, finished.last_token_s or 0.0
            gaps = finished.generated_tokens - 1
            yield _Served(
                first_s - sent_s[finished.request.request_id],
                (last_s - first_s) / gaps if gaps else None,
                finished.finished_s,
            )


def _request(index: int, load: Load, generator: random.Random) -> EngineRequest:
    def length(most: int) -> int:
        return max(1, generator.randint(round(most * load.least_share), most))

    return EngineRequest(str(index), length(load.prompt_tokens), length(load.output_tokens))
