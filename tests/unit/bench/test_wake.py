"""The wake bench judges by the slowest steps and by those that brought no wake, and says where their time went; its run
is for a quiet machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench._wake_cells import DRAIN_S, FAST_S, PROFILE, Cell
from bench._wake_timeline import Stage, Timeline, WindowSeen, cpu_waits_s, decisions_of, stages_of, windows_of
from bench.wake import SCRAPE_S, Measured, bars, percentile
from policy_engine.core.pool.decide import PoolInput, PoolState
from policy_engine.core.shared.vocabulary import MemberKey
from policy_engine.shell.replay import encode_input
from simulator.profiles import packaged_profiles
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.role_signals import RoleSignals
from trimtab.domain.vocabulary import Role
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.streams import BoundedStream

SINCE_S = 1_800_000_000.0


def measured(*called_s: float, missed: int = 0) -> Measured:
    steps = [Timeline(cell="c", decided_s=0.5, accepted_s=0.6, called_s=value) for value in called_s]
    return Measured(steps=steps, missed=["no wake"] * missed)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0, 1.0, 2.0], 0.99, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), ([5.0], 0.0, 5.0), (list(range(200)), 0.99, 197)],
)
def test_a_percentile_is_a_value_that_was_seen(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_one_slow_step_in_thirty_and_one_that_brought_no_wake_miss_the_bar() -> None:
    idle_s = SCRAPE_S + FAST_S + 0.1
    donor_s = idle_s + DRAIN_S + 1.87
    good = {"idle": measured(*[1.0] * 29, idle_s), "donor": measured(*[3.0] * 29, donor_s)}
    assert [(bar["name"], bar["bar"], bar["ok"]) for bar in bars(good)] == [
        ("wake_idle_p99_s", round(idle_s, 3), True),
        ("wake_donor_p99_s", round(donor_s, 3), True),
    ]
    slow = {"idle": measured(*[1.0] * 29, idle_s + 0.01), "donor": measured(*[3.0] * 29, missed=1)}
    assert [(bar["value"], bar["ok"]) for bar in bars(slow)] == [(idle_s + 0.01, False), (None, False)]
    assert [bar["ok"] for bar in bars({"idle": measured(), "donor": measured()})] == [False, False]


@pytest.mark.parametrize("kind", ["idle", "donor"])
def test_the_pools_of_a_cell_are_valid_resources_that_leave_a_gpu_to_be_had(kind: str) -> None:
    cell = Cell(kind, 0)
    pool = cell.pool()
    assert isinstance(pool, Pool)
    awake = sum(member.initial_awake for member in pool.spec.members)
    assert pool.spec.budget_gpus - awake == (1 if kind == "idle" else 0)
    for armed in (False, True):
        floors = [one.spec.roles[0] for one in cell.resources(armed=armed) if isinstance(one, ServicePolicy)]
        assert sum(role.min_replicas for role in floors) <= pool.spec.budget_gpus
        assert floors[0].max_replicas == (2 if armed else 1)


def window(ended_s: float, written_s: float, running: float | None) -> WindowSeen:
    return WindowSeen(ended_s=ended_s, written_s=written_s, running=running, waiting=0.0, decode_tps=10.0)


QUIET = window(-0.5, -0.48, 0.0)
STEPS = {
    "decided on the first window that shows it": (
        [QUIET, window(0.5, 0.53, 0.2), window(1.5, 1.53, 5.0)],
        1.57,
        [1.5, 0.03, 0.04],
    ),
    "decided one window too late": ([QUIET, window(0.5, 0.53, 5.0), window(1.5, 1.53, 9.0)], 1.57, [0.5, 0.03, 1.04]),
    "written late": ([QUIET, window(0.5, 1.4, 5.0)], 1.57, [0.5, 0.9, 0.17]),
    "decided without a window that shows it": ([QUIET, window(0.5, 0.53, None)], 0.6, [0.0, 0.0, 0.6]),
    "what was left over from before": ([window(-0.5, -0.4, 7.0), window(0.5, 0.53, 5.0)], 0.6, [0.5, 0.03, 0.07]),
}


@pytest.mark.parametrize("what", STEPS)
def test_the_parts_of_a_step_add_up_and_say_who_was_waited_for(what: str) -> None:
    windows, decided_s, expected = STEPS[what]
    stages = [Stage(kind="release", replica="a", began_s=2.0, ended_s=5.0)]
    step = Timeline(cell="c", decided_s=decided_s, accepted_s=1.8, called_s=5.1, windows=windows, stages=stages)
    parts = step.parts()
    assert [round(parts[name], 6) for name in ("to_window", "to_written", "to_decision")] == expected
    assert sum(parts.values()) == pytest.approx(step.called_s)
    assert step.released_s == 5.0
    times = [float(line.split()[0]) for line in step.lines()[1:]]
    assert times == sorted(times)
    assert len(times) == len(windows) + 5


def test_what_a_release_and_a_wake_take_beyond_the_profile_is_told_apart() -> None:
    sleep_s, wake_s = packaged_profiles()[PROFILE].lifecycle.sleep_s, packaged_profiles()[PROFILE].lifecycle.wake_s
    stages = [
        Stage(kind="release", replica="a", began_s=1.0, ended_s=1.0 + DRAIN_S + sleep_s + 0.2),
        Stage(kind="wake", replica="b", began_s=1.0, ended_s=5.0 + wake_s + 0.1),
    ]
    early = [Stage(kind="release", replica="a", began_s=1.0, ended_s=1.5 + sleep_s)]
    steps = [Timeline(cell="c", decided_s=0.5, accepted_s=1.0, called_s=5.0, stages=one) for one in (stages, early)]
    beyond_s = Measured(steps=steps).beyond_profile_s()
    assert {name: [round(value, 6) for value in values] for name, values in beyond_s.items()} == {
        "release": [0.2],
        "wake": [0.1],
    }


async def test_windows_are_read_with_the_time_at_which_they_were_written(store: Store) -> None:
    history: BoundedStream[collector_pb2.RolePartial] = BoundedStream(
        store, keys.partial_history("chat", "ROLE_COLOCATED"), collector_pb2.RolePartial, maxlen=10
    )
    began_s = time.time()
    partial = collector_pb2.RolePartial(collector="c", service="chat", role=types_pb2.ROLE_COLOCATED)
    partial.reported_replicas.append("chat-0")
    partial.window_end.FromMilliseconds(int(began_s * 1000))
    partial.signals.add(signal=collector_pb2.SIGNAL_RUNNING, sum=4.5, reported=1)
    await history.append(partial)
    (seen,) = await windows_of(store, "chat", since_s=began_s - 1.0, until_s=began_s + 60.0)
    assert (seen.ended_s, seen.running, seen.waiting) == (pytest.approx(1.0, abs=0.002), 4.5, None)
    assert 1.0 <= seen.written_s + 0.002 < 30.0
    assert await windows_of(store, "chat", since_s=began_s + 20.0, until_s=began_s + 60.0) == []


def test_decisions_are_those_of_the_pool_near_the_step_with_the_window_that_they_rest_on() -> None:
    pool = Cell("idle", 0).pool()
    assert isinstance(pool, Pool)
    view = RoleSignals(role=Role.COLOCATED, window_end_s=SINCE_S + 1.0)
    given = PoolInput(
        now_s=SINCE_S + 1.1,
        pool=pool,
        policies=(),
        overlay=(),
        awake=(),
        replicas=(),
        views=((MemberKey("idle-0", Role.COLOCATED), view),),
        fronts=(),
        state=PoolState(),
    )
    records = []
    for subject, at_s in (("pool-idle-0", 1.1), ("pool-idle-0", -60.0), ("pool-idle-1", 1.1), ("pool-idle-0", -1.0)):
        record = decision_pb2.Decision(subject=subject, rule=decision_pb2.RULE_IDLE_GPU, reason="why")
        record.decide_time.FromNanoseconds(int((SINCE_S + at_s) * 1e9))
        record.replay = encode_input(given) if at_s == 1.1 else b""
        records.append(record)
    found = decisions_of(records, "pool-idle-0", "idle-0", since_s=SINCE_S, until_s=SINCE_S + 2.0)
    assert [(one.at_s, one.window_s, one.rule) for one in found] == [(-1.0, None, "idle_gpu"), (1.1, 1.0, "idle_gpu")]


def test_stages_are_the_steps_that_have_begun() -> None:
    operation = actuator_pb2.Operation(operation_id="o")
    for replica, end_s in (("giver-0", 4.0), ("chat-1", None), ("chat-2", None)):
        step = operation.steps.add(kind=actuator_pb2.STEP_KIND_RELEASE, replica=replica)
        if replica != "chat-2":
            step.start_time.FromNanoseconds(int((SINCE_S + 1.0) * 1e9))
        if end_s is not None:
            step.end_time.FromNanoseconds(int((SINCE_S + end_s) * 1e9))
    assert [(one.replica, one.began_s, one.ended_s) for one in stages_of(operation, since_s=SINCE_S)] == [
        ("giver-0", 1.0, 4.0),
        ("chat-1", 1.0, None),
    ]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count how long tasks wait")
def test_the_wait_for_a_cpu_is_read_of_processes_that_live() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = cpu_waits_s({"me": os.getpid(), "gone": gone.pid})
    assert list(found) == ["me"]
    assert 0.0 <= found["me"] < 1e6
