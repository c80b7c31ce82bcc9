"""Rules of the arbiter beyond the plain ones: pairing both ways, stages, settling, overload, priorities."""

import dataclasses

import pytest

from policy_engine.core.pool.arbiter import arbitrate
from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.guards import GuardState
from policy_engine.core.pool.pool_candidates import MemberState, PoolCandidates, ReplicaFacts
from policy_engine.core.shared.vocabulary import ClampKind, MemberKey, Rule
from trimtab.config.poolrules import PoolRules
from trimtab.domain.vocabulary import LifeCycle, Role

from .test_arbiter import candidates, member, moves, share


def fast(picture, **rules):
    return arbitrate(dataclasses.replace(picture, rules=PoolRules(**rules)), fast_due=True, slow_due=False)


def slow(picture, **rules):
    return arbitrate(dataclasses.replace(picture, rules=PoolRules(**rules)), fast_due=False, slow_due=True)


SIZES = {"big": 2}


def test_two_small_releases_of_two_services_make_room_for_one_large_wake():
    members = [member("big", 0.3), member("chat", 4.0), member("code", 5.0)]
    verdict = fast(candidates(members, {"big-0", "chat-2", "chat-4", "code-3", "code-5"}, gpus=6, sizes=SIZES))
    assert moves(verdict) == (["chat-2", "code-3"], ["big-2"])
    assert {item.donor for item in verdict.candidates if item.taken} == {"chat + code"}


def test_one_large_release_wakes_two_replicas_of_one_service():
    members = [member("chat", 0.2), member("big", 4.0)]
    verdict = fast(candidates(members, {"chat-0", "big-2", "big-4"}, gpus=6, sizes=SIZES, facts={"chat-1": FAILED}))
    assert moves(verdict) == (["big-2"], ["chat-2", "chat-3"])


def test_what_a_large_release_frees_beside_goes_to_another_in_need():
    """`chat` will have twice what it had; `code` is then the more pressed."""
    members = [member("chat", 0.5), member("code", 0.6), member("big", 4.0)]
    picture = candidates(members, {"chat-0", "code-1", "big-2", "big-4"}, gpus=6, sizes=SIZES)
    verdict = fast(picture)
    assert moves(verdict) == (["big-2"], ["chat-2", "code-3"])
    taken = {(item.receiver, item.donor): item.reason for item in verdict.candidates if item.taken}
    assert taken[("code", "big")] == "it uses what the release frees beside"


@pytest.mark.parametrize(
    "second",
    [
        member("code", 2.0, idle=True),  # nobody asks
        member("code", 0.6, high=1),  # at its ceiling
        member("code", 0.6, fit=False),  # its Z cannot be trusted
    ],
)
def test_who_is_not_in_need_gets_nothing_beside(second):
    members = [member("chat", 0.5, high=2), second, member("big", 4.0)]
    verdict = fast(candidates(members, {"chat-0", "code-1", "big-2", "big-4"}, gpus=6, sizes=SIZES))
    assert moves(verdict) == (["big-2"], ["chat-2"])


FAILED = (LifeCycle.FAILED, None)


def two_stages(prefill, decode, other=None, **guards):
    """`pd` has two prefill and two decode replicas, `chat` two: six GPUs, all awake."""
    pd = {letter: MemberKey("pd", role) for letter, role in (("p", Role.PREFILL), ("d", Role.DECODE))}
    keys = {**pd, "c": MemberKey("chat", Role.COLOCATED)}
    awake = {"p": (0, 1), "d": (2, 3), "c": (4, 5)}
    overlay, facts = [], []
    for letter, found in keys.items():
        for gpu in range(6):
            name = f"{letter}-{gpu}"
            overlay.append(OverlayReplica(name, found, "m", "", "n", (gpu,)))
            up = gpu in awake[letter]
            facts.append(ReplicaFacts(name, LifeCycle.ACTIVE if up else LifeCycle.SLEEPING, up, 0))
    states = {"p": prefill, "d": decode, "c": 3.0 if other is None else other}
    members = tuple(
        MemberState(keys[letter], 1, 6, 0, share(z), guards.get(letter, GuardState())) for letter, z in states.items()
    )
    names = tuple(sorted(f"{letter}-{gpu}" for letter, gpus in awake.items() for gpu in gpus))
    return PoolCandidates(tuple(overlay), names, members, tuple(facts), residence_s=20.0)


