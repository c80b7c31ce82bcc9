"""What a trace is made of."""

from __future__ import annotations

import dataclasses


class TraceError(Exception):
    """A trace cannot be read or used; the message is one line with the place and the fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival after the trace's start, its service, and its lengths."""

    arrival_s: float
    service: str
    prompt_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class MeanDemand:
    """Averages over a trace's whole duration."""

    request_rps: float
    prompt_tps: float
    output_tps: float

    def work(self, *, prompt_token_s: float, output_token_s: float) -> float:
        """Seconds of GPU work per second, given what one token of each kind costs."""
        return self.prompt_tps * prompt_token_s + self.output_tps * output_token_s
