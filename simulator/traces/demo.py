"""The demo's load: three models of a shared pool whose popularity rotates, and one disaggregated service with a ramp.

The pool's eight GPUs carry the sum at any time, but no fixed split of them carries every model at its peak: that is
what the demo shows. Requests have long prompts (a few thousand tokens) and short outputs, so that GPUs are fully used
at a number of streamed tokens that two CPU cores can carry.

A recorded trace replaces the pool's load with `demo_from_trace`: one slice of it, scaled so that it needs as much GPU
work as the generated load, and dealt to the same services with the same rotation; below 90 s with two phases that need
more of the first model, since a short slice shows nothing when the split carries both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate, rotating
from simulator.traces.model import MeanDemand, TraceError, TraceRequest
from simulator.traces.readers import read_trace
from simulator.traces.shaping import (
    busiest_start_s,
    clip_lengths,
    deal,
    mean_demand,
    peak_output_tps,
    scale_rate,
    static_split,
    take_slice,
    thin,
)

POOL_SERVICES = ("chat", "code", "reason")
SCALED_SERVICE = "assist"
FOOTPRINT_GPUS = {"chat": 1, "code": 1, "reason": 2}
POOL_GPUS = 8

# The order in which they are hot. A model of one GPU a replica and one of two take turns: two transfers of a pair move
# what four of one GPU would.
TURNS = ("chat", "reason", "code")
# Load in the capacity of replicas (see `_replica_rps`) while a model is hot and while it is not. GPUs of work at any
# time: chat or code hot 3.6 + 0.5 + 2 · 0.25, reason hot 0.5 + 0.5 + 2 · 1.8: a bit more than half of the eight.
HOT_REPLICAS = {"chat": 3.6, "code": 3.6, "reason": 1.8}
COLD_REPLICAS = {"chat": 0.5, "code": 0.5, "reason": 0.25}
# A model stays hot for about this long; a transfer takes a few seconds, so shorter phases would show nothing else. A
# short demo has fewer turns rather than such ones, but two at least.
PHASE_S = 40.0
LEAST_PHASE_S = 30.0
# A recorded slice with time for two turns only. A split by the mean then gives each of the two hot models about what it
# needs, unless the first one asks for clearly more: 4.2 + 0.5 + 2 · 0.25 GPUs of work, then 0.5 + 0.5 + 2 · 1.8.
SHORT_TURNS = TURNS[:2]
SHORT_HOT_REPLICAS = {"chat": 4.2, "reason": 1.8}
# Popularity shifts over seconds, not in one step: so a policy that follows it differs from one that does not.
RAMP_PER_PHASE = 0.6

PROMPT = Lengths(mean_tokens=2400, cv=0.5, min_tokens=200, max_tokens=8000)
OUTPUT = Lengths(mean_tokens=64, cv=0.5, min_tokens=8, max_tokens=256)
SCALED_PROMPT = Lengths(mean_tokens=1200, cv=0.5, min_tokens=100, max_tokens=6000)
SCALED_OUTPUT = Lengths(mean_tokens=100, cv=0.5, min_tokens=8, max_tokens=400)
# Requests per second of the scaled service over the fractions of the demo: a day's rise and fall in two minutes.
SCALED_RPS = ((0.0, 2.0), (0.15, 2.0), (0.55, 7.5), (0.7, 7.5), (0.95, 2.0))

# What a token costs an A100 replica of the pool (its profile's linear and attention coefficients at these lengths).
PROMPT_TOKEN_S = 70e-6
OUTPUT_TOKEN_S = 150e-6
# Bursts of a recorded trace are scaled to this at most: eight GPUs, when a third of the work needs two GPUs a replica.
PEAK_REPLICAS = 6.0
_PEAK_WINDOW_S = 10.0
# Streamed tokens per second of a recorded trace are scaled to this at most. Two turns show nothing below the load that
# they are made for, so a short slice gets longer chunks instead.
MAX_OUTPUT_TPS = 6000.0
SHORT_MAX_OUTPUT_TPS = 9000.0
MAX_PROMPT_TOKENS = 16_000
MAX_OUTPUT_TOKENS = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class DemoTrace:
    """The trace that the demo replays, and notes on how it was made."""

    requests: tuple[TraceRequest, ...]
    duration_s: float
    seed: int
    peak_output_tps: float
    """Largest requested output tokens per second, over 5 s: decides how many tokens a streamed chunk must carry."""
    notes: tuple[str, ...] = ()

    @property
    def mean_demand(self) -> dict[str, MeanDemand]:
        """Averages per service."""
        return mean_demand(self.requests, duration_s=self.duration_s)

    def static_replicas(self) -> dict[str, int]:
        """The pool's static split: replicas in proportion to the mean demand for GPUs, at least one each."""
        return static_split(
            {
                service: demand.work(prompt_token_s=PROMPT_TOKEN_S, output_token_s=OUTPUT_TOKEN_S)
                * FOOTPRINT_GPUS[service]
                for service, demand in self.mean_demand.items()
                if service in FOOTPRINT_GPUS
            },
            FOOTPRINT_GPUS,
            budget_gpus=POOL_GPUS,
        )


