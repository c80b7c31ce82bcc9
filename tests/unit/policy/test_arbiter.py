"""The arbiter: who receives, who gives, in which order, and what forbids it."""

import pytest

from policy_engine.core.pool.arbiter import arbitrate
from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.guards import GuardState
from policy_engine.core.pool.pool_candidates import MemberState, PoolCandidates, ReplicaFacts
from policy_engine.core.pool.predict import power_z
from policy_engine.core.pool.tss import Share
from policy_engine.core.shared.vocabulary import ClampKind, MemberKey, Region, Rule
from trimtab.domain.vocabulary import LifeCycle, Role


def key(name):
    return MemberKey(name, Role.COLOCATED)


def share(z, *, idle=False, fit=True, release=True):
    region = Region.SURPLUS if idle or (z or 0) > 1.3 else Region.CRITICAL if (z or 0) < 0.8 else Region.NOMINAL
    return Share(z, region, idle, not idle, 0.0 if idle else 10.0, None, fit, release)


def member(name, z, *, low=1, high=8, ago_s=None, soft="", hard="", priority=0, **more):
    return MemberState(key(name), low, high, priority, share(z, **more), GuardState(soft or hard, hard), ago_s)


def candidates(members, awake, *, gpus=4, sizes=None, facts=None, barred=(), residence_s=20.0):
    """One node; every member has a replica on every aligned set, called like `chat-0`."""
    sizes = sizes or {}
    overlay = []
    for item in members:
        size = sizes.get(item.key.service, 1)
        overlay += [
            OverlayReplica(f"{item.key.service}-{first}", item.key, "m", "", "n", tuple(range(first, first + size)))
            for first in range(0, gpus - size + 1, size)
        ]
    states = {item.replica: LifeCycle.ACTIVE if item.replica in awake else LifeCycle.SLEEPING for item in overlay}
    loads = dict.fromkeys(states, 0)
    for name, (life_cycle, load) in (facts or {}).items():
        states[name], loads[name] = life_cycle, load
    return PoolCandidates(
        overlay=tuple(overlay),
        awake=tuple(sorted(awake)),
        members=tuple(members),
        replicas=tuple(
            ReplicaFacts(name, state, state == LifeCycle.ACTIVE, loads[name]) for name, state in sorted(states.items())
        ),
        residence_s=residence_s,
        barred=frozenset(barred),
    )


def moves(verdict):
    if verdict.transition is None:
        return None
    return (
        sorted(change.replica for change in verdict.transition.releases),
        sorted(change.replica for change in verdict.transition.wakes),
    )


def fast(scene):
    return arbitrate(scene, fast_due=True, slow_due=False)


def slow(scene):
    return arbitrate(scene, fast_due=False, slow_due=True)


def test_a_critical_member_takes_from_one_in_surplus():
    verdict = fast(candidates([member("chat", 0.4), member("code", 4.0)], {"chat-0", "code-1", "code-2", "code-3"}))
    assert moves(verdict) == (["code-1"], ["chat-1"])
    assert verdict.rule == Rule.RESCUE_CRITICAL
    assert [(item.donor, item.taken) for item in verdict.candidates] == [("", False), ("code", True)]


def test_idle_gpus_come_before_donors():
    verdict = fast(candidates([member("chat", 0.4), member("code", 4.0)], {"chat-0", "code-1", "code-2"}))
    assert moves(verdict) == ([], ["chat-3"])
    assert verdict.rule == Rule.RESCUE_CRITICAL


def test_own_held_replicas_come_before_donors():
    facts = {"chat-1": (LifeCycle.DRAINING, 0)}
    verdict = fast(candidates([member("chat", 0.4), member("code", 4.0)], {"chat-0", "code-2", "code-3"}, facts=facts))
    assert moves(verdict) == ([], ["chat-1"])


def test_another_members_straggler_keeps_its_gpu_from_being_idle():
    facts = {"code-1": (LifeCycle.DRAINING, 3)}
    verdict = fast(candidates([member("chat", 0.4), member("code", 1.0)], {"chat-0", "code-2", "code-3"}, facts=facts))
    assert moves(verdict) is None


