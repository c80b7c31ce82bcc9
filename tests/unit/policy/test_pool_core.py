"""A pool's tick as a whole: what is recorded when nothing moves."""

from dataclasses import replace

from policy_engine.core.pool.decide import PoolInput, PoolState, decide_pool
from policy_engine.core.shared.vocabulary import DecisionKind
from tests.unit.policy.initial_layouts import born, facts
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_signals import RoleSignals
from trimtab.domain.vocabulary import Quality

START_S = 1_700_000_000.0


def member_policy(name: str, low: int) -> ServicePolicy:
    return ServicePolicy.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "model": "m",
                "slo": {"ttftS": 1, "tpotS": 1},
                "roles": [{"role": "colocated", "minReplicas": low, "maxReplicas": 4, "gpusPerReplica": 1}],
                "tokenServiceShare": {"thetaTps": 20},
            },
        }
    )


def stuck_pool() -> PoolInput:
    """Two GPUs, one replica awake of each service; the others have failed, so nothing could be woken."""
    pool = Pool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "n", "gpuIndices": [0, 1]}],
                "members": [{"service": "chat", "initialAwake": 1}, {"service": "code", "initialAwake": 1}],
                "rescueIntervalS": 1,
                "rebalanceIntervalS": 3600,
            },
        }
    )
    policies = (member_policy("chat", 1), member_policy("code", 1))
    given = born(pool, policies, now_s=START_S)
    failed = {item.replica for item in given.overlay}.difference(given.awake)
    return replace(given, replicas=facts(given.overlay, given.awake, failed=failed))


def test_an_urgent_event_that_nothing_can_serve_is_recorded_once() -> None:
    given = stuck_pool()
    quiet = decide_pool(given)
    assert quiet.draft is None
    raised = replace(
        given, policies=(member_policy("chat", 2), given.policies[1]), state=quiet.state, now_s=START_S + 1
    )
    first = decide_pool(raised)
    assert first.draft is not None
    assert (first.draft.kind, first.draft.clamps) == (DecisionKind.HOLD, ())
    assert first.draft.reason == "chat: 1 awake, the floor is 2, and nothing can serve it"
    assert [(item.donor, item.taken, item.reason.split(" ", 1)[1]) for item in first.draft.candidates] == [
        ("", False, "has no sleeper that could be woken"),
        ("code", False, "is failed"),
    ]
    state = first.state
    for tick in range(2, 200):
        result = decide_pool(replace(raised, state=state, now_s=START_S + tick))
        assert result.draft is None, "told already"
        assert result.holding
        state = result.state
    other = replace(raised, policies=(member_policy("chat", 2), member_policy("code", 2)))
    second = decide_pool(replace(other, state=state, now_s=START_S + 200))
    assert second.draft is not None
    assert "code: 1 awake, the floor is 2" in second.draft.reason
    again = decide_pool(replace(other, state=second.state, now_s=START_S + 300))
    assert again.draft is not None, "unseen for more than a minute, so it is news"


def test_a_tick_without_a_window_shortly_before_the_next_one_does_not_take_its_place() -> None:
    """Windows end at whole seconds, and the loop is to look at each; other news makes ticks at any moment."""
    given = stuck_pool()
    member = given.overlay[0].member

    def tick(at_s: float, window_s: float, state: PoolState) -> PoolState:
        view = RoleSignals(
            role=member.role,
            prefill_tps=Measurement(0.0, Quality.OK),
            decode_tps=Measurement(50.0, Quality.OK),
            running=Measurement(5.0, Quality.OK),
            waiting=Measurement(0.0, Quality.OK),
            window_end_s=START_S + window_s,
        )
        return decide_pool(replace(given, now_s=START_S + at_s, views=((member, view),), state=state)).state

    state = tick(1.03, 1.0, PoolState())
    assert state.fast_at_s == START_S + 1.0, "a round on a window counts from its end"
    early = tick(1.99, 1.0, state)
    assert early.fast_at_s == START_S + 1.0, "nothing new to look at"
    assert tick(2.02, 2.0, early).fast_at_s == START_S + 2.0
    assert tick(1.82, 1.8, state).fast_at_s == START_S + 1.8, "a window that comes early is looked at"
    late = tick(2.9, 2.0, state)
    assert late.fast_at_s == START_S + 2.0
    assert tick(3.02, 3.0, late).fast_at_s == START_S + 3.0, "a tick that came late does not pass over the next window"
    assert tick(2.24, 1.0, state).fast_at_s == START_S + 1.0, "the window that is due may be a little late"
    assert tick(2.26, 1.0, state).fast_at_s == START_S + 2.26, "without it the interval counts"
    silent = tick(9.0, 1.0, state)
    assert tick(9.96, 1.0, silent).fast_at_s == START_S + 9.96, "no windows come any more"


def test_a_loop_slower_than_the_windows_looks_at_one_in_several_however_late_its_ticks_are() -> None:
    given = stuck_pool()
    spec = given.pool.spec.model_copy(update={"rescue_interval_s": 2.0})
    given = replace(given, pool=given.pool.model_copy(update={"spec": spec}))
    member, state, rounds = given.overlay[0].member, PoolState(), set()
    for window in range(1, 10):
        view = RoleSignals(role=member.role, window_end_s=START_S + window)
        now_s = START_S + window + 0.9
        state = decide_pool(replace(given, now_s=now_s, views=((member, view),), state=state)).state
        rounds.add((state.fast_at_s or 0.0) - START_S)
    assert rounds == {1.0, 3.0, 5.0, 7.0, 9.0}


def test_when_demand_began_is_remembered_until_it_ends() -> None:
    given = stuck_pool()
    member, state, began = given.overlay[0].member, PoolState(), []
    for window, running in enumerate((5.0, 5.0, 0.0, 5.0, 5.0, 0.0, 5.0), start=1):
        view = RoleSignals(
            role=member.role,
            prefill_tps=Measurement(0.0, Quality.OK),
            decode_tps=Measurement(10.0 * running, Quality.OK),
            running=Measurement(running, Quality.OK),
            waiting=Measurement(0.0, Quality.OK),
            window_end_s=START_S + window,
        )
        state = decide_pool(replace(given, now_s=START_S + window, views=((member, view),), state=state)).state
        began.append(state.memory(member).began_at_s)
    assert began[:3] == [None, None, None], "it was busy when it was first seen"
    assert began[3:5] == [START_S + 4.0, START_S + 4.0]
    assert began[6] == START_S + 7.0
