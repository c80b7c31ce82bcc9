"""Local guards: every limit, and what they are read from."""

import pytest

from policy_engine.core.pool.guards import GuardState, QueueMemory, check_guards, lost_ratio, remember_queue
from trimtab.config.specs import Guards
from trimtab.domain.measurement import Measurement, missing, ok
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

LIMITS = {
    "ttftP95S": ("ttft_p95_s", 2.0),
    "tpotP95S": ("tpot_p95_s", 0.075),
    "e2eP95S": ("e2e_p95_s", 20.0),
    "kvUsageRatio": ("kv_usage_ratio", 0.4),
    "preemptionRps": ("preemption_rps", 0.5),
}


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_each_limit_is_passed_beyond_it_alone(name):
    field, limit = LIMITS[name]
    guards = Guards.model_validate({name: {"soft": limit, "hard": 2 * limit}})

    def check(value):
        return check_guards(guards, RoleSignals(role=Role.COLOCATED, **{field: value}))

    assert check(ok(limit)) == GuardState()
    soft = check(ok(1.5 * limit))
    assert soft.soft
    assert not soft.hard
    hard = check(ok(2.5 * limit))
    assert hard.soft
    assert "beyond its hard limit" in hard.hard
    assert check(missing()) == GuardState()
    assert check(Measurement(9 * limit, Quality.STALE)) == GuardState()


def view(waiting, end_s):
    typed = waiting if isinstance(waiting, Measurement) else ok(waiting)
    return RoleSignals(role=Role.COLOCATED, window_end_s=end_s, waiting=typed)


def front(held, end_s=100.0):
    return FrontDoor(window_end_s=end_s, held=ok(held))


def test_a_queue_grows_by_what_waits_in_servers_and_at_gateways():
    guards = Guards.model_validate({"queueGrowthRps": {"soft": 2, "hard": 5}})
    memory = remember_queue(QueueMemory(), view(10, 100.0), front(0), routable=1)
    assert not memory.growth.usable, "one window says nothing of growth"
    memory = remember_queue(memory, view(14, 102.0), front(2), routable=1)
    assert memory.growth_rps == pytest.approx(3.0)
    assert remember_queue(memory, view(99, 102.0), front(9), routable=1) == memory, "the same window"
    state = check_guards(guards, view(14, 102.0), queue_growth=memory.growth)
    assert state.soft == "queue growth 3/s is beyond its soft limit of 2/s"
    memory = remember_queue(memory, view(30, 103.0), front(0), routable=1)
    assert check_guards(guards, view(30, 103.0), queue_growth=memory.growth).hard
    memory = remember_queue(memory, view(1, 104.0), front(0), routable=1)
    assert memory.growth.number(9.0) == 0.0, "a queue that shrinks does not grow"


def test_a_queue_that_cannot_be_read_is_forgotten():
    memory = remember_queue(QueueMemory(), view(10, 100.0), front(0), routable=1)
    assert remember_queue(memory, view(missing(), 101.0), front(0), routable=1) == QueueMemory()
    asleep = remember_queue(QueueMemory(), view(500, 100.0), front(3, 100.0), routable=0)
    assert asleep.queued == 3, "sleepers' gauges are frozen"


@pytest.mark.parametrize(("awake", "lost", "hard"), [(4, 0, False), (4, 1, False), (4, 2, True), (0, 0, False)])
def test_health_is_the_share_of_replicas_that_serve(awake, lost, hard):
    guards = Guards.model_validate({"lostRatio": {"soft": 0.2, "hard": 0.4}})
    state = check_guards(guards, RoleSignals(role=Role.COLOCATED), lost=lost_ratio(awake=awake, lost=lost))
    assert bool(state.hard) is hard
    assert bool(state.soft) is (lost > 0)
