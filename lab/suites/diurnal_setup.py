"""A chat service of prefill and decode replicas over a workday, run twelve times as fast as a real one.

Lengths and limits are those of HeteroScale's service A (section 4.1); the day's form is `simulator.traces.diurnal`'s.
What a unit carries, and which signals it shows then, comes from a pressure test on virtual time, as in the seed's
Algorithm 1; it is run when a case is, so that it fits the profiles as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from actuator.core.world import Node
from lab.baselines.dynamo_sla import DecodeProfile, PrefillProfile
from lab.evaluation.statistics import Slo
from lab.studies.observing import ServiceFleet, Signal, Unit
from lab.studies.runs import watched
from lab.virtual.fixed.ratio_sweep import SERVICE_A, goodput, workload
from lab.virtual.scaled_run import ScaledSetup
from simulator.core.profile import Profile
from simulator.core.timing import BatchWork
from simulator.profiles import find_profile, packaged_profiles
from simulator.traces.diurnal import day_curve
from simulator.traces.generators import Lengths
from simulator.traces.mixing import compress_time
from simulator.traces.model import TraceRequest
from simulator.traces.seeding import generator
from simulator.traces.servegen import DAY_S, ClientMix, made_up_clients, requests_of_clients
from trimtab.config.resources import Metadata, ServicePolicy
from trimtab.config.specs import LatencyBrake, Proportional, Ratio, RoleSpec, ServicePolicySpec
from trimtab.config.specs import Slo as SloSpec
from trimtab.domain.vocabulary import Role, TopologyLevel

NAME = "chat"
PROFILE = "h100-32b-tp2"
GPU_TYPE = "H100-80GB"
GPU_MEMORY_GIB = 80.0
UNIT = Unit(2, 1)
MOST_UNITS = 6
NODES, GPUS_PER_NODE = 6, 8
SLO = Slo(ttft_s=SERVICE_A.ttft_s, tpot_s=SERVICE_A.tbt_s)
COMPRESS = 12.0
DURATION_S = DAY_S / COMPRESS
PEAK_UNITS = 5
"""Units that the day's peak needs at `TARGET_LOAD`."""
PEAK = 1.7
"""The day's highest rate over its mean."""
TARGET_LOAD = 0.7
"""Load of a unit, over what it carries within the limits, that scalers aim at."""
CLIENTS = 200
TRAINING_SEEDS = (101, 102)
HELD_OUT_SEEDS = (1, 2, 3)
_PRESSURE_S = 120.0
_CURVE = day_curve(DAY_S)


@dataclasses.dataclass(frozen=True, slots=True)
class Pressure:
    """What the pressure test found: of one unit, and of one replica at `TARGET_LOAD`."""

    unit_rps: float
    """Within the limits for nine requests in ten."""
    decode_tps: float
    prefill_requests: float
    """In a replica, running or waiting."""
    decode_requests: float
    gpu_utilisation: float
    """Of prefill; decode's is 1 at any load."""


def profile() -> Profile:
    """The profile of both roles."""
    return find_profile(packaged_profiles(), PROFILE)


@functools.cache
def pressure_test(units: int = PEAK_UNITS) -> Pressure:
    """So many units at rising rates, then at `TARGET_LOAD`. Requests in a replica by Little's law."""
    point = goodput(
        SERVICE_A, profile(), prefill_replicas=units * UNIT.prefill, decode_replicas=units * UNIT.decode, seed=7
    )
    rate_rps = TARGET_LOAD * point.goodput_rps
    fleet = ServiceFleet(profile(), UNIT, units=units)
    trace = workload(SERVICE_A, rate_rps=rate_rps, requests=round(rate_rps * _PRESSURE_S), seed=7)
    _, window = watched(fleet, trace, [_PRESSURE_S / 3, _PRESSURE_S])
    decode_tps = (window.values[Signal.DECODE_TPS] or 0.0) / (units * UNIT.decode)
    return Pressure(
        unit_rps=point.goodput_rps / units,
        decode_tps=decode_tps,
        prefill_requests=window.load_rps * float(np.mean(window.ttft_s)) / (units * UNIT.prefill),
        decode_requests=decode_tps * float(np.mean(window.tbt_s)),
        gpu_utilisation=window.values[Signal.PREFILL_GPU] or 0.0,
    )


def prefill_profile() -> PrefillProfile:
    """What Dynamo's planner profiles of prefill: a prompt alone on a replica."""
    timing = profile().iteration_model()
    lengths = tuple(float(tokens) for tokens in (500, 1000, 2000, 4000, 8000))
    ttft_s = tuple(timing.iteration_s(BatchWork(round(one), 0, 0, one * one / 2)) for one in lengths)
    return PrefillProfile(
        prompt_tokens=lengths,
        ttft_s=ttft_s,
        tps=tuple(one / seconds for one, seconds in zip(lengths, ttft_s, strict=True)),
    )


