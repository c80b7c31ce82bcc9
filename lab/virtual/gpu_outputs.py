"""What GPU counters would show of a replica, from what its engine did.

- *GPU utilisation* is what `nvidia-smi` means by it: the share of time in which some kernel runs, whatever it does.
- *SM activity* is what `sm__cycles_active` and DCGM's `SM_ACTIVE` mean by it: the share of cycles with a warp on an SM,
  also one that waits for memory. Here that is busy time less the host's part of each iteration.
- *Arithmetic* is achieved tokens over the compute-bound rate: the share of time that the linear layers of those tokens
  would take if nothing but arithmetic bound them.
- *Power* is the idle power plus the rest in proportion to arithmetic.

So a decode replica with one sequence is fully utilised, mostly active and computes hardly anything. Limits: kernels are
taken to reach every SM; reading memory draws power too, of which this model knows nothing; idle and peak power are the
makers' figures or estimates, not measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from simulator.core.requests import EngineGauges
from simulator.core.timing import IterationModel


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPower:
    """Watts of one GPU."""

    idle_w: float
    peak_w: float


GPU_POWER: Mapping[str, GpuPower] = {
    "A100": GpuPower(55.0, 400.0),
    "B200": GpuPower(140.0, 1000.0),
    "GB200": GpuPower(150.0, 1200.0),
    "H100": GpuPower(75.0, 700.0),
    "H20": GpuPower(75.0, 400.0),
    "H200": GpuPower(75.0, 700.0),
    "L20": GpuPower(35.0, 275.0),
    "L40S": GpuPower(35.0, 350.0),
}
"""Peak: the specified limit of the usual module. Idle: estimates."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuOutputs:
    """One replica over one window; power is the sum over its GPUs."""

    gpu_utilisation_ratio: float
    sm_activity_ratio: float
    arithmetic_ratio: float
    power_w: float
    generated_tps: float
    computed_tps: float


def gpu_outputs(
    before: EngineGauges,
    after: EngineGauges,
    *,
    window_s: float,
    timing: IterationModel,
    power: GpuPower,
    gpus: int = 1,
) -> GpuOutputs:
    """The outputs of an awake replica from two observations of its engine. Raises ValueError for an empty window."""
    if window_s <= 0:
        raise ValueError(f"window_s must be positive, not {window_s!r}")
    computed_tps = (after.computed_tokens - before.computed_tokens) / window_s
    arithmetic = min(1.0, computed_tps * timing.token_s)
    busy_s = after.busy_s - before.busy_s
    kernels_s = busy_s - (after.steps - before.steps) * timing.host_s
    return GpuOutputs(
        gpu_utilisation_ratio=min(1.0, busy_s / window_s),
        sm_activity_ratio=min(1.0, max(0.0, kernels_s / window_s)),
        arithmetic_ratio=arithmetic,
        power_w=gpus * (power.idle_w + (power.peak_w - power.idle_w) * arithmetic),
        generated_tps=(after.generated_tokens - before.generated_tokens) / window_s,
        computed_tps=computed_tps,
    )
