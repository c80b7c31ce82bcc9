"""Small pools for runs on virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from lab.virtual.pool_run import PoolSetup
from simulator.profiles import packaged_profiles
from simulator.traces.generators import Curve, Lengths
from simulator.traces.model import TraceRequest
from simulator.traces.streams import Stream, requests_of
from trimtab.config.resources import Pool, ServicePolicy

MODELS: Mapping[str, tuple[str, int]] = {"small": ("a100-7b-tp1", 1), "large": ("a100-14b-tp2", 2)}


def pool_setup(*, gpus: int = 6, awake: Mapping[str, int] | None = None, **pool: object) -> PoolSetup:
    """`small` with one GPU and `large` with two share a node."""
    counts = awake if awake is not None else {"small": 4, "large": 1}
    policies = tuple(
        ServicePolicy.model_validate(
            {
                "metadata": {"name": name},
                "spec": {
                    "model": name,
                    "slo": {"ttft_s": 2.0, "tpot_s": 0.075},
                    "roles": [
                        {
                            "role": "colocated",
                            "min_replicas": 1,
                            "max_replicas": gpus // size,
                            "gpus_per_replica": size,
                            "profile": profile,
                        }
                    ],
                    "token_service_share": {"theta_tps": 25.0},
                },
            }
        )
        for name, (profile, size) in MODELS.items()
    )
    spec = {
        "cluster": "local",
        "gpus": [{"node": "a", "gpu_indices": list(range(gpus))}],
        "members": [{"service": name, "initial_awake": counts[name]} for name in MODELS],
        "drain_timeout_s": 2.0,
        **pool,
    }
    return PoolSetup(
        pool=Pool.model_validate({"metadata": {"name": "pool"}, "spec": spec}),
        policies=policies,
        profiles=packaged_profiles(),
        gpu_memory_gib=40.0,
    )


def stepped_trace(
    *, seed: int, duration_s: float, small_rps: float, large_rps: tuple[float, float]
) -> list[TraceRequest]:
    """`small` steady, `large` from one rate to another at half time."""
    half = duration_s / 2
    lengths = (Lengths(mean_tokens=600, cv=0.5, max_tokens=4000), Lengths(mean_tokens=200, cv=0.5, max_tokens=1000))
    curves = {
        "small": Curve(((0.0, small_rps),)),
        "large": Curve(((0.0, large_rps[0]), (half, large_rps[0]), (half + 0.001, large_rps[1]))),
    }
    streams = [
        Stream(service=name, request_rps=curve, prompt=lengths[0], output=lengths[1]) for name, curve in curves.items()
    ]
    return list(requests_of(streams, seed=seed, duration_s=duration_s))
