"""What one replica carries within its SLO, as seconds of it that a prompt token and an output token cost.

Two kinds of requests, of chat and of long answers, are each sent at rising rates to one replica until fewer than 95 %
of them keep the SLO. At those rates a replica is full by definition, which gives two equations for two unknowns. The
costs size loads (`simulator.traces.probes`) and give the oracle its target; a replica that shares its load with
others carries somewhat more, since bursts even out, and one with very long prompts less.
"""

from __future__ import annotations

import dataclasses
import math

from lab.evaluation.statistics import Slo
from lab.virtual.fixed.colocated import colocated
from simulator.core.profile import Profile
from simulator.traces.generators import Curve, Lengths
from simulator.traces.model import TraceRequest
from simulator.traces.probes import CHAT, DECODE_HEAVY
from simulator.traces.streams import Stream, requests_of

ATTAINMENT = 0.95
_DURATION_S = 240.0
_LOWEST_RPS, _HIGHEST_RPS = 0.05, 400.0
_REL_TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCost:
    """Seconds of one replica."""

    prompt_token_s: float
    output_token_s: float

    def request_s(self, request: TraceRequest) -> float:
        """What a whole request costs."""
        return request.prompt_tokens * self.prompt_token_s + request.output_tokens * self.output_token_s


def token_cost(profile: Profile, slo: Slo, *, seed: int = 1) -> TokenCost:
    """The cost of tokens on one replica. Raises ValueError when an SLO cannot be kept at any rate, or always is."""
    (chat_in, chat_out), (long_in, long_out) = (
        (prompt.mean_tokens, output.mean_tokens) for prompt, output in (CHAT, DECODE_HEAVY)
    )
    chat_s, long_s = (1.0 / highest_rps(profile, slo, lengths, seed=seed) for lengths in (CHAT, DECODE_HEAVY))
    determinant = chat_in * long_out - long_in * chat_out
    prompt_s = (chat_s * long_out - long_s * chat_out) / determinant
    output_s = (long_s * chat_in - chat_s * long_in) / determinant
    if not (prompt_s > 0 and output_s > 0):
        raise ValueError(f"{profile.name}: tokens of both kinds must cost something, not {prompt_s} and {output_s}")
    return TokenCost(prompt_s, output_s)


def highest_rps(profile: Profile, slo: Slo, lengths: tuple[Lengths, Lengths], *, seed: int = 1) -> float:
    """Requests a second at which one replica just keeps its SLO for `ATTAINMENT` of them.

    Raises ValueError where the lowest rate breaks it.
    """
    low, high = _LOWEST_RPS, _HIGHEST_RPS
    if not _kept(profile, slo, lengths, low, seed):
        raise ValueError(f"{profile.name} does not keep its SLO at {low} requests a second")
    while high > low * (1 + _REL_TOLERANCE):
        middle = math.sqrt(low * high)
        if _kept(profile, slo, lengths, middle, seed):
            low = middle
        else:
            high = middle
    return low


def _kept(profile: Profile, slo: Slo, lengths: tuple[Lengths, Lengths], rps: float, seed: int) -> bool:
    prompt, output = lengths
    stream = Stream(service=profile.model, request_rps=Curve(((0.0, rps),)), prompt=prompt, output=output)
    duration_s = min(_DURATION_S, 8000 / rps)
    records = colocated(profile, 1).run(requests_of([stream], duration_s=duration_s, seed=seed))
    return len(records) == 0 or records.attainment(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s) >= ATTAINMENT
