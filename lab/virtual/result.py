"""What a run on virtual time leaves behind: every request's fate, and what the fleet and its policy did.

Plain columns, so that a run can be sent between processes and summed up without knowing how it was made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestColumns:
    """One row per request of the trace, in order of arrival. Times are seconds from the trace's start.

    `first_token_s` and `finished_s` are NaN for a request that was lost or that the run's end cut off; `lost`
    distinguishes the two. Latencies are what a client sees: waiting at the gateway and being reissued count.
    """

    services: tuple[str, ...]
    service: Ints
    """Position in `services`."""
    arrival_s: Floats
    first_token_s: Floats
    finished_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    lost: NDArray[np.bool_]
    reissued: Ints
    """How often it was continued on another replica."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def since(self, start_s: float) -> RequestColumns:
        """The same with answers' times counted from `start_s` on the run's clock, when the trace began."""
        return dataclasses.replace(
            self, first_token_s=self.first_token_s - start_s, finished_s=self.finished_s - start_s
        )

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Rows that were answered in full."""
        return ~np.isnan(self.finished_s)

    @property
    def ttft_s(self) -> Floats:
        """Time to first token; NaN where there was none."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Floats:
        """Arrival to last token; NaN where the answer is not complete."""
        return self.finished_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time of a token after the first; NaN for answers of one token, or not complete."""
        after = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.finished_s - self.first_token_s) / after


class TimelinePoint(NamedTuple):
    """One role at one tick of the policy. `z` is None where the policy has none, or it is not known."""

    at_s: float
    service: str
    role: str
    desired: int
    routable: int
    running: float
    waiting: float
    z: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One policy on one trace with one seed."""

    policy: str
    trace: str
    seed: int
    requests: RequestColumns
    timeline: Sequence[TimelinePoint] = ()
    duration_s: float
    """From the trace's start to its last arrival: the duration by which rates are computed."""
    gpu_hours: float
    """GPU time of replicas that were not asleep."""
    energy_kwh: float | None = None
    wakes: int = 0
    releases: int = 0
    transitions: int = 0
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Whatever else a policy counts, by name."""
