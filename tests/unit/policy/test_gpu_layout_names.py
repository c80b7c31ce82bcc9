"""What a pool's replicas are called: as the overlay says, as who lives there already, or by place."""

from dataclasses import replace

import pytest

from policy_engine.core.pool.desired import residents
from policy_engine.core.pool.gpu_layout import OverlayError, Resident, make_overlay, renamed
from policy_engine.core.pool.initial_layout import LayoutInput, lay_out
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.resources import parse_document
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import LifeCycle, Role

CHAT, CODE = MemberKey("chat", Role.COLOCATED), MemberKey("code", Role.COLOCATED)
MADE = ["chat-n0-0", "chat-n0-1", "code-n0-0", "code-n0-1"]


def policy(name):
    return parse_document(
        {
            "apiVersion": "trimtab.dev/v1",
            "kind": "ServicePolicy",
            "metadata": {"name": name},
            "spec": {
                "model": f"m-{name}",
                "slo": {"ttftS": 2, "tpotS": 0.075},
                "roles": [{"role": "colocated", "minReplicas": 0, "maxReplicas": 2}],
                "tokenServiceShare": {"thetaTps": 20},
            },
        }
    )


POLICIES = {name: policy(name) for name in ("chat", "code")}


def pool(**chat):
    return parse_document(
        {
            "apiVersion": "trimtab.dev/v1",
            "kind": "Pool",
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "n0", "gpuIndices": [0, 1]}],
                "members": [{"service": "chat", **chat}, {"service": "code"}],
            },
        }
    )


def names(given_pool, living=()):
    return [item.replica for item in make_overlay(given_pool, POLICIES, living)]


def listed(replica, service="chat", gpus=(0,), **more):
    fields = {"role": Role.COLOCATED, "node": "n0", "gpu_indices": gpus} | more
    return Replica(replica=replica, service=service, life_cycle=LifeCycle.ACTIVE, routable=True, **fields)


def living(*replicas, known=()):
    return residents(replicas, pool(), known)


def test_a_name_that_is_given_wins_over_one_that_lives_there_and_over_one_that_is_made():
    chat_0 = Resident("server-a", CHAT, "n0", (0,))
    code_1 = Resident("server-b", CODE, "n0", (1,))
    elsewhere = Resident("server-c", CODE, "n1", (0,))
    named = pool(overlay=[{"node": "n0", "gpuIndices": [0], "replica": "mine"}, {"node": "n0", "gpuIndices": [1]}])
    assert names(pool()) == MADE
    assert names(pool(), (chat_0, code_1, elsewhere)) == ["server-a", "chat-n0-1", "code-n0-0", "server-b"]
    assert names(named, (chat_0, code_1)) == ["mine", "chat-n0-1", "code-n0-0", "server-b"]


@pytest.mark.parametrize("taken", ["code-n0-1", "chat-n0-1"])
def test_two_replicas_of_one_name_are_refused(taken):
    named = pool(overlay=[{"node": "n0", "gpuIndices": [0], "replica": taken}, {"node": "n0", "gpuIndices": [1]}])
    with pytest.raises(OverlayError, match=taken):
        make_overlay(named, POLICIES)


@pytest.mark.parametrize(
    "other",
    [
        {"service": "chat", "pool": "other"},
        {"service": "chat", "deployment_group": "g"},
        {"service": "chat", "role": Role.DECODE},
        {"service": "chat", "node": "n1"},
        {"service": "chat", "gpus": (0, 1)},
        {"service": "chat", "gpus": ()},
        {"service": "third"},
    ],
)
def test_only_a_free_replica_of_the_member_on_exactly_those_gpus_lends_its_name(other):
    assert names(pool(), living(listed("server-a", **other))) == MADE
    assert names(pool(), living(listed("server-a"))) == ["server-a", *MADE[1:]]
    assert names(pool(), living(listed("server-a", pool="shared"))) == ["server-a", *MADE[1:]]


def test_a_pool_keeps_the_names_that_it_has_unless_another_replica_is_all_there_is():
    known = make_overlay(pool(), POLICIES, (Resident("server-b", CHAT, "n0", (0,)),))
    assert names(pool(), living(known=known)) == ["server-b", *MADE[1:]]
    assert names(pool(), living(listed("server-a"), listed("server-b"), known=known)) == ["server-b", *MADE[1:]]
    assert names(pool(), living(listed("server-a"), listed("server-c"), known=known)) == ["server-a", *MADE[1:]]


def test_whoever_is_awake_stays_awake_under_a_new_name():
    before = make_overlay(pool(initialAwake=1), POLICIES)
    found = living(listed("server-a"), known=before)
    after = make_overlay(pool(initialAwake=1), POLICIES, found)
    awake = renamed(before, after, ("chat-n0-0", "code-n0-1"))
    assert awake == ("code-n0-1", "server-a")
    given = LayoutInput(pool(initialAwake=1), tuple(POLICIES.values()), before, awake, found)
    assert lay_out(given).awake == awake
    assert lay_out(replace(given, residents=())).overlay == before
