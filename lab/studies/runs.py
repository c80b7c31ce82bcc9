"""The study's runs: load in steps, a day at fixed size, hours of it under each signal's rule, and a changing cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lab.studies.observing import LATENCIES, ServiceFleet, Signal, Unit, Window
from lab.studies.steering import TARGET_LOAD, Cooling, calibrated, reversals
from lab.virtual.fixed.ratio_sweep import SERVICE_A, RatioService, goodput, workload
from simulator.core.profile import Profile
from simulator.traces.diurnal import day_curve
from simulator.traces.model import TraceRequest
from simulator.traces.servegen import DAY_S, ClientMix, made_up_clients, requests_of_clients

HOUR_S = 3600.0
STEPS = tuple(round(0.05 * step, 2) for step in range(1, 27))
"""Loads of the staircase, over what the service serves within its limits."""
PEAK = 1.7
"""The day's highest rate over its mean."""
MORNING_HOURS = (4.0, 8.0)
"""The seed compares its signals on eight hours: here those from the valley to noon, as the first hour and how many."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is studied. Time of the day, its windows and a unit's start run `compress` times faster than in reality."""

    profile: Profile
    service: RatioService = SERVICE_A
    unit: Unit = dataclasses.field(default_factory=lambda: Unit(2, 1))
    decode_bound: Unit = dataclasses.field(default_factory=lambda: Unit(4, 1))
    """A unit with prefill to spare, to see decode's cliff."""
    units: int = 6
    most_units: int = 9
    compress: float = 10.0
    window_s: float = 300.0
    start_up_s: float = 120.0
    cooling_out_s: float = 300.0
    cooling_in_s: float = 900.0
    peak_load: float = TARGET_LOAD
    """Load at the day's peak over what all units serve within the limits."""
    step_s: float = 120.0
    """Length of a step of the staircase; its first third fills the engines and is left out."""
    cache_window_s: float = 120.0
    capacity_requests: int = 2500
    """Served at each rate that is tried."""
    clients: int = 200
    seed: int = 1


def steps(setting: Setting, unit: Unit, capacity_rps: float) -> list[Window]:
    """A window for each load of `STEPS`, each on a fresh fleet."""
    windows = []
    for number, load in enumerate(STEPS):
        fleet = ServiceFleet(setting.profile, unit, units=setting.units)
        rate_rps = load * capacity_rps
        trace = workload(
            setting.service,
            rate_rps=rate_rps,
            requests=max(1, round(rate_rps * setting.step_s)),
            seed=setting.seed * 1000 + number,
        )
        windows.append(list(watched(fleet, trace, [setting.step_s / 3, setting.step_s]))[1])
    return windows


def watched(fleet: ServiceFleet, trace: Iterable[TraceRequest], ends_s: Iterable[float]) -> Iterator[Window]:
    """Serve a trace and look at the ends of windows; what comes after the last one is not served."""
    requests = iter(trace)
    upcoming = next(requests, None)
    for end_s in ends_s:
        while upcoming is not None and upcoming.arrival_s < end_s:
            fleet.submit(upcoming)
            upcoming = next(requests, None)
        yield fleet.window(end_s)


