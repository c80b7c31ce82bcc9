"""The outcome of each request of a run, in columns, and figures of a whole run."""

from __future__ import annotations

import array
import dataclasses

import numpy as np
import numpy.typing as npt

from simulator.core.requests import FinishedRequest, FinishReason

Column = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and quantiles of one latency in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Column) -> Quantiles | None:
        """Of a sample; None when it is empty."""
        if not len(seconds):
            return None
        p50, p95, p99 = (float(q) for q in np.quantile(seconds, [0.5, 0.95, 0.99]))
        return cls(float(np.mean(seconds)), p50, p95, p99)


class Records:
    """Requests that were served to their end, in order of their ends; aborted ones are counted."""

    def __init__(self) -> None:
        self._times = array.array("d")
        self._counts = array.array("q")
        self.aborted = 0

    def __len__(self) -> int:
        return len(self._times) // 3

    def add(self, finished: FinishedRequest, replica: int, *, arrival_s: float | None = None) -> None:
        """Write one request down; `arrival_s` when it came to the service before it came to this engine."""
        first_s = finished.first_token_s
        if finished.reason is FinishReason.ABORT or first_s is None:
            self.aborted += 1
            return
        request = finished.request
        self.add_times(
            arrival_s=finished.arrival_s if arrival_s is None else arrival_s,
            first_token_s=first_s,
            finished_s=finished.finished_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=finished.generated_tokens,
            replica=replica,
            preemptions=finished.preemptions,
        )

    def add_times(
        self,
        *,
        arrival_s: float,
        first_token_s: float,
        finished_s: float,
        prompt_tokens: int,
        output_tokens: int,
        replica: int,
        preemptions: int = 0,
    ) -> None:
        """Write one request down from its times on the fleet's clock."""
        self._times.extend((arrival_s, first_token_s, finished_s))
        self._counts.extend((prompt_tokens, output_tokens, replica, preemptions))

    def _time(self, column: int) -> Column:
        return np.array(self._times, dtype=np.float64).reshape(-1, 3)[:, column]

    def _count(self, column: int) -> npt.NDArray[np.int64]:
        return np.array(self._counts, dtype=np.int64).reshape(-1, 4)[:, column]

    @property
    def arrival_s(self) -> Column:
        """When each request came."""
        return self._time(0)

    @property
    def finished_s(self) -> Column:
        """When each request ended."""
        return self._time(2)

    @property
    def ttft_s(self) -> Column:
        """Seconds from arrival to first token."""
        return self._time(1) - self._time(0)

    @property
    def e2e_s(self) -> Column:
        """Seconds from arrival to the end."""
        return self._time(2) - self._time(0)

    @property
    def tpot_s(self) -> Column:
        """Mean seconds between the tokens of each request; NaN-free: requests of one token are left out."""
        tokens = self.output_tokens
        several = tokens > 1
        return (self._time(2) - self._time(1))[several] / (tokens[several] - 1)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt lengths."""
        return self._count(0)

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens generated."""
        return self._count(1)

    @property
    def replica(self) -> npt.NDArray[np.int64]:
        """Index of the engine that ended each request."""
        return self._count(2)

    @property
    def preemptions(self) -> npt.NDArray[np.int64]:
        """How often each request lost its KV."""
        return self._count(3)

    def attainment(self, *, ttft_s: float, tpot_s: float) -> float:
        """Share of requests within both limits; a request of one token has no time per output token to miss.

        Raises ValueError when nothing was served.
        """
        if not len(self):
            raise ValueError("no request was served, so there is no share of them within the limits")
        tokens = np.maximum(1, self.output_tokens - 1)
        per_token_s = (self._time(2) - self._time(1)) / tokens
        return float(np.mean((self.ttft_s <= ttft_s) & (per_token_s <= tpot_s)))
