"""Loops of 1 and 2 s on windows of 5 s: capacity goes where it is needed and then stays there.

The plant is a fluid: tokens arrive, replicas generate them, what is left over queues. Windows average the last five
seconds, so for a while after a move they show what was before it. A transition takes two seconds.
"""

import random
from collections import deque
from dataclasses import replace

import pytest

from policy_engine.core.pool.decide import PoolState, UnderWay, decide_pool
from policy_engine.core.shared.vocabulary import MemberKey
from tests.unit.policy.initial_layouts import born, facts
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.measurement import ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Role

CAPACITY_TPS, TPOT_S, BASE_TPOT_S, OUTPUT_TOKENS, THETA_TPS = 2000.0, 0.05, 0.0125, 200.0, 24.0
MOVE_S, WINDOW_S = 2, 5


class Service:
    """One service of the fluid."""

    def __init__(self, work):
        self.work, self.backlog = work, 0.0
        self.samples = deque(maxlen=WINDOW_S)

    def second(self, replicas, factor):
        """One second of arrivals, `work` replicas' worth on average."""
        arriving = self.work * factor * CAPACITY_TPS
        served = min(replicas * CAPACITY_TPS, arriving + self.backlog)
        self.backlog += arriving - served
        use = served / (replicas * CAPACITY_TPS) if replicas else 1.0
        # Processor sharing: a token takes the base time alone, and the target at full use.
        token_s = BASE_TPOT_S / (1 - use * (1 - BASE_TPOT_S / TPOT_S))
        self.samples.append((served, served * token_s, self.backlog / OUTPUT_TOKENS, arriving))

    def mean(self, column):
        return sum(sample[column] for sample in self.samples) / len(self.samples)


def policy(name):
    share = {"thetaTps": THETA_TPS, "capacityPrefillTps": 1e6, "capacityDecodeTps": CAPACITY_TPS}
    return ServicePolicy.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "model": "m",
                "slo": {"ttftS": 1, "tpotS": TPOT_S},
                "roles": [{"role": "colocated", "minReplicas": 1, "maxReplicas": 8}],
                "tokenServiceShare": {**share, "baseTpotS": BASE_TPOT_S, "smoothing": 1.0},
            },
        }
    )


def signals(service, now_s):
    served, running, waiting, arriving = (service.mean(column) for column in range(4))
    view = RoleSignals(
        role=Role.COLOCATED,
        window_end_s=now_s,
        prefill_tps=ok(0.0),
        decode_tps=ok(served),
        request_rps=ok(served / OUTPUT_TOKENS),
        running=ok(running),
        waiting=ok(waiting),
    )
    front = FrontDoor(now_s, ok(0.0), ok(arriving / OUTPUT_TOKENS), ok(0.0), ok(arriving))
    return view, front


def run(works, awake, seconds, *, rules, noise=0.0, seed=1):
    """Moves by the second they were decided in, and the counts at the end. A work may be a function of the second."""
    pool = Pool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "n", "gpuIndices": list(range(sum(awake.values())))}],
                "members": [{"service": name, "initialAwake": count} for name, count in awake.items()],
                "rescueIntervalS": 1,
                "rebalanceIntervalS": 2,
                "residenceS": 10,
                "rules": rules,
            },
        }
    )
    given = born(pool, tuple(policy(name) for name in works), now_s=1000.0)
    services = {name: Service(work) for name, work in works.items()}
    up, desired, state, moving, moves = set(given.awake), given.awake, PoolState(), None, []
    rng = random.Random(seed)
    for second in range(seconds):
        now_s = 1000.0 + second
        if moving is not None and second >= moving[0]:
            up, moving = set(desired), None
        for name, service in services.items():
            count = sum(replica.startswith(f"{name}-") for replica in up)
            if callable(works[name]):
                service.work = works[name](second)
            service.second(count, 1 + rng.uniform(-noise, noise))
        seen = {name: signals(service, now_s) for name, service in services.items()}
        tick = replace(
            given,
            now_s=now_s,
            awake=desired,
            replicas=facts(given.overlay, up),
            views=tuple((MemberKey(name, Role.COLOCATED), view) for name, (view, _) in seen.items()),
            fronts=tuple((name, front) for name, (_, front) in seen.items()),
            state=state,
        )
        if moving is not None:
            tick = replace(tick, operations=(UnderWay("op", None, moving[1], (), ()),))
        result = decide_pool(tick)
        state = result.state
        if result.awake != desired:
            moves.append(second)
            released = set(desired) - set(result.awake)
            up -= released
            desired = result.awake
            receivers = {MemberKey(item.service, item.role) for item in result.draft.transition.wakes}
            moving = (second + MOVE_S, tuple(sorted(receivers)))
    return moves, {name: sum(replica.startswith(f"{name}-") for replica in desired) for name in works}


RULES = {
    "default": {},
    "by load": {"allocation": "load"},
    "by Z alone": {"load": {"enabled": False}, "settleS": WINDOW_S},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_step_is_followed_once_and_no_further(rules):
    moves, counts = run({"chat": 2.4, "code": 1.4}, {"chat": 1, "code": 5}, 240, rules=rules)
    assert counts["chat"] >= 3
    assert counts["code"] >= 2
    assert moves[0] <= 5
    assert len(moves) <= 3
    assert max(moves) < 60


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_noise_moves_little(rules):
    moves, _ = run({"chat": 2.0, "code": 2.0}, {"chat": 3, "code": 3}, 600, rules=rules, noise=0.5)
    assert len(moves) <= 4


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_an_overload_does_not_swing(rules):
    """Six replicas for nine replicas' worth of work: queues grow without end, and nothing helps."""
    moves, counts = run({"chat": 5.0, "code": 4.0}, {"chat": 3, "code": 3}, 300, rules=rules)
    assert len(moves) <= 12
    assert min(counts.values()) >= 2


def test_by_z_alone_a_fast_loop_swings_unless_it_lets_windows_settle():
    """Why `settleS` is there: each window still shows the need from before the wake, so the loop gives again."""
    hasty_rules = {"load": {"enabled": False}, "settleS": 0}
    hasty, _ = run({"chat": 2.4, "code": 1.4}, {"chat": 1, "code": 5}, 240, rules=hasty_rules)
    settled, _ = run({"chat": 2.4, "code": 1.4}, {"chat": 1, "code": 5}, 240, rules=RULES["by Z alone"])
    assert len(hasty) > 10 * len(settled)


def on_and_off(second):
    """Two seconds in forty."""
    return 7.0 if second % 40 < 2 else 0.2


def test_bursts_that_are_over_before_a_rescue_helps_are_let_be():
    """`chat` keeps up with them by itself; each rescue comes when its burst is over, and is taken back."""
    hasty, _ = run({"chat": on_and_off, "code": 1.2}, {"chat": 2, "code": 4}, 600, rules={"load": {"patienceS": 0}})
    patient, _ = run({"chat": on_and_off, "code": 1.2}, {"chat": 2, "code": 4}, 600, rules={})
    assert len([second for second in patient if second >= 200]) * 2 < len([second for second in hasty if second >= 200])