def day(setting: Setting, capacity_rps: float, *, from_hour: float, hours: float) -> Iterator[TraceRequest]:
    """Requests of many bursty clients over a part of a workday, compressed; prompts and answers fit the model."""
    longest = setting.profile.limits.max_model_len
    mix = ClientMix(
        clients=setting.clients,
        total_rps=setting.peak_load * capacity_rps / PEAK / setting.compress,
        prompt_mean_tokens=setting.service.prompt_tokens,
        output_mean_tokens=setting.service.output_tokens,
    )
    made = made_up_clients(mix, curve=day_curve(DAY_S), duration_s=DAY_S, seed=setting.seed)
    # The rate of the day as it is, is that of the compressed one divided by `compress`.
    for one in requests_of_clients(
        made, service=setting.service.name, seed=setting.seed, start_s=from_hour * HOUR_S, duration_s=hours * HOUR_S
    ):
        prompt = min(one.prompt_tokens, longest // 2)
        yield dataclasses.replace(
            one,
            arrival_s=one.arrival_s / setting.compress,
            prompt_tokens=prompt,
            output_tokens=min(one.output_tokens, longest - prompt),
        )


def window_ends(setting: Setting, hours: float) -> list[float]:
    """Ends of the windows of so many hours, in compressed seconds."""
    count = round(hours * HOUR_S / setting.window_s)
    return [(number + 1) * setting.window_s / setting.compress for number in range(count)]


def fixed_day(setting: Setting, capacity_rps: float) -> list[Window]:
    """A whole day at fixed size."""
    fleet = ServiceFleet(setting.profile, setting.unit, units=setting.units)
    return list(watched(fleet, day(setting, capacity_rps, from_hour=0.0, hours=24.0), window_ends(setting, 24.0)))


@dataclasses.dataclass(frozen=True, slots=True)
class Scaled:
    """Some hours under one signal's rule."""

    signal: Signal
    windows: tuple[Window, ...]
    actions: int
    reversals: int
    unit_hours: float
    """Uncompressed."""
    follows: float | None
    """Correlation of units with load."""
    needed: tuple[float, ...]
    """Units that the load of each window needs, at `TARGET_LOAD` of what each serves."""
    over: float
    """Mean of units over those needed; 1 where the size is right."""
    short: float
    """Share of windows with fewer units than the load needs at the whole of what each serves."""
    attainment: float
    """Share of requests within TTFT's limit, times that within TBT's."""


def scaled(
    setting: Setting, capacity_rps: float, signal: Signal, curve: Sequence[Window], *, from_hour: float, hours: float
) -> Scaled:
    """Some hours of the day under one signal's rule; `curve` holds the signals of all units at `STEPS`."""
    rule = calibrated(signal, functools.partial(value_at, curve, signal), units=setting.units)
    per_unit_rps = capacity_rps / setting.units
    first_rps = setting.peak_load * capacity_rps / PEAK * day_curve(DAY_S).at(from_hour * HOUR_S)
    first = max(1, round(first_rps / per_unit_rps / TARGET_LOAD))
    fleet = ServiceFleet(setting.profile, setting.unit, units=first, most=setting.most_units)
    trace = day(setting, capacity_rps, from_hour=from_hour, hours=hours)
    cooling = Cooling(setting.cooling_out_s / setting.compress, setting.cooling_in_s / setting.compress)
    windows = []
    for window in watched(fleet, trace, window_ends(setting, hours)):
        windows.append(window)
        wanted = min(setting.most_units, rule.units(window.values[signal], window.ordered))
        if cooling.allows(wanted - fleet.ordered, window.end_s):
            fleet.resize(wanted, window.end_s, start_up_s=setting.start_up_s / setting.compress)
    return _summed(setting, signal, windows, fleet, per_unit_rps)


def _summed(
    setting: Setting, signal: Signal, windows: Sequence[Window], fleet: ServiceFleet, per_unit_rps: float
) -> Scaled:
    units = np.array([window.units for window in windows], dtype=np.float64)
    load = np.array([window.load_rps for window in windows])
    needed = np.maximum(1.0, load / per_unit_rps / TARGET_LOAD)
    spread = float(np.std(units)) > 0
    changes = [change for _, change in fleet.actions]
    ttft_s = np.concatenate([window.ttft_s for window in windows])
    tbt_s = np.concatenate([window.tbt_s for window in windows])
    within = float(np.mean(ttft_s <= setting.service.ttft_s)) * float(np.mean(tbt_s <= setting.service.tbt_s))
    return Scaled(
        signal=signal,
        windows=tuple(windows),
        actions=len(changes),
        reversals=reversals(changes),
        unit_hours=fleet.unit_seconds * setting.compress / HOUR_S,
        follows=float(np.corrcoef(units, load)[0, 1]) if spread else None,
        needed=tuple(needed.tolist()),
        over=float(np.mean(units / needed)),
        short=float(np.mean(units < needed * TARGET_LOAD)),
        attainment=within,
    )


def value_at(curve: Sequence[Window], signal: Signal, load: float) -> float:
    """A signal at a load, on the line between steps. Latencies never fall with load: noise is taken out.

    Raises ValueError for a signal without values.
    """
    values = [window.values[signal] for window in curve]
    known = [(step, value) for step, value in zip(STEPS, values, strict=True) if value is not None]
    if not known:
        raise ValueError(f"{signal} has no value at any load")
    heights = np.array([value for _, value in known])
    if signal in LATENCIES:
        heights = np.maximum.accumulate(heights)
    return float(np.interp(load, [step for step, _ in known], heights))


def cache_windows(setting: Setting, capacity_rps: float, *, windows: int = 24) -> list[Window]:
    """Steady load whose prompts share more and more of their beginning: from nothing to four fifths."""
    length_s = setting.cache_window_s
    fleet = ServiceFleet(setting.profile, setting.unit, units=1)
    rate_rps = 0.5 * capacity_rps
    trace = workload(
        setting.service, rate_rps=rate_rps, requests=round(rate_rps * windows * length_s), seed=setting.seed
    )
    block, found, unique = setting.profile.limits.block_size, [], 0
    ends_s = [(number + 1) * length_s for number in range(windows)]
    upcoming = 0
    for end_s in ends_s:
        while upcoming < len(trace) and trace[upcoming].arrival_s < end_s:
            one = trace[upcoming]
            shared = int(0.8 * one.arrival_s / ends_s[-1] * one.prompt_tokens / block)
            own = one.prompt_tokens // block - shared
            hashes = (*range(1, shared + 1), *range(-unique - own, -unique))
            unique += own
            fleet.submit(one, hashes)
            upcoming += 1
        found.append(fleet.window(end_s))
    return found


def capacity_rps(setting: Setting, unit: Unit, units: int = 1) -> float:
    """Requests a second that units of a shape serve within the service's limits, for nine in ten of them."""
    point = goodput(
        setting.service,
        setting.profile,
        prefill_replicas=units * unit.prefill,
        decode_replicas=units * unit.decode,
        requests=setting.capacity_requests,
        seed=setting.seed,
    )
    return point.goodput_rps
