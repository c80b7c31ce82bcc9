"""A prefill and decode service that is looked at window by window, as monitoring would, and whose size can change.

Eight signals, HeteroScale's candidates for scaling (section 3.3.2): tokens a second, GPU utilisation and SM activity of
each role, TTFT and TBT. Tokens and latencies are the service's, hardware signals the mean over replicas that serve.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping

import numpy as np

from lab.virtual.clock import engines_of
from lab.virtual.fixed.disaggregated import DisaggregatedFleet, Journey
from lab.virtual.gpu_outputs import GPU_POWER, GpuOutputs, gpu_outputs
from simulator.core.profile import Profile
from simulator.core.requests import EngineGauges, FinishedRequest
from simulator.traces.model import TraceRequest


class Signal(enum.StrEnum):
    """The eight candidates."""

    PREFILL_TPS = "prefill TPS"
    DECODE_TPS = "decode TPS"
    PREFILL_GPU = "prefill GPU utilisation"
    DECODE_GPU = "decode GPU utilisation"
    PREFILL_SM = "prefill SM activity"
    DECODE_SM = "decode SM activity"
    TTFT = "TTFT"
    TBT = "TBT"


LATENCIES = (Signal.TTFT, Signal.TBT)
THROUGHPUTS = (Signal.PREFILL_TPS, Signal.DECODE_TPS)


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """What is scaled at once: replicas of each role, in the service's ratio."""

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode) < 1:
            raise ValueError(f"a unit needs a replica of each role, not {self.prefill} and {self.decode}")


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """What monitoring saw from `start_s` to `end_s`. A latency is None where nothing got as far."""

    start_s: float
    end_s: float
    load_rps: float
    """Requests that arrived a second."""
    units: int
    """Units that serve, at the window's end."""
    ordered: int
    """Units that serve or start."""
    values: Mapping[Signal, float | None]
    """Tokens a second, shares, seconds; latencies are means."""
    ttft_s: tuple[float, ...]
    """Of each request whose first token came in the window."""
    tbt_s: tuple[float, ...]
    """Mean time between tokens of each request that ended in the window."""
    decode_arithmetic_ratio: float
    """Share of the decode GPUs' arithmetic that is used."""
    cached_tps: float
    """Prompt tokens a second that were found in the prefix cache."""


