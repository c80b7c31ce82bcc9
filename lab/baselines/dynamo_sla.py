"""NVIDIA Dynamo's SLA planner: forecast the next interval's load, look up what a replica carries, divide.

Source: Dynamo documentation, "SLA-based Planner" (docs/planner/sla_planner.md), and the planner's defaults: interval
180 s, TTFT 500 ms, ITL 50 ms. Per interval: correction factors (measured over expected TTFT and ITL), forecasts of
requests, input and output length, then

    prefill = ceil(requests · input / interval · min(1, prefill correction) / prefill throughput at that input)
    decode  = ceil(requests · output / interval / best decode throughput within ITL ÷ decode correction at the context
              input + output / 2)

The forecast is constant, or the documentation's Kalman filter with a local linear trend; its ARIMA and Prophet are not
built. The planner is for disaggregated services. A colocated replica does both, so the two needs are added up before
rounding; that is ours.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math

import numpy as np

from lab.baselines.interface import RoleView, Traffic
from trimtab.domain.vocabulary import Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProfile:
    """What one replica's prefill does at an input length: TTFT without a queue, tokens a second."""

    prompt_tokens: tuple[float, ...]
    ttft_s: tuple[float, ...]
    tps: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis("prompt_tokens", self.prompt_tokens, len(self.ttft_s), len(self.tps))

    def expected_ttft_s(self, prompt_tokens: float) -> float:
        """Linear between the profiled lengths, held beyond them."""
        return float(np.interp(prompt_tokens, self.prompt_tokens, self.ttft_s))

    def replica_tps(self, prompt_tokens: float) -> float:
        """Prompt tokens a second of one replica."""
        return float(np.interp(prompt_tokens, self.prompt_tokens, self.tps))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """What one replica's decode does by sequences in the batch (columns) and context length (rows)."""

    context_tokens: tuple[float, ...]
    batch: tuple[float, ...]
    itl_s: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_axis("context_tokens", self.context_tokens, len(self.itl_s))
        _check_axis("batch", self.batch, *(len(row) for row in self.itl_s))

    def _row(self, context_tokens: float) -> list[float]:
        columns = zip(*self.itl_s, strict=True)
        return [float(np.interp(context_tokens, self.context_tokens, column)) for column in columns]

    def expected_itl_s(self, batch: float, context_tokens: float) -> float:
        """Linear in both, held beyond the grid."""
        return float(np.interp(batch, self.batch, self._row(context_tokens)))

    def best_tps(self, itl_s: float, context_tokens: float) -> float:
        """Most tokens a second within an inter-token latency; the smallest batch's where none is within it."""
        row = self._row(context_tokens)
        fine = np.linspace(self.batch[0], self.batch[-1], 257)
        times = np.interp(fine, self.batch, row)
        fits = times <= itl_s
        rates = fine / times
        return float(rates[fits].max()) if bool(fits.any()) else float(rates[0])


def _check_axis(name: str, axis: tuple[float, ...], *lengths: int) -> None:
    if not axis or any(length != len(axis) for length in lengths):
        raise ValueError(f"{name} needs as many figures as points, and at least one")
    if any(b <= a for a, b in itertools.pairwise(axis)):
        raise ValueError(f"{name} must rise")


class Forecast(enum.Enum):
    """How the next interval's load is foretold."""

    CONSTANT = "constant"
    KALMAN = "kalman"


