"""The TRE suite's contenders: what each is, that all of them run, and that tuning sees no held-out seed."""

import itertools
import pickle
from pathlib import Path

import pytest

from lab.baselines.interface import RoleKey
from lab.evaluation.catalogue import find_suite
from lab.evaluation.suite import Options
from lab.evaluation.summaries import Case
from lab.suites.loads import packaged_loads
from lab.suites.tre import OTHER_LOADS, geomean_p95
from lab.suites.tre_policies import CONTENDERS, TUNED_FILE, policies_of, setup_of, tuned_settings
from lab.suites.tre_run import rate_scale
from lab.suites.tre_setup import HELD_OUT_SEEDS, ONE_EACH, SLOS, STATIC_SPLIT, TRAINING_SEEDS
from lab.virtual.control import ShareController
from lab.virtual.pool_run import run_pool
from simulator.traces.model import TraceError
from simulator.traces.probes import MODELS, PROBES, probe
from trimtab.config.poolrules import PoolRules
from trimtab.config.resources import parse_document
from trimtab.config.specs import GuardLimit, PoolSpec
from trimtab.config.yamlfile import read_yaml_documents

EXAMPLE = Path(__file__).parents[4] / "examples" / "tre"
SUITE = find_suite("tre", Options(duration_s=30.0))


def test_the_seeds_policies_are_what_the_seed_says():
    kv = CONTENDERS["kv-auto"]
    assert dict(kv.setting) == {"high": 0.7, "low": 0.3, "period_s": 5.0}
    assert kv.awake == ONE_EACH
    assert all(CONTENDERS[name].awake == STATIC_SPLIT for name in CONTENDERS if name != "kv-auto")
    plain = CONTENDERS["trimtab-plain"].pool({}).spec
    assert plain.rules == PoolRules.plain()
    assert (plain.rescue_interval_s, plain.rebalance_interval_s, plain.residence_s) == (5.0, 10.0, 0.0)
    assert CONTENDERS["oracle"].setting["horizon_s"] == 10.0


def test_the_plain_rules_have_the_papers_form_of_z_and_its_guards():
    contender, loads = CONTENDERS["trimtab-plain"], packaged_loads()
    policies = setup_of(contender, contender.setting, loads).policies
    shipped = {policy.name: policy.spec.token_service_share for policy in policies_of(loads)}
    for policy in policies:
        share, slo = policy.spec.token_service_share, SLOS[policy.name]
        assert 0 < share.prefill_weight < 1
        assert 0 < share.smoothing < 1
        assert share.waiting_weight > 1
        assert shipped[policy.name].waiting_weight is None
        assert share.theta_tps != shipped[policy.name].theta_tps, "fitted with its own weights"
        assert policy.spec.guards.ttft_p95_s == GuardLimit(soft=slo.ttft_s)
        assert policy.spec.guards.tpot_p95_s == GuardLimit(soft=slo.tpot_s)
    assert all(policy.spec.guards is None for policy in policies_of(loads))


def test_the_plain_rules_poll_with_the_papers_fast_cadence():
    """Each poll moves a smoothed share by one window of 5 s; between polls nothing is decided."""
    contender, loads = CONTENDERS["trimtab-plain"], packaged_loads()
    setup = setup_of(contender, contender.setting, loads)
    requests = list(probe("alternating", seed=1, duration_s=60.0))
    looks, polls = [], []

    class Watched(ShareController):
        def tick(self, look, desk):
            before = self._state
            super().tick(look, desk)
            looks.append(look.now_s)
            if self._state is not before:
                polls.append(look.now_s)

    made = contender.controller(requests, loads, contender.setting)
    assert made.period_s == 5.0
    made.__class__ = Watched
    run_pool(setup, requests, made, policy="p", trace="t", seed=1, duration_s=60.0)
    assert len(looks) > 4 * len(polls)
    assert {round(after - before, 6) for before, after in itertools.pairwise(polls)} == {5.0}


def test_trimtab_is_judged_by_what_it_ships():
    spec = CONTENDERS["trimtab"].pool({}).spec
    shipped = PoolSpec(cluster=spec.cluster, gpus=spec.gpus, members=spec.members)
    assert spec == shipped
    assert shipped.rescue_interval_s == 1.0
    slower = CONTENDERS["trimtab-5s"].pool({}).spec
    assert slower.rules == shipped.rules
    assert (slower.rescue_interval_s, slower.rebalance_interval_s) == (5.0, 10.0)


