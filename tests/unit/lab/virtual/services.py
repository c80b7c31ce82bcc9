"""A scaled service of prefill and decode replicas, small enough for tests."""

from actuator.core.world import Node
from lab.virtual.scaled_run import ScaledSetup
from simulator.profiles import packaged_profiles
from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate
from simulator.traces.model import TraceRequest
from trimtab.config.resources import Metadata, ServicePolicy
from trimtab.config.specs import Proportional, Ratio, RoleSpec, ServicePolicySpec, Slo
from trimtab.domain.vocabulary import Role, TopologyLevel

NAME, PROFILE, GPU = "assist", "h100-8b-tp1", "H100-80GB"


def policy(*, most: int = 4, target_tps: float = 1000.0) -> ServicePolicy:
    roles = tuple(
        RoleSpec(role=role, min_replicas=1, max_replicas=most, gpu_types=(GPU,), profile=PROFILE)
        for role in (Role.PREFILL, Role.DECODE)
    )
    proportional = Proportional(
        target_per_replica=target_tps, scale_out_cooling_s=5, scale_in_cooling_s=10, stabilization_window_s=10
    )
    return ServicePolicy(
        metadata=Metadata(name=NAME),
        spec=ServicePolicySpec(
            model="llama-3.1-8b",
            slo=Slo(ttft_s=1.0, tpot_s=0.04),
            roles=roles,
            ratio=Ratio(prefill=1, decode=1),
            affinity=TopologyLevel.S2,
            proportional=proportional,
        ),
    )


def setup(*, nodes: int = 2, gpus: int = 4, most: int = 4, **fields: object) -> ScaledSetup:
    """Nodes under one S2 switch, each under an S1 of its own; one unit at first."""
    made = tuple(
        Node(node=f"node-{index}", vdc="vdc-0", s2="s2-0", s1=f"s1-{index}", gpu_type=GPU, gpus=gpus)
        for index in range(nodes)
    )
    given = {
        "policy": policy(most=most),
        "nodes": made,
        "profiles": {PROFILE: packaged_profiles()[PROFILE]},
        "gpu_memory_gib": 80.0,
        "first": {Role.PREFILL: 1, Role.DECODE: 1},
    }
    return ScaledSetup(**(given | fields))


def ramp(*, seed: int = 1, top_rps: float = 25.0) -> list[TraceRequest]:
    """Up within a minute, on the top for one and a half, down, and quiet."""
    points = ((0.0, 3.0), (60.0, top_rps), (150.0, top_rps), (170.0, 2.0), (300.0, 2.0))
    load = ServiceLoad(
        service=NAME,
        request_rps=Curve(points),
        prompt=Lengths(mean_tokens=800, cv=0.5, max_tokens=4000),
        output=Lengths(mean_tokens=100, cv=0.5, max_tokens=400),
    )
    return generate([load], duration_s=300.0, seed=seed)