def test_hard_guards_preempt_lower_z():
    members = [member("chat", 0.3), member("code", 1.1, hard="TTFT"), member("idle", 3.0, idle=True)]
    verdict = fast(candidates(members, {"chat-0", "code-1", "idle-2", "idle-3"}))
    assert verdict.rule == Rule.RESCUE_HARD_GUARD
    assert verdict.receiver == key("code")


def test_the_lowest_z_is_rescued_first():
    members = [member("a", 0.5), member("b", 0.2), member("c", 3.0, idle=True)]
    assert fast(candidates(members, {"a-0", "b-1", "c-2", "c-3"})).receiver == key("b")


def test_priority_breaks_a_tie():
    members = [member("a", 0.5), member("b", 0.5, priority=5), member("c", 3.0, idle=True)]
    assert fast(candidates(members, {"a-0", "b-1", "c-2", "c-3"})).receiver == key("b")


@pytest.mark.parametrize(
    ("donor", "kind", "words"),
    [
        (member("code", 4.0, low=3), ClampKind.MIN_REPLICAS, "floor of 3"),
        (member("code", 4.0, soft="KV usage"), ClampKind.LATENCY_BRAKE, "KV usage"),
        (member("code", 4.0, ago_s=5.0), ClampKind.SCALE_IN_COOLING, "5 s ago"),
        (member("code", 4.0, release=False), ClampKind.SIGNAL_QUALITY, "not fit"),
        (member("code", 0.85), None, "would fall to 0.46"),
    ],
)
def test_what_forbids_a_donor(donor, kind, words):
    verdict = fast(candidates([member("chat", 0.6), donor], {"chat-0", "code-1", "code-2", "code-3"}))
    assert moves(verdict) is None
    assert "nothing can serve it" in verdict.holding
    left = next(item for item in verdict.candidates if item.donor == "code")
    assert words in left.reason
    assert {clamp.kind for clamp in verdict.clamps} == ({kind} if kind else set())


def test_residence_ends():
    members = [member("chat", 0.4), member("code", 4.0, ago_s=20.0)]
    assert moves(fast(candidates(members, {"chat-0", "code-1", "code-2", "code-3"}))) is not None


def test_a_deficit_is_not_swapped_for_another():
    """Rebalancing leaves the donor above 1; a rescue leaves it above the receiver."""
    members = [member("chat", 0.9), member("code", 1.6)]
    awake = {"chat-0", "chat-1", "code-2", "code-3"}
    assert moves(slow(candidates(members, awake))) is None  # 1.6 · 0.5^1.5 = 0.57
    richer = [member("chat", 0.9), member("code", 3.0)]
    assert moves(slow(candidates(richer, awake))) == (["code-2"], ["chat-2"])
    rescue = [member("chat", 0.5), member("code", 1.6)]
    assert moves(fast(candidates(rescue, awake))) == (["code-2"], ["chat-2"])


def test_the_least_loaded_replica_is_taken():
    facts = {"code-1": (LifeCycle.ACTIVE, 7), "code-2": (LifeCycle.ACTIVE, 2), "code-3": (LifeCycle.ACTIVE, 5)}
    scene = candidates(
        [member("chat", 0.4), member("code", 4.0)], {"chat-0", "code-1", "code-2", "code-3"}, facts=facts
    )
    assert moves(fast(scene)) == (["code-2"], ["chat-2"])


def test_a_two_gpu_wake_releases_the_pair_that_two_services_hold():
    members = [member("big", 0.3), member("a", 4.0), member("b", 4.0)]
    awake = {"big-0", "a-2", "b-3", "a-4", "a-5", "b-6", "b-7"}
    facts = dict.fromkeys(("a-4", "a-5", "b-6", "b-7"), (LifeCycle.ACTIVE, 9))
    verdict = fast(candidates(members, awake, gpus=8, sizes={"big": 2}, facts=facts))
    assert moves(verdict) == (["a-2", "b-3"], ["big-2"])
    assert [item.donor for item in verdict.candidates if item.taken] == ["a + b"]