class ServiceFleet(DisaggregatedFleet):
    """Units of one profile on one switch; the first `units` serve from the start, all `most` can be ordered."""

    def __init__(self, profile: Profile, unit: Unit, *, units: int, most: int | None = None) -> None:
        super().__init__(profile.kv_link())
        self.profile = profile
        self.unit_seconds = 0.0
        """Seconds that units served or started, each counted; up to the last look."""
        self.actions: list[tuple[float, int]] = []
        """When the order changed, and by how many units."""
        self._timing = profile.iteration_model()
        self._units: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for number in range(units if most is None else most):
            prefill = tuple(self.add_prefill(engine) for engine in engines_of(profile, unit.prefill))
            decode = tuple(self.add_decode(engine) for engine in engines_of(profile, unit.decode))
            self._units.append((prefill, decode))
            if number >= units:
                self._hide(number)
        self._ordered = self._serving = units
        self._starting: dict[int, float] = {}
        self._arrived = 0
        self._ttft_s: list[float] = []
        self._tbt_s: list[float] = []
        self._looked_s = 0.0
        self._gauges = self._look(0.0)
        self._cached = self._cached_tokens()

    @property
    def ordered(self) -> int:
        """Units that serve or start."""
        return self._ordered

    def resize(self, units: int, now_s: float, *, start_up_s: float) -> None:
        """Order `units`, at least one: more serve after `start_up_s`; of fewer the latest drain, with no new requests.

        Units that do not serve yet when fewer are ordered never will.
        """
        units = max(1, min(units, len(self._units)))
        if units == self._ordered:
            return
        self.clock.run_before(now_s)
        self.actions.append((now_s, units - self._ordered))
        for number in range(self._ordered, units):
            self._starting[number] = now_s + start_up_s
            self.clock.call_at(now_s + start_up_s, self._start)
        for number in range(units, self._ordered):
            self._starting.pop(number, None)
        self._ordered = units
        while self._serving > units:
            self._serving -= 1
            self._hide(self._serving)

    def window(self, end_s: float) -> Window:
        """What was seen since the last look. Raises ValueError for a window of no length."""
        self.clock.run_before(end_s)
        start_s, before, cached = self._looked_s, self._gauges, self._cached
        self._gauges, self._cached, self._looked_s = self._look(end_s), self._cached_tokens(), end_s
        length_s = end_s - start_s
        power = GPU_POWER[self.profile.gpu_type.split("-")[0]]
        outputs = [
            gpu_outputs(one, other, window_s=length_s, timing=self._timing, power=power)
            for one, other in zip(before, self._gauges, strict=True)
        ]
        ttft_s, tbt_s, arrived = tuple(self._ttft_s), tuple(self._tbt_s), self._arrived
        self._ttft_s.clear()
        self._tbt_s.clear()
        self._arrived = 0
        self.unit_seconds += self._ordered * length_s
        return Window(
            start_s=start_s,
            end_s=end_s,
            load_rps=arrived / length_s,
            units=self._serving,
            ordered=self._ordered,
            values=self._values(outputs, ttft_s, tbt_s),
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            decode_arithmetic_ratio=_mean([outputs[index].arithmetic_ratio for index in self._serving_of(1)]),
            cached_tps=(self._cached - cached) / length_s,
        )

    def _values(
        self, outputs: list[GpuOutputs], ttft_s: tuple[float, ...], tbt_s: tuple[float, ...]
    ) -> dict[Signal, float | None]:
        prefill = [outputs[index] for index in self._serving_of(0)]
        decode = [outputs[index] for index in self._serving_of(1)]
        return {
            Signal.PREFILL_TPS: sum(outputs[i].computed_tps for unit in self._units for i in unit[0]),
            Signal.DECODE_TPS: sum(outputs[i].generated_tps for unit in self._units for i in unit[1]),
            Signal.PREFILL_GPU: _mean([one.gpu_utilisation_ratio for one in prefill]),
            Signal.DECODE_GPU: _mean([one.gpu_utilisation_ratio for one in decode]),
            Signal.PREFILL_SM: _mean([one.sm_activity_ratio for one in prefill]),
            Signal.DECODE_SM: _mean([one.sm_activity_ratio for one in decode]),
            Signal.TTFT: _mean(ttft_s) if ttft_s else None,
            Signal.TBT: _mean(tbt_s) if tbt_s else None,
        }

    def _serving_of(self, role: int) -> list[int]:
        return [index for unit in self._units[: self._serving] for index in unit[role]]

    def _look(self, now_s: float) -> list[EngineGauges]:
        return [self.clock.at(index, now_s).observe(now_s) for index in range(len(self.clock.engines))]

    def _cached_tokens(self) -> int:
        return sum(engine.counters.prefix_hits_tokens for engine in self.clock.engines)

    def _start(self, at_s: float) -> None:
        while self._starting.get(self._serving, math.inf) <= at_s:
            prefill, decode = self._units[self._serving]
            del self._starting[self._serving]
            for index in prefill:
                self.prefill.add(index, self.clock.engines[index].unfinished)
            for index in decode:
                self.decode.add(index, self.clock.engines[index].unfinished)
            self._serving += 1

    def _hide(self, number: int) -> None:
        prefill, decode = self._units[number]
        for index in prefill:
            self.prefill.remove(index)
        for index in decode:
            self.decode.remove(index)

    def submit(self, request: TraceRequest, block_hashes: tuple[int, ...] = ()) -> None:
        """Take one request at its arrival."""
        super().submit(request, block_hashes)
        self._arrived += 1

    def _hand_over(self, index: int, journey: Journey, finished: FinishedRequest) -> None:
        self._ttft_s.append(finished.finished_s - journey.request.arrival_s)
        super()._hand_over(index, journey, finished)

    def _decoded(self, index: int, journey: Journey, finished: FinishedRequest) -> None:
        super()._decoded(index, journey, finished)
        self._tbt_s.append((finished.finished_s - journey.first_token_s) / finished.generated_tokens)


def _mean(values: list[float] | tuple[float, ...]) -> float:
    return float(np.mean(values))