def decode_profile() -> DecodeProfile:
    """The same of decode: batches of equal contexts, as many as fit into the KV cache."""
    one = profile()
    timing, room = one.iteration_model(), one.num_gpu_blocks * one.limits.block_size
    contexts = tuple(float(tokens) for tokens in (1000, 2000, 3000, 4000, 6000))
    batches = tuple(float(count) for count in (1, 8, 16, 32, 64, 96, 128))
    # A batch beyond the cache waits for itself to end: its tokens come that much slower.
    return DecodeProfile(
        context_tokens=contexts,
        batch=batches,
        itl_s=tuple(
            tuple(
                timing.iteration_s(BatchWork(0, round(count), round(count * tokens), 0.0))
                * max(1.0, count * tokens / room)
                for count in batches
            )
            for tokens in contexts
        ),
    )


def peak_rps() -> float:
    """The day's highest rate."""
    return PEAK_UNITS * TARGET_LOAD * pressure_test().unit_rps


def rate_rps(at_s: float) -> float:
    """The rate that the day's curve has at a time of the run's day; a seed's own clients do not follow it exactly."""
    return peak_rps() / PEAK * _CURVE.at(at_s * COMPRESS)


def units_for(rate_rps: float) -> int:
    """Units that carry a rate at `TARGET_LOAD`."""
    return max(1, min(MOST_UNITS, math.ceil(rate_rps / TARGET_LOAD / pressure_test().unit_rps - 1e-9)))


@functools.lru_cache(maxsize=len(HELD_OUT_SEEDS))
def requests_of_day(seed: int, duration_s: float) -> tuple[TraceRequest, ...]:
    """A workday of many bursty clients, of which `duration_s` of the run's time are taken from midnight on.

    Lengths are those of the pressure test, so that what it found of a unit holds.
    """
    mix = ClientMix(clients=CLIENTS, total_rps=peak_rps() / PEAK / COMPRESS)
    made = made_up_clients(mix, curve=day_curve(DAY_S), duration_s=DAY_S, seed=seed)
    arriving = list(
        compress_time(
            requests_of_clients(made, service=NAME, seed=seed, duration_s=min(DAY_S, duration_s * COMPRESS)), COMPRESS
        )
    )
    source = generator(seed, "diurnal", "lengths")
    prompts = _lengths(SERVICE_A.prompt_tokens, SERVICE_A.prompt_cv).sample(source, len(arriving)).tolist()
    outputs = _lengths(SERVICE_A.output_tokens, SERVICE_A.output_cv).sample(source, len(arriving)).tolist()
    return tuple(
        dataclasses.replace(one, prompt_tokens=prompt, output_tokens=output)
        for one, prompt, output in zip(arriving, prompts, outputs, strict=True)
    )


def _lengths(mean_tokens: float, cv: float) -> Lengths:
    return Lengths(mean_tokens=mean_tokens, cv=cv, min_tokens=2, max_tokens=round(4 * mean_tokens))


def service_policy(*, load: float = TARGET_LOAD, brake: bool = True) -> ServicePolicy:
    """The policy of the service; `load` moves the target per decode replica, `brake` is the latency brake."""
    width = profile().tensor_parallel
    counts = {Role.PREFILL: UNIT.prefill, Role.DECODE: UNIT.decode}
    return ServicePolicy(
        metadata=Metadata(name=NAME),
        spec=ServicePolicySpec(
            model=profile().model,
            slo=SloSpec(ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s),
            roles=tuple(
                RoleSpec(
                    role=role,
                    min_replicas=count,
                    max_replicas=count * MOST_UNITS,
                    gpus_per_replica=width,
                    gpu_types=(GPU_TYPE,),
                    profile=PROFILE,
                )
                for role, count in counts.items()
            ),
            ratio=Ratio(prefill=UNIT.prefill, decode=UNIT.decode, strict=True),
            affinity=TopologyLevel.S2,
            proportional=Proportional(target_per_replica=pressure_test().decode_tps * load / TARGET_LOAD),
            latency_brake=LatencyBrake(ttft_target_s=SLO.ttft_s, tbt_target_s=SLO.tpot_s) if brake else None,
        ),
    )


def scaled_setup(policy: ServicePolicy, units: int) -> ScaledSetup:
    """The cluster: nodes under one S2 switch; `units` serve when the day begins."""
    return ScaledSetup(
        policy=policy,
        nodes=tuple(
            Node(node=f"node-{index}", vdc="vdc-0", s2="s2-0", s1=f"s1-{index}", gpu_type=GPU_TYPE, gpus=GPUS_PER_NODE)
            for index in range(NODES)
        ),
        profiles={PROFILE: profile()},
        gpu_memory_gib=GPU_MEMORY_GIB,
        first={Role.PREFILL: units * UNIT.prefill, Role.DECODE: units * UNIT.decode},
        window_s=10.0,
        scrape_s=2.0,
        timeline_s=30.0,
    )