def test_a_stage_does_not_give_while_the_other_is_in_need():
    """Prefill is short of capacity; decode looks well served because little reaches it."""
    starving = two_stages(prefill=0.9, decode=9.0, other=0.5)
    verdict = fast(starving)
    assert moves(verdict) is None
    left = {item.donor: item.reason for item in verdict.candidates if item.receiver == "chat"}
    assert left["pd/decode"] == "the Z of its other stage pd/prefill is 0.90"
    assert moves(fast(starving, stage_guard=False)) == (["d-2"], ["c-2"])


def test_a_stage_gives_to_its_own_other_stage():
    verdict = fast(two_stages(prefill=0.3, decode=9.0))
    assert {item.service for item in verdict.transition.releases} == {"pd"}
    assert {item.role for item in verdict.transition.wakes} == {Role.PREFILL}


def test_a_guard_of_the_other_stage_vetoes_too():
    pressed = GuardState(soft="TTFT p95 3 s is beyond its soft limit of 2 s")
    verdict = fast(two_stages(prefill=5.0, decode=9.0, other=0.3, p=pressed))
    left = {item.donor: item.reason for item in verdict.candidates}
    assert left["pd/decode"].startswith("its other stage pd/prefill: TTFT p95 3 s")
    assert verdict.transition is None
    assert ClampKind.STAGE_GUARD in {item.kind for item in verdict.clamps}


def moved(state, ago_s):
    return dataclasses.replace(state, moved_ago_s=ago_s)


def test_who_just_gained_is_not_judged_by_a_window_from_before():
    members = [moved(member("chat", 0.5), 2.0), member("code", 4.0)]
    picture = candidates(members, {"chat-0", "code-1", "code-2", "code-3"})
    verdict = fast(picture, settle_s=5.0)
    assert moves(verdict) is None
    assert [item.reason for item in verdict.candidates] == ["moved 2 s ago: its Z has not seen it"]
    assert moves(slow(picture, settle_s=5.0)) is None
    assert moves(fast(picture, settle_s=0.0)) is not None
    assert moves(fast(dataclasses.replace(picture, members=(moved(members[0], 5.0), members[1])), settle_s=5.0))


def test_who_has_nothing_at_all_does_not_wait_for_its_window():
    members = [moved(member("chat", 0.0), 2.0), member("code", 4.0)]
    assert moves(fast(candidates(members, {"code-1", "code-2", "code-3"}), settle_s=5.0)) == ([], ["chat-0"])


def test_who_just_gave_does_not_give_again_at_once():
    members = [member("chat", 0.5), moved(member("code", 4.0), 2.0)]
    picture = candidates(members, {"chat-0", "code-1", "code-2", "code-3"})
    verdict = fast(picture, settle_s=5.0)
    assert moves(verdict) is None
    assert [item.reason for item in verdict.candidates if item.donor] == ["moved 2 s ago: its Z has not seen it"]


OVERLOADED = [member("chat", 0.82), member("code", 0.97)]


def test_in_an_overload_only_critical_members_are_served_unless_told_to_level():
    """Z 0.97 falls to 0.97 · (8/9)^1.5 = 0.81 with one of nine less: not above 0.82, so nothing is swapped."""
    picture = candidates(OVERLOADED, {"chat-0", *(f"code-{index}" for index in range(1, 10))}, gpus=10)
    assert moves(slow(picture)) is None
    assert moves(slow(picture, overload="level")) is None
    worse = [member("chat", 0.805), OVERLOADED[1]]
    level = slow(dataclasses.replace(picture, members=tuple(worse)), overload="level")
    assert level.rule == Rule.REBALANCE
    assert moves(level) == (["code-1"], ["chat-1"])
    assert "as is everyone's" in level.reason
    assert moves(slow(dataclasses.replace(picture, members=tuple(worse)))) is None


