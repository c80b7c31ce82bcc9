"""HeteroScale's findings about the eight signals, each against what the model shows. Pure.

A verdict follows from the thresholds in this module.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

from lab.studies.measures import Cliff, Floats, Measures, cliff, correlation, measure
from lab.studies.observing import LATENCIES, THROUGHPUTS, Signal, Window
from lab.studies.runs import STEPS, Scaled, Setting

PROPORTIONAL = 0.15
"""Greatest distance of an elasticity from 1 that counts as proportional."""
STRAIGHT_R2 = 0.9
CLEAR_SNR_DB = 6.0
HIGH, FLAT_RANGE = 0.5, 1.25
"""A share is high above the one, a signal flat when its range over the day is below the other."""
FOLLOWS = 0.9
"""Least correlation of units with load under a rule that follows it."""
CLIFF_LOAD = 0.8
"""A latency that is flat up to here has a cliff, if any."""


class Verdict(enum.StrEnum):
    """How a finding fared."""

    REPRODUCED = "reproduced"
    IN_PART = "in part"
    NOT = "not reproduced"

    @classmethod
    def of(cls, *checks: bool) -> Verdict:
        """All, none, or some hold."""
        return cls.REPRODUCED if all(checks) else cls.IN_PART if any(checks) else cls.NOT


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the seed, its place, whether it holds here, and the figures."""

    claim: str
    where: str
    verdict: Verdict
    figures: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that was run, and the verdicts on the seed's findings."""

    setting: Setting
    capacity_rps: float
    """Of all units, within the service's limits."""
    decode_capacity_rps: float
    """Of as many units with prefill to spare."""
    curve: Sequence[Window]
    """By load (`STEPS`)."""
    decode_curve: Sequence[Window]
    """The same with prefill to spare."""
    day: Sequence[Window]
    scaled: Mapping[Signal, Scaled]
    scaled_day: Scaled
    """The day by decode TPS."""
    cache: Sequence[Window]

    def measures(self) -> dict[Signal, Measures]:
        """Every signal over the day."""
        load = [window.load_rps for window in self.day]
        return {signal: measure(load, [window.values[signal] for window in self.day]) for signal in Signal}

    def cliffs(self) -> dict[Signal, Cliff]:
        """TTFT's on the service's units, TBT's on those that decode binds."""
        return {
            Signal.TTFT: cliff(STEPS, _column(self.curve, Signal.TTFT)),
            Signal.TBT: cliff(STEPS, _column(self.decode_curve, Signal.TBT)),
        }

    def findings(self) -> list[Finding]:
        """All of them."""
        measures, cliffs = self.measures(), self.cliffs()
        return [
            _throughput(measures),
            _prefill_hardware(measures),
            _decode_hardware(measures[Signal.DECODE_GPU], self.curve[1], Signal.DECODE_GPU),
            _decode_hardware(measures[Signal.DECODE_SM], self.curve[1], Signal.DECODE_SM),
            _latency_cliff(cliffs),
            _clearer_latency(measures),
            _interchangeable(self.day),
            _cache(self.cache),
            _rules_that_follow(self.scaled),
            _less_sensitive(measures, self.scaled),
            _blind_rules(self.scaled),
            _ttft_rule(self.scaled),
            _tbt_rule(self.scaled),
            *_with_scaling(self),
        ]


def _column(windows: Sequence[Window], signal: Signal) -> list[float]:
    values = [window.values[signal] for window in windows]
    known = [value for value in values if value is not None]
    if len(known) != len(values):
        raise ValueError(f"{signal} has no value in {len(values) - len(known)} of {len(values)} windows")
    return known


def _throughput(measures: Mapping[Signal, Measures]) -> Finding:
    both = [measures[signal] for signal in THROUGHPUTS]
    return Finding(
        "Tokens a second of both roles are proportional to the load, with a high signal-to-noise ratio",
        "3.3.2, figure 2a",
        Verdict.of(all(_proportional(one) for one in both), all(_clear(one) for one in both)),
        "; ".join(f"{signal}: {_said(measures[signal])}" for signal in THROUGHPUTS),
    )


def _prefill_hardware(measures: Mapping[Signal, Measures]) -> Finding:
    signals = (Signal.PREFILL_GPU, Signal.PREFILL_SM)
    return Finding(
        "Prefill's GPU utilisation and SM activity respond to load, with a high signal-to-noise ratio",
        "3.3.2, figure 2c and 2d",
        Verdict.of(*(_proportional(measures[signal]) and _clear(measures[signal]) for signal in signals)),
        "; ".join(f"{signal}: {_said(measures[signal])}" for signal in signals),
    )