def test_one_large_release_makes_room_for_two_small_wakes():
    members = [member("small", 0.3), member("big", 5.0)]
    verdict = fast(candidates(members, {"small-0", "small-1", "big-2", "big-4", "big-6"}, gpus=8, sizes={"big": 2}))
    assert moves(verdict) == (["big-2"], ["small-2", "small-3"])


def test_the_second_wake_stays_below_the_ceiling():
    members = [member("small", 0.3, high=3), member("big", 5.0)]
    verdict = fast(candidates(members, {"small-0", "small-1", "big-2", "big-4", "big-6"}, gpus=8, sizes={"big": 2}))
    assert moves(verdict) == (["big-2"], ["small-2"])


def test_a_member_at_its_ceiling_receives_nothing():
    verdict = fast(candidates([member("chat", 0.2, high=1), member("code", 4.0)], {"chat-0", "code-1", "code-2"}))
    assert moves(verdict) is None or verdict.receiver != key("chat")
    assert any("ceiling" in item.reason for item in verdict.candidates)


def test_idle_gpus_go_to_the_lowest_z_with_demand():
    members = [member("chat", 2.0), member("code", 1.5), member("rest", 1.4, idle=True)]
    awake = {"chat-0", "code-1", "rest-2"}
    assert moves(fast(candidates(members, awake))) is None
    verdict = slow(candidates(members, awake))
    assert moves(verdict) == ([], ["code-3"])
    assert verdict.rule == Rule.IDLE_GPU


def test_nobody_without_demand_gets_idle_gpus():
    members = [member("chat", 2.0, idle=True), member("code", 1.5, idle=True)]
    assert moves(slow(candidates(members, {"chat-0", "code-1"}))) is None


def test_a_rescue_that_found_a_source_excludes_the_slow_loop():
    members = [member("a", 0.3), member("b", 0.9), member("c", 9.0)]
    verdict = arbitrate(candidates(members, {"a-0", "b-1", "c-2", "c-3"}), fast_due=True, slow_due=True)
    assert verdict.rule == Rule.RESCUE_CRITICAL
    assert len(verdict.transition.wakes) == 1


def test_a_rescue_that_nothing_can_serve_does_not_hold_the_slow_loop():
    members = [member("a", 0.3, high=1), member("b", 0.9), member("c", 9.0)]
    verdict = arbitrate(candidates(members, {"a-0", "b-1", "c-2", "c-3"}), fast_due=True, slow_due=True)
    assert verdict.rule == Rule.REBALANCE
    assert verdict.receiver == key("b")


def test_floor_repair_and_lowered_ceilings():
    raised = fast(
        candidates([member("chat", 2.0, low=2), member("code", 2.0)], {"chat-0", "code-1", "code-2", "code-3"})
    )
    assert raised.rule == Rule.FLOOR_REPAIR
    assert raised.receiver == key("chat")
    lowered = fast(candidates([member("chat", 2.0, high=1), member("code", 2.0)], {"chat-0", "chat-1", "code-2"}))
    assert lowered.rule == Rule.BOUNDS
    assert moves(lowered) == (["chat-0"], [])


def test_lost_capacity_is_rescued_while_it_is_felt():
    facts = {"chat-0": (LifeCycle.FAILED, 0)}
    awake = {"chat-0", "chat-1", "code-2"}
    felt = fast(candidates([member("chat", 0.9), member("code", 2.0)], awake, facts=facts))
    assert felt.rule == Rule.RESCUE_LOST_CAPACITY
    assert moves(felt) == ([], ["chat-3"])
    unfelt = fast(candidates([member("chat", 1.5), member("code", 2.0)], awake, facts=facts))
    assert moves(unfelt) is None


def test_a_failed_replica_does_not_count_towards_the_donors_floor():
    facts = {"code-1": (LifeCycle.FAILED, 0)}
    members = [member("chat", 0.3), member("code", 5.0, low=2)]
    verdict = fast(candidates(members, {"chat-0", "code-1", "code-2", "code-3"}, facts=facts))
    assert moves(verdict) is None


