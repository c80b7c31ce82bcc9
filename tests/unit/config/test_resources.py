"""Resources: what parses, what is refused with which path, and that YAML, domain and protobuf agree."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.fields import Spec
from trimtab.config.poolrules import LoadRule
from trimtab.config.resources import (
    Pool,
    ResourceError,
    ServicePolicy,
    parse_document,
    parse_pool,
    parse_service_policy,
    pool_to_proto,
    service_policy_to_proto,
    to_document,
)
from trimtab.config.specs import PolicyKind, RoleSpec, ServicePolicySpec, Slo
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Quality, Role, TopologyLevel

POLICY: dict[str, Any] = {
    "apiVersion": "trimtab.dev/v1",
    "kind": "ServicePolicy",
    "metadata": {"name": "chat"},
    "spec": {
        "model": "llama-3.1-8b",
        "slo": {"ttftS": 2.0, "tpotS": 0.075},
        "roles": [
            {"role": "prefill", "minReplicas": 1, "maxReplicas": 4},
            {"role": "decode", "minReplicas": 1, "maxReplicas": 8, "gpusPerReplica": 2},
        ],
        "proportional": {"metric": "decode-tps", "targetPerReplica": 900},
        "ratio": {"prefill": 1, "decode": 2},
        "latencyBrake": {"ttftTargetS": 1.0},
        "guards": {"ttftP95S": {"soft": 1.0, "hard": 3.0}},
        "affinity": "s2",
    },
}
RULES = (
    "allocation", "load", "prediction", "stageGuard", "settleS", "priorityBase", "overload", "donorMargin",
    "maxTransitions", "rebalanceWaits",
)  # fmt: skip
POOL: dict[str, Any] = {
    "apiVersion": "trimtab.dev/v1",
    "kind": "Pool",
    "metadata": {"name": "main"},
    "spec": {
        "cluster": "local",
        "gpus": [{"node": "node-0", "gpuIndices": [0, 1]}],
        "members": [
            {
                "service": "chat",
                "initialAwake": 1,
                "overlay": [{"node": "node-0", "gpuIndices": [0], "replica": "own-0"}],
            }
        ],
    },
}


def edited(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with the field at a dotted path (numbers index lists) replaced, or removed for `...`."""
    document = copy.deepcopy(base)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target: Any = document
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return document