def test_the_example_is_what_the_suite_runs():
    documents = [
        parse_document(item) for name in ("services", "pool") for item in read_yaml_documents(EXAMPLE / f"{name}.yaml")
    ]
    assert tuple(documents[:3]) == policies_of(packaged_loads())
    assert documents[3].spec == CONTENDERS["trimtab"].pool({}).spec


def test_each_policy_knows_what_a_replica_carries():
    costs = packaged_loads().costs
    for policy in policies_of(packaged_loads()):
        share = policy.spec.token_service_share
        assert share.capacity_prefill_tps * costs[policy.name].prompt_token_s == pytest.approx(1.0, rel=0.005)
        assert share.capacity_decode_tps * costs[policy.name].output_token_s == pytest.approx(1.0, rel=0.005)
        assert 0.005 < share.base_tpot_s < SLOS[policy.name].tpot_s


@pytest.mark.parametrize("policy", list(CONTENDERS))
def test_every_contender_serves_a_short_trace_whole(policy):
    case = Case(policy, "alternating", 1)
    result = pickle.loads(pickle.dumps(SUITE.run))(case)
    assert len(result.requests) > 500
    assert result.requests.complete.all()
    assert set(result.requests.services) == set(MODELS)
    first = {point.service: point.desired for point in reversed(result.timeline)}
    if policy in ("static", "kv-auto"):
        assert first == CONTENDERS[policy].awake
    if policy == "static":
        assert result.transitions == 0


def test_loads_have_names_and_unknown_ones_are_refused():
    loads = packaged_loads()
    assert rate_scale("decode", loads) == ("decode", loads.traces["decode"]["main"].rate_scale)
    assert rate_scale("decode@heavy", loads)[1] > rate_scale("decode@light", loads)[1]
    for unknown in ("decode@", "nonsense", "decode@main2"):
        if unknown == "decode@":
            assert rate_scale(unknown, loads) == rate_scale("decode", loads)
            continue
        with pytest.raises(TraceError, match="no load is packaged"):
            rate_scale(unknown, loads)


def test_nothing_is_tuned_on_seeds_that_are_reported():
    assert SUITE.seeds == HELD_OUT_SEEDS
    assert set(SUITE.tunings) == {name for name, contender in CONTENDERS.items() if contender.space}
    for name, tuning in SUITE.tunings.items():
        assert set(tuning.seeds) <= set(TRAINING_SEEDS), name
        assert tuning.traces == tuple(PROBES), name
        assert all(tuning.start[key] in values for key, values in tuning.space.items()), name
    for name, found in tuned_settings().items():
        assert set(found.seeds) <= set(TRAINING_SEEDS), name
        assert CONTENDERS[name].setting == found.setting
        assert SUITE.policies[name].endswith(f"tuned on seeds {', '.join(map(str, found.seeds))}")
    for name in set(SUITE.tunings) - set(tuned_settings()):
        assert SUITE.policies[name].endswith("; not tuned")
    assert "tuned" not in SUITE.policies["static"]
    assert SUITE.tuned_file == TUNED_FILE


def test_a_setting_that_leaves_requests_unanswered_cannot_win():
    suite = find_suite("tre", Options(duration_s=30.0))
    tuning = suite.tunings["kv-auto-1s"]
    result = tuning.run({"high": 0.35, "low": 0.05, "period_s": 1.0}, Case("kv-auto-1s", "real-code", 101))
    assert result.policy == "kv-auto-1s"
    with pytest.raises(ValueError, match="low must be"):
        tuning.run({"high": 0.2, "low": 0.25, "period_s": 1.0}, Case("kv-auto-1s", "real-code", 101))
    assert geomean_p95([]) == float("inf")


def test_other_loads_are_a_suite_of_their_own():
    other = find_suite("tre-loads", Options())
    assert set(other.traces) == {f"{trace}@{load}" for trace in PROBES for load in OTHER_LOADS}
    assert other.bars is None
    assert RoleKey(MODELS[0]).service in other.slos