@dataclasses.dataclass(frozen=True, slots=True)
class Trend:
    """A Kalman filter of level and trend: estimates, their covariance, and how many values it saw."""

    level: float = 0.0
    trend: float = 0.0
    p00: float = 1e3
    p01: float = 0.0
    p11: float = 1e3
    seen: int = 0

    # Dynamo's defaults.
    Q_LEVEL = 1.0
    Q_TREND = 0.1
    R = 10.0
    MIN_POINTS = 5

    def updated(self, value: float) -> Trend:
        """After one more value."""
        if not self.seen:
            return dataclasses.replace(self, level=value, seen=1)
        level = self.level + self.trend
        p00 = self.p00 + 2 * self.p01 + self.p11 + self.Q_LEVEL
        p01 = self.p01 + self.p11
        p11 = self.p11 + self.Q_TREND
        gain0, gain1 = p00 / (p00 + self.R), p01 / (p00 + self.R)
        error = value - level
        return Trend(
            level + gain0 * error,
            self.trend + gain1 * error,
            (1 - gain0) * p00,
            (1 - gain0) * p01,
            p11 - gain1 * p01,
            self.seen + 1,
        )

    def next(self, last: float) -> float:
        """The next value, never below 0; the last one until enough were seen."""
        return last if self.seen < self.MIN_POINTS else max(0.0, self.level + self.trend)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sums:
    """Traffic since the last decision; the means are weighted by requests."""

    seconds: float = 0.0
    requests: float = 0.0
    prompt: float = 0.0
    output: float = 0.0
    ttft: float = 0.0
    itl: float = 0.0
    measured: float = 0.0

    def plus(self, traffic: Traffic) -> _Sums:
        sums = dataclasses.replace(self, seconds=self.seconds + traffic.interval_s)
        if traffic.requests <= 0 or traffic.prompt_tokens is None or traffic.output_tokens is None:
            return sums
        sums = dataclasses.replace(
            sums,
            requests=self.requests + traffic.requests,
            prompt=self.prompt + traffic.requests * traffic.prompt_tokens,
            output=self.output + traffic.requests * traffic.output_tokens,
        )
        if traffic.ttft_s is None or traffic.itl_s is None:
            return sums
        return dataclasses.replace(
            sums,
            ttft=self.ttft + traffic.requests * traffic.ttft_s,
            itl=self.itl + traffic.requests * traffic.itl_s,
            measured=self.measured + traffic.requests,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SlaState:
    """Sums of the interval under way and the three forecasts."""

    sums: _Sums = _Sums()
    requests: Trend = Trend()
    prompt: Trend = Trend()
    output: Trend = Trend()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSla:
    """The planner for one role, given what a replica of it carries."""

    prefill: PrefillProfile
    decode: DecodeProfile
    itl_s: float = 0.050
    forecast: Forecast = Forecast.CONSTANT
    correct: bool = True
    period_s: float = 180.0

    def initial(self) -> SlaState:
        """Nothing seen."""
        return SlaState()

    def observe(self, view: RoleView, now_s: float, state: SlaState) -> SlaState:
        """Add the tick's traffic up."""
        del now_s
        return state if view.traffic is None else dataclasses.replace(state, sums=state.sums.plus(view.traffic))

    def decide(self, view: RoleView, now_s: float, state: SlaState) -> tuple[int, SlaState]:
        """Replicas for the next interval; as many as now where nothing was measured, the minimum where nothing came."""
        del now_s
        sums = state.sums
        if sums.seconds <= 0:
            return view.desired, state
        rps = sums.requests / sums.seconds
        if sums.requests <= 0:
            quiet = dataclasses.replace(state, sums=_Sums(), requests=state.requests.updated(0.0))
            return view.min_replicas, quiet
        prompt, output = sums.prompt / sums.requests, sums.output / sums.requests
        after = SlaState(
            _Sums(),
            state.requests.updated(rps * self.period_s),
            state.prompt.updated(prompt),
            state.output.updated(output),
        )
        p_factor, d_factor = self._corrections(view, sums, rps, prompt, output)
        if self.forecast is Forecast.KALMAN:
            rps = after.requests.next(rps * self.period_s) / self.period_s
            prompt, output = max(1.0, after.prompt.next(prompt)), max(1.0, after.output.next(output))
        prefill = rps * prompt * min(1.0, p_factor) / self.prefill.replica_tps(prompt)
        decode = rps * output / self.decode.best_tps(self.itl_s / d_factor, prompt + output / 2)
        need = {Role.PREFILL: prefill, Role.DECODE: decode}.get(view.key.role, prefill + decode)
        return max(1, math.ceil(need - 1e-9)), after

    def _corrections(
        self, view: RoleView, sums: _Sums, rps: float, prompt: float, output: float
    ) -> tuple[float, float]:
        if not self.correct or sums.measured <= 0:
            return 1.0, 1.0
        ttft_s, itl_s = sums.ttft / sums.measured, sums.itl / sums.measured
        # By Little's law: requests in decode on one replica.
        batch = rps * output * itl_s / max(1, len(view.ready))
        expected_itl_s = self.decode.expected_itl_s(batch, prompt + output / 2)
        return max(1e-6, ttft_s / self.prefill.expected_ttft_s(prompt)), max(1e-6, itl_s / expected_itl_s)
