"""The TRE set-up is the seed's and fits its GPUs."""

import pytest

from lab.suites.tre_setup import (
    GPU_MEMORY_GIB,
    HELD_OUT_SEEDS,
    SLOS,
    STATIC_SPLIT,
    TRAINING_SEEDS,
    plain_pool,
    profiles,
    service_policies,
)
from policy_engine.core.pool.gpu_layout import first_awake, make_overlay
from simulator.traces.probes import FOOTPRINT_GPUS, MODELS, POOL_GPUS
from simulator.traces.shaping import static_split
from trimtab.config.specs import TokenServiceShare

SHARES = {model: TokenServiceShare(theta_tps=20.0) for model in MODELS}


def test_sizes_times_and_slos_are_the_seeds():
    found = profiles()
    assert {model: found[model].tensor_parallel for model in MODELS} == FOOTPRINT_GPUS
    assert FOOTPRINT_GPUS == {"dsllama-8b": 1, "dsqwen-7b": 1, "dsqwen-14b": 2}
    for model in MODELS:
        lifecycle = found[model].lifecycle
        assert (lifecycle.sleep_s, lifecycle.first_sleep_s, lifecycle.wake_s) == (1.87, 12.19, 1.31)
        assert found[model].model == model
        assert SLOS[model].tpot_s == 0.075
    assert [SLOS[model].ttft_s for model in MODELS] == [2.0, 2.0, 3.0]
    assert plain_pool().spec.budget_gpus == POOL_GPUS == 8


def test_an_awake_server_fits_beside_all_sleepers_of_its_gpu():
    memory = {model: profile.memory for model, profile in profiles().items()}
    for model in MODELS:
        sleepers = sum(memory[other].sleeper_gib for other in MODELS if other != model)
        assert memory[model].awake_gib + sleepers <= GPU_MEMORY_GIB


def test_every_model_can_be_awake_on_any_aligned_gpus_and_the_split_fills_the_pool():
    policies = {policy.name: policy for policy in service_policies(SHARES)}
    overlay = make_overlay(plain_pool(), policies)
    sets = {model: sorted(item.gpu_indices for item in overlay if item.member.service == model) for model in MODELS}
    assert sets["dsllama-8b"] == sets["dsqwen-7b"] == [(gpu,) for gpu in range(8)]
    assert sets["dsqwen-14b"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    awake = first_awake(plain_pool(), policies, overlay)
    gpus = [gpu for item in overlay if item.replica in awake for gpu in item.gpus]
    assert len(gpus) == len(set(gpus)) == POOL_GPUS
    assert {
        model: sum(item.replica in awake for item in overlay if item.member.service == model) for model in MODELS
    } == (STATIC_SPLIT)


def test_the_split_is_in_proportion_to_the_mean_load():
    assert (
        static_split({"dsllama-8b": 1.5, "dsqwen-7b": 1.5, "dsqwen-14b": 3.0}, FOOTPRINT_GPUS, budget_gpus=POOL_GPUS)
        == STATIC_SPLIT
    )


def test_no_seed_is_both_tuned_on_and_reported():
    assert not set(TRAINING_SEEDS) & set(HELD_OUT_SEEDS)
    assert len(set(HELD_OUT_SEEDS)) >= 5


def test_a_policy_says_what_its_service_promises():
    for policy in service_policies(SHARES):
        assert policy.spec.slo.ttft_s == SLOS[policy.name].ttft_s
        assert policy.spec.roles[0].min_replicas == 1
        assert policy.spec.roles[0].max_replicas * FOOTPRINT_GPUS[policy.name] == POOL_GPUS
    with pytest.raises(KeyError):
        service_policies({})
