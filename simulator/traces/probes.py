"""Seeded stress traces over three models of a shared pool: the seven of TRE's evaluation, after its descriptions.

Source: "Cross-Model Autoscaling for Shared LLM Serving" (TRE), §VI-A: dsllama-8b and dsqwen-7b on one GPU a replica,
dsqwen-14b on two, eight A100, about 720 s a trace, one failure mode of autoscalers each. The paper states what each
trace tests, not its rates and lengths: those here are ours, in GPUs' worth of work, so that the sum nearly fills eight
GPUs and one model at a time (or all, in spikes) needs more than its share.

A GPU's worth is reckoned with the nominal costs below. They size the load and claim no capacity: the simulated engine
has its own profiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from simulator.traces.generators import Curve, Lengths
from simulator.traces.lengths import GapLaw, LengthLaw, packaged
from simulator.traces.mixing import moving_popularity, scale_lengths
from simulator.traces.model import TraceError, TraceRequest
from simulator.traces.shaping import busiest_start_s, deal, take_slice
from simulator.traces.streams import POISSON, Stream, requests_of

PROBE_DURATION_S = 720.0
POOL_GPUS = 8
FOOTPRINT_GPUS = {"dsllama-8b": 1, "dsqwen-7b": 1, "dsqwen-14b": 2}
MODELS = tuple(FOOTPRINT_GPUS)

# An A100 replica of 7 to 14 billion parameters at 100 sequences of 1,000 tokens, by the packaged engine profiles.
PROMPT_TOKEN_S = 60e-6
OUTPUT_TOKEN_S = 240e-6

CHAT = (Lengths(mean_tokens=800, cv=0.8, max_tokens=8000), Lengths(mean_tokens=200, cv=0.8, max_tokens=2000))
DECODE_HEAVY = (Lengths(mean_tokens=150, cv=0.5, max_tokens=2000), Lengths(mean_tokens=900, cv=0.5, max_tokens=4000))
PREFILL_HEAVY = (Lengths(mean_tokens=5000, cv=0.4, max_tokens=16_000), Lengths(mean_tokens=40, cv=0.5, max_tokens=400))

SINE_MEAN_GPUS = {"dsllama-8b": 1.8, "dsqwen-7b": 1.8, "dsqwen-14b": 2.2}
SINE_PERIODS = 3
SINE_SWING = 0.6
SINE_STEP_S = 5.0

BURST_MODEL = "dsqwen-7b"
BURST_GPUS = 3.6
BURST_SPAN = (0.25, 0.75)
"""Fractions of the trace between which the decode-heavy burst lasts."""

TURN_SECONDS = 90.0
TURN_RAMP_S = 6.0
HOT_GPUS = 3.8
COLD_GPUS = 1.0

SPIKE_EVERY_S = 120.0
SPIKE_FIRST_S = 60.0
SPIKE_LASTS_S = 30.0
SPIKE_RAMP_S = 2.0
SPIKE_GPUS = {"dsllama-8b": 3.0, "dsqwen-7b": 3.0, "dsqwen-14b": 4.0}
CALM_GPUS = {"dsllama-8b": 0.7, "dsqwen-7b": 0.7, "dsqwen-14b": 1.0}

REAL_GPUS = {"dsllama-8b": 1.6, "dsqwen-7b": 1.6, "dsqwen-14b": 2.0}
REAL_HOLD_S = 120.0
REAL_SHIFT_S = 10.0
REAL_ZIPF = 0.9


def request_s(prompt_tokens: float, output_tokens: float) -> float:
    """Seconds of one replica's time that a request of these lengths is reckoned at."""
    return prompt_tokens * PROMPT_TOKEN_S + output_tokens * OUTPUT_TOKEN_S


def _stream(
    model: str,
    gpus: Curve,
    lengths: tuple[Lengths, Lengths],
    *,
    name: str = "requests",
    gaps: GapLaw = POISSON,
) -> Stream:
    prompt, output = lengths
    per_gpu = 1.0 / (FOOTPRINT_GPUS[model] * request_s(prompt.mean_tokens, output.mean_tokens))
    return Stream(service=model, name=name, request_rps=gpus.scaled(per_gpu), prompt=prompt, output=output, gaps=gaps)


def _flat(value: float) -> Curve:
    return Curve(((0.0, value),))


def sinusoidal(duration_s: float) -> list[Stream]:
    """Gradual, periodic pressure: three periods, the models a third of one apart."""
    period_s = duration_s / SINE_PERIODS
    steps = math.ceil(duration_s / SINE_STEP_S)
    streams = []
    for index, model in enumerate(MODELS):
        turn = index / len(MODELS)
        points = tuple(
            (
                step * SINE_STEP_S,
                SINE_MEAN_GPUS[model]
                * (1 + SINE_SWING * math.sin(2 * math.pi * (step * SINE_STEP_S / period_s - turn))),
            )
            for step in range(steps + 1)
        )
        streams.append(_stream(model, Curve(points), CHAT))
    return streams


def decode(duration_s: float) -> list[Stream]:
    """A long burst of requests that decode 900 tokens each, on one model, beside chat on all."""
    start_s, end_s = (share * duration_s for share in BURST_SPAN)
    burst = Curve(((start_s, 0.0), (start_s, BURST_GPUS), (end_s, BURST_GPUS), (end_s, 0.0)))
    streams = [_stream(model, _flat(COLD_GPUS), CHAT) for model in MODELS]
    return [*streams, _stream(BURST_MODEL, burst, DECODE_HEAVY, name="decode-burst")]