def _decode_hardware(one: Measures, slight: Window, signal: Signal) -> Finding:
    low = slight.values[signal] or 0.0
    flat = one.dynamic_range is not None and one.dynamic_range < FLAT_RANGE
    noise = "" if one.snr_db is None else f"; signal-to-noise {one.snr_db:.0f} dB"
    return Finding(
        f"{signal[0].upper()}{signal[1:]} is high under slight pressure already and hardly sensitive to load",
        "3.3.2, figure 2c and 2d",
        Verdict.of(low >= HIGH, flat),
        f"{low:.2f} at a tenth of the load, {one.low:.2f} in the day's valley and {one.high:.2f} at its peak, "
        f"× {one.dynamic_range or 1:.2f} while the load grows fivefold{noise}",
    )


def _latency_cliff(cliffs: Mapping[Signal, Cliff]) -> Finding:
    return Finding(
        "TTFT and TBT are nearly flat over a wide range of load and then shoot up abruptly near saturation",
        "3.3.2, figure 2b",
        Verdict.of(*(one.flat_until >= CLIFF_LOAD and one.position is not None for one in cliffs.values())),
        "; ".join(
            f"{signal}: {1000 * one.plateau:.0f} ms, below twice that up to {one.flat_until:.0%} of the load, then "
            + (
                f"at most × {one.rise:.1f} within a tenth of load: a slope, not a cliff"
                if one.position is None
                else f"× {one.rise:.1f} within a tenth of load, around {one.position:.0%}"
            )
            for signal, one in cliffs.items()
        ),
    )


def _clearer_latency(measures: Mapping[Signal, Measures]) -> Finding:
    ttft, tbt = (measures[signal].snr_db for signal in (Signal.TTFT, Signal.TBT))
    clearer = ttft is not None and tbt is not None and tbt > ttft
    return Finding(
        "Of the two latencies TBT is the clearer signal; TTFT has the lower signal-to-noise ratio",
        "3.3.2, figure 2b",
        Verdict.of(clearer),
        f"signal-to-noise of TTFT {_db(ttft)}, of TBT {_db(tbt)}",
    )


def _interchangeable(day: Sequence[Window]) -> Finding:
    prefill, decode = (np.array(_column(day, signal)) for signal in THROUGHPUTS)
    together = correlation(prefill, decode) or 0.0
    return Finding(
        "While lengths are stable, prefill TPS and decode TPS are interchangeable",
        "4.2.2",
        Verdict.of(together >= FOLLOWS),
        f"their correlation over the day is {together:.3f}",
    )


def _cache(windows: Sequence[Window]) -> Finding:
    computed = np.array(_column(windows, Signal.PREFILL_TPS))
    raw = computed + np.array([window.cached_tps for window in windows])
    busy = np.array(_column(windows, Signal.PREFILL_GPU))
    return Finding(
        "Where prompts hit the cache, raw prefill TPS says nothing about prefill's work; tokens that missed it do",
        "3.3.2",
        Verdict.of((correlation(computed, busy) or 0.0) >= FOLLOWS, _ratio(raw) > 0.8 > _ratio(busy)),
        f"steady requests, hits from none to four fifths: raw TPS × {_ratio(raw):.2f}, missed TPS × "
        f"{_ratio(computed):.2f}, prefill GPU utilisation × {_ratio(busy):.2f}",
    )


