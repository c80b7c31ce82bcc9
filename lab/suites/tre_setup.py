"""TRE's test bed: three models that share eight A100-40GB, and what each of them promises its clients.

Source: "Cross-Model Autoscaling for Shared LLM Serving" (TRE), §VI: dsllama-8b and dsqwen-7b on one GPU a replica,
dsqwen-14b on two; TPOT 75 ms; sleep 1.87 s, the first one 12.19 s, wake 1.31 s; traces of about 720 s. The paper gives
no TTFT target: 2 s, and 3 s for the large model, are ours, as are floors (one replica each) and the static split, which
gives each model GPUs in proportion to the load that the five probes bring it on average. Its two machines of four GPUs
are one node of eight here, on which a replica of two GPUs takes an aligned pair.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from lab.evaluation.statistics import Slo
from simulator.core.profile import Profile
from simulator.profiles import find_profile, packaged_profiles
from simulator.traces.probes import FOOTPRINT_GPUS, MODELS, POOL_GPUS, PROBE_DURATION_S
from trimtab.config.resources import Metadata, Pool, ServicePolicy
from trimtab.config.specs import (
    GuardLimit,
    Guards,
    NodeGpus,
    PoolMember,
    PoolSpec,
    RoleSpec,
    ServicePolicySpec,
    TokenServiceShare,
)
from trimtab.config.specs import Slo as SloSpec
from trimtab.domain.vocabulary import Role

NODE = "node-0"
GPU_TYPE = "A100-40GB"
GPU_MEMORY_GIB = 40.0
FIRST_SLEEPS_DONE = True
"""Every server has slept once before a trace begins: the actuator sleeps ahead of need, so no first sleep falls in."""
DURATION_S = PROBE_DURATION_S

PROFILE_NAMES = {"dsllama-8b": "a100-8b-tp1", "dsqwen-7b": "a100-7b-tp1", "dsqwen-14b": "a100-14b-tp2"}
SLOS = {
    "dsllama-8b": Slo(ttft_s=2.0, tpot_s=0.075),
    "dsqwen-7b": Slo(ttft_s=2.0, tpot_s=0.075),
    "dsqwen-14b": Slo(ttft_s=3.0, tpot_s=0.075),
}
FLOOR_REPLICAS = 1
STATIC_SPLIT = {"dsllama-8b": 2, "dsqwen-7b": 2, "dsqwen-14b": 2}
ONE_EACH = dict.fromkeys(MODELS, 1)

TRAINING_SEEDS = (101, 102, 103)
"""For whatever is fitted or tuned: loads, thresholds, rules."""
HELD_OUT_SEEDS = tuple(range(1, 11))
"""For what is reported."""


def profiles() -> dict[str, Profile]:
    """The engine profile of each model, by the model's name."""
    packaged = packaged_profiles()
    return {model: find_profile(packaged, PROFILE_NAMES[model]) for model in MODELS}


def service_policies(shares: Mapping[str, TokenServiceShare], *, guards: bool = False) -> tuple[ServicePolicy, ...]:
    """The three ServicePolicies, given what TSS knows of each model.

    With `guards` a model whose latencies are beyond its SLO is no donor: the paper's donor-side guardrails (IV-C), for
    which it gives no limits.
    """
    return tuple(
        ServicePolicy(
            metadata=Metadata(name=model),
            spec=ServicePolicySpec(
                model=model,
                slo=SloSpec(ttft_s=SLOS[model].ttft_s, tpot_s=SLOS[model].tpot_s),
                roles=(
                    RoleSpec(
                        role=Role.COLOCATED,
                        min_replicas=FLOOR_REPLICAS,
                        max_replicas=POOL_GPUS // FOOTPRINT_GPUS[model],
                        gpus_per_replica=FOOTPRINT_GPUS[model],
                        gpu_types=(GPU_TYPE,),
                        profile=PROFILE_NAMES[model],
                    ),
                ),
                token_service_share=shares[model],
                guards=_slo_guards(SLOS[model]) if guards else None,
            ),
        )
        for model in MODELS
    )


def _slo_guards(slo: Slo) -> Guards:
    return Guards(ttft_p95_s=GuardLimit(soft=slo.ttft_s), tpot_p95_s=GuardLimit(soft=slo.tpot_s))


@functools.cache
def plain_pool() -> Pool:
    """The pool with the seed's cadences; the static split is awake at first."""
    return Pool(
        metadata=Metadata(name="tre"),
        spec=PoolSpec(
            cluster="local",
            gpus=(NodeGpus(node=NODE, gpu_indices=tuple(range(POOL_GPUS))),),
            members=tuple(PoolMember(service=model, initial_awake=STATIC_SPLIT[model]) for model in MODELS),
            rescue_interval_s=5.0,
            rebalance_interval_s=10.0,
        ),
    )
