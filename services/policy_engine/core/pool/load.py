"""The leading measure of a pool's member: how many replicas' worth of work there is, over the replicas that serve.

    arriving = arriving prompt tokens / capacity_prefill + arriving output tokens / capacity_decode
    backlog  = (what the queue will ask for) / horizon + (running requests beyond what arrives can explain)
    ρ        = (arriving + what its change leads to + backlog) / routable replicas

Z measures what requests get now, ρ what is arriving: 1 means that the routable replicas are just enough. Work is
counted in replicas, so it is one scale for all models. It does not depend on the number of replicas: a transfer
changes ρ by division alone.

Running requests: by Little's law a replica at its decode capacity holds `capacity_decode · TPOT target` of them. What
runs beyond what the arrivals explain is left over from a burst, and has to be served as well.

The output of arriving requests is not known, only what each may ask for at most; the mean of recently finished requests
is taken where that is less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trimtab.config.poolrules import LoadRule
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Role

# The memory of tokens per finished request: as short as a change of what is asked wants it. Where few finish in that
# time, so many requests are remembered.
OUTPUT_MEMORY_S = 4.0
OUTPUT_MEMORY_REQUESTS = 20.0
FEW_REQUESTS_RPS = 1e-3
# With fewer requests per second a mean over seconds is no estimate of their latency.
LATENCY_FROM_RPS = 0.01
# A rise is measured over at least this long: from one window to the next it is mostly noise.
RISE_OVER_S = 2.0
# Arrivals are settled when their mean is within this of that over so many times as long, in replicas or as a share.
LONGER = 2.0
SETTLED_WITHIN = 0.15


@dataclass(frozen=True, slots=True)
class OutputMemory:
    """Smoothed rates of generated tokens and of finished requests; their ratio is the tokens of a request."""

    decode_tps: float = 0.0
    request_rps: float = 0.0
    window_end_s: float | None = None

    @property
    def tokens(self) -> float | None:
        """Mean output tokens of a finished request; None before any finished."""
        return self.decode_tps / self.request_rps if self.request_rps > FEW_REQUESTS_RPS else None


@dataclass(frozen=True, slots=True)
class Load:
    """Work in replicas. `rho` is None without a routable replica, where any work is too much.

    `usual` is the recent mean of arrivals; None where nothing is remembered, and `arriving` takes its place. `rise` is
    the expected change of arrivals, by their rise and trend; negative for a fall. `requests` run or wait and
    `request_rps` arrive, both as recent means. `settled`: the usual arrivals have not changed for a while.
    """

    arriving: float
    backlog: float
    routable: int
    usual: float | None = None
    rise: float = 0.0
    requests: float = 0.0
    request_rps: float = 0.0
    settled: bool = False

    @property
    def latency_s(self) -> float | None:
        """How long a request takes on average of late, by Little's law; None where hardly any come."""
        return self.requests / self.request_rps if self.request_rps >= LATENCY_FROM_RPS else None

    @property
    def work(self) -> float:
        """All of it."""
        return self.arriving + self.rise + self.backlog

    @property
    def steady(self) -> float:
        """All of it by what usually arrives: a lull between two bursts is no end of them, nor is one burst a trend."""
        return (self.arriving if self.usual is None else self.usual) + self.backlog

    def by(self, *, steady: bool) -> float:
        """The steady work or that of now."""
        return self.steady if steady else self.work

    @property
    def rho(self) -> float | None:
        """Work per routable replica."""
        return self.with_replicas(self.routable)

    def with_replicas(self, replicas: int, *, steady: bool = False) -> float | None:
        """What ρ would be with as many replicas, by the steady work if asked so; None without any."""
        return self.by(steady=steady) / replicas if replicas > 0 else None


def remember_output(memory: OutputMemory, view: RoleSignals) -> OutputMemory:
    """The memory after this window; the same window twice, or one that could not be read, changes nothing."""
    end_s = view.window_end_s
    if end_s is None or end_s == memory.window_end_s or not (view.decode_tps.usable and view.request_rps.usable):
        return memory
    tokens, requests = view.decode_tps.number(0.0), view.request_rps.number(0.0)
    if memory.window_end_s is None or end_s < memory.window_end_s:
        return OutputMemory(tokens, requests, end_s)
    kept = outputs_kept(end_s - memory.window_end_s, requests)
    return OutputMemory(
        kept * memory.decode_tps + (1 - kept) * tokens, kept * memory.request_rps + (1 - kept) * requests, end_s
    )


def outputs_kept(elapsed_s: float, request_rps: float) -> float:
    """The weight that is left to older windows after one of this length, in which so many requests finished."""
    return math.exp(-min(elapsed_s / OUTPUT_MEMORY_S, elapsed_s * request_rps / OUTPUT_MEMORY_REQUESTS))


@dataclass(frozen=True, slots=True)
class ArrivalMemory:
    """Means of arriving work in replicas, of requests and of their rate; and what arrived in the newest windows.

    `longer` is the mean of arriving work over `LONGER` times as long, `since_s` the end of the first window. `recent`
    has the ends of windows and the work that arrived in them, oldest first: back to the newest that ended `RISE_OVER_S`
    or more before the last.
    """

    arriving: float = 0.0
    longer: float = 0.0
    requests: float = 0.0
    request_rps: float = 0.0
    since_s: float = 0.0
    window_end_s: float | None = None
    recent: tuple[tuple[float, float], ...] = ()


