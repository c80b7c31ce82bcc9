"""Seeded stress traces over three models of a shared pool: the seven of TRE's evaluation, after its descriptions.

Source: "Cross-Model Autoscaling for Shared LLM Serving" (TRE), §VI-A: dsllama-8b and dsqwen-7b on one GPU a replica,
dsqwen-14b on two, eight A100, about 720 s a trace, one failure mode of autoscalers each. The paper states what each
trace tests, not its rates and lengths: those here are our own, in work of whole GPUs, so that the sum nearly fills
eight GPUs and one model at a time (or all, in spikes) needs more than its share.

The work of a GPU is computed with the nominal costs below: by `lab.suites.calibrate_loads`, what one replica carries
within its SLO. They size the load; the real cost of a trace is the simulated engine's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from simulator.traces.generators import Curve, Lengths, rotating
from simulator.traces.lengths import packaged
from simulator.traces.mixing import moving_popularity, scale_lengths
from simulator.traces.model import TraceError, TraceRequest
from simulator.traces.shaping import busiest_start_s, deal, take_slice
from simulator.traces.streams import Stream, requests_of

PROBE_DURATION_S = 720.0
POOL_GPUS = 8
FOOTPRINT_GPUS = {"dsllama-8b": 1, "dsqwen-7b": 1, "dsqwen-14b": 2}
MODELS = tuple(FOOTPRINT_GPUS)

TOKEN_S = {"dsllama-8b": (79e-6, 149e-6), "dsqwen-7b": (68e-6, 132e-6), "dsqwen-14b": (98e-6, 155e-6)}
"""Seconds of a replica for a prompt token and an output token."""

# Lengths vary little, so that a long tail of latencies is a queue and not a long answer.
CHAT = (Lengths(mean_tokens=800, cv=0.6, max_tokens=8000), Lengths(mean_tokens=150, cv=0.4, max_tokens=2000))
DECODE_HEAVY = (Lengths(mean_tokens=150, cv=0.5, max_tokens=2000), Lengths(mean_tokens=600, cv=0.3, max_tokens=4000))
PREFILL_HEAVY = (Lengths(mean_tokens=4000, cv=0.3, max_tokens=16_000), Lengths(mean_tokens=40, cv=0.4, max_tokens=400))

SINE_MEAN_GPUS = {"dsllama-8b": 1.5, "dsqwen-7b": 1.5, "dsqwen-14b": 3.0}
SINE_PERIODS = 3
SINE_SWING = 0.6
SINE_STEP_S = 5.0

STEADY_GPUS = {"dsllama-8b": 1.2, "dsqwen-7b": 1.2, "dsqwen-14b": 2.4}
"""Chat that goes on beside the probes' long prompts, long answers and hot turns."""

BURSTS: Mapping[str, tuple[float, float, float]] = {
    "dsllama-8b": (2.0, 0.125, 0.4375),
    "dsqwen-7b": (2.2, 0.5625, 0.875),
}
"""GPUs of the decode-heavy burst on top, and the fractions of the trace between which it lasts."""

LONG_PROMPT_GPUS = {"dsllama-8b": 1.5, "dsqwen-7b": 1.5, "dsqwen-14b": 3.0}

TURN_SECONDS = 90.0
TURN_RAMP_S = 6.0
HOT_EXTRA_GPUS = 1.6

SPIKE_EVERY_S = 120.0
SPIKE_FIRST_S = 60.0
SPIKE_LASTS_S = 30.0
SPIKE_RAMP_S = 2.0
SPIKE_GPUS = {"dsllama-8b": 1.5, "dsqwen-7b": 1.5, "dsqwen-14b": 2.5}
SPIKE_FRONT = 2.0
"""How many times its spike the model in front has; another model is in front each time."""
CALM_GPUS = {"dsllama-8b": 0.7, "dsqwen-7b": 0.7, "dsqwen-14b": 1.4}

REAL_GPUS = 5.2
"""Of all models together, at any time: popularity shares out the work."""
REAL_HOLD_S = 120.0
REAL_SHIFT_S = 10.0
REAL_ZIPF = 0.7


def request_s(model: str, prompt_tokens: float, output_tokens: float) -> float:
    """The nominal cost of a request of these lengths, in seconds of one replica of `model`."""
    prompt_s, output_s = TOKEN_S[model]
    return prompt_tokens * prompt_s + output_tokens * output_s


def _request_gpu_s(model: str, prompt_tokens: float, output_tokens: float) -> float:
    return FOOTPRINT_GPUS[model] * request_s(model, prompt_tokens, output_tokens)


def _stream(model: str, gpus: Curve, lengths: tuple[Lengths, Lengths], *, name: str = "requests") -> Stream:
    prompt, output = lengths
    per_gpu = 1.0 / _request_gpu_s(model, prompt.mean_tokens, output.mean_tokens)
    return Stream(service=model, name=name, request_rps=gpus.scaled(per_gpu), prompt=prompt, output=output)


def _flat(value: float) -> Curve:
    return Curve(((0.0, value),))


