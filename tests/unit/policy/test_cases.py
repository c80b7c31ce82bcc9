"""Cases from the field that end in the policy engine, each named by its number. Others are tests beside what they test.

Every case stands for its kind: the inputs are those of the fault that shipped, the answer is the right one.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from policy_engine.core.pool.arbiter import arbitrate
from policy_engine.core.pool.decide import PoolState, UnderWay, bar, decide_pool, settle
from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.guards import GuardState
from policy_engine.core.pool.pool_candidates import MemberState, PoolCandidates, ReplicaFacts
from policy_engine.core.pool.tss import Share
from policy_engine.core.shared.draft import Transition
from policy_engine.core.shared.vocabulary import MemberKey, Region, Rule
from tests.unit.policy.initial_layouts import born
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import LifeCycle, Quality, Role

NOW_S = 1_700_000_000.0
CHAT = MemberKey("chat", Role.COLOCATED)
CODE = MemberKey("code", Role.COLOCATED)


def policy(name: str, *, low: int = 0, guards: Mapping[str, object] | None = None) -> ServicePolicy:
    spec: dict[str, object] = {
        "model": "m",
        "slo": {"ttftS": 1, "tpotS": 1},
        "roles": [{"role": "colocated", "minReplicas": low, "maxReplicas": 8, "gpusPerReplica": 1}],
        "tokenServiceShare": {"thetaTps": 20},
    }
    if guards:
        spec["guards"] = guards
    return ServicePolicy.model_validate({"metadata": {"name": name}, "spec": spec})


def shared_pool(gpus: int, chat: int, code: int) -> Pool:
    return Pool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "n", "gpuIndices": list(range(gpus))}],
                "members": [{"service": "chat", "initialAwake": chat}, {"service": "code", "initialAwake": code}],
            },
        }
    )


def view(*, tps: float = 0.0, running: float = 0.0, waiting: float = 0.0, ttft_s: float | None = None) -> RoleSignals:
    def known(value: float | None) -> Measurement:
        return Measurement(value, Quality.OK) if value is not None else Measurement(None, Quality.MISSING)

    return RoleSignals(
        role=Role.COLOCATED,
        window_end_s=NOW_S,
        prefill_tps=known(0.0),
        decode_tps=known(tps),
        request_rps=known(running),
        running=known(running),
        waiting=known(waiting),
        ttft_p95_s=known(ttft_s),
    )


def test_case_14_a_half_applied_rebalance_leaves_the_awake_set_within_the_budget() -> None:
    """4P4D → 5P3D on eight GPUs: the release was carried out, the wake was refused, and nothing came back."""
    roles = {"prefill": MemberKey("svc", Role.PREFILL), "decode": MemberKey("svc", Role.DECODE)}
    overlay = tuple(
        OverlayReplica(f"{name}-{gpu}", key, "m", "", "n", (gpu,)) for name, key in roles.items() for gpu in range(8)
    )
    before = tuple(sorted([f"prefill-{gpu}" for gpu in range(4)] + [f"decode-{gpu}" for gpu in range(4, 8)]))
    candidates = PoolCandidates(
        overlay, before, (), tuple(ReplicaFacts(n, LifeCycle.ACTIVE, True, 0) for n in before), 20.0
    )
    release = next(candidates.change(item) for item in overlay if item.replica == "decode-4")
    wake = next(candidates.change(item) for item in overlay if item.replica == "prefill-4")
    transition = Transition(releases=(release,), wakes=(wake,))
    desired = tuple(sorted({*before, "prefill-4"} - {"decode-4"}))
    ends = {
        "neither is awake": (frozenset(before) - {"decode-4"}, {*before} - {"decode-4"}),
        "compensated": (frozenset(before), {*before}),
        "completed": (frozenset(desired), {*desired}),
        "both claim to be awake": (frozenset({*before, "prefill-4"}), {*before}),
    }
    for name, (awake_now, expected) in ends.items():
        after = settle(overlay, desired, transition, awake_now)
        gpus = [gpu for item in overlay if item.replica in after for gpu in item.gpus]
        assert set(after) == expected, name
        assert len(gpus) == len(set(gpus)) <= 8, name
    barred = bar(PoolState(), ("decode-4", "prefill-4"), NOW_S).barred
    assert all(item.until_s > NOW_S for item in barred), "left alone for a while"
    assert all(math.isfinite(item.until_s) for item in barred), "and not for ever"


def test_case_17_a_restart_at_a_steady_state_moves_no_replica_of_a_pool() -> None:
    """Two seconds of data, nothing remembered."""
    steady = view(tps=150.0, running=3.0)
    given = born(
        shared_pool(7, 4, 3),
        (policy("chat", low=1), policy("code", low=1)),
        now_s=NOW_S,
        views={CHAT: steady, CODE: steady},
    )
    assert len(given.awake) == 7
    for age_s in (0.0, 1.0, 2.0):
        result = decide_pool(replace(given, now_s=NOW_S + age_s))
        assert result.awake == given.awake
        assert result.draft is None
    blind = decide_pool(replace(given, views=()))
    assert blind.awake == given.awake, "no data yet is no reason either"


def test_case_20_from_zero_the_demand_at_the_front_door_wakes_a_service_without_a_window() -> None:
    """Nothing is awake, so no replica exports anything; the gateways hold one request."""
    given = born(shared_pool(2, 0, 1), (policy("chat"), policy("code")), now_s=NOW_S, views={CODE: view()})
    asleep = decide_pool(given)
    assert not any(name.startswith("chat") for name in asleep.awake)
    held = FrontDoor(window_end_s=NOW_S, held=Measurement(1.0, Quality.OK), arrival_rps=Measurement(0.2, Quality.OK))
    woken = decide_pool(replace(given, fronts=(("chat", held),)))
    assert sum(name.startswith("chat") for name in woken.awake) == 1
    assert woken.draft is not None


def test_case_21_the_replica_with_the_long_generation_is_not_the_one_that_is_released() -> None:
    """chat-0 has a stream of two minutes; chat-1 has nothing, and is as good for the receiver."""

    def member(key: MemberKey, z: float, region: Region) -> MemberState:
        return MemberState(key, 0, 8, 0, Share(z, region, False, True, 10.0, None, True, True), GuardState(), None)

    overlay = tuple(
        OverlayReplica(f"{key.service}-{gpu}", key, "m", "", "n", (gpu,)) for key in (CHAT, CODE) for gpu in (0, 1)
    )
    for busy, free in (("chat-0", "chat-1"), ("chat-1", "chat-0")):
        facts = tuple(
            ReplicaFacts(
                item.replica,
                LifeCycle.ACTIVE if item.member == CHAT else LifeCycle.SLEEPING,
                item.member == CHAT,
                1 if item.replica == busy else 0,
            )
            for item in overlay
        )
        members = (member(CHAT, 9.0, Region.SURPLUS), member(CODE, 0.2, Region.CRITICAL))
        candidates = PoolCandidates(overlay, ("chat-0", "chat-1"), members, facts, 20.0)
        verdict = arbitrate(candidates, fast_due=True, slow_due=False)
        assert verdict.transition is not None
        assert [change.replica for change in verdict.transition.releases] == [free]


GUARDS = {"ttftP95S": {"soft": 1.0, "hard": 3.0}}
SUFFERING = {
    "a rebalance, beyond the soft limit": (Rule.REBALANCE, 1.5, LifeCycle.DRAINING, True),
    "a rebalance, within it": (Rule.REBALANCE, 0.9, LifeCycle.DRAINING, False),
    "a move to level loads, beyond the soft limit": (Rule.LEVEL_LOAD, 1.5, LifeCycle.DRAINING, True),
    "a move for latency, beyond the soft limit": (Rule.LEVEL_LATENCY, 1.5, LifeCycle.DRAINING, True),
    "a rescue, beyond the soft limit": (Rule.RESCUE_CRITICAL, 1.5, LifeCycle.DRAINING, False),
    "a rescue, beyond the hard limit": (Rule.RESCUE_CRITICAL, 3.5, LifeCycle.DRAINING, True),
    "it sleeps already": (Rule.REBALANCE, 1.5, LifeCycle.SLEEPING, False),
}


@pytest.mark.parametrize("case", sorted(SUFFERING))
def test_a_release_is_given_back_while_it_drains_when_the_donors_latency_passes_its_guard(case: str) -> None:
    rule, ttft_s, life_cycle, given_back = SUFFERING[case]
    policies = (policy("chat", low=1, guards=GUARDS), policy("code", low=1))
    views = {CHAT: view(tps=150.0, running=3.0, ttft_s=ttft_s), CODE: view(tps=10.0, running=5.0)}
    given = born(shared_pool(4, 2, 2), policies, now_s=NOW_S, views=views)
    donor = next(name for name in given.awake if name.startswith("chat"))
    wake = next(item.replica for item in given.overlay if item.member == CODE and item.replica not in given.awake)
    facts = tuple(
        replace(item, life_cycle=life_cycle, routable=False) if item.replica == donor else item
        for item in given.replicas
    )
    operation = UnderWay("o-1", rule, (CODE,), (CHAT,), (donor, wake))
    result = decide_pool(replace(given, replicas=facts, operations=(operation,)))
    assert bool(result.preempt) is given_back, result.preempt
    if given_back:
        assert result.preempt_operation == "o-1"
        assert result.preempt.startswith("chat, which gives: TTFT p95")
    assert result.awake == given.awake