def remember_arrivals(memory: ArrivalMemory, load: Load | None, end_s: float | None, memory_s: float) -> ArrivalMemory:
    """The memory after this window, with weights that fall to 1/e in `memory_s`; with 0 only the newest counts."""
    if load is None or end_s is None or end_s == memory.window_end_s:
        return memory
    arriving = load.arriving
    new = ArrivalMemory(arriving, arriving, load.requests, load.request_rps, end_s, end_s, ((end_s, arriving),))
    if memory.window_end_s is None or end_s < memory.window_end_s:
        return new
    elapsed_s = end_s - memory.window_end_s
    kept, kept_longer = (math.exp(-elapsed_s / span) if span > 0 else 0.0 for span in (memory_s, LONGER * memory_s))
    far = [item for item in memory.recent if end_s - item[0] >= RISE_OVER_S]
    near = [item for item in memory.recent if end_s - item[0] < RISE_OVER_S]
    return ArrivalMemory(
        kept * memory.arriving + (1 - kept) * arriving,
        kept_longer * memory.longer + (1 - kept_longer) * arriving,
        kept * memory.requests + (1 - kept) * new.requests,
        kept * memory.request_rps + (1 - kept) * new.request_rps,
        memory.since_s,
        end_s,
        (*far[-1:], *near, *new.recent),
    )


def recall(load: Load, memory: ArrivalMemory, rule: LoadRule) -> Load:
    """The load with what is usual, and with what a rise and the trend of its arrivals lead to."""
    # Further ahead than it was looked back over, a trend is mostly noise.
    ahead_s = min(rule.trend_s, LONGER * rule.memory_s)
    rise = rule.lead_s * max(0.0, _rise_per_s(memory) - rule.rise_above)
    return replace(
        load,
        usual=memory.arriving,
        rise=max(-load.arriving, rise + ahead_s * _trend_per_s(memory, rule.memory_s)),
        requests=memory.requests,
        request_rps=memory.request_rps,
        settled=_is_settled(memory, rule.memory_s),
    )


def _trend_per_s(memory: ArrivalMemory, memory_s: float) -> float:
    """How fast arrivals change in the long run, in replicas per second.

    In a steady trend a mean lags by its memory, so that two means differ by the trend over the difference of theirs
    (double exponential smoothing, after R. G. Brown).
    """
    return (memory.arriving - memory.longer) / ((LONGER - 1.0) * memory_s) if memory_s > 0 else 0.0


def _is_settled(memory: ArrivalMemory, memory_s: float) -> bool:
    """Not before they were seen for the memory's length."""
    seen_s = 0.0 if memory.window_end_s is None else memory.window_end_s - memory.since_s
    drift = abs(memory.arriving - memory.longer)
    return seen_s >= memory_s and drift <= SETTLED_WITHIN * max(1.0, memory.arriving)


def _rise_per_s(memory: ArrivalMemory) -> float:
    """How fast arrivals rise, in replicas per second; 0 before they were seen for long enough."""
    if not memory.recent:
        return 0.0
    (first_s, first), (last_s, last) = memory.recent[0], memory.recent[-1]
    return (last - first) / (last_s - first_s) if last_s - first_s >= RISE_OVER_S else 0.0


def load_of(
    rule: LoadRule,
    profile: TokenServiceShare,
    view: RoleSignals,
    front: FrontDoor,
    *,
    tpot_s: float,
    routable: int,
    memory: OutputMemory,
) -> Load | None:
    """The member's load in its newest window; None without capacities in its profile or a report of the front door.

    `front.held` are the requests that wait for this role. Without a routable replica its servers' gauges are not used,
    and the held requests are the whole queue.
    """
    serves_prompts, generates = view.role != Role.DECODE, view.role != Role.PREFILL
    prefill_tps = profile.capacity_prefill_tps if serves_prompts else None
    decode_tps = profile.capacity_decode_tps if generates else None
    if not rule.enabled or (serves_prompts and prefill_tps is None) or (generates and decode_tps is None):
        return None
    served = routable > 0
    if not front.arrival_rps.usable or (served and not (view.running.usable and view.waiting.usable)):
        return None
    running = view.running.number(0.0) if served else 0.0
    queued = (view.waiting.number(0.0) if served else 0.0) + front.held.number(0.0)
    arriving = backlog = 0.0
    if prefill_tps is not None:
        if not front.arrival_prompt_tps.usable:
            return None
        # Prompts that the prefix cache holds are not computed again; where that is not read, all are.
        prompt_tps = front.arrival_prompt_tps.number(0.0) * (1.0 - min(1.0, view.prefix_hit_ratio.number(0.0)))
        arriving += prompt_tps / prefill_tps
        backlog += queued * _each(prompt_tps, front) / prefill_tps / rule.backlog_horizon_s
    if decode_tps is not None:
        output_tps = _output_tps(front, memory)
        if output_tps is None:
            return None
        arriving += output_tps / decode_tps
        each = memory.tokens if memory.tokens is not None else _each(output_tps, front)
        backlog += queued * each / decode_tps / rule.backlog_horizon_s
        backlog += max(0.0, running / tpot_s - output_tps) / decode_tps
    rps = front.arrival_rps.number(0.0)
    return Load(arriving, backlog, routable, requests=running + queued, request_rps=rps)


def _output_tps(front: FrontDoor, memory: OutputMemory) -> float | None:
    """Output tokens that arrive per second: what is asked for at most, or what requests took lately if that is less."""
    finished = memory.tokens
    asked = front.arrival_output_tps
    if finished is None:
        return asked.number(0.0) if asked.usable else None
    expected = front.arrival_rps.number(0.0) * finished
    return min(expected, asked.number(0.0)) if asked.usable else expected


def _each(tokens_tps: float, front: FrontDoor) -> float:
    """Tokens of one arriving request; 0 while nothing arrives, since the queue's requests are then unknown."""
    requests = front.arrival_rps.number(0.0)
    return tokens_tps / requests if requests > FEW_REQUESTS_RPS else 0.0
