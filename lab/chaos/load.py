"""The load of a chaos run and the floors that go with it: capacity has to move all the time. Pure.

Three models take turns in being hot. In the middle of each turn the floor of a model that is cold is raised, so that a
busy one has to give: releases meet requests in flight. The load is small, since the machine that sends it plays the
servers and the control plane too; some requests are long enough to outlive a drain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from simulator.traces.generators import Lengths, ServiceLoad, generate, rotating
from simulator.traces.model import TraceRequest

SERVICES = ("chat", "reason", "code")
"""In the order in which they are hot."""
BASE_FLOOR = 1
RAISED_FLOOR = 2
PHASE_S = 12.0
RAMP_S = 2.0
HOT_RPS = 3.5
COLD_RPS = 0.15
PROMPT = Lengths(mean_tokens=600, cv=0.6, min_tokens=50, max_tokens=3000)
OUTPUT = Lengths(mean_tokens=120, cv=0.8, min_tokens=8, max_tokens=600)


@dataclass(frozen=True, slots=True)
class FloorChange:
    """From `at_s` on every service has this floor."""

    at_s: float
    floors: Mapping[str, int]


def chaos_load(*, duration_s: float, seed: int) -> list[TraceRequest]:
    """Requests of all three models over `[0, duration_s)`, by arrival."""
    curves = rotating(SERVICES, duration_s=duration_s, phase_s=PHASE_S, ramp_s=RAMP_S, hot=HOT_RPS, cold=COLD_RPS)
    loads = [ServiceLoad(service=name, request_rps=curves[name], prompt=PROMPT, output=OUTPUT) for name in SERVICES]
    return generate(loads, duration_s=duration_s, seed=seed)


def floor_changes(*, duration_s: float) -> list[FloorChange]:
    """One in the middle of each phase: up for the model that is hot last, down for the others."""
    changes = []
    for phase in range(math.floor(duration_s / PHASE_S)):
        raised = SERVICES[(phase + 2) % len(SERVICES)]
        floors = {name: RAISED_FLOOR if name == raised else BASE_FLOOR for name in SERVICES}
        changes.append(FloorChange((phase + 0.5) * PHASE_S, floors))
    return changes