STARTS = (LifeCycle.STARTING, None)


def test_a_wake_without_a_waiting_server_comes_before_one_with():
    """code-1 would be taken by name; but whoever takes its place has to let a waiting server start first."""
    members = [member("chat", 0.4), member("code", 4.0), member("rest", 3.0, idle=True, low=0)]
    awake = {"chat-0", "code-1", "code-2", "code-3"}
    verdict = fast(candidates(members, awake, facts={"rest-1": STARTS}))
    assert moves(verdict) == (["code-2"], ["chat-2"])


def test_without_a_better_plan_a_waiting_server_starts_first():
    members = [member("chat", 0.4), member("code", 4.0), member("rest", 3.0, idle=True, low=0)]
    awake = {"chat-0", "code-1", "code-2", "code-3"}
    verdict = fast(candidates(members, awake, facts={f"rest-{n}": STARTS for n in range(4)}))
    assert moves(verdict) == (["code-1"], ["chat-1"])
    assert verdict.reason.endswith("waiting server rest-1 starts on its GPUs")


def test_the_receivers_own_waiting_replica_is_a_wake_of_last_resort():
    awake = {"chat-0", "code-1", "code-2", "code-3"}
    members = [member("chat", 0.4), member("code", 4.0)]
    one_sleeps = fast(candidates(members, awake, facts={"chat-1": STARTS, "chat-2": STARTS}))
    assert moves(one_sleeps) == (["code-3"], ["chat-3"])
    none_sleeps = fast(candidates(members, awake, facts={f"chat-{n}": STARTS for n in (1, 2, 3)}))
    assert moves(none_sleeps) == (["code-1"], ["chat-1"])
    assert "chat-1 has to start up" in none_sleeps.reason


def test_no_cold_start_while_a_lost_replica_starts_again_by_itself():
    """After a restart of the whole fleet nobody takes from those that came up first."""
    facts = {"chat-0": STARTS, "chat-1": STARTS}
    members = [member("chat", 0.0), member("code", 4.0)]
    verdict = fast(candidates(members, {"chat-0", "code-1", "code-2"}, gpus=3, facts={**facts, "chat-2": STARTS}))
    assert moves(verdict) is None
    assert "chat-0 starts already" in next(item.reason for item in verdict.candidates if item.donor == "code")
    warm = fast(candidates(members, {"chat-0", "code-1", "code-2"}, gpus=3, facts=facts))
    assert moves(warm) == (["code-2"], ["chat-2"])


def test_a_server_that_waits_for_another_gpu_too_is_not_in_the_way():
    """big-2 needs GPUs 2 and 3, and code-2 stays: GPU 3 is idle. big-0 waits likewise while chat-0 stays."""
    members = [member("chat", 0.4, high=4), member("code", 4.0), member("big", 3.0, idle=True, low=0)]
    sizes = {"big": 2}
    idle = candidates(members, {"chat-0", "code-1", "code-2"}, sizes=sizes, facts={"big-2": STARTS})
    assert moves(fast(idle)) == ([], ["chat-3"])
    full = candidates(members, {"chat-0", "code-1", "code-2", "code-3"}, sizes=sizes, facts={"big-0": STARTS})
    verdict = fast(full)
    assert moves(verdict) == (["code-1"], ["chat-1"])
    assert "waiting" not in verdict.reason


@pytest.mark.parametrize("state", [LifeCycle.STARTING, LifeCycle.FAILED, LifeCycle.UNKNOWN])
def test_a_starting_server_beside_one_that_does_not_serve_may_be_awake(state):
    facts = {"code-1": (state, None), "rest-1": STARTS}
    members = [member("chat", 0.4), member("code", 4.0, low=0), member("rest", 3.0, idle=True, low=0)]
    verdict = fast(candidates(members, {"chat-0", "code-1"}, gpus=2, facts=facts))
    assert moves(verdict) is None
    left = {item.donor: item.reason for item in verdict.candidates}
    assert left["code"] == "waiting server rest-1 starts on its GPUs"