def _ratio(values: Floats) -> float:
    third = max(1, len(values) // 6)
    return float(np.mean(values[-third:]) / np.mean(values[:third]))


def _rules_that_follow(scaled: Mapping[Signal, Scaled]) -> Finding:
    signals = (*THROUGHPUTS, Signal.PREFILL_SM)
    return Finding(
        "Scaling by prefill TPS, decode TPS or prefill SM activity follows the load up and down",
        "4.2.2, figure 6a, 6b and 6e",
        Verdict.of(*((scaled[signal].follows or 0.0) >= FOLLOWS for signal in signals)),
        "; ".join(f"{signal}: {_did(scaled[signal])}" for signal in signals),
    )


def _less_sensitive(measures: Mapping[Signal, Measures], scaled: Mapping[Signal, Scaled]) -> Finding:
    gpu, tps = measures[Signal.PREFILL_GPU], measures[Signal.PREFILL_TPS]
    less = (gpu.elasticity or 0.0) < (tps.elasticity or 0.0) - PROPORTIONAL / 3
    return Finding(
        "Prefill GPU utilisation is a valid signal, but less sensitive than tokens a second",
        "4.2.2, figure 6c",
        Verdict.of((scaled[Signal.PREFILL_GPU].follows or 0.0) >= FOLLOWS, less),
        f"elasticity {gpu.elasticity or 0:.2f} against {tps.elasticity or 0:.2f} of prefill TPS; "
        f"its rule: {_did(scaled[Signal.PREFILL_GPU])}",
    )


def _blind_rules(scaled: Mapping[Signal, Scaled]) -> Finding:
    signals = (Signal.DECODE_GPU, Signal.DECODE_SM)
    return Finding(
        "Scaling by decode GPU utilisation or decode SM activity does not work: hardly any action follows the load",
        "4.2.2, figure 6d and 6f",
        Verdict.of(*(scaled[signal].actions <= 2 for signal in signals)),
        "; ".join(f"{signal}: {_did(scaled[signal])}" for signal in signals),
    )


def _ttft_rule(scaled: Mapping[Signal, Scaled]) -> Finding:
    ttft, tps = scaled[Signal.TTFT], scaled[Signal.DECODE_TPS]
    return Finding(
        "Scaling by TTFT overshoots and then corrects itself over and over",
        "4.2.2, figure 6g",
        Verdict.of(ttft.over > 1.5 * tps.over, ttft.reversals > 1.5 * tps.reversals),
        f"TTFT: {_did(ttft)}; decode TPS: {_did(tps)}",
    )


def _tbt_rule(scaled: Mapping[Signal, Scaled]) -> Finding:
    ttft, tbt = scaled[Signal.TTFT], scaled[Signal.TBT]
    return Finding(
        "Scaling by TBT is smoother than by TTFT and reacts reasonably to load",
        "4.2.2, figure 6h",
        Verdict.of(tbt.reversals < ttft.reversals, (tbt.follows or 0.0) >= FOLLOWS),
        f"TBT: {_did(tbt)}",
    )


def _with_scaling(study: Study) -> list[Finding]:
    fixed_hours = study.setting.units * 24.0
    saved = 1 - study.scaled_day.unit_hours / fixed_hours
    before, after = _averages(study.day), _averages(study.scaled_day.windows)
    spread_before, spread_after = (_spread(windows) for windows in (study.day, study.scaled_day.windows))
    hardware = (Signal.PREFILL_GPU, Signal.PREFILL_SM, Signal.DECODE_GPU, Signal.DECODE_SM)
    return [
        Finding(
            "Scaling a chat service by decode TPS saves GPUs (41.3 %), lifts prefill's GPU utilisation (0.47 to 0.76) "
            "and SM activity (0.37 to 0.63), and leaves decode's high (0.86 to 0.82 and 0.53 to 0.62)",
            "4.3, figure 7",
            Verdict.of(
                saved > 0.1,
                after[Signal.PREFILL_GPU] > 1.2 * before[Signal.PREFILL_GPU],
                after[Signal.PREFILL_SM] > 1.2 * before[Signal.PREFILL_SM],
                min(after[Signal.DECODE_GPU], after[Signal.DECODE_SM]) > HIGH,
            ),
            f"{saved:.0%} fewer GPU hours than a fixed size for the peak; "
            + "; ".join(f"{signal} {before[signal]:.2f} → {after[signal]:.2f}" for signal in hardware),
        ),
        Finding(
            "With scaling, both latencies vary in a smaller range than without",
            "4.3, figure 7d",
            Verdict.of(*(spread_after[signal] < spread_before[signal] for signal in LATENCIES)),
            "coefficient of variation over the day: "
            + "; ".join(f"{signal} {spread_before[signal]:.2f} → {spread_after[signal]:.2f}" for signal in LATENCIES),
        ),
    ]


def _averages(windows: Sequence[Window]) -> dict[Signal, float]:
    """Over replicas, as a platform counts its GPUs: windows weigh as many units as served in them."""
    units = np.array([window.units for window in windows], dtype=np.float64)
    shares = (Signal.PREFILL_GPU, Signal.PREFILL_SM, Signal.DECODE_GPU, Signal.DECODE_SM)
    return {signal: float(np.average(_column(windows, signal), weights=units)) for signal in shares}


def _spread(windows: Sequence[Window]) -> dict[Signal, float]:
    """Of windows with a latency; a quiet one may have none."""
    found = {signal: [window.values[signal] for window in windows] for signal in LATENCIES}
    columns = {signal: np.array([one for one in values if one is not None]) for signal, values in found.items()}
    return {signal: float(np.std(column) / np.mean(column)) for signal, column in columns.items()}


def _proportional(one: Measures) -> bool:
    straight = one.line_r2 is not None and one.line_r2 >= STRAIGHT_R2
    return straight and one.elasticity is not None and abs(one.elasticity - 1) <= PROPORTIONAL


def _clear(one: Measures) -> bool:
    return one.snr_db is not None and one.snr_db >= CLEAR_SNR_DB


def _db(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} dB"


def _said(one: Measures) -> str:
    return (
        f"elasticity {one.elasticity or 0:.2f}, R² {one.line_r2 or 0:.2f}, "
        f"× {one.dynamic_range or 1:.1f} from valley to peak, {_db(one.snr_db)}"
    )


def _did(one: Scaled) -> str:
    follows = "never changes" if one.follows is None else f"correlation with load {one.follows:.2f}"
    return (
        f"{follows}, {one.actions} actions, {one.reversals} of them back, × {one.over:.2f} of the units needed, "
        f"{one.attainment:.0%} within limits"
    )