def stream_interval_for(peak_tps: float, *, chunks_per_s: float = 1500.0) -> int:
    """Tokens per streamed chunk so that two cores carry a peak through servers, gateway and client."""
    return max(1, -(-int(peak_tps) // int(chunks_per_s)))


def _replica_rps() -> float:
    """Requests per second that one replica computes when it does nothing else."""
    return 1.0 / (PROMPT.mean_tokens * PROMPT_TOKEN_S + OUTPUT.mean_tokens * OUTPUT_TOKEN_S)


def _pool_curves(duration_s: float) -> dict[str, Curve]:
    """Load of each of the pool's services, in the capacity of replicas."""
    phase_s = max(min(PHASE_S, duration_s / len(TURNS)), min(LEAST_PHASE_S, duration_s / 2))
    return _turning(TURNS, HOT_REPLICAS, duration_s=duration_s, phase_s=phase_s)


def _is_short(duration_s: float) -> bool:
    """Whether there is no time for three turns."""
    return duration_s < len(TURNS) * LEAST_PHASE_S


def _recorded_curves(duration_s: float) -> dict[str, Curve]:
    """The same for a recorded slice: `_pool_curves`, or two long turns where three would be too short."""
    if not _is_short(duration_s):
        return _pool_curves(duration_s)
    phase_s = duration_s / len(SHORT_TURNS)
    # The last turn lasts to the end: the next one's rise would be all there is of it.
    return _turning(SHORT_TURNS, SHORT_HOT_REPLICAS, duration_s=duration_s - phase_s, phase_s=phase_s)


def _turning(
    turns: Sequence[str], hot_replicas: Mapping[str, float], *, duration_s: float, phase_s: float
) -> dict[str, Curve]:
    shape = rotating(turns, duration_s=duration_s, phase_s=phase_s, ramp_s=RAMP_PER_PHASE * phase_s, hot=1.0, cold=0.0)
    curves = {}
    for name in TURNS:
        cold = COLD_REPLICAS[name]
        points = shape[name].points if name in shape else ((0.0, 0.0),)
        rise = hot_replicas.get(name, cold) - cold
        curves[name] = Curve(tuple((time_s, cold + rise * value) for time_s, value in points))
    return curves


def _scaled_load(duration_s: float, rate_scale: float) -> ServiceLoad:
    curve = Curve(tuple((fraction * duration_s, rps) for fraction, rps in SCALED_RPS))
    return ServiceLoad(
        service=SCALED_SERVICE, request_rps=curve.scaled(rate_scale), prompt=SCALED_PROMPT, output=SCALED_OUTPUT
    )


def demo_trace(*, duration_s: float = 120.0, seed: int = 1, rate_scale: float = 1.0) -> DemoTrace:
    """The bundled load. Equal arguments give equal requests."""
    loads = [
        ServiceLoad(service=name, request_rps=curve.scaled(_replica_rps() * rate_scale), prompt=PROMPT, output=OUTPUT)
        for name, curve in _pool_curves(duration_s).items()
    ]
    requests = generate([*loads, _scaled_load(duration_s, rate_scale)], duration_s=duration_s, seed=seed)
    return DemoTrace(tuple(requests), duration_s, seed, peak_output_tps(requests))


def demo_from_trace(
    path: Path,
    *,
    duration_s: float = 120.0,
    seed: int = 1,
    start_s: float | None = None,
    scale: float | None = None,
    max_output_tps: float | None = None,
) -> DemoTrace:
    """A slice of a recorded trace as the pool's load, beside the generated load of the scaled service.

    `start_s` defaults to the busiest slice, `scale` to as much GPU work as its turns are made for, as far as the
    streamed tokens stay below `max_output_tps`. A trace in Trimtab's own format keeps its services. Other short slices
    (no time for three turns) are thinned while the model with the larger replicas is hot, unless `scale` is given.
    Raises `TraceError` for a file that cannot be read or a slice without requests.
    """
    requests = list(itertools.islice(read_trace(path), 5_000_000))
    start_s = busiest_start_s(requests, duration_s=duration_s) if start_s is None else start_s
    sliced = take_slice(requests, start_s=start_s, duration_s=duration_s)
    if not sliced:
        raise TraceError(
            f"{path}: no request from {start_s:g} s to {start_s + duration_s:g} s; the trace ends at "
            f"{requests[-1].arrival_s:.0f} s"
        )
    sliced, clipped = clip_lengths(sliced, max_prompt_tokens=MAX_PROMPT_TOKENS, max_output_tokens=MAX_OUTPUT_TOKENS)
    own_services = any(request.service != "trace" for request in sliced)
    if max_output_tps is None:
        max_output_tps = SHORT_MAX_OUTPUT_TPS if _is_short(duration_s) else MAX_OUTPUT_TPS
    curves = _recorded_curves(duration_s)
    # While the model of two GPUs a replica is hot, the same GPUs carry fewer requests.
    level = tuple(curves.values()) if _is_short(duration_s) and not own_services and scale is None else ()
    wanted = scale
    if wanted is None:
        wanted = _fitting_scale(thin(sliced, level, seed=seed) or sliced, curves, duration_s, max_output_tps)
    shaped = [request for request in scale_rate(sliced, wanted, seed=seed) if request.arrival_s < duration_s]
    if not own_services:
        shaped = deal(thin(shaped, level, seed=seed), curves, seed=seed)
        assist = generate([_scaled_load(duration_s, 1.0)], duration_s=duration_s, seed=seed)
        shaped = sorted([*shaped, *assist], key=lambda request: (request.arrival_s, request.service))
    notes = [f"{path.name}: {start_s:g} s to {start_s + duration_s:g} s, rates × {wanted:.3g}"]
    if _is_short(duration_s) and not own_services:
        fewer = f", fewer requests while {SHORT_TURNS[-1]} with its larger replicas is hot" if level else ""
        notes.append(
            f"two turns ({', then '.join(SHORT_TURNS)}){fewer}: a recorded slice below "
            f"{len(TURNS) * LEAST_PHASE_S:g} s has no time for three"
        )
    if clipped:
        notes.append(
            f"{clipped} of {len(sliced)} requests shortened to {MAX_PROMPT_TOKENS} prompt and "
            f"{MAX_OUTPUT_TOKENS} output tokens"
        )
    return DemoTrace(tuple(shaped), duration_s, seed, peak_output_tps(shaped), tuple(notes))


def _fitting_scale(
    sliced: list[TraceRequest], curves: Mapping[str, Curve], duration_s: float, max_output_tps: float
) -> float:
    """The factor at which the slice needs as much GPU work as `curves` do on average.

    Less where its bursts would need more than the whole pool has, or for more streamed tokens than allowed.
    """
    target = sum(
        sum(curve.at(duration_s * (step + 0.5) / 200) for step in range(200)) / 200 for curve in curves.values()
    )
    mean, peak = _work(sliced, duration_s)
    factors = (target / mean, PEAK_REPLICAS / peak, max_output_tps / max(peak_output_tps(sliced), 1e-9))
    return max(0.001, round(min(factors), 3))


def _work(sliced: list[TraceRequest], duration_s: float) -> tuple[float, float]:
    """Work of a slice in the capacity of replicas: on average, and in its busiest window of ten seconds."""
    windows: dict[int, float] = {}
    for request in sliced:
        work = request.prompt_tokens * PROMPT_TOKEN_S + request.output_tokens * OUTPUT_TOKEN_S
        index = int(request.arrival_s // _PEAK_WINDOW_S)
        windows[index] = windows.get(index, 0.0) + work
    return sum(windows.values()) / duration_s, max(windows.values()) / _PEAK_WINDOW_S