def _steady() -> list[Stream]:
    return [_stream(model, _flat(STEADY_GPUS[model]), CHAT) for model in MODELS]


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
    """Long bursts of requests that decode 600 tokens each, on one small model and then the other, beside chat on all.

    The first model's KV cache is a third of the other's, so that one burst fills a cache and the other batch slots.
    """
    streams = _steady()
    for model, (gpus, *span) in BURSTS.items():
        start_s, end_s = (share * duration_s for share in span)
        burst = Curve(((start_s, 0.0), (start_s, gpus), (end_s, gpus), (end_s, 0.0)))
        streams.append(_stream(model, burst, DECODE_HEAVY, name="decode-burst"))
    return streams


def prefill(duration_s: float) -> list[Stream]:
    """The mix of prompt and decode work shifts: each model in turn gets long prompts with short answers on top."""
    streams = _steady()
    for model, turns in _turns(duration_s, turn_s=duration_s / len(MODELS)).items():
        streams.append(_stream(model, turns.scaled(LONG_PROMPT_GPUS[model]), PREFILL_HEAVY, name="long-prompts"))
    return streams


def alternating(duration_s: float) -> list[Stream]:
    """The same total work at any time; the hot model changes every 90 s."""
    turns = _turns(duration_s, turn_s=TURN_SECONDS)
    return [
        *_steady(),
        *(_stream(model, turns[model].scaled(HOT_EXTRA_GPUS), CHAT, name="hot-turns") for model in MODELS),
    ]


def _turns(duration_s: float, *, turn_s: float) -> dict[str, Curve]:
    """Curves of which one at a time is 1 and the others 0, in the models' order; the sum is 1 throughout."""
    return rotating(MODELS, duration_s=duration_s, phase_s=turn_s, ramp_s=min(TURN_RAMP_S, turn_s), hot=1.0, cold=0.0)


def simul_spike(duration_s: float) -> list[Stream]:
    """Every two minutes all models spike at once, for half a minute, together to about what the pool has.

    Each time another model's spike is the largest, so that it matters which one is rescued.
    """
    starts_s = itertools.takewhile(lambda at_s: at_s < duration_s, itertools.count(SPIKE_FIRST_S, SPIKE_EVERY_S))
    points: dict[str, list[tuple[float, float]]] = {model: [(0.0, CALM_GPUS[model])] for model in MODELS}
    for turn, start_s in enumerate(starts_s):
        for model in MODELS:
            calm = CALM_GPUS[model]
            high = SPIKE_GPUS[model] * (SPIKE_FRONT if model == MODELS[turn % len(MODELS)] else 1.0)
            points[model] += [
                (start_s, calm),
                (start_s + SPIKE_RAMP_S, high),
                (start_s + SPIKE_LASTS_S, high),
                (start_s + SPIKE_LASTS_S + SPIKE_RAMP_S, calm),
            ]
    return [_stream(model, Curve(tuple(points[model])), CHAT) for model in MODELS]


def _recorded(tables: str, duration_s: float, seed: int) -> list[Stream]:
    """Lengths and gaps of a recorded trace; the work is shared out by shifting popularity, gaps scaled to the rates."""
    laws = packaged(tables)
    lengths = laws.prompt_tokens.mean, laws.output_tokens.mean
    shares = _popularity(duration_s, seed)
    return [
        Stream(
            service=model,
            request_rps=shares[model].scaled(REAL_GPUS / _request_gpu_s(model, *lengths)),
            prompt=laws.prompt_tokens,
            output=laws.output_tokens,
            gaps=laws.gaps_ms,
        )
        for model in MODELS
    ]


def _popularity(duration_s: float, seed: int) -> dict[str, Curve]:
    return moving_popularity(
        MODELS, exponent=REAL_ZIPF, duration_s=duration_s, hold_s=REAL_HOLD_S, shift_s=REAL_SHIFT_S, seed=seed
    )


def real_conv(duration_s: float, seed: int) -> list[Stream]:
    """Lengths and irregular arrivals of Azure's conversation trace; every two minutes another model leads."""
    return _recorded("azure-conv", duration_s, seed)


def real_code(duration_s: float, seed: int) -> list[Stream]:
    """Lengths and on-off arrivals of Azure's code trace: long prompts, tiny answers; popularity shifts as above."""
    return _recorded("azure-code", duration_s, seed)


def _unseeded(shape: Callable[[float], list[Stream]]) -> Callable[[float, int], list[Stream]]:
    return lambda duration_s, seed: shape(duration_s)


PROBES: Mapping[str, Callable[[float, int], list[Stream]]] = {
    "sinusoidal": _unseeded(sinusoidal),
    "decode": _unseeded(decode),
    "prefill": _unseeded(prefill),
    "alternating": _unseeded(alternating),
    "simul-spike": _unseeded(simul_spike),
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
        for stream in PROBES[name](duration_s, seed)
    ]
    return requests_of(streams, duration_s=duration_s, seed=seed)


def probe_of_recorded(
    requests: Sequence[TraceRequest],
    *,
    seed: int,
    duration_s: float = PROBE_DURATION_S,
    gpus: float = REAL_GPUS,
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
    dealt = deal(sliced, _popularity(duration_s, seed), seed=seed)
    work = sum(_request_gpu_s(r.service, r.prompt_tokens, r.output_tokens) for r in dealt) / duration_s
    factor = min(1000.0, max(1e-3, gpus / work))
    return list(scale_lengths(dealt, prompt=factor, output=factor))