def prefill(duration_s: float) -> list[Stream]:
    """The mix of prompt and decode work shifts: each model in turn gets long prompts with short answers on top."""
    streams = [_stream(model, _flat(COLD_GPUS), CHAT) for model in MODELS]
    for model, curve in _turns(duration_s, turn_s=duration_s / len(MODELS), hot=HOT_GPUS - COLD_GPUS, cold=0.0).items():
        streams.append(_stream(model, curve, PREFILL_HEAVY, name="long-prompts"))
    return streams


def alternating(duration_s: float) -> list[Stream]:
    """The same total at any time; which model is hot changes every 90 s."""
    turns = _turns(duration_s, turn_s=TURN_SECONDS, hot=HOT_GPUS, cold=COLD_GPUS)
    return [_stream(model, curve, CHAT) for model, curve in turns.items()]


def _turns(duration_s: float, *, turn_s: float, hot: float, cold: float) -> dict[str, Curve]:
    """Curves of which one is hot at a time, in the models' order; the sum is the same throughout."""
    ramp_s = min(TURN_RAMP_S, turn_s)
    points: dict[str, list[tuple[float, float]]] = {
        model: [(0.0, hot if index == 0 else cold)] for index, model in enumerate(MODELS)
    }
    for turn in range(1, math.ceil(duration_s / turn_s)):
        turn_at_s = turn * turn_s
        for model, before, after in (
            (MODELS[(turn - 1) % len(MODELS)], hot, cold),
            (MODELS[turn % len(MODELS)], cold, hot),
        ):
            points[model] += [(turn_at_s, before), (turn_at_s + ramp_s, after)]
    return {model: Curve(tuple(points[model])) for model in MODELS}


def simul_spike(duration_s: float) -> list[Stream]:
    """Every two minutes all models spike at once, for half a minute, to more than the pool has."""
    streams = []
    for model in MODELS:
        calm, high = CALM_GPUS[model], SPIKE_GPUS[model]
        points = [(0.0, calm)]
        for start_s in itertools.takewhile(
            lambda at_s: at_s < duration_s, itertools.count(SPIKE_FIRST_S, SPIKE_EVERY_S)
        ):
            points += [
                (start_s, calm),
                (start_s + SPIKE_RAMP_S, high),
                (start_s + SPIKE_LASTS_S, high),
                (start_s + SPIKE_LASTS_S + SPIKE_RAMP_S, calm),
            ]
        streams.append(_stream(model, Curve(tuple(points)), CHAT))
    return streams


def _recorded(tables: str, *, duration_s: float) -> list[Stream]:
    """Lengths and gaps of a recorded trace; the gaps scaled to each model's rate."""
    del duration_s
    laws = packaged(tables)
    prompt: LengthLaw = laws.prompt_tokens
    output: LengthLaw = laws.output_tokens
    per_request_s = request_s(laws.prompt_tokens.mean, laws.output_tokens.mean)
    return [
        Stream(
            service=model,
            request_rps=_flat(REAL_GPUS[model] / (FOOTPRINT_GPUS[model] * per_request_s)),
            prompt=prompt,
            output=output,
            gaps=laws.gaps_ms,
        )
        for model in MODELS
    ]


def real_conv(duration_s: float) -> list[Stream]:
    """Lengths and irregular arrivals of Azure's conversation trace."""
    return _recorded("azure-conv", duration_s=duration_s)


def real_code(duration_s: float) -> list[Stream]:
    """Lengths and on-off arrivals of Azure's code trace: long prompts, tiny answers."""
    return _recorded("azure-code", duration_s=duration_s)


PROBES: Mapping[str, Callable[[float], list[Stream]]] = {
    "sinusoidal": sinusoidal,
    "decode": decode,
    "prefill": prefill,
    "alternating": alternating,
    "simul-spike": simul_spike,
    "real-conv": real_conv,
    "real-code": real_code,
}


def probe(
    name: str, *, seed: int, duration_s: float = PROBE_DURATION_S, rate_scale: float = 1.0
) -> Iterator[TraceRequest]:
    """One of the seven, by arrival. Raises `TraceError` for a name that is none."""
    if name not in PROBES:
        raise TraceError(f"there is no probe {name!r}; there are {', '.join(PROBES)}")
    streams = [
        dataclasses.replace(stream, request_rps=stream.request_rps.scaled(rate_scale))
        for stream in PROBES[name](duration_s)
    ]
    return requests_of(streams, duration_s=duration_s, seed=seed)


def probe_of_recorded(
    requests: Sequence[TraceRequest],
    *,
    seed: int,
    duration_s: float = PROBE_DURATION_S,
    gpus: float = sum(REAL_GPUS.values()),
) -> list[TraceRequest]:
    """A recorded trace's busiest slice, dealt to the three models by shifting popularity and sized to `gpus` of work.

    Arrivals and lengths stay together as recorded; what is scaled is the lengths of both kinds, since a rate cannot be
    raised without inventing requests. Raises `TraceError` for a trace without requests.
    """
    if not requests:
        raise TraceError("the trace has no requests")
    start_s = busiest_start_s(requests, duration_s=duration_s)
    sliced = take_slice(requests, start_s=start_s, duration_s=duration_s)
    if not sliced:
        raise TraceError(f"the trace has no requests from {start_s:g} s to {start_s + duration_s:g} s")
    shares = moving_popularity(
        MODELS, exponent=REAL_ZIPF, duration_s=duration_s, hold_s=REAL_HOLD_S, shift_s=REAL_SHIFT_S, seed=seed
    )
    dealt = deal(sliced, shares, seed=seed)
    work = sum(FOOTPRINT_GPUS[r.service] * request_s(r.prompt_tokens, r.output_tokens) for r in dealt) / duration_s
    factor = min(1000.0, max(1e-3, gpus / work))
    return list(scale_lengths(dealt, prompt=factor, output=factor))