def test_idle_gpus_on_which_a_server_starts_are_not_idle():
    members = [member("chat", 0.4), member("rest", 3.0, idle=True, low=0)]
    verdict = fast(candidates(members, {"chat-0"}, gpus=2, facts={"rest-1": STARTS}))
    assert moves(verdict) is None
    assert [item.reason for item in verdict.candidates] == ["waiting server rest-1 starts on its GPUs"]


def test_every_pair_is_a_candidate_with_its_reason():
    members = [member("chat", 0.4), member("code", 4.0), member("rest", 3.0), member("slow", 5.0)]
    awake = {"chat-0", "code-1", "code-2", "rest-3", "rest-4", "slow-5", "slow-6"}
    facts = {"chat-3": (LifeCycle.FAILED, None), "chat-4": (LifeCycle.UNKNOWN, None)}
    verdict = fast(candidates(members, awake, gpus=7, facts=facts, barred=["slow-5", "chat-6"]))
    assert {item.donor: (item.taken, item.reason) for item in verdict.candidates} == {
        "": (False, "no idle GPUs for a sleeper of it"),
        "code": (True, "a donor makes room; code keeps Z 1.41; chat goes from Z 0.40 to 1.13"),
        "rest": (False, "chat-3 is failed"),
        "slow": (False, "slow-5 is being repaired, or its last transition failed"),
    }
    gentler = fast(candidates(members[:3], {"chat-0", "code-1", "code-2", "rest-3", "rest-4"}, gpus=5))
    assert [item.reason for item in gentler.candidates if item.donor == "rest"] == ["another donor is the gentler one"]


def test_barred_replicas_are_left_alone():
    members = [member("chat", 0.4), member("code", 4.0)]
    awake = {"chat-0", "code-1", "code-2", "code-3"}
    assert moves(fast(candidates(members, awake, barred=["chat-1", "code-2"]))) == (["code-3"], ["chat-3"])


def test_an_idle_donor_with_floor_zero_may_give_its_last():
    members = [member("chat", 0.4), member("code", 3.0, idle=True, low=0)]
    assert moves(fast(candidates(members, {"chat-0", "chat-1", "chat-2", "code-3"}))) == (["code-3"], ["chat-3"])


def test_an_unfit_share_is_not_rescued_by_its_z():
    members = [member("chat", 0.2, fit=False), member("code", 4.0)]
    assert moves(fast(candidates(members, {"chat-0", "code-1", "code-2", "code-3"}))) is None


def test_the_documented_example():
    """docs/token-service-share.md, "Worked example": figures and move."""
    profiles = {"chat": (900, 40, 10, 28), "code": (640, 8, 0, 23), "reason": (270, 6, 0, 30)}
    z = {name: tps / (running + 8 * waiting) / theta for name, (tps, running, waiting, theta) in profiles.items()}
    assert {name: round(value, 2) for name, value in z.items()} == {"chat": 0.27, "code": 3.48, "reason": 1.5}
    assert round(power_z(z["code"], replicas=3, after=2), 2) == 1.89
    members = [member(name, value) for name, value in z.items()]
    awake = {"chat-0", "chat-1", "chat-2", "code-3", "code-4", "code-5", "reason-6"}
    facts = {"code-3": (LifeCycle.ACTIVE, 3), "code-4": (LifeCycle.ACTIVE, 1), "code-5": (LifeCycle.ACTIVE, 4)}
    verdict = fast(candidates(members, awake, gpus=8, sizes={"reason": 2}, facts=facts))
    assert moves(verdict) == (["code-4"], ["chat-4"])
    assert {item.donor: item.taken for item in verdict.candidates} == {"": False, "code": True, "reason": False}


def test_case_20_a_sleeping_service_is_woken_by_held_requests():
    """Nobody of it is awake, so its servers say nothing: Z = 0 by the requests that gateways hold."""
    members = [member("chat", 0.0, low=0), member("code", 1.4)]
    assert moves(fast(candidates(members, {"code-0", "code-1"}))) == ([], ["chat-2"])
    full = fast(candidates(members, {"code-0", "code-1", "code-2", "code-3"}))
    assert moves(full) == (["code-0"], ["chat-0"])