@pytest.mark.parametrize(
    ("base", "path", "value", "field", "words"),
    [
        (POLICY, "spec.roles.0.minReplicas", 9, "spec.roles[0]", "minReplicas 9 is above maxReplicas 4"),
        (POLICY, "spec.colour", "red", "spec.colour", "unknown field"),
        (POLICY, "spec.model", ..., "spec.model", "required"),
        (POLICY, "spec.slo.ttftS", float("nan"), "spec.slo.ttftS", "finite"),
        (POLICY, "spec.slo.ttftS", float("inf"), "spec.slo.ttftS", ""),
        (POLICY, "spec.slo.ttftS", -1, "spec.slo.ttftS", "must be at least 1e-06, not -1"),
        (POLICY, "spec.roles.0.role", "colocated", "spec", "prefill and decode"),
        (POLICY, "spec.roles.0.role", "prefetch", "spec.roles[0].role", ""),
        (POLICY, "spec.ratio", ..., "spec", "needs a ratio"),
        (POLICY, "spec.ratio.prefill", 0, "spec.ratio.prefill", "must be at least 1, not 0"),
        (POLICY, "spec.proportional.metric", "gpu-utilisation", "spec.proportional.metric", "decode-tps"),
        (POLICY, "spec.proportional", ..., "spec", "latencyBrake works beside proportional"),
        (POLICY, "spec.guards.ttftP95S.soft", 5, "spec.guards.ttftP95S", "soft 5 is above hard 3"),
        (POLICY, "metadata.name", "Chat_1", "metadata.name", "lower-case"),
        (POLICY, "metadata.name", "x" * 64, "metadata.name", "63"),
        (POLICY, "kind", "Deployment", "kind", "ServicePolicy or Pool"),
        (POLICY, "apiVersion", "v1", "apiVersion", "trimtab.dev/v1"),
        (POOL, "spec.gpus.0.gpuIndices", [0, 0], "spec.gpus[0].gpuIndices", "named twice"),
        (POOL, "spec.gpus.0.gpuIndices", [], "spec.gpus[0].gpuIndices", "at least 1"),
        (POOL, "spec.members.0.overlay.0.gpuIndices", [7], "spec", "GPU 7 of node-0"),
        (POOL, "spec.sleepLevel", 3, "spec.sleepLevel", "1 or 2"),
        (POOL, "spec.members", [], "spec.members", "at least 1"),
    ],
)
def test_a_bad_resource_is_refused_with_the_path_of_the_field(
    base: dict[str, Any], path: str, value: object, field: str, words: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_document(edited(base, path, value))
    by_field = {item.field: item.description for item in caught.value.violations}
    assert field in by_field
    assert words in by_field[field]


@pytest.mark.parametrize(
    ("base", "path", "value", "field", "said"),
    [
        (
            POOL, "spec.rules", {"settleS": "2"}, "spec.rules.settleS",
            "must be a number, not the text '2': leave the quotes out",
        ),
        (
            POOL, "spec.rules", {"settleS": "1e-2"}, "spec.rules.settleS",
            "must be a number, not the text '1e-2': leave the quotes out",
        ),
        (POOL, "spec.rules", {"settleS": "2s"}, "spec.rules.settleS", "must be a number, not the text '2s'"),
        (POOL, "spec.rules", {"settleS": "NaN"}, "spec.rules.settleS", "must be a number, not the text 'NaN'"),
        (POOL, "spec.rules", {"settleS": True}, "spec.rules.settleS", "must be a number, not true"),
        (POOL, "spec.rules", {"settleS": None}, "spec.rules.settleS", "must be a number, not null"),
        (POOL, "spec.rules", {"settleS": [2]}, "spec.rules.settleS", "must be a number, not a list"),
        (POOL, "spec.rules", {"stageGuard": "yes"}, "spec.rules.stageGuard", "must be true or false, not 'yes'"),
        (POOL, "spec.rules", {"stageGuard": 1}, "spec.rules.stageGuard", "must be true or false, not 1"),
        (POOL, "spec.rules", {"maxTransitions": 1.5}, "spec.rules.maxTransitions", "must be a whole number, not 1.5"),
        (POOL, "spec.rules", {"settelS": 2}, "spec.rules.settelS", "unknown field, did you mean settleS?"),
        (
            POOL,
            "spec.rules",
            {"colour": "red"},
            "spec.rules.colour",
            f"unknown field; there are {', '.join(RULES)}",
        ),
        (POOL, "spec.rules", "plain", "spec.rules", "must be a mapping of fields, not 'plain'"),
        (POOL, "spec.rules", [1], "spec.rules", "must be a mapping of fields, not a list"),
        (POOL, "spec.rules", {"load": 0.9}, "spec.rules.load", "must be a mapping of fields, not 0.9"),
        (
            POOL, "spec.rules", {"allocation": "fair"}, "spec.rules.allocation",
            "must be 'share', 'level' or 'load', not 'fair'",
        ),
        (
            POOL, "spec.gpus.0.gpuIndices", ["0"], "spec.gpus[0].gpuIndices[0]",
            "must be a number, not the text '0': leave the quotes out",
        ),
        (POOL, "spec.gpus.0.gpuIndices", [True], "spec.gpus[0].gpuIndices[0]", "must be a number, not true"),
        (POOL, "spec.gpus", {"node": "n"}, "spec.gpus", "must be a list, not a mapping"),
        (POOL, "spec.sleepLevel", "2", "spec.sleepLevel", "must be 1 or 2, not '2'"),
        (POOL, "spec.rescueIntervalS", 0, "spec.rescueIntervalS", "must be at least 1e-06, not 0"),
        (
            POOL, "spec.rescueIntervalS", "1", "spec.rescueIntervalS",
            "must be a number, not the text '1': leave the quotes out",
        ),
        (POOL, "spec.rebalanceIntervalS", -1, "spec.rebalanceIntervalS", "must be at least 1e-06, not -1"),
        (POOL, "spec.members", [], "spec.members", "must have at least 1, and has 0"),
        (POOL, "spec.cluster", 7, "spec.cluster", "must be text, not 7"),
        (
            POLICY, "spec.roles.1.gpusPerReplica", "2", "spec.roles[1].gpusPerReplica",
            "must be a number, not the text '2': leave the quotes out",
        ),
        (
            POLICY, "spec.latencyBrake.ttftTargetS", "1", "spec.latencyBrake.ttftTargetS",
            "must be a number, not the text '1': leave the quotes out",
        ),
        (
            POLICY, "spec.guards", {"kvUsageRatio": {"soft": 90}}, "spec.guards.kvUsageRatio.soft",
            "must be at most 1, not 90",
        ),
        (POLICY, "spec.guards", {"lostRatio": {"hard": 2}}, "spec.guards.lostRatio.hard", "must be at most 1, not 2"),
        (POLICY, "spec.slo.tpotS", "x" * 100, "spec.slo.tpotS", f"must be a number, not the text '{'x' * 38}…"),
        (POLICY, "spec.ratio.strict", "true", "spec.ratio.strict", "must be true or false, not 'true'"),
    ],
)  # fmt: skip
def test_a_fault_is_told_in_words_of_our_own_with_what_is_there(
    base: dict[str, Any], path: str, value: object, field: str, said: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_document(edited(base, path, value))
    assert str(caught.value) == f"{field}: {said}"


@pytest.mark.parametrize(
    ("base", "path", "value", "field", "said"),
    [
        (
            POOL, "spec.rules", {"load": {"rescueAbove": 0.6}}, "spec.rules.load",
            "donorBelow 0.8 is above rescueAbove 0.6, from which a member is itself in need: lower donorBelow",
        ),
        (POOL, "spec.rules", {"load": {"levelAbove": 2}}, "spec.rules.load", "levelAbove 2 is above rescueAbove 0.9"),
        (
            POOL, "spec.rules", {"allocation": "load", "load": {"enabled": False}}, "spec.rules",
            "allocation load goes by ρ, which load.enabled turns off",
        ),
        (
            POOL, "spec.rules", {"allocation": "share", "load": {"latencyGain": 0.2}}, "spec.rules",
            "load.latencyGain 0.2 does nothing with allocation share: set allocation to level, or leave",
        ),
        (POOL, "spec.rules", {"allocation": "load", "load": {"latencyGain": 1}}, "spec.rules", "with allocation load"),
        (
            POOL, "spec.rules", {"load": {"enabled": False, "latencyGain": 0.2}}, "spec.rules",
            "load.latencyGain 0.2 goes by ρ, which load.enabled turns off",
        ),
        (
            POOL, "spec.rebalanceIntervalS", 0.5, "spec",
            "rebalanceIntervalS 0.5 is below rescueIntervalS 1: the slow loop cannot be the faster one",
        ),
        (
            POLICY, "spec.guards", {"ttftP95S": {}}, "spec.guards.ttftP95S",
            "a guard without a limit: give soft, hard or both",
        ),
        (POLICY, "spec.latencyBrake", {"ttftTargetS": 1, "beta": 2}, "spec.latencyBrake", "beta 2 is above alpha 1.5"),
        (
            POLICY, "spec.tokenServiceShare", {"thetaTps": 20, "criticalBelow": 0.9, "hysteresis": 0.3},
            "spec.tokenServiceShare",
            "the regions overlap: criticalBelow 0.9 + hysteresis 0.3 must stay below surplusAbove 1.3 − hysteresis",
        ),
        (POLICY, "spec.roles.0.minReplicas", 5, "spec.roles[0]", "minReplicas 5 is above maxReplicas 4: lower one"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused_with_both_values_and_what_to_do(
    base: dict[str, Any], path: str, value: object, field: str, said: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_document(edited(base, path, value))
    (violation,) = caught.value.violations
    assert violation.field == field
    assert said in violation.description
    assert "\n" not in violation.description


@pytest.mark.parametrize("number", [2, 2.0, 0])
def test_numbers_are_numbers_whole_or_not(number: float) -> None:
    pool = parse_document(edited(POOL, "spec.rules", {"settleS": number}))
    assert isinstance(pool, Pool)
    assert pool.spec.rules.settle_s == number


def test_what_is_not_a_finite_number_is_refused_by_grpc_too() -> None:
    pool = pool_to_proto(parse_document(POOL))
    pool.spec.rules.settle_s = float("nan")
    with pytest.raises(ResourceError, match=r"^spec.rules.settleS: must be a number, not the text 'NaN'$"):
        parse_pool(pool)


def test_a_wrong_item_is_not_also_reported_as_a_list_that_is_too_short() -> None:
    with pytest.raises(ResourceError) as caught:
        parse_document(edited(POOL, "spec.members.0.initialAwake", -1))
    assert [item.field for item in caught.value.violations] == ["spec.members[0].initialAwake"]


@pytest.mark.parametrize("document", [None, [], "text", 7, {}])
def test_a_document_that_is_no_resource_is_refused(document: object) -> None:
    with pytest.raises(ResourceError):
        parse_document(document)


def test_every_fault_of_one_resource_is_reported_at_once() -> None:
    broken = edited(edited(POLICY, "spec.slo.ttftS", 0), "spec.roles.1.maxReplicas", 0)
    with pytest.raises(ResourceError) as caught:
        parse_document(broken)
    assert {item.field for item in caught.value.violations} == {"spec.slo.ttftS", "spec.roles[1].maxReplicas"}


@pytest.mark.parametrize(
    ("base", "path", "value", "field", "wanted"),
    [
        (POOL, "spec.rules", {"load": {"lead_s": 2}}, "spec.rules.load.lead_s", "leadS"),
        (POOL, "spec.rules", {"load": {"leadS": 2, "lead_s": 2}}, "spec.rules.load.lead_s", "leadS"),
        (POOL, "spec.rescue_interval_s", 3, "spec.rescue_interval_s", "rescueIntervalS"),
        (POOL, "spec.members.0.initial_awake", 1, "spec.members[0].initial_awake", "initialAwake"),
        (POLICY, "spec.guards", {"e2e_p95_s": {"soft": 1}}, "spec.guards.e2e_p95_s", "e2eP95S"),
        (POLICY, "api_version", "trimtab.dev/v1", "api_version", "apiVersion"),
    ],
)
def test_a_key_in_python_s_spelling_is_refused_with_the_one_to_write(
    base: dict[str, Any], path: str, value: object, field: str, wanted: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        parse_document(edited(base, path, value))
    assert str(caught.value) == f"{field}: unknown field: write {wanted}"


def test_a_required_field_in_python_s_spelling_is_named_too() -> None:
    document = edited(POLICY, "spec.slo", {"ttft_s": 1, "tpotS": 0.1})
    with pytest.raises(ResourceError, match=r"spec\.slo\.ttft_s: unknown field: write ttftS"):
        parse_document(document)


@pytest.mark.parametrize("rules", [{"allocation": "share"}, {"allocation": "load"}, {"load": {"enabled": False}}])
@pytest.mark.parametrize("gain", [{}, {"latencyGain": LoadRule().latency_gain}, {"latencyGain": 0}])
def test_rules_that_go_without_the_latency_are_kept_with_its_default_spelt_out(
    rules: dict[str, Any], gain: dict[str, Any]
) -> None:
    pool = parse_document(edited(POOL, "spec.rules", {**rules, "load": {**rules.get("load", {}), **gain}}))
    assert isinstance(pool, Pool)
    assert parse_document(to_document(pool)) == pool
    assert parse_pool(pool_to_proto(pool)) == pool


def test_a_resource_survives_the_way_over_grpc_and_back_to_yaml() -> None:
    policy = parse_document(POLICY)
    assert isinstance(policy, ServicePolicy)
    assert parse_service_policy(service_policy_to_proto(policy)) == policy
    assert parse_document(to_document(policy)) == policy
    pool = parse_document(POOL)
    assert isinstance(pool, Pool)
    assert parse_pool(pool_to_proto(pool)) == pool
    assert parse_document(to_document(pool)) == pool


def test_a_zero_that_was_asked_for_is_not_taken_for_the_default() -> None:
    policy = parse_document(edited(POLICY, "spec.proportional.scaleOutTolerance", 0))
    assert isinstance(policy, ServicePolicy)
    proportional = parse_service_policy(service_policy_to_proto(policy)).spec.proportional
    assert proportional is not None
    assert proportional.scale_out_tolerance == 0
    assert proportional.scale_in_tolerance == 0.1


def test_an_empty_message_names_what_it_lacks() -> None:
    with pytest.raises(ResourceError) as caught:
        parse_service_policy(policy_pb2.ServicePolicy())
    assert {item.field for item in caught.value.violations} == {"metadata", "spec"}


def test_the_slow_loop_is_twice_the_fast_one_unless_it_is_given() -> None:
    for asked, expected in (({}, 2.0), ({"rescueIntervalS": 5}, 10.0), ({"rebalanceIntervalS": 30}, 30.0)):
        document = copy.deepcopy(POOL)
        for name in ("rescueIntervalS", "rebalanceIntervalS"):
            document["spec"].pop(name, None)
        document["spec"] |= asked
        pool = parse_document(document)
        assert isinstance(pool, Pool)
        assert pool.spec.rebalance_interval_s == expected
        assert parse_pool(pool_to_proto(pool)) == pool


SHARE = {"thetaTps": 500.0}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, PolicyKind.SCALED),
        ({"tokenServiceShare": SHARE}, PolicyKind.SCALED),
        ({"proportional": ..., "latencyBrake": ..., "tokenServiceShare": SHARE}, PolicyKind.POOLED),
        ({"proportional": ..., "latencyBrake": ..., "roles.*.tokenServiceShare": SHARE}, PolicyKind.POOLED),
    ],
    ids=["proportional", "both", "share of the service", "share of every stage"],
)
def test_the_blocks_of_a_policy_say_what_kind_it_is(changes: dict[str, Any], kind: PolicyKind) -> None:
    document = copy.deepcopy(POLICY)
    for path, value in changes.items():
        if path.startswith("roles.*."):
            for role in document["spec"]["roles"]:
                role[path.removeprefix("roles.*.")] = value
        elif value is ...:
            del document["spec"][path]
        else:
            document["spec"][path] = value
    policy = parse_document(document)
    assert isinstance(policy, ServicePolicy)
    assert policy.spec.kind == kind
    if kind == PolicyKind.SCALED:
        assert policy.spec.scaling == policy.spec.proportional
    else:
        with pytest.raises(ValueError, match="a pooled service has no proportional policy"):
            _ = policy.spec.scaling


def test_a_policy_that_says_not_how_to_decide_is_observed_only() -> None:
    roles = (RoleSpec(role=Role.COLOCATED, max_replicas=1),)
    bare = ServicePolicySpec.model_construct(model="m", slo=Slo(ttft_s=1.0, tpot_s=0.1), roles=roles)
    assert bare.kind == PolicyKind.OBSERVED


def test_every_field_of_the_contract_is_known_to_the_domain() -> None:
    """A field added to one side alone would be dropped without a word."""
    for message, model in (
        (policy_pb2.ServicePolicySpec, ServicePolicy.model_fields["spec"].annotation),
        (policy_pb2.PoolSpec, Pool.model_fields["spec"].annotation),
    ):
        assert model is not None
        _same_fields(message.DESCRIPTOR, model)


def _same_fields(message: Any, model: Any) -> None:
    aliases = {name: item.alias or to_camel(name) for name, item in model.model_fields.items()}
    assert {item.name: item.json_name for item in message.fields} == aliases
    for item in message.fields:
        if item.message_type is not None:
            _same_fields(item.message_type, _part(model.model_fields[item.name].annotation))


def _part(annotation: Any) -> Any:
    """The resource's part that a field holds: itself, or of a tuple or an optional the one in it."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next(part for part in map(_part, get_args(annotation)) if part is not None) if get_args(annotation) else None


@given(
    role=st.sampled_from(["colocated"]),
    low=st.integers(0, 50),
    more=st.integers(0, 50),
    theta=st.floats(0.001, 1e5),
    critical=st.floats(0.01, 0.9),
    surplus=st.floats(1.1, 50),
    priority=st.integers(-1000, 1000),
)
def test_any_valid_policy_survives_the_round_trip(
    role: str, low: int, more: int, theta: float, critical: float, surplus: float, priority: int
) -> None:
    document = edited(POLICY, "spec.roles", [{"role": role, "minReplicas": low, "maxReplicas": max(1, low + more)}])
    for name in ("ratio", "proportional", "latencyBrake"):
        document = edited(document, f"spec.{name}", ...)
    document["spec"] |= {
        "priority": priority,
        "tokenServiceShare": {
            "thetaTps": theta,
            "criticalBelow": critical,
            "surplusAbove": surplus,
            "hysteresis": 0.01,
        },
    }
    policy = parse_document(document)
    assert isinstance(policy, ServicePolicy)
    assert parse_service_policy(service_policy_to_proto(policy)) == policy


@pytest.mark.parametrize("words", [Role, Quality, LifeCycle, HoldOwner, TopologyLevel])
def test_every_word_maps_onto_its_protobuf_number_and_back(words: Any) -> None:
    assert len({word.number for word in words}) == len(list(words))
    for word in words:
        assert word.number > 0
        assert words.from_number(word.number) is word
    for unknown in (0, 99):
        with pytest.raises(ValueError, match=words.__name__):
            words.from_number(unknown)