def test_levelling_is_for_overloads_alone():
    members = [member("chat", 0.9), member("code", 0.97), member("rest", 1.2)]
    awake = {"chat-0", *(f"code-{index}" for index in range(1, 10)), "rest-10"}
    assert moves(slow(candidates(members, awake, gpus=11), overload="level")) is None


@pytest.mark.parametrize("priority", [0, 2])
def test_a_weighed_priority_comes_first_and_gives_last(priority):
    weight = 1.5**priority
    chat = dataclasses.replace(member("chat", 0.7, priority=priority), weight=weight)
    members = [chat, member("code", 0.6), member("rest", 4.0)]
    verdict = fast(candidates(members, {"chat-0", "code-1", "rest-2", "rest-3"}), priority_base=1.5)
    assert verdict.transition.wakes[0].service == ("chat" if priority else "code")
    donor = dataclasses.replace(member("chat", 2.0, priority=priority), weight=weight)
    needy = [donor, member("code", 0.5)]
    gives = moves(fast(candidates(needy, {"chat-0", "chat-1", "chat-2", "code-3"}), priority_base=1.5))
    # Z 2 falls to 1.09 with one of three less; divided by 2.25 it is below the receiver's 0.5.
    assert (gives is not None) == (priority == 0)


def test_who_is_shut_neither_gains_nor_gives():
    shut = dataclasses.replace(member("chat", 0.2), shut="chat moves already")
    members = [shut, member("code", 0.5), member("rest", 4.0)]
    verdict = fast(candidates(members, {"chat-0", "code-1", "rest-2", "rest-3"}))
    assert verdict.transition.wakes[0].service == "code"
    assert verdict.candidates[0].reason == "chat moves already"
    donor = dataclasses.replace(member("rest", 4.0), shut="rest moves already")
    refused = fast(candidates([member("code", 0.5), donor], {"code-1", "rest-0", "rest-2", "rest-3"}))
    assert moves(refused) is None


@pytest.mark.parametrize("fast_due", [True, False], ids=["both loops", "the slow loop alone"])
def test_by_the_papers_rule_nothing_is_rebalanced_beside_a_rescue_that_nobody_can_serve(fast_due):
    """`chat` is critical and at its ceiling; `code` could have a replica of `rest`."""
    members = [member("chat", 0.4, high=1), member("code", 0.9), member("rest", 4.0)]
    picture = candidates(members, {"chat-0", "code-1", "rest-2", "rest-3"})

    def decided(members, **rules):
        made = dataclasses.replace(picture, members=tuple(members), rules=PoolRules(**rules))
        return arbitrate(made, fast_due=fast_due, slow_due=True)

    assert moves(decided(members)) == (["rest-2"], ["code-2"])
    held = decided(members, rebalance_waits=True)
    assert moves(held) is None
    assert bool(held.unserved) is fast_due
    well = [member("chat", 1.5, high=1), *members[1:]]
    assert moves(decided(well, rebalance_waits=True)) == (["rest-2"], ["code-2"])


def test_by_the_papers_rule_an_idle_gpu_is_given_beside_a_rescue_that_nobody_can_serve():
    members = [member("chat", 0.4, high=1), member("code", 0.9)]
    picture = candidates(members, {"chat-0", "code-1"})
    verdict = arbitrate(
        dataclasses.replace(picture, rules=PoolRules(rebalance_waits=True)), fast_due=True, slow_due=True
    )
    assert verdict.rule == Rule.IDLE_GPU
    assert moves(verdict) == ([], ["code-2"])


def test_without_a_prediction_a_donor_is_judged_by_the_z_that_it_has():
    """Z 0.5 would fall to 0.5 · (2/3)^1.5 = 0.27 with two replicas of three: below the receiver's 0.4."""
    picture = candidates([member("chat", 0.4), member("code", 0.5)], {"chat-0", "code-1", "code-2", "code-3"})
    assert moves(fast(picture, prediction="power")) is None
    assert moves(fast(picture, prediction="none")) == (["code-1"], ["chat-1"])
    worse = candidates([member("chat", 0.4), member("code", 0.35)], {"chat-0", "code-1", "code-2", "code-3"})
    assert moves(fast(worse, prediction="none")) is None, "chat would only give its last one, and code is worse off"
